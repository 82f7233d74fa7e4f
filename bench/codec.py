"""What the codec costs beside pydantic and beside bare JSON, on the same record in the same run."""

from __future__ import annotations

import gc
import json
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Literal

from pydantic import TypeAdapter

from bench.report import Row, Size
from treenail.codec import Codec, TypeRegistry


class Role(Enum):
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True)
class Text:
    text: str
    cached: bool = False


@dataclass(frozen=True)
class Call:
    call_id: str
    name: str
    arguments: dict[str, str]
    status: Literal["pending", "done", "failed"] = "pending"
    error: str | None = None


@dataclass(frozen=True)
class Usage:
    input_tokens: int
    output_tokens: int
    cost_usd: float


@dataclass(frozen=True)
class Message:
    """As long as a message of a conversation usually is: about 1 KB of JSON."""

    message_id: str
    turn_id: str
    role: Role
    created: datetime
    parts: tuple[Text, ...]
    calls: tuple[Call, ...]
    usage: Usage
    tags: list[str]
    parent_id: str | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """A message whose parts are of several types, which each side has to tell apart."""

    note_id: str
    parts: tuple[Text | Call, ...]
    usage: Usage | None = None


MESSAGE = Message(
    message_id="0198c5ac-7f3e-7cc4-9f0e-7c2d4c1a9b55",
    turn_id="turn-000042",
    role=Role.ASSISTANT,
    created=datetime(2026, 3, 14, 15, 9, 26, 535897, tzinfo=UTC),
    parts=(
        Text("I will look at the failing test first, then at the module it covers. " * 2),
        Text("The fixture opens the file twice; the second handle is never closed.", cached=True),
    ),
    calls=tuple(
        Call(
            f"call-{index}",
            "read_file",
            {"path": f"src/package/module_{index}.py", "encoding": "utf-8"},
            "done" if index else "pending",
        )
        for index in range(3)
    ),
    usage=Usage(input_tokens=4_211, output_tokens=388, cost_usd=0.0147),
    tags=["refactoring", "tests", "step-3"],
)

NOTE = Note("note-1", (*MESSAGE.parts, *MESSAGE.calls), MESSAGE.usage)


def rows(size: Size) -> Iterator[Row]:
    """Measure encoding and decoding; each row is a name, our figure, the peer's, the ratio, the target."""
    quick = size.is_small
    codec = Codec(TypeRegistry())
    cases: tuple[tuple[str, Message | Note], ...] = (("message", MESSAGE), ("union", NOTE))
    for name, value in cases:
        peer: TypeAdapter[Message | Note] = TypeAdapter(type(value))
        ours, theirs = codec.encode(value), peer.dump_json(value)
        kind = type(value)
        yield _row(
            f"codec: encode a {len(ours)} byte {name}, beside pydantic",
            lambda value=value: codec.encode(value),
            lambda value=value, peer=peer: peer.dump_json(value),
            quick=quick,
        )
        yield _row(
            f"codec: decode a {len(ours)} byte {name}, beside pydantic",
            lambda kind=kind, ours=ours: codec.decode(kind, ours),
            lambda peer=peer, theirs=theirs: peer.validate_json(theirs),
            quick=quick,
        )
        yield _row(
            f"codec: decode a {len(ours)} byte {name}, beside json.loads",
            lambda kind=kind, ours=ours: codec.decode(kind, ours),
            lambda ours=ours: json.loads(ours),
            quick=quick,
        )


def _row(name: str, ours: Callable[[], object], peer: Callable[[], object], *, quick: bool) -> Row:
    # Many short slices: on a shared machine some of them run undisturbed, and the best one counts.
    number, repeats = 50, 10 if quick else 400
    best_ours = best_peer = float("inf")
    collecting = gc.isenabled()
    gc.disable()  # As timeit does; turn by turn, so that a busy moment of the machine hits both.
    try:
        for _ in range(repeats):
            best_ours = min(best_ours, timeit.timeit(ours, number=number) / number)
            best_peer = min(best_peer, timeit.timeit(peer, number=number) / number)
    finally:
        if collecting:
            gc.enable()
    return Row(name, best_ours * 1e6, best_peer * 1e6, best_ours / best_peer)
