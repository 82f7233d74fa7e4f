"""Conversations for tests: short spellings of events, and what a provider would say about their replay."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from treenail.conversation import (
    InnerMessage,
    Replay,
    ReplayItem,
    ToolCallRecord,
    enable_inner_message_recording,
    replay_events,
)
from treenail.providers.wire_formats import to_anthropic, to_openai_chat, to_openai_responses
from treenail.state import Session
from treenail.testing.wire_rules import (
    anthropic_violations,
    openai_chat_violations,
    openai_responses_violations,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def said(
    role: str, content: str = "text", *calls: str, result_of: str | None = None, **fields
) -> InnerMessage:
    return InnerMessage(
        role,
        content,
        "e",
        0,
        tool_calls=tuple(ToolCallRecord(each, "look", "{}") for each in calls),
        tool_call_id=result_of,
        tool_name="look" if result_of else None,
        created_at=NOW,
        **fields,
    )


def asked(call_id: str, name: str = "look", arguments: str = "{}", text: str = "") -> InnerMessage:
    return InnerMessage(
        "assistant", text, "e", 0, tool_calls=(ToolCallRecord(call_id, name, arguments),), created_at=NOW
    )


def fold(*events: object, **options) -> Replay:
    return replay_events(((seq, each, "") for seq, each in enumerate(events, start=1)), **options)


def numbered(events: Sequence[object]) -> list[tuple[int, object, str]]:
    """Give events their places and type names, as a log does."""
    return [(seq, each, f"treenail.{type(each).__name__}") for seq, each in enumerate(events, start=1)]


def sent(replayed: Replay) -> list[bytes]:
    return [each.canonical() for each in replayed.items]


def texts(replayed: Replay) -> list[str]:
    return [f"{each.role}:{each.text}" for each in replayed.items]


def violations(items: Sequence[ReplayItem]) -> list[str]:
    """Say what any provider would refuse an input for."""
    return [
        *openai_chat_violations(to_openai_chat(items)),
        *openai_responses_violations(to_openai_responses(items)[1]),
        *anthropic_violations(to_anthropic(items)[1]),
    ]


def session_of(*events: object) -> Session:
    session = Session()
    enable_inner_message_recording(session)
    for each in events:
        session.dispatch(each)
    return session


def long_conversation(turns: int, *, calls: int = 1, size: int = 20) -> list[InnerMessage]:
    """Requests, each with some rounds of one tool call and an answer."""
    messages = [said("system", "You help.")]
    for turn in range(turns):
        messages.append(said("user", f"request {turn} " + "r" * size))
        for call in range(calls):
            call_id = f"c{turn}-{call}"
            path = f"src/file{turn}.py"
            messages.append(asked(call_id, "read_file", f'{{"path": "{path}"}}'))
            messages.append(said("tool", f"content of {path} " + "x" * size, result_of=call_id))
        messages.append(said("assistant", f"answer {turn}"))
    return messages
