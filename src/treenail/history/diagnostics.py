"""Diagnostics: is a session's log sound, how did its turns end, and what can a person do about it?

`diagnose` reads the log once, up to its end or to the damage, into the same projection that screens draw, and
runs the checks of `treenail.history.checks` on it. It changes nothing and takes no lease. Damage is a report,
never a traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from treenail.errors import LogError, TreenailError
from treenail.history.checks import (
    CHECKS,
    MAX_FINDINGS,
    CheckResult,
    CheckRule,
    CheckStatus,
    Finding,
    LogFacts,
)
from treenail.history.projection import Projection
from treenail.state import Session
from treenail.tools import ToolInvoked
from treenail.turns import TurnDerivation, pasteable

ReportStatus = Literal["ready", "ready_with_warnings", "blocked"]
"""Whether a session can be continued: at once, with something to look at, or only after a decision."""

NOTHING = "nothing_to_check"
"""The classification of a check for which the log had nothing to check."""

_STATUSES: Mapping[CheckStatus, ReportStatus] = {
    "passed": "ready",
    "warning": "ready_with_warnings",
    "failed": "blocked",
}
_RANKS: tuple[CheckStatus, ...] = ("failed", "warning", "passed")


@dataclass(frozen=True, slots=True)
class DiagnosticsReport:
    """The results of all checks of a session, and what to do next."""

    session_id: str
    status: ReportStatus
    checks: tuple[CheckResult, ...]
    events: Mapping[str, object]
    replay: Mapping[str, object]
    turns: tuple[Mapping[str, object], ...]
    tree: Mapping[str, object]
    workflows: tuple[Mapping[str, object], ...]
    usage: Mapping[str, object]
    next_actions: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing blocks the session."""
        return self.status != "blocked"

    def check(self, check_id: str) -> CheckResult:
        """Return one check by its id. Raises `KeyError` if there is none."""
        return {each.id: each for each in self.checks}[check_id]

    def to_data(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return {"ok": self.ok, **asdict(self), "checks": [each.to_data() for each in self.checks]}

    def render(self) -> str:
        """Write the report for a person."""
        marks = {"passed": "ok  ", "warning": "look", "failed": "BAD "}
        lines = [f"session {self.session_id}: {self.status.replace('_', ' ')}"]
        for each in self.checks:
            if each.classification == NOTHING:
                continue
            lines.append(f"  {marks[each.status]} {each.id}: {each.message}")
            if each.status != "passed":
                for finding in each.findings:
                    where = "" if finding.seq is None else f"event {finding.seq}: "
                    lines.append(f"         {where}{finding.message}")
        skipped = [each.id for each in self.checks if each.classification == NOTHING]
        if skipped:
            lines.append(f"  nothing to check: {', '.join(skipped)}")
        if self.next_actions:
            lines += ["next:", *(f"  {each}" for each in self.next_actions)]
        return "\n".join(lines)


def diagnose(session: Session) -> DiagnosticsReport:
    """Check a session's log, and report what is wrong and what to do. It changes nothing."""
    return report_on(read_facts(session))


def read_facts(session: Session) -> LogFacts:
    """Read a session's log once, up to its end or to the damage."""
    log, session_id = session.log, session.session_id
    facts = LogFacts(str(session_id), log, now=session.clock.now(), projection=Projection(store=log))
    try:
        upto: int | None = session.head
        facts.damage = session.report.damage
    except TreenailError:
        upto = None  # It cannot be folded; its events are read as far as possible.
    try:
        for envelope, value in session.events(upto=upto):
            facts.add(envelope, value)
    except LogError as error:
        facts.damage = str(error)
    try:
        facts.stored = log.check(session_id)
        facts.info = log.info(session_id)
        facts.children = tuple(log.sessions(parent_id=session_id))
        if facts.info.parent_id is not None:
            facts.has_parent = any(each.session_id == facts.info.parent_id for each in log.sessions())
    except LogError as error:
        facts.damage = facts.damage or str(error)
    return facts


_FOR_DAMAGED = tuple(f"treenail {each}" for each in ("salvage", "export", "show", "diagnose", "list"))
"""The commands that accept a damaged log; the others write it or need all of it, and refuse."""


def _result(rule: CheckRule, facts: LogFacts) -> CheckResult:
    result = rule.check(facts)
    if result is None:
        return CheckResult("passed", NOTHING, f"there are no {rule.subject} in this log", id=rule.id)
    listed = result.findings
    if len(listed) > MAX_FINDINGS:
        listed = (*listed[:MAX_FINDINGS], Finding(f"and {len(listed) - MAX_FINDINGS} more"))
    possible = [
        each
        for each in dict.fromkeys(result.next_actions)
        if not facts.is_damaged or not each.startswith("treenail ") or each.startswith(_FOR_DAMAGED)
    ]
    return replace(result, id=rule.id, findings=listed, next_actions=pasteable(possible, facts.store))


def report_on(facts: LogFacts) -> DiagnosticsReport:
    """Run every check."""
    checks = tuple(_result(each, facts) for each in CHECKS.values())
    ordered = sorted(checks, key=lambda each: _RANKS.index(each.status))
    view = facts.projection.view()
    replayed = facts.replayer.input()
    return DiagnosticsReport(
        session_id=facts.session_id,
        status=_STATUSES[ordered[0].status],
        checks=checks,
        events={
            "count": facts.count,
            "first": facts.first,
            "last": facts.last or None,
            "types": dict(sorted(facts.types.items())),
        },
        replay={
            "items": len(replayed.items),
            "left_out": len(replayed.left_out),
            "synthetic": list(replayed.synthetic),
            "breaks": list(replayed.breaks),
            "prefix_hash": replayed.prefix_hash(),
        },
        turns=tuple(_turn_data(each.derive()) for each in facts.turns),
        tree={
            "parent": None
            if facts.info is None or facts.info.parent_id is None
            else str(facts.info.parent_id),
            "children": [{"session_id": str(e.session_id), "events": e.head} for e in facts.children],
            "subagents": [
                {
                    "subagent_id": each.subagent_id,
                    "child_session_id": each.child_session_id,
                    "agent": each.agent,
                    "status": each.status,
                }
                for each in view.subagents
            ],
        },
        workflows=tuple(
            {
                "workflow_id": name,
                "status": events[-1][1].state or "unfinished",
                "events": [each.kind for _, each in events],
            }
            for name, events in facts.workflows.items()
        ),
        usage={**asdict(view.usage), "tool_calls": len(facts.of(ToolInvoked))},
        next_actions=tuple(dict.fromkeys(action for each in ordered for action in each.next_actions)),
    )


def _turn_data(turn: TurnDerivation) -> dict[str, object]:
    return {
        "turn_id": turn.turn_id,
        "state": turn.state.value,
        "claimed": None if turn.claimed is None else turn.claimed.value,
        "error_kind": None if turn.ended is None else turn.ended.error_kind,
        "evidence": {name: list(seqs) for name, seqs in turn.evidence.items()},
        "missing": list(turn.missing),
    }
