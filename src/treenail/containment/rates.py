"""Noticing that a run spends unusually fast, long before a ceiling is near. It warns and never stops."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from treenail.clock import Clock
from treenail.containment.limits import check_fields, integer, number
from treenail.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePolicy:
    """How fast money and tokens may go before it is reported; at least one of both is set."""

    max_usd_per_minute: float | None = None
    max_tokens_per_minute: int | None = None
    window_seconds: float = 60.0
    """Over how long the rate is taken."""

    def __post_init__(self) -> None:
        check_fields(self, number, "max_usd_per_minute", none_ok=True)
        check_fields(self, integer, "max_tokens_per_minute", none_ok=True)
        check_fields(self, number, "window_seconds")
        if self.max_usd_per_minute is None and self.max_tokens_per_minute is None:
            raise UsageError(
                "RatePolicy needs max_usd_per_minute or max_tokens_per_minute; it watches nothing else"
            )


class RateWatch:
    """Watches the spending of one chain and its children. Thread-safe."""

    def __init__(self, policy: RatePolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._lock = threading.Lock()
        self._spent: deque[tuple[float, float, int]] = deque()
        self._usd = 0.0
        self._tokens = 0
        self._is_told = {"cost_rate": False, "token_velocity": False}

    def observe(self, cost_usd: float, tokens: int) -> list[tuple[str, str]]:
        """Take note of a settled call; return an event type and a reason for each rate that is now too high.

        A rate that stays too high is told of once; when it has fallen, it may be told of again.
        """
        policy = self._policy
        with self._lock:
            now = self._clock.monotonic()
            self._spent.append((now, cost_usd, tokens))
            self._usd += cost_usd
            self._tokens += tokens
            while self._spent[0][0] <= now - policy.window_seconds:
                _, old_usd, old_tokens = self._spent.popleft()
                self._usd -= old_usd
                self._tokens -= old_tokens
            per_minute = 60.0 / policy.window_seconds
            rates = [
                ("cost_rate", self._usd * per_minute, policy.max_usd_per_minute, "USD"),
                ("token_velocity", self._tokens * per_minute, policy.max_tokens_per_minute, "tokens"),
            ]
            told = []
            for event_type, rate, most, unit in rates:
                is_high = most is not None and rate > most
                if is_high and not self._is_told[event_type]:
                    told.append((event_type, f"{rate:.6g} {unit} a minute; {most:.6g} are expected"))
                self._is_told[event_type] = is_high
            return told
