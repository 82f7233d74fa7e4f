"""The ledger: one lock, one atomic step to check and reserve, and the events that let a restart continue.

A call is paid for in three moves. *Reserve*: under the lock, ask every account from the chain up to the root
whether one more call fits, and if so book a step and the estimated cost in all of them; nobody can come
between the question and the booking. *Dispatch*: the call is made, without the lock. *Settle*: the
reservation is replaced by the real cost, whatever it is. Nothing is ever given back: an attempt that failed
is a step, and if nobody knows what it cost, it cost what was reserved.

`Reserved` is written to the journal before the dispatch and `Settled` after it. Folding the events gives what
was spent; a reservation without its settlement belongs to a call that was cut off, and counts in full. The
journal is called without the lock held, by whichever thread makes the call, so it must be thread-safe; order
between calls does not matter to the fold.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

from treenail.containment.limits import Account, StopReason, number, to_pico
from treenail.errors import LogDamagedError, UsageError


@dataclass(frozen=True, slots=True)
class Reserved:
    """A call is about to be dispatched; it counts from here on, whatever becomes of it."""

    reservation_id: str
    lineage: tuple[str, ...]
    """The chain ids from the root down to the chain that made the call."""
    node_id: str
    kind: str
    operation_name: str
    cost_usd: float
    at: datetime
    elapsed_ms: float
    """How long the chain had been running."""
    elapsed_above_ms: tuple[float, ...] = ()
    """How long the chains above it had been running, in the order of `lineage`."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A reservation was replaced by the real cost.

    A later one for the same reservation corrects it upwards.
    """

    reservation_id: str
    lineage: tuple[str, ...]
    node_id: str
    status: str
    cost_usd: float
    at: datetime
    elapsed_ms: float
    elapsed_above_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RetryTaken:
    """A failure was answered out of the retry budget."""

    reservation_id: str
    """The attempt that failed."""
    lineage: tuple[str, ...]
    node_id: str
    at: datetime
    elapsed_ms: float
    elapsed_above_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ChainStopped:
    """A chain stopped for good.

    For the record: what is spent says by itself whether a resumed chain may go on.
    """

    lineage: tuple[str, ...]
    reason: str
    detail: str
    at: datetime
    elapsed_ms: float
    elapsed_above_ms: tuple[float, ...] = ()


LedgerEvent: TypeAlias = Reserved | Settled | RetryTaken | ChainStopped
"""What a journal is told."""

Journal: TypeAlias = Callable[[LedgerEvent], object]
"""Takes each event to where it lasts, and returns when it is there."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What one chain and everything below it has used up."""

    steps: int = 0
    retries: int = 0
    cost_pico: int = 0
    elapsed_ms: float = 0.0
    unsettled: int = 0
    """Calls that were dispatched and never heard of again; their reservations are in `cost_pico`."""


def fold(events: Iterable[LedgerEvent]) -> dict[str, Spent]:
    """Return what each chain has spent, by chain id; a child's spending counts for its parents too.

    The events may come in any order, and more than once.
    """
    elapsed: dict[str, float] = {}
    calls: dict[str, tuple[str, ...]] = {}
    reserved: dict[str, int] = {}
    settled: dict[str, int] = {}
    retried: dict[str, tuple[str, ...]] = {}
    for event in events:
        # Each chain has its own beginning; an event of a child says how long its parents had been running.
        above = event.elapsed_above_ms or (event.elapsed_ms,) * (len(event.lineage) - 1)
        for chain_id, ran_ms in zip(event.lineage, (*above, event.elapsed_ms), strict=True):
            elapsed[chain_id] = max(elapsed.get(chain_id, 0.0), ran_ms)
        if isinstance(event, Reserved):
            calls[event.reservation_id] = event.lineage
            reserved[event.reservation_id] = to_pico(event.cost_usd)
        elif isinstance(event, Settled):
            # A settlement whose reservation was lost (a pruned journal) is still a call that was made.
            calls[event.reservation_id] = event.lineage
            cost = settled.get(event.reservation_id, 0)
            settled[event.reservation_id] = max(cost, to_pico(event.cost_usd))
        elif isinstance(event, RetryTaken):
            retried[event.reservation_id] = event.lineage
    spent = {chain_id: Spent(elapsed_ms=elapsed_ms) for chain_id, elapsed_ms in elapsed.items()}
    for reservation_id, lineage in calls.items():
        is_open = reservation_id not in settled
        cost = reserved[reservation_id] if is_open else settled[reservation_id]
        for chain_id in lineage:
            before = spent[chain_id]
            spent[chain_id] = dataclasses.replace(
                before,
                steps=before.steps + 1,
                cost_pico=before.cost_pico + cost,
                unsettled=before.unsettled + is_open,
            )
    for lineage in retried.values():
        for chain_id in lineage:
            spent[chain_id] = dataclasses.replace(spent[chain_id], retries=spent[chain_id].retries + 1)
    return spent


