"""The messages to the CLI's model: a whole conversation, or what happened since its newest answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from treenail.conversation import ReplayItem
from treenail.providers.wire_formats import Wire

CONTINUE = "Continue."
"""What the model is told when a cut-off conversation resumes without a new request."""


def whole_conversation(items: Sequence[ReplayItem]) -> str:
    """Tell a conversation to a model that was not there."""
    if len(items) == 1 and items[0].role == "user":
        return items[0].text
    *before, last = items or (ReplayItem("user", CONTINUE),)
    ends_with_request = last.role == "user"
    told = "\n".join(_told(each) for each in (before if ends_with_request else items))
    said = last.text if ends_with_request else CONTINUE
    return f"This conversation began elsewhere. So far:\n<conversation>\n{told}\n</conversation>\n\n{said}"


async def with_pictures(text: str, pictures: Sequence[Wire]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the one message that a text with pictures is."""
    content = [{"type": "text", "text": text}, *pictures]
    yield {"type": "user", "message": {"role": "user", "content": content}, "parent_tool_use_id": None}


def news(items: tuple[ReplayItem, ...]) -> tuple[ReplayItem, ...]:
    """Return what came after the newest answer."""
    answers = [place for place, each in enumerate(items) if each.role == "assistant"]
    return items[answers[-1] + 1 :] if answers else items


def since_newest_answer(new: Sequence[ReplayItem]) -> str:
    """Tell what happened after the newest answer, which the model has given itself."""
    results = "\n".join(_told(each) for each in new if each.role == "tool")
    said = "\n\n".join(each.text for each in new if each.role == "user") or CONTINUE
    if not results:
        return said
    return (
        "The conversation was cut off and resumes now. The real results of the calls of your last answer, "
        f"whatever it says above:\n{results}\n\n{said}"
    )


def _told(item: ReplayItem) -> str:
    if item.role == "tool":
        return f'<result call="{item.call_id}" tool="{item.name or ""}">\n{item.text}\n</result>'
    calls = "".join(
        f'\n<call id="{each.call_id}" tool="{each.name}">{each.arguments}</call>' for each in item.calls
    )
    return f"<{item.role}>\n{item.text}{calls}\n</{item.role}>"
