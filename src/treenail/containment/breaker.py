"""Circuit breakers: after enough failures in a row, stop asking; after a while, let one probe through.

```
CLOSED --threshold failures in a row--> OPEN --recovery_timeout--> HALF_OPEN --probe succeeds--> CLOSED
                                          ^                            |
                                          +-------- probe fails -------+
```

HALF_OPEN has one probe slot. Whoever holds it must give it back, and there are three ways to: success,
failure, and `release` (the call said nothing about the provider: it was cancelled, or refused elsewhere). A
holder that does none of these is forgotten after another `recovery_timeout`, so the breaker cannot wedge.
`acquire` returns a permit, so that a call that began before the breaker opened cannot speak for the probe;
`check` and `record_*` are the same thing for callers who keep no permit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Protocol

from treenail.clock import Clock, SystemClock
from treenail.containment.limits import integer, number
from treenail.containment.threads import logger


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy is told about the chain and the call."""

    cost_usd: float = 0.0
    step_count: int = 0
    entity_id: str = ""
    """The provider or tool in question."""
    chain_id: str = ""
    timestamp: float = 0.0
    metadata: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """What a policy said."""

    allowed: bool
    policy_type: str = ""
    reason: str = ""
    partial_result: object = None
    degradation_action: str | None = None
    fallback_model: str | None = None
    rate_limit_ms: int = 0
    envelope: object = None


class Policy(Protocol):
    """Something that is asked before a call is dispatched; a memory governor is one."""

    def check(self, context: PolicyContext) -> PolicyDecision:
        """Say whether the call may be made."""
        ...


