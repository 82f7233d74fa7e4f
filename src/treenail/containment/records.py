"""The values that a chain is described by: who it is, what each call was, and what it all looks like now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar, overload

from treenail.containment.cancel import PartialResultBuffer
from treenail.containment.limits import StopReason, check_fields, integer, number
from treenail.containment.shield import Decision, DegradePlan, SafetyEvent
from treenail.errors import BudgetExceededError, CallRefused, CancelledByToken, DeadlineExceededError

T = TypeVar("T")
Item = TypeVar("Item")
Kind = Literal["llm", "tool"]
Status = Literal["running", "ok", "halted", "aborted", "timeout", "error"]

_NO_TAGS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ChainMetadata:
    """Who a chain is and on whose behalf it runs."""

    request_id: str
    """This request, unlike any other."""
    chain_id: str
    """The agent run, job or user action that it belongs to; a resumed run keeps it."""
    org_id: str = ""
    team: str = ""
    service: str = ""
    user_id: str | None = None
    model: str | None = None
    """The model that calls use unless they name another."""
    tags: Mapping[str, str] = field(default_factory=lambda: _NO_TAGS)
    """Labels. They are copied, and cannot be changed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", MappingProxyType(dict(self.tags)))


@dataclass(frozen=True, slots=True)
class WrapOptions:
    """What is known about one call before it is made."""

    operation_name: str = ""
    """A label for people, for loop detection and, for tools, for the circuit breaker."""
    cost_estimate_hint: float = 0.0
    """The cost in USD to reserve; without it, the price table and the request's size say."""
    timeout_ms: int | None = None
    """The time that one attempt may take; never longer than the chain has left."""
    retry_policy_override: int | None = None
    """How many failed attempts the containment itself retries; without it, a failure returns RETRY."""
    model: str | None = None
    """The model that is called; prices go by it."""
    response_hint: object = None
    """An object to read the usage from if the returned value carries none."""
    partial_buffer: PartialResultBuffer | None = None
    """Where the call puts what it has so far.

    Without it, one is made when `current_call().partial` is used.
    """
    reconciliation_callback: Callable[[float, float], object] | None = None
    """Called with (reserved USD, real USD) when the call is settled."""
    request: object = None
    """The text or the messages that are sent; only their size is looked at."""
    input_tokens: int | None = None
    """The size of the input, if known better than from `request`."""
    max_output_tokens: int | None = None
    """The most output that the call asks for."""
    min_output_tokens: int | None = None
    """The shortest answer that is of use. With it, a call that is too dear for the rest of the money is made
    with a shorter answer: the called function bounds its request by `current_call().max_output_tokens`.
    """
    is_unbounded: bool = False
    """Whether nothing bounds the answer, so that its cost is treated as unknown under a ceiling in USD."""
    cost_of: Callable[[object], float] | None = None
    """Says what the returned value cost in USD; it goes before usage and prices."""
    retry_of: CallOutcome[Any] | None = None
    """The failed call that this one tries again; the retry budget was charged when that one failed.

    A retry is not a loop, and it is degraded as the `next_plan` of the failed call says.
    """
    will_retry: bool = False
    """Whether the caller tries again after a failure; only a retry hook forbids it then."""
    fingerprint: str = ""
    """Stands for the arguments: to loop detection, the same name and fingerprint are the same call."""
    is_free: bool = False
    """Whether the call is known to cost nothing: no price is looked up. A cost that it reports counts."""
    entity_id: str = ""
    """The provider or tool whose circuit breaker applies; by default the model, or the operation's name."""
    stoppable: bool | None = None
    """Whether a synchronous function runs on a worker thread, so that its caller can be released.

    By default it does if a timeout applies to the call; without one it runs on the caller's own thread.
    """
    estimate_degraded: Callable[[DegradePlan], float | None] | None = None
    """Says what to reserve in USD if the call is degraded; without it, the hint stays.

    If it says None of another model, the price table is asked, and a price that nobody knows is treated as
    configured.
    """

    def __post_init__(self) -> None:
        number("WrapOptions", "cost_estimate_hint", self.cost_estimate_hint, zero_ok=True)
        check_fields(self, integer, "timeout_ms", "max_output_tokens", "min_output_tokens", none_ok=True)
        check_fields(self, integer, "retry_policy_override", "input_tokens", zero_ok=True, none_ok=True)


