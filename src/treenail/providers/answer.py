"""One answer, collected from its events, whatever a model or a server sends.

A model may repeat an id, omit one, say nothing, or never stop. The collected answer can
always be logged, run and sent back. Everything has a limit; what was cut or repaired is
listed in `notes` for the log. Nothing here raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from treenail.conversation import ReasoningPart
from treenail.providers.base import (
    FinishReason,
    ModelEvent,
    ReasoningBlock,
    Stopped,
    TextDelta,
    ToolCallRequested,
    UsageReported,
)
from treenail.state import TokenUsage
from treenail.tools import ToolCall

MAX_TEXT_CHARS = 4_000_000
"""How long an answer's text may be; the rest is read and dropped."""

MAX_CALLS = 1_024
"""How many tool calls of one answer are run; the others are dropped."""

MAX_ARGUMENTS_CHARS = 4_000_000
"""How long the arguments of all calls of one answer may be together."""

MAX_REASONING_BLOCKS = 1_024
"""How many reasoning blocks of one answer are kept."""

MAX_NAME_CHARS = 256
"""How long a tool's name or a call's id may be; real ones are shorter."""

MAX_NOTES = 16
"""How many notes an answer carries; the rest is counted."""


@dataclass(frozen=True, slots=True)
class CollectedAnswer:
    """A whole answer of a model."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    """The calls to run: each has an id, and no two have the same."""
    parts: tuple[ReasoningPart, ...] = ()
    """The reasoning blocks that are sent back with the next request."""
    usage: TokenUsage = field(default_factory=TokenUsage)
    cost_usd: float | None = None
    cache_write_tokens: int = 0
    model: str | None = None
    """The model that was called, if the provider said so."""
    stop: FinishReason = "end"
    is_complete: bool = False
    """Whether the provider said that the answer is over."""
    notes: tuple[str, ...] = ()
    """What was cut or repaired."""
    stop_said: str = ""
    """The vendor's own word for why it stopped."""

    @property
    def is_empty(self) -> bool:
        """Whether the answer has neither text nor tool calls."""
        return not self.text and not self.calls


_NOTHING_USED = UsageReported(TokenUsage())


class Collector:
    """Takes the events of one answer, in order."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._calls: list[ToolCall] = []
        self._ids: set[str] = set()
        self._parts: list[ReasoningPart] = []
        self._notes: list[str] = []
        self._chars = self._argument_chars = 0
        self._dropped_chars = self._dropped_calls = self._dropped_parts = 0
        self._usage = _NOTHING_USED
        self._stop = Stopped("end")
        self._is_complete = False

    def add(self, seen: ModelEvent) -> None:
        """Take the next event."""
        if isinstance(seen, TextDelta):
            self._add_text(seen.text)
        elif isinstance(seen, ToolCallRequested):
            self._add_call(seen.call)
        elif isinstance(seen, UsageReported):
            self._usage = seen
        elif isinstance(seen, Stopped):
            self._stop, self._is_complete = seen, True
        elif isinstance(seen, ReasoningBlock):
            if len(self._parts) < MAX_REASONING_BLOCKS:
                self._parts.append(seen.part)
            else:
                self._dropped_parts += 1

    @property
    def text(self) -> str:
        """What the model has said so far."""
        return "".join(self._text)

    @property
    def usage(self) -> UsageReported:
        """What the call has used so far."""
        return self._usage

    def answer(self) -> CollectedAnswer:
        """Return the answer as far as it has come."""
        notes = self._notes[:MAX_NOTES]
        if len(self._notes) > MAX_NOTES:
            notes.append(f"{len(self._notes) - MAX_NOTES} other calls had their ids repaired")
        if self._dropped_chars:
            notes.append(
                f"the text was cut at {MAX_TEXT_CHARS} characters; {self._dropped_chars} were dropped"
            )
        if self._dropped_calls:
            notes.append(f"{self._dropped_calls} tool calls beyond what one answer may ask for were dropped")
        if self._dropped_parts:
            notes.append(f"{self._dropped_parts} reasoning blocks beyond {MAX_REASONING_BLOCKS} were dropped")
        text = self.text
        if self._is_complete and not text and not self._calls:
            notes.append("the answer is empty")
        # An answer that we cut is not the whole one, whatever the provider says.
        stop = self._stop.reason
        was_cut = self._dropped_chars and stop in ("end", "tools", "paused")
        used = self._usage
        return CollectedAnswer(
            text,
            tuple(self._calls),
            tuple(self._parts),
            used.usage,
            used.cost_usd,
            used.cache_write_tokens,
            used.model,
            "length" if was_cut else stop,
            self._is_complete,
            tuple(notes),
            self._stop.said,
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
