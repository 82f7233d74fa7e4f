"""Stores on disk: opening one to read it, and finding the run that a person means."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from uuid import UUID

from treenail.conversation import enable_inner_message_recording
from treenail.errors import LogDamagedError, UsageError
from treenail.log import Log, PostgresUrl, Store, open_log
from treenail.log.sqlite import SqliteLog
from treenail.state import Session

LAST = "@last"
"""The name of the newest run."""


@contextmanager
def opened_log(store: Store) -> Iterator[Log]:
    """Open a store to read it.

    SQLite cannot read a store in a directory that it may not write to; such a store is read from a copy.
    """
    with ExitStack() as stack:
        if isinstance(store, PostgresUrl):
            yield stack.enter_context(closing(open_log(store, must_exist=True)))
            return
        place = store
        if not (os.access(store, os.W_OK) and os.access(store.parent, os.W_OK)):
            place = Path(stack.enter_context(tempfile.TemporaryDirectory())) / store.name
            for ending in ("", "-wal"):
                source = store.with_name(store.name + ending)
                if source.exists():
                    shutil.copyfile(source, place.with_name(source.name))
        yield stack.enter_context(SqliteLog(place, heartbeat=False))


@contextmanager
def opened_run(store: Store, run_id: UUID, *, must_be_whole: bool = True) -> Iterator[Session]:
    """Open a run to read it; others may write it meanwhile.

    Raises `LogDamagedError` for a damaged run unless `must_be_whole` is false.
    """
    with opened_log(store) as log, Session.open(log, run_id, read_only=True) as session:
        enable_inner_message_recording(session)
        if must_be_whole and session.report.damage is not None:
            raise LogDamagedError(session.report.damage, last_good_seq=session.head)
        yield session


def find_run(store: Store, name: str) -> UUID:
    """Return the run that a person names: by its id, the beginning of it, or `@last`. Raises `UsageError`."""
    with opened_log(store) as log:
        runs = log.sessions()
    if not runs:
        raise UsageError(f'there are no runs in {store}; start one with `treenail run "task"`')
    if name == LAST:
        # An editor makes a run when a session is opened: until something is said in it, nobody means it.
        roots = [each for each in runs if each.parent_id is None and each.head]
        return (roots or list(runs))[-1].session_id
    wanted = name.strip().lower()
    found = [each.session_id for each in runs if str(each.session_id).startswith(wanted)]
    if wanted and len(found) == 1:
        return found[0]
    what = f"{len(found)} runs begin" if wanted and found else "no run begins"
    shown = ", ".join(short_id(each, found) for each in found[:5])
    raise UsageError(
        f"{what} with {name!r}{f' ({shown} ...)' if shown else ''}; see `treenail list`, or use @last"
    )


def run_ids(store: Store) -> list[str]:
    """Return the short ids of a store's runs, the newest first."""
    with opened_log(store) as log:
        known = log.sessions()
    ids = [each.session_id for each in known]
    return [short_id(each.session_id, ids) for each in known if each.parent_id is None][::-1]


def short_id(run_id: UUID, among: Iterable[UUID]) -> str:
    """Return the beginning of an id that names it among others: 8 digits, or as many as it takes."""
    whole, others = str(run_id), [str(each) for each in among if each != run_id]
    for length in range(8, len(whole)):
        if not any(each.startswith(whole[:length]) for each in others):
            return whole[:length]
    return whole
