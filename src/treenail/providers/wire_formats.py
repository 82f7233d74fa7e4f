"""The request formats of each interface, made from provider-neutral items by pure functions.

The items come from `treenail.conversation.replay` and obey its rules already (paired calls,
unique ids, no empty content). What is left is what one interface accepts and another refuses:
names and ids with odd characters (a model invented them, or another provider wrote them),
lone surrogates, arguments that are not standard JSON, blank text. Each is replaced by an
accepted form that depends on nothing else, so that the same log still gives the same bytes.

Reasoning blocks are sent back in their place: a signature covers a block, and a provider
checks that blocks and calls are in the order in which it wrote them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treenail.conversation import EMPTY_TEXT, ContentPart, ImagePart, ReasoningPart, ReplayCall, ReplayItem
from treenail.tools import Tool

Wire = dict[str, Any]
"""A JSON object, as it is sent."""

MAX_WIRE_ID_CHARS = 64
"""The longest call id or tool name that most interfaces accept."""

MAX_CHAT_ID_CHARS = 40
"""The longest call id that Chat Completions accepts."""

RESULT_IMAGES_TEXT = "The pictures of the results above:"
"""Introduces pictures that an interface does not accept inside a tool's result."""

PHASE_KEY = "treenail.phase"
"""Marks a part that is not reasoning: it keeps the vendor's phase of the text that follows."""

_WIRE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_STRICT_KEYWORDS = frozenset(
    {
        "$defs", "$ref", "additionalProperties", "anyOf", "const", "description", "enum", "items",
        "properties", "required", "title", "type",
    }
)  # fmt: skip


# --- OpenAI Chat Completions ---------------------------------------------------------------------------


def to_openai_chat(items: Sequence[ReplayItem]) -> list[Wire]:
    """Translate to OpenAI's Chat Completions messages.

    A result is text there. Pictures of results follow in a separate message after all results of an
    answer, because nothing may come between those. Results are in the order of their calls: some servers
    ignore ids and match them by position.
    """
    messages: list[Wire] = []
    shown: list[ImagePart] = []
    for item in _in_call_order(items):
        text = clean(item.text)
        if item.role == "tool":
            call_id = wire_id(item.call_id or "", MAX_CHAT_ID_CHARS)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
            shown.extend(_images(item.parts))
            continue
        _show(messages, shown)
        if item.role == "assistant":
            message: Wire = {"role": "assistant", "content": text or None}
            for part in _reasoning(item.parts):
                message.update(part.payload)
            if item.calls:
                message["tool_calls"] = [
                    {
                        "id": wire_id(call.call_id, MAX_CHAT_ID_CHARS),
                        "type": "function",
                        "function": {"name": wire_name(call.name), "arguments": json_arguments(call)},
                    }
                    for call in item.calls
                ]
            messages.append(message)
        else:
            images = [_chat_image(part) for part in _images(item.parts)]
            content: Any = text if not images else [{"type": "text", "text": text}, *images]
            messages.append({"role": item.role, "content": content})
    _show(messages, shown)
    return messages


def _in_call_order(items: Sequence[ReplayItem]) -> Iterator[ReplayItem]:
    """Yield a conversation with the results of each answer in the order of its calls."""
    places: dict[str | None, int] = {}
    results: list[ReplayItem] = []
    for item in items:
        if item.role == "tool":
            results.append(item)
            continue
        if results:
            yield from sorted(results, key=lambda result: places.get(result.call_id, len(places)))
            results = []
        if item.role == "assistant":
            places = {call.call_id: place for place, call in enumerate(item.calls)}
        yield item
    yield from sorted(results, key=lambda result: places.get(result.call_id, len(places)))


def _show(messages: list[Wire], shown: list[ImagePart]) -> None:
    """Add a message with the pictures that tools have returned, if there are any."""
    if shown:
        said = {"type": "text", "text": RESULT_IMAGES_TEXT}
        messages.append({"role": "user", "content": [said, *map(_chat_image, shown)]})
        shown.clear()


