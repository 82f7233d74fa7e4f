"""What a handler is given, and for how long.

The session handle, the filesystem, the outbox and the resources in a context belong to
one call. When the call is over they refuse: a worker thread that was left behind cannot
change anything through them after the rollback.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar, cast, overload

from treenail.containment import CancellationToken
from treenail.errors import UnboundResourceError, UsageError
from treenail.log import SlicePolicy
from treenail.state import (
    BudgetTracker,
    Deadline,
    ExecutionState,
    ResourceContext,
    ResourceRegistry,
    RunContext,
    Session,
    Snapshotable,
    ToolScope,
)
from treenail.tools.events import OutboxPut
from treenail.tools.tool import InjectedContext
from treenail.workspace import Filesystem

if TYPE_CHECKING:
    # At run time typing's own will do: only a type checker reads the default.
    import typing_extensions

    DepsT = typing_extensions.TypeVar("DepsT", default=None)
else:
    DepsT = TypeVar("DepsT")

T = TypeVar("T")
D = TypeVar("D")


class Heartbeat(Protocol):
    """Shows a supervisor that the work is alive."""

    def beat(self) -> None:
        """Record a sign of life."""
        ...


class CallOutbox:
    """Collects the messages that a call wants delivered outside. None leaves before the commit.

    `earlier` returns how many calls with this id have sent something before: a provider may use an id
    again, and the second call must not make the first one's keys.
    """

    __slots__ = ("_call_id", "_earlier", "_is_closed", "_lock", "_messages", "_session_id")

    def __init__(
        self,
        session_id: object,
        call_id: str,
        *,
        earlier: Callable[[], int] = lambda: 0,
    ) -> None:
        self._session_id = session_id
        self._call_id = call_id
        self._earlier = earlier
        self._lock = threading.Lock()
        self._is_closed = False
        self._messages: list[OutboxPut] = []

    def put(self, topic: str, payload: object, *, key: str | None = None) -> str:
        """Ask for a delivery. Returns its key, which is the same if the call has to run again."""
        with self._lock:
            if self._is_closed:
                raise UsageError(f"the call {self._call_id} is over; its outbox takes nothing more")
            before = self._earlier()
            call = f"{self._call_id}#{before + 1}" if before else self._call_id
            stable = f"{self._session_id}:{call}:{key if key is not None else len(self._messages)}"
            if any(each.key == stable for each in self._messages):
                raise UsageError(f"the outbox key {key!r} was used already in this call; use another")
            self._messages.append(OutboxPut(stable, topic, payload, self._call_id))
            return stable

    def close(self) -> tuple[OutboxPut, ...]:
        """Return the collected messages, and refuse more."""
        with self._lock:
            self._is_closed = True
            return tuple(self._messages)


@dataclass(frozen=True, slots=True)
class ToolContext(InjectedContext, Generic[DepsT]):
    """Everything a handler may use.

    Made by the caller with the parts that all calls share; the runner fills in what belongs to one
    call: `state`, `session`, `resources` and `filesystem` as this call sees them, `call_id`,
    `is_resume`, `outbox`, and a `cancellation` of its own below the caller's.
    """

    state: ExecutionState
    session: Session = field(default=cast(Session, None))
    call_id: str = ""
    is_resume: bool = False
    """Whether the run was resumed, so that an earlier attempt at this call may have been cut off."""
    deadline: Deadline | None = None
    budget_tracker: BudgetTracker | None = None
    cancellation: CancellationToken = field(default_factory=CancellationToken)
    run_context: RunContext | None = None
    outbox: CallOutbox = field(default=cast(CallOutbox, None))
    prompt: Any = None
    rendered_prompt: Any = None
    adapter: Any = None
    heartbeat: Heartbeat | None = None
    output: Callable[[str, str], object] | None = field(default=None, repr=False)
    """Shows what a call writes while it runs: its id and a text. None if nobody watches."""
    held_filesystem: Filesystem | None = field(default=None, repr=False)
    """The filesystem as this call may use it; see `filesystem`."""
    deps: DepsT = field(default=cast(Any, None), repr=False)
    """What the caller of the run passed as `deps`: connections, clients, settings. It is never stored."""

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
    def resources(self) -> ResourceRegistry | ResourceContext | CallResources:
        """The resources of this run, and those that live as long as this call."""
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
        """Record a sign of life; raise if the call was cancelled or its deadline has passed."""
        if self.heartbeat is not None:
            self.heartbeat.beat()
        if self.deadline is not None:
            self.deadline.raise_if_passed(f"the tool call {self.call_id}")
        self.cancellation.raise_if_cancelled()


def _is_missing(value: object) -> bool:
    return value is None


def filesystem_of(state: ExecutionState) -> Filesystem | None:
    """Return the workspace of a run, or None."""
    return cast("Filesystem | None", state.resources.get(cast("type[Any]", Filesystem), None))


class CallResources:
    """The run's resources as one call sees them: the workspace as its handle, and its own TOOL_CALL ones."""

    __slots__ = ("_filesystem", "_handle", "_scope", "_whole")

    def __init__(
        self,
        whole: ResourceRegistry | ResourceContext,
        scope: ToolScope | None,
        filesystem: Filesystem | None,
        handle: Filesystem | None,
    ) -> None:
        self._whole = whole
        self._scope = scope
        self._filesystem = filesystem
        self._handle = handle

    @overload
    def get(self, resource_type: type[T], /) -> T | None: ...
    @overload
    def get(self, resource_type: type[T], default: D, /) -> T | D: ...
    def get(self, resource_type: type[Any], /, *default: Any) -> Any:
        """Return the resource that is bound to this type, as the registry or the context does."""
        behind: Any = self._whole if self._scope is None else self._scope
        found = behind.get(resource_type, *default)
        return self._handle if found is not None and found is self._filesystem else found

    def get_optional(self, resource_type: type[T], /) -> T | None:
        """Return the resource that is bound to this type, or None if nothing is."""
        return self.get(resource_type, None)

    def __contains__(self, resource_type: object) -> bool:
        return resource_type in self._whole

    def snapshotable_resources(self) -> Mapping[type[object], Snapshotable[object]]:
        """Return what can be snapshotted, the workspace as this call's handle."""
        return {
            each: cast("Snapshotable[object]", self._handle)
            if cast(object, resource) is self._filesystem
            else resource
            for each, resource in self._whole.snapshotable_resources().items()
        }

    def policy_of(self, resource_type: type[object]) -> SlicePolicy:
        """Return what a rollback does with a resource."""
        return self._whole.policy_of(resource_type)


