"""Replay, inspected offline: what a model would be sent at some point of a log, what not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treenail.conversation.events import HistoryCompacted
from treenail.conversation.messages import ReasoningPart
from treenail.conversation.replay import SHOWN_HASH, LeftOut, Replayer, ReplayItem
from treenail.state import Session


@dataclass(frozen=True, slots=True)
class ReplayInspection:
    """What a provider would be sent after an event of a log, and what was left out of it."""

    session_id: str
    at_seq: int
    """The newest event that was looked at."""
    model: str | None
    dialect: str | None
    items: Sequence[ReplayItem]
    left_out: Sequence[LeftOut]
    synthetic: Sequence[str]
    """The calls that are closed with a synthetic result."""
    waiting: Sequence[str]
    """The calls that a turn would run or close before it calls the model."""
    breaks: Sequence[str]
    """Where the input stopped being an extension of the one before."""
    compactions: Sequence[HistoryCompacted]
    """Every compaction so far, oldest first. The last one is in effect."""
    prefix_hash: str
    size_bytes: int
    token_estimate: int
    is_sendable: bool

    @property
    def left_out_counts(self) -> Mapping[str, int]:
        """How many events were left out for each reason, the most common first."""
        return dict(Counter(each.reason for each in self.left_out).most_common())

    def to_data(self) -> dict[str, Any]:
        """Return everything as plain values that JSON can hold; pictures as their sizes."""
        return {
            "session_id": self.session_id,
            "at_seq": self.at_seq,
            "model": self.model,
            "dialect": self.dialect,
            "items": [_item_data(each) for each in self.items],
            "left_out_counts": dict(self.left_out_counts),
            "left_out": [{"seq": e.seq, "type": e.type, "reason": e.reason} for e in self.left_out],
            "synthetic": list(self.synthetic),
            "waiting": list(self.waiting),
            "breaks": list(self.breaks),
            "compactions": [_compaction_data(each) for each in self.compactions],
            "prefix_hash": self.prefix_hash,
            "size_bytes": self.size_bytes,
            "token_estimate": self.token_estimate,
            "is_sendable": self.is_sendable,
        }

    def render(self, *, max_chars_per_item: int = 200) -> str:
        """Write it for a person, long texts shortened."""
        about = [
            f"session {self.session_id} after event {self.at_seq}",
            f"{len(self.items)} items, {self.size_bytes} bytes, about {self.token_estimate} tokens",
            f"prefix hash {self.prefix_hash[:SHOWN_HASH]}",
        ]
        if not self.is_sendable:
            about.append("nothing to send: the conversation has not begun")
        lines = [*about, ""]
        lines.extend(_item_line(place, each, max_chars_per_item) for place, each in enumerate(self.items))
        for title, entries in (
            ("left out", [f"{count:>6}  {reason}" for reason, count in self.left_out_counts.items()]),
            ("closed with a synthetic result", self.synthetic),
            ("waiting for a result", self.waiting),
            ("breaks of the prefix", self.breaks),
            (
                "compactions",
                [f"events {e.from_seq} to {e.to_seq}, {e.strategy}, {e.trigger}" for e in self.compactions],
            ),
        ):
            if entries:
                lines.extend(["", f"{title}:", *(f"  {each}" for each in entries)])
        return "\n".join(lines)


def inspect_replay(
    session: Session, at_seq: int | None = None, *, model: str | None = None, dialect: str | None = None
) -> ReplayInspection:
    """Show what a provider would be sent after event `at_seq` of a session, or now. Nothing is called.

    `model` and `dialect` select whose reasoning blocks are sent back; without them none are.
    """
    replayer = Replayer(model, dialect)
    replayer.catch_up(session, upto=at_seq)
    replayed = replayer.input()
    return ReplayInspection(
        session_id=str(session.session_id),
        at_seq=replayer.seq,
        model=model,
        dialect=dialect,
        items=replayed.items,
        left_out=replayed.left_out,
        synthetic=replayed.synthetic,
        waiting=replayer.waiting_calls,
        breaks=replayed.breaks,
        compactions=tuple(each for _, each in replayer.said if isinstance(each, HistoryCompacted)),
        prefix_hash=replayed.prefix_hash(),
        size_bytes=replayed.size_bytes,
        token_estimate=replayed.token_estimate(),
        is_sendable=replayed.is_sendable,
    )


def _item_data(item: ReplayItem) -> dict[str, Any]:
    return {
        "seq": item.seq,
        "role": item.role,
        "text": item.text,
        "calls": [{"id": e.call_id, "name": e.name, "arguments": e.arguments} for e in item.calls],
        "call_id": item.call_id,
        "name": item.name,
        "is_error": item.is_error,
        "parts": [
            {"kind": "reasoning", "model": part.model, "dialect": part.dialect}
            if isinstance(part, ReasoningPart)
            else {"kind": "image", "media_type": part.media_type, "bytes": len(part.data or b"")}
            for part in item.parts
        ],
    }


def _compaction_data(event: HistoryCompacted) -> dict[str, Any]:
    return {
        "from_seq": event.from_seq,
        "to_seq": event.to_seq,
        "strategy": event.strategy,
        "trigger": event.trigger,
        "source_event_count": event.source_event_count,
        "tail_event_count": event.tail_event_count,
        "limitations": list(event.limitations),
    }


def _item_line(place: int, item: ReplayItem, limit: int) -> str:
    text = " ".join(item.text.split())
    text = text if len(text) <= limit else f"{text[:limit]} ... ({len(item.text)} characters)"
    calls = "".join(f" -> {each.name}({each.call_id})" for each in item.calls)
    answers = f" [{item.name or 'result'} {item.call_id}]" if item.role == "tool" else ""
    thoughts = f" +{len(item.parts)} parts" if item.parts else ""
    origin = f"event {item.seq}" if item.seq else "synthetic"
    return f"{place:>4} {item.role:<9} {origin:<12}{answers} {text}{calls}{thoughts}".rstrip()
