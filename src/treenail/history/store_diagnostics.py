"""Diagnostics of a whole store, damaged or not: its sessions are checked in what can be salvaged of it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from uuid import UUID

from treenail.errors import LogError
from treenail.history.checks import LogFacts
from treenail.history.diagnostics import DiagnosticsReport, read_facts, report_on
from treenail.history.stores import opened_log
from treenail.log import Log, PostgresUrl, store_named
from treenail.log.sqlite import SqliteLog
from treenail.state import Session


def diagnose_store(
    path: str | Path | PostgresUrl, session_id: UUID | None = None
) -> tuple[DiagnosticsReport, ...]:
    """Check every session of a store, or one, even if the store is damaged. It never raises for damage.

    If the file cannot be opened, its readable part is copied and checked there; the file is not touched.
    """
    place = store_named(path)
    if isinstance(place, PostgresUrl):
        with opened_log(place) as database:
            return tuple(report_on(each) for each in _sessions(database, session_id))
    if not place.is_file() or place.stat().st_size == 0:
        # Opening it would make a new store there.
        return _lost(place, session_id, f"there is no store at {place}, or the file is empty")
    try:
        with SqliteLog(place, heartbeat=False) as log:
            if not log.damage:
                return tuple(report_on(each) for each in _sessions(log, session_id))
            damage = "; ".join(each.message for each in log.damage)
    except LogError as error:
        damage = str(error)
    return _salvaged(place, session_id, damage)


def _sessions(log: Log, session_id: UUID | None) -> list[LogFacts]:
    wanted = [each.session_id for each in log.sessions() if session_id in (None, each.session_id)]
    return [read_facts(Session.open(log, each, read_only=True)) for each in wanted]


def _salvaged(place: Path, session_id: UUID | None, damage: str) -> tuple[DiagnosticsReport, ...]:
    with tempfile.TemporaryDirectory(prefix="treenail-diagnose-") as scratch:
        target = Path(scratch) / "salvaged.db"
        try:
            SqliteLog.salvage(place, target)
            with SqliteLog(target, heartbeat=False) as log:
                found = _sessions(log, session_id)
        except (LogError, OSError) as error:
            return _lost(place, session_id, f"{damage}; nothing could be salvaged: {error}")
    for each in found:
        each.damage, each.store = each.damage or damage, place
    reports = tuple(report_on(each) for each in found)
    return reports or _lost(place, session_id, f"{damage}; this session is not in the readable part")


def _lost(place: Path, session_id: UUID | None, damage: str) -> tuple[DiagnosticsReport, ...]:
    name = "?" if session_id is None else str(session_id)
    return (report_on(LogFacts(name, place, damage=damage)),)
