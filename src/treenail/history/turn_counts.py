"""What the newest turn of a run came to, in numbers read from its log."""

from __future__ import annotations

from dataclasses import dataclass

from treenail.containment import Reserved, Settled
from treenail.conversation import ProviderUsage
from treenail.state import Session
from treenail.tools import SessionForked, ToolInvoked, boundaries
from treenail.turns import TurnEnded, TurnResumed, TurnStarted, ceilings_of
from treenail.workspace import Filesystem, WorkspaceDiff, changed_lines


@dataclass(frozen=True, slots=True)
class TurnCounts:
    """What a turn changed and used."""

    files: int | None = None
    """How many files its calls that stand have changed; None if that was not looked at."""
    paths: int | None = None
    """The same with directories."""
    added: int = 0
    removed: int = 0
    calls: int = 0
    """How many tool calls have ended in it, one way or another."""
    spent_usd: float | None = None
    """What the whole run has cost; None if the price of a call is unknown."""
    max_cost_usd: float | None = None
    elapsed_s: float = 0.0
    """How long it was at work, without the time between an ending and a resume."""


def turn_counts(session: Session, filesystem: Filesystem | None = None) -> TurnCounts:
    """Count what the newest turn of a session came to; the files, if their workspace is given."""
    began_us = last_us = worked_us = calls = first = 0
    is_known, is_at_work = True, False
    costs: dict[str, float] = {}
    for envelope, value in session.events():
        if isinstance(value, TurnStarted):
            began_us, worked_us, calls, first, is_at_work = envelope.at_us, 0, 0, envelope.seq, True
        elif isinstance(value, TurnResumed):
            worked_us += last_us - began_us if is_at_work else 0
            began_us, is_at_work = envelope.at_us, True
        elif isinstance(value, TurnEnded) and is_at_work:
            worked_us, is_at_work = worked_us + envelope.at_us - began_us, False
        elif isinstance(value, SessionForked):
            first = envelope.seq
        elif isinstance(value, ToolInvoked):
            calls += 1
        elif isinstance(value, ProviderUsage):
            is_known = is_known and value.cost_usd is not None
        elif isinstance(value, Reserved | Settled):
            costs[value.reservation_id] = value.cost_usd
        last_us = envelope.at_us
    if is_at_work:
        worked_us += last_us - began_us
    diff, limits = _diff(session, filesystem, first), ceilings_of(session)
    is_uncounted = limits is None or limits.on_unknown_price == "warn"
    added, removed = changed_lines(diff.text)
    return TurnCounts(
        files=None if filesystem is None else sum(not each.is_directory for each in diff.changes),
        paths=None if filesystem is None else len(diff.changes),
        added=added,
        removed=removed,
        calls=calls,
        spent_usd=sum(costs.values()) if is_known or not is_uncounted else None,
        max_cost_usd=None if limits is None else limits.max_cost_usd,
        elapsed_s=worked_us / 1e6,
    )


def _diff(session: Session, filesystem: Filesystem | None, after: int) -> WorkspaceDiff:
    """Return what the calls after an event have changed in the files, if they still stand.

    The calls before a fork were made in another workspace, and stand there.
    """
    stand = [each for each in boundaries(session) if each.seq_after > after and each.stands]
    if filesystem is None or not stand or stand[0].before is None:
        return WorkspaceDiff((), "")
    return filesystem.diff(stand[0].before, stand[-1].after)
