"""The shield: hooks that are asked at each boundary of a call.

A boundary (before a model call, before a tool call, before a request leaves, before a charge, after an error)
has any number of hooks, asked in order. The first that blocks ends the question; those that degrade add to
one plan and the call continues with it. A hook that raises is treated as configured, closed or open, and the
fact is recorded. Hooks answer with a `Decision`, with a `DegradePlan`, or with None for "no opinion".

A hook is asked on the caller's thread, which is quick, and waits for it as long as it takes. With
`hook_timeout_ms` it is asked on a worker, and one that has not answered in time has failed like one that
raised; its caller continues, and a later answer is ignored.

A hook that counted a call which a later boundary then blocked is told so through its optional `release(ctx)`,
so that blocked attempts never fill a window. A call may have to wait after it was admitted: the optional
`hold(ctx)` says that it was not made yet, and `made(ctx)` that it is made now.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, TypeAlias

from treenail.clock import Clock, SystemClock
from treenail.containment.limits import check_fields, integer
from treenail.containment.threads import call_later, describe, logger, workers
from treenail.errors import UsageError

_NO_METADATA: Mapping[str, object] = MappingProxyType({})


class Decision(StrEnum):
    """What may become of a call."""

    ALLOW = "ALLOW"
    """It may continue; as an answer of `wrap_*`: it succeeded."""
    RETRY = "RETRY"
    """It failed, and another attempt is within the retry budget."""
    HALT = "HALT"
    """It must not happen, or nothing more must follow it."""
    DEGRADE = "DEGRADE"
    """It may continue with less: a smaller model, a shorter context, after a delay."""
    QUARANTINE = "QUARANTINE"
    """It must not happen, and what asked for it should be looked at."""
    QUEUE = "QUEUE"
    """It must not happen now; put it in a queue."""


BLOCKING = frozenset({Decision.HALT, Decision.RETRY, Decision.QUARANTINE, Decision.QUEUE})


@dataclass(frozen=True, slots=True)
class ToolCallContext:
    """What a hook is told about the call that it judges."""

    request_id: str
    user_id: str | None = None
    session_id: str | None = None
    """The node id of the call."""
    tool_name: str | None = None
    """The operation's name."""
    model: str | None = None
    endpoint: str | None = None
    tokens_in: int | None = None
    """Input tokens: the estimate before the call, the real number after it."""
    tokens_out: int | None = None
    """Output tokens: the most that was asked for before the call, the real number after it."""
    cost_usd: float | None = None
    """The cost: reserved before the call, real after it."""
    metadata: Mapping[str, object] = field(default_factory=lambda: _NO_METADATA)
    """chain_id, org_id, team, service, tags, and what the chain has spent of what it may spend."""


@dataclass(frozen=True, slots=True)
class SafetyEvent:
    """One incident: what was decided, by whom, and why."""

    event_type: str
    decision: Decision
    reason: str
    hook: str
    request_id: str | None = None
    ts: datetime = field(default_factory=lambda: SystemClock().now())
    metadata: Mapping[str, object] = field(default_factory=lambda: _NO_METADATA)
    envelope: object = None


@dataclass(frozen=True, slots=True)
class DegradePlan:
    """How to make a call with less. A hook returns it to say DEGRADE.

    The callee reads it from `current_call()`.
    """

    model: str | None = None
    """Call this model instead."""
    trim_to_tokens: int | None = None
    """Send at most this many tokens of context."""
    max_output_tokens: int | None = None
    """Ask for at most this many tokens."""
    delay_ms: int = 0
    """Wait this long first; the containment itself does the waiting."""
    reason: str = ""

    def __post_init__(self) -> None:
        check_fields(self, integer, "trim_to_tokens", zero_ok=True, none_ok=True)
        check_fields(self, integer, "max_output_tokens", none_ok=True)
        check_fields(self, integer, "delay_ms", zero_ok=True)
        named: object = self.model
        if named is not None and (not isinstance(named, str) or not named):
            raise UsageError(f"DegradePlan.model must be a model's name, not {named!r}")

    def merged(self, other: DegradePlan) -> DegradePlan:
        """Return the narrower of both plans, point by point; `other` names the model if both do."""
        return DegradePlan(
            model=other.model or self.model,
            trim_to_tokens=_least(self.trim_to_tokens, other.trim_to_tokens),
            max_output_tokens=_least(self.max_output_tokens, other.max_output_tokens),
            delay_ms=max(self.delay_ms, other.delay_ms),
            # Said once, however often the same hook has said it.
            reason="; ".join(dict.fromkeys(reason for reason in (self.reason, other.reason) if reason)),
        )


