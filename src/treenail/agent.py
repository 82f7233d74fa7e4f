"""The quickest way to run an agent: instructions, tools, and the run that comes of a task.

Everything here is put together from other rooms: a session on a log, a workspace, a turn.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack
from uuid import UUID

from treenail.containment import CancellationToken, ExecutionConfig, ExecutionContext, Limits
from treenail.conversation import (
    CompactionSettings,
    branch_summary,
    enable_inner_message_recording,
    get_inner_messages,
)
from treenail.errors import LeaseHeldError, SessionNotFoundError, UsageError
from treenail.log import Log, MemoryLog, end_owner, owner_process
from treenail.prompt import MarkdownSection, Prompt
from treenail.providers import Provider
from treenail.sandbox import Sandbox
from treenail.state import ExecutionState, ResourceRegistry, Session, entry_at
from treenail.state import opened as opened_item
from treenail.tools import (
    Permissions,
    SessionForked,
    Tool,
    ToolPolicy,
    boundaries,
    diff_calls,
    filesystem_of,
    fork_at,
    listed,
    recover,
    run_blocking,
    wait_for_orphans,
)
from treenail.turns import (
    DEFAULT_RETRY,
    InnerLoop,
    ModelAdapter,
    RetryPolicy,
    TurnResult,
    TurnStarted,
    TurnState,
    Watch,
    ceilings_of,
    contain,
    pasteable,
)
from treenail.workspace import Filesystem, InMemoryFilesystem, WorkspaceDiff, end_other_writer
from treenail.workspace.host import HostFilesystem

Ceilings = Limits | ExecutionConfig | Callable[[Session], ExecutionContext]
"""A run's ceilings: numbers, or a function that makes the containment of its session.

Use a function for a shield, circuit breakers, a loop policy or other prices:
`limits=lambda session: contain(session, Limits(...), pipeline=..., loops=...)`.
"""

Extension = Callable[[InnerLoop], AbstractAsyncContextManager[object]]
"""Makes a context manager around a loop: entered before its turn runs, left when the turn has ended."""


class RunOptions(TypedDict, total=False):
    """Options of `Agent.run`, `arun`, `resume` and `aresume`."""

    provider: Required[Provider]
    """Who makes the model calls; it may differ from the provider that the run began with."""
    workspace: str | Path | Filesystem | None
    """The directory to work in; without one, files live in memory. A stored run remembers its directory."""
    limits: Ceilings | None
    """The run's ceilings. Unless given, a stored run keeps those that it had; `Limits()` lifts them all."""
    permissions: Permissions | None
    """Which tools may run, and which wait for a person."""
    watch: Watch | None
    """Is told what happens while it happens, for display."""
    cancellation: CancellationToken | None
    """Cancels the run from another thread or task."""
    take_over: bool
    """Kill the process that writes this run or its files now, and wait for its end, before anything else."""
    sandbox: Sandbox | None
    """How commands are confined, if `workspace` is a path; a filesystem has a sandbox of its own."""


