"""A chain: who it is, what is above it, what it has used, and why it stopped.

A chain keeps each reason for stopping once. Reaching a ceiling, the deadline and `abort()` end the chain; an
open circuit, a full window and a call that is too dear for what is left only refuse the call at hand, and are
recorded once until a call goes through again.

Locks: the ledger's lock guards the accounts of the whole tree and the lists of nodes and events. It is held
for arithmetic and appends only, never while a hook, a journal, a callback or a call runs.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from treenail.clock import Clock, new_token
from treenail.containment.attempts import Attempt, Call
from treenail.containment.cancel import CancellationToken, PartialResultBuffer
from treenail.containment.heartbeat import Heartbeat, NoteTime
from treenail.containment.ledger import (
    Account,
    Books,
    ChainStopped,
    Ledger,
    LedgerEvent,
    Reserved,
    RetryTaken,
    Settled,
    UsedTime,
)
from treenail.containment.limits import ExecutionConfig, StopReason, to_usd
from treenail.containment.records import (
    ChainMetadata,
    ContextSnapshot,
    Frozen,
    GraphSummary,
    Status,
)
from treenail.containment.shield import Decision, SafetyEvent
from treenail.containment.threads import call_later, logger, weakly
from treenail.errors import CallRefused, UsageError

# A caller that ignores HALT must not fill the memory with records of it; beyond this they are only counted.
MAX_BLOCKED_NODES = 10_000

# The same for events; the chain's own stops, which are few, are kept beyond it.
MAX_EVENTS = 10_000

HOOK = "ExecutionContext"

_CEILINGS = ("max_cost_usd", "max_steps", "max_retries_total", "timeout_ms", "max_depth")

_LAST_WORD_S = 2.0
"""How long `close` waits for a timer that is stopping the chain: its journal may hang."""


class Chain:
    """One run, or one child of it."""

    def __init__(
        self,
        config: ExecutionConfig,
        metadata: ChainMetadata,
        clock: Clock,
        ledger: Ledger,
        *,
        parent: Chain | None,
        above: Sequence[str] = (),
        is_onlooker: bool = False,
        is_named: bool = True,
        note_time: NoteTime | None = None,
    ) -> None:
        self.config = config
        self.metadata = metadata
        self.id = metadata.chain_id
        self.parent = parent
        self.clock = clock
        self.ledger = ledger
        self._is_onlooker = is_onlooker

        self.line: tuple[Chain, ...] = (self, *(parent.line if parent else ()))
        """This chain and those above it in this process, the root last."""
        self._above_ids: tuple[str, ...] = parent._above_ids if parent else tuple(above)
        above_ids = parent.lineage if parent else self._above_ids
        if self.id in above_ids:
            raise UsageError(
                f"the chain {self.id} is above this one; a child chain needs an id of its own, or what it "
                f"spends would count twice"
            )
        self.lineage: tuple[str, ...] = (*above_ids, self.id)
        """The ids of the chains from the root down to this one."""
        counted = () if is_onlooker else (parent._retry_lineage if parent else self._above_ids)
        self._retry_lineage: tuple[str, ...] = (*counted, self.id)
        self.depth: int = parent.depth + (not is_onlooker) if parent else len(self._above_ids)
        if parent is not None and not is_onlooker:
            parent._check_depth()

        self.account: Account = ledger.open_account(config, self.id)
        theirs = parent.books if parent else Books((), ())
        self.books: Books = Books(
            (self.account, *theirs.accounts),
            (self.account, *(() if is_onlooker else theirs.retry_accounts)),
        )

        digits = new_token(9)
        self.id_prefix = f"{digits[:8]}-{digits[8:12]}-8{digits[12:15]}-8{digits[15:18]}-"
        self.serials = itertools.count()
        self.partials: dict[str, PartialResultBuffer] = {}
        self._nodes: list[Call] = []
        self._running: dict[int, Call] = {}
        self._blocked = 0
        self._llm_calls = 0
        self._events: list[SafetyEvent] = []

        self._final_stops: dict[str, str] = {}
        self._passing_stops: dict[str, str] = {}
        self.has_refusals = False
        self.abort_reason: str | None = None
        self.stop_snapshot: ContextSnapshot | None = None

        # A chain with a private id, such as a judge's, is never continued.
        self._is_kept = is_named and not is_onlooker
        now = clock.monotonic()
        self._started = ledger.begin(self.id, now) if self._is_kept else now - ledger.carried_s(self.id)
        self._heartbeat = None if note_time is None else Heartbeat(self._used_time, note_time)
        self.deadline: float | None = None
        self.token = CancellationToken()
        self._expiring = threading.RLock()
        """Held by the timer while it stops the chain."""
        self._disarm = self._arm()
        if self._heartbeat is not None:
            self._heartbeat.start()

    # --- its place in the tree --------------------------------------------------------------------

    @property
    def remaining_depth(self) -> int | None:
        """How many levels of children may still be below this chain; None without a ceiling."""
        left: list[int] = []
        levels = 0
        for chain in self.line:
            if chain.config.max_depth is not None:
                left.append(chain.config.max_depth - levels)
            levels += not chain._is_onlooker
        return max(0, min(left)) if left else None

    def _check_depth(self) -> None:
        """Refuse a child that would be too deep; the refusal is recorded and ends nothing."""
        if self.remaining_depth == 0:
            detail = (
                f"a child of the chain {self.id} would be {self.depth + 1} levels deep, and that is "
                f"more than max_depth allows; raise max_depth, or do the work without a child"
            )
            self.tell("depth_exceeded", Decision.HALT, detail)
            raise CallRefused(detail)

    # --- time -------------------------------------------------------------------------------------

    def _arm(self) -> Callable[[], None]:
        """Set the deadline, the timer that keeps it, and the link to the parent's token."""
        self._is_closed = False
        own_s = self.config.timeout_ms / 1000
        deadlines = [self._started + own_s] if own_s else []
        if self.parent is not None and self.parent.deadline is not None:
            deadlines.append(self.parent.deadline)
        self.deadline = min(deadlines, default=None)
        undo: list[Callable[[], object]] = []
        # A child sets a timer of its own for what it inherits, too: its parent may be closed before it.
        if self.deadline is not None:
            remaining = max(0.0, self.deadline - self.clock.monotonic())
            undo.append(call_later(self.clock, remaining, weakly(self.expire)).cancel)
        if self.parent is not None:
            undo.append(self.parent.token.on_cancel(weakly(self._follow)))

        def disarm() -> None:
            while undo:
                undo.pop()()

        weakref.finalize(self, disarm).atexit = False
        return disarm

    def close(self) -> None:
        """Disarm the timers, stop following the parent, and note the time that was used."""
        if self.ledger.is_copy:
            return  # The timers, the journal and the time belong to the process that was forked.
        was_open = not self._is_closed
        self._is_closed = True
        self._disarm()
        # A timer that is stopping the chain finishes first: the journal may be closed next.
        if self._expiring.acquire(timeout=_LAST_WORD_S):
            self._expiring.release()
        if was_open and self._is_kept:
            self.ledger.end(self.id, self.clock.monotonic())
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def keep_time(self) -> None:
        """Set the timers again for a call that is made after `close()`; its deadline holds all the same."""
        if self._is_closed and (self.deadline is not None or self._heartbeat is not None):
            self._disarm = self._arm()
            if self._is_kept:
                self.ledger.reopen(self.id)
            if self._heartbeat is not None:
                self._heartbeat.start()

    def _used_time(self) -> UsedTime:
        return self.ledger.used_time(self.id, self.clock.monotonic())

    def expire(self) -> None:
        """Stop the chain because its time is over."""
        with self._expiring:
            if not self._is_closed:
                self._stop_for_time()

    def _follow(self) -> None:
        """Stop because the parent has."""
        if self.parent is not None:
            token = self.parent.token
            reason = StopReason(token.reason) if token.reason else StopReason.ABORTED
            self.stop(reason, f"the parent chain has stopped: {token.detail}")

    def _stop_for_time(self) -> None:
        self.stop(StopReason.TIMEOUT, f"the chain's time is over: {self.elapsed_ms():.0f} ms have passed")

    def is_stopped(self) -> bool:
        """Whether the chain was aborted or its time is over."""
        if self.token.reason is not None:
            return True
        # The timer may be late, or the clock may be one that fires none.
        if self.deadline is not None and self.clock.monotonic() >= self.deadline:
            for chain in reversed(self.line):
                if chain.deadline is not None and self.clock.monotonic() >= chain.deadline:
                    chain._stop_for_time()
            return True
        return False

    def elapsed_ms(self) -> float:
        """Return how long the chain has been running; a clock that is set back never makes it negative."""
        return max(0.0, (self.clock.monotonic() - self._started) * 1000)

    # --- the journal ------------------------------------------------------------------------------

    def journal_reserved(self, attempt: Attempt) -> None:
        """Write down that an attempt is about to be dispatched; the caller waits until it is durable."""
        call, cost = attempt.call, to_usd(attempt.reserved)
        self._write(Reserved, attempt, kind=call.kind, operation_name=call.operation_name, cost_usd=cost)

    def journal_settled(self, attempt: Attempt, status: Status) -> None:
        """Write down what an attempt has really cost."""
        self._write(Settled, attempt, status=status, cost_usd=to_usd(attempt.settled))

    def journal_retry(self, attempt: Attempt) -> None:
        """Write down that a failed attempt took a unit of the retry budget."""
        self._write(RetryTaken, attempt, lineage=self._retry_lineage)

    def _write(self, make: Callable[..., LedgerEvent], attempt: Attempt | None = None, **fields: Any) -> None:
        """Give the journal an event of this chain, and of one of its attempts."""
        if self.ledger.journal is None or self.ledger.is_copy:
            return
        if attempt is not None:
            fields |= {"reservation_id": attempt.reservation_id, "node_id": attempt.call.node_id}
        lineage: tuple[str, ...] = fields.setdefault("lineage", self.lineage)
        # How long a chain elsewhere has been running is for its own journal to say.
        above_ms = [0.0] * len(self._above_ids) + [chain.elapsed_ms() for chain in self.line[:0:-1]]
        uncounted = len(self.lineage) - len(lineage)
        event = make(
            at=self.clock.now(),
            elapsed_ms=self.elapsed_ms(),
            elapsed_above_ms=tuple(above_ms[uncounted:]),
            **fields,
        )
        self.ledger.journal(event)

    # --- nodes ------------------------------------------------------------------------------------

    def enter(self, call: Call) -> None:
        """Put a call on the list of nodes; hold the lock."""
        call.index = len(self._nodes)
        self._nodes.append(call)
        self._running[call.index] = call
        if call.kind == "llm":
            self._llm_calls += 1

    def leave(self, call: Call) -> None:
        """Take a call that is over off the list of running ones; one that was blocked becomes a node here."""
        if call.index < 0:
            with self.ledger.lock:
                self._blocked += 1
                if self._blocked <= MAX_BLOCKED_NODES:
                    self.enter(call)
        self._running.pop(call.index, None)

    # --- stops and events -------------------------------------------------------------------------

    @property
    def stop_reason(self) -> str | None:
        """Why the chain stopped, or why its last call was refused; hold the lock."""
        return next(iter(self._final_stops), None) or next(iter(self._passing_stops), None)

    def abort(self, reason: str) -> None:
        """Stop the chain, its children and the work in flight."""
        with self.ledger.lock:
            if self.abort_reason is None and self.token.reason is None:
                self.abort_reason = reason
        if self.token.reason is None:
            self.stop(StopReason.ABORTED, reason)

    def stop(self, reason: StopReason, detail: str) -> None:
        """End the chain for good, once per reason; abort and timeout also cancel the work in flight."""
        with self.ledger.lock:
            if reason in self._final_stops:
                return
            if self.stop_snapshot is None:
                self.stop_snapshot = self.snapshot()
            self._final_stops[reason] = detail
            if reason not in self._passing_stops:
                self._events.append(self._event(reason, Decision.HALT, detail))
        if reason in (StopReason.ABORTED, StopReason.TIMEOUT):
            self.token.cancel(reason, detail=detail)
        try:
            self._write(ChainStopped, reason=str(reason), detail=detail)
        except Exception:  # noqa: BLE001 - logged; the stop is for the record, and holds without it
            logger.exception("the journal could not record that the chain %s stopped", self.id)

    def refuse(self, reason: StopReason, detail: str) -> None:
        """Record a refusal that may pass, once until a call goes through again."""
        with self.ledger.lock:
            if reason in self._passing_stops or reason in self._final_stops:
                return
            if self.stop_snapshot is None:
                self.stop_snapshot = self.snapshot()
            self.has_refusals = True
            self._passing_stops[reason] = detail
            self._events.append(self._event(reason, Decision.HALT, detail))

    def forget_refusals(self) -> None:
        """Let refusals be recorded again: a call goes through."""
        with self.ledger.lock:
            self.has_refusals = False
            self._passing_stops.clear()

    def note(self, *events: SafetyEvent) -> None:
        """Add events to the chain's log of them."""
        if events:
            with self.ledger.lock:
                room = MAX_EVENTS - len(self._events)
                self._events.extend(events[: max(0, room)])

    def tell(
        self, event_type: str, decision: Decision, reason: str, hook: str = HOOK, node_id: str | None = None
    ) -> None:
        """Add an event of the containment's own."""
        self.note(self._event(event_type, decision, reason, hook, node_id))

    def _event(
        self, event_type: str, decision: Decision, reason: str, hook: str = HOOK, node_id: str | None = None
    ) -> SafetyEvent:
        return SafetyEvent(
            event_type=str(event_type),
            decision=decision,
            reason=reason,
            hook=hook,
            request_id=self.metadata.request_id,
            ts=self.clock.now(),
            metadata=MappingProxyType({"chain_id": self.id, "node_id": node_id}),
        )

    # --- snapshots --------------------------------------------------------------------------------

    def snapshot(self) -> ContextSnapshot:
        """Return the state of the chain now, at a cost that does not grow with its calls; hold the lock."""
        tally, count = self.account.tally, len(self._nodes)
        stop = self.stop_reason
        return ContextSnapshot(
            chain_id=self.id,
            request_id=self.metadata.request_id,
            step_count=tally.steps,
            cost_usd_accumulated=to_usd(tally.spent),
            retries_used=tally.retries,
            aborted=StopReason.ABORTED in self._final_stops,
            abort_reason=self.abort_reason or stop,
            elapsed_ms=self.elapsed_ms(),
            nodes=Frozen(
                self._nodes,
                Call.record,
                # Copied in one step: calls leave this dict without the lock.
                {index: call.record() for index, call in self._running.copy().items()},
            ),
            events=Frozen(self._events, _unchanged),
            cost_usd_reserved=to_usd(tally.reserved),
            stop_reason=stop,
            graph_summary=GraphSummary(
                node_count=count,
                llm_calls=self._llm_calls,
                tool_calls=count - self._llm_calls,
                running=len(self._running),
                blocked=self._blocked,
            ),
            parent_chain_id=self.parent.id if self.parent else None,
            agent_identity=self.metadata.service or None,
            policy_metadata=MappingProxyType({name: getattr(self.config, name) for name in _CEILINGS}),
        )


def _unchanged(event: SafetyEvent) -> SafetyEvent:
    return event
