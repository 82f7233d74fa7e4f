"""Depth, circles, full stacks and many threads."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from codec_zoo import Box, Everything, Node, Numbers, Slotted, same

from treenail.codec import Codec, TypeRegistry, parse_json
from treenail.codec.text import MAX_DEPTH
from treenail.errors import DecodeError, EncodeError


@pytest.fixture
def codec() -> Codec:
    return Codec(TypeRegistry())


def nested(wrap: Callable[[Any], Any], depth: int, inner: Any = None) -> Any:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


WRAPS: dict[str, Callable[[Any], Any]] = {
    "list": lambda inner: [inner],
    "dict": lambda inner: {"k": inner},
    "tuple": lambda inner: (inner,),
    "record": lambda inner: Box(inner),
    "typed record": lambda inner: Slotted(1, (inner,) if inner else ()),
    "model": lambda inner: Numbers.model_construct(inner),
    "pairs": lambda inner: {1: inner},
}


@pytest.mark.parametrize("kind", WRAPS)
@pytest.mark.parametrize("depth", [400, 10_000])
def test_too_deep_is_a_clean_refusal(codec: Codec, kind: str, depth: int) -> None:
    """A value nested beyond the bound is refused when it is encoded."""
    value = Box(nested(WRAPS[kind], depth))
    with pytest.raises(EncodeError, match="deeper"):
        codec.encode(value)
    with pytest.raises(EncodeError, match="deeper"):
        codec.to_data(value)


def test_a_circle_is_a_clean_refusal(codec: Codec) -> None:
    """A value that contains itself is refused, through lists, dicts and records."""
    items: list[Any] = []
    items.append({"k": items})
    node = Node(1)
    node.children.append(node)
    for value in (Box(items), node):
        with pytest.raises(EncodeError, match="contains itself"):
            codec.encode(value)


@pytest.mark.parametrize("kind", WRAPS)
@pytest.mark.parametrize("text", ["plain", "\ud800"])
def test_what_was_accepted_can_be_read(codec: Codec, kind: str, text: str) -> None:
    """The deepest value that is accepted loads."""
    payload = _deepest(codec.encode, lambda depth: Box([text, nested(WRAPS[kind], depth)]))
    assert codec.encode(codec.decode(Box, payload)) == payload
    data = _deepest(codec.to_data, lambda depth: [text, nested(WRAPS[kind], depth)])
    assert codec.to_data(codec.from_data(data)) == data


def _deepest(encode: Callable[[Any], Any], build: Callable[[int], Any]) -> Any:
    """Return what the deepest value that is accepted is encoded to."""
    for depth in range(MAX_DEPTH, 60, -1):
        try:
            return encode(build(depth))
        except EncodeError:
            continue
    raise AssertionError("nothing of more than sixty levels was accepted")


def test_a_full_stack_is_a_clean_refusal(codec: Codec) -> None:
    """Where the caller's stack has no room for the work, the value is refused with our error."""
    value = Box(nested(WRAPS["list"], 100))
    payload = codec.encode(value)
    room = sys.getrecursionlimit() - _frames() - 60
    with pytest.raises(EncodeError, match="deeper"):
        _at_depth(room, lambda: codec.encode(value))
    with pytest.raises(DecodeError, match="deep"):
        _at_depth(room, lambda: codec.decode(Box, payload))
    assert codec.decode(Box, payload) == value


def test_the_bound_is_on_the_stored_form(codec: Codec) -> None:
    """Exactly `MAX_DEPTH` levels of arrays and objects are stored, and one more is not."""
    for text in ("plain", "\ud800"):
        assert codec.to_data(nested(WRAPS["list"], MAX_DEPTH, text))
        with pytest.raises(EncodeError, match=str(MAX_DEPTH)):
            codec.to_data(nested(WRAPS["list"], MAX_DEPTH + 1, text))


def _frames() -> int:
    frame, count = sys._getframe(), 0
    while frame.f_back is not None:
        frame, count = frame.f_back, count + 1
    return count


def _at_depth(depth: int, work: Callable[[], Any]) -> Any:
    return work() if depth <= 0 else _at_depth(depth - 1, work)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 5_000 + "]" * 5_000])
def test_deep_json_is_a_clean_refusal(codec: Codec, text: str) -> None:
    """JSON nested beyond reason is refused, as text and as data."""
    with pytest.raises(DecodeError):
        parse_json(text)
    with pytest.raises(DecodeError):
        codec.decode(Everything, text)
    with pytest.raises(DecodeError, match="deep"):
        codec.from_data(nested(lambda inner: [inner], 5_000))


@dataclass
class Left:
    right: Right | None = None
    value: int = 0


@dataclass
class Right:
    left: Left | None = None
    everything: Everything | None = None


def test_many_threads_may_be_the_first() -> None:
    """Types that name each other are compiled once and correctly, whoever asks first."""
    values = [
        Left(Right(Left(value=1), Everything(names=["a"]))),
        Right(Left(Right()), Everything(box=Box(3))),
        Everything(node=Node(1, [Node(2)])),
        Slotted(1, (Slotted(2),)),
    ]
    for _ in range(20):
        codec = Codec(TypeRegistry())
        gate = threading.Barrier(8)

        def work(turn: int, codec: Codec = codec, gate: threading.Barrier = gate) -> list[bool]:
            gate.wait()
            mine = values[turn % 4 :] + values[: turn % 4]
            return [
                same(codec.decode(type(each), codec.encode(each)), each)
                and same(codec.from_data(codec.to_data(each)), each)
                for each in mine
            ]

        with ThreadPoolExecutor(8) as pool:
            assert all(all(each) for each in pool.map(work, range(8)))


def test_the_numbers_that_python_can_print_are_stored(codec: Codec) -> None:
    """An integer of four thousand digits is stored as a JSON number; one too long to parse is refused."""
    long = 10**4_199
    assert json.loads(codec.encode(Box(long)))["item"] == long
    for value in (Box(10**4_300), Box([-(10**4_300)])):
        with pytest.raises(EncodeError, match="digits"):
            codec.encode(value)
