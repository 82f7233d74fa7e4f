"""A view in words: one line for each item, and for each live event that a person wants to see."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from treenail.conversation import ContextPressure
from treenail.history.view import Item, ItemKind, RunView, TurnView
from treenail.printable import printable_line
from treenail.turns import FeedbackGiven, Lagged, ToolCallBegan, ToolCallFinished

WIDTH = 100
"""How long the text of a line may be."""

_JUDGE_TAGS = re.compile(r"</?(completion_check|feedback)\b[^>]*>?")
"""The tags around a judge's words, which are there for the model."""

_LABELS: dict[ItemKind, str] = {
    "user": "person",
    "notice": "note",
    "text": "model",
    "feedback": "judge",
    "check": "judge",
    "compaction": "model",
    "branch": "fork",
    "subagent": "child",
    "workflow": "step",
    "ceilings": "limit",
    "restored": "state",
    "undo": "person",
    "ending": "turn",
}


@dataclass(frozen=True, slots=True)
class TextLine:
    """One line of a view."""

    label: str
    text: str
    seq: int | None = None
    is_good: bool = True


def lines(view: RunView) -> Iterator[TextLine]:
    """Write a view, without its children, line by line; whatever a line holds, it only prints."""
    for each in _lines(view):
        yield replace(each, text=printable_line(each.text))


def _lines(view: RunView) -> Iterator[TextLine]:
    for turn in view.turns:
        yield from _turn_lines(turn, is_last=turn is view.turns[-1])
    if view.live is not None:
        detail = f" ({view.live.detail})" if view.live.detail else ""
        yield TextLine("now", f"{view.live.status or 'at work'}{detail}")
        for call in view.live.running:
            yield TextLine("now", f"{call.name} is running ({call.call_id})")
        if view.live.text:
            yield TextLine("now", f"writing: {short(view.live.text)}")
    if view.damage is not None:
        yield TextLine("damage", view.damage, is_good=False)


def _turn_lines(turn: TurnView, *, is_last: bool) -> Iterator[TextLine]:
    if turn.seq is not None:
        yield TextLine("turn", f"started: {short(turn.task)}", turn.seq)
    for each in turn.items:
        if each.kind == "model" or (each.kind == "notice" and _JUDGE_TAGS.match(each.text)):
            continue  # What it said, or the judge's own item, has a line.
        yield TextLine(_LABELS.get(each.kind, each.kind), item_text(each), each.seq, each.is_good)
        if each.kind == "attention":
            yield from (TextLine("next", action) for action in each.next_actions)
    if turn.missing_evidence:
        missing = ", ".join(turn.missing_evidence)
        yield TextLine("turn", f"{turn.state.value}; the log lacks evidence: {missing}", is_good=False)
    if turn.usage.model_calls:
        cost = "" if turn.usage.cost_usd is None else f", ${turn.usage.cost_usd:.4f}"
        tokens = turn.usage.input_tokens + turn.usage.output_tokens
        yield TextLine("used", f"{counted(turn.usage.model_calls, 'model call')}, {tokens} tokens{cost}")
    if is_last:
        yield from (TextLine("next", action) for action in turn.next_actions)


def item_text(item: Item) -> str:
    """Write what one item says. A text that is not a clean answer is marked as such."""
    text = short(item.text)
    match item.kind:
        case "draft":
            return f"not final: {text}"
        case "partial":
            return f"not an answer{', cut off' if item.status == 'cut_off' else ''}: {text}"
        case "tool":
            return _joined(f"{item.title} {_outcome(item)}", text.removeprefix(f"{item.title} failed: "))
        case "hold" if item.status == "waiting":
            return f"{item.title} waits for a person: {text}"
        case "hold":
            return f"{item.title} {item.status}"
        case "check":
            verdict = "may stop" if item.status.startswith("complete") else "sent back"
            unverified = ", unverified" if item.status.endswith("unverified") else ""
            return f"{verdict}{unverified}: {text or item.title}"
        case "ceilings":
            return f"ceilings: {text}{f', set by {item.title}' if item.title else ''}"
        case "compaction":
            return f"the conversation so far was summarised: {text}"
        case "restored":
            return f"restored ({text})"
        case "undo" if item.status == "redo":
            return f"took the undo back, {item.title}; these calls stand again: {text}"
        case "undo":
            return f"undid, {item.title}: {text}"
        case "ending":
            return f"{item.status} ({_joined(item.title, text)})" if item.title else item.status
        case "attention":
            return (
                f"fixed by {item.title or 'a person'}: {text}" if item.status else f"needs a person: {text}"
            )
        case "unknown":
            return f"an event of type {item.title}, which cannot be read here"
    return _joined(f"{item.title} {item.status}".strip(), text)


