"""The ledger: one lock, one atomic step to check and reserve, and the events that let a restart continue.

A call is paid for in three moves. *Reserve*: under the lock, ask every account from the chain up to the root
whether one more call fits, and if so book a step and the estimated cost in all of them; no other call can
come between the question and the booking. *Dispatch*: the call is made, without the lock. *Settle*: the
reservation is replaced by the real cost, whatever it is. Nothing is given back of a call that was made: an
attempt that failed is a step, and one of unknown cost costs what was reserved. Only a reservation that could
not be written down is taken back, because its call is not made.

`Reserved` is written to the journal before the dispatch and `Settled` after it. Folding the events gives what
was spent; a reservation without its settlement belongs to a call that was cut off, and counts in full. The
journal is called without the lock held, by whichever thread makes the call, so it must be thread-safe; order
between calls does not matter to the fold.

Time is not spent by calls alone, so it is also noted in between: `UsedTime` replaces the one before, at least
every `HEARTBEAT_S` while a run is under way. A note that says "running" and that no newer one replaced is
what a kill leaves behind. Its chains are charged what was last seen and one whole `HEARTBEAT_S`, which is
more than the time that nobody saw: so a kill never gives time back.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from treenail.containment.limits import ExecutionConfig, StopReason, to_pico
from treenail.errors import UsageError

HEARTBEAT_S = 1.0
"""While a run is under way, the time that it has used is noted at least this often; a kill costs as much."""


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

    For the record only: whether a resumed chain may continue depends on what is spent.
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
class UsedTime:
    """How long the chains of a run have been running, in milliseconds by chain id. The newest one counts."""

    root: str
    """The chain at the root of the run."""
    running: Mapping[str, float]
    """The chains that were under way; none, if the run had ended."""
    ended: Mapping[str, float]
    """The chains that had ended, and those of an earlier process that were not begun again."""


@dataclass(slots=True)
class Spent:
    """What one chain and everything below it has used up."""

    steps: int = 0
    retries: int = 0
    cost_pico: int = 0
    elapsed_ms: float = 0.0
    """What the chain is charged: what was seen, and `HEARTBEAT_S` more if its process was killed."""
    seen_ms: float = 0.0
    """How long the chain was seen to run. It ran no shorter."""
    unsettled: int = 0
    """Calls that were dispatched and never heard of again; their reservations are in `cost_pico`."""
    is_noted: bool = False
    """Whether a heartbeat knew of the chain, so that the next one has to repeat what it knew."""


def fold(events: Iterable[LedgerEvent | UsedTime]) -> dict[str, Spent]:
    """Return what each chain has spent, by chain id; a child's spending counts for its parents too.

    The events may come in any order, and more than once. Notes of used time may be among them.
    """
    events = list(events)
    notes = [each for each in events if isinstance(each, UsedTime)]
    elapsed: dict[str, float] = {}
    calls: dict[str, tuple[str, ...]] = {}
    reserved: dict[str, int] = {}
    settled: dict[str, int] = {}
    retried: dict[str, tuple[str, ...]] = {}
    for event in events:
        if isinstance(event, UsedTime):
            continue
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
    spent = {chain_id: Spent(seen_ms=elapsed_ms) for chain_id, elapsed_ms in elapsed.items()}
    for reservation_id, lineage in calls.items():
        is_open = reservation_id not in settled
        cost = reserved[reservation_id] if is_open else settled[reservation_id]
        for chain_id in lineage:
            spent[chain_id].steps += 1
            spent[chain_id].cost_pico += cost
            spent[chain_id].unsettled += is_open
    for lineage in retried.values():
        for chain_id in lineage:
            spent[chain_id].retries += 1
    _charge_time(spent, notes)
    return spent


def _charge_time(spent: dict[str, Spent], notes: Iterable[UsedTime]) -> None:
    """Set the time that each chain is charged: what was seen, and more if it was killed while it ran."""
    killed: set[str] = set()
    for note in notes:
        for chain_id, ran_ms in (*note.running.items(), *note.ended.items()):
            chain = spent.setdefault(chain_id, Spent())
            chain.seen_ms, chain.is_noted = max(chain.seen_ms, ran_ms), True
        killed.update(note.running)
        if note.running:
            # A chain that began after the last note was running as well if a call of it was under way.
            killed.update(chain_id for chain_id, chain in spent.items() if chain.unsettled)
    for chain_id, chain in spent.items():
        chain.elapsed_ms = chain.seen_ms + (HEARTBEAT_S * 1000 if chain_id in killed else 0)


class Tally:
    """What one chain has spent and reserved, by its id. The ledger's lock guards it."""

    __slots__ = ("reserved", "retries", "spent", "steps")

    def __init__(self, before: Spent | None = None) -> None:
        self.spent = before.cost_pico if before else 0
        self.reserved = 0
        self.steps = before.steps if before else 0
        self.retries = before.retries if before else 0


