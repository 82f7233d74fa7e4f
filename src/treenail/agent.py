"""The short way in: an agent with instructions and tools, and what became of a run.

Everything here is made of the rooms below: a session on a log, a workspace, a turn.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio

from treenail.containment import CancellationToken, ExecutionConfig, ExecutionContext, Limits
from treenail.conversation.branches import branch_summary
from treenail.conversation.compaction import CompactionSettings
from treenail.conversation.messages import enable_inner_message_recording, get_inner_messages
from treenail.errors import SessionNotFoundError, UsageError
from treenail.log.base import Log
from treenail.log.memory import MemoryLog
from treenail.prompt.sections import MarkdownSection
from treenail.prompt.template import Prompt
from treenail.providers.base import Provider
from treenail.state.execution import ExecutionState
from treenail.state.resources import ResourceRegistry
from treenail.state.session import Session
from treenail.state.slices import entry_at
from treenail.state.slices import opened as opened_item
from treenail.tools.boundaries import boundaries, diff_calls, fork_at, recover
from treenail.tools.context import filesystem_of
from treenail.tools.event_loop import refuse_in_event_loop
from treenail.tools.events import SessionForked
from treenail.tools.policies import Permissions, ToolPolicy
from treenail.tools.tool import Tool
from treenail.turns.adapter import DEFAULT_RETRY, ModelAdapter
from treenail.turns.display import Watch
from treenail.turns.ledger import ceilings_of, contain
from treenail.turns.retries import RetryPolicy
from treenail.turns.states import TurnStarted, TurnState, pasteable
from treenail.turns.turn import InnerLoop, TurnResult
from treenail.workspace.base import Filesystem, WorkspaceDiff
from treenail.workspace.host import HostFilesystem
from treenail.workspace.memory import InMemoryFilesystem

Ceilings = Limits | ExecutionConfig | Callable[[Session], ExecutionContext]
"""What a run may use up: numbers, or a function that puts its session under a containment of its own.

