"""The list of runs: summaries, made as they are needed and kept until their logs grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Condition, Thread
from typing import Any
from uuid import UUID

from treenail.errors import SessionNotFoundError
from treenail.history import RunSummary, summarize
from treenail.log import Log, SessionInfo

MAX_PAGE = 200
"""How many runs one answer lists at most."""

_LOOK_EVERY_S = 0.5
"""How often the store is asked for new runs while somebody watches the list."""

_BATCH = 8
"""How many runs are summarised before somebody else may have the lock."""

Order = Callable[[SessionInfo, RunSummary | None], Any]

_ORDERS: dict[str, Order] = {
    "started": lambda info, _: -info.created_at.timestamp(),
    "cost": lambda _, summary: -((summary and summary.cost_usd) or 0.0),
    "duration": lambda _, summary: -((summary and summary.elapsed_s) or 0.0),
    "calls": lambda _, summary: -((summary and summary.calls) or 0),
    "state": lambda _, summary: "" if summary is None else summary.state,
    "task": lambda _, summary: "" if summary is None else summary.task.lower(),
}


class RunList:
    """The runs of a store, for a screen that shows a part of them.

    A summary is read from a run's log, which takes milliseconds. So the runs of a page are summarised when it
    is asked for, and all others behind it, the newest first; a filter sees what is known so far.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._infos: dict[UUID, SessionInfo] = {}
        self._children: dict[UUID, int] = {}
        self._known: dict[UUID, tuple[int, str | None, RunSummary]] = {}
        """Summaries, with the head and the writer that they were made at."""
        self._version = 0
        self._changed = Condition()
        self._is_closed = False
        self._thread: Thread | None = None

    def page(
        self, first: int, count: int, *, text: str = "", state: str = "", order: str = "", parent: UUID | None
    ) -> dict[str, Any]:
        """Return some of the runs that match, and how many do; those that need a person come first."""
        self.refresh()
        with self._changed:
            found = [
                each
                for each in self._infos.values()
                if each.parent_id == parent and (each.head or parent) and self._matches(each, text, state)
            ]
            key = _ORDERS.get(order, _ORDERS["started"])
            summaries = {each.session_id: self._summary_of(each) for each in found}
            found.sort(key=lambda each: each.created_at, reverse=True)
            found.sort(key=lambda each: key(each, summaries[each.session_id]))
            if not order:
                found.sort(key=lambda each: not _needs_person(summaries[each.session_id]))
            shown = found[first : first + min(count, MAX_PAGE)]
            runs = [self._data(each) for each in shown]
            total = len([1 for each in self._infos.values() if each.parent_id is None and each.head])
            known = len(self._known)
            return {
                "runs": runs,
                "matching": len(found),
                "total": total,
                "summarised": known,
                "sessions": len(self._infos),
                "version": self._version,
            }

    def one(self, run_id: UUID) -> dict[str, Any]:
        """Return the line of one run. Raises `SessionNotFoundError`."""
        info = self._log.info(run_id)
        with self._changed:
            self._infos[run_id] = info
            return self._data(info)

    def refresh(self) -> int:
        """Look what runs there are; return the version of the list, which grows when something changed."""
        infos = {each.session_id: each for each in self._log.sessions()}
        with self._changed:
            if infos != self._infos:
                self._infos, self._version = infos, self._version + 1
                self._children = {}
                for each in infos.values():
                    if each.parent_id is not None:
                        self._children[each.parent_id] = self._children.get(each.parent_id, 0) + 1
                for gone in self._known.keys() - infos.keys():
                    del self._known[gone]
                self._changed.notify_all()
            if self._thread is None:
                self._thread = Thread(target=self._summarise_all, name="treenail-runs", daemon=True)
                self._thread.start()
            return self._version

    def wait(self, version: int) -> int:
        """Wait a moment for a newer list; return its version."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > version or self._is_closed, _LOOK_EVERY_S)
        return self.refresh()

    def close(self) -> None:
        """Stop summarising."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # The methods below are called with the lock held.

    def _is_fresh(self, info: SessionInfo) -> bool:
        known = self._known.get(info.session_id)
        return known is not None and known[:2] == (info.head, info.owner)

    def _summary_of(self, info: SessionInfo) -> RunSummary | None:
        known = self._known.get(info.session_id)
        return None if known is None else known[2]

    def _summarised(self, info: SessionInfo) -> RunSummary | None:
        if not self._is_fresh(info):
            with suppress(SessionNotFoundError):  # It is being erased.
                self._known[info.session_id] = (info.head, info.owner, summarize(self._log, info))
        return self._summary_of(info)

    def _data(self, info: SessionInfo) -> dict[str, Any]:
        summary = self._summarised(info) or RunSummary(info, "empty")
        return summary.to_data() | {
            "children": self._children.get(info.session_id, 0),
            "needs_person": summary.needs_person,
        }

    def _matches(self, info: SessionInfo, text: str, state: str) -> bool:
        if not text and not state:
            return True
        summary = self._summary_of(info)
        if state and (summary is None or (state != summary.state and not _is_group(state, summary))):
            return False
        said = [str(info.session_id), *(f"{name}={value}" for name, value in info.tags)]
        if summary is not None:
            said += [summary.task, summary.reason, summary.state, summary.agent]
        return all(any(word in each.lower() for each in said) for word in text.lower().split())

    def _summarise_all(self) -> None:
        """Summarise what nobody has asked for yet, the newest first, as long as there is something."""
        while True:
            with self._changed:
                if self._is_closed:
                    return
                waiting = self._waiting()
                if not waiting:
                    self._changed.wait(_LOOK_EVERY_S)
                    continue
                for each in waiting:
                    self._summarised(each)
                self._version += 1
                self._changed.notify_all()

    def _waiting(self) -> Sequence[SessionInfo]:
        found = []
        for each in reversed(self._infos.values()):
            if not self._is_fresh(each):
                found.append(each)
                if len(found) == _BATCH:
                    break
        return found


def _needs_person(summary: RunSummary | None) -> bool:
    return summary is not None and summary.needs_person


def _is_group(state: str, summary: RunSummary) -> bool:
    """Say whether a summary belongs to a group of states that a filter names."""
    if state == "needs_person":
        return summary.needs_person
    return state == "stopped" and summary.state not in ("running", "completed", "empty")
