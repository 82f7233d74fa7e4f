"""A run with its child runs: for each one a summary and a view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from treenail.history.projection import Projection
from treenail.history.summary import RunSummary, damage_text, summarize
from treenail.history.view import RunView
from treenail.log import Log
from treenail.state import Session

MAX_DEPTH = 8
"""How deep a tree of child sessions is read."""


@dataclass(frozen=True, slots=True)
class RunTree:
    """A run and its children."""

    summary: RunSummary
    view: RunView
    damage: str
    """What is wrong with its log; empty if it is complete."""
    children: tuple[RunTree, ...] = ()

    @property
    def damaged(self) -> int:
        """How many of these runs are damaged."""
        return bool(self.damage) + sum(each.damaged for each in self.children)

    def to_data(self) -> dict[str, Any]:
        """Return the tree as plain values for JSON."""
        children = [each.to_data() for each in self.children]
        return {
            **self.view.to_data(),
            **self.summary.to_data(),
            "damage": self.damage or None,
            "children": children,
        }


def read_tree(log: Log, run_id: UUID, *, depth: int = MAX_DEPTH) -> RunTree:
    """Read a run and its children, as far as they are readable."""
    summary = summarize(log, log.info(run_id))
    with Session.open(log, run_id, read_only=True) as session:
        view = Projection().catch_up(session).view()
    damage = damage_text(view.damage or "") or (summary.reason if summary.is_damaged else "")
    infos = log.sessions(parent_id=run_id) if depth > 0 else ()
    children = tuple(read_tree(log, each.session_id, depth=depth - 1) for each in infos)
    return RunTree(summary, view, damage, children)
