"""Sparse types leave out what is empty by default, and nothing is lost by it."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.codec import Codec, TypeRegistry, sparse
from treenail.errors import DecodeError

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
    """A default that says something is written down: it may change one day. The order of fields stays."""
    assert json.loads(CODEC.encode(Thin("a"))) == {"name": "a", "share": 0.0, "limit": 3, "tags": []}
    value = Thin("a", count=1, flag=True, share=0.5)
    assert list(json.loads(CODEC.encode(value))) == ["name", "count", "flag", "share", "limit", "tags"]


def test_a_field_without_a_default_is_still_missed() -> None:
    """Only a default can stand for a field that is not stored."""
    with pytest.raises(DecodeError, match="name"):
        CODEC.decode(Thin, b"{}")
