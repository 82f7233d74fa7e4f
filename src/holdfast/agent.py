"""The short way in: an agent with instructions and tools, and what became of a run.

Everything here is made of the rooms below: a session on a log, a workspace, a turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio

from holdfast.containment import Limits
from holdfast.conversation.messages import enable_inner_message_recording, get_inner_messages
from holdfast.errors import SessionNotFoundError, UsageError
from holdfast.log.base import Log
from holdfast.log.memory import MemoryLog
from holdfast.providers.base import Provider
from holdfast.state.execution import ExecutionState
from holdfast.state.resources import ResourceRegistry
from holdfast.state.session import Session
from holdfast.tools.boundaries import boundaries, diff_calls, fork_at
from holdfast.tools.policies import Permissions
from holdfast.tools.tool import Tool
from holdfast.turns.ledger import contain
from holdfast.turns.states import TurnStarted, TurnState
from holdfast.turns.turn import InnerLoop, TurnResult, Watch
from holdfast.workspace.base import Filesystem, WorkspaceDiff
from holdfast.workspace.history import erase_line
from holdfast.workspace.host import HostFilesystem
from holdfast.workspace.memory import InMemoryFilesystem


@dataclass(frozen=True)
class Agent:
    """Instructions and tools under a name.

    `run` takes up a task and returns when the turn has ended, one way or another; `resume` goes on
    with a run after a crash, an interrupt or an answered question, in this process or another.
    """

    name: str
    instructions: str = "You are a helpful agent."
    tools: Sequence[Tool[Any, Any] | Callable[..., Any]] = ()
    max_iterations: int = 100

    def tool_registry(self) -> dict[str, Tool[Any, Any]]:
        """Return the agent's tools by name. Raises `UsageError` if two share one."""
        registry: dict[str, Tool[Any, Any]] = {}
        for each in self.tools:
            made = each if isinstance(each, Tool) else Tool.wrap(each)
            if made.name in registry:
                raise UsageError(f"the agent {self.name!r} has two tools named {made.name!r}; rename one")
            registry[made.name] = made
        return registry

    def run(
        self,
        task: str,
        *,
        provider: Provider,
        workspace: str | Path | Filesystem | None = None,
        limits: Limits | None = None,
        store: str | Path | Log | None = None,
        permissions: Permissions | None = None,
        watch: Watch | None = None,
    ) -> Run:
        """Take up a task. Without a `store` the run lives in memory; with a path it is durable."""
        log = _open_log(store)
        session = Session(log=log, tags={"agent": self.name})
        state, root = _open_state(session, workspace, store)
        loop = self._loop(state, provider, limits, permissions, watch, root)
        return Run(_to_its_end(loop, loop.run, task), state, store)

    def resume(
        self,
        store: str | Path | Log,
        run_id: UUID | str,
        *,
        provider: Provider,
        workspace: str | Path | Filesystem | None = None,
        limits: Limits | None = None,
        permissions: Permissions | None = None,
        watch: Watch | None = None,
    ) -> Run:
        """Go on with a run. Finished tools are not run again; another provider may take over."""
        log = _open_log(store, must_exist=True)
        session = Session.open(log, run_id if isinstance(run_id, UUID) else UUID(run_id))
        enable_inner_message_recording(session)
        started = session[TurnStarted].latest()
        place = workspace if workspace is not None else (started.workspace if started else None)
        state, root = _open_state(session, place, store)
        loop = self._loop(state, provider, limits, permissions, watch, root)
        return Run(_to_its_end(loop, loop.resume), state, store)

    def _loop(
        self,
        state: ExecutionState,
        provider: Provider,
        limits: Limits | None,
        permissions: Permissions | None,
        watch: Watch | None,
        root: str | None,
    ) -> InnerLoop:
        return InnerLoop(
            state=state,
            provider=provider,
            instructions=self.instructions,
            tools=self.tool_registry(),
            agent=self.name,
            containment=None if limits is None else contain(state.session, limits),
            permissions=permissions or Permissions(),
            max_iterations=self.max_iterations,
            watch=watch,
            workspace=root,
        )


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

    @property
    def id(self) -> UUID:
        """The id of the run's session."""
        return self.execution_state.session.session_id

    @property
    def state(self) -> TurnState:
        """How the run ended."""
        return self.result.state

    @property
    def output(self) -> str:
        """The agent's answer; empty unless the run is completed."""
        return self.result.text

    @property
    def next_actions(self) -> tuple[str, ...]:
        """What a person can do now."""
        return self.result.next_actions

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
        """Make another try from before a call: a new session with a workspace of its own."""
        place = None if workspace is None else Path(workspace)
        return fork_at(self.execution_state, before.call_id, side="before", workspace=place)

    def close(self) -> None:
        """Give up the session's lease and the workspace's handles."""
        session = self.execution_state.session
        session.close()
        filesystem = self.execution_state.resources.get(Filesystem, None)  # type: ignore[type-abstract]  # a protocol
        if isinstance(filesystem, HostFilesystem):
            filesystem.close()
        if isinstance(self.store, (str, Path)):
            session.log.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def opened(store: str | Path, run_id: UUID, *, read_only: bool = True) -> Iterator[Session]:
    """Open a stored session, for reading unless it is said otherwise."""
    log = _open_log(store, must_exist=True)
    session = Session.open(log, run_id, read_only=read_only)
    enable_inner_message_recording(session)
    try:
        yield session
    finally:
        session.close()
        log.close()


def erase_run(store: str | Path, run_id: UUID) -> None:
    """Forget a run: its log, and every file content that was kept for it alone. Both leave no byte behind.

    The workspace itself is not touched. Raises `LeaseHeldError` while somebody is writing the run. A
    call that was cut off by a crash is asked for first: resume the run, or roll the call back.
    """
    log = _open_log(store, must_exist=True)
    try:
        log.erase(run_id)
    finally:
        log.close()
    objects = workspace_store(Path(store))
    if objects.exists():
        erase_line(objects, _line_of(run_id))


def _line_of(run_id: UUID) -> str:
    """Name a run's history in the store of its workspace."""
    return f"session-{run_id}"


def workspace_store(store: Path) -> Path:
    """Return the directory beside a store in which the workspaces' private objects live."""
    return store.with_name(store.name + ".files")


def _to_its_end(loop: InnerLoop, go: Callable[..., Awaitable[TurnResult]], *task: str) -> TurnResult:
    """Drive a turn, and disarm its limits: a run that is over must not time out afterwards."""
    try:
        return anyio.run(go, *task)
    finally:
        if loop.containment is not None:
            loop.containment.close()


def _open_log(store: str | Path | Log | None, *, must_exist: bool = False) -> Log:
    if store is None:
        return MemoryLog()
    if isinstance(store, (str, Path)):
        if must_exist and not Path(store).exists():
            raise SessionNotFoundError(f"there is no store at {store}; check the path")
        # The driver is imported when a store is opened: `import holdfast` stays fast without it.
        from holdfast.log.sqlite import SqliteLog

        return SqliteLog(store)
    return store


def _open_state(
    session: Session, workspace: str | Path | Filesystem | None, store: str | Path | Log | None
) -> tuple[ExecutionState, str | None]:
    filesystem: Filesystem
    root: str | None = None
    if workspace is None:
        filesystem = InMemoryFilesystem()
    elif isinstance(workspace, (str, Path)):
        place = Path(workspace).resolve()
        root = str(place)
        beside = Path(store).resolve() if isinstance(store, (str, Path)) else None
        filesystem = HostFilesystem(
            place,
            store=None if beside is None else workspace_store(beside),
            line=_line_of(session.session_id),
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
