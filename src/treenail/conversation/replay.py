"""Replay: a pure function from a log to what a provider is sent.

Theory of operation
-------------------
A `Replayer` is fed the events of a session in order and keeps the clean conversation:
messages, the newest compaction, branch summaries, how subagents ended. Everything else
(usage, failures, partial text, starts and endings) is counted as left out, with the reason,
and never changes what is sent. Adding one event and asking for the input costs the same
however long the conversation is; feeding all events again gives the same result.

What comes out is valid for every provider:

- A tool's result follows the answer that asked for it. A call without a result (an orphan:
  the process died, the turn was cut off) is closed with a synthetic failed result. A result
  without a call is left out. Other messages that arrive during a call (a subagent ended, a
  branch summary) wait until the call has its result. The log itself is never rewritten.
- A call id that a model uses twice gets a number on the wire, because providers require
  unique ids.
- An empty answer is left out, unless it has work of the vendor's own tools; an empty request
  or result is sent as a word in brackets, because providers refuse empty content. A
  conversation without a request (a prompt alone) starts with a one-word request.
- A reasoning block is sent back only to the model and interface that wrote it.

Items are only ever added at the end, so what was sent is a prefix of what is sent next. What
breaks that is rare, and reported: a compaction, another system text, and messages that were
changed or taken back (a cleared slice, a rollback that includes history). (A synthetic result
is never sent before its place is final: a resumed turn runs its pending calls or closes
them for good before it calls the model again.)
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Generic, Literal, NamedTuple, TypeVar, overload

from pydantic_core import from_json

from treenail.codec import Codec
from treenail.conversation.events import (
    BranchSummary,
    HistoryCompacted,
    ProviderUsage,
    SubagentEvent,
    rollback_text,
    subagent_event_text,
)
from treenail.conversation.messages import (
    ContentPart,
    InnerMessage,
    ReasoningPart,
    ToolCallRecord,
    in_order,
)
from treenail.errors import CodecError
from treenail.log import Draft, Envelope
from treenail.state import ClearSlice, InitializeSlice, RestoredItem, Session, StateRestored, spec_of
from treenail.tools import RolledBack

T = TypeVar("T")

_THOUGHTS = (None, "thinking", "redacted_thinking", "reasoning")
"""The types of blocks that are thought alone, which no interface takes for an answer."""

EMPTY_TEXT = "(empty)"
"""Stands for an empty request or result, which providers refuse."""

IMAGE_BYTES = 6_000
"""What an image counts for: about 2,000 tokens, at three bytes a token."""

BYTES_PER_TOKEN = 3
"""How many bytes of input count as one token; a cautious estimate."""

BEGIN_TEXT = "Begin."
"""The request of a conversation that has none: providers require a user message first."""

SHOWN_HASH = 16
"""How much of an input's hash is recorded with each call, and shown: enough to tell two inputs apart."""

AUDIT_REASON = "kept for audit, never shown to the model"
"""Why most of a log is left out."""

UNREADABLE_REASON = "part of the conversation, but it cannot be read"
"""Why a message is left out whose stored form this version cannot read."""

ORPHAN_TEXT = "This call was cut off and has no result; nothing that it did was kept."
"""What the model is told about a call without a result."""

WITHDRAWN_TEXT = "This call waited for a person's answer when another request came; it was not run."
"""What the model is told about a held call that was never answered."""


