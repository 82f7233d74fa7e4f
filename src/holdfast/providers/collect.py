"""One answer, put together from its events, whatever a model or a server does.

A model is another side: it may repeat an id, leave one out, say nothing, or not stop. What
comes out of here can be logged, run and sent back. Everything has a limit; what was cut or
mended is said in `notes`, so that the log can keep it. Nothing here raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.conversation.messages import ReasoningPart
from holdfast.providers.base import (
    ModelEvent,
    ReasoningBlock,
    Stopped,
    StopReason,
    TextDelta,
    ToolCallRequested,
    UsageReported,
)
from holdfast.records import quick
from holdfast.state.budget import TokenUsage
from holdfast.tools.tool import ToolCall

MAX_TEXT_CHARS = 4_000_000
"""How long an answer's text may be; what comes after it is read and dropped."""

MAX_CALLS = 1_024
"""How many tool calls of one answer are run; the others are dropped."""

MAX_ARGUMENTS_CHARS = 4_000_000
"""How long the arguments of all calls of one answer may be together."""

MAX_REASONING_BLOCKS = 1_024
"""How many blocks of thought of one answer are kept."""

MAX_NAME_CHARS = 256
"""How long a tool's name or a call's id may be; tools have shorter ones, so that a longer one is noise."""

MAX_NOTES = 16
"""How many notes an answer carries; the rest is counted."""


@quick
@dataclass(frozen=True, slots=True)
class CollectedAnswer:
    """A whole answer of a model."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    """The calls to run: each has an id, and no two have the same."""
    parts: tuple[ReasoningPart, ...] = ()
    """The blocks of thought that go back with the next request."""
    usage: TokenUsage = field(default_factory=TokenUsage)
    cost_usd: float | None = None
    cache_write_tokens: int = 0
    model: str | None = None
    """The model that was asked, if the provider said so."""
    stop: StopReason = "end"
    is_complete: bool = False
    """Whether the provider said that the answer is whole."""
    notes: tuple[str, ...] = ()
    """What was cut or mended."""

    @property
    def is_empty(self) -> bool:
        """Whether the model neither said anything nor wants a tool."""
        return not self.text and not self.calls


_NOTHING_USED = UsageReported(TokenUsage())


@dataclass(slots=True)
class Collector:
    """Takes the events of one answer, in order."""

    _text: list[str] = field(default_factory=list)
    _chars: int = 0
    _dropped_chars: int = 0
    _calls: list[ToolCall] = field(default_factory=list)
    _ids: set[str] = field(default_factory=set)
    _argument_chars: int = 0
    _dropped_calls: int = 0
    _parts: list[ReasoningPart] = field(default_factory=list)
    _dropped_parts: int = 0
    _usage: UsageReported = _NOTHING_USED
    _stop: StopReason = "end"
    _is_complete: bool = False
    _notes: list[str] = field(default_factory=list)

    def add(self, seen: ModelEvent) -> None:
        """Take the next event."""
        if isinstance(seen, TextDelta):
            self._add_text(seen.text)
        elif isinstance(seen, ToolCallRequested):
            self._add_call(seen.call)
        elif isinstance(seen, ReasoningBlock):
            if len(self._parts) < MAX_REASONING_BLOCKS:
                self._parts.append(seen.part)
            else:
                self._dropped_parts += 1
        elif isinstance(seen, UsageReported):
            self._usage = seen
        elif isinstance(seen, Stopped):
            self._stop, self._is_complete = seen.reason, True

    @property
    def text(self) -> str:
        """What the model has said so far."""
        # Joined once and kept joined: asking again costs nothing, and adding costs the piece alone.
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""

    @property
    def usage(self) -> UsageReported:
        """What the call has used so far."""
        return self._usage

    def answer(self) -> CollectedAnswer:
        """Return the answer as far as it has come."""
        notes = self._notes[:MAX_NOTES]
        if len(self._notes) > MAX_NOTES:
            notes.append(f"{len(self._notes) - MAX_NOTES} other calls had their ids mended")
        if self._dropped_chars:
            notes.append(
                f"the text was cut at {MAX_TEXT_CHARS} characters; {self._dropped_chars} were dropped"
            )
        if self._dropped_calls:
            notes.append(f"{self._dropped_calls} tool calls beyond what one answer may ask for were dropped")
        if self._dropped_parts:
            notes.append(
                f"{self._dropped_parts} blocks of thought beyond {MAX_REASONING_BLOCKS} were dropped"
            )
        text = self.text
        if self._is_complete and not text and not self._calls:
            notes.append("the answer is empty")
        # An answer that we cut is not the whole one, whatever the provider says.
        was_cut = self._dropped_chars and self._stop in ("end", "tools")
        return CollectedAnswer(
            text=text,
            calls=tuple(self._calls),
            parts=tuple(self._parts),
            usage=self._usage.usage,
            cost_usd=self._usage.cost_usd,
            cache_write_tokens=self._usage.cache_write_tokens,
            model=self._usage.model,
            stop="length" if was_cut else self._stop,
            is_complete=self._is_complete,
            notes=tuple(notes),
        )

    def _add_text(self, text: str) -> None:
        room = MAX_TEXT_CHARS - self._chars
        if len(text) > room:
            self._dropped_chars += len(text) - room
            text = text[:room]
        if text:
            self._text.append(text)
            self._chars += len(text)

    def _add_call(self, call: ToolCall) -> None:
        arguments = call.arguments_json
        if len(self._calls) >= MAX_CALLS or self._argument_chars + len(arguments) > MAX_ARGUMENTS_CHARS:
            self._dropped_calls += 1
            return
        self._argument_chars += len(arguments)
        call_id, name = call.id[:MAX_NAME_CHARS], call.name[:MAX_NAME_CHARS]
        if not call_id:
            call_id = f"call_{len(self._calls) + 1}"
            self._notes.append(f"a call of {name!r} came without an id and was given {call_id!r}")
        unique, number = call_id, 1
        while unique in self._ids:
            number += 1
            unique = f"{call_id}-{number}"
        if unique != call_id:
            self._notes.append(f"the id {call_id!r} came twice in one answer; the later call is {unique!r}")
        self._ids.add(unique)
        if (unique, name, arguments) != (call.id, call.name, call.arguments):
            call = ToolCall(unique, name, arguments)
        self._calls.append(call)