def chat_tools(tools: Sequence[Tool[Any, Any]]) -> list[Wire]:
    """Describe tools to OpenAI's Chat Completions."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters_schema),
            },
        }
        for tool in tools
    ]


# --- OpenAI Responses ----------------------------------------------------------------------------------


def to_openai_responses(items: Sequence[ReplayItem]) -> tuple[str | None, list[Wire]]:
    """Translate to OpenAI's Responses: the instructions, and the input items."""
    instructions: str | None = None
    out: list[Wire] = []
    for item in items:
        if item.role == "system":
            instructions = clean(item.text)
        elif item.role == "tool":
            said: Any = clean(item.text)
            if images := _images(item.parts):
                said = [{"type": "input_text", "text": said}, *map(_responses_image, images)]
            output = {"type": "function_call_output", "call_id": wire_id(item.call_id or "")}
            out.append({**output, "output": said})
        elif item.role == "assistant":
            out.extend(_responses_answer(item))
        else:
            content: list[Wire] = [{"type": "input_text", "text": clean(item.text)}]
            content.extend(map(_responses_image, _images(item.parts)))
            out.append({"role": "user", "content": content})
    return instructions, out


def _responses_answer(item: ReplayItem) -> Iterator[Wire]:
    phase: object = None
    for piece in _in_order(item):
        if isinstance(piece, str):
            message: Wire = {"role": "assistant", "content": [{"type": "output_text", "text": clean(piece)}]}
            yield message if phase is None else {**message, "phase": phase}
        elif isinstance(piece, ReplayCall):
            yield {
                "type": "function_call",
                "call_id": wire_id(piece.call_id),
                "name": wire_name(piece.name),
                "arguments": json_arguments(piece),
            }
        elif PHASE_KEY in piece.payload:
            phase = piece.payload[PHASE_KEY]
        else:
            yield dict(piece.payload)


def responses_tools(tools: Sequence[Tool[Any, Any]]) -> list[Wire]:
    """Describe tools to OpenAI's Responses."""
    return [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters_schema),
            # Strict mode accepts only a part of JSON schema; arguments are validated here anyway.
            "strict": False,
        }
        for tool in tools
    ]


def fits_strict(schema: Mapping[str, Any]) -> bool:
    """Say whether a schema uses only the part of JSON schema that OpenAI's strict mode accepts."""
    if schema.keys() - _STRICT_KEYWORDS:
        return False
    if "properties" in schema or schema.get("type") == "object":
        names = schema.get("properties", {}).keys()
        if schema.get("additionalProperties") is not False or set(schema.get("required", ())) != set(names):
            return False
    below = [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values()]
    below += [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])]
    return all(isinstance(each, Mapping) and fits_strict(each) for each in below)


# --- Anthropic Messages --------------------------------------------------------------------------------


def to_anthropic(items: Sequence[ReplayItem]) -> tuple[str | None, list[Wire]]:
    """Translate to Anthropic's Messages: the system text, and messages whose roles alternate."""
    system: str | None = None
    messages: list[Wire] = []
    for item in items:
        if item.role == "system":
            system = _not_blank(clean(item.text))
            continue
        role = "assistant" if item.role == "assistant" else "user"
        blocks = _anthropic_blocks(item)
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"].extend(blocks)
        else:
            messages.append({"role": role, "content": blocks})
    return system, messages


def _anthropic_blocks(item: ReplayItem) -> list[Wire]:
    text = clean(item.text)
    if item.role == "tool":
        said: Any = _not_blank(text)
        if images := anthropic_images(item.parts):
            said = [{"type": "text", "text": said}, *images]
        result: Wire = {"type": "tool_result", "tool_use_id": wire_id(item.call_id or ""), "content": said}
        return [{**result, "is_error": True} if item.is_error else result]
    if item.role == "user":
        return [{"type": "text", "text": _not_blank(text)}, *anthropic_images(item.parts)]
    blocks: list[Wire] = []
    for piece in _in_order(item):
        if isinstance(piece, str):
            # A blank block is refused, and carries no information.
            if piece.strip():
                blocks.append({"type": "text", "text": clean(piece)})
        elif isinstance(piece, ReplayCall):
            block = {"type": "tool_use", "id": wire_id(piece.call_id), "name": wire_name(piece.name)}
            blocks.append({**block, "input": json.loads(json_arguments(piece))})
        else:
            blocks.append(dict(piece.payload))
    return blocks or [{"type": "text", "text": EMPTY_TEXT}]


