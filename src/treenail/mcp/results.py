"""What a server answers, as a tool's result: text, pictures, links, embedded files, structured content."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any

import mcp_types as wire

from treenail.tools import ToolResult

MAX_RESULT_CHARS = 4_000_000
"""How much text one result may have. A longer one fails the call."""


class Shown(tuple[bytes, ...]):
    """Pictures, with the text that belongs to them."""

    text: str

    def render(self) -> str:
        """Return the text that the model reads beside the pictures."""
        return self.text


def result_of(tool: str, answer: wire.CallToolResult) -> ToolResult[Any]:
    """Turn a server's answer into a result. Nothing is left out in silence."""
    texts: list[str] = []
    pictures: list[bytes] = []
    for each in answer.content:
        _add(each, texts, pictures)
    structured = answer.structured_content
    if structured is not None and not any(_is_same(each, structured) for each in texts):
        texts.append(json.dumps(structured, ensure_ascii=False))
    text = "\n".join(texts)
    if len(text) > MAX_RESULT_CHARS:
        what = "failed, and" if answer.is_error else "has run, but"
        return ToolResult.error(
            f"{tool} {what} its result has {len(text):,} characters, and at most {MAX_RESULT_CHARS:,} are "
            "taken. Ask for less."
        )
    if answer.is_error:
        return ToolResult.error(text or f"{tool} failed, and the server did not say why.")
    if not pictures:
        return ToolResult.ok(message=text or "(no output)")
    shown = Shown(pictures)
    counted = f"({len(pictures)} picture{'s' if len(pictures) > 1 else ''})"
    shown.text = f"{text}\n{counted}" if text else counted
    return ToolResult.ok(shown, message=shown.text)


def _add(block: wire.ContentBlock, texts: list[str], pictures: list[bytes]) -> None:
    match block:
        case wire.TextContent():
            texts.append(block.text)
        case wire.ImageContent():
            _add_bytes(block.data, block.mime_type, "", texts, pictures)
        case wire.AudioContent():
            texts.append(f"(audio, {block.mime_type}, which cannot be shown)")
        case wire.ResourceLink():
            about = ", ".join(each for each in (block.mime_type, block.description) if each)
            texts.append(f"[{block.title or block.name}]({block.uri})" + (f" ({about})" if about else ""))
        case wire.EmbeddedResource():
            held = block.resource
            if isinstance(held, wire.TextResourceContents):
                texts.append(f"{held.uri}:\n{held.text}")
            else:
                _add_bytes(held.blob, held.mime_type or "", f"{held.uri}: ", texts, pictures)


def _add_bytes(encoded: str, kind: str, label: str, texts: list[str], pictures: list[bytes]) -> None:
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        texts.append(f"({label}{kind}: the server sent something that is not base64)")
        return
    if ToolResult.ok(data).pictures():
        pictures.append(data)
    else:
        texts.append(f"({label}{len(data):,} bytes, {kind or 'of an unknown kind'}, which cannot be shown)")


def _is_same(text: str, structured: Any) -> bool:
    """Say whether a text is the structured content, which servers send a second time as text."""
    if isinstance(structured, dict) and list(structured.values()) == [text]:
        return True
    try:
        return bool(json.loads(text) == structured)
    except ValueError:
        return False


def messages_as_text(messages: Sequence[wire.SamplingMessage]) -> str:
    """Write the messages of a sampling request as one text. Raises `ValueError` for what is not text."""
    parts: list[str] = []
    for message in messages:
        blocks = message.content if isinstance(message.content, list) else [message.content]
        for each in blocks:
            if not isinstance(each, wire.TextContent):
                raise ValueError(f"a message has {each.type} content, and only text is passed on")
            label = "" if len(messages) == 1 else f"{message.role}: "
            parts.append(label + each.text)
    return "\n\n".join(parts)
