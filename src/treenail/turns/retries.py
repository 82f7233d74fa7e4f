"""When a turn asks the model again after a failed attempt, and how long it waits first.

A failed attempt is followed by another one if its error is `retryable`, if nothing of the answer has been
seen yet, and if attempts and time are left. The wait doubles up to a cap and is spread at random, so that
many clients that failed together do not come back together; a provider's Retry-After is never undercut. A
wait that would not fit into the total time is not begun.

An answer that breaks off after text, thought or a call was seen is not started over: a second beginning would
contradict what was shown. The error carries the text in `partial`.

Inside the containment each attempt is a call of its own: a step, with its own reservation and settlement. A
failure takes a unit of the run's retries, which pays for the next attempt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import anyio

from treenail.clock import Clock, SystemClock
from treenail.containment import integer, number
from treenail.errors import ModelCallError

_LEAST_SHARE = 0.5
"""The smallest part of a computed wait that chance may leave of it."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently a failed model call is tried again."""

    attempts: int = 5
    """How many attempts are made at most, the first one included."""
    base_s: float = 0.5
    """The wait after the first failure; it doubles with each one."""
    cap_s: float = 8.0
    """The longest wait, unless the provider asks for a longer one."""
    total_s: float = 30.0
    """How long all attempts and waits may take before no other attempt is begun."""

    def __post_init__(self) -> None:
        integer("RetryPolicy", "attempts", self.attempts)
        for name in ("base_s", "cap_s", "total_s"):
            number("RetryPolicy", name, getattr(self, name), zero_ok=True)

    def delay_s(self, failures: int, rng: random.Random) -> float:
        """Return how long to wait after that many failures, if the provider says nothing."""
        # The exponent is bounded so that a generous number of attempts cannot overflow a float.
        full = min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 60))
        return full * rng.uniform(_LEAST_SHARE, 1.0)


class Waits:
    """The waits between the attempts of one model call."""

    def __init__(self, policy: RetryPolicy | None, clock: Clock, rng: random.Random | None = None) -> None:
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._began = clock.monotonic()
        self.failures = 0

    def after(self, error: ModelCallError) -> float | None:
        """Return how long to wait after this failure before the next attempt; None if there is none."""
        policy = self._policy
        if policy is None or error.stop_reason is not None:
            return None
        self.failures += 1
        error.attempts = self.failures
        if not error.retryable or self.failures >= policy.attempts:
            return None
        delay_s = policy.delay_s(self.failures, self._rng or random.Random())
        if error.retry_after is not None:
            delay_s = max(delay_s, error.retry_after.total_seconds())
        if self._clock.monotonic() - self._began + delay_s > policy.total_s:
            return None
        # A cancel scope's deadline is on the event loop's clock, which is the system's.
        if isinstance(self._clock, SystemClock) and (
            anyio.current_time() + delay_s >= anyio.current_effective_deadline()
        ):
            return None
        return delay_s


def not_tried_again(error: ModelCallError, reason: str, detail: str) -> ModelCallError:
    """Let an error say which limit of the run kept its call from being tried again."""
    error.stop_reason = reason
    error.add_note(f"it may not be tried again ({reason}): {detail}")
    return error
