"""One line about a run: its state, derived from its log, and its task."""

from __future__ import annotations

from dataclasses import dataclass, replace

from treenail.conversation import ProviderUsage, enable_inner_message_recording
from treenail.errors import LogDamagedError, LogError, SnapshotRestoreError, UsageError
from treenail.log import Log, SessionInfo
from treenail.state import AttentionNeeded, AttentionResolved, Session, Slice, entry_at
from treenail.tools import ToolInvoked, pending_holds
from treenail.turns import (
    LoopAttached,
    RunCancelled,
    RunRefused,
    ceilings_of,
    is_waiting,
    newest_turn,
    spent_usd_of,
    stopped_before_turn,
    submission_of,
    used_time_of,
)

DAMAGED = "damaged"
"""The state of a run whose log cannot be read completely."""

FOREIGN = "foreign"
"""The state of a run of another program's loop, if nothing has it open: how it ended, that program knows."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line about a run."""

    info: SessionInfo
    state: str
    """The derived state of its newest turn or of its workflow; `running`, `empty`, `foreign` or `damaged`;
    `submitted` while it waits for a worker, `cancelled` if it was cancelled then."""
    task: str = ""
    reason: str = ""
    """Why it ended so; for a damaged log, what is wrong with it."""
    input_tokens: int = 0
    output_tokens: int = 0
    """What its own model calls have read and written; children have lines of their own."""
    cost_usd: float | None = None
    """What it has cost, children included; None if that is not known."""
    elapsed_s: float | None = None
    """How long it has been working; None if that is not known."""
    max_cost_usd: float | None = None
    """What it may cost; None without a ceiling."""
    calls: int = 0
    """How many tool calls have ended in it, one way or another."""
    waiting: int = 0
    """How many of its calls wait for a person."""
    needs_attention: bool = False
    """Whether something went wrong that a person has to fix by hand."""

    @property
    def needs_person(self) -> bool:
        """Whether it does not continue without a person."""
        return bool(self.waiting or self.needs_attention or self.state == "held" or self.is_damaged)

    @property
    def is_damaged(self) -> bool:
        """Whether its log cannot be read completely, so that its state is unknown."""
        return self.state == DAMAGED

    @property
    def agent(self) -> str:
        """The agent that worked in it, or the judge that examined its parent."""
        tags = dict(self.info.tags)
        return tags.get("agent") or (f"judge {tags['nested']}" if "nested" in tags else "")

    def to_data(self) -> dict[str, object]:
        """Return it as plain values for JSON."""
        return {
            "run": str(self.info.session_id),
            "id": str(self.info.session_id),
            "created_at": self.info.created_at.isoformat(),
            "agent": self.agent,
            "state": self.state,
            "reason": self.reason,
            "task": self.task,
            "events": self.info.head,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "cost_usd": self.cost_usd,
            "elapsed_s": self.elapsed_s,
            "max_cost_usd": self.max_cost_usd,
            "calls": self.calls,
            "waiting": self.waiting,
            "needs_attention": self.needs_attention,
            "tags": dict(self.info.tags),
            "parent": None if self.info.parent_id is None else str(self.info.parent_id),
            "writer": self.info.owner,
        }


def summarize(log: Log, info: SessionInfo) -> RunSummary:
    """Derive the state of a run from its log. A damaged log is a state, not an error."""
    try:
        with Session.open(log, info.session_id, read_only=True) as session:
            enable_inner_message_recording(session)
            made = _workflow(info, session) if is_workflow(info) else _turns(info, session)
            made = _measured(made, session)
            damage = session.report.damage
            return made if damage is None else RunSummary(info, DAMAGED, made.task, damage_text(damage))
    except (LogDamagedError, SnapshotRestoreError) as error:
        return RunSummary(info, DAMAGED, reason=damage_text(str(error)))


def _measured(summary: RunSummary, session: Session) -> RunSummary:
    """Add what a run has used."""
    calls = session[ProviderUsage].all()
    reported = [each.cost_usd for each in calls if each.cost_usd is not None]
    booked = spent_usd_of(session)
    # Under a ceiling without a known price, the ledger has nothing to book.
    is_known = booked is not None and (not calls or bool(reported) or booked > 0)
    own_usd = sum(reported) if reported else None
    ceilings = ceilings_of(session)
    return replace(
        summary,
        input_tokens=sum(each.usage.input_tokens or 0 for each in calls),
        output_tokens=sum(each.usage.output_tokens or 0 for each in calls),
        cost_usd=booked if is_known else own_usd,
        elapsed_s=_elapsed_s(summary.info, session),
        max_cost_usd=None if ceilings is None else ceilings.max_cost_usd,
        calls=len(session[ToolInvoked]),
        waiting=len(pending_holds(session)),
        needs_attention=_needs_attention(session),
    )


def _needs_attention(session: Session) -> bool:
    """Say whether a problem was recorded that nobody has marked as fixed."""

    def newest(kind: type) -> int:
        known: Slice[object] = session[kind].view()
        return abs(entry_at(known, -1)[1]) if len(known) else 0

    return newest(AttentionNeeded) > newest(AttentionResolved)


def _elapsed_s(info: SessionInfo, session: Session) -> float | None:
    """Return how long a run has been working, or, if that was not noted, from its first event to its last."""
    try:
        noted = used_time_of(session)
    except LogError:
        noted = None
    if noted is not None:
        ran_ms = {**noted.ended, **noted.running}.get(noted.root)
        if ran_ms is not None:
            return round(ran_ms / 1000, 3)
    newest = next(iter(session.log.read(info.session_id, after=info.head - 1, upto=info.head)), None)
    return None if newest is None else round((newest.at - info.created_at).total_seconds(), 3)


def _turns(info: SessionInfo, session: Session) -> RunSummary:
    newest, submitted = newest_turn(session), submission_of(session)
    stopped = stopped_before_turn(session)
    if submitted is not None and (stopped is not None or is_waiting(session)):
        task = submitted.task or ("" if newest is None or newest.started is None else newest.started.task)
        match stopped:
            case RunRefused(reason):
                return RunSummary(info, "failed", task, reason)
            case RunCancelled(by):
                return RunSummary(info, "cancelled", task, f"by {by}" if by else "")
        return RunSummary(info, "submitted" if info.owner is None else "running", task)
    if newest is None or newest.started is None:
        state = FOREIGN if len(session[LoopAttached].view()) else "empty"
        return RunSummary(info, "running" if state == FOREIGN and info.owner is not None else state)
    state = newest.state.value
    if state == "unfinished" and info.owner is not None:
        state = "running"
    reason = "" if newest.ended is None else newest.ended.error_kind or ""
    return RunSummary(info, state, newest.started.task, reason)


def _workflow(info: SessionInfo, session: Session) -> RunSummary:
    # Most runs are not workflows, and `treenail list` must start quickly.
    from treenail.workflows import record_of

    try:
        record = record_of(session)
    except UsageError:
        return RunSummary(info, "empty", dict(info.tags)["workflow"])
    state = record.state.value
    if state == "running" and info.owner is None:
        state = "unfinished"
    return RunSummary(info, state, record.spec.title, record.interrupted)


def is_workflow(info: SessionInfo) -> bool:
    """Return whether a session belongs to a workflow."""
    return "workflow" in dict(info.tags)


_ADVICE = ("; nothing was changed or deleted", ", and nothing was deleted", "; nothing was deleted")


def damage_text(damage: str) -> str:
    """Return a description of damage without the library's advice: a presenter gives its own."""
    for each in _ADVICE:
        damage = damage.partition(each)[0]
    return damage
