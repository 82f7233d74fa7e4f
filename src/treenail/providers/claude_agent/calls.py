"""The calls of a turn's answers, seen from both sides: ours, which runs them, and the CLI's, which waits.

Theory of operation
-------------------
A call goes through events that each side waits for, in this order:

    asked       the CLI has come to it; now the turn may run it
    released    the runner has begun it, or refused it: the hook before a native tool has its answer
    ended       a native tool has run in the CLI
    delivered   its end is in the log: the CLI may know its result

When the CLI ends in the middle of a call, or answers its model itself, everything that waits for the CLI is
released.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anyio

from treenail.tools import ToolResult


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call of an answer, seen from both sides."""

    asked: anyio.Event = field(default_factory=anyio.Event)
    """The CLI has come to it, or has answered it itself."""
    released: anyio.Event = field(default_factory=anyio.Event)
    """What the hook before it has to say is known."""
    denial: str | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)
    """A native one has run, or was refused by the CLI."""
    succeeded: bool = False
    text: str = ""
    """What came of a native one."""
    said: str | None = None
    """What the CLI told the model about it by itself: it was never asked for."""
    delivered: anyio.Event = field(default_factory=anyio.Event)
    """Its end is in the log."""
    result: ToolResult[Any] | None = None
    is_closed: bool = False
    """The model has its result."""
    is_lost: bool = False
    """The CLI ended in the middle of it."""

    def deliver(self, result: ToolResult[Any]) -> None:
        """Tell the CLI how it ended; only the first time counts. One that never began is denied."""
        if self.delivered.is_set():
            return
        self.result = result
        if not self.released.is_set():
            self.denial = result.render()
            self.released.set()
        self.delivered.set()

    def answer(self, said: str) -> None:
        """The model has its result: ours, the native tool's, or one that the CLI made up itself."""
        self.is_closed = True
        if not self.delivered.is_set() and not self.ended.is_set():
            self.said, self.text = said, said
            self._open_all()

    def lose(self) -> None:
        """Nobody will say anything about it any more."""
        self.is_lost = self.is_lost or not self.ended.is_set()
        self._open_all()

    def _open_all(self) -> None:
        for each in (self.asked, self.released, self.ended):
            each.set()


class Calls:
    """The calls of a turn's answers. One whose id was used before is told apart by the order of arrival."""

    def __init__(self) -> None:
        self._of: dict[str, list[PendingCall]] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._by_id: dict[str, PendingCall] = {}

    def next(self, who: str, vendor_id: str, *, skip_closed: bool = True) -> PendingCall:
        """Return the call that `who` sees now: everybody sees the calls of one id in the same order."""
        calls = self._of.setdefault(vendor_id, [])
        place = self._seen.get((who, vendor_id), 0)
        # Not everybody sees each call: one that was denied, say, is not called.
        while skip_closed and place < len(calls) and calls[place].is_closed:
            place += 1
        self._seen[who, vendor_id] = place + 1
        while len(calls) <= place:
            calls.append(PendingCall())
        return calls[place]

    def name(self, call_id: str, pending: PendingCall) -> None:
        """Note by which id the turn knows a call."""
        self._by_id[call_id] = pending

    def get(self, call_id: str) -> PendingCall | None:
        """Return the call that the turn knows by an id."""
        return self._by_id.get(call_id)

    def lose_all(self) -> None:
        """Release everything that waits for the CLI, because it has ended."""
        for calls in self._of.values():
            for each in calls:
                each.lose()