@dataclass(frozen=True)
class Agent:
    """Instructions and tools under a name.

    `run` works on a task and returns when the turn has ended, one way or another; `resume` continues a
    run after a crash, an interrupt or an answered question, in this process or another. `arun` and `aresume`
    do the same inside an event loop. `output_type` makes the answer a value of that type: a dataclass, a
    pydantic model, or a list of one of them.
    """

    name: str
    instructions: str = "You are a helpful agent."
    tools: Collection[Tool[Any, Any] | Callable[..., Any]] = ()
    """What the model may call. A list keeps its order; a set or a mapping is sorted by name."""
    max_iterations: int = 100
    output_type: Any = None
    policies: Sequence[ToolPolicy] = ()
    """Policies that apply to all tools."""
    feedback: Sequence[Any] = ()
    """Judges that comment on the work in progress: `FeedbackProviderConfig`s."""
    completion: Any = None
    """Decides whether the agent may stop: a `TaskCompletionChecker`."""
    nested: Any = None
    """The ceilings of the judges: a `NestedExecutionConfig`."""
    retry: RetryPolicy | None = DEFAULT_RETRY
    """How failed model calls are retried; None for no retries."""
    compaction: CompactionSettings = field(default_factory=CompactionSettings)
    """When and how a conversation that grows too long is summarised."""
    extensions: Sequence[Extension] = ()
    """Additions that last as long as each run, such as `with_subagents(...)`."""

    def tool_registry(self) -> dict[str, Tool[Any, Any]]:
        """Return the agent's tools by name. Raises `UsageError` if two share one."""
        registry: dict[str, Tool[Any, Any]] = {}
        for made in listed(self.tools):
            if made.name in registry:
                raise UsageError(f"the agent {self.name!r} has two tools named {made.name!r}; rename one")
            registry[made.name] = made
        return registry

    @functools.cached_property
    def prompt(self) -> Prompt[Any]:
        """The agent as a prompt: one section with its instructions and its tools."""
        kind: Any = Prompt
        if self.output_type not in (None, str):
            kind = kind[self.output_type]
        made: Prompt[Any] = kind(
            ns="agents",
            key=re.sub(r"[^a-z0-9._-]+", "-", self.name.lower()).strip("-._")[:64] or "agent",
            name=self.name,
            sections=[
                # An agent has no placeholders: a dollar sign in its instructions is literal.
                MarkdownSection(
                    "Instructions",
                    template=self.instructions.replace("$", "$$"),
                    tools=tuple(self.tool_registry().values()),
                )
            ],
            policies=tuple(self.policies),
            feedback_providers=tuple(self.feedback),
            task_completion_checker=self.completion,
            nested_execution_config=self.nested,
        )
        return made

    def run(
        self,
        task: str,
        *,
        store: str | Path | Log | None = None,
        run_id: UUID | str | None = None,
        tags: Mapping[str, str] | None = None,
        **options: Unpack[RunOptions],
    ) -> Run:
        """Work on a task until the turn ends. Not for use inside an event loop.

        Without a `store` the run lives in memory; with a path it is durable. With `run_id` the task continues
        an earlier run, which the model remembers. `tags` are stored with a new run.
        """
        return run_blocking(
            lambda: self.arun(task, store=store, run_id=run_id, tags=tags, **options),
            face="Agent.run",
            instead="arun",
        )

    async def arun(
        self,
        task: str,
        *,
        store: str | Path | Log | None = None,
        run_id: UUID | str | None = None,
        tags: Mapping[str, str] | None = None,
        **options: Unpack[RunOptions],
    ) -> Run:
        """Work on a task until the turn ends, inside an event loop. See `run`."""
        loop = self._loop(store, run_id, tags, **options)
        return await self._drive(loop, store, partial(loop.run, task))

    def resume(self, store: str | Path | Log, run_id: UUID | str, **options: Unpack[RunOptions]) -> Run:
        """Resume a run. Not for use inside an event loop.

        Finished tools are not run again; another provider may take over.
        """
        return run_blocking(
            lambda: self.aresume(store, run_id, **options), face="Agent.resume", instead="aresume"
        )

    async def aresume(
        self, store: str | Path | Log, run_id: UUID | str, **options: Unpack[RunOptions]
    ) -> Run:
        """Resume a run, inside an event loop. See `resume`."""
        loop = self._loop(store, run_id, **options)
        return await self._drive(loop, store, loop.resume)

    def _loop(
        self,
        store: str | Path | Log | None,
        run_id: UUID | str | None,
        tags: Mapping[str, str] | None = None,
        *,
        provider: Provider,
        workspace: str | Path | Filesystem | None = None,
        limits: Ceilings | None = None,
        permissions: Permissions | None = None,
        watch: Watch | None = None,
        cancellation: CancellationToken | None = None,
        take_over: bool = False,
        sandbox: Sandbox | None = None,
    ) -> InnerLoop:
        """Open or make the session and its workspace, and make a loop on them."""
        log = open_log(store, must_exist=run_id is not None)
        known = UUID(run_id) if isinstance(run_id, str) else run_id
        if take_over:
            end_other_writers(log, known, workspace)
        if known is None:
            session = Session(log=log, tags={**(tags or {}), "agent": self.name})
        else:
            session = Session.open(log, known)
            enable_inner_message_recording(session)
            workspace = workspace if workspace is not None else workspace_of(session)
            limits = limits if limits is not None else ceilings_of(session)
        state, root = open_state(session, workspace, store, sandbox=sandbox)
        return InnerLoop(
            state=state,
            provider=provider,
            prompt=self.prompt,
            agent=self.name,
            containment=_contained(session, limits),
            permissions=permissions or Permissions(),
            max_iterations=self.max_iterations,
            retry=self.retry,
            compaction=self.compaction,
            watch=watch,
            cancellation=cancellation or CancellationToken(),
            workspace=root,
            adapter=ModelAdapter(provider, retry=self.retry),
        )

    async def _drive(
        self, loop: InnerLoop, store: str | Path | Log | None, run: Callable[[], Awaitable[TurnResult]]
    ) -> Run:
        """Drive the turn, and disarm its limits: a run that has ended must not time out afterwards.

        If the turn raises, the caller gets no run to close, so everything is closed here.
        """
        try:
            async with AsyncExitStack() as extended:
                if loop.containment is not None:
                    extended.callback(loop.containment.close)
                for each in self.extensions:
                    await extended.enter_async_context(each(loop))
                result = await run()
            return Run(result, loop.state, store, loop.prompt.template.structured_output is not None)
        except BaseException:
            close_state(loop.state, store)
            raise


