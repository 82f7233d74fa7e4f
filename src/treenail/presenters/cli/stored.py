"""Stored runs: finding one by what a person types, and saying what is known about it."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from uuid import UUID

from treenail.containment.limits import Limits
from treenail.conversation.messages import enable_inner_message_recording
from treenail.errors import LogDamagedError, SnapshotRestoreError, UsageError
from treenail.log.event import SessionInfo
from treenail.log.sqlite import SqliteLog
from treenail.presenters.cli.places import flag_for
from treenail.presenters.cli.settings import BY_NAME
from treenail.state.session import Session
from treenail.turns.derivation import turn_state
from treenail.turns.ledger import ceilings_of
from treenail.turns.states import TurnEnded, TurnStarted

LAST = "@last"
DAMAGED = "damaged"


@contextmanager
def opened_log(store: Path) -> Iterator[SqliteLog]:
    """Open a store for the length of a command that looks.

    SQLite cannot even read a store in a place that it may not write; such a one is copied, and read there.
    """
    with ExitStack() as stack:
        place = store
        if not (os.access(store, os.W_OK) and os.access(store.parent, os.W_OK)):
            place = Path(stack.enter_context(tempfile.TemporaryDirectory())) / store.name
            for ending in ("", "-wal"):
                if store.with_name(store.name + ending).exists():
                    shutil.copyfile(
                        store.with_name(store.name + ending), place.with_name(place.name + ending)
                    )
        log = SqliteLog(place, heartbeat=False)
        stack.callback(log.close)
        yield log


@contextmanager
def reading(store: Path, run_id: UUID, *, must_be_whole: bool = True) -> Iterator[Session]:
    """Open a run for reading. Nobody is kept from writing it.

    Raises `LogDamagedError`, unless a part will do: half of a log does not say how things stand now.
    """
    with opened_log(store) as log:
        session = Session.open(log, run_id, read_only=True)
        enable_inner_message_recording(session)
        try:
            if must_be_whole and session.report.damage is not None:
                raise LogDamagedError(session.report.damage, last_good_seq=session.head)
            yield session
        finally:
            session.close()


def find(store: Path, said: str) -> UUID:
    """Return the run that a person means: an id, the beginning of one, or @last. Raises `UsageError`."""
    with opened_log(store) as log:
        runs = log.sessions()
    if any(is_workflow(each) for each in runs):
        # Whoever reads them must know their events; most stores have none.
        importlib.import_module("treenail.workflows")
    if not runs:
        raise UsageError(f'there are no runs in {store}; begin one with `treenail run "task"`')
    if said == LAST:
        roots = [each for each in runs if each.parent_id is None]
        return (roots or list(runs))[-1].session_id
    wanted = said.strip().lower()
    found = [each.session_id for each in runs if str(each.session_id).startswith(wanted)]
    if wanted and len(found) == 1:
        return found[0]
    what = f"{len(found)} runs begin" if wanted and found else "no run begins"
    shown = ", ".join(str(each)[:8] for each in found[:5])
    raise UsageError(
        f"{what} with {said!r}{f' ({shown} ...)' if shown else ''}; see `treenail list`, or say @last"
    )


def ceilings(log: SqliteLog, run_id: UUID) -> Limits | None:
    """Return the ceilings that a run is under now; None if its log does not say."""
    with Session.open(log, run_id, read_only=True) as session:
        return ceilings_of(session)


def ceilings_since(limits: Limits | None, told: Mapping[str, str]) -> dict[str, str]:
    """Return the ceilings that a run is under now, as settings, where they are not those of its beginning.

    `told` is what it was told then. A ceiling that is there by default is not remembered: the environment
    and the settings file may say another.
    """
    if limits is None:
        return {}
    now = {
        "max_cost": limits.max_cost_usd,
        "max_steps": limits.max_steps,
        "max_retries": limits.max_retries,
        "timeout": limits.timeout,
        "unknown_price": limits.on_unknown_price,
    }
    return {
        name: str(value)
        for name, value in now.items()
        if value is not None and (name in told or value != BY_NAME[name].default)
    }


def is_workflow(info: SessionInfo) -> bool:
    """Whether a session is a workflow's."""
    return "workflow" in dict(info.tags)


def known(store: Path) -> list[str]:
    """Return the short ids of the runs of a store, the newest first."""
    with opened_log(store) as log:
        return [str(each.session_id)[:8] for each in log.sessions() if each.parent_id is None][::-1]


@dataclass(frozen=True, slots=True)
class Known:
    """One line about a run."""

    info: SessionInfo
    state: str
    """How its newest turn ended; `damaged` if its log cannot be read whole."""
    task: str
    reason: str
    """Why; of a damaged log, what is wrong with it."""
    ended_at: datetime | None = None

    @property
    def is_damaged(self) -> bool:
        """Whether its log cannot be read whole, so that nobody knows how it ended."""
        return self.state == DAMAGED

    @property
    def agent(self) -> str:
        """Who worked in it: an agent, or the judge that looked at its parent."""
        tags = dict(self.info.tags)
        return tags.get("agent") or (f"judge {tags['nested']}" if "nested" in tags else "")

    def as_data(self) -> dict[str, object]:
        """Return it as JSON data."""
        return {
            "id": str(self.info.session_id),
            "created_at": self.info.created_at.isoformat(),
            "agent": self.agent,
            "state": self.state,
            "reason": self.reason,
            "task": self.task,
            "events": self.info.head,
            "parent": None if self.info.parent_id is None else str(self.info.parent_id),
            "writer": self.info.owner,
        }


def describe(log: SqliteLog, info: SessionInfo) -> Known:
    """Say what became of a run, as its log tells it."""
    try:
        session = Session.open(log, info.session_id, read_only=True)
        try:
            enable_inner_message_recording(session)
            if is_workflow(info):
                return _workflow(info, session)
            started, ended = session[TurnStarted].latest(), session[TurnEnded].latest()
            if session.report.damage is not None:
                task = "" if started is None else started.task
                return Known(info, DAMAGED, task, in_words(session.report.damage))
            state = turn_state(session).value
            if started is None:
                state = "empty"
            elif state == "unfinished" and info.owner is not None:
                state = "running"
            is_current = ended is not None and started is not None and ended.turn_id == started.turn_id
            reason = ended.error_kind or "" if ended is not None and is_current else ""
            return Known(info, state, "" if started is None else started.task, reason)
        finally:
            session.close()
    except (LogDamagedError, SnapshotRestoreError) as error:
        return Known(info, DAMAGED, "", in_words(str(error)))


_IN_CALLS = ("; nothing was changed or deleted", ", and nothing was deleted", "; nothing was deleted")


def in_words(damage: str) -> str:
    """Say damage without the library's calls: whoever is at a command line is told commands."""
    for each in _IN_CALLS:
        damage = damage.partition(each)[0]
    return damage


def way_out(store: Path) -> str:
    """Return the command that copies what is whole in a damaged store."""
    return f"treenail salvage whole.db{flag_for(store)}"


def _workflow(info: SessionInfo, session: Session) -> Known:
    # Most runs are none: what reads them is loaded when there is one.
    if session.report.damage is not None:
        return Known(info, DAMAGED, dict(info.tags)["workflow"], in_words(session.report.damage))
    try:
        result = importlib.import_module("treenail.workflows").workflow_result(session)
    except UsageError:
        return Known(info, "empty", "", "")
    state = result.state.value
    if state == "running" and info.owner is None:
        state = "unfinished"
    return Known(info, state, result.name, result.reason)
