"""What Postgres' errors mean here, and the errors that a user gets in their place."""

from __future__ import annotations

import re
from enum import Enum

import psycopg

from treenail.errors import LogBusyError, LogDamagedError, LogError
from treenail.log.stores import PostgresUrl


class Failure(Enum):
    """What a failed attempt says about what was asked for."""

    LOST = "lost"
    """The connection is gone: it was done, or it was not."""
    AGAIN = "again"
    """It was not done, and the next attempt may succeed at once."""
    LATER = "later"
    """It was not done, because the server cannot take it right now."""
    REFUSED = "refused"
    """It was not done, and trying again changes nothing."""


_AGAIN = ("40001", "40P01", "55P03")
"""Serialization failure, deadlock, lock not available."""
_LATER = ("53300", "57P03", "53400")
"""Too many connections, starting up or shutting down."""
_FULL = re.compile(
    r"too many (clients|connections)|connection slots|no more connections allowed", re.IGNORECASE
)
_PASSING = re.compile(r"starting up|shutting down|in recovery mode|accepting connections", re.IGNORECASE)
"""What a server says that will soon take connections; the driver has no code for a refused connection."""


def meaning(error: psycopg.Error) -> Failure:
    """Return what a failure says about what was asked for."""
    state = error.sqlstate
    if state is None:
        # The server said nothing: the connection broke, or its answer did not come in time.
        return Failure.LOST if isinstance(error, psycopg.OperationalError) else Failure.REFUSED
    if state in _LATER:
        return Failure.LATER
    if state in _AGAIN:
        return Failure.AGAIN
    # The last words of a session: an administrator, a crash of another one, a lost socket. The
    # server may have committed before it said so.
    if state.startswith(("08", "57P")) or error.diag.severity_nonlocalized in ("FATAL", "PANIC"):
        return Failure.LOST
    return Failure.REFUSED


def is_passing(error: psycopg.Error) -> bool:
    """Return whether a server that refused a connection may take one in a moment."""
    return bool(_FULL.search(str(error)) or _PASSING.search(str(error)))


def _said(url: PostgresUrl, error: BaseException) -> str:
    """Return what the server or the driver said, in one line and without passwords."""
    return url.redacted(" ".join(str(error).split()))


_ADVICE = {
    "25006": "the server is read-only: it is a standby, or default_transaction_read_only is set; name the "
    "primary, or all hosts (postgresql://one,two/db?target_session_attrs=read-write)",
    "57014": "the server cancelled it, for instance because of statement_timeout; nothing was written; "
    "raise the timeout of this role, or find out what keeps the server busy",
    "25P03": "the server ended an idle transaction",
    "42501": "this role lacks a privilege; docs/scale.md lists what it needs",
    "3F000": "the schema does not exist, and this role may not create it",
    "53100": "the server's disk is full; nothing was written; make room and try again",
    "53200": "the server is out of memory; nothing was written",
}


def translated(url: PostgresUrl, doing: str, error: psycopg.Error) -> LogError:
    """Return the error that a user gets for one of Postgres'."""
    state, said = error.sqlstate, _said(url, error)
    if state in ("XX001", "XX002"):
        return LogDamagedError(
            f"could not {doing}: {url} has damaged data or a damaged index ({said}); nothing was changed; "
            f"restore it from a backup, or REINDEX what the server names"
        )
    advice = _ADVICE.get(state or "")
    if advice is None and state is not None and state.startswith("28"):
        advice = "the server does not accept this login; check the user, and the password in PGPASSWORD or "
        advice += "~/.pgpass"
    kind = LogBusyError if state in ("57014", *_LATER) else LogError
    return kind(f"could not {doing} in {url}: {said}{f'; {advice}' if advice else ''}")


def unreachable(url: PostgresUrl, error: BaseException) -> LogError:
    """Return the error for a server that does not take a connection."""
    said = _said(url, error)
    if _FULL.search(said):
        return LogBusyError(
            f"{url} has no connection left for this process ({said}); raise max_connections, run fewer "
            f"processes, or put PgBouncer in front of it"
        )
    return LogError(
        f"no connection to {url}: {said}; check that the server runs, and host, port, database and login"
    )


def undecided(url: PostgresUrl, doing: str, error: BaseException, waited_s: float) -> LogError:
    """Return the error for something of which nobody can say whether it was done."""
    return LogError(
        f"could not {doing}: the connection to {url} was lost before its answer came, and the server could "
        f"not be asked for {waited_s:g} s ({_said(url, error)}); it was done wholly or not at all; open the "
        f"session again when the server is back: its log says which"
    )