def _contained(session: Session, limits: Ceilings | None) -> ExecutionContext | None:
    if limits is None:
        return None
    return contain(session, limits) if isinstance(limits, Limits | ExecutionConfig) else limits(session)


@dataclass(frozen=True, slots=True)
class RunToolCall:
    """One tool call of a run."""

    call_id: str
    name: str
    success: bool
    _state: ExecutionState = field(repr=False)

    def diff(self) -> WorkspaceDiff:
        """Return what the call changed in the files."""
        return diff_calls(self._state, self.call_id)


@dataclass(slots=True)
class Run:
    """A run that has ended or waits, as its log shows it."""

    result: TurnResult
    execution_state: ExecutionState
    store: str | Path | Log | None = None
    is_typed: bool = False
    """Whether the agent declares an output type."""

    def __repr__(self) -> str:
        # Event loops put the result of a task into its repr: do not render everything that a run holds.
        return f"Run({self.id}, {self.state.value})"

    @property
    def id(self) -> UUID:
        """The id of the run's session."""
        return self.execution_state.session.session_id

    @property
    def state(self) -> TurnState:
        """How the run ended."""
        return self.result.state

    @property
    def text(self) -> str:
        """The text of the agent's answer; empty unless the run is completed."""
        return self.result.text

    @property
    def output(self) -> Any:
        """The agent's answer as its output type, or as text if it has none.

        Until the run is completed this is None, or an empty text for an agent without an output type.
        """
        if self.state is not TurnState.COMPLETED:
            return None if self.is_typed else ""
        return self.result.output

    @property
    def next_actions(self) -> tuple[str, ...]:
        """What a person can do next; commands name the store, so that they can be pasted."""
        return pasteable(self.result.next_actions, self.execution_state.session.log)

    @property
    def tool_calls(self) -> tuple[RunToolCall, ...]:
        """The run's tool calls, in order."""
        session = self.execution_state.session
        return tuple(
            RunToolCall(each.call_id, each.tool_name, each.success, self.execution_state)
            for each in boundaries(session)
        )

    @property
    def messages(self) -> tuple[Any, ...]:
        """The conversation."""
        return get_inner_messages(self.execution_state.session)

    def fork(self, *, before: RunToolCall, workspace: str | Path | None = None) -> ExecutionState:
        """Start over from before a call, in a new session with its own workspace.

        A summary tells the model of the new session what was tried in this one.
        """
        place = None if workspace is None else Path(workspace)
        return fork_at(
            self.execution_state, before.call_id, side="before", workspace=place, tell=branch_summary
        )

    def close(self) -> None:
        """Release the session's lease and the workspace's handles."""
        close_state(self.execution_state, self.store)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def close_state(state: ExecutionState, store: str | Path | Log | None) -> None:
    """Close a run's session and workspace, and the store if the run opened it itself."""
    state.session.close()
    _close_workspace(state)
    if isinstance(store, (str, Path)):
        state.session.log.close()


def _close_workspace(state: ExecutionState) -> None:
    filesystem = filesystem_of(state)
    if isinstance(filesystem, HostFilesystem):
        filesystem.close()


def end_other_writers(
    log: Log, run_id: UUID | None, workspace: str | Path | Filesystem | None = None
) -> None:
    """Kill the processes that write a run and the files of its workspace, and wait for their end.

    That comes before anything is written to the log: a process that is stopped may keep it locked. Raises
    `LeaseHeldError` or `WorkspaceBusyError` if a process cannot be ended from here.
    """
    if run_id is not None:
        _end_writer_of(log, run_id)
        if workspace is None:
            with closing(Session.open(log, run_id, read_only=True)) as session:
                workspace = workspace_of(session)
    beside = getattr(log, "path", None)
    if isinstance(workspace, (str, Path)) and isinstance(beside, (str, Path)):
        end_other_writer(workspace_store(Path(beside).resolve()), workspace)
        wait_for_orphans(Path(workspace))


def _end_writer_of(log: Log, run_id: UUID) -> None:
    owner = log.info(run_id).owner
    if owner is None or owner_process(owner) in (None, os.getpid()):
        return  # Opening the run says who writes it, if anybody does.
    try:
        is_gone = end_owner(owner)
    except OSError as error:
        raise LeaseHeldError(
            f"process {owner_process(owner)} writes this run and could not be ended ({error.strerror})",
            owner=owner,
        ) from error
    if not is_gone:
        raise LeaseHeldError(f"process {owner_process(owner)} writes this run and does not end", owner=owner)