NO_OPTIONS = WrapOptions()


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One model or tool call of a chain."""

    node_id: str
    parent_id: str | None
    """The call during which this one was made, if any."""
    kind: Kind
    operation_name: str
    start_ts: datetime
    end_ts: datetime | None
    """None while the call is under way."""
    status: Status
    """"running" until `end_ts`; then how it ended."""
    cost_usd: float
    """What was charged: the real cost if it is known, else what was reserved."""
    retries_used: int
    chain_id: str = ""
    attempts: int = 0
    """How often it was dispatched; 0 if it was blocked."""
    decision: Decision | None = None
    stop_reason: str | None = None


class Frozen(Sequence[Item], Generic[Item]):
    """The first so many items of a list that only ever grows: a snapshot of it that costs nothing to take.

    `pinned` holds the items that were still going to change, as they were.
    """

    __slots__ = ("_length", "_pinned", "_read", "_source")

    def __init__(
        self,
        source: Sequence[T],
        read: Callable[[T], Item],
        pinned: Mapping[int, Item] | None = None,
    ) -> None:
        self._source: Sequence[Any] = source
        self._length = len(source)
        self._read: Callable[[Any], Item] = read
        self._pinned = pinned or {}

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        if isinstance(index, slice):
            return tuple(self._at(at) for at in range(*index.indices(self._length)))
        at = index + self._length if index < 0 else index
        if not 0 <= at < self._length:
            raise IndexError(f"index {index} is outside of {self._length} items")
        return self._at(at)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Frozen | list | tuple):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment] # it equals lists, which have no hash

    def __repr__(self) -> str:
        return repr(list(self))

    def _at(self, at: int) -> Item:
        pinned = self._pinned.get(at)
        return self._read(self._source[at]) if pinned is None else pinned


@dataclass(frozen=True, slots=True)
class GraphSummary:
    """A chain's calls in numbers."""

    node_count: int = 0
    llm_calls: int = 0
    tool_calls: int = 0
    running: int = 0
    blocked: int = 0
    """Calls that were refused before they were made, those no longer kept as nodes included."""


@dataclass(frozen=True, slots=True)
class ContextSnapshot:
    """The state of a chain at one moment. It never changes, whatever the chain does next."""

    chain_id: str
    request_id: str
    step_count: int
    cost_usd_accumulated: float
    retries_used: int
    aborted: bool
    abort_reason: str | None
    """The reason given to `abort()`, or else the stop reason if a limit ended the chain."""
    elapsed_ms: float
    nodes: Sequence[NodeRecord]
    events: Sequence[SafetyEvent]
    cost_usd_reserved: float = 0.0
    """Set aside for calls that are under way."""
    stop_reason: str | None = None
    graph_summary: GraphSummary = field(default_factory=GraphSummary)
    parent_chain_id: str | None = None
    agent_identity: str | None = None
    """The service that the chain runs as."""
    policy_metadata: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """The ceilings that apply."""


@dataclass(frozen=True, slots=True)
class CallOutcome(Generic[T]):
    """How one call ended: what was decided, what came back, and the node that records it."""

    decision: Decision
    value: T | None
    error: BaseException | None
    node: NodeRecord
    plan: DegradePlan | None = None
    """How the call was degraded, if it was."""
    partial: str | None = None
    """What a call that did not end well had produced, if it said so."""
    detail: str = ""
    """Why it was blocked or stopped, in words."""
    next_plan: DegradePlan | None = None
    """How another attempt is to be degraded, if a hook said so when this one failed, or if this one was."""

    @property
    def ok(self) -> bool:
        """Whether the call was made and went well, degraded or not."""
        return self.node.status == "ok"

    @property
    def was_dispatched(self) -> bool:
        """Whether the call was made at all."""
        return self.node.attempts > 0

    @property
    def stop_reason(self) -> str | None:
        """Why it was blocked or stopped, as a stop reason, if it was."""
        return self.node.stop_reason

    def unwrap(self) -> T:
        """Return the value, or raise what went wrong: the call's own error, or why it was stopped."""
        if self.ok:
            return self.value  # type: ignore[return-value] # a call that is ok has returned a T
        if self.error is not None:
            raise self.error
        name = self.node.operation_name or f"the {self.node.kind} call"
        message = f"{name} was stopped ({self.stop_reason or self.decision}): {self.detail}"
        if self.stop_reason == StopReason.BUDGET_EXCEEDED:
            raise BudgetExceededError(message, exceeded_dimension="cost_usd")
        if self.stop_reason == StopReason.TIMEOUT:
            raise DeadlineExceededError(message)
        if self.stop_reason == StopReason.ABORTED:
            raise CancelledByToken(message)
        raise CallRefused(message, decision=str(self.decision), stop_reason=self.stop_reason)
