"""The tables `pots` and `reservations`: money that many processes share, counted in one place.

Each move is one transaction of the file, so that no two processes can reserve the same money. A reservation
whose process died stays: the call that it was made for may have been dispatched, and so it counts.
Every row carries a checksum, as all rows here do; a damaged pot is refused, never guessed.
"""

from __future__ import annotations

import sqlite3
from hashlib import blake2b
from uuid import uuid4

from treenail.errors import UsageError
from treenail.log import rules
from treenail.log.sqlite.database import Database
from treenail.log.sqlite.failures import readable

MAX_AMOUNT = 1 << 61
"""The most that a pot can hold, so that no sum is beyond what SQLite counts."""

_FIND = "SELECT spent, reserved, checksum FROM pots WHERE name = ?"
_PUT = "INSERT OR REPLACE INTO pots VALUES (?, ?, ?, ?)"
_RESERVATION = "SELECT amount, checksum FROM reservations WHERE id = ? AND pot = ?"
_RESERVE = "INSERT INTO reservations VALUES (?, ?, ?, ?)"
_SETTLE = "DELETE FROM reservations WHERE id = ?"
_EMPTY = "DELETE FROM reservations WHERE pot = ?"
_TABLES = ("pots", "reservations")
_HAS_TABLES = "SELECT 1 FROM sqlite_schema WHERE name = 'pots'"


def _checksum(*parts: object) -> bytes:
    return blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _sums(connection: sqlite3.Connection, name: str) -> tuple[int, int]:
    """Return what is spent of a pot and what is reserved; nothing, for one that was never used."""
    found = connection.execute(_FIND, (name,)).fetchone()
    if found is None:
        return 0, 0
    spent, reserved, checksum = found
    if checksum != _checksum("pot", name, spent, reserved):
        raise sqlite3.DatabaseError(f"the row of the pot {name!r} is damaged")
    return int(spent), int(reserved)


def _put(connection: sqlite3.Connection, name: str, spent: int, reserved: int) -> None:
    if spent + reserved > MAX_AMOUNT:
        raise UsageError(f"the pot {name!r} cannot hold more than {MAX_AMOUNT} pico-dollars")
    connection.execute(_PUT, (name, spent, reserved, _checksum("pot", name, spent, reserved)))


class Pots:
    """The pots of a file, by name. Amounts are pico-dollars."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def reserve(self, name: str, amount: int, ceiling: int) -> str | None:
        """Set an amount aside if the pot stays within the ceiling. Return the reservation's id, or None."""
        rules.check_text("the name of a pot", name)

        def work(connection: sqlite3.Connection) -> str | None:
            spent, reserved = _sums(connection, name)
            committed = spent + reserved
            if committed >= ceiling or committed + amount > ceiling:
                return None
            reservation_id = uuid4().hex
            checksum = _checksum("reservation", reservation_id, name, amount)
            _put(connection, name, spent, reserved + amount)
            connection.execute(_RESERVE, (reservation_id, name, amount, checksum))
            return reservation_id

        return self._database.write(f"reserve money of the pot {name!r}", work)

    def settle(self, name: str, reservation_id: str, amount: int) -> None:
        """Replace a reservation by what was spent. Raises `UsageError` if it is not open."""

        def work(connection: sqlite3.Connection) -> None:
            found = connection.execute(_RESERVATION, (reservation_id, name)).fetchone()
            if found is None:
                raise UsageError(
                    f"there is no open reservation {reservation_id!r} in the pot {name!r}; it was settled "
                    f"before, or the pot was reset"
                )
            held, checksum = found
            if checksum != _checksum("reservation", reservation_id, name, held):
                raise sqlite3.DatabaseError(f"a reservation of the pot {name!r} is damaged")
            spent, reserved = _sums(connection, name)
            connection.execute(_SETTLE, (reservation_id,))
            _put(connection, name, spent + amount, reserved - held)

        self._database.write(f"settle with the pot {name!r}", work)

    def add(self, name: str, amount: int) -> int:
        """Record money that was spent without a reservation. Return all that is spent."""
        rules.check_text("the name of a pot", name)

        def work(connection: sqlite3.Connection) -> int:
            spent, reserved = _sums(connection, name)
            _put(connection, name, spent + amount, reserved)
            return spent + amount

        return self._database.write(f"add to the pot {name!r}", work)

    def sums(self, name: str) -> tuple[int, int]:
        """Return what is spent of a pot and what is reserved."""
        return self._database.read(f"read the pot {name!r}", lambda connection: _sums(connection, name))

    def reset(self, name: str) -> None:
        """Forget what was spent of a pot and what is reserved."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute(_EMPTY, (name,))
            _put(connection, name, 0, 0)

        self._database.write(f"reset the pot {name!r}", work)


def copy(source: sqlite3.Connection, target: sqlite3.Connection) -> None:
    """Copy what can be read of all pots, as it is: a damaged row stays one that is refused."""
    if source.execute(_HAS_TABLES).fetchone() is None:
        return
    for table in _TABLES:
        for row in readable(source, f"SELECT * FROM {table}"):
            target.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?, ?)", row)