class Account:
    """A context's ceilings, next to the tally of its chain, which contexts with one chain id share."""

    __slots__ = ("max_cost", "max_retries", "max_steps", "tally")

    def __init__(self, config: ExecutionConfig, tally: Tally) -> None:
        self.max_cost = None if config.max_cost_usd is None else to_pico(config.max_cost_usd)
        self.max_steps = config.max_steps
        self.max_retries = config.max_retries_total
        self.tally = tally

    @property
    def is_out_of_retries(self) -> bool:
        """Whether the retry ceiling is reached."""
        return self.max_retries is not None and self.tally.retries >= self.max_retries

    def is_final(self, reason: StopReason) -> bool:
        """Say whether that ceiling is reached for good, rather than too low for one dear call."""
        return reason is not StopReason.BUDGET_EXCEEDED or (
            self.max_cost is not None and self.tally.spent >= self.max_cost
        )


@dataclass(frozen=True, slots=True)
class Books:
    """The accounts that a chain's calls are booked in: its own first, then those of the chains above it."""

    accounts: tuple[Account, ...]
    retry_accounts: tuple[Account, ...]
    """Those whose retry budget its failures use; a chain that only looks on uses its own alone."""

    @property
    def left(self) -> int | None:
        """What may still be spent: the least that an account has left; None without a ceiling."""
        left = [
            each.max_cost - each.tally.spent - each.tally.reserved
            for each in self.accounts
            if each.max_cost is not None
        ]
        return min(left, default=None)

    @property
    def is_out_of_retries(self) -> bool:
        """Whether a retry ceiling is reached."""
        return any(account.is_out_of_retries for account in self.retry_accounts)

    def refusal(self, cost: int, is_retry: bool) -> tuple[Account, StopReason] | None:
        """Say which account forbids one more call, and why; None if the call fits.

        A retry is not held against the retry ceiling: its unit was taken when the attempt before it failed.
        """
        for account in self.accounts:
            tally = account.tally
            if account.max_cost is not None:
                committed = tally.spent + tally.reserved
                if committed >= account.max_cost or committed + cost > account.max_cost:
                    return account, StopReason.BUDGET_EXCEEDED
            if account.max_steps is not None and tally.steps >= account.max_steps:
                return account, StopReason.STEP_LIMIT_EXCEEDED
        if not is_retry:
            for account in self.retry_accounts:
                if account.max_retries is not None and account.tally.retries >= account.max_retries:
                    return account, StopReason.RETRY_BUDGET_EXCEEDED
        return None

    def book(self, cost: int, is_retry: bool) -> tuple[Account, StopReason] | None:
        """Book one step and `cost` in every account, or in none, and say who refused. Hold the lock."""
        refused = self.refusal(cost, is_retry)
        if refused is None:
            for account in self.accounts:
                tally = account.tally
                tally.steps += 1
                tally.reserved += cost
        return refused


@dataclass(slots=True)
class _Stretch:
    """The time of one chain id in this process: since when, until when, and how many contexts have it."""

    began: float
    ended: float = 0.0
    open_count: int = 1


