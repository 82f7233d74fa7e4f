"""A call and its attempts, as the containment keeps them and as the called function sees them.

A `Call` becomes a node of the chain. Each time that its function is dispatched, an `Attempt` is made anew: it
holds what this dispatch reserved, used and was admitted with, and nothing of it reaches the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from treenail.containment.cancel import CancellationToken, PartialResultBuffer
from treenail.containment.limits import number, to_pico, to_usd
from treenail.containment.pricing import CallUsage
from treenail.containment.records import CallOutcome, Kind, NodeRecord, Status, WrapOptions
from treenail.containment.shield import Decision, DegradePlan
from treenail.containment.threads import Timer

if TYPE_CHECKING:
    from treenail.containment.context import ExecutionContext


class Call:
    """One call of a chain, from its beginning to its node. Only the containment writes it."""

    # Slots, all set at once: a class's defaults are read several times slower.
    __slots__ = (
        "attempts",
        "buffer",
        "context",
        "cost",
        "decision",
        "detail",
        "end_ts",
        "error",
        "index",
        "kind",
        "next_plan",
        "operation_name",
        "parent",
        "plan",
        "retries_used",
        "serial",
        "start_ts",
        "status",
        "stop_reason",
        "value",
    )

    def __init__(self, context: ExecutionContext, kind: Kind, operation_name: str) -> None:
        self.context = context
        self.kind = kind
        self.operation_name = operation_name
        self.serial = next(context.chain.serials)
        self.start_ts = context.clock.now()
        self.end_ts: datetime | None = None
        self.status: Status = "running"
        self.decision = Decision.HALT
        self.stop_reason: str | None = None
        self.detail = ""
        """Why it was blocked or stopped, in words."""
        self.attempts = self.retries_used = 0
        self.cost = 0
        """What all attempts were charged, in pico-dollars, as all money here."""
        self.parent: Call | None = None
        """The call during which this one was made."""
        self.index = -1
        """Its place on the chain's list of nodes; -1 before it is there."""
        self.buffer: PartialResultBuffer | None = None
        self.value: object = None
        self.error: BaseException | None = None
        self.plan: DegradePlan | None = None
        """How the newest attempt was degraded."""
        self.next_plan: DegradePlan | None = None
        """How the next attempt is to be degraded."""

    @property
    def node_id(self) -> str:
        """The id of this call's node: a UUID (version 8) of a random prefix per chain and a count."""
        return f"{self.context.chain.id_prefix}{self.serial:012x}"

    @property
    def name(self) -> str:
        """What to call it in a message."""
        return self.operation_name or f"the {self.kind} call"

    def record(self) -> NodeRecord:
        """Return the node as it is now.

        The status is written last when a call ends, and read first and once here: so another thread sees
        the call running, with nothing of its end, or ended, with all of it.
        """
        status = self.status
        is_running = status == "running"
        return NodeRecord(
            node_id=self.node_id,
            parent_id=None if self.parent is None else self.parent.node_id,
            kind=self.kind,
            operation_name=self.operation_name,
            start_ts=self.start_ts,
            end_ts=None if is_running else self.end_ts,
            status=status,
            cost_usd=to_usd(self.cost),
            retries_used=self.retries_used,
            chain_id=self.context.chain_id,
            attempts=self.attempts,
            decision=None if is_running else self.decision,
            stop_reason=None if is_running else self.stop_reason,
        )

    def take_outcome(self) -> CallOutcome[Any]:
        """Return the outcome; the node, which outlives the call, drops the value and the error."""
        kept = self.buffer if self.status != "ok" else None
        value, error, self.value, self.error = self.value, self.error, None, None
        return CallOutcome(
            decision=self.decision,
            value=value,
            error=error,
            node=self.record(),
            plan=self.plan,
            partial=None if kept is None else kept.get_partial(),
            detail=self.detail,
            next_plan=self.next_plan,
        )

    def take_decision(self) -> Decision:
        """Return what was decided, and let go of the value and the error."""
        self.value = self.error = None
        return self.decision


