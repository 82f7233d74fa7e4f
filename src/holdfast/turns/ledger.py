"""The containment of a run, with its ledger in the session's log.

Every reservation is durable before its call is dispatched and every settlement when it is
known, so that a process that takes over knows what was spent: also by a call that was
dispatched and never heard of again, which counts in full.
"""

from __future__ import annotations

from holdfast.containment import (
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
)
from holdfast.log.event import SlicePolicy
from holdfast.state.events import event
from holdfast.state.session import Session

LEDGER_EVENTS: tuple[type[LedgerEvent], ...] = (Reserved, Settled, RetryTaken, ChainStopped)
"""What the ledger writes into a log. It is history: neither a rollback nor a prune gives money back."""

for _kind in LEDGER_EVENTS:
    event(name=f"holdfast.{_kind.__name__}", policy=SlicePolicy.LOG, outlives_prune=True)(_kind)
event(name="holdfast.SafetyEvent", policy=SlicePolicy.LOG)(SafetyEvent)


def ledger_of(session: Session) -> list[LedgerEvent]:
    """Return what a session's log says about reservations and settlements. Their order does not matter."""
    return [each for kind in LEDGER_EVENTS for each in session.select_all(kind)]


def contain(
    session: Session,
    limits: ExecutionConfig | Limits,
    *,
    pipeline: ShieldPipeline | None = None,
    circuit_breaker: CircuitBreaker | CircuitBreakers | None = None,
    prices: PriceTable | None = None,
    loops: LoopPolicy | None = None,
) -> ExecutionContext:
    """Put a session's work under ceilings, going on from what its log says was spent."""
    metadata = ChainMetadata(request_id=str(session.session_id), chain_id=str(session.session_id))
    return ExecutionContext.resume(
        limits,
        ledger_of(session),
        pipeline,
        metadata,
        circuit_breaker=circuit_breaker,
        clock=session.clock,
        prices=prices,
        journal=session.dispatch,
        loops=loops,
    )
