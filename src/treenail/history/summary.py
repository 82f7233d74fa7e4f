"""One line about a run: its state, derived from its log, and its task."""

from __future__ import annotations

from dataclasses import dataclass

from treenail.conversation import enable_inner_message_recording
from treenail.errors import LogDamagedError, SnapshotRestoreError, UsageError
from treenail.log import Log, SessionInfo
from treenail.state import Session
from treenail.turns import newest_turn

DAMAGED = "damaged"
"""The state of a run whose log cannot be read completely."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line about a run."""

    info: SessionInfo
    state: str
    """The derived state of its newest turn or of its workflow; `running`, `empty` or `damaged`."""
    task: str = ""
    reason: str = ""
    """Why it ended so; for a damaged log, what is wrong with it."""

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
            "id": str(self.info.session_id),
            "created_at": self.info.created_at.isoformat(),
            "agent": self.agent,
            "state": self.state,
            "reason": self.reason,
            "task": self.task,
            "events": self.info.head,
            "parent": None if self.info.parent_id is None else str(self.info.parent_id),
            "writer": self.info.owner,
        }


def summarize(log: Log, info: SessionInfo) -> RunSummary:
    """Derive the state of a run from its log. A damaged log is a state, not an error."""
    try:
        with Session.open(log, info.session_id, read_only=True) as session:
            enable_inner_message_recording(session)
            made = _workflow(info, session) if is_workflow(info) else _turns(info, session)
            damage = session.report.damage
            return made if damage is None else RunSummary(info, DAMAGED, made.task, damage_text(damage))
    except (LogDamagedError, SnapshotRestoreError) as error:
        return RunSummary(info, DAMAGED, reason=damage_text(str(error)))


def _turns(info: SessionInfo, session: Session) -> RunSummary:
    newest = newest_turn(session)
    if newest is None or newest.started is None:
        return RunSummary(info, "empty")
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