class CallFilesystem:
    """A filesystem for the length of one call: afterwards it refuses.

    Each operation holds a lock, so that ending the call waits for the operation under way, and
    nothing can slip in between the rollback and the refusal.
    """

    __slots__ = ("__call_id", "__filesystem", "__lock", "__over", "__streams")

    def __init__(self, filesystem: Filesystem, call_id: str) -> None:
        self.__filesystem = filesystem
        self.__call_id = call_id
        self.__lock = threading.RLock()
        self.__over = False
        self.__streams: list[Any] = []

    def __repr__(self) -> str:
        return f"<{self.__filesystem!r} for the call {self.__call_id}>"

    def __getattr__(self, name: str) -> Any:
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

    def begin(self, *_: object, **__: object) -> NoReturn:
        """Refuse: a tool cannot hold the workspace that its call holds."""
        self._refuse("begin")

    def restore(self, *_: object, **__: object) -> NoReturn:
        """Refuse: a tool cannot undo the calls before it. Raising undoes its own."""
        self._refuse("restore")

    def recover(self, *_: object, **__: object) -> NoReturn:
        """Refuse: a tool cannot end its own call."""
        self._refuse("recover")

    def unfinished(self) -> NoReturn:
        """Refuse: a tool cannot end its own call."""
        self._refuse("unfinished")

    def _refuse(self, name: str) -> NoReturn:
        raise UsageError(f"{name} belongs to the runner; a tool cannot end or undo its own call")

    def end(self) -> None:
        """Refuse from now on. A stream that was left open is closed first, so that its fate is the call's."""
        with self.__lock:
            self.__over = True
            while self.__streams:
                stream = self.__streams.pop()
                if not stream.closed:
                    stream.close()


# Said aloud, because `isinstance` does not see operations that are found only when they are asked for.
Filesystem.register(CallFilesystem)
