"""A provider around a provider: what fails for the moment is tried again.

Theory of operation
-------------------
A failed attempt is followed by another one if its error is `retryable`, if nothing of the
answer has been seen yet, and if attempts and time are left. The wait grows twofold up to a
cap and is spread at random, so that many clients that failed together do not come back
together; a provider's Retry-After is never undercut. A wait that would not fit into the
total time is not begun: the error comes at once, because it would come anyway.

An answer that breaks off after text, thought or a call was seen is not started over: whoever
listens has seen the beginning, and a second beginning would contradict it. The error carries
what was said in `partial`.

Attempts that failed may have cost something. What they reported is added to what the last
one reports, so that usage and cost are those of the whole call; `UsageReported.newest` is the
last one's own part.

Inside a contained model call every further attempt is asked for and booked: it is a step, it
takes a retry of the run, and its money is reserved. An attempt that the run's limits do not let
through is not made; the call ends with the error of the one before it, which then says in
`stop_reason` which limit it was.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

import anyio

from treenail.clock import Clock, SystemClock
from treenail.containment import ActiveCall, current_call
from treenail.containment.limits import integer, number
from treenail.errors import CallRefused, ModelCallError
from treenail.providers.base import (
    ModelEvent,
    ModelRequest,
    Provider,
    Stopped,
    TextDelta,
    UsageReported,
    takes_output_schema,
)
from treenail.providers.degradation import degraded
from treenail.providers.usage import report_usage
from treenail.state.budget import TokenUsage

_NOTHING = UsageReported(TokenUsage())

_LEAST_SHARE = 0.5
"""The smallest part of a computed wait that chance may leave of it."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, how long and how patiently a failed call is tried again."""

    attempts: int = 5
    """How many calls are made at most, the first one included."""
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


@dataclass(frozen=True, slots=True)
class Retried:
    """An attempt that failed and is going to be followed by another one."""

    attempt: int
    error: ModelCallError
    delay_s: float


class Retrying:
    """A provider that tries again what fails for the moment.

    `on_retry` hears of each attempt that is going to be repeated, before the wait begins.
    """

    def __init__(
        self,
        provider: Provider,
        policy: RetryPolicy | None = None,
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        on_retry: Callable[[Retried], object] | None = None,
    ) -> None:
        self._provider = provider
        self._policy = policy or RetryPolicy()
        self._clock = clock or SystemClock()
        self._rng = rng
        self._on_retry = on_retry

    def __repr__(self) -> str:
        return f"Retrying({self._provider!r}, {self._policy!r})"

    @property
    def within(self) -> Provider:
        """The provider that is tried again."""
        return self._provider

    def on(self, provider: Provider) -> Retrying:
        """Return the same patience with another provider."""
        return Retrying(provider, self._policy, clock=self._clock, rng=self._rng, on_retry=self._on_retry)

    @property
    def name(self) -> str:
        """The name of the provider within."""
        return self._provider.name

    @property
    def model(self) -> str:
        """The model of the provider within."""
        return self._provider.model

    @property
    def takes_output_schema(self) -> bool:
        """Whether the provider within follows a schema."""
        return takes_output_schema(self._provider)

    def estimate_usd(self, request: ModelRequest) -> float | None:
        """Say what one attempt will cost at most: a failed one is seldom charged."""
        return self._provider.estimate_usd(request)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Call the model, several times if it must be."""
        began = self._clock.monotonic()
        spent: UsageReported | None = None
        attempt = 0
        while True:
            attempt += 1
            said: list[str] = []
            seen = False
            used, own = spent, _NOTHING
            error: ModelCallError
            try:
                events = self._provider.stream(request)
                try:
                    async for each in events:
                        if isinstance(each, UsageReported):
                            own = each
                            used = each if spent is None else _sum(spent, each)
                            yield used
                            continue
                        if isinstance(each, TextDelta):
                            said.append(each.text)
                            seen = True
                        elif not isinstance(each, Stopped):
                            seen = True
                        yield each
                finally:
                    await events.aclose()
                return
            except ModelCallError as raised:
                error = raised
            error.attempts = attempt
            if seen:
                error.partial = error.partial or "".join(said)
                raise error
            delay = self._delay(error, attempt, began)
            if delay is None:
                raise error
            call = _contained_call()
            try:
                if call is not None:
                    report_usage(call, own)
                    delay = call.end_attempt(error, delay_s=delay)
                spent = used
                if self._on_retry is not None:
                    self._on_retry(Retried(attempt, error, delay))
                await self._clock.async_sleep(delay)
                if call is not None:
                    call.begin_attempt()
                    # What the plan has made less is told by whoever has made the call: it knows the plan.
                    request, _ = degraded(request, call.plan, model=self.model)
            except CallRefused as refused:
                error.stop_reason = refused.stop_reason or refused.decision
                error.add_note(str(refused))
                raise error from None
            if spent is not None:
                # Whoever listens knows from here on that this much is booked already.
                yield replace(spent, newest=_NOTHING)

    def _delay(self, error: ModelCallError, attempt: int, began: float) -> float | None:
        """Return how long to wait before the next attempt; None if there is none."""
        if not error.retryable or attempt >= self._policy.attempts:
            return None
        if self._rng is None:
            self._rng = random.Random()  # Most calls never fail, and seeding one takes longer than a call.
        delay = self._policy.delay_s(attempt, self._rng)
        if error.retry_after is not None:
            delay = max(delay, error.retry_after.total_seconds())
        passed = self._clock.monotonic() - began
        if passed + delay > self._policy.total_s:
            return None
        # A cancel scope's deadline is on the event loop's clock, which is the system's.
        if isinstance(self._clock, SystemClock) and (
            anyio.current_time() + delay >= anyio.current_effective_deadline()
        ):
            return None
        return delay


def _contained_call() -> ActiveCall | None:
    """Return the contained model call that this is; a tool's call is not a call of a model."""
    call = current_call()
    return call if call is not None and call.kind == "llm" else None


def _sum(spent: UsageReported, now: UsageReported) -> UsageReported:
    # A cost that is unknown on one side is unknown in sum: a part would look like the whole.
    known = spent.cost_usd is not None and now.cost_usd is not None
    return UsageReported(
        spent.usage + now.usage,
        (spent.cost_usd or 0.0) + (now.cost_usd or 0.0) if known else None,
        spent.cache_write_tokens + now.cache_write_tokens,
        model=now.model,
        newest=now,
    )
