"""The guards of a chain: an ordered list, each of which may refuse an attempt.

`admit` is asked before the attempt is booked. If the attempt is not dispatched after all, `withdraw` takes
back what a guard counted for it; otherwise `settle` tells the guard how it ended. In between, a guard keeps
what it needs in `attempt.held`. Guards only add up on the way down: a child's come after its parent's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeVar

from treenail.containment.attempts import Attempt
from treenail.containment.breaker import (
    CircuitBreaker,
    CircuitBreakers,
    CircuitState,
    Permit,
    Policy,
    PolicyContext,
)
from treenail.containment.chain import Chain
from treenail.containment.costs import Costs
from treenail.containment.limits import ExecutionConfig, StopReason, to_pico, to_usd
from treenail.containment.loops import LoopDetector, LoopPolicy
from treenail.containment.pots import BudgetBackend
from treenail.containment.pricing import CallUsage, estimate_usage
from treenail.containment.rates import RatePolicy, RateWatch
from treenail.containment.records import Status
from treenail.containment.shield import (
    Decision,
    DegradePlan,
    HookPoint,
    ShieldPipeline,
    ToolCallContext,
    Verdict,
)
from treenail.containment.threads import describe

T = TypeVar("T")
Breaker = CircuitBreaker | CircuitBreakers


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an attempt is not made."""

    decision: Decision
    reason: StopReason | None
    detail: str


def refuse(chain: Chain, reason: StopReason, detail: str) -> Refusal:
    """Refuse an attempt for a reason that may pass, and record that."""
    chain.refuse(reason, detail)
    return Refusal(Decision.HALT, reason, detail)


@dataclass(eq=False)
class Guard:
    """One guard; what it does not override, it has no opinion on."""

    _chain: Chain

    def admit(self, attempt: Attempt) -> Refusal | None:
        """Say why the attempt must not be made; None to let it pass."""
        return None

    def withdraw(self, attempt: Attempt) -> None:
        """Take back what was counted for an attempt that is not dispatched."""

    def settle(self, attempt: Attempt, value: object, status: Status, error: BaseException | None) -> None:
        """Hear how a dispatched attempt ended; `error` is a failure that says something of the provider."""


class Guards:
    """All guards of a chain, its parents' included."""

    def __init__(
        self,
        chain: Chain,
        costs: Costs,
        above: Guards | None,
        *,
        pipeline: ShieldPipeline | None,
        breaker: Breaker | None,
        loops: LoopPolicy | None,
        rates: RatePolicy | None,
        policy: Policy | None,
        is_onlooker: bool,
    ) -> None:
        # What an onlooker does says nothing about the run: it feeds none of the run's breakers and detectors.
        fed = None if is_onlooker else above
        self._pipelines: tuple[ShieldPipeline, ...] = (above._pipelines if above else ()) + _some(pipeline)
        self._policies: tuple[Policy, ...] = (above._policies if above else ()) + _some(policy)
        self._breakers: tuple[Breaker, ...] = (fed._breakers if fed else ()) + _some(breaker)
        self._heeded: tuple[Breaker, ...] = (
            () if above is None else above._heeded + (above._breakers if is_onlooker else ())
        )
        self._detectors: tuple[LoopDetector, ...] = (fed._detectors if fed else ()) + _some(
            None if loops is None else LoopDetector(loops)
        )
        self._watches: tuple[RateWatch, ...] = (above._watches if above else ()) + _some(
            None if rates is None else RateWatch(rates, chain.clock)
        )
        pots = _pots([each.config for each in chain.line])
        self.shield = ShieldGuard(chain, costs, self._pipelines)
        self.circuits = CircuitGuard(chain, self._breakers, self._heeded)
        self.before_wait: list[Guard] = []
        """Asked before the delay that a plan may ask for."""
        self.before_dispatch: list[Guard] = []
        """Asked after it."""
        if self._detectors:
            self.before_wait.append(LoopGuard(chain, self._detectors))
        if self._pipelines:
            self.before_wait.append(self.shield)
        if self._policies:
            self.before_dispatch.append(PolicyGuard(chain, self._policies))
        self._shared = PotGuard(chain, costs, pots) if pots else None
        if self._shared is not None:
            self.before_dispatch.append(self._shared)
        if self._breakers or self._heeded:
            self.before_dispatch.append(self.circuits)
        self.all: list[Guard] = [*self.before_wait, *self.before_dispatch]
        if self._watches:
            self.all.append(RateGuard(chain, self._watches))
        self.has_any = bool(self.before_wait or self.before_dispatch)
        self.has_shield = bool(self._pipelines)
        self.has_breakers = bool(self._breakers)
        self.pots = tuple(pot for pot, _ in pots)

    def settle_pots(self, attempt: Attempt) -> None:
        """Replace what is reserved of shared money by the real cost of an attempt."""
        if self._shared is not None:
            self._shared.replace(attempt)

    def withdraw(self, attempt: Attempt) -> None:
        """Let each guard take back what it counted for an attempt that is not dispatched."""
        for guard in self.all:
            guard.withdraw(attempt)


