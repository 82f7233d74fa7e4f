"""The tables `pots` and `reservations`: money that many processes share, counted in one place.

Each move is one statement, so that no two processes can reserve the same money. Each is known by the id of a
reservation, so that one whose answer was lost is not made twice. A reservation whose process died stays: the
call that it was made for may have been dispatched, and so it counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import uuid4

import psycopg
from psycopg.types.numeric import Int8

from treenail.errors import UsageError
from treenail.log import rules
from treenail.log.postgres.database import Connection, Database

MAX_AMOUNT = 1 << 61
"""The most that a pot can hold, so that no sum is beyond what Postgres counts."""


class Pots:
    """The pots of a schema, by name. Amounts are pico-dollars."""

    def __init__(self, database: Database, sql: Mapping[str, bytes]) -> None:
        self._database = database
        self._sql = sql

    def reserve(self, name: str, amount: int, ceiling: int) -> str | None:
        """Set an amount aside if the pot stays within the ceiling. Return the reservation's id, or None."""
        rules.check_text("the name of a pot", name)
        if ceiling <= 0 or amount > ceiling:
            return None
        _check(name, amount)
        return self._reserve(name, amount, min(ceiling, MAX_AMOUNT))

    def settle(self, name: str, reservation_id: str, amount: int) -> None:
        """Replace a reservation by what was spent. Raises `UsageError` if it is not open."""
        _check(name, amount)
        if self._settle(name, reservation_id, amount) is None:
            raise UsageError(
                f"there is no open reservation {reservation_id!r} in the pot {name!r}; it was settled "
                f"before, or the pot was reset"
            )

    def add(self, name: str, amount: int) -> int:
        """Record money that was spent without a reservation. Return all that is spent."""
        rules.check_text("the name of a pot", name)
        _check(name, amount)
        # In two steps that each have an id: one that was repeated by mistake would count twice.
        reservation_id = self._reserve(name, amount, 2 * MAX_AMOUNT)
        assert reservation_id is not None
        spent = self._settle(name, reservation_id, amount)
        return self.sums(name)[0] if spent is None else spent

    def sums(self, name: str) -> tuple[int, int]:
        """Return what is spent of a pot and what is reserved."""

        def work(connection: Connection, doubt: bool) -> tuple[int, int]:
            found = connection.execute(self._sql["sums"], {"name": name}).fetchone()
            return (0, 0) if found is None else (int(found[0]), int(found[1]))

        return self._database.run(f"read the pot {name!r}", work)

    def reset(self, name: str) -> None:
        """Forget what was spent of a pot and what is reserved."""

        def work(connection: Connection, doubt: bool) -> None:
            # First the row: what is being reserved is seen by what follows, or comes after it.
            connection.execute(self._sql["lock_pot"], {"name": name})
            connection.execute(self._sql["reset"], {"name": name})

        self._database.transaction(f"reset the pot {name!r}", work)

    def _reserve(self, name: str, amount: int, ceiling: int) -> str | None:
        values = {"id": uuid4().hex, "name": name, "amount": Int8(amount), "ceiling": Int8(ceiling)}

        def work(connection: Connection, doubt: bool) -> str | None:
            if doubt and connection.execute(self._sql["reservation"], values).fetchone() is not None:
                return str(values["id"])
            try:
                made = connection.execute(self._sql["reserve"], values).fetchone()
            except psycopg.errors.UniqueViolation:
                return str(values["id"])  # An earlier attempt, whose answer was lost, came through just now.
            except psycopg.errors.CheckViolation:
                raise _too_much(name) from None
            return None if made is None else str(values["id"])

        return self._database.run(f"reserve money of the pot {name!r}", work)

    def _settle(self, name: str, reservation_id: str, amount: int) -> int | None:
        """Return what is spent of the pot then; None if there is no such reservation."""
        values = {"id": reservation_id, "name": name, "spent": Int8(amount)}

        def work(connection: Connection, doubt: bool) -> int | None:
            try:
                found = connection.execute(self._sql["settle"], values).fetchone()
            except psycopg.errors.CheckViolation:
                raise _too_much(name) from None
            if found is None and doubt:
                # Nobody else settles this reservation: the earlier attempt did.
                found = connection.execute(self._sql["sums"], values).fetchone()
            return None if found is None else int(found[0])

        return self._database.run(f"settle with the pot {name!r}", work)


def _check(name: str, amount: int) -> None:
    if not 0 <= amount <= MAX_AMOUNT:
        raise _too_much(name)


def _too_much(name: str) -> UsageError:
    return UsageError(f"the pot {name!r} cannot hold more than {MAX_AMOUNT} pico-dollars")
