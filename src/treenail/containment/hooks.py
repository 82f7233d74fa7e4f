"""Hooks that come with the shield. Each is thread-safe and may be shared by chains.

A hook counts what it admits in the same locked step in which it decides, so that two threads cannot both take
the last place; and it gives the place back when `release` says that the call was not made. Between a call's
admission and its dispatch there may be a delay: `hold` and `made` say so.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, tzinfo
from fnmatch import fnmatchcase
from types import MappingProxyType
from urllib.parse import urlsplit

from treenail.clock import Clock, SystemClock
from treenail.containment.limits import StopReason, check_fields, fraction, integer, number
from treenail.containment.shield import Answer, Decision, DegradePlan, SafetyEvent, ToolCallContext
from treenail.errors import UsageError


class TimeAwarePolicy:
    """A share of the usual budget for nights and weekends, when nobody watches."""

    def __init__(
        self,
        weekend_multiplier: float = 0.85,
        offhour_multiplier: float = 0.90,
        work_start: time = time(9, 0),
        work_end: time = time(18, 0),
        tz: tzinfo = UTC,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.weekend_multiplier = fraction("TimeAwarePolicy", "weekend_multiplier", weekend_multiplier)
        self.offhour_multiplier = fraction("TimeAwarePolicy", "offhour_multiplier", offhour_multiplier)
        if work_start >= work_end:
            raise UsageError(
                f"TimeAwarePolicy.work_end must be after work_start ({work_start}), not {work_end}"
            )
        self.work_start = work_start
        self.work_end = work_end
        self._tz = tz
        self._clock = clock or SystemClock()

    def get_multiplier(self, moment: datetime | None = None) -> float:
        """Return the share of the usual budget at `moment` (now, if left out); a weekend night is weekend."""
        local = (moment or self._clock.now()).astimezone(self._tz)
        if local.weekday() >= 5:
            return self.weekend_multiplier
        is_work = self.work_start <= local.time() < self.work_end
        return 1.0 if is_work else self.offhour_multiplier


class _Window:
    """When something happened in the last `seconds`. Not locked: its owner is."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds = seconds
        self._clock = clock
        self._times: deque[float] = deque()

    def count(self) -> int:
        oldest = self._clock.monotonic() - self._seconds
        while self._times and self._times[0] <= oldest:
            self._times.popleft()
        return len(self._times)

    def add(self) -> None:
        self._times.append(self._clock.monotonic())


class _Places:
    """The places of a window: when each was used, and those that are held for a call that waits.

    A place is found again by its call. Not locked: its owner is.
    """

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds = seconds
        self._clock = clock
        self._serials = itertools.count()
        self._used: OrderedDict[int, tuple[float, str | None]] = OrderedDict()
        """By age, the oldest first."""
        self._held: set[int] = set()
        self._of_call: dict[str | None, list[int]] = {}

    def count(self) -> int:
        oldest = self._clock.monotonic() - self._seconds
        while self._used:
            serial, (at, call) = next(iter(self._used.items()))
            if at > oldest:
                break
            self._used.popitem(last=False)
            self._forget(call, serial)
        return len(self._used) + len(self._held)

    def take(self, call: str | None) -> None:
        """Use a place now."""
        serial = next(self._serials)
        self._used[serial] = (self._clock.monotonic(), call)
        self._of_call.setdefault(call, []).append(serial)

    def hold(self, call: str | None) -> None:
        """Keep a call's place, without its growing older, until the call is made."""
        for serial in self._of_call.get(call, ())[-1:]:
            self._used.pop(serial, None)
            self._held.add(serial)

    def use(self, call: str | None) -> None:
        """Let a call's held places count from now on."""
        for serial in self._of_call.get(call, ()):
            if serial in self._held:
                self._held.discard(serial)
                self._used[serial] = (self._clock.monotonic(), call)

    def give_back(self, call: str | None) -> None:
        for serial in self._of_call.get(call, ())[-1:]:
            self._used.pop(serial, None)
            self._held.discard(serial)
            self._forget(call, serial)

    def _forget(self, call: str | None, serial: int) -> None:
        left = [each for each in self._of_call.get(call, ()) if each != serial]
        if left:
            self._of_call[call] = left
        else:
            self._of_call.pop(call, None)


