"""Forks of a conversation: the new session is told what was tried in the branch that it leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from holdfast.conversation.compaction import all_events, plan_compaction, shortened
from holdfast.conversation.events import BranchSummary
from holdfast.state.execution import ExecutionState
from holdfast.state.resources import ResourceRegistry
from holdfast.state.session import Session
from holdfast.tools.boundaries import fork_at

MAX_BRANCH_CHARS = 4_000
"""How long the summary of a branch is at most."""


def fork_conversation(
    state: ExecutionState,
    call_id: str,
    *,
    side: Literal["before", "after"] = "before",
    workspace: Path | None = None,
    resources: ResourceRegistry | None = None,
    summarise: bool = True,
) -> ExecutionState:
    """Make a new session that continues from a boundary of a call; see `fork_at`.

    The model that goes on is told what the old session did after that point, so that it does not repeat
    what failed. Without `summarise` it knows nothing of it: another try that is not led by the first.
    """
    forked = fork_at(state, call_id, side=side, workspace=workspace, resources=resources)
    if summarise:
        summary = branch_summary(state.session, int(forked.session.tags["forked_at"]))
        if summary is not None:
            forked.session.dispatch(summary)
    return forked


def branch_summary(session: Session, after: int) -> BranchSummary | None:
    """Summarise what a session did after an event; None if it did nothing that the model saw."""
    plan = plan_compaction(
        ((seq, event, name) for seq, event, name in all_events(session) if seq > after), keep_tail=0
    )
    if plan is None:
        return None
    text = plan.summary(MAX_BRANCH_CHARS).split("\n\n", 1)
    told = "Another branch of this conversation went on from here. It is not yours: its files are not here."
    return BranchSummary(
        summary=shortened(f"{told}\n\n{text[-1]}", MAX_BRANCH_CHARS),
        from_session=str(session.session_id),
        from_seq=after + 1,
        to_seq=session.head,
        limitations=plan.limitations,
    )
