"""From provider-neutral items to what each interface wants, as pure functions.

The items come from `holdfast.conversation.replay` and obey its rules already (paired
calls, unique ids, no empty content), so that nothing has to be decided here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from holdfast.conversation.messages import ContentPart, ImagePart, ReasoningPart
from holdfast.conversation.replay import ReplayItem

Wire = dict[str, Any]


def to_openai_chat(items: Sequence[ReplayItem]) -> list[Wire]:
    """Translate to OpenAI's Chat Completions messages."""
    messages: list[Wire] = []
    for item in items:
        if item.role == "tool":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.text})
        elif item.role == "assistant":
            message: Wire = {"role": "assistant", "content": item.text or None}
            if item.calls:
                message["tool_calls"] = [
                    {
                        "id": call.call_id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in item.calls
                ]
            messages.append(message)
        else:
            images = [_chat_image(part) for part in _images(item.parts)]
            text: Any = item.text if not images else [{"type": "text", "text": item.text}, *images]
            messages.append({"role": item.role, "content": text})
    return messages


def to_openai_responses(items: Sequence[ReplayItem]) -> tuple[str | None, list[Wire]]:
    """Translate to OpenAI's Responses: the instructions, and the input items."""
    instructions: str | None = None
    out: list[Wire] = []
    for item in items:
        if item.role == "system":
            instructions = item.text
        elif item.role == "tool":
            out.append({"type": "function_call_output", "call_id": item.call_id, "output": item.text})
        elif item.role == "assistant":
            out.extend(dict(part.payload) for part in item.parts if isinstance(part, ReasoningPart))
            if item.text:
                out.append({"role": "assistant", "content": [{"type": "output_text", "text": item.text}]})
            out.extend(
                {
                    "type": "function_call",
                    "call_id": call.call_id,
                    "name": call.name,
                    "arguments": call.arguments,
                }
                for call in item.calls
            )
        else:
            content: list[Wire] = [{"type": "input_text", "text": item.text}]
            content.extend(
                {"type": "input_image", "image_url": _image_url(part)} for part in _images(item.parts)
            )
            out.append({"role": "user", "content": content})
    return instructions, out


def to_anthropic(items: Sequence[ReplayItem]) -> tuple[str | None, list[Wire]]:
    """Translate to Anthropic's Messages: the system text, and messages whose roles alternate."""
    system: str | None = None
    messages: list[Wire] = []
    for item in items:
        if item.role == "system":
            system = item.text
            continue
        role = "assistant" if item.role == "assistant" else "user"
        blocks = _anthropic_blocks(item)
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"].extend(blocks)
        else:
            messages.append({"role": role, "content": blocks})
    return system, messages


def _anthropic_blocks(item: ReplayItem) -> list[Wire]:
    if item.role == "tool":
        return [{"type": "tool_result", "tool_use_id": item.call_id, "content": item.text}]
    blocks: list[Wire] = []
    if item.role == "assistant":
        # Thoughts come first, exactly as they were written: their signatures cover them.
        blocks.extend(dict(part.payload) for part in item.parts if isinstance(part, ReasoningPart))
    if item.text:
        blocks.append({"type": "text", "text": item.text})
    blocks.extend(_anthropic_image(part) for part in _images(item.parts))
    blocks.extend(
        {"type": "tool_use", "id": call.call_id, "name": call.name, "input": json.loads(call.arguments)}
        for call in item.calls
    )
    return blocks


def _images(parts: Sequence[ContentPart]) -> list[ImagePart]:
    return [part for part in parts if isinstance(part, ImagePart)]


def _image_url(part: ImagePart) -> str:
    if part.url is not None:
        return part.url
    return f"data:{part.media_type};base64,{base64.b64encode(part.data or b'').decode()}"


def _chat_image(part: ImagePart) -> Wire:
    return {"type": "image_url", "image_url": {"url": _image_url(part)}}


def _anthropic_image(part: ImagePart) -> Wire:
    if part.url is not None:
        return {"type": "image", "source": {"type": "url", "url": part.url}}
    data = base64.b64encode(part.data or b"").decode()
    return {"type": "image", "source": {"type": "base64", "media_type": part.media_type, "data": data}}