@dataclass(eq=False)
class LoopGuard(Guard):
    """Refuses a call that goes in circles."""

    _detectors: Sequence[LoopDetector]

    def admit(self, attempt: Attempt) -> Refusal | None:
        """Look for a loop; a retry is not a step of one."""
        call = attempt.call
        for detector in () if attempt.is_retry else self._detectors:
            finding = detector.observe(call.kind, call.operation_name, attempt.options.fingerprint)
            if finding is None:
                continue
            decision = Decision.HALT if finding.must_halt else Decision.ALLOW
            if finding.is_new or finding.must_halt:
                self._chain.tell("loop_detected", decision, finding.description, hook="LoopDetector")
            if finding.must_halt:
                return Refusal(Decision.HALT, None, f"a loop: {finding.description}")
        return None


@dataclass(slots=True)
class _Judged:
    ctx: ToolCallContext
    verdicts: list[tuple[ShieldPipeline, Verdict]]


@dataclass(eq=False)
class ShieldGuard(Guard):
    """Asks the shield's hooks before the call and before its charge, and tells them of its end."""

    _costs: Costs
    _pipelines: Sequence[ShieldPipeline]
    _refused_charge: str | None = None

    def admit(self, attempt: Attempt) -> Refusal | None:
        """Ask about the call, then about the reservation; a hook that degrades makes that a smaller one."""
        refused, self._refused_charge = self._refused_charge, None
        if refused is not None:
            return refuse(self._chain, StopReason.BUDGET_EXCEEDED, refused)
        judged = attempt.held[self] = _Judged(self._context(attempt), [])
        point: HookPoint = "before_llm_call" if attempt.call.kind == "llm" else "before_tool_call"
        refusal = self._judge(attempt, judged, point)
        if refusal is None and attempt.plan is not None:
            refusal = reprice(self._chain, self._costs, attempt)
        before = attempt.plan
        if refusal is None:
            refusal = self._judge(attempt, judged, "before_charge", to_usd(attempt.estimate))
        if refusal is None and attempt.plan is not before:
            refusal = reprice(self._chain, self._costs, attempt)
        return refusal

    def _judge(self, attempt: Attempt, judged: _Judged, point: HookPoint, *details: object) -> Refusal | None:
        for pipeline in self._pipelines:
            verdict = pipeline.judge(point, judged.ctx, *details)
            self._chain.note(*verdict.events)
            judged.verdicts.append((pipeline, verdict))
            pipeline.follow_up("hold", judged.ctx, verdict)
            if verdict.is_blocking:
                reason = _stop_reason_of(verdict.hook)
                if reason is not None and verdict.decision is Decision.HALT:
                    self._chain.refuse(reason, verdict.reason)
                return Refusal(verdict.decision, reason, verdict.reason)
            attempt.degrade(verdict.plan)
        return None

    def withdraw(self, attempt: Attempt) -> None:
        """Let the hooks that counted the attempt take it back."""
        self._follow_up("release", attempt)

    def made(self, attempt: Attempt) -> None:
        """Let the hooks that counted the attempt count it from now on: it is dispatched."""
        self._follow_up("made", attempt)

    def _follow_up(self, what: Literal["made", "release"], attempt: Attempt) -> None:
        judged: _Judged | None = attempt.held.get(self)
        if judged is not None:
            for pipeline, verdict in judged.verdicts:
                pipeline.follow_up(what, judged.ctx, verdict)
            judged.verdicts.clear()

    def settle(self, attempt: Attempt, value: object, status: Status, error: BaseException | None) -> None:
        """Tell the hooks what the attempt used, and ask about what it cost beyond its reservation."""
        judged: _Judged | None = attempt.held.get(self)
        if judged is not None:
            judged.verdicts.clear()
        # A failed call of which nothing is known has used no tokens; a good one has used what it asked for.
        usage = attempt.usage or (None if status == "ok" else CallUsage())
        ctx = self._context(attempt, cost=attempt.settled, usage=usage)
        over = attempt.settled - attempt.reserved
        for pipeline in self._pipelines:
            if over > 0:
                # The reservation was judged before; this is the rest. It is spent: a refusal is for the next.
                verdict = pipeline.judge("before_charge", ctx, to_usd(over))
                self._chain.note(*verdict.events)
                if verdict.is_blocking:
                    self._refused_charge = verdict.reason
            if attempt.call.kind == "llm" and status == "ok":
                self._chain.note(*pipeline.tell("after_llm_call", ctx, value))
            elif attempt.call.kind == "llm":
                self._chain.note(*pipeline.tell("after_failed_call", ctx))

    def after_error(self, attempt: Attempt, error: BaseException) -> tuple[Decision, DegradePlan | None]:
        """Ask what should follow a failed attempt: a decision, and a plan for the next attempt."""
        judged: _Judged | None = attempt.held.get(self)
        plan: DegradePlan | None = None
        options = attempt.options
        is_retried = options.will_retry or options.retry_policy_override is not None
        for pipeline in self._pipelines if judged is not None else ():
            # The pipeline's default for errors is not meant against a caller that asks for retries itself.
            if judged is None or (is_retried and not pipeline.has_retry_hook):
                continue
            verdict = pipeline.judge_error(judged.ctx, error)
            self._chain.note(*verdict.events)
            if verdict.plan is not None:
                plan = verdict.plan if plan is None else plan.merged(verdict.plan)
            elif verdict.is_blocking and verdict.decision is not Decision.RETRY:
                return verdict.decision, None
        return Decision.RETRY, plan

    def egress(self, attempt: Attempt | None, url: str, method: str) -> Verdict | None:
        """Ask whether a request may leave; the verdict that forbids it, or None."""
        judged: _Judged | None = None if attempt is None else attempt.held.get(self)
        request_id = self._chain.metadata.request_id
        ctx = judged.ctx if judged is not None else ToolCallContext(request_id, endpoint=url)
        for pipeline in self._pipelines:
            verdict = pipeline.judge("before_egress", ctx, url, method)
            self._chain.note(*verdict.events)
            if verdict.is_blocking:
                return verdict
        return None

    def _context(
        self, attempt: Attempt, *, cost: int | None = None, usage: CallUsage | None = None
    ) -> ToolCallContext:
        chain, options = self._chain, attempt.options
        metadata = chain.metadata
        capped = next((each for each in chain.books.accounts if each.max_cost is not None), None)
        estimated = estimate_usage(input_tokens=options.input_tokens, request=options.request)
        return ToolCallContext(
            request_id=metadata.request_id,
            user_id=metadata.user_id,
            session_id=attempt.call.node_id,
            tool_name=options.operation_name,
            model=attempt.model(),
            tokens_in=(usage or estimated).input_tokens,
            tokens_out=usage.output_tokens if usage else attempt.max_output_tokens,
            cost_usd=to_usd(attempt.estimate if cost is None else cost),
            metadata=MappingProxyType(
                {
                    **metadata.tags,
                    "chain_id": chain.id,
                    "org_id": metadata.org_id,
                    "team": metadata.team,
                    "service": metadata.service,
                    "cost_usd_accumulated": to_usd((capped or chain.account).tally.spent),
                    "max_cost_usd": to_usd(capped.max_cost) if capped and capped.max_cost else None,
                }
            ),
        )


