"""The containment of a run, with its ledger in the session's log.

Every reservation is durable before its call is dispatched, and every settlement as soon as it is known. So a
process that takes over knows what was spent; a call that was dispatched and has no settlement counts in full.

One run has one ledger, in the log of the session at its root. A child that is spawned from the run's
containment (a nested evaluation, a subagent, a workflow's step) books there, whatever session its own
conversation is in: after a kill of everything, the root alone knows what all of them had reserved, without
opening their logs. Only a child in another process keeps its ledger in its own log; its events name the
chains above it, and its parent reads them when it is opened again (`contain(..., above=...)` there,
`contain(..., also=...)` here).

The time that a run has used is also in the session's note (`Log.put_note`), which a heartbeat replaces while
the run is under way: so a kill gives no time back, and no event tells of each tick.

The ceilings are in the log as well: a turn that begins or resumes under new ones records them
(`CeilingsSet`). A turn that names none keeps the newest ones, so that ceilings outlive their process.
"""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from treenail.containment import (
    BudgetBackend,
    ChainMetadata,
    ChainStopped,
    CircuitBreaker,
    CircuitBreakers,
    ExecutionConfig,
    ExecutionContext,
    LedgerEvent,
    Limits,
    LoopPolicy,
    PriceTable,
    Reserved,
    RetryTaken,
    SafetyEvent,
    Settled,
    ShieldPipeline,
    UsedTime,
)
from treenail.errors import LogError
from treenail.log import SlicePolicy
from treenail.state import Session, event

LEDGER_EVENTS: tuple[type[LedgerEvent], ...] = (Reserved, Settled, RetryTaken, ChainStopped)
"""What the ledger writes into a log. It is history: neither a rollback nor a prune gives money back."""

for _kind in LEDGER_EVENTS:
    event(name=f"treenail.{_kind.__name__}", policy=SlicePolicy.LOG, outlives_prune=True)(_kind)
event(name="treenail.SafetyEvent", policy=SlicePolicy.LOG)(SafetyEvent)


@event(name="treenail.CeilingsSet", policy=SlicePolicy.LOG, outlives_prune=True)
@dataclass(frozen=True, slots=True)
class CeilingsSet:
    """What a run and its children may use up from here on; the newest one counts."""

    limits: Limits
    by: str = ""
    """Who set them: a user and a machine. When is the event's own time."""


def ceilings_of(session: Session) -> Limits | None:
    """Return the newest ceilings of a session; None if it never had any.

    A pot of money that is shared with other chains is not among them: it lives in a process.
    """
    newest = session[CeilingsSet].latest()
    return None if newest is None else newest.limits


def newly_set(session: Session, containment: ExecutionContext | None) -> tuple[CeilingsSet, ...]:
    """Return the ceilings that the session's log does not have yet: nothing, if they are unchanged.

    The ceilings of a child chain are recorded by the session at its root.
    """
    if containment is None or containment.chain_id != str(session.session_id):
        return ()
    config = containment.config
    limits = Limits(
        max_cost_usd=config.max_cost_usd,
        max_steps=config.max_steps,
        max_retries=config.max_retries_total,
        timeout=config.timeout_ms / 1000 or None,
        on_unknown_price=config.on_unknown_price,
        max_depth=config.max_depth,
    )
    return () if limits == ceilings_of(session) else (CeilingsSet(limits, _who()),)


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return socket.gethostname()  # A user without a name, as in some containers.


def ledger_of(session: Session) -> list[LedgerEvent]:
    """Return the ledger events of a session's log. Their order does not matter."""
    return [each for kind in LEDGER_EVENTS for each in session.select_all(kind)]


def spent_usd_of(session: Session) -> float | None:
    """Return what the run of a session has cost by its ledger, children included; None if it has no ledger.

    A call that was reserved and not settled counts in full.
    """
    reserved = session.select_all(Reserved)
    if not reserved:
        return None
    costs = {each.reservation_id: each.cost_usd for each in reserved}
    costs |= {each.reservation_id: each.cost_usd for each in session.select_all(Settled)}
    return sum(costs.values())


def used_time_of(session: Session) -> UsedTime | None:
    """Return the time that the run of a session had used when it was last noted; None if it never was."""
    note = session.log.note(session.session_id)
    if note is None:
        return None
    try:
        data = json.loads(note.payload)
        return UsedTime(str(session.session_id), dict(data["running"]), dict(data["ended"]))
    except (ValueError, KeyError, TypeError) as error:
        raise LogError(
            f"the note of session {session.session_id} does not say how much time was used ({error}); "
            f"open it with the Treenail that wrote it"
        ) from error


def contain(
    session: Session,
    limits: ExecutionConfig | Limits,
    *,
    pipeline: ShieldPipeline | None = None,
    circuit_breaker: CircuitBreaker | CircuitBreakers | None = None,
    prices: PriceTable | None = None,
    loops: LoopPolicy | None = None,
    above: Sequence[str] = (),
    also: Iterable[LedgerEvent] = (),
    pots: Sequence[tuple[BudgetBackend, float]] = (),
) -> ExecutionContext:
    """Put a session's work under ceilings, starting from what its log says was spent.

    `above` are the ids of the sessions, from the root down, that this one is a child of in another
    process. `also` is what children in other processes have spent: `ledger_of` their sessions. What is
    given twice counts once. `pots` are shared with other runs, each with its ceiling in USD.
    """
    if pots:
        config = limits.to_config() if isinstance(limits, Limits) else limits
        limits = replace(config, pots=(*config.pots, *pots))
    metadata = ChainMetadata(request_id=str(session.session_id), chain_id=str(session.session_id))
    used = used_time_of(session)

    def note_time(used: UsedTime) -> None:
        data = {"running": dict(used.running), "ended": dict(used.ended)}
        session.note(json.dumps(data, separators=(",", ":")).encode())

    return ExecutionContext.resume(
        limits,
        [*ledger_of(session), *also, *(() if used is None else (used,))],
        pipeline=pipeline,
        metadata=metadata,
        circuit_breaker=circuit_breaker,
        clock=session.clock,
        prices=prices,
        journal=session.dispatch,
        loops=loops,
        above=above,
        note_time=note_time,
    )
