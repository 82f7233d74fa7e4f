"""Branch summaries: what a fork is told about the branch that it left."""

from __future__ import annotations

from treenail.conversation.compaction import all_events, plan_compaction, shortened
from treenail.conversation.events import BranchSummary
from treenail.state import Session

MAX_BRANCH_CHARS = 4_000
"""How long the summary of a branch is at most."""


def branch_summary(session: Session, after: int) -> BranchSummary | None:
    """Summarise what a session did after an event; None if it did nothing that the model saw.

    The summary is deterministic and bounded. `fork_at(..., tell=branch_summary)` records it in the fork.
    """
    plan = plan_compaction(
        ((seq, event, name) for seq, event, name in all_events(session) if seq > after), keep_tail=0
    )
    if plan is None:
        return None
    text = plan.summary(MAX_BRANCH_CHARS).split("\n\n", 1)
    told = "Another branch of this conversation continued from here. It is not yours: its files are not here."
    return BranchSummary(
        summary=shortened(f"{told}\n\n{text[-1]}", MAX_BRANCH_CHARS),
        from_session=str(session.session_id),
        from_seq=after + 1,
        to_seq=session.head,
        limitations=plan.limitations,
    )