def _least(one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None]
    return min(known) if known else None


Answer: TypeAlias = Decision | DegradePlan | None


HookPoint = Literal["before_llm_call", "before_tool_call", "before_egress", "on_error", "before_charge"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a boundary said: the decision, the plan if it is DEGRADE, and the hook that blocked, if any."""

    decision: Decision = Decision.ALLOW
    plan: DegradePlan | None = None
    hook: object = None
    reason: str = ""
    events: tuple[SafetyEvent, ...] = ()
    admitted_by: tuple[object, ...] = ()

    @property
    def is_blocking(self) -> bool:
        """Whether the call must not be made."""
        return self.decision in BLOCKING


Hooks: TypeAlias = object | Sequence[object] | None


class ShieldPipeline:
    """Hooks at the boundaries of every call. Thread-safe; chains may share one.

    A hook is any object with some of these methods; each answers with a `Decision`, a `DegradePlan`, or None
    for "no opinion":

    - `before_llm_call(ctx)` and `before_tool_call(ctx)`, before a call is made;
    - `before_egress(ctx, url, method)`, before a request leaves the machine;
    - `before_charge(ctx, cost_usd)`, about the reservation before the call, and after it about what the real
      cost exceeds it by;
    - `on_error(ctx, err)`, after a call has failed; None leaves it to the retry budget.

    `after_llm_call(ctx, response)` hears of every model call that succeeded, with the real usage in `ctx`;
    `after_failed_call(ctx)` hears of every one that did not.

    Each argument takes one hook or several, in order. `hooks` takes hooks for every boundary that they know.
    Without a retry hook an error is answered with `on_error_policy`. `on_hook_failure` says what a hook that
    raises, or that does not answer within `hook_timeout_ms`, amounts to: "closed" is HALT, "open" is no
    opinion; it is recorded either way. Without `hook_timeout_ms` a hook may take as long as it likes.
    """

    MAX_EVENTS = 1000

    def __init__(
        self,
        pre_dispatch: Hooks = None,
        egress: Hooks = None,
        retry: Hooks = None,
        budget: Hooks = None,
        tool_dispatch: Hooks = None,
        on_error_policy: Decision = Decision.HALT,
        *,
        hooks: Iterable[object] = (),
        on_hook_failure: Literal["closed", "open"] = "closed",
        hook_timeout_ms: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        if on_hook_failure not in ("closed", "open"):
            raise UsageError(f'on_hook_failure must be "closed" or "open", not {on_hook_failure!r}')
        if hook_timeout_ms is not None:
            integer("ShieldPipeline", "hook_timeout_ms", hook_timeout_ms)
        self._hook_timeout_ms = hook_timeout_ms
        self._on_error_policy = Decision(on_error_policy)
        self._on_hook_failure = Decision.HALT if on_hook_failure == "closed" else Decision.ALLOW
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._events: deque[SafetyEvent] = deque(maxlen=self.MAX_EVENTS)
        given: dict[HookPoint, list[object]] = {
            "before_llm_call": _listed("pre_dispatch", pre_dispatch, "before_llm_call"),
            "before_egress": _listed("egress", egress, "before_egress"),
            "on_error": _listed("retry", retry, "on_error"),
            "before_charge": _listed("budget", budget, "before_charge"),
            "before_tool_call": _listed("tool_dispatch", tool_dispatch, "before_tool_call"),
        }
        # A hook that guards everything (safe mode) is not left out of a boundary by where it was mentioned.
        for hook in [
            *hooks,
            *(h for named in given.values() for h in named if getattr(h, "everywhere", False)),
        ]:
            known = [boundary for boundary in given if callable(getattr(hook, boundary, None))]
            if not known and not callable(getattr(hook, "after_llm_call", None)):
                raise UsageError(f"{hook!r} has none of the hook methods: {', '.join(given)}, after_llm_call")
            for boundary in known:
                if not any(hook is present for present in given[boundary]):
                    given[boundary].append(hook)
        self._hooks = {boundary: tuple(named) for boundary, named in given.items()}
        everyone = [*hooks, *(hook for named in given.values() for hook in named)]
        told = [hook for hook in everyone if callable(getattr(hook, "after_llm_call", None))]
        self._told = tuple({id(hook): hook for hook in told}.values())

    # --- the boundaries, as the plain decision --------------------------------------------------

    def before_llm_call(self, ctx: ToolCallContext) -> Decision:
        """Ask whether a model call may be made."""
        return self.judge("before_llm_call", ctx).decision

    def before_tool_call(self, ctx: ToolCallContext) -> Decision:
        """Ask whether a tool call may be made."""
        return self.judge("before_tool_call", ctx).decision

    def before_egress(self, ctx: ToolCallContext, url: str, method: str) -> Decision:
        """Ask whether a request may leave the machine."""
        return self.judge("before_egress", ctx, url, method).decision

    def on_error(self, ctx: ToolCallContext, err: BaseException) -> Decision:
        """Ask what should follow an error; without a retry hook that is `on_error_policy`."""
        return self.judge_error(ctx, err).decision

    def before_charge(self, ctx: ToolCallContext, cost_usd: float) -> Decision:
        """Ask whether that much may be charged."""
        return self.judge("before_charge", ctx, cost_usd).decision

    def get_events(self) -> list[SafetyEvent]:
        """Return the newest events, at most `MAX_EVENTS`, oldest first."""
        with self._lock:
            return list(self._events)

    # --- the boundaries, as the whole verdict ---------------------------------------------------

    def judge(self, boundary: HookPoint, ctx: ToolCallContext, *details: object) -> Verdict:
        """Ask every hook of a boundary in order and return what they said together."""
        verdict = Verdict()
        plan: DegradePlan | None = None
        events: list[SafetyEvent] = []
        admitted: list[object] = []
        for hook in self._hooks[boundary]:
            try:
                decision, wanted = _read(self._ask(getattr(hook, boundary), ctx, *details))
                event_type, reason = _words(hook, decision, wanted)
            except Exception as error:  # noqa: BLE001 - whatever a hook raises is answered as configured
                decision, event_type = self._on_hook_failure, "hook_failed"
                reason = f"{type(hook).__name__}.{boundary} raised {describe(error)}"
                events.append(self._event(event_type, decision, reason, hook, ctx))
            else:
                if decision is not Decision.ALLOW:
                    events.append(self._event(event_type, decision, reason, hook, ctx))
                if decision not in BLOCKING:
                    admitted.append(hook)
                if decision is Decision.DEGRADE:
                    wanted = replace(wanted or DegradePlan(), reason=reason)
                    plan = wanted if plan is None else plan.merged(wanted)
                    verdict = Verdict(decision, plan, None, plan.reason)
            if decision in BLOCKING:
                verdict = Verdict(decision, None, hook, reason)
                break
        self._record(events)
        return replace(verdict, events=tuple(events), admitted_by=tuple(admitted))

    def judge_error(self, ctx: ToolCallContext, err: BaseException) -> Verdict:
        """Ask the retry hooks what should follow an error."""
        if self._hooks["on_error"]:
            return self.judge("on_error", ctx, err)
        decision, reason = self._on_error_policy, describe(err)
        if decision is Decision.RETRY or decision not in BLOCKING:
            return Verdict(decision, reason=reason)
        reason = f"{reason}; no retry hook allows another attempt (on_error_policy)"
        events = [self._event("on_error_policy", decision, reason, self, ctx)]
        self._record(events)
        return Verdict(decision, reason=reason, events=tuple(events))

    @property
    def has_retry_hook(self) -> bool:
        """Whether a hook, rather than `on_error_policy`, answers errors."""
        return bool(self._hooks["on_error"])

    def tell(
        self, method: Literal["after_llm_call", "after_failed_call"], ctx: ToolCallContext, *details: object
    ) -> tuple[SafetyEvent, ...]:
        """Tell the hooks how a model call ended; return the events of those that failed to listen."""
        events = []
        for hook in self._told:
            listen = getattr(hook, method, None)
            try:
                if callable(listen):
                    self._ask(listen, ctx, *details)
            except Exception as error:  # noqa: BLE001 - the call is over; a hook cannot undo it
                reason = f"{type(hook).__name__}.{method} raised {describe(error)}"
                events.append(self._event("hook_failed", Decision.ALLOW, reason, hook, ctx))
        self._record(events)
        return tuple(events)

    def _ask(self, method: Callable[..., object], *details: object) -> object:
        """Call a hook, and wait for its answer no longer than is allowed."""
        if self._hook_timeout_ms is None:
            return method(*details)
        woken = threading.Event()
        timer = call_later(self._clock, self._hook_timeout_ms / 1000, woken.set)
        asked = workers.start(lambda: method(*details))
        asked.add_done_callback(lambda _: woken.set())
        woken.wait()
        timer.cancel()
        if not asked.done():
            raise TimeoutError(f"it has not answered within {self._hook_timeout_ms} ms")
        return asked.result()

    def follow_up(
        self, what: Literal["hold", "made", "release"], ctx: ToolCallContext, verdict: Verdict
    ) -> None:
        """Tell the hooks that admitted a call what became of it: not made yet, made now, or not after all."""
        for hook in verdict.admitted_by:
            listen = getattr(hook, what, None)
            try:
                if callable(listen):
                    self._ask(listen, ctx)
            except Exception:  # noqa: BLE001 - logged; what became of the call stands
                logger.exception("a hook could not hear what became of a call (%s)", what)

    def _record(self, events: list[SafetyEvent]) -> None:
        with self._lock:
            self._events.extend(events)

    def _event(
        self, event_type: str, decision: Decision, reason: str, hook: object, ctx: ToolCallContext
    ) -> SafetyEvent:
        return SafetyEvent(
            event_type=event_type,
            decision=decision,
            reason=reason,
            hook=type(hook).__name__,
            request_id=ctx.request_id,
            ts=self._clock.now(),
            metadata={"node_id": ctx.session_id, "operation_name": ctx.tool_name},
        )


def _listed(argument: str, given: Hooks, method: str) -> list[object]:
    if given is None:
        return []
    hooks = list(given) if isinstance(given, list | tuple) else [given]
    for hook in hooks:
        if not callable(getattr(hook, method, None)):
            raise UsageError(
                f"{argument}={hook!r} has no {method} method, so it cannot stand at that boundary"
            )
    return hooks


def _read(answer: object) -> tuple[Decision, DegradePlan | None]:
    if answer is None:
        return Decision.ALLOW, None
    if isinstance(answer, DegradePlan):
        return Decision.DEGRADE, answer
    if isinstance(answer, Decision):
        return answer, None
    raise TypeError(f"a hook must answer with a Decision, a DegradePlan or None, not {answer!r}")


def _words(hook: object, decision: Decision, plan: DegradePlan | None) -> tuple[str, str]:
    """Return the type and the reason of the event that tells of a hook's answer."""
    said, event_type = plan.reason if plan else "", ""
    try:
        said = said or str(getattr(hook, "last_reason", "") or "")
        event_type = str(getattr(hook, "event_type", "") or "")
    except Exception:  # noqa: BLE001  # a hook's answer stands, also if it cannot explain it
        logger.exception("a hook could not explain its answer")
    return event_type or "hook_decision", said or f"{type(hook).__name__} answered {decision}"
