"""Seeing that a run goes in circles: the same call again and again, or the same few calls in turn.

The same call very often among the newest few is reported too, but never refused: it may be work.

A call's signature is its kind, its name and, if given, a fingerprint of its arguments. The detector keeps the
newest signatures and asks, after each, how often the newest block of length 1 (a repeat), 2, 3 ... (a cycle)
stands at the end in a row. That is all there is to it: a period of p seen k times.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Literal

from treenail.containment.limits import check_fields, integer
from treenail.errors import UsageError

Signature = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPolicy:
    """When a loop is reported, and when it is stopped. `None` for a halt means: report only."""

    tool_repeats: int = 3
    """Report a tool call made this many times in a row."""
    llm_repeats: int = 5
    """Report a model call made this many times in a row."""
    cycle_turns: int = 3
    """Report a cycle of calls gone through this many times in a row."""
    max_cycle_length: int = 8
    """The longest cycle that is looked for."""
    window: int = 8
    """How many of the newest calls are looked at for frequency."""
    tool_frequency: int = 5
    """Report a tool call that is this many of the window's calls."""
    llm_frequency: int = 7
    """Report a model call that is this many of the window's calls."""
    halt_repeats: int | None = None
    """Refuse the call that would be this many in a row."""
    halt_cycle_turns: int | None = None
    """Refuse the call that would complete this many turns of a cycle."""

    def __post_init__(self) -> None:
        repeats, halts = ("tool_repeats", "llm_repeats", "cycle_turns"), ("halt_repeats", "halt_cycle_turns")
        check_fields(self, integer, *repeats, "max_cycle_length", "window", "tool_frequency", "llm_frequency")
        check_fields(self, integer, *halts, none_ok=True)
        for name in (*repeats, *halts):
            if getattr(self, name) == 1:
                raise UsageError(f"LoopPolicy.{name} must be at least 2: once is not a loop")


@dataclass(frozen=True, slots=True)
class LoopFinding:
    """A loop: the calls in it, how many turns it has made, and whether the newest call must be refused."""

    mode: Literal["repeat", "cycle", "frequency"]
    calls: tuple[Signature, ...]
    turns: int
    is_new: bool
    must_halt: bool

    @property
    def description(self) -> str:
        """The loop in words."""
        names = " -> ".join(f"{kind} {name or '(unnamed)'}" for kind, name, _ in self.calls)
        return f"{names}, {self.turns} times {'of late' if self.mode == 'frequency' else 'in a row'}"


class LoopDetector:
    """Watches the calls of one chain and its children. Thread-safe."""

    def __init__(self, policy: LoopPolicy | None = None) -> None:
        self.policy = policy or LoopPolicy()
        turns = max(self.policy.cycle_turns, self.policy.halt_cycle_turns or 0)
        repeats = max(self.policy.tool_repeats, self.policy.llm_repeats, self.policy.halt_repeats or 0)
        self._lock = threading.Lock()
        longest = max(repeats, turns * self.policy.max_cycle_length, self.policy.window)
        self._recent: deque[Signature] = deque(maxlen=longest)
        self._reported: set[tuple[str, tuple[Signature, ...]]] = set()

    def observe(self, kind: str, name: str, fingerprint: str = "") -> LoopFinding | None:
        """Take note of a call and return the loop that it belongs to, if it is one to report or to refuse.

        A refused call is not remembered, so another call breaks the loop and this one stays refused.
        """
        with self._lock:
            self._recent.append((kind, name, fingerprint))
            finding = self._find(kind)
            if finding is not None and finding.must_halt:
                self._recent.pop()
            return finding

    def _find(self, kind: str) -> LoopFinding | None:
        policy, calls = self.policy, list(self._recent)
        repeats = policy.llm_repeats if kind == "llm" else policy.tool_repeats
        for length in range(1, policy.max_cycle_length + 1):
            if length > 1 and len(set(calls[-length:])) == 1:
                continue  # one call repeated is not a cycle
            turns = _turns(calls, length)
            report = repeats if length == 1 else policy.cycle_turns
            halt = policy.halt_repeats if length == 1 else policy.halt_cycle_turns
            must_halt = halt is not None and turns >= halt
            if turns >= report or must_halt:
                block = tuple(calls[-length:])
                # A cycle is the same one wherever it is entered.
                key = min(block[at:] + block[:at] for at in range(length))
                mode: Literal["repeat", "cycle"] = "repeat" if length == 1 else "cycle"
                return LoopFinding(mode, block, turns, self._is_new(mode, key), must_halt)
        often = calls[-policy.window :].count(calls[-1])
        if often >= (policy.llm_frequency if kind == "llm" else policy.tool_frequency):
            newest = (calls[-1],)
            return LoopFinding("frequency", newest, often, self._is_new("frequency", newest), False)
        return None

    def _is_new(self, mode: str, calls: tuple[Signature, ...]) -> bool:
        if (mode, calls) in self._reported:
            return False
        if len(self._reported) < 1000:
            self._reported.add((mode, calls))
        return True


def _turns(calls: list[Signature], length: int) -> int:
    """Count how often the last `length` calls stand at the end in a row."""
    if len(calls) < length:
        return 0
    block = calls[-length:]
    turns = 1
    while calls[-length * (turns + 1) : -length * turns] == block:
        turns += 1
    return turns
