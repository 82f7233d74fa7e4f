"""The conversation: provider-neutral messages, kept as session history.

A message is an event of its own and an item of the `InnerMessage` slice, which is
history (no rollback removes the request that started a call) and part of every
snapshot (a snapshot holds all that a resume needs). Each one is durable before the
next step is taken. Adding the hundred-thousandth costs what adding the first did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal
from uuid import UUID

from treenail.clock import new_id
from treenail.codec import sparse
from treenail.log import Channel, SlicePolicy
from treenail.state import Append, ReducerContext, Replace, Session, SessionProtocol, Slice, SliceOp, event

Role = Literal["system", "assistant", "user", "tool"]
"""Who speaks in a message."""


@dataclass(frozen=True, slots=True)
class ToolCallRecord:
    """A tool call that the assistant made."""

    call_id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it."""
    status: Literal["pending", "completed", "failed"] = "pending"
    """Whether the call has its result yet. It is derived from the results when messages are read."""


@dataclass(frozen=True, slots=True)
class ImagePart:
    """A picture in a message: its bytes, or where it is."""

    media_type: str
    data: bytes | None = None
    url: str | None = None


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A block of thought that a provider wants back unchanged, and that no other model may see."""

    model: str
    dialect: str
    """The provider's interface that wrote it, such as `anthropic.messages` or `openai.responses`."""
    payload: Mapping[str, object]
    """The block as it came: opaque."""
    after_text: int = 0
    """How many characters of the message's text stand before it: blocks go back in their place."""
    after_calls: int = 0
    """How many of the message's calls stand before it."""


ContentPart = ImagePart | ReasoningPart
"""What a message carries besides its text."""


def _now() -> datetime:
    return datetime.now(UTC)


def with_statuses(messages: tuple[InnerMessage, ...]) -> tuple[InnerMessage, ...]:
    """Return messages whose calls say whether they have their results, and which of them failed."""
    waiting: dict[tuple[str, str], deque[tuple[int, int]]] = {}
    ended: dict[int, dict[int, Literal["completed", "failed"]]] = {}
    for index, each in enumerate(messages):
        for place, call in enumerate(each.tool_calls):
            waiting.setdefault((each.evaluation_id, call.call_id), deque()).append((index, place))
        if each.role == "tool" and each.tool_call_id is not None:
            # A provider may use a call id again in a later answer: a result settles one call.
            asked = waiting.get((each.evaluation_id, each.tool_call_id))
            if asked:
                index_of_call, place = asked.popleft()
                ended.setdefault(index_of_call, {})[place] = "failed" if each.is_error else "completed"
    if not ended:
        return messages
    read = list(messages)
    for index, ends in ended.items():
        calls = enumerate(read[index].tool_calls)
        told = tuple(replace(call, status=ends.get(place, call.status)) for place, call in calls)
        read[index] = replace(read[index], tool_calls=told)
    return tuple(read)


@event(
    name="treenail.InnerMessage",
    channel=Channel.REPLAY,
    policy=SlicePolicy.LOG,
    captured=True,
    read=with_statuses,
)
@sparse
@dataclass(frozen=True, slots=True)
class InnerMessage:
    """One message of a conversation."""

    role: Role
    content: str
    evaluation_id: str
    """Groups the messages of one `evaluate()`."""
    sequence: int
    """The place within the evaluation: the system message is 0."""
    tool_calls: tuple[ToolCallRecord, ...] = ()
    """What an assistant message asks for."""
    tool_call_id: str | None = None
    """For a tool's message: which call it answers."""
    tool_name: str | None = None
    turn: int = 0
    """The provider's round trip; grows with each assistant message."""
    prompt_ns: str = ""
    prompt_key: str = ""
    created_at: datetime = field(default_factory=_now)
    message_id: UUID = field(default_factory=new_id)
    parts: tuple[ContentPart, ...] = ()
    """Pictures and blocks of thought, carried and not flattened into text."""
    is_error: bool = False
    """For a tool's message: whether the call failed. Some interfaces tell the model in a field of its own."""
    is_follow_up: bool = False
    """For a user's message: whether a person sent it while the turn was under way."""