@dataclass(eq=False)
class PolicyGuard(Guard):
    """Asks policies, such as a memory governor."""

    _policies: Sequence[Policy]

    def admit(self, attempt: Attempt) -> Refusal | None:
        """Ask each policy; one that cannot answer has not allowed the attempt."""
        chain, options = self._chain, attempt.options
        context = PolicyContext(
            cost_usd=to_usd(chain.account.tally.spent),
            step_count=chain.account.tally.steps,
            entity_id=options.entity_id or options.operation_name,
            chain_id=chain.id,
            timestamp=chain.clock.monotonic(),
        )
        for policy in self._policies:
            kind, detail = "policy_denied", ""
            try:
                answer = policy.check(context)
                if answer.allowed:
                    continue
                kind, detail = answer.policy_type or kind, answer.reason
            except Exception as error:  # noqa: BLE001 - a policy that cannot answer has not allowed the call
                detail = f"raised {describe(error)}"
            name = type(policy).__name__
            detail = detail or f"{name} denied the call"
            chain.tell(kind, Decision.HALT, detail, hook=name)
            return Refusal(Decision.HALT, None, detail)
        return None


@dataclass(eq=False)
class PotGuard(Guard):
    """Draws from the money that several chains share."""

    _costs: Costs
    _pots: Sequence[tuple[BudgetBackend, float]]

    def admit(self, attempt: Attempt) -> Refusal | None:
        """Reserve the estimate in every pot on the way up; if one refuses, the others get theirs back."""
        held: list[tuple[BudgetBackend, str]] = attempt.held.setdefault(self, [])
        for pot, ceiling in self._pots:
            while (reservation_id := pot.reserve(to_usd(attempt.estimate), ceiling)) is None:
                left = to_pico(ceiling) - to_pico(pot.get())
                # What others have reserved is not told: ask for half until it is given.
                if self._costs.fit(attempt, min(left, attempt.estimate // 2)):
                    continue
                name = getattr(pot, "name", None)
                which = f", the pot {name!r}" if name else ""
                detail = f"the money shared with other chains ({ceiling:g} USD{which}) is spent or reserved"
                return refuse(self._chain, StopReason.BUDGET_EXCEEDED, detail)
            held.append((pot, reservation_id))
        return None

    def withdraw(self, attempt: Attempt) -> None:
        """Give the reservations back."""
        for pot, reservation_id in attempt.held.pop(self, ()):
            pot.rollback(reservation_id)

    def replace(self, attempt: Attempt) -> None:
        """Replace the reservations by the real cost."""
        for pot, reservation_id in attempt.held.pop(self, ()):
            pot.commit(reservation_id, to_usd(attempt.settled))


@dataclass(eq=False)
class CircuitGuard(Guard):
    """Asks the circuit breakers, and tells them how the provider did."""

    _breakers: Sequence[Breaker]
    _heeded: Sequence[Breaker]
    """Those that stop this chain's calls and are told nothing about them."""

    def admit(self, attempt: Attempt) -> Refusal | None:
        """Get a permit from each breaker; the probe of a half-open circuit is not for an onlooker."""
        entity = _entity(attempt)
        for breaker in _of(entity, self._heeded):
            if breaker.state is not CircuitState.CLOSED:
                return self._open(entity, breaker)
        permits: list[Permit] = attempt.held.setdefault(self, [])
        for breaker in _of(entity, self._breakers):
            permit = breaker.acquire()
            if permit is None:
                return self._open(entity, breaker)
            permits.append(permit)
        return None

    def forecast(self, attempt: Attempt, delay_s: float) -> Refusal | None:
        """Say whether an attempt after that wait would be refused because no probe is due by then."""
        entity = _entity(attempt)
        for breaker in _of(entity, (*self._heeded, *self._breakers)):
            if breaker.probe_due_s > delay_s:
                return self._open(entity, breaker)
        return None

    def _open(self, entity: str, breaker: CircuitBreaker) -> Refusal:
        detail = f"{entity or 'the provider'}: {breaker.describe()}"
        return refuse(self._chain, StopReason.CIRCUIT_OPEN, detail)

    def withdraw(self, attempt: Attempt) -> None:
        """Give the permits back: the attempt says nothing about the provider."""
        for permit in attempt.held.pop(self, ()):
            permit.release()

    def settle(self, attempt: Attempt, value: object, status: Status, error: BaseException | None) -> None:
        """Tell the breakers that the provider succeeded, failed, or that nothing was learned about it."""
        for permit in attempt.held.pop(self, ()):
            if status == "ok":
                permit.succeed()
            elif error is not None:
                permit.fail(error)
            else:
                permit.release()


@dataclass(eq=False)
class RateGuard(Guard):
    """Watches how fast money and tokens go. It warns and never refuses."""

    _watches: Sequence[RateWatch]

    def settle(self, attempt: Attempt, value: object, status: Status, error: BaseException | None) -> None:
        """Add what the attempt cost, and report a rate that is too high."""
        usage = attempt.usage
        tokens = usage.input_tokens + usage.output_tokens if usage else 0
        for watch in self._watches:
            for event_type, reason in watch.observe(to_usd(attempt.settled), tokens):
                self._chain.tell(event_type, Decision.ALLOW, reason, hook="RateWatch")


def reprice(chain: Chain, costs: Costs, attempt: Attempt) -> Refusal | None:
    """Set what to reserve; refuse an attempt of unknown price while a ceiling in USD has to be kept."""
    estimate = costs.estimate(attempt)
    if estimate is not None:
        attempt.estimate = estimate
        return None
    kind, why = "price_unknown", f"no price is known for {attempt.model()!r}"
    if attempt.options.is_unbounded:
        kind, why = "answer_unbounded", f"nothing bounds what a call of {attempt.model()!r} may cost"
    detail = (
        f"{why}, so a ceiling in USD cannot be kept; give cost_estimate_hint or prices=, or set "
        f"on_unknown_price"
    )
    chain.tell(kind, Decision.HALT, detail)
    return Refusal(Decision.HALT, None, detail)


def _entity(attempt: Attempt) -> str:
    """Name the provider or the tool that an attempt goes to."""
    options = attempt.options
    if options.entity_id:
        return options.entity_id
    return (attempt.model() or "llm") if attempt.call.kind == "llm" else options.operation_name


def _of(entity: str, breakers: Sequence[Breaker]) -> Iterator[CircuitBreaker]:
    return (each.get(entity) if isinstance(each, CircuitBreakers) else each for each in breakers)


def _pots(configs: Sequence[ExecutionConfig]) -> tuple[tuple[BudgetBackend, float], ...]:
    """Return each shared pot once, with the lowest ceiling that any of the chains sets on it."""
    pots: dict[int, tuple[BudgetBackend, float]] = {}
    for config in configs:
        shared = list(config.pots)
        if config.budget_backend is not None and config.max_cost_usd is not None:
            shared.insert(0, (config.budget_backend, config.max_cost_usd))
        for pot, ceiling in shared:
            pots[id(pot)] = (pot, min(ceiling, pots.get(id(pot), (pot, ceiling))[1]))
    return tuple(pots.values())


def _stop_reason_of(hook: object) -> StopReason | None:
    """Read which of the eight reasons a hook stops for; any other word is none of them."""
    said = getattr(hook, "stop_reason", None)
    return next((each for each in StopReason if each == said), None)


def _some(item: T | None) -> tuple[T, ...]:
    return () if item is None else (item,)
