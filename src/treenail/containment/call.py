"""One call, as the containment keeps it (`Call`) and as the called function sees it (`ActiveCall`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING

from treenail.containment.breaker import Permit
from treenail.containment.budgets import BudgetBackend
from treenail.containment.cancel import CancellationToken, PartialResultBuffer
from treenail.containment.limits import number, to_pico, to_usd
from treenail.containment.pricing import CallUsage
from treenail.containment.records import Kind, NodeRecord, Status, WrapOptions
from treenail.containment.shield import Decision, DegradePlan, ShieldPipeline, ToolCallContext, Verdict
from treenail.containment.threads import Timer

if TYPE_CHECKING:
    from treenail.containment.context import ExecutionContext


class Call:
    """The state of one call, from its beginning to its node. Only the containment writes it.

    Most of it stays as it is for most calls, so it is the class that holds the defaults.
    """

    status: Status = "running"
    decision: Decision | None = None
    stop_reason: str | None = None
    detail = ""
    """Why it was blocked or stopped, in words."""
    plan: DegradePlan | None = None
    attempts = 0
    retries_used = 0
    end_ts: datetime | None = None
    parent: Call | None = None
    """The call during which this one was made."""
    index = -1
    """Its place on the chain's list of nodes; -1 before it is there."""
    retry: Call | None = None
    """The newest attempt that the called function itself has made after the first one failed."""
    pending: Call | None = None
    """The attempt that it has asked for and not begun yet."""
    further = 0
    """How many such attempts it has begun."""
    refusal: tuple[Decision, str | None, str] | None = None
    """Why it was not let to make another one: the decision, the stop reason, and the words for it."""
    retries = ""
    """For such an attempt: the reservation of the attempt that failed before it."""
    cause: BaseException | None = None
    """For such an attempt: what the one before it failed with."""
    value: object = None
    error: BaseException | None = None

    estimate = 0
    """What to reserve, in pico-dollars, as all money here."""
    reserved = 0
    """What the present attempt has reserved."""
    settled = 0
    """What the last attempt was charged."""
    cost = 0
    """What all attempts were charged."""
    reported: int | None = None
    """What the called function said that the present attempt cost."""
    usage: CallUsage | None = None
    pots: tuple[tuple[BudgetBackend, str], ...] = ()
    """The reservations in money shared with other chains."""

    is_open = False
    """Whether a reservation waits to be settled."""
    is_dispatched = False
    is_over = False
    """Whether its caller has been answered: a function that still runs can book nothing more on it."""
    is_retry = False
    is_abandoned = False
    """Whether its handler still runs although nobody waits for it any more."""
    is_blocked = False
    """Whether the shield kept a request of it from leaving."""
    is_misused = False
    """Whether the caller's mistake kept it from running; then it costs nothing and is no failure."""
    delay_s = 0.0
    token: CancellationToken | None = None
    """The present attempt's own token; a call on its caller's thread has the chain's."""
    timer: Timer | None = None
    due_at: float | None = None
    """When the attempt's own time is over, on the chain's clock; None if it has none."""
    permits: tuple[Permit, ...] = ()
    """What the circuit breakers gave for the present attempt; each is settled once."""
    work: Future[object] | None = None
    """The function on its worker thread, if it runs on one."""
    shield_ctx: ToolCallContext | None = None
    verdicts: list[tuple[ShieldPipeline, Verdict]] | None = None
    buffer: PartialResultBuffer | None = None

    def __init__(
        self, context: ExecutionContext, kind: Kind, fn: Callable[[], object], options: WrapOptions
    ) -> None:
        self.context = context
        self.kind = kind
        self.fn: Callable[[], object] | None = fn
        self.options = options
        self.operation_name = options.operation_name
        self.serial = next(context.serials)
        self.start_ts = context.clock.now()

    @property
    def node_id(self) -> str:
        """The id of this call's node."""
        # The prefix is random per chain and the rest counts: a UUID (version 8) that costs nothing to make.
        return f"{self.context.id_prefix}{self.serial:012x}"

    @property
    def reservation_id(self) -> str:
        """The id of the present attempt in the ledger."""
        return f"{self.node_id}:{self.attempts}"

    @property
    def name(self) -> str:
        """What to call it in a message."""
        return self.operation_name or f"the {self.kind} call"

    @property
    def dispatched(self) -> Call:
        """The attempt that is under way, or was last: what is reported is about it."""
        return self.retry or self

    def model(self) -> str | None:
        """Return the model that is called: the degraded one, the call's own, or the chain's."""
        if self.plan is not None and self.plan.model is not None:
            return self.plan.model
        return self.options.model or (self.context.metadata.model if self.kind == "llm" else None)

    def degrade(self, plan: DegradePlan | None) -> None:
        """Make the present attempt with less, on top of what other guards have asked for."""
        if plan is not None:
            self.plan = plan if self.plan is None else self.plan.merged(plan)
            self.delay_s = max(self.delay_s, self.plan.delay_ms / 1000)

    @property
    def is_free(self) -> bool:
        """Whether it is known to cost nothing. That another model costs nothing, nobody has said."""
        other = None if self.plan is None else self.plan.model
        return self.options.is_free and other in (None, self.options.model)

    def record(self) -> NodeRecord:
        """Return the node as it is now."""
        return NodeRecord(
            node_id=self.node_id,
            parent_id=None if self.parent is None else self.parent.node_id,
            kind=self.kind,
            operation_name=self.operation_name,
            start_ts=self.start_ts,
            end_ts=self.end_ts,
            status=self.status,
            cost_usd=to_usd(self.cost),
            retries_used=self.retries_used,
            chain_id=self.context.chain_id,
            attempts=self.attempts,
            decision=self.decision,
            stop_reason=self.stop_reason,
        )


