"""Makes a file readable again whose first page is damaged, on a copy.

Theory of operation
-------------------
SQLite finds everything through the first page: its header and the list of
tables. One flipped byte there can hide a file full of whole events. But the
first page of a log says nothing that is not known: the tables are those of the
schema, and they were made in a known order, so their root pages have known
numbers: one set in a file as it was made, another in one that was rebuilt by a
`VACUUM`. So a first page is taken from a new log, put before the rest of a copy,
and what can be read through it is believed only as far as its checksums go.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from holdfast.log.migrations import APPLICATION_ID, LATEST, MIGRATIONS

_PAGE = 4096


def _first_page(path: Path, *, rebuilt: bool) -> bytes:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute(f"PRAGMA page_size = {_PAGE}")
        for number in sorted(MIGRATIONS):
            for statement in MIGRATIONS[number]:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {LATEST}")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        if rebuilt:
            connection.execute("VACUUM")
    finally:
        connection.close()
    return path.read_bytes()[:_PAGE]


def copies_with_new_first_pages(damaged: Path, directory: Path) -> Iterator[Path]:
    """Yield copies of a damaged file in `directory`, each with another sound first page.

    No connection of this process may be open on the damaged file.
    """
    for rebuilt in (False, True):
        page = bytearray(_first_page(directory / f"template-{rebuilt}.db", rebuilt=rebuilt))
        copy = directory / f"copy-{rebuilt}.db"
        shutil.copyfile(damaged, copy)
        wal = damaged.with_name(damaged.name + "-wal")
        if wal.exists():
            shutil.copyfile(wal, copy.with_name(copy.name + "-wal"))
        # The header names the number of pages; with its own change counter beside it, it is believed.
        page[28:32] = (copy.stat().st_size // _PAGE).to_bytes(4, "big")
        page[92:96] = page[24:28]
        # The list of free pages is not needed for reading.
        page[32:40] = bytes(8)
        with copy.open("r+b") as stream:
            stream.write(page)
        yield copy
