"""What a bench yields: rows of figures, some of which are lines that must hold."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Size(StrEnum):
    """How much a bench does."""

    FULL = "full"
    """Everything, beside every peer that is installed: for figures."""
    QUICK = "quick"
    """Small sizes, beside the peers: for a first impression."""
    LEAST = "least"
    """The smallest sizes, without peers: to see that the bench still runs. `make test` does that."""

    @property
    def is_small(self) -> bool:
        return self is not Size.FULL


class Row(NamedTuple):
    """One measurement: ours, the floor's or the peer's, their ratio, and the ratio to stay under."""

    name: str
    ours: float | str
    other: float | str | None = None
    ratio: float | None = None
    limit: float | None = None
    line: str = ""
    """The line of `docs/performance.md` that this row decides, if there is one."""

    @property
    def is_missed(self) -> bool:
        return self.ratio is not None and self.limit is not None and self.ratio > self.limit


DURABLE_CALL = "durable tool call on SQLite, 1,000 calls, beside LangGraph's delta saver"
POSTGRES_CALL = "durable tool call on Postgres, in appends of the same run"
CALL_IN_MEMORY = "tool call in memory, 100 calls, beside LangGraph's create_agent"
GROWTH = "growth of either from call 10 to call 10,000"
STORED_BYTES = "bytes for 1,000 calls with 1 KB results, beside the payload"
SNAPSHOT = "snapshot, three writes and restore at 50,000 files"
CONTAINED_CALL = "a contained no-op, beside veronica-core"
LIST_COMMAND = "`treenail list` on ten runs, s of CPU"
LIFE_COMMAND = "`treenail run` to its first line in a terminal, s of CPU"
RUN_COMMAND = "`treenail run` to its first request, s of CPU beyond the vendor's SDK"

LINES = (
    DURABLE_CALL,
    POSTGRES_CALL,
    CALL_IN_MEMORY,
    GROWTH,
    STORED_BYTES,
    SNAPSHOT,
    CONTAINED_CALL,
    LIST_COMMAND,
    LIFE_COMMAND,
    RUN_COMMAND,
)
"""What a user notices: every line must be met by every row that decides it."""
