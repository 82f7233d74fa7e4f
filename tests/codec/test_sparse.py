"""Sparse types leave out what is empty by default, and nothing is lost by it."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.codec import Codec, TypeRegistry, left_out, sparse
from treenail.conversation.events import ProviderUsage
from treenail.conversation.messages import InnerMessage
from treenail.errors import DecodeError
from treenail.state.budget import TokenUsage
from treenail.tools.events import ToolInvoked
from treenail.tools.tool import ToolResult

CODEC = Codec(TypeRegistry())


@sparse
@dataclass(frozen=True, slots=True)
class Thin:
    """A field of each kind that may be left out, and of each kind that may not."""

    name: str
    maybe: str | None = None
    text: str = ""
    count: int = 0
    flag: bool = False
    items: tuple[int, ...] = ()
    anything: Any = None
    share: float = 0.0
    limit: int = 3
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Thick:
    """The same fields, not sparse."""

    name: str
    maybe: str | None = None


empties = st.sampled_from([None, "", 0, False, 0.0, -0.0, (), [], {}, b""])


@given(
    st.builds(
        Thin,
        name=st.text(max_size=2),
        maybe=st.none() | st.text(max_size=2) | empties,
        text=st.text(max_size=2) | empties,
        count=st.integers(-1, 1) | empties,
        flag=st.booleans() | empties,
        items=st.tuples() | st.tuples(st.integers()) | empties,
        anything=empties | st.integers(),
        share=st.floats(-1, 1) | empties,
        limit=st.integers(0, 3),
        tags=st.lists(st.text(max_size=1), max_size=1),
    )
)
def test_what_comes_back_is_what_was_stored(value: Thin) -> None:
    """Type for type, also where an empty value stands that is not the default; and the same each time."""
    payload = CODEC.encode(value)
    back = CODEC.decode(Thin, payload)
    assert repr(back) == repr(value)
    assert CODEC.encode(back) == payload


def test_only_what_is_empty_by_default_is_left_out() -> None:
    """A default that says something is written down: it may change one day."""
    assert json.loads(CODEC.encode(Thin("a"))) == {"name": "a", "share": 0.0, "limit": 3, "tags": []}
    assert left_out(Thin) == {
        "maybe": None,
        "text": "",
        "count": 0,
        "flag": False,
        "items": (),
        "anything": None,
    }


def test_the_order_of_the_fields_stays() -> None:
    """Equal values are equal bytes, whatever is left out."""
    value = Thin("a", count=1, flag=True, share=0.5)
    assert list(json.loads(CODEC.encode(value))) == ["name", "count", "flag", "share", "limit", "tags"]


def test_other_types_are_stored_as_ever() -> None:
    """Nobody's data change their form unless the type asks for it."""
    assert json.loads(CODEC.encode(Thick("a"))) == {"name": "a", "maybe": None}
    assert left_out(Thick) == {}


def test_a_field_without_a_default_is_still_missed() -> None:
    with pytest.raises(DecodeError, match="name"):
        CODEC.decode(Thin, b"{}")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (TokenUsage, "input_tokens output_tokens cached_tokens reasoning_tokens"),
        (ToolResult, "value exclude_value_from_context"),
        (ToolInvoked, "usage call_id run_context attempt_id workspace conflicts hold_id batch_events"),
        (InnerMessage, "tool_calls tool_call_id tool_name turn prompt_ns prompt_key parts is_error"),
        (ProviderUsage, "cost_usd stop_reason input_items prefix_hash output_truncated notes context_tier"),
    ],
)
def test_the_defaults_of_our_own_sparse_types_are_fixed(kind: type, fields: str) -> None:
    """Logs were written without these fields: they mean what is said here, for ever."""
    empty = left_out(kind)
    assert set(fields.split()) <= empty.keys()
    for name in fields.split():
        assert empty[name] in (None, "", 0, ())


OLD = {
    InnerMessage: (
        b'{"role":"tool","content":"read","evaluation_id":"8dea","sequence":25,"tool_calls":[],'
        b'"tool_call_id":"call_12_1","tool_name":"look","turn":12,"prompt_ns":"agents","prompt_key":"bench",'
        b'"created_at":"2026-11-16T00:09:19.184091Z","message_id":"af4a2ea8-bc6c-42fa-a12e-f05a02546670",'
        b'"parts":[],"is_error":false}'
    ),
    ToolInvoked: (
        b'{"prompt_name":"bench","adapter":"scripted","name":"look","params":{"place":"here"},"result":'
        b'{"message":"read","value":null,"success":true,"exclude_value_from_context":false},"session_id":'
        b'"ba877dd0-59cf-48cc-9f2a-562e2b77d108","created_at":"2026-11-16T00:09:19.184141Z","usage":null,'
        b'"call_id":"call_12_1","run_context":null,"event_id":"456f248a-17b3-49ec-8698-22a33c9410f4",'
        b'"attempt_id":"d41d5bbe5cf1454bb871893a6614f1e8","outcome":"ok","elapsed_ms":0.233,"workspace":null,'
        b'"conflicts":[],"hold_id":"","batch_events":1}'
    ),
    ProviderUsage: (
        b'{"provider":"scripted","model":"scripted","call_index":13,"usage":{"input_tokens":100,'
        b'"output_tokens":20,"cached_tokens":null,"reasoning_tokens":null},"cost_usd":null,"stop_reason":'
        b'"tools","input_items":26,"prefix_hash":"281c","extends_previous":true,"output_truncated":false,'
        b'"notes":[],"purpose":"answer","context_tier":"","context_ratio":null}'
    ),
}
"""Events as they were stored before any type was sparse."""


@pytest.mark.parametrize("kind", OLD)
def test_what_was_stored_in_full_is_read_as_the_same(kind: type) -> None:
    """A log of an older version opens, and its events are those that would be written now."""
    old = CODEC.decode(kind, OLD[kind])
    new = CODEC.encode(old)
    assert len(new) < len(OLD[kind])
    assert CODEC.decode(kind, new) == old
    written, stored = json.loads(OLD[kind]), json.loads(new)
    assert {name: written[name] for name in stored if name not in ("usage", "result")} == {
        name: stored[name] for name in stored if name not in ("usage", "result")
    }
