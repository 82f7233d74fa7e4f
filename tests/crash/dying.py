"""A log whose process is killed right after an append, and which appends are worth a kill.

Two appends of one kind (the same events, both of a root session or both of a child's) are the same crash to
the process that resumes, unless it finds other work done. So the first and the last of each kind are chosen.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.stores import open_store, store_in

from treenail.log.postgres import PostgresLog
from treenail.log.sqlite import SqliteLog

EVERY = 8
"""At least one of so many appends in a row is chosen, because other work is done by then."""

Kind = tuple[bool, tuple[str, ...]]
"""Whether it is a child's append, and what events there are in it."""


class DyingLog:
    """Kills its process right after the append that it is told, counted over all logs of the process."""

    dies_after = 0
    kinds: list[Kind] = []  # of all logs of the process, on purpose

    def append(self: Any, lease: Any, drafts: Any, *, expected_seq: int) -> None:
        super().append(lease, drafts, expected_seq=expected_seq)  # type: ignore[misc]  # the log's own
        is_child = self.info(lease.session_id).parent_id is not None
        DyingLog.kinds.append((is_child, tuple(_kind(each.type, each.payload) for each in drafts)))
        if len(DyingLog.kinds) == DyingLog.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)


class DyingSqliteLog(DyingLog, SqliteLog):
    """The log in a file."""


class DyingPostgresLog(DyingLog, PostgresLog):
    """The log on a server."""


def keep_in(directory: Path, store: str) -> None:
    """Say where the runs of a directory are kept: in a file there, unless the store is `postgres`."""
    if store == "postgres":
        (directory / "runs.url").write_text(store_in(store, directory))


def runs_in(directory: Path) -> SqliteLog | PostgresLog:
    """Open the runs of a directory."""
    return open_store(_place(directory))


def dying_in(directory: Path) -> DyingSqliteLog | DyingPostgresLog:
    """Open the runs of a directory to die with them."""
    place = _place(directory)
    return DyingSqliteLog(place) if isinstance(place, Path) else DyingPostgresLog(place)


def _place(directory: Path) -> str | Path:
    url = directory / "runs.url"
    return url.read_text() if url.exists() else directory / "runs.db"


def dies_after(number: int) -> None:
    """Let this process die after its n-th append from now on; never, if it is 0."""
    DyingLog.dies_after = number
    DyingLog.kinds = []


def worth_a_kill(kinds: Sequence[Kind]) -> list[int]:
    """Return the numbers, from 1, of the first and the last append of each kind, and a few in between."""
    last = {kind: number for number, kind in enumerate(kinds, start=1)}
    first = {kind: len(kinds) - number for number, kind in enumerate(reversed(kinds))}
    return sorted({*first.values(), *last.values(), *range(1, len(kinds) + 1, EVERY)})


def _kind(name: str, payload: bytes) -> str:
    said = json.loads(payload)
    return " ".join(
        str(each) for each in (name, said.get("kind"), said.get("event"), said.get("role")) if each
    )