def anthropic_tools(tools: Sequence[Tool[Any, Any]]) -> list[Wire]:
    """Describe tools to Anthropic's Messages."""
    return [
        {"name": tool.name, "description": tool.description, "input_schema": dict(tool.parameters_schema)}
        for tool in tools
    ]


def mark_cached(system: str | None, messages: Sequence[Wire]) -> tuple[list[Wire], list[Wire]]:
    """Mark the prefix for Anthropic's cache: the system text with the tools, and the conversation so far.

    The end of the previous request is marked as well: the provider looks back only a few blocks for a
    cached prefix, and an answer with many calls is longer than that.
    """
    mark = {"cache_control": {"type": "ephemeral"}}
    marked = [{"type": "text", "text": system, **mark}] if system else []
    asked = [place for place, message in enumerate(messages) if message["role"] == "user"][-2:]
    out = list(messages)
    for place in asked:
        *before, last = out[place]["content"]
        out[place] = {**out[place], "content": [*before, {**last, **mark}]}
    return marked, out


# --- what they share -----------------------------------------------------------------------------------


def present(**fields: Any) -> Wire:
    """Return the fields of a request that have a value: neither None nor an empty list."""
    return {name: value for name, value in fields.items() if value is not None and value != []}


def clean(text: str) -> str:
    """Return text that can be sent: split surrogate pairs are joined, lone surrogates replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def wire_name(name: str) -> str:
    """Return a tool name that every interface accepts; the model may have invented one."""
    if _WIRE_NAME.fullmatch(name):
        return name
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:MAX_WIRE_ID_CHARS] or "unnamed"


def wire_id(call_id: str, longest: int = MAX_WIRE_ID_CHARS) -> str:
    """Return a call id that the interface accepts; an odd or long one becomes its hash: pairs stay pairs."""
    if _WIRE_NAME.fullmatch(call_id) and len(call_id) <= longest:
        return call_id
    return "call_" + hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def json_arguments(call: ReplayCall) -> str:
    """Return a call's arguments as standard JSON; `{}` for invalid ones: the model saw the error."""
    try:
        data = json.loads(call.arguments)
        # NaN, infinity and lone surrogates pass `loads` and fail `dumps`.
        json.dumps(data, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return "{}"
    return call.arguments if isinstance(data, dict) else "{}"


def _in_order(item: ReplayItem) -> Iterator[str | ReplayCall | ReasoningPart]:
    """Yield an answer's text, calls and reasoning in the order in which the model wrote them.

    A block records how much text and how many calls came before it. Otherwise text comes before calls.
    """
    text_at = calls_at = 0
    for part in _reasoning(item.parts):
        if part.after_text > text_at:
            if piece := item.text[text_at : part.after_text]:
                yield piece
            text_at = part.after_text
        yield from item.calls[calls_at : part.after_calls]
        calls_at = max(calls_at, part.after_calls)
        yield part
    if rest := item.text[text_at:]:
        yield rest
    yield from item.calls[calls_at:]


def _reasoning(parts: Sequence[ContentPart]) -> list[ReasoningPart]:
    return [part for part in parts if isinstance(part, ReasoningPart)]


def _images(parts: Sequence[ContentPart]) -> list[ImagePart]:
    return [part for part in parts if isinstance(part, ImagePart)]


def _not_blank(text: str) -> str:
    return text if text.strip() else EMPTY_TEXT


def _image_url(part: ImagePart) -> str:
    if part.url is not None:
        return part.url
    return f"data:{part.media_type};base64,{base64.b64encode(part.data or b'').decode()}"


def _chat_image(part: ImagePart) -> Wire:
    return {"type": "image_url", "image_url": {"url": _image_url(part)}}


def _responses_image(part: ImagePart) -> Wire:
    return {"type": "input_image", "image_url": _image_url(part)}


def anthropic_images(parts: Sequence[ContentPart]) -> list[Wire]:
    """Write the pictures among some parts as Anthropic's blocks."""
    return [_anthropic_image(part) for part in _images(parts)]


def _anthropic_image(part: ImagePart) -> Wire:
    if part.url is not None:
        return {"type": "image", "source": {"type": "url", "url": part.url}}
    data = base64.b64encode(part.data or b"").decode()
    return {"type": "image", "source": {"type": "base64", "media_type": part.media_type, "data": data}}