class Attempt:
    """One dispatch of a call's function."""

    __slots__ = (
        "affordable_tokens",
        "call",
        "delay_s",
        "estimate",
        "fn",
        "held",
        "is_dispatched",
        "is_misused",
        "is_open",
        "is_retry",
        "number",
        "options",
        "plan",
        "refused",
        "reported",
        "reserved",
        "settled",
        "timer",
        "token",
        "usage",
        "work",
    )

    def __init__(
        self,
        call: Call,
        fn: Callable[[], object],
        options: WrapOptions,
        failed: CallOutcome[Any] | Call | None = None,
    ) -> None:
        self.call = call
        self.fn = fn
        self.options = options
        self.is_retry = failed is not None
        """Whether a unit of the retry budget was taken for it already, when another attempt failed."""
        self.held: dict[object, Any] = {}
        """What each guard remembers about this attempt until it is settled or withdrawn."""
        self.delay_s = 0.0
        self.estimate = 0
        """What to reserve."""
        self.reserved = 0
        self.settled = 0
        """What it was charged."""
        self.reported: int | None = None
        """What the called function said that it cost."""
        self.usage: CallUsage | None = None
        self.number = 0
        """Which attempt of its call it is, from 1; 0 until it is booked."""
        self.is_open = False
        """Whether its reservation waits to be settled."""
        self.is_dispatched = False
        self.is_misused = False
        """Whether the caller's mistake kept it from running; it is not a failure then."""
        self.refused: tuple[Decision, str] | None = None
        """What the shield decided about a request of it, and why, if it kept one from leaving."""
        self.token: CancellationToken | None = None
        """Its own token; a function on its caller's thread has the chain's."""
        self.timer: Timer | None = None
        self.work: Future[object] | None = None
        """Its function on a worker thread, if it runs on one."""
        self.plan: DegradePlan | None = None
        self.affordable_tokens: int | None = None
        """The output that the rest of the money pays for, if that is less than the call asks for."""
        if failed is not None and failed.next_plan is not None:
            # A caller that retries by itself has waited by itself.
            is_waited = failed is not call
            self.degrade(replace(failed.next_plan, delay_ms=0) if is_waited else failed.next_plan)

    @property
    def reservation_id(self) -> str:
        """The attempt's id in the ledger."""
        return f"{self.call.node_id}:{self.number}"

    @property
    def stop_token(self) -> CancellationToken:
        """The token that stops this attempt: its own, or the chain's."""
        return self.token or self.call.context.cancellation_token

    def model(self) -> str | None:
        """Return the model that is called: the degraded one, the call's own, or the chain's."""
        if self.plan is not None and self.plan.model is not None:
            return self.plan.model
        call = self.call
        return self.options.model or (call.context.metadata.model if call.kind == "llm" else None)

    @property
    def max_output_tokens(self) -> int | None:
        """The most output that money is reserved for: what the call asks for, made less by plan and money."""
        planned = None if self.plan is None else self.plan.max_output_tokens
        bounds = (self.options.max_output_tokens, planned, self.affordable_tokens)
        return min((each for each in bounds if each is not None), default=None)

    def degrade(self, plan: DegradePlan | None) -> None:
        """Make the attempt with less, on top of what other guards have asked for."""
        if plan is not None:
            self.plan = plan if self.plan is None else self.plan.merged(plan)
            self.delay_s = max(self.delay_s, self.plan.delay_ms / 1000)

    def carried_plan(self, plan: DegradePlan | None) -> DegradePlan | None:
        """Return the plan for the attempt after this one: what was made less stays so, its delay is over."""
        if self.plan is None:
            return plan
        kept = replace(self.plan, delay_ms=0)
        return kept if plan is None else kept.merged(plan)

    @property
    def is_free(self) -> bool:
        """Whether it is known to cost nothing; a plan's other model is not."""
        other = None if self.plan is None else self.plan.model
        return self.options.is_free and other in (None, self.options.model)

    def close_token(self) -> None:
        """Disarm the timer and detach the token from the chain's."""
        if self.timer is not None:
            self.timer.cancel()
        if self.token is not None:
            self.token.unlink()


current: ContextVar[Attempt | None] = ContextVar("treenail_current_call", default=None)


class ActiveCall:
    """The call that the running code is part of."""

    __slots__ = ("_attempt",)

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    @property
    def node_id(self) -> str:
        """The id of this call's node."""
        return self._attempt.call.node_id

    @property
    def context(self) -> ExecutionContext:
        """The chain that the call belongs to."""
        return self._attempt.call.context

    @property
    def kind(self) -> Kind:
        """Whether it is a model call or a tool call."""
        return self._attempt.call.kind

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return self._attempt.number

    @property
    def plan(self) -> DegradePlan | None:
        """How this attempt is to be degraded, if it is."""
        return self._attempt.plan

    @property
    def max_output_tokens(self) -> int | None:
        """The most output that money is reserved for; the request must not allow more. None if not said."""
        return self._attempt.max_output_tokens

    @property
    def is_shortened(self) -> bool:
        """Whether the answer has to be shorter than was asked for, because of the money that is left."""
        return self._attempt.affordable_tokens is not None

    @property
    def token(self) -> CancellationToken:
        """The token that is cancelled when this call must stop."""
        return self._attempt.stop_token

    @property
    def partial(self) -> PartialResultBuffer:
        """Where to put what the call has produced so far; it survives the call being stopped."""
        call = self._attempt.call
        if call.buffer is None:
            call.buffer = call.context.chain.partials[call.node_id] = PartialResultBuffer()
        return call.buffer

    def report(self, *, cost_usd: float | None = None, usage: CallUsage | None = None) -> None:
        """Say what this attempt has really cost, or what it has used; several reports add up.

        An attempt that then fails, or is stopped, is charged what was reported rather than what was reserved.
        """
        attempt = self._attempt
        if cost_usd is not None:
            cost = to_pico(number("report", "cost_usd", cost_usd, zero_ok=True))
            attempt.reported = cost + (attempt.reported or 0)
        if usage is not None:
            attempt.usage = usage if attempt.usage is None else attempt.usage + usage

    def check_egress(self, url: str, method: str = "GET") -> None:
        """Ask the shield whether a request may leave; `CallRefused` if not, and then let it end the call.

        The call is then halted rather than failed: it takes no retry, and says nothing about its provider.
        """
        self._attempt.call.context.check_attempt_egress(self._attempt, url, method)


def call_around(below: ActiveCall | None) -> Call | None:
    """Return the call that a child chain hangs below: the named one, or else the one that runs now."""
    attempt = current.get() if below is None else below._attempt
    return None if attempt is None else attempt.call


def current_call() -> ActiveCall | None:
    """Return the call that the running code is part of, or None outside of any.

    Through it a called function reaches its token, its degrade plan and its partial result, and reports
    what it costs.
    """
    attempt = current.get()
    return None if attempt is None else ActiveCall(attempt)
