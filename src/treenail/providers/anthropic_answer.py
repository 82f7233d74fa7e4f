"""One answer over Anthropic's Messages interface: its raw events in, ours out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from treenail.containment import CallUsage
from treenail.conversation import ReasoningPart
from treenail.providers.base import (
    FinishReason,
    ModelEvent,
    ReasoningBlock,
    ReasoningDelta,
    Stopped,
    TextDelta,
    ToolCallRequested,
    UsageReported,
)
from treenail.providers.vendor import Mender
from treenail.tools import ToolCall

STOPS: Mapping[str, FinishReason] = {
    "end_turn": "end",
    "stop_sequence": "end",
    "tool_use": "tools",
    "pause_turn": "paused",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refused",
}
"""Why a model stopped, in the words of the Messages interface. Any other word is not an end."""


class AnthropicAnswer:
    """Turns the raw events of one answer into ours.

    `used` reports what the answer has used so far; blocks of thought are marked with the model and the
    dialect that wrote them.
    """

    def __init__(self, model: str, dialect: str, used: Callable[..., UsageReported]) -> None:
        self._model = model
        self._dialect = dialect
        self._report = used
        self._block: dict[str, Any] = {}
        self._pieces: list[str] = []
        self._signature: list[str] = []
        self._counts: dict[str, int] = {}
        self._mender = Mender()
        self._thought_mender = Mender()
        self._stop: str | None = None
        self.has_begun = False
        """Whether the vendor has accepted the request."""
        self._is_seen = False
        self._calls = 0
        self.chars = 0
        self.is_cut = False
        """Whether the answer ended without saying that it is whole."""
        self.is_nudged = False
        """Whether the CLI would now call its model again by itself: the answer is cut, paused or empty."""

    def take(self, event: Mapping[str, Any]) -> list[ModelEvent]:
        """Return what an event says."""
        kind = event.get("type")
        if kind == "message_start":
            self.is_cut, self.has_begun = self.has_begun, True
            return [self._used(event["message"].get("usage"))]
        if kind == "content_block_start":
            self._block = dict(event["content_block"])
            self._pieces, self._signature = [], []
            return self._text(self._block.get("text", "")) if self._block.get("type") == "text" else []
        if kind == "content_block_delta":
            return self._delta(event["delta"])
        if kind == "content_block_stop":
            return self._end_of_block()
        if kind == "message_delta":
            self._stop = event["delta"].get("stop_reason") or self._stop
            reason = self._reason()
            is_empty = reason == "end" and not self._is_seen
            self.is_nudged = is_empty or reason in ("length", "paused")
            usage = event.get("usage") or {}
            is_counted = self._stop is not None and usage.get("output_tokens") is not None
            return [self._used(usage, is_final=is_counted)]
        if kind == "message_stop":
            if self._stop is None:
                self.is_cut = True
                return []
            rest: list[ModelEvent] = [TextDelta(text) for text in (self._mender.flush(),) if text]
            return [*rest, Stopped(self._reason(), self._stop)]
        return []

    def _reason(self) -> FinishReason:
        reason = STOPS.get(self._stop or "", "broken_off")
        if reason in ("end", "tools") and self._calls:
            return "tools"
        return "broken_off" if reason == "tools" else reason

    def _text(self, piece: str) -> list[ModelEvent]:
        text = self._mender.feed(piece)
        self._is_seen = self._is_seen or bool(piece.strip())
        self.chars += len(text)
        return [TextDelta(text)] if text else []

    def _delta(self, delta: Mapping[str, Any]) -> list[ModelEvent]:
        kind = delta.get("type")
        if kind == "text_delta":
            return self._text(delta["text"])
        if kind == "thinking_delta":
            self._pieces.append(delta["thinking"])
            thought = self._thought_mender.feed(delta["thinking"])
            return [ReasoningDelta(thought)] if thought else []
        if kind == "signature_delta":
            self._signature.append(delta["signature"])
        elif kind == "input_json_delta":
            self._pieces.append(delta["partial_json"])
        return []

    def _end_of_block(self) -> list[ModelEvent]:
        block, self._block = self._block, {}
        kind = block.get("type")
        if kind == "tool_use":
            self._calls += 1
            text = "".join(self._pieces)
            arguments: Any = text if text.strip() else block.get("input") or "{}"
            call = ToolCall(str(block.get("id") or ""), str(block.get("name") or ""), arguments)
            return [ToolCallRequested(call)]
        payload: dict[str, Any] | None = None
        if kind == "server_tool_use":
            text = "".join(self._pieces)
            payload = {**block, "input": json.loads(text)} if text.strip() else block
        elif kind not in ("text", "thinking", None):
            payload = block  # Such as a result of the vendor's own tools: it belongs to the conversation.
        elif kind == "thinking":
            signature = block.get("signature", "") + "".join(self._signature)
            thinking = block.get("thinking", "") + "".join(self._pieces)
            payload = {**block, "thinking": thinking, "signature": signature} if signature else None
        if payload is None:
            return []
        part = ReasoningPart(self._model, self._dialect, payload, self.chars, self._calls)
        return [ReasoningBlock(part)]

    def _used(self, usage: Mapping[str, Any] | None, *, is_final: bool = False) -> UsageReported:
        """Take over the vendor's numbers: they are running totals, and some may be left out."""
        given = usage or {}
        details = given.get("output_tokens_details") or {}
        for name, value in (
            ("input", given.get("input_tokens")),
            ("output", given.get("output_tokens")),
            ("read", given.get("cache_read_input_tokens")),
            ("written", given.get("cache_creation_input_tokens")),
            ("thinking", details.get("thinking_tokens")),
        ):
            if isinstance(value, int) and value >= 0:
                self._counts[name] = value
        counts = self._counts
        # This vendor reports cached input separately from the rest of the input.
        read, written, output = counts.get("read", 0), counts.get("written", 0), counts.get("output", 0)
        return self._report(
            CallUsage(
                input_tokens=counts.get("input", 0) + read + written,
                output_tokens=output,
                cached_input_tokens=read,
                cache_write_tokens=written,
                reasoning_tokens=min(counts.get("thinking", 0), output),
            ),
            is_final=is_final,
        )