class Growing(Sequence[T], Generic[T]):
    """A frozen view of the beginning of an append-only list, followed by a few more items.

    Nothing is copied, so making one costs the same however long the list is.
    """

    __slots__ = ("_behind", "_count", "_list")

    def __init__(self, items: list[T], behind: tuple[T, ...] = ()) -> None:
        self._list = items
        self._count = len(items)
        self._behind = behind

    def __len__(self) -> int:
        return self._count + len(self._behind)

    def __iter__(self) -> Iterator[T]:
        return chain(islice(self._list, self._count), self._behind)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(len(self))))
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"place {index} of {len(self)}")
        return self._list[place] if place < self._count else self._behind[place - self._count]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (Growing, tuple, list)):
            return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


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
        # Every text stands behind its length, so that no two items are written alike.
        text, call_id, name = self.text, self.call_id, self.name
        said = (
            f"{self.role}{'!' if self.is_error else ''}"
            f" {len(text)}:{text}"
            f"{'' if call_id is None else f' id {len(call_id)}:{call_id}'}"
            f"{'' if name is None else f' name {len(name)}:{name}'}"
        )
        for each in self.calls:
            call = f"{each.call_id}{each.name}{each.arguments}"
            said += f" call {len(each.call_id)},{len(each.name)},{len(each.arguments)}:{call}"
        for part in self.parts:
            key = json.dumps(_part_key(part))
            said += f" part {len(key)}:{key}"
        return said.encode("utf-8", "surrogatepass")


class LeftOut(NamedTuple):
    """An event that the model does not see, and why."""

    seq: int
    type: str
    reason: str


