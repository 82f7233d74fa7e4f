"""What a handler is given, and for how long.

The session handle and the filesystem in a context belong to one call. When the call
is over they refuse: a worker thread that was left behind cannot change anything
through them after the rollback.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from holdfast.containment.cancel import CancellationToken
from holdfast.errors import UnboundResourceError, UsageError
from holdfast.state.budget import BudgetTracker, Deadline
from holdfast.state.execution import ExecutionState
from holdfast.state.resources import ResourceContext, ResourceRegistry
from holdfast.state.run_context import RunContext
from holdfast.state.session import Session
from holdfast.tools.events import OutboxPut
from holdfast.workspace.base import Filesystem

T = TypeVar("T")


class Heartbeat(Protocol):
    """Tells whoever waits for this work that it is alive."""

    def beat(self) -> None:
        """Say so."""
        ...


class CallOutbox:
    """Collects what a call wants delivered outside. Nothing leaves before the call is committed."""

    def __init__(self, session_id: object, call_id: str) -> None:
        self._prefix = f"{session_id}:{call_id}"
        self._lock = threading.Lock()
        self._closed = False
        self._messages: list[OutboxPut] = []
        self._call_id = call_id

    def put(self, topic: str, payload: object, *, key: str | None = None) -> str:
        """Ask for a delivery. Returns its key, which is the same if the call has to be run again."""
        with self._lock:
            if self._closed:
                raise UsageError(f"the call {self._call_id} is over; its outbox takes nothing more")
            stable = f"{self._prefix}:{key if key is not None else len(self._messages)}"
            if any(each.key == stable for each in self._messages):
                raise UsageError(f"the outbox key {key!r} was used already in this call; use another")
            self._messages.append(OutboxPut(stable, topic, payload, self._call_id))
            return stable

    def close(self) -> tuple[OutboxPut, ...]:
        """Take what was put, and refuse more."""
        with self._lock:
            self._closed = True
            return tuple(self._messages)


@dataclass(frozen=True, slots=True)
class ToolContext:
    """Everything a handler may use.

    Made by the caller with the parts that all calls share; the runner fills in what belongs to one
    call: `session` and `filesystem` handles, `call_id`, `is_resume`, `outbox`, `cancellation`.
    """

    state: ExecutionState
    session: Session = field(default=cast(Session, None))
    call_id: str = ""
    is_resume: bool = False
    deadline: Deadline | None = None
    budget_tracker: BudgetTracker | None = None
    cancellation: CancellationToken = field(default_factory=CancellationToken)
    run_context: RunContext | None = None
    outbox: CallOutbox = field(default=cast(CallOutbox, None))
    prompt: Any = None
    rendered_prompt: Any = None
    adapter: Any = None
    heartbeat: Heartbeat | None = None
    held_filesystem: Filesystem | None = field(default=None, repr=False)
    """The filesystem as this call may use it; see `filesystem`."""

    def __post_init__(self) -> None:
        if _is_missing(self.session):
            object.__setattr__(self, "session", self.state.session)
        if _is_missing(self.outbox):
            object.__setattr__(self, "outbox", CallOutbox(self.session.session_id, self.call_id))
        if self.budget_tracker is None:
            object.__setattr__(self, "budget_tracker", self.state.resources.get(BudgetTracker, None))

    @property
    def execution_state(self) -> ExecutionState:
        """The root of all state; the longer name of `state`."""
        return self.state

    @property
    def resources(self) -> ResourceRegistry | ResourceContext:
        """The resources of this run."""
        return self.state.resources

    @property
    def filesystem(self) -> Filesystem:
        """The workspace. Read-only for a tool without effects."""
        if self.held_filesystem is not None:
            return self.held_filesystem
        found = filesystem_of(self.state)
        if found is None:
            raise UnboundResourceError(
                "this run has no workspace; bind one: ResourceRegistry.build({Filesystem: ...})"
            )
        return found

    def beat(self) -> None:
        """Say that the work is alive, and stop it here if it was cancelled or is out of time."""
        if self.heartbeat is not None:
            self.heartbeat.beat()
        self.cancellation.raise_if_cancelled()
        if self.deadline is not None:
            self.deadline.raise_if_passed(f"the tool call {self.call_id}")


def _is_missing(value: object) -> bool:
    return value is None


def filesystem_of(state: ExecutionState) -> Filesystem | None:
    """Return the workspace of a run, or None."""
    return cast("Filesystem | None", state.resources.get(cast("type[Any]", Filesystem), None))


class CallFilesystem:
    """A filesystem for the length of one call: afterwards it refuses.

    Each operation holds a lock, so that ending the call waits for the operation under way, and
    nothing can slip in between the rollback and the refusal.
    """

    def __init__(self, filesystem: Filesystem, call_id: str) -> None:
        self.__filesystem = filesystem
        self.__call_id = call_id
        self.__lock = threading.RLock()
        self.__over = False
        self.__streams: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("begin", "recover", "unfinished", "restore"):
            raise UsageError(f"{name} belongs to the runner; a tool cannot end or undo its own call")
        attribute = getattr(self.__filesystem, name)
        if not callable(attribute):
            return attribute
        operation = cast("Callable[..., Any]", attribute)

        def held(*arguments: Any, **keywords: Any) -> Any:
            with self.__lock:
                if self.__over:
                    raise UsageError(
                        f"the call {self.__call_id} is over; its filesystem takes no more requests ({name})"
                    )
                outcome = operation(*arguments, **keywords)
                if name == "open_write":
                    self.__streams.append(outcome)
                return outcome

        return held

    def end(self) -> None:
        """Refuse from now on. A stream that was left open is closed first, so that its fate is the call's."""
        with self.__lock:
            for stream in self.__streams:
                if not stream.closed:
                    stream.close()
            self.__over = True