class PolicyPipeline:
    """Several policies as one: all must allow, and the first denial is the answer."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = tuple(policies)

    def check(self, context: PolicyContext) -> PolicyDecision:
        """Ask each policy in order."""
        for policy in self._policies:
            decision = policy.check(context)
            if not decision.allowed:
                return decision
        return PolicyDecision(allowed=True, policy_type="pipeline")


class CircuitState(StrEnum):
    """Where a breaker stands."""

    CLOSED = "CLOSED"
    OPEN = "OPEN"
    HALF_OPEN = "HALF_OPEN"


class Permit:
    """The right to make one call; settle it exactly once, later ones are ignored."""

    __slots__ = ("_breaker", "_epoch", "is_probe")

    def __init__(self, breaker: CircuitBreaker, epoch: int, *, is_probe: bool) -> None:
        self._breaker: CircuitBreaker | None = breaker
        self._epoch = epoch
        self.is_probe = is_probe

    def succeed(self) -> None:
        """Say that the call went well."""
        self._settle(outcome=True)

    def fail(self, error: BaseException | None = None) -> None:
        """Say that the call failed; whether that counts is the breaker's `failure_predicate`'s to say."""
        breaker = self._breaker
        self._settle(outcome=False if breaker is None or breaker.counts(error) else None)

    def release(self) -> None:
        """Say that the call told nothing about the provider."""
        self._settle(outcome=None)

    def _settle(self, *, outcome: bool | None) -> None:
        breaker, self._breaker = self._breaker, None
        if breaker is not None:
            breaker.settle(self._epoch, is_probe=self.is_probe, outcome=outcome)


class CircuitBreaker:
    """One breaker for one provider or tool; chains and threads may share it.

    `failure_predicate` says which errors count as the provider's; without it all do.
    """

    def __init__(
        self,
        failure_threshold: int = 5,
        recovery_timeout: float = 60.0,
        failure_predicate: Callable[[BaseException], bool] | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.failure_threshold = integer("CircuitBreaker", "failure_threshold", failure_threshold)
        self.recovery_timeout = number("CircuitBreaker", "recovery_timeout", recovery_timeout)
        self._predicate = failure_predicate
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._state = CircuitState.CLOSED
        self._failures = 0
        self._opened_at = 0.0
        self._probe_since: float | None = None
        # Counts state changes: a permit from an earlier epoch has nothing to say about this one.
        self._epoch = 0

    @property
    def state(self) -> CircuitState:
        """Where the breaker stands now; OPEN turns HALF_OPEN by itself when the time has come."""
        with self._lock:
            return self._state_now()

    @property
    def failure_count(self) -> int:
        """Failures in a row."""
        return self._failures

    @property
    def probe_due_s(self) -> float:
        """How long it is until a probe is due; 0 unless the circuit is open."""
        with self._lock:
            is_open = self._state_now() is CircuitState.OPEN
            return self._opened_at + self.recovery_timeout - self._clock.monotonic() if is_open else 0.0

    def acquire(self) -> Permit | None:
        """Return the right to make one call, or None. In HALF_OPEN only one caller holds it at a time."""
        with self._lock:
            state = self._state_now()
            if state is CircuitState.CLOSED:
                return Permit(self, self._epoch, is_probe=False)
            if state is CircuitState.OPEN:
                return None
            now = self._clock.monotonic()
            if self._probe_since is not None and now - self._probe_since < self.recovery_timeout:
                return None
            self._probe_since = now
            # A forgotten probe that reports after all must not speak for the new one.
            self._epoch += 1
            return Permit(self, self._epoch, is_probe=True)

    def check(self, context: PolicyContext) -> PolicyDecision:
        """Say whether a call may be made. An allowed probe takes the slot: report on it, or `release` it."""
        if self.acquire() is not None:
            return PolicyDecision(allowed=True, policy_type="circuit_breaker")
        return PolicyDecision(allowed=False, policy_type="circuit_breaker", reason=self.describe())

    def describe(self) -> str:
        """Say in words why calls are not allowed now."""
        left = self.probe_due_s
        if not left:
            return "the circuit is half open, and its probe is another call's"
        return f"the circuit is open after {self._failures} failures; a probe is due in {left:.1f} s"

    def record_success(self) -> None:
        """Say that a call went well. It is ignored while the circuit is open: the call was from before."""
        with self._lock:
            if self._state_now() is not CircuitState.OPEN:
                self._close()

    def record_failure(self, error: BaseException | None = None) -> None:
        """Say that a call failed.

        An error that does not count gives a probe slot back and changes nothing else.
        """
        counts = self.counts(error)
        with self._lock:
            if not counts:
                self._probe_since = None
            else:
                self._fail()

    def release(self) -> None:
        """Give the probe slot back without having learned anything."""
        with self._lock:
            self._probe_since = None

    def reset(self) -> None:
        """Close the circuit and forget the failures."""
        with self._lock:
            self._close()

    def counts(self, error: BaseException | None) -> bool:
        """Say whether an error is the provider's."""
        if error is None or self._predicate is None:
            return True
        try:
            return self._predicate(error)
        except Exception:  # noqa: BLE001 - logged; the call did fail, and its probe slot must be given back
            logger.exception("a failure predicate failed; the error counts")
            return True

    def settle(self, epoch: int, *, is_probe: bool, outcome: bool | None) -> None:
        """Hear from a permit: True for success, False for failure, None if nothing was learned."""
        with self._lock:
            if epoch != self._epoch:
                return
            if is_probe:
                self._probe_since = None
            if outcome is True:
                self._close()
            elif outcome is False:
                self._fail()

    def _state_now(self) -> CircuitState:
        if (
            self._state is CircuitState.OPEN
            and self._clock.monotonic() - self._opened_at >= self.recovery_timeout
        ):
            self._state = CircuitState.HALF_OPEN
            self._probe_since = None
            self._epoch += 1
        return self._state

    def _close(self) -> None:
        if self._state is not CircuitState.CLOSED:
            self._state = CircuitState.CLOSED
            self._epoch += 1
        self._failures = 0
        self._probe_since = None

    def _fail(self) -> None:
        state = self._state_now()
        self._failures += 1
        if state is CircuitState.HALF_OPEN or (
            state is CircuitState.CLOSED and self._failures >= self.failure_threshold
        ):
            self._state = CircuitState.OPEN
            self._opened_at = self._clock.monotonic()
            self._probe_since = None
            self._epoch += 1


class CircuitBreakers:
    """One breaker per provider or tool, made when first asked for, all with the same settings."""

    def __init__(
        self,
        failure_threshold: int = 5,
        recovery_timeout: float = 60.0,
        failure_predicate: Callable[[BaseException], bool] | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        settings = (failure_threshold, recovery_timeout, failure_predicate)
        self._make = partial(CircuitBreaker, *settings, clock=clock)
        self._make()  # settings are refused here, not at the first call
        self._lock = threading.Lock()
        self._breakers: dict[str, CircuitBreaker] = {}

    def get(self, entity_id: str) -> CircuitBreaker:
        """Return the breaker of that provider or tool."""
        with self._lock:
            if entity_id not in self._breakers:
                self._breakers[entity_id] = self._make()
            return self._breakers[entity_id]