def _message_id(message: InnerMessage) -> object:
    return message.message_id


def _evaluation(message: InnerMessage) -> object:
    return message.evaluation_id


def inner_message_append(
    slice_values: Sequence[InnerMessage],
    event: InnerMessage,
    *,
    context: ReducerContext | None = None,
) -> SliceOp[InnerMessage] | Sequence[InnerMessage]:
    """Add a message in its place: evaluations by the time of their first message, then by sequence.

    An identical message is ignored; one with the same id and other content takes the old one's
    place. Given a plain tuple it returns the new tuple, given a slice it returns an operation.
    """
    if not isinstance(slice_values, Slice):
        return in_order((*(m for m in slice_values if m.message_id != event.message_id), event))
    last = slice_values.latest()
    if last is None:
        return Append(event)
    is_next = last.evaluation_id == event.evaluation_id and last.sequence < event.sequence
    if is_next and last.created_at < event.created_at:
        return Append(event)  # It is new: another version of a message has that one's time.
    known = slice_values.find(_message_id, event.message_id)
    if known is not None:
        if slice_values[known] == event:
            return slice_values
        return Replace(in_order(m if m.message_id != event.message_id else event for m in slice_values))
    if last.evaluation_id == event.evaluation_id:
        in_place = last.sequence <= event.sequence
    else:
        # The first message of a newer evaluation; anything else belongs further up.
        is_new = slice_values.find(_evaluation, event.evaluation_id) is None
        in_place = is_new and last.created_at <= event.created_at
    return Append(event) if in_place else Replace(in_order((*slice_values, event)))


def in_order(messages: Iterable[InnerMessage]) -> tuple[InnerMessage, ...]:
    """Sort messages: evaluations by the time of their first message, ties by the order of arrival."""
    items = list(messages)
    first: dict[str, InnerMessage] = {}
    arrival: dict[str, int] = {}
    for each in items:
        arrival.setdefault(each.evaluation_id, len(arrival))
        held = first.get(each.evaluation_id)
        if held is None or each.sequence < held.sequence:
            first[each.evaluation_id] = each
    return tuple(
        sorted(
            items,
            key=lambda m: (first[m.evaluation_id].created_at, arrival[m.evaluation_id], m.sequence),
        )
    )


def enable_inner_message_recording(session: Session) -> None:
    """Keep a session's messages in order. Calling it again changes nothing."""
    session[InnerMessage].register(InnerMessage, inner_message_append)


def get_inner_messages(
    session: SessionProtocol, evaluation_id: str | None = None
) -> tuple[InnerMessage, ...]:
    """Return the conversation, or that of one evaluation, in order."""
    messages = session.select_all(InnerMessage)
    if evaluation_id is not None:
        messages = tuple(m for m in messages if m.evaluation_id == evaluation_id)
    return in_order(messages)


def get_latest_evaluation_id(session: SessionProtocol) -> str | None:
    """Return the id of the evaluation that began last, or None."""
    beginnings: dict[str, InnerMessage] = {}
    for each in session.select_all(InnerMessage):
        held = beginnings.get(each.evaluation_id)
        if held is None or each.sequence < held.sequence:
            beginnings[each.evaluation_id] = each
    if not beginnings:
        return None
    # Later in the slice wins a tie of times.
    newest = max(enumerate(beginnings.values()), key=lambda pair: (pair[1].created_at, pair[0]))
    return newest[1].evaluation_id


def get_pending_tool_calls(session: SessionProtocol, evaluation_id: str) -> tuple[ToolCallRecord, ...]:
    """Return the calls of an evaluation that have no result yet, derived from the results."""
    pending: list[ToolCallRecord] = []
    for message in get_inner_messages(session, evaluation_id):
        if message.role == "assistant":
            pending.extend(message.tool_calls)
        elif message.role == "tool":
            # A provider may use a call id again in a later answer: a result settles one call.
            for index, call in enumerate(pending):
                if call.call_id == message.tool_call_id:
                    del pending[index]
                    break
    return tuple(pending)