class Ledger:
    """The accounts of a chain and all its children, under one lock."""

    __slots__ = ("_accounts", "carried", "journal", "lock")

    def __init__(self, journal: Journal | None = None, carried: dict[str, Spent] | None = None) -> None:
        # Reentrant, because a signal handler may call abort() while its own thread holds it.
        self.lock = threading.RLock()
        self.journal = journal
        self.carried = carried or {}
        self._accounts: dict[str, Account] = {}

    def open_account(self, account: Account, chain_id: str) -> None:
        """Let an account go on from what its chain has spent, in this process or in one before it."""
        with self.lock:
            before, spent = self._accounts.get(chain_id), self.carried.get(chain_id)
            self._accounts[chain_id] = account
            if before is not None:
                account.steps, account.retries, account.spent = before.steps, before.retries, before.spent
            elif spent is not None:
                account.steps, account.retries, account.spent = spent.steps, spent.retries, spent.cost_pico

    def refusal(
        self, accounts: Sequence[Account], cost: int, *, is_retry: bool = False
    ) -> tuple[int, StopReason] | None:
        """Say which account, by its place, forbids one more call; None if it fits.

        Hold the lock around it.
        """
        for place, account in enumerate(accounts):
            reason = account.refusal(cost, is_retry=is_retry)
            if reason is not None:
                return place, reason
        return None

    def book(
        self, accounts: Sequence[Account], cost: int, *, is_retry: bool = False, takes_retry: bool = False
    ) -> tuple[int, StopReason] | None:
        """Book one step and `cost`, and a retry if it takes one, in every account, or in none: who refused?

        Hold the lock around it.
        """
        refused = self.refusal(accounts, cost, is_retry=is_retry)
        if refused is None:
            for account in accounts:
                account.steps += 1
                account.reserved += cost
                account.retries += takes_retry
        return refused

    def settle(self, accounts: Sequence[Account], reserved: int, cost: int) -> None:
        """Replace a reservation by the real cost in every account."""
        with self.lock:
            for account in accounts:
                account.reserved -= reserved
                account.spent += cost

    def add_cost(self, accounts: Sequence[Account], cost: int) -> None:
        """Book money that turned out to be spent after its call was settled."""
        with self.lock:
            for account in accounts:
                account.spent += cost

    def take_retry(self, accounts: Sequence[Account]) -> bool:
        """Take one unit of the retry budget from every account, or from none."""
        with self.lock:
            for account in accounts:
                if account.max_retries is not None and account.retries >= account.max_retries:
                    return False
            for account in accounts:
                account.retries += 1
            return True


# --- events on disk, for those who use the containment alone ------------------------------------------

_TYPES: dict[str, type[LedgerEvent]] = {
    "reserved": Reserved,
    "settled": Settled,
    "retry_taken": RetryTaken,
    "chain_stopped": ChainStopped,
}
_NAMES = {event_type: name for name, event_type in _TYPES.items()}
_FIELDS = {kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in _NAMES}
_encode = json.JSONEncoder(separators=(",", ":")).encode


def event_to_json(event: LedgerEvent) -> str:
    """Return the event as one line of JSON."""
    kind = type(event)
    # Written out by hand: a generic walk over the dataclass costs more than all the rest of a call.
    fields = {name: getattr(event, name) for name in _FIELDS[kind]}
    fields["type"], fields["at"] = _NAMES[kind], event.at.isoformat()
    return _encode(fields)


def event_from_json(line: str) -> LedgerEvent:
    """Return the event that `event_to_json` wrote; `UsageError` if the line is not one."""
    try:
        fields = json.loads(line)
        event_type = _TYPES[fields.pop("type")]
        fields["at"] = datetime.fromisoformat(fields["at"])
        for name in ("lineage", "elapsed_above_ms"):
            if not isinstance(fields.get(name, []), list):
                raise UsageError(f"{name} is not a list")
            fields[name] = tuple(fields.get(name, ()))
        event = event_type(**fields)
        _check(event)
        return event
    except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise UsageError(f"not a ledger event: {line[:80]!r} ({error})") from error


def _check(event: LedgerEvent) -> None:
    """Refuse an event that would give money or time back, or that nothing can be counted by."""
    owner = type(event).__name__
    if not event.lineage:
        raise UsageError("lineage names no chain")
    if event.elapsed_above_ms and len(event.elapsed_above_ms) != len(event.lineage) - 1:
        raise UsageError("elapsed_above_ms does not fit lineage")
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if field.name in ("cost_usd", "elapsed_ms"):
            number(owner, field.name, value, zero_ok=True)
        elif field.name in ("lineage", "elapsed_above_ms"):
            for item in value:
                if field.name == "elapsed_above_ms":
                    number(owner, field.name, item, zero_ok=True)
                elif not isinstance(item, str):
                    raise UsageError(f"lineage must name chains by their ids, not {item!r}")
        elif field.name != "at" and not isinstance(value, str):
            raise UsageError(f"{owner}.{field.name} must be a text, not {value!r}")


class JsonlJournal:
    """A journal in a file, one line per event, on disk before the call returns.

    Pass the instance as `journal=`; after a restart, `read_journal(path)` gives the events to
    `ExecutionContext.resume`. One process writes it at a time.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        # A line that was cut off by a crash was never acknowledged; the next one must not be glued to it.
        data = self.path.read_bytes()
        if not data.endswith(b"\n"):
            os.ftruncate(self._file, data.rfind(b"\n") + 1)

    def __call__(self, event: LedgerEvent) -> None:
        """Write the event and wait until it is on disk."""
        line = (event_to_json(event) + "\n").encode()
        with self._lock:
            size = os.fstat(self._file).st_size
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._file, line[written:])
                os.fdatasync(self._file)
            except OSError:
                # Half a line (a full disk) must not be glued to the next one.
                os.ftruncate(self._file, size)
                raise

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def __enter__(self) -> JsonlJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journal(path: str | os.PathLike[str]) -> list[LedgerEvent]:
    """Return the events in a journal file; none if there is no file.

    A line cut off at the end is left out.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    events = []
    for place, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            events.append(event_from_json(line))
        except UsageError as error:
            raise LogDamagedError(
                f"line {place} of {path} is damaged: {error}; what was spent is not known, so nothing was "
                f"resumed. Repair or remove that line to go on",
                last_good_seq=place - 1,
            ) from error
    return events