Such a function is where a shield, circuit breakers, a loop policy or other prices come in:
`limits=lambda session: contain(session, Limits(...), pipeline=..., loops=...)`.
"""

Extension = Callable[[InnerLoop], AbstractAsyncContextManager[object]]
"""Is entered with a loop before its turn runs, and left when the turn has ended."""


@dataclass(frozen=True)
class Agent:
    """Instructions and tools under a name.

    `run` takes up a task and returns when the turn has ended, one way or another; `resume` takes up
    a run again after a crash, an interrupt or an answered question, in this process or another. `arun`
    and `aresume` do the same inside an event loop. `output_type` makes the answer a value of that type:
    a dataclass, a pydantic model, or a list of one of them.
    """

    name: str
    instructions: str = "You are a helpful agent."
    tools: Sequence[Tool[Any, Any] | Callable[..., Any]] = ()
    max_iterations: int = 100
    output_type: Any = None
    policies: Sequence[ToolPolicy] = ()
    """Rules for all tools."""
    feedback: Sequence[Any] = ()
    """Who looks at the work while it goes on: `FeedbackProviderConfig`s."""
    completion: Any = None
    """Who is asked before the agent may stop: a `TaskCompletionChecker`."""
    nested: Any = None
    """What the judges may use up: a `NestedExecutionConfig`."""
    retry: RetryPolicy | None = DEFAULT_RETRY
    """How failed model calls are tried again; None for not at all."""
    compaction: CompactionSettings = field(default_factory=CompactionSettings)
    """When a conversation that grows too long is summarised, and how."""
    extensions: Sequence[Extension] = ()
    """What the agent is given for the length of each run, such as `with_subagents(...)`."""

    def tool_registry(self) -> dict[str, Tool[Any, Any]]:
        """Return the agent's tools by name. Raises `UsageError` if two share one."""
        registry: dict[str, Tool[Any, Any]] = {}
        for each in self.tools:
            made = each if isinstance(each, Tool) else Tool.wrap(each)
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
                # A dollar sign in instructions is a dollar sign: an agent has no placeholders.
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
        provider: Provider,
        workspace: str | Path | Filesystem | None = None,
        limits: Ceilings | None = None,
        store: str | Path | Log | None = None,
        permissions: Permissions | None = None,
        watch: Watch | None = None,
        cancellation: CancellationToken | None = None,
        run_id: UUID | str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Run:
        """Take up a task. Without a `store` the run lives in memory; with a path it is durable.

        With `run_id` it is the next task of an earlier run, which the model remembers; without `limits` the
        ceilings that the run had hold on. `tags` are kept with a new run.
        """
        # Before anything is opened: a run that cannot begin must not hold a store's lease.
        refuse_in_event_loop("Agent.run", "arun")
        started = self._begin(
            provider, workspace, limits, store, permissions, watch, cancellation, run_id=run_id, tags=tags
        )
        return started.to_its_end(started.loop.run, task)

    async def arun(
        self,
        task: str,
        *,
        provider: Provider,
        workspace: str | Path | Filesystem | None = None,
        limits: Ceilings | None = None,
        store: str | Path | Log | None = None,
        permissions: Permissions | None = None,
        watch: Watch | None = None,
        cancellation: CancellationToken | None = None,
        run_id: UUID | str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Run:
        """Take up a task, inside an event loop."""
        started = self._begin(
            provider, workspace, limits, store, permissions, watch, cancellation, run_id=run_id, tags=tags
        )
        return await started.go(started.loop.run, task)

    def resume(
        self,
        store: str | Path | Log,
        run_id: UUID | str,
        *,
        provider: Provider,
        workspace: str | Path | Filesystem | None = None,
        limits: Ceilings | None = None,
        permissions: Permissions | None = None,
        watch: Watch | None = None,
        cancellation: CancellationToken | None = None,
    ) -> Run:
        """Resume a run. Finished tools are not run again; another provider may take over.

        Without `limits` the ceilings that the run had hold on; `Limits()` lifts them all.
        """
        refuse_in_event_loop("Agent.resume", "aresume")
        started = self._begin(
            provider, workspace, limits, store, permissions, watch, cancellation, run_id=run_id
        )
        return started.to_its_end(started.loop.resume)

    async def aresume(
        self,
        store: str | Path | Log,
        run_id: UUID | str,
        *,
        provider: Provider,
        workspace: str | Path | Filesystem | None = None,
        limits: Ceilings | None = None,
        permissions: Permissions | None = None,
        watch: Watch | None = None,
        cancellation: CancellationToken | None = None,
    ) -> Run:
        """Resume a run, inside an event loop."""
        started = self._begin(
            provider, workspace, limits, store, permissions, watch, cancellation, run_id=run_id
        )
        return await started.go(started.loop.resume)

    def _begin(
        self,
        provider: Provider,
        workspace: str | Path | Filesystem | None,
        limits: Ceilings | None,
        store: str | Path | Log | None,
        permissions: Permissions | None,
        watch: Watch | None,
        cancellation: CancellationToken | None,
        *,
        run_id: UUID | str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> _Started:
        """Open or make the session and its workspace, and a loop on them."""
        log = open_log(store, must_exist=run_id is not None)
        if run_id is None:
            session = Session(log=log, tags={**(tags or {}), "agent": self.name})
        else:
            session = Session.open(log, run_id if isinstance(run_id, UUID) else UUID(run_id))
            enable_inner_message_recording(session)
            workspace = workspace if workspace is not None else workspace_of(session)
            limits = limits if limits is not None else ceilings_of(session)
        state, root = open_state(session, workspace, store)
        loop = InnerLoop(
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
        return _Started(loop, state, store, tuple(self.extensions))


def _contained(session: Session, limits: Ceilings | None) -> ExecutionContext | None:
    if limits is None:
        return None
    return contain(session, limits) if isinstance(limits, Limits | ExecutionConfig) else limits(session)


@dataclass(frozen=True, slots=True)
class _Started:
    """A loop that is ready, on a state that was opened for it."""

    loop: InnerLoop
    state: ExecutionState
    store: str | Path | Log | None
    extensions: tuple[Extension, ...] = ()

    def to_its_end(self, run: Callable[..., Awaitable[TurnResult]], *task: str) -> Run:
        """Drive the turn, blocking."""
        return anyio.run(self.go, run, *task)

    async def go(self, run: Callable[..., Awaitable[TurnResult]], *task: str) -> Run:
        """Drive the turn, and disarm its limits: a run that is over must not time out afterwards.

        If the turn raises, nobody gets a run that could be closed: it is closed here.
        """
        typed = self.loop.prompt.template.structured_output is not None
        try:
            async with AsyncExitStack() as extended:
                if self.loop.containment is not None:
                    extended.callback(self.loop.containment.close)
                for each in self.extensions:
                    await extended.enter_async_context(each(self.loop))
                result = await run(*task)
            return Run(result, self.state, self.store, typed)
        except BaseException:
            close_state(self.state, self.store)
            raise


@dataclass(frozen=True, slots=True)
class RunToolCall:
    """One tool call of a run."""

    call_id: str
    name: str
    success: bool
    _state: ExecutionState = field(repr=False)

    def diff(self) -> WorkspaceDiff:
        """Say what the call changed in the files."""
        return diff_calls(self._state, self.call_id)


@dataclass(slots=True)
class Run:
    """What became of a run, as its log tells it."""

    result: TurnResult
    execution_state: ExecutionState
    store: str | Path | Log | None = None
    is_typed: bool = False
    """Whether the agent declares an output type."""

    def __repr__(self) -> str:
        # An event loop shows the result of its task to itself: that must not cost what a run holds.
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
        """The agent's answer as it was written; empty unless the run is completed."""
        return self.result.text

    @property
    def output(self) -> Any:
        """The agent's answer as its output type, or as text if it has none.

        Unless the run is completed there is none: None, or an empty text.
        """
        if self.state is not TurnState.COMPLETED:
            return None if self.is_typed else ""
        return self.result.output

    @property
    def next_actions(self) -> tuple[str, ...]:
        """What a person can do now; commands name the store, so that they can be pasted."""
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
        """Make another try from before a call: a new session with a workspace of its own.

        Its model is told in a summary what was tried here.
        """
        place = None if workspace is None else Path(workspace)
        return fork_at(
            self.execution_state, before.call_id, side="before", workspace=place, tell=branch_summary
        )

    def close(self) -> None:
        """Give up the session's lease and the workspace's handles."""
        close_state(self.execution_state, self.store)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def close_state(state: ExecutionState, store: str | Path | Log | None) -> None:
    """Give up what a run held: its session, its workspace, and the store if it was opened for it."""
    state.session.close()
    filesystem = filesystem_of(state)
    if isinstance(filesystem, HostFilesystem):
        filesystem.close()
    if isinstance(store, (str, Path)):
        state.session.log.close()


@contextmanager
def opened(store: str | Path, run_id: UUID, *, read_only: bool = True) -> Iterator[Session]:
    """Open a stored session, for reading unless it is said otherwise."""
    log = open_log(store, must_exist=True)
    session = Session.open(log, run_id, read_only=read_only)
    enable_inner_message_recording(session)
    try:
        yield session
    finally:
        session.close()
        log.close()


@contextmanager
def reopened(
    store: str | Path, run_id: UUID, *, workspace: str | Path | None = None
) -> Iterator[ExecutionState]:
    """Open a stored run with its workspace, to change it: to roll back, to fork, to answer a hold.

    What a crash left half done is rolled back first. Raises `LeaseHeldError` while somebody else
    writes the run.
    """
    log = open_log(store, must_exist=True)
    try:
        session = Session.open(log, run_id)
        try:
            enable_inner_message_recording(session)
            place = workspace if workspace is not None else workspace_of(session)
            state, _ = open_state(session, place, store)
            filesystem = filesystem_of(state)
            try:
                recover(state)
                yield state
            finally:
                if isinstance(filesystem, HostFilesystem):
                    filesystem.close()
        finally:
            session.close()
    finally:
        log.close()


def workspace_line(run_id: UUID) -> str:
    """Name a run's history in the store of its workspace."""
    return f"session-{run_id}"


def workspace_of(session: Session) -> str | None:
    """Return the directory that a run works in, as its log has it; None for a workspace in memory."""
    newest: tuple[int, TurnStarted | SessionForked] | None = None
    for kind in (TurnStarted, SessionForked):
        known = session[kind].view()
        if len(known):
            kept, origin = entry_at(known, -1)
            # Later in the log wins; what came out of a snapshot has the place of what brought it.
            if newest is None or abs(origin) > newest[0]:
                newest = (abs(origin), opened_item(kept))
    return None if newest is None else newest[1].workspace


def workspace_store(store: Path) -> Path:
    """Return the directory beside a store in which the workspaces' private objects live."""
    return store.with_name(store.name + ".files")


def open_log(store: str | Path | Log | None, *, must_exist: bool = False) -> Log:
    """Open a store: none is memory, a path is SQLite, a log is itself."""
    if store is None:
        return MemoryLog()
    if isinstance(store, (str, Path)):
        if must_exist and not Path(store).exists():
            raise SessionNotFoundError(f"there is no store at {store}; check the path")
        # The driver is imported when a store is opened: `import treenail` stays fast without it.
        from treenail.log.sqlite import SqliteLog

        return SqliteLog(store)
    return store


def open_state(
    session: Session, workspace: str | Path | Filesystem | None, store: str | Path | Log | None
) -> tuple[ExecutionState, str | None]:
    """Put a session together with its workspace; return also the workspace's directory, if it has one."""
    filesystem: Filesystem
    root: str | None = None
    if workspace is None:
        filesystem = InMemoryFilesystem()
    elif isinstance(workspace, (str, Path)):
        place = Path(workspace).resolve()
        root = str(place)
        # The files are kept beside the log's own file, however the caller named it: whoever resumes with
        # a path must find what whoever ran with an open log has kept, and the other way round.
        kept_in = store if isinstance(store, (str, Path)) else getattr(store, "path", None)
        beside = Path(kept_in).resolve() if isinstance(kept_in, (str, Path)) else None
        filesystem = HostFilesystem(
            place,
            store=None if beside is None else workspace_store(beside),
            line=workspace_line(session.session_id),
            exclude=() if beside is None else _own_files(place, beside),
        )
    else:
        filesystem = workspace
    resources = ResourceRegistry.build({Filesystem: filesystem})
    return ExecutionState(session=session, resources=resources, clock=session.clock), root


def _own_files(root: Path, store: Path) -> tuple[str, ...]:
    """The run's own store, if it lies in the workspace: a rollback must never put back an old log."""
    if not store.is_relative_to(root):
        return ()
    inside = store.relative_to(root).as_posix()
    return tuple(f"/{inside}{ending}" for ending in ("", "-wal", "-shm", "-journal", ".files/"))
