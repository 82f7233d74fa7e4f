"""Replay: a pure function from a log to what a provider is sent.

Theory of operation
-------------------
A `Replayer` is fed the events of a session in order and keeps the clean conversation:
messages, the newest compaction, branch summaries. Everything else (usage, failures, partial
text, starts and endings) is counted as left out, with the reason, and can never change what
is sent. Feeding it one more event costs the same however long the conversation is, and
feeding it all events again gives the same result.

What comes out is valid for every provider:

- A tool's result stands right behind the answer that asked for it. A call without a result
  (an orphan: the process died, the turn was cut off) is closed with a synthetic failed
  result. A result without a call is left out. The log itself is never rewritten.
- A call id that a model uses twice gets a number on the wire, because providers want them
  unique.
- An empty answer is left out; an empty request or result is sent as a word in brackets,
  because providers refuse empty content.
- A block of thought is sent back only to the model and interface that wrote it.

Items are only ever added at the end, so what was sent is a prefix of what is sent next. Two
things break that, and both are reported: a compaction, and another system text. (A synthetic
result is never sent before its place is final: a turn that goes on runs its pending calls or
closes them for good before it asks the model again.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from holdfast.conversation.events import BranchSummary, HistoryCompacted
from holdfast.conversation.messages import ContentPart, InnerMessage, ReasoningPart, ToolCallRecord
from holdfast.state.session import Session

EMPTY_TEXT = "(empty)"
"""Stands for an empty request or result, which providers refuse."""

_IMAGE_BYTES = 6_000
"""What an image counts for: about 2,000 tokens, at three bytes a token."""

ORPHAN_TEXT = "This call was cut off and has no result; nothing that it did was kept."
"""What the model is told of a call that never came back."""


@dataclass(frozen=True, slots=True)
class ReplayCall:
    """A tool call as it is sent: its id is unique in the input."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ReplayItem:
    """One message of the input, provider-neutral."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str
    calls: tuple[ReplayCall, ...] = ()
    call_id: str | None = None
    name: str | None = None
    parts: tuple[ContentPart, ...] = ()
    seq: int = 0
    """The event that it comes from; 0 for a synthetic one."""
    is_error: bool = False
    """For a tool's result: whether the call failed."""

    def canonical(self) -> bytes:
        """Return the item's content as bytes that are equal if and only if what is sent is."""
        data = [
            self.role,
            self.text,
            [[each.call_id, each.name, each.arguments] for each in self.calls],
            self.call_id,
            self.name,
            [_part_key(each) for each in self.parts],
            self.is_error,
        ]
        return json.dumps(data, ensure_ascii=True, separators=(",", ":"), sort_keys=True).encode()


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An event that the model does not see, and why."""

    seq: int
    type: str
    reason: str


@dataclass(frozen=True, slots=True)
class Replay:
    """What a provider is sent, and what was left out of it."""

    items: tuple[ReplayItem, ...]
    left_out: tuple[LeftOut, ...] = ()
    synthetic: tuple[str, ...] = ()
    """The ids of calls that were closed with a synthetic result."""
    breaks: tuple[str, ...] = ()
    """What made an earlier input stop being a prefix of this one."""
    size_bytes: int = 0
    """How large the input is, about: what estimates of its tokens go by."""
    digest: str = field(default="", compare=False, repr=False)
    """The hash of all items, if whoever folded them kept it up to date."""

    @property
    def is_sendable(self) -> bool:
        """Whether there is something to answer: the conversation begins with a request."""
        return next((each.role == "user" for each in self.items if each.role != "system"), False)

    def prefix_hash(self, count: int | None = None) -> str:
        """Hash the first `count` items, or all: equal hashes mean equal input."""
        if self.digest and (count is None or count == len(self.items)):
            return self.digest
        digest = hashlib.sha256()
        for each in self.items if count is None else self.items[:count]:
            _digest_item(digest, each)
        return digest.hexdigest()


@dataclass(slots=True)
class Replayer:
    """Folds events into a provider's input, one at a time."""

    model: str | None = None
    dialect: str | None = None
    """Whose thoughts may be sent back; None for nobody's."""
    _items: list[ReplayItem] = field(default_factory=list)
    _left_out: list[LeftOut] = field(default_factory=list)
    _synthetic: list[str] = field(default_factory=list)
    _breaks: list[str] = field(default_factory=list)
    _open: dict[str, list[str]] = field(default_factory=dict)
    """Call id as logged to the ids on the wire that still wait for a result."""
    _used: set[str] = field(default_factory=set)
    _system: str | None = None
    _hash: hashlib._Hash = field(default_factory=hashlib.sha256)
    """The hash of the first `_hashed` items, and their size: what is only added to is hashed once."""
    _hashed: int = 0
    _bytes: int = 0

    def add(self, seq: int, event: object, type_name: str = "") -> None:
        """Take the next event of the log."""
        if isinstance(event, InnerMessage):
            self._add_message(seq, event)
        elif isinstance(event, HistoryCompacted):
            self._compact(seq, event)
        elif isinstance(event, BranchSummary):
            self._close_open()
            self._items.append(ReplayItem("user", _framed("branch-summary", event.summary), seq=seq))
        else:
            name = type_name or type(event).__name__
            self._left_out.append(LeftOut(seq, name, "kept for audit, never shown to the model"))

    def input(self) -> Replay:
        """Return the input as it would be sent now; open calls are closed in it, not in here."""
        items = list(self._items)
        synthetic = list(self._synthetic)
        for item in self._items[self._hashed :]:
            self._bytes += _digest_item(self._hash, item)
        self._hashed = len(self._items)
        digest, size = self._hash.copy(), self._bytes
        for wire_id in self._waiting():
            items.append(_orphan(wire_id))
            synthetic.append(wire_id)
            size += _digest_item(digest, items[-1])
        return Replay(
            tuple(items),
            tuple(self._left_out),
            tuple(synthetic),
            tuple(self._breaks),
            size,
            digest.hexdigest(),
        )

    def _begin_hash_anew(self) -> None:
        """Forget the hash: something else than the end was changed."""
        self._hash, self._hashed, self._bytes = hashlib.sha256(), 0, 0

    @property
    def waiting_calls(self) -> tuple[str, ...]:
        """The logged ids of the calls that still wait for their result."""
        return tuple(call_id for call_id, wire_ids in self._open.items() for _ in wire_ids)

    def _waiting(self) -> list[str]:
        return [wire_id for wire_ids in self._open.values() for wire_id in wire_ids]

    def _close_open(self) -> None:
        for wire_id in self._waiting():
            self._items.append(_orphan(wire_id))
            self._synthetic.append(wire_id)
        self._open.clear()

    def _add_message(self, seq: int, message: InnerMessage) -> None:
        if message.role == "tool":
            self._add_result(seq, message)
            return
        if message.role == "system":
            self._add_system(seq, message)
            return
        self._close_open()
        parts = self._parts(seq, message.parts)
        if message.role == "user":
            self._items.append(ReplayItem("user", message.content or EMPTY_TEXT, parts=parts, seq=seq))
            return
        calls = tuple(self._call(each) for each in message.tool_calls)
        if not message.content and not calls:
            self._left_out.append(LeftOut(seq, "InnerMessage", "an empty answer"))
            return
        self._items.append(ReplayItem("assistant", message.content, calls=calls, parts=parts, seq=seq))

    def _add_system(self, seq: int, message: InnerMessage) -> None:
        if self._system is None:
            self._begin_hash_anew()
            self._items.insert(0, ReplayItem("system", message.content or EMPTY_TEXT, seq=seq))
        elif message.content == self._system:
            self._left_out.append(LeftOut(seq, "InnerMessage", "the same system text again"))
            return
        else:
            self._begin_hash_anew()
            self._items[0] = ReplayItem("system", message.content or EMPTY_TEXT, seq=seq)
            self._breaks.append(f"event {seq} has another system text")
        self._system = message.content

    def _add_result(self, seq: int, message: InnerMessage) -> None:
        waiting = self._open.get(message.tool_call_id or "")
        if not waiting:
            self._left_out.append(LeftOut(seq, "InnerMessage", "a result that no open call asked for"))
            return
        wire_id = waiting.pop(0)
        if not waiting:
            del self._open[message.tool_call_id or ""]
        self._items.append(
            ReplayItem(
                "tool",
                message.content or EMPTY_TEXT,
                call_id=wire_id,
                name=message.tool_name,
                parts=self._parts(seq, message.parts),
                seq=seq,
                is_error=message.is_error,
            )
        )

    def _call(self, record: ToolCallRecord) -> ReplayCall:
        wire_id, number = record.call_id or "call", 1
        while wire_id in self._used:
            number += 1
            wire_id = f"{record.call_id or 'call'}-{number}"
        self._used.add(wire_id)
        self._open.setdefault(record.call_id, []).append(wire_id)
        return ReplayCall(wire_id, record.name, _arguments(record.arguments))

    def _parts(self, seq: int, parts: tuple[ContentPart, ...]) -> tuple[ContentPart, ...]:
        kept = []
        for each in parts:
            if isinstance(each, ReasoningPart) and (each.model, each.dialect) != (self.model, self.dialect):
                self._left_out.append(LeftOut(seq, "ReasoningPart", f"written by {each.model}, for it alone"))
            else:
                kept.append(each)
        return tuple(kept)

    def _compact(self, seq: int, event: HistoryCompacted) -> None:
        """Put the summary in place of everything up to its range's end."""
        self._begin_hash_anew()
        # Pairs are never split: a result goes with its call, wherever it stands, a synthetic one too.
        known = {call.call_id for each in self._items if each.seq > event.to_seq for call in each.calls}
        tail = [
            each
            for each in self._items
            if (each.call_id in known if each.role == "tool" else each.seq > event.to_seq)
        ]
        system = [each for each in self._items[:1] if each.role == "system"]
        dropped = len(self._items) - len(tail) - len(system)
        summary = ReplayItem("user", _framed("summary", event.summary), seq=seq)
        self._items = [*system, summary, *(each for each in tail if each.role != "system")]
        self._open = {
            call_id: kept
            for call_id, wire_ids in self._open.items()
            if (kept := [each for each in wire_ids if each in known])
        }
        self._breaks.append(f"event {seq} summarised {dropped} items up to event {event.to_seq}")