class BudgetWindowHook:
    """At most `max_calls` calls in any `window_seconds`; from `degrade_threshold` of them on, DEGRADE.

    Only calls that were made are counted: blocked attempts do not keep the window full. A call that has to
    wait first keeps its place meanwhile, and counts from when it is made. `schedule` scales the ceiling by
    the time of day.
    """

    event_type = "budget_window"
    stop_reason = StopReason.PROVIDER_RATE_LIMIT

    def __init__(
        self,
        max_calls: int,
        window_seconds: float = 60.0,
        degrade_threshold: float = 0.8,
        *,
        plan: DegradePlan | None = None,
        schedule: TimeAwarePolicy | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.max_calls = integer("BudgetWindowHook", "max_calls", max_calls)
        self.window_seconds = number("BudgetWindowHook", "window_seconds", window_seconds)
        self.degrade_threshold = fraction("BudgetWindowHook", "degrade_threshold", degrade_threshold)
        self._plan = plan or DegradePlan()
        self._schedule = schedule
        self._lock = threading.Lock()
        self._places = _Places(self.window_seconds, clock or SystemClock())
        self.last_reason = ""

    def before_llm_call(self, ctx: ToolCallContext) -> Answer:
        """Admit and count the call, degrade it, or halt it."""
        with self._lock:
            ceiling, used = self._ceiling(), self._places.count()
            self.last_reason = f"{used} of {ceiling} calls were made in the last {self.window_seconds:g} s"
            if used >= ceiling:
                return Decision.HALT
            self._places.take(ctx.session_id)
        return self._plan if used >= ceiling * self.degrade_threshold else None

    def _ceiling(self) -> int:
        if self._schedule is None:
            return self.max_calls
        return max(1, int(self.max_calls * self._schedule.get_multiplier()))

    def before_tool_call(self, ctx: ToolCallContext) -> Answer:
        """Count a tool call as a model call is counted, if the hook stands at that boundary too."""
        return self.before_llm_call(ctx)

    def hold(self, ctx: ToolCallContext) -> None:
        """Keep the place of a call that has not been made yet."""
        with self._lock:
            self._places.hold(ctx.session_id)

    def made(self, ctx: ToolCallContext) -> None:
        """Count a call from now on: it is made."""
        with self._lock:
            self._places.use(ctx.session_id)

    def release(self, ctx: ToolCallContext) -> None:
        """Give back the place of a call that was not made: its own, not another call's."""
        with self._lock:
            self._places.give_back(ctx.session_id)


class TokenBudgetHook:
    """Ceilings on the tokens of all calls that this hook sees; 0 for `max_total_tokens` means none.

    Usage is taken from each call's context after it was made, or reported with `record_usage`.
    """

    event_type = "token_budget"

    def __init__(
        self, max_output_tokens: int, max_total_tokens: int = 0, degrade_threshold: float = 0.8
    ) -> None:
        self.max_output_tokens = integer("TokenBudgetHook", "max_output_tokens", max_output_tokens)
        self.max_total_tokens = integer("TokenBudgetHook", "max_total_tokens", max_total_tokens, zero_ok=True)
        self.degrade_threshold = fraction("TokenBudgetHook", "degrade_threshold", degrade_threshold)
        self._lock = threading.Lock()
        self._pending: dict[str, tuple[int, int]] = {}
        self.input_total = 0
        self.output_total = 0
        self.last_reason = ""

    def record_usage(self, output_tokens: int, input_tokens: int = 0) -> None:
        """Add tokens that were really used."""
        integer("TokenBudgetHook", "output_tokens", output_tokens, zero_ok=True)
        integer("TokenBudgetHook", "input_tokens", input_tokens, zero_ok=True)
        with self._lock:
            self.output_total += output_tokens
            self.input_total += input_tokens

    def before_llm_call(self, ctx: ToolCallContext) -> Answer:
        """Reserve the tokens that the call says it may use; halt it if they do not fit."""
        out, into = ctx.tokens_out or 0, ctx.tokens_in or 0
        with self._lock:
            output = self.output_total + sum(pending[0] for pending in self._pending.values())
            total = output + self.input_total + sum(pending[1] for pending in self._pending.values())
            self.last_reason = (
                f"{output} of {self.max_output_tokens} output tokens and {total} in all are used"
            )
            if output >= self.max_output_tokens or output + out > self.max_output_tokens:
                return Decision.HALT
            if self.max_total_tokens and (
                total >= self.max_total_tokens or total + out + into > self.max_total_tokens
            ):
                return Decision.HALT
            if ctx.session_id is not None:
                self._pending[ctx.session_id] = (out, into)
            share = output / self.max_output_tokens
            if self.max_total_tokens:
                share = max(share, total / self.max_total_tokens)
            left = self.max_output_tokens - output
        return DegradePlan(max_output_tokens=left) if share >= self.degrade_threshold else None

    def after_llm_call(self, ctx: ToolCallContext, response: object) -> None:
        """Replace the reservation by what was used."""
        self.release(ctx)
        self.record_usage(ctx.tokens_out or 0, ctx.tokens_in or 0)

    def after_failed_call(self, ctx: ToolCallContext) -> None:
        """Drop the reservation of a call that failed; what it did use is in the context, if anybody knows."""
        self.after_llm_call(ctx, None)

    def release(self, ctx: ToolCallContext) -> None:
        """Drop the reservation of a call that was not made."""
        with self._lock:
            self._pending.pop(ctx.session_id or "", None)


class SafeModeHook:
    """A switch that stops everything: model calls, tools, requests and retries. It guards every boundary."""

    event_type = "safe_mode"
    everywhere = True
    last_reason = "safe mode is on"

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    def enable(self) -> None:
        """Stop everything from the next call on."""
        self.enabled = True

    def disable(self) -> None:
        """Let calls through again."""
        self.enabled = False

    def before_llm_call(self, ctx: ToolCallContext, *_: object) -> Answer:
        """Halt what is asked about while safe mode is on."""
        return Decision.HALT if self.enabled else None

    before_tool_call = before_egress = on_error = before_llm_call


class InputCompressionHook:
    """Degrades a call whose input is long, and halts one whose input is far too long.

    The plan asks for `compression_threshold_tokens`; the called function does the compressing.
    """

    event_type = "input_size"

    def __init__(self, compression_threshold_tokens: int = 4000, halt_threshold_tokens: int = 8000) -> None:
        self.compression_threshold_tokens = compression_threshold_tokens
        self.halt_threshold_tokens = halt_threshold_tokens
        check_fields(self, integer, "compression_threshold_tokens", "halt_threshold_tokens")
        if halt_threshold_tokens < compression_threshold_tokens:
            raise UsageError(
                "InputCompressionHook.halt_threshold_tokens must not be below compression_threshold_tokens"
            )
        self.last_reason = ""

    def before_llm_call(self, ctx: ToolCallContext) -> Answer:
        """Judge the call by the size of its input, if that is known."""
        tokens = ctx.tokens_in or 0
        self.last_reason = f"the input is about {tokens} tokens long"
        if tokens >= self.halt_threshold_tokens:
            return Decision.HALT
        if tokens >= self.compression_threshold_tokens:
            return DegradePlan(trim_to_tokens=self.compression_threshold_tokens, reason=self.last_reason)
        return None


class AdaptiveBudgetHook(BudgetWindowHook):
    """A ceiling on calls per window that tightens while incidents happen and loosens when they stop.

    Feed it the events of the chain; each `adjust()` moves the ceiling by one step, at most
    `max_adjustment` away from the base.
    """

    event_type = "adaptive_budget"

    def __init__(
        self,
        base_ceiling: int,
        window_seconds: float = 1800.0,
        tighten_trigger: int = 3,
        tighten_pct: float = 0.10,
        loosen_pct: float = 0.05,
        max_adjustment: float = 0.20,
        *,
        tighten_event_types: Iterable[str] = (StopReason.BUDGET_EXCEEDED, StopReason.PROVIDER_RATE_LIMIT),
        clock: Clock | None = None,
    ) -> None:
        owner = type(self).__name__
        self.base_ceiling = integer(owner, "base_ceiling", base_ceiling)
        super().__init__(base_ceiling, window_seconds, degrade_threshold=1.0, clock=clock)
        self._trigger = integer(owner, "tighten_trigger", tighten_trigger)
        self._tighten = fraction(owner, "tighten_pct", tighten_pct)
        self._loosen = fraction(owner, "loosen_pct", loosen_pct)
        self._most = fraction(owner, "max_adjustment", max_adjustment)
        self._types = frozenset(str(event_type) for event_type in tighten_event_types)
        self._incidents = _Window(self.window_seconds, clock or SystemClock())
        self.ceiling_multiplier = 1.0

    @property
    def adjusted_ceiling(self) -> int:
        """The ceiling that applies now; at least one call."""
        return max(1, round(self.base_ceiling * self.ceiling_multiplier))

    def _ceiling(self) -> int:
        return self.adjusted_ceiling

    def feed_events(self, events: Iterable[SafetyEvent]) -> None:
        """Take note of the incidents that are of a kind that tightens."""
        with self._lock:
            for event in events:
                if event.event_type in self._types:
                    self._incidents.add()

    def adjust(self) -> int:
        """Move the ceiling one step: down if enough incidents are in the window, up if there are none."""
        with self._lock:
            seen = self._incidents.count()
            if seen >= self._trigger:
                self.ceiling_multiplier = max(1 - self._most, self.ceiling_multiplier - self._tighten)
            elif seen == 0:
                self.ceiling_multiplier = min(1 + self._most, self.ceiling_multiplier + self._loosen)
            return self.adjusted_ceiling


class EgressBoundaryHook:
    """Lets requests leave only to hosts that match a pattern (`api.example.com`, `*.example.com`)."""

    event_type = "egress"

    def __init__(self, allowed_hosts: Iterable[str], *, methods: Iterable[str] | None = None) -> None:
        self._hosts = tuple(host.lower() for host in allowed_hosts)
        self._methods = None if methods is None else frozenset(method.upper() for method in methods)
        self.last_reason = ""

    def before_egress(self, ctx: ToolCallContext, url: str, method: str) -> Answer:
        """Halt a request to a host, or with a method, that is not allowed."""
        host = (urlsplit(url).hostname or "").lower()
        if not host or not any(fnmatchcase(host, pattern) for pattern in self._hosts):
            self.last_reason = f"{host or url!r} is not an allowed host"
            return Decision.HALT
        if self._methods is not None and method.upper() not in self._methods:
            self.last_reason = f"{method.upper()} is not an allowed method"
            return Decision.HALT
        return None


@dataclass(frozen=True, slots=True)
class DegradationConfig:
    """Where the rungs of a `DegradationLadder` are, as fractions of the chain's money, and what they do."""

    model_map: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Which smaller model stands in for which."""
    trim_to_tokens: int = 4000
    rate_limit_ms: int = 1000
    model_downgrade: float = 0.80
    context_trim: float = 0.85
    rate_limit: float = 0.90

    def __post_init__(self) -> None:
        check_fields(self, integer, "trim_to_tokens", "rate_limit_ms")
        check_fields(self, fraction, "model_downgrade", "context_trim", "rate_limit")


class DegradationLadder:
    """Spends more carefully as the money runs out: a smaller model, then a shorter context, then slowly.

    As a hook before model calls it reads how much of the chain's money is spent and degrades the call.
    """

    event_type = "degradation"

    def __init__(self, config: DegradationConfig | None = None) -> None:
        self.config = config or DegradationConfig()

    def evaluate(self, cost_usd: float, max_cost_usd: float, current_model: str = "") -> DegradePlan | None:
        """Return the plan for that much spent of that much, or None below the first rung.

        Each rung keeps what the rungs below it do.
        """
        config = self.config
        share = cost_usd / max_cost_usd
        if share < min(config.model_downgrade, config.context_trim, config.rate_limit):
            return None
        return DegradePlan(
            model=config.model_map.get(current_model) if share >= config.model_downgrade else None,
            trim_to_tokens=config.trim_to_tokens if share >= config.context_trim else None,
            delay_ms=config.rate_limit_ms if share >= config.rate_limit else 0,
            reason=f"{share:.0%} of {max_cost_usd:g} USD is spent",
        )

    def before_llm_call(self, ctx: ToolCallContext) -> Answer:
        """Degrade the call by how much of the chain's money is spent."""
        spent, ceiling = ctx.metadata.get("cost_usd_accumulated"), ctx.metadata.get("max_cost_usd")
        if not isinstance(spent, int | float) or not isinstance(ceiling, int | float):
            return None
        return self.evaluate(float(spent), float(ceiling), ctx.model or "")