@dataclass(frozen=True, slots=True)
class Replay:
    """What a provider is sent, and what was left out of it."""

    items: Sequence[ReplayItem]
    left_out: Sequence[LeftOut] = ()
    synthetic: Sequence[str] = ()
    """The ids of calls that were closed with a synthetic result."""
    breaks: tuple[str, ...] = ()
    """What made an earlier input stop being a prefix of this one."""
    size_bytes: int = 0
    """How large the input is, about: what estimates of its tokens go by."""
    digest: str = field(default="", compare=False, repr=False)
    """The hash of all items, if it is known already."""
    reported_tokens: int | None = None
    """How many tokens the provider counted when it was last sent a prefix of this; None if it never said."""
    reported_bytes: int = 0
    """How large that prefix was."""

    @property
    def is_sendable(self) -> bool:
        """Whether there is something to answer: the conversation begins with a request."""
        return next((each.role == "user" for each in self.items if each.role != "system"), False)

    def token_estimate(self, beside: int = 0) -> int:
        """Estimate the input's tokens: what the provider counted last, and what was added since.

        `beside` is an estimate of what goes along with every request, such as the tools' descriptions. The
        provider's own count has that in it.
        """
        added = -(-(self.size_bytes - self.reported_bytes) // BYTES_PER_TOKEN)
        return added + (beside if self.reported_tokens is None else self.reported_tokens)

    def prefix_hash(self, count: int | None = None) -> str:
        """Hash the first `count` items, or all: equal hashes mean equal input."""
        if self.digest and (count is None or count == len(self.items)):
            return self.digest
        digest = _Digest()
        for each in islice(self.items, count):
            digest.add(each)
        return digest.hexdigest()


Said = InnerMessage | HistoryCompacted | BranchSummary | SubagentEvent | RolledBack
"""The events that a conversation is made of."""

_SAID: tuple[type[Said], ...] = (InnerMessage, HistoryCompacted, BranchSummary, SubagentEvent, RolledBack)
_REWRITING = (InitializeSlice, ClearSlice, StateRestored)
REPLAYED_KINDS = frozenset[type]((*_SAID, *_REWRITING, ProviderUsage))
"""The kinds of events whose values a replay looks at."""


@dataclass(slots=True)
class Replayer:
    """Folds events into a provider's input, one at a time."""

    model: str | None = None
    dialect: str | None = None
    """The model and interface whose reasoning may be sent back; None for none."""
    _seq: int = 0
    """The newest event that was taken."""
    _said: list[tuple[int, Said]] = field(default_factory=list)
    """What the conversation is made of, with its places in the log."""
    _places: dict[int, int] = field(default_factory=dict)
    """Where in `_said` a message is, by its id as a number, which is hashed faster."""
    _taken_back: dict[int, InnerMessage] = field(default_factory=dict)
    _left_out: list[LeftOut] = field(default_factory=list)
    _breaks: list[str] = field(default_factory=list)
    # What follows is made of `_said`.
    _items: list[ReplayItem] = field(default_factory=list)
    """Only ever added to; a new list takes its place where that is not possible."""
    _later: list[ReplayItem] = field(default_factory=list)
    """What waits until the open calls have their results."""
    _synthetic: list[str] = field(default_factory=list)
    _open: dict[str, list[str]] = field(default_factory=dict)
    """Call id as logged to the ids on the wire that still wait for a result."""
    _used: dict[str, int] = field(default_factory=dict)
    """The ids on the wire, with the number that the next call of the same id gets."""
    _system: str | None = None
    _summary: ReplayItem | None = None
    """The newest compaction's; there is only ever one."""
    _digest: _Digest = field(default_factory=lambda: _Digest())
    """The hash and size of the first items: an item is hashed once."""
    _reported: tuple[int, int] | None = None
    """The provider's own count of tokens, and the size of what it counted."""
    _input: Replay | None = None
    """What `input()` returned, until another event is taken."""

    # .. feeding ..

    def catch_up(self, session: Session, *, upto: int | None = None) -> None:
        """Take the events of a session's log that are not taken yet, whichever code wrote them."""
        for seq, logged, value in read_events(session, REPLAYED_KINDS, after=self._seq, upto=upto):
            self.add(seq, value, logged.type)

    def add(self, seq: int, event: object, type_name: str = "") -> None:
        """Take the next event of the log."""
        self._input = None
        self._seq = max(self._seq, seq)
        if isinstance(event, InnerMessage):
            self._take_message(seq, event)
            return
        reason = AUDIT_REASON
        if isinstance(event, ProviderUsage):
            self._note_usage(event)
        elif event is None:
            if type_name in _NAMES:
                reason = UNREADABLE_REASON
        elif type(event) in REPLAYED_KINDS:
            if isinstance(event, _SAID):
                self._take(seq, event)
                return
            if isinstance(event, _REWRITING) and self._rewrite(seq, event):
                return
        self._leave_out(seq, type_name or type(event).__name__, reason)

    def input(self) -> Replay:
        """Return the input as it would be sent now; open calls are closed in it, not in here."""
        if self._input is None:
            self._input = self._made()
        return self._input

    def _made(self) -> Replay:
        self._hash_new_items()
        digest = self._digest
        waiting: Sequence[str] = ()
        behind: tuple[ReplayItem, ...] = ()
        if self._open or self._later:
            waiting = self._waiting()
            behind = (*map(_orphan, waiting), *self._later)
        elif len(self._items) == 1 and self._is_without_request:
            behind = (ReplayItem("user", BEGIN_TEXT),)
        if behind:
            digest = digest.copy()
            for each in behind:
                digest.add(each)
        tokens, counted = self._reported or (None, 0)
        return Replay(
            Growing(self._items, behind),
            Growing(self._left_out),
            Growing(self._synthetic, tuple(waiting)) if waiting or self._synthetic else (),
            tuple(self._breaks),
            digest.bytes,
            digest.hexdigest(),
            tokens,
            counted,
        )

    @property
    def said(self) -> Sequence[tuple[int, Said]]:
        """What the conversation is made of, with its places in the log."""
        return Growing(self._said)

    @property
    def seq(self) -> int:
        """The newest event that was taken."""
        return self._seq

    @property
    def waiting_calls(self) -> tuple[str, ...]:
        """The logged ids of the calls that still wait for their result."""
        return tuple(call_id for call_id, wire_ids in self._open.items() for _ in wire_ids)

    # .. what the conversation is made of ..

    def _take(self, seq: int, event: Said) -> None:
        self._said.append((seq, event))
        self._fold(seq, event)

    def _take_message(self, seq: int, message: InnerMessage) -> None:
        end = len(self._said)
        place = self._places.setdefault(message.message_id.int, end)
        if place == end:
            self._said.append((seq, message))
            self._add_message(seq, message)
        else:
            self._renew(seq, place, message)

    def _renew(self, seq: int, place: int, event: InnerMessage) -> None:
        """Take a message that is there already: the same, with another status at most, or a newer version."""
        at, before = self._said[place]
        assert isinstance(before, InnerMessage)
        self._leave_out(seq, "InnerMessage", f"the message of event {at} again")
        if _as_sent(before) != _as_sent(event):
            self._said = [*self._said[:place], (at, event), *self._said[place + 1 :]]
            self._fold_again(f"event {seq} changed the message of event {at}")

    def _rewrite(self, seq: int, event: InitializeSlice | ClearSlice | StateRestored) -> bool:
        """Follow an event that sets, clears or restores the conversation itself. Returns whether it did."""
        made = event.slices if isinstance(event, StateRestored) else (event,)
        mine = {each.slice_type: each for each in made if each.slice_type in _NAMES}
        if not mine:
            return False
        # Where summaries stood among the messages is not known here: what they tell of came first.
        for kind in (HistoryCompacted, BranchSummary, SubagentEvent, RolledBack):
            for item in getattr(mine.get(_NAME_OF[kind]), "items", ()):
                self._take_summary(seq, getattr(item, "item", item))
        change = mine.get(_NAME_OF[InnerMessage])
        if change is None:
            return True
        now = self._messages()
        if isinstance(change, InitializeSlice):
            wanted = [(seq, each) for each in change.items if isinstance(each, InnerMessage)]
        elif isinstance(change, ClearSlice):
            gone = None if change.removed is None else set(change.removed)
            wanted = [] if gone is None else [each for at, each in enumerate(now) if at not in gone]
        else:
            wanted = now[: change.keep] + list(self._restored(seq, change.items))
        self._become(seq, now, wanted)
        return True

    def _take_summary(self, seq: int, event: object) -> None:
        if isinstance(event, HistoryCompacted):
            # Its range speaks of another log, or of events that were pruned.
            self._take(seq, replace(event, to_seq=0))
        elif isinstance(event, BranchSummary | SubagentEvent | RolledBack):
            self._take(seq, event)

    def _messages(self) -> list[tuple[int, InnerMessage]]:
        """Return the messages in the order of their slice, with their places in the log."""
        places = {each.message_id: seq for seq, each in self._said if isinstance(each, InnerMessage)}
        ordered = in_order(each for _, each in self._said if isinstance(each, InnerMessage))
        return [(places[each.message_id], each) for each in ordered]

    def _restored(self, seq: int, items: Iterable[RestoredItem]) -> Iterator[tuple[int, InnerMessage]]:
        known = self._taken_back | {at: each for at, each in self._said if isinstance(each, InnerMessage)}
        for item in items:
            if isinstance(item.item, InnerMessage):
                yield seq, item.item
            elif item.origin > 0:
                for at in range(item.origin, (item.upto or item.origin) + 1):
                    if at in known:
                        yield seq, known[at]

    def _become(
        self, seq: int, now: list[tuple[int, InnerMessage]], wanted: list[tuple[int, InnerMessage]]
    ) -> None:
        """Drop the messages that are gone, and take those that are new."""
        kept = {each.message_id for _, each in wanted}
        gone = {each.message_id: at for at, each in now if each.message_id not in kept}
        if gone:
            for at, each in now:
                if each.message_id in gone:
                    self._taken_back[at] = each
                    self._leave_out(at, "InnerMessage", f"taken back by event {seq}")
            self._said = [
                (at, each)
                for at, each in self._said
                if not (isinstance(each, InnerMessage) and each.message_id in gone)
            ]
            self._fold_again(f"event {seq} took back {len(gone)} messages")
        for at, each in wanted:
            place = self._places.get(each.message_id.int)
            if place is None:
                self._take_message(at, each)
            elif _as_sent(self._said[place][1]) != _as_sent(each):
                self._renew(seq, place, each)

    def _fold_again(self, reason: str) -> None:
        """Fold everything again, because something other than the end changed."""
        breaks = [*self._breaks, reason]
        said = {seq for seq, each in self._said}
        left_out = [each for each in self._left_out if each.seq not in said or each.reason == AUDIT_REASON]
        self._items, self._later, self._synthetic, self._left_out = [], [], [], left_out
        self._open, self._used, self._system, self._summary = {}, {}, None, None
        self._begin_hash_anew()
        self._places = {
            each.message_id.int: place
            for place, (_, each) in enumerate(self._said)
            if isinstance(each, InnerMessage)
        }
        for seq, event in self._said:
            self._fold(seq, event)
        self._left_out.sort(key=lambda each: each.seq)
        self._breaks = breaks

    # .. what is sent ..

    def _fold(self, seq: int, event: Said) -> None:
        if isinstance(event, InnerMessage):
            self._add_message(seq, event)
        elif isinstance(event, HistoryCompacted):
            self._compact(seq, event)
        elif isinstance(event, BranchSummary):
            self._add_beside(ReplayItem("user", _framed("branch-summary", event.summary), seq=seq))
        elif isinstance(event, SubagentEvent):
            self._add_told(seq, event, "subagent", subagent_event_text(event))
        else:
            self._add_told(seq, event, "undone", rollback_text(event))

    def _add_told(self, seq: int, event: Said, tag: str, text: str | None) -> None:
        if text is None:
            self._leave_out(seq, type(event).__name__, AUDIT_REASON)
        else:
            self._add_beside(ReplayItem("user", _framed(tag, text), seq=seq))

    def _add_beside(self, item: ReplayItem) -> None:
        """Add what is neither an answer nor a result: nothing comes between a call and its result."""
        (self._later if self._open else self._items).append(item)

    def _close_open(self) -> None:
        for wire_id in self._waiting():
            self._items.append(_orphan(wire_id))
            self._synthetic.append(wire_id)
        self._open.clear()
        self._add_later()

    def _add_later(self) -> None:
        self._items.extend(self._later)
        self._later.clear()

    def _waiting(self) -> list[str]:
        return [wire_id for wire_ids in self._open.values() for wire_id in wire_ids]

    @property
    def _is_without_request(self) -> bool:
        """Whether nothing was said yet; the system's text says nothing."""
        return len(self._items) == (self._system is not None)

    def _add_message(self, seq: int, message: InnerMessage) -> None:
        role = message.role
        if role == "tool":
            self._add_result(seq, message)
            return
        if role == "system":
            self._add_system(seq, message)
            return
        if self._open or self._later:
            self._close_open()
        if role == "user":
            parts = message.parts and self._parts(seq, message.parts)
            self._items.append(ReplayItem("user", message.content or EMPTY_TEXT, parts=parts, seq=seq))
            return
        if not message.content and not message.tool_calls and not self._has_work(message.parts):
            self._leave_out(seq, "InnerMessage", "an empty answer")
            return
        if len(self._items) <= 1 and self._is_without_request:
            self._items.append(ReplayItem("user", BEGIN_TEXT))
        parts = message.parts and self._parts(seq, message.parts)
        calls = tuple([self._call(each) for each in message.tool_calls])
        self._items.append(ReplayItem("assistant", message.content, calls, None, None, parts, seq))

    def _add_system(self, seq: int, message: InnerMessage) -> None:
        if message.content == self._system:
            self._leave_out(seq, "InnerMessage", "the same system text again")
            return
        rest = self._items if self._system is None else self._items[1:]
        if self._items:
            self._breaks.append(f"event {seq} has another system text")
        self._begin_hash_anew()
        self._items = [ReplayItem("system", message.content or EMPTY_TEXT, seq=seq), *rest]
        self._system = message.content

    def _add_result(self, seq: int, message: InnerMessage) -> None:
        call_id = message.tool_call_id or ""
        waiting = self._open.get(call_id)
        if not waiting:
            self._leave_out(seq, "InnerMessage", "a result that no open call asked for")
            return
        wire_id = waiting.pop(0)
        if not waiting:
            del self._open[call_id]
        text, parts = message.content or EMPTY_TEXT, message.parts and self._parts(seq, message.parts)
        self._items.append(
            ReplayItem("tool", text, (), wire_id, message.tool_name, parts, seq, message.is_error)
        )
        if self._later and not self._open:
            self._add_later()

    def _call(self, record: ToolCallRecord) -> ReplayCall:
        name = record.call_id or "call"
        wire_id, number = name, self._used.get(name, 1)
        while wire_id in self._used:
            number += 1
            wire_id = f"{name}-{number}"
        self._used[wire_id] = 1
        self._used[name] = number
        self._open.setdefault(record.call_id, []).append(wire_id)
        return ReplayCall(wire_id, record.name, _arguments(record.arguments))

    def _has_work(self, parts: tuple[ContentPart, ...]) -> bool:
        """Say whether an answer without words has something to go on from, such as a vendor's own search."""
        return any(
            isinstance(each, ReasoningPart)
            and (each.model, each.dialect) == (self.model, self.dialect)
            and each.payload.get("type") not in _THOUGHTS
            for each in parts
        )

    def _parts(self, seq: int, parts: tuple[ContentPart, ...]) -> tuple[ContentPart, ...]:
        kept = []
        for each in parts:
            if isinstance(each, ReasoningPart) and (each.model, each.dialect) != (self.model, self.dialect):
                self._leave_out(seq, "ReasoningPart", f"written by {each.model}, for it alone")
            else:
                kept.append(each)
        return tuple(kept)

    def _compact(self, seq: int, event: HistoryCompacted) -> None:
        """Put the summary in place of everything up to its range's end."""
        # Pairs are never split: a result goes with its call, wherever it stands, a synthetic one too.
        known = {call.call_id for each in self._items if each.seq > event.to_seq for call in each.calls}
        system, tail, dropped = [], [], []
        for each in self._items:
            if each.role == "system":
                system.append(each)
            elif each is self._summary:
                dropped.append(each)
            elif each.call_id in known if each.role == "tool" else each.seq > event.to_seq:
                tail.append(each)
            else:
                dropped.append(each)
        dropped.extend(each for each in self._later if each.seq <= event.to_seq)
        for each in dropped:
            if each.seq:
                self._leave_out(each.seq, each.role, f"summarised by event {seq}")
        self._summary = ReplayItem("user", _framed("summary", event.summary), seq=seq)
        self._items = [*system, self._summary, *tail]
        self._later = [each for each in self._later if each.seq > event.to_seq]
        self._open = {
            call_id: kept
            for call_id, wire_ids in self._open.items()
            if (kept := [each for each in wire_ids if each in known])
        }
        if not self._open:
            self._add_later()
        self._begin_hash_anew()
        self._breaks.append(f"event {seq} summarised {len(dropped)} items up to event {event.to_seq}")

    # .. what is counted along the way ..

    def _leave_out(self, seq: int, type_name: str, reason: str) -> None:
        self._left_out.append(LeftOut(seq, type_name, reason))

    def _note_usage(self, event: ProviderUsage) -> None:
        """Remember the provider's own count, if it was sent everything that is here now."""
        tokens = event.usage.input_tokens
        was_trimmed = 0 < event.input_items < len(self._items)
        if tokens and event.purpose == "answer" and not was_trimmed:
            self._hash_new_items()
            self._reported = (tokens, self._digest.bytes)

    def _hash_new_items(self) -> None:
        for item in self._items[self._digest.count :]:
            self._digest.add(item)

    def _begin_hash_anew(self) -> None:
        """Drop the hash and the provider's count, because something other than the end changed."""
        self._digest, self._reported = _Digest(), None


_NAME_OF = {each: spec_of(each).name or "" for each in _SAID}
_NAMES = frozenset(_NAME_OF.values())


def read_events(
    session: Session,
    kinds: Collection[type],
    *,
    after: int = 0,
    upto: int | None = None,
    known: Mapping[int, object] | None = None,
) -> Iterator[tuple[int, Envelope | Draft, object | None]]:
    """Yield a session's events with their places, and with the values of some kinds at least.

    No others are decoded. `known` holds values that are decoded already, by sequence number.
    """
    events: Iterable[tuple[int, Envelope | Draft, object | None]] | None = None
    if upto is None:
        events = session.just_written(after=after)
    if events is None:
        had = known or {}
        read = session.log.read(session.session_id, after=after, upto=upto)
        events = ((each.seq, each, had.get(each.seq)) for each in read)
    codec = session.codec
    asked: dict[str, type | None] = {}
    for each in events:
        seq, logged, value = each
        if value is not None:
            yield each
            continue
        name = logged.type
        if name not in asked:
            kind = codec.registry.resolve(name) if codec.registry.knows(name) else None
            asked[name] = kind if kind in kinds else None
        wanted = asked[name]
        yield seq, logged, None if wanted is None else decoded(codec, wanted, logged.payload)


def decoded(codec: Codec, kind: type, payload: bytes) -> object | None:
    """Return a stored value, or None if it cannot be read."""
    try:
        return codec.decode(kind, payload)
    except CodecError:
        return None


def conversation_events(
    session: Session, *, after: int = 0, upto: int | None = None
) -> Iterator[tuple[int, object, str]]:
    """Yield a session's events for a `Replayer`: place, value and type name.

    What no replay looks at is not decoded: its value is None.
    """
    for seq, logged, value in read_events(session, REPLAYED_KINDS, after=after, upto=upto):
        yield seq, value, logged.type


def replay(
    session: Session, *, upto: int | None = None, model: str | None = None, dialect: str | None = None
) -> Replay:
    """Return what a provider would be sent, read from a session's log up to an event."""
    return replay_events(conversation_events(session, upto=upto), model=model, dialect=dialect)


def replay_events(
    events: Iterable[tuple[int, object, str]], *, model: str | None = None, dialect: str | None = None
) -> Replay:
    """Return what a provider would be sent, from events with their places and type names."""
    replayer = Replayer(model, dialect)
    for seq, event, type_name in events:
        replayer.add(seq, event, type_name)
    return replayer.input()


def _as_sent(event: object) -> object:
    """Return what of a message reaches the model, to compare two versions of it."""
    if not isinstance(event, InnerMessage):
        return event
    calls = [(each.call_id, each.name, each.arguments) for each in event.tool_calls]
    return (
        event.role,
        event.content,
        calls,
        event.tool_call_id,
        event.tool_name,
        event.parts,
        event.is_error,
    )


class _Digest:
    """The hash of some items, how many they are, and about how large."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.count = 0
        self.bytes = 0

    def add(self, item: ReplayItem) -> None:
        """Take the next item. An image counts for about what models make of one."""
        content = item.canonical()
        self._hash.update(len(content).to_bytes(8, "big") + content)
        self.count += 1
        self.bytes += len(content)
        for each in item.parts:
            if not isinstance(each, ReasoningPart):
                self.bytes += IMAGE_BYTES

    def copy(self) -> _Digest:
        """Return one that can grow on its own."""
        other = copy.copy(self)
        other._hash = self._hash.copy()
        return other

    def hexdigest(self) -> str:
        """Return the hash as text."""
        return self._hash.hexdigest()


def _orphan(wire_id: str) -> ReplayItem:
    return ReplayItem("tool", ORPHAN_TEXT, call_id=wire_id, is_error=True)


def _framed(tag: str, text: str) -> str:
    return f"<{tag}>\n{text or EMPTY_TEXT}\n</{tag}>"


def _arguments(text: str) -> str:
    """Return arguments that are a JSON object: providers refuse others, and the model saw the error."""
    try:
        data = from_json(text)
    except (ValueError, TypeError):
        try:
            data = json.loads(text)  # It reads what the faster parser refuses: deep nesting, half characters.
        except (ValueError, RecursionError):
            return "{}"
    return text if isinstance(data, dict) else "{}"


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