def _outcome(item: Item) -> str:
    if item.status in ("kept", "pending", "running", "withdrawn"):
        return item.status
    if item.status == "undone":
        return f"undone {item.undone}"
    if item.status in ("answered", "cut_off"):
        return f"{item.status.replace('_', ' ')}, without a record of its end"
    return (
        "has a result that no call asked for" if item.status == "unmatched" else f"{item.status}, rolled back"
    )


def _joined(head: str, text: str) -> str:
    return f"{head}: {text}" if head and text else head or text


def render_text(view: RunView) -> str:
    """Write a view as plain text; whatever is not good is marked with `!!`."""
    return "\n".join(
        f"{each.seq or '':>5} {'  ' if each.is_good else '!!'} {each.label:<9} {each.text}"
        for each in lines(view)
    )


def live_text(seen: object) -> str | None:
    """Write a live event as a line; None if it is not a line of its own."""
    match seen:
        case ToolCallBegan():
            return short(f"● {seen.name} {about_call(seen.arguments)}", 200)
        case ToolCallFinished():
            good = seen.success and not seen.exit_code
            said = short(seen.summary, 160) if good else short(seen.tail or seen.summary, 240)
            how = end_of_call(seen)
            head = " ".join(("✓" if good else mark_of(seen), seen.name, how)).rstrip()
            return f"  {head}: {said}" if said else f"  {head}"
        case FeedbackGiven():
            return f"  ⚖ {seen.severity}: {short(_JUDGE_TAGS.sub(' ', seen.summary), 240)}"
        case ContextPressure(tier="warning" | "critical"):
            return f"  ! the conversation fills {seen.ratio:.0%} of the model's context"
        case Lagged():
            return f"  … {counted(seen.count, 'update')} skipped here; the log has them"
    return None


_SUBJECTS = ("command", "path", "target", "pattern", "url", "query", "question")
"""The arguments that say what a call is about, as tools commonly name them."""


def about_call(arguments: str) -> str:
    """Say in a line what a call is about: its command, its path; of another tool all of its arguments."""
    try:
        fields = json.loads(arguments or "{}")
    except ValueError:
        return printable_line(" ".join(arguments.split()))
    if not isinstance(fields, dict):
        return printable_line(str(fields))
    known = [str(fields[name]) for name in _SUBJECTS if isinstance(fields.get(name), str)]
    if known:
        if "target" in fields and "path" in fields:
            return printable_line(f"{fields['path']} to {fields['target']}")
        if "pattern" in fields and "path" in fields and fields["path"] != ".":
            return printable_line(f"{fields['pattern']} in {fields['path']}")
        first = known[-1] if "pattern" in fields else known[0]
        return printable_line(" ".join(first.split()) if "command" in fields else first)
    return printable_line(", ".join(f"{name}: {_value(each)}" for name, each in fields.items()))


def _value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return short(text, 60)


def mark_of(ended: ToolCallFinished) -> str:
    """Return the sign before an ended call: good, bad, or waiting."""
    if ended.outcome == "held":
        return "○"
    return "●" if ended.success and not ended.exit_code else "✗"


def end_of_call(ended: ToolCallFinished) -> str:
    """Say how a call ended, if that is not clear from its being there."""
    if ended.outcome == "held":
        return "waits for a person"
    if ended.outcome == "denied":
        return "refused"
    if ended.outcome == "interrupted":
        return "stopped, nothing of it was kept"
    if ended.exit_code:
        return f"exit code {ended.exit_code}"
    if ended.success:
        return ""
    return {
        "timed_out": "out of time, undone",
        "invalid": "not run",
        "conflict": "not applied, the files were changed meanwhile",
        "unknown": "nobody knows whether it took effect",
    }.get(ended.outcome, "failed, undone")


def short(text: str, width: int = WIDTH) -> str:
    """Put a text on one line, and cut it if it is longer than that."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def counted(number: int, noun: str) -> str:
    """Write a number with its noun."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
