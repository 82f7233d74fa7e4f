"""One run that a screen keeps open: its log folded once, and then as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import Any
from uuid import UUID

from treenail.errors import LogError, UsageError
from treenail.history.projection import Projection, is_recovered_end
from treenail.history.spending import Spending
from treenail.history.summary import damage_text
from treenail.history.view import Item, Row
from treenail.log import Log
from treenail.state import Session
from treenail.tools import Boundary, ToolInvoked, boundaries
from treenail.turns import ResultRest, TurnEnded, TurnResumed, TurnStarted

SHOWN_CHARS = 240
"""How much of a text a row keeps. The whole is read from the log when somebody looks at it."""

_GAP_US = 1_000_000
"""How long nobody has to work on a run before that is drawn as a gap."""


class OpenRun:
    """A run's rows over time, without their long texts: its size does not depend on what was said.

    Every method may be called from any thread.
    """

    def __init__(self, log: Log, run_id: UUID) -> None:
        self.run_id = run_id
        self.session = Session.open(log, run_id, read_only=True)
        """The run, to be read."""
        self._projection = Projection(str(run_id), store=log, max_chars=SHOWN_CHARS)
        self._spending = Spending()
        self._boundaries: tuple[int, Sequence[Boundary]] = (0, ())
        """The calls that have ended, and the event up to which they were read."""
        self._gaps: list[tuple[int, int]] = []
        """When nobody worked on it, in microseconds: between a stop and what came next."""
        self._is_at_work = False
        self._last_us = 0
        self._lock = Lock()

    def boundaries(self) -> Sequence[Boundary]:
        """Return the calls that have ended, in order."""
        with self._lock:
            if self._boundaries[0] != self._projection.seq:
                self._boundaries = (self._projection.seq, boundaries(self.session))
            return self._boundaries[1]

    def catch_up(self) -> int:
        """Fold what the log has beyond what was folded already; return the newest event."""
        with self._lock:
            projection = self._projection
            try:
                for envelope, value in self.session.events(after=projection.seq):
                    projection.add(envelope, value)
                    self._spending.add(envelope, value)
                    self._note_gap(envelope.at_us, value)
            except LogError as error:
                projection.damage = str(error)
            return projection.seq

    def _note_gap(self, at_us: int, value: object) -> None:
        # After a crash, the process that takes over writes how the call and the turn ended.
        is_recovered = (isinstance(value, ToolInvoked) and is_recovered_end(value)) or (
            isinstance(value, TurnEnded) and value.error_kind == "crash"
        )
        begins = isinstance(value, TurnStarted | TurnResumed) or is_recovered
        if self._last_us and (begins or not self._is_at_work) and at_us - self._last_us > _GAP_US:
            self._gaps.append((self._last_us, at_us))
        self._is_at_work = begins or (self._is_at_work and not isinstance(value, TurnEnded))
        self._last_us = max(self._last_us, at_us)

    def head(self) -> dict[str, Any]:
        """Return what is true of the run as a whole, as plain values for JSON."""
        with self._lock:
            projection, spending = self._projection, self._spending
            return {
                "seq": projection.seq,
                "rows": projection.row_count,
                "turns": [each.to_data() for each in projection.turn_heads],
                "spent_usd": spending.spent_usd,
                "gaps": [[begin / 1000, end / 1000] for begin, end in self._gaps],
                "damage": None if projection.damage is None else damage_text(projection.damage),
                "waiting": [each.call_id for each in projection.items("hold") if each.status == "waiting"],
            }

    def spending(self) -> dict[str, Any]:
        """Return what the run has used up over time, as plain values for JSON."""
        with self._lock:
            return self._spending.to_data()

    def rows(self, first: int, count: int) -> Sequence[Row]:
        """Return some rows."""
        with self._lock:
            return self._projection.rows(first, first + count)

    def changed_rows(self, after: int, most: int) -> Sequence[Row] | None:
        """Return the rows that changed after an event, in order; None if they are more than `most`."""
        with self._lock:
            return self._projection.changed_rows(after, most)

    def row_at(self, seq: int) -> int:
        """Return the row of an event: the one that it changed, or else the newest that had begun by then."""
        with self._lock:
            rows = self._projection.rows(0, self._projection.row_count)
        found = 0
        for each in rows:
            if each.item is not None and seq in (each.item.seq, each.item.first_seq):
                return each.index
            if each.item is not None and each.item.first_seq <= seq:
                found = each.index
        return found

    def whole(self, index: int) -> Row:
        """Return a row with its whole texts, which are read from the log. Raises `UsageError`."""
        rows = self.rows(index, 1)
        if not rows:
            raise UsageError(f"the run has no row {index}")
        row = rows[0]
        return row if row.item is None else replace(row, item=self._whole(row.item))

    def _whole(self, item: Item) -> Item:
        first = item.first_seq
        if item.kind == "tool":
            # A resume may have made another attempt; the arguments are in the model's own message.
            with self._lock:
                first = min(first, self._projection.call_began(item.call_id) or first)
        again = Projection(str(self.run_id), store=self.session.log)
        rest: ResultRest | None = None
        for envelope, value in self.session.events(after=first - 1, upto=max(item.seq, first)):
            again.add(envelope, value)
            if isinstance(value, ResultRest) and value.call_id == item.call_id:
                rest = value
        for row in again.rows(0, again.row_count):
            known = row.item
            if known is not None and _is_same(known, item):
                text = known.text if rest is None else known.text[: rest.start] + rest.text
                return replace(item, text=text, arguments=known.arguments)
        return item

    def close(self) -> None:
        """Close the run."""
        self.session.close()


def _is_same(whole: Item, item: Item) -> bool:
    """Say whether an item with whole texts is the one that a row shows shortened."""
    return (
        (whole.first_seq, whole.call_id, whole.title) == (item.first_seq, item.call_id, item.title)
        and (whole.kind == "tool") == (item.kind == "tool")
        and whole.text.startswith(item.text)
    )