class Ledger:
    """The accounts of a chain and all its children, under one lock."""

    __slots__ = ("__weakref__", "_stretches", "_tallies", "carried", "is_copy", "journal", "lock")

    def __init__(self, journal: Journal | None = None, carried: dict[str, Spent] | None = None) -> None:
        # Reentrant, because a signal handler may call abort() while its own thread holds it.
        self.lock = threading.RLock()
        self.journal = journal
        self.carried = carried or {}
        self.is_copy = False
        """Whether this process got it by a fork: the original is in the process that it was forked from."""
        self._tallies: dict[str, Tally] = {}
        self._stretches: dict[str, _Stretch] = {}
        _LEDGERS.add(self)

    def refuse_copy(self) -> None:
        """Refuse to spend in a forked process what only the original can count."""
        if self.is_copy:
            raise UsageError(
                "this context was made in another process, and this one is a fork of it: what it spends "
                "here would not be counted there, so nothing was run. Make a context in each process after "
                "the fork, and let them share one ceiling with ExecutionConfig(max_cost_usd=..., "
                "budget_backend=SharedPot(SqliteLog(path), name)); SharedPot is in treenail.containment.pots"
            )

    # --- time -------------------------------------------------------------------------------------

    def begin(self, chain_id: str, now: float) -> float:
        """Return since when a chain has been running, on the clock that says `now`.

        Chains with one id are one chain: a second context continues what the first has used.
        """
        with self.lock:
            stretch = self._stretches.get(chain_id)
            if stretch is None:
                stretch = self._stretches[chain_id] = _Stretch(now - self.carried_s(chain_id))
            else:
                if not stretch.open_count:
                    stretch.began += now - stretch.ended
                stretch.open_count += 1
            return stretch.began

    def reopen(self, chain_id: str) -> None:
        """Let a chain that was closed run on: a call is made in it."""
        with self.lock:
            self._stretches[chain_id].open_count += 1

    def end(self, chain_id: str, now: float) -> None:
        """Note that a context of a chain was closed."""
        with self.lock:
            stretch = self._stretches[chain_id]
            stretch.open_count -= 1
            if not stretch.open_count:
                stretch.ended = now

    def carried_s(self, chain_id: str) -> float:
        """Return what a chain is charged for its time in processes before this one."""
        spent = self.carried.get(chain_id)
        return spent.elapsed_ms / 1000 if spent else 0.0

    def used_time(self, root: str, now: float) -> UsedTime:
        """Return what to note about the time of all chains with a name; see `UsedTime`."""
        with self.lock:
            stretches = list(self._stretches.items())
        is_over = not self._stretches[root].open_count
        ended = {
            chain_id: spent.elapsed_ms
            for chain_id, spent in self.carried.items()
            if spent.is_noted and chain_id not in self._stretches
        }
        running: dict[str, float] = {}
        for chain_id, each in stretches:
            ran_ms = max(0.0, ((now if each.open_count else each.ended) - each.began) * 1000)
            (running if each.open_count and not is_over else ended)[chain_id] = ran_ms
        return UsedTime(root, running, ended)

    # --- money, steps and retries -----------------------------------------------------------------

    def open_account(self, config: ExecutionConfig, chain_id: str) -> Account:
        """Return an account of what a chain has spent, in this process or in one before it.

        Contexts with one chain id are one chain, also while both live: what one has reserved, the other has.
        """
        with self.lock:
            tally = self._tallies.get(chain_id)
            if tally is None:
                tally = self._tallies[chain_id] = Tally(self.carried.get(chain_id))
            return Account(config, tally)

    def settle(self, books: Books, reserved: int, cost: int) -> None:
        """Replace a reservation by the real cost in every account."""
        if not reserved and not cost:
            return
        with self.lock:
            for account in books.accounts:
                account.tally.reserved -= reserved
                account.tally.spent += cost

    def unbook(self, books: Books, reserved: int) -> None:
        """Take back a booking that could not be written down, so that its call was never made."""
        with self.lock:
            for account in books.accounts:
                account.tally.steps -= 1
                account.tally.reserved -= reserved

    def take_retry(self, books: Books) -> bool:
        """Take one unit of the retry budget from every account that counts it, or from none."""
        with self.lock:
            if books.is_out_of_retries:
                return False
            for account in books.retry_accounts:
                account.tally.retries += 1
            return True


_LEDGERS: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _mark_copies() -> None:
    """Tell the ledgers of a forked process that they are copies; another thread may have held a lock."""
    for ledger in list(_LEDGERS):
        ledger.lock = threading.RLock()
        ledger.is_copy = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_copies)