current: ContextVar[Call | None] = ContextVar("treenail_current_call", default=None)


class ActiveCall:
    """The call that the running code is part of."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call = call

    @property
    def node_id(self) -> str:
        """The id of this call's node."""
        return self._call.node_id

    @property
    def context(self) -> ExecutionContext:
        """The chain that the call belongs to."""
        return self._call.context

    @property
    def kind(self) -> Kind:
        """Whether it is a model call or a tool call."""
        return self._call.kind

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return self._call.attempts + self._call.further

    @property
    def plan(self) -> DegradePlan | None:
        """How the present attempt is to be degraded, if it is."""
        return self._call.dispatched.plan

    @property
    def token(self) -> CancellationToken:
        """The token that is cancelled when this call must stop."""
        return self._call.token or self._call.context.cancellation_token

    @property
    def partial(self) -> PartialResultBuffer:
        """Where to put what the call has produced so far; it survives the call being stopped."""
        call = self._call
        if call.buffer is None:
            call.buffer = call.context.partials[call.node_id] = PartialResultBuffer()
        return call.buffer

    def report(self, *, cost_usd: float | None = None, usage: CallUsage | None = None) -> None:
        """Say what the call has really cost, or what it has used; several reports add up.

        A call that then fails, or is stopped, is charged what was reported rather than what was reserved.
        It is about the present attempt; about one that has ended, nothing more can be said.
        """
        call = self._call.dispatched
        if cost_usd is not None:
            cost = to_pico(number("report", "cost_usd", cost_usd, zero_ok=True))
            call.reported = cost + (call.reported or 0)
        if usage is not None:
            before = call.usage or CallUsage()
            call.usage = CallUsage(
                **{
                    name: getattr(before, name) + getattr(usage, name)
                    for name in CallUsage.__dataclass_fields__
                }
            )

    def check_egress(self, url: str, method: str = "GET") -> None:
        """Ask the shield whether a request may leave; `CallRefused` if not, and then let it end the call.

        The call is then halted rather than failed: it takes no retry, and says nothing about its provider.
        """
        self._call.context.check_call_egress(self._call, url, method)

    def end_attempt(self, error: BaseException, *, delay_s: float = 0.0) -> float:
        """Say that the present attempt has failed and that another one is wanted after `delay_s`.

        For whoever tries again within one call, such as a provider that retries. The failed attempt is
        settled: it costs what was reported of it, or else what was reserved. Return how long to wait
        before `begin_attempt()`, which may be longer than was asked for. `CallRefused` says that no other
        attempt may be made, and why; then let `error` end the call. A wait that would pass the run's
        deadline, or the call's own, is refused before it begins. One attempt at a time.
        """
        return self._call.context.end_attempt(self._call, error, delay_s)

    def begin_attempt(self) -> None:
        """Book the attempt that `end_attempt` allowed: a step, a retry and its money, in one step.

        It is a call like any other, with a node of its own below this one's. `CallRefused` if somebody
        else was quicker to take the last of anything; then the attempt must not be made.
        """
        self._call.context.begin_attempt(self._call)


def current_call() -> ActiveCall | None:
    """Return the call that the running code is part of, or None outside of any.

    It is how a called function reaches its token, its degrade plan and its partial result, and how it reports
    what it costs.
    """
    call = current.get()
    return None if call is None else ActiveCall(call)
