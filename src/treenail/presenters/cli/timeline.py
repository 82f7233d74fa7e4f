"""A session's timeline: one line per event that a person would ask about, as the log has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console

from treenail.containment import SafetyEvent
from treenail.conversation.events import BranchSummary, HistoryCompacted, SubagentEvent
from treenail.conversation.messages import InnerMessage
from treenail.judges.events import CompletionChecked, Feedback, JudgeEvent
from treenail.state.events import StateRestored
from treenail.state.session import Session
from treenail.tools.events import HoldAnswered, SessionForked, ToolHeld, ToolInvoked, ToolStarted
from treenail.turns.ledger import CeilingsSet
from treenail.turns.states import PartialText, TurnEnded, TurnResumed, TurnStarted

_WIDTH = 88
_TOLD = ("<completion_check", "<feedback")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a timeline."""

    seq: int
    at: datetime
    kind: str
    text: str
    good: bool = True


def timeline(session: Session) -> Iterator[Line]:
    """Read a session's log and say what happened, in order."""
    for envelope, value in session.events():
        described = _describe(value)
        if described is not None:
            kind, text, good = described
            yield Line(envelope.seq, envelope.at, kind, text, good)
        elif value is None:
            yield Line(envelope.seq, envelope.at, "unknown", f"an event of type {envelope.type}", good=False)


def show_timeline(console: Console, session: Session, indent: str = "") -> None:
    """Print a session's timeline."""
    for line in timeline(session):
        mark = "[green]✓[/]" if line.good else "[red]✗[/]"
        console.print(f"{indent}{line.seq:>4}  {mark} [bold]{line.kind:<8}[/]", end="", highlight=False)
        console.print(line.text, markup=False, highlight=False, soft_wrap=True)


def _describe(value: object) -> tuple[str, str, bool] | None:
    match value:
        case TurnStarted():
            return "turn", f"started: {value.task}", True
        case TurnResumed():
            return "turn", f"resumed on {value.provider}", True
        case TurnEnded():
            why = f" ({value.error_kind}: {_short(value.details)})" if value.error_kind else ""
            return "turn", f"{value.state.value}{why}", value.state.value == "completed"
        case InnerMessage(role="assistant") if value.tool_calls:
            names = ", ".join(each.name for each in value.tool_calls)
            return "model", f"{_short(value.content)} → {names}".strip(), True
        case InnerMessage(role="assistant"):
            return "model", _short(value.content), True
        case InnerMessage(role="user") if value.content.startswith(_TOLD):
            return None  # Said by a judge, whose own line says it.
        case InnerMessage(role="user"):
            return "person", _short(value.content), True
        case ToolStarted():
            return "tool", f"{value.tool_name} began ({value.call_id})", True
        case ToolInvoked():
            verb = "kept" if value.success else f"{value.outcome}, rolled back"
            said = value.rendered_output.removeprefix(f"{value.name} failed: ")
            return "tool", f"{value.name} {verb}: {_short(said)}", value.success
        case ToolHeld():
            return "hold", f"{value.tool_name} waits for a person: {_short(value.reason)}", False
        case HoldAnswered():
            return "hold", "approved" if value.approved else "refused", value.approved
        case CeilingsSet():
            return "limit", f"ceilings: {_ceilings(value)}", True
        case SafetyEvent():
            return "limit", f"{value.event_type}: {_short(value.reason)}", False
        case StateRestored():
            return "state", f"restored ({value.reason})", True
        case CompletionChecked():
            verdict = "may stop" if value.complete else "sent back"
            verdict += "" if value.verified else ", unverified"
            good = value.complete and value.verified
            return "judge", f"{verdict}: {_short(value.feedback or value.checker)}", good
        case Feedback():
            return "judge", f"{value.provider_name}: {_short(value.summary)}", value.severity != "warning"
        case JudgeEvent() if value.outcome in ("failed", "skipped"):
            return "judge", f"{value.judge} {value.outcome}: {_short(value.detail)}", False
        case HistoryCompacted():
            return "model", f"the conversation up to event {value.to_seq} was summarised", True
        case BranchSummary():
            return "fork", _short(value.summary), True
        case SessionForked():
            return "fork", f"from {value.from_session[:8]}, {value.side} {value.call_id}", True
        case SubagentEvent():
            return "child", f"{value.event} {value.subagent_id}: {_short(value.summary or value.task)}", True
        case PartialText():
            return "model", f"cut off after: {_short(value.text)}", False
        case _ if type(value).__name__ == "WorkflowEvent":
            # It is known by its name: what it is made of is loaded only where a store has workflows.
            told = [str(getattr(value, each, "")) for each in ("step_id", "status", "reason")]
            good = told[1] in ("", "checkpoint_ready", "completed")
            return "step", " ".join((str(getattr(value, "kind", "")), *filter(None, told))), good
    return None


def _ceilings(value: CeilingsSet) -> str:
    limits = value.limits
    told = (
        (limits.max_cost_usd, "{:g} USD"),
        (limits.max_steps, "{} steps"),
        (limits.max_retries, "{} retries"),
        (limits.timeout, "{:g} s"),
        (limits.max_depth, "children {} deep"),
    )
    said = ", ".join(text.format(each) for each, text in told if each is not None)
    return f"{said or 'none'}{f', set by {value.by}' if value.by else ''}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"
