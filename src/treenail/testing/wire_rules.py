"""The rules of the providers' wires, as checks: what a provider would refuse, found without one.

Each function returns the violations it found, in words; an empty list means that the provider
would take the input.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Wire = Mapping[str, Any]

MAX_CHAT_ID_CHARS = 40
"""The longest call id that OpenAI's Chat Completions takes."""


def openai_chat_violations(messages: Sequence[Wire]) -> list[str]:
    """Check OpenAI Chat Completions messages: roles, pairing, order, no empty content."""
    found = [] if messages else ["there is no message"]
    waiting: list[str] = []
    for place, message in enumerate(messages):
        role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
        if role not in ("system", "developer", "user", "assistant", "tool"):
            found.append(f"{place}: the role is {role!r}")
        if role == "system" and place:
            found.append(f"{place}: a system message that is not the first")
        if role == "tool":
            if message.get("tool_call_id") not in waiting:
                found.append(f"{place}: a result that the answer before it did not ask for")
            else:
                waiting.remove(message["tool_call_id"])
        elif waiting:
            found.append(f"{place}: calls without a result before it: {waiting}")
            waiting = []
        if role == "assistant":
            waiting = [call["id"] for call in calls or ()]
            if len(set(waiting)) != len(waiting):
                found.append(f"{place}: an id that is used twice")
            if any(len(each) > MAX_CHAT_ID_CHARS for each in waiting):
                found.append(f"{place}: an id of more than {MAX_CHAT_ID_CHARS} characters")
            found.extend(_argument_violations(place, [call["function"]["arguments"] for call in calls or ()]))
            if not content and not calls:
                found.append(f"{place}: an answer with neither text nor calls")
            if calls is not None and not calls:
                found.append(f"{place}: an empty list of calls")
        elif not content:
            found.append(f"{place}: empty content")
    if waiting:
        found.append(f"at the end: calls without a result: {waiting}")
    return found


def openai_responses_violations(items: Sequence[Wire]) -> list[str]:
    """Check OpenAI Responses input: each output has its call before it, each call its output after it."""
    found = [] if items else ["there is no item"]
    waiting: dict[str, int] = {}
    seen: set[str] = set()
    for place, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "function_call":
            if item["call_id"] in seen:
                found.append(f"{place}: an id that is used twice")
            seen.add(item["call_id"])
            waiting[item["call_id"]] = place
            found.extend(_argument_violations(place, [item["arguments"]]))
        elif kind == "function_call_output":
            if waiting.pop(item["call_id"], None) is None:
                found.append(f"{place}: an output without its call")
            output = item["output"]
            parts = [output] if isinstance(output, str) else [_part_content(part) for part in output]
            if not parts or not all(parts):
                found.append(f"{place}: empty output")
        elif kind == "message":
            said = item["content"]
            parts = [said] if isinstance(said, str) else [_part_content(part) for part in said]
            if not all(parts):
                found.append(f"{place}: empty content")
    if waiting:
        found.append(f"calls without an output: {sorted(waiting)}")
    return found


def anthropic_violations(messages: Sequence[Wire]) -> list[str]:
    """Check Anthropic messages: roles alternate, the user begins, results follow at once and first."""
    found = [] if messages else ["there is no message"]
    if messages and messages[0]["role"] != "user":
        found.append("the first message is not the user's")
    waiting: set[str] = set()
    used: set[str] = set()
    for place, message in enumerate(messages):
        blocks = message["content"]
        if place and messages[place - 1]["role"] == message["role"]:
            found.append(f"{place}: two messages of one role in a row")
        if not blocks:
            found.append(f"{place}: no content")
        results = {block["tool_use_id"] for block in blocks if block["type"] == "tool_result"}
        if message["role"] == "user":
            if results != waiting:
                found.append(f"{place}: results {sorted(results)} for calls {sorted(waiting)}")
            kinds = [block["type"] == "tool_result" for block in blocks]
            if kinds != sorted(kinds, reverse=True):
                found.append(f"{place}: a result behind other content")
            waiting = set()
        else:
            asked = [block["id"] for block in blocks if block["type"] == "tool_use"]
            if used.intersection(asked) or len(set(asked)) != len(asked):
                found.append(f"{place}: a tool_use id that is used twice")
            used.update(asked)
            waiting = set(asked)
        within = [
            each for block in blocks if isinstance(block.get("content"), list) for each in block["content"]
        ]
        if any(block["type"] == "text" and not block["text"].strip() for block in (*blocks, *within)):
            found.append(f"{place}: an empty text block")
        if any("is_error" in block and block["type"] != "tool_result" for block in blocks):
            found.append(f"{place}: only a tool's result can be an error")
    ends = messages[-1]["content"][-1:] if messages and messages[-1]["role"] == "assistant" else []
    if any(block["type"] == "text" and block["text"][-1:].isspace() for block in ends):
        found.append("at the end: an answer that ends with a blank")
    if waiting:
        found.append(f"at the end: calls without a result: {sorted(waiting)}")
    return found


def _part_content(part: Wire) -> object:
    return part.get("text") or part.get("image_url")


def _argument_violations(place: int, arguments: Sequence[str]) -> list[str]:
    found = []
    for text in arguments:
        try:
            ok = isinstance(json.loads(text), dict)
        except ValueError:
            ok = False
        if not ok:
            found.append(f"{place}: arguments that are not a JSON object")
    return found