@contextmanager
def opened(
    store: str | Path, run_id: UUID, *, read_only: bool = True, take_over: bool = False
) -> Iterator[Session]:
    """Open a stored session, read-only by default; with `take_over`, end the processes that write it."""
    with closing(open_log(store, must_exist=True)) as log:
        if take_over:
            end_other_writers(log, run_id)
        with closing(Session.open(log, run_id, read_only=read_only)) as session:
            enable_inner_message_recording(session)
            yield session


@contextmanager
def reopened(
    store: str | Path,
    run_id: UUID,
    *,
    workspace: str | Path | None = None,
    take_over: bool = False,
) -> Iterator[ExecutionState]:
    """Open a stored run with its workspace, to roll it back, fork it or answer a hold.

    Changes of calls that a crash interrupted are rolled back first. Raises `LeaseHeldError` while another
    process writes the run, and `WorkspaceBusyError` while another one writes its files; with `take_over`,
    that process is killed first.
    """
    with opened(store, run_id, read_only=False, take_over=take_over) as session:
        place = workspace if workspace is not None else workspace_of(session)
        state, _ = open_state(session, place, store)
        try:
            recover(state)
            yield state
        finally:
            _close_workspace(state)


def workspace_line(run_id: UUID) -> str:
    """Return the name of a run's history in the store of its workspace."""
    return f"session-{run_id}"


def workspace_of(session: Session) -> str | None:
    """Return the directory that a run works in, according to its log; None for a workspace in memory."""
    newest: tuple[int, TurnStarted | SessionForked] | None = None
    for kind in (TurnStarted, SessionForked):
        known = session[kind].view()
        if len(known):
            kept, origin = entry_at(known, -1)
            # The later event wins; an event out of a snapshot counts where the snapshot was restored.
            if newest is None or abs(origin) > newest[0]:
                newest = (abs(origin), opened_item(kept))
    return None if newest is None else newest[1].workspace


def workspace_store(store: Path) -> Path:
    """Return the directory beside a store that holds the workspaces' stored files."""
    return store.with_name(store.name + ".files")


def open_log(store: str | Path | Log | None, *, must_exist: bool = False) -> Log:
    """Open a store: None is a log in memory, a path is SQLite, and a log is returned as it is."""
    if store is None:
        return MemoryLog()
    if isinstance(store, (str, Path)):
        if must_exist and not Path(store).exists():
            raise SessionNotFoundError(f"there is no store at {store}; check the path")
        # Imported here so that `import treenail` does not load the driver.
        from treenail.log.sqlite import SqliteLog

        return SqliteLog(store)
    return store


def open_state(
    session: Session,
    workspace: str | Path | Filesystem | None,
    store: str | Path | Log | None,
    *,
    sandbox: Sandbox | None = None,
) -> tuple[ExecutionState, str | None]:
    """Combine a session with its workspace; return the state, and the workspace's directory if it has one."""
    filesystem: Filesystem
    root: str | None = None
    if workspace is None:
        filesystem = InMemoryFilesystem()
    elif isinstance(workspace, (str, Path)):
        place = Path(workspace).resolve()
        root = str(place)
        # Files are stored beside the log's own file, whether the caller passed a path or an open log: a run
        # that began with one can be resumed with the other.
        kept_in = store if isinstance(store, (str, Path)) else getattr(store, "path", None)
        beside = Path(kept_in).resolve() if isinstance(kept_in, (str, Path)) else None
        filesystem = HostFilesystem(
            place,
            store=None if beside is None else workspace_store(beside),
            line=workspace_line(session.session_id),
            exclude=() if beside is None else _own_files(place, beside),
            sandbox=(sandbox or Sandbox()).hiding(() if beside is None else _files_of(beside)),
        )
    else:
        if sandbox is not None:
            raise UsageError(
                "the workspace has a sandbox of its own; pass it there: HostFilesystem(sandbox=...)"
            )
        filesystem = workspace
    resources = ResourceRegistry.build({Filesystem: filesystem})
    return ExecutionState(session=session, resources=resources, clock=session.clock), root


def _own_files(root: Path, store: Path) -> tuple[str, ...]:
    """Return the run's store if it lies in the workspace: a rollback must never restore an old log."""
    if not store.is_relative_to(root):
        return ()
    inside = store.relative_to(root).as_posix()
    return tuple(f"/{inside}{ending}" for ending in (*_ENDINGS, ".files/"))


_ENDINGS = ("", "-wal", "-shm", "-journal")
"""The endings of the names of a store's files."""


def _files_of(store: Path) -> list[Path]:
    """Return the files of a run's store: its commands do not see them."""
    return [store.with_name(store.name + ending) for ending in (*_ENDINGS, ".files")]