def replay(
    session: Session, *, upto: int | None = None, model: str | None = None, dialect: str | None = None
) -> Replay:
    """Return what a provider would be sent, read from a session's log up to an event."""
    return replay_events(
        ((envelope.seq, value, envelope.type) for envelope, value in session.events(upto=upto)),
        model=model,
        dialect=dialect,
    )


def replay_events(
    events: Iterable[tuple[int, object, str]], *, model: str | None = None, dialect: str | None = None
) -> Replay:
    """Return what a provider would be sent, from events with their places and type names."""
    replayer = Replayer(model, dialect)
    for seq, event, type_name in events:
        replayer.add(seq, event, type_name)
    return replayer.input()


def _digest_item(digest: hashlib._Hash, item: ReplayItem) -> int:
    """Add an item to a hash; return how large it is, an image counted as what models make of one."""
    content = item.canonical()
    digest.update(len(content).to_bytes(8, "big"))
    digest.update(content)
    return len(content) + _IMAGE_BYTES * sum(not isinstance(each, ReasoningPart) for each in item.parts)


def _orphan(wire_id: str) -> ReplayItem:
    return ReplayItem("tool", ORPHAN_TEXT, call_id=wire_id, is_error=True)


def _framed(tag: str, text: str) -> str:
    return f"<{tag}>\n{text or EMPTY_TEXT}\n</{tag}>"


def _arguments(text: str) -> str:
    """Return arguments that are a JSON object: providers refuse others, and the model saw the error."""
    try:
        data = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return "{}"
    return text if isinstance(data, dict) and text.strip() else "{}"


def _part_key(part: ContentPart) -> object:
    if isinstance(part, ReasoningPart):
        return [
            "reasoning",
            part.model,
            part.dialect,
            json.dumps(dict(part.payload), sort_keys=True, default=str),
            [part.after_text, part.after_calls],
        ]
    digest = hashlib.sha256(part.data).hexdigest() if part.data is not None else None
    return ["image", part.media_type, digest, part.url]
