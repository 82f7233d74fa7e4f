"""What sessions cost: dispatching, snapshots, opening and importing, each beside a floor in the same run.

Turns of both sides alternate and the best of each counts, so that a busy moment of the machine does not
decide.
"""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal
from uuid import UUID, uuid4

from bench.report import Row, Size
from treenail.codec import codec
from treenail.log import Log, MemoryLog, SlicePolicy
from treenail.log.sqlite import SqliteLog
from treenail.state import Append, Replace, Session, event

MOMENT = datetime(2026, 3, 14, 15, 9, 26, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Call:
    call_id: str
    name: str
    arguments: str
    status: Literal["pending", "completed", "failed"] = "pending"


@event(name="bench.Message", policy=SlicePolicy.LOG, captured=True)
@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation, about 1 KB when it is stored."""

    role: Literal["system", "assistant", "user", "tool"]
    content: str
    evaluation_id: str
    sequence: int
    tool_calls: tuple[Call, ...] = ()
    created_at: datetime = MOMENT
    message_id: UUID = field(default_factory=uuid4)


@dataclass(frozen=True, slots=True)
class Progress:
    """Working state that a reducer makes of each message."""

    messages: int
    characters: int


def append_message(slice_: object, event: Message) -> Append[Message]:
    return Append(event)


def count_message(slice_: tuple[Progress, ...], event: Message) -> Replace[Progress]:
    last = slice_[-1] if slice_ else Progress(0, 0)
    return Replace((Progress(last.messages + 1, last.characters + len(event.content)),))


TEXT = "The fixture opens the file twice; the second handle is never closed. " * 10
CALLS = (Call("call-1", "read_file", '{"path": "src/package/module.py"}'),)


def messages(count: int) -> list[Message]:
    return [Message("assistant", TEXT, "evaluation", number, CALLS) for number in range(count)]


def equipped(session: Session) -> Session:
    session[Message].register(Message, append_message)
    session[Progress].register(Message, count_message)
    return session


def rows(size: Size) -> Iterator[Row]:
    """Measure sessions; each row is a name, our figure, the floor's, the ratio, the target."""
    quick = size.is_small
    yield from _dispatching(quick)
    yield from _snapshots(quick)
    yield from _opening(quick)
    yield from _importing(quick)


# --- dispatch -------------------------------------------------------------------------------------------


def _dispatching(quick: bool) -> Iterator[Row]:
    for count in (10, 1_000) if quick else (10, 1_000, 100_000):
        first = last = float("inf")
        for _ in range(2 if quick else 200 if count == 10 else 8 if count == 1_000 else 2):
            one, other = _ends_of_a_run(count)
            first, last = min(first, one), min(last, other)
        yield Row(f"dispatch: event {count:,} beside the first ones, us", last, first, last / first, 1.2)


def _ends_of_a_run(count: int) -> tuple[float, float]:
    """Dispatch so many events. Returns microseconds per event in the first and in the last tenth."""
    made = messages(count)
    session = equipped(Session())
    session.dispatch(Message("user", TEXT, "warm", 0))
    tenth = max(count // 10, 1)
    took = []
    for start in (0, count - tenth):
        if start:
            for each in made[tenth:start]:
                session.dispatch(each)
        # Short stretches: the best of them was not disturbed by others, and each has what it costs
        # on average, because a stored snapshot is written at every doubling only.
        best = float("inf")
        stretch = min(tenth, 100)
        for begin in range(start, start + tenth, stretch):
            part = made[begin : begin + stretch]
            before = time.perf_counter()
            for each in part:
                session.dispatch(each)
            best = min(best, (time.perf_counter() - before) / len(part))
        took.append(best * 1e6)
    return took[0], took[1]


# --- snapshots ------------------------------------------------------------------------------------------


def _snapshots(quick: bool) -> Iterator[Row]:
    sizes = (100, 1_000 if quick else 100_000)
    sessions = []
    for size in sizes:
        session = equipped(Session())
        made = messages(1) * size
        for start in range(0, size, 1_000):
            session.dispatch_all(made[start : start + 1_000])
        sessions.append(session)
    small, large = _best_of(
        lambda: sessions[0].snapshot(include_all=True),
        lambda: sessions[1].snapshot(include_all=True),
        times=20 if quick else 2_000,
    )
    yield Row(f"session snapshot: {sizes[1]:,} items beside {sizes[0]}, us", large, small, large / small, 1.2)


# --- opening --------------------------------------------------------------------------------------------


def _opening(quick: bool) -> Iterator[Row]:
    count = 1_000 if quick else 10_000
    with tempfile.TemporaryDirectory() as folder:
        logs: dict[str, Log] = {
            "memory": MemoryLog(heartbeat=False),
            "sqlite": SqliteLog(Path(folder) / "log.db", synchronous="NORMAL"),
        }
        for name, log in logs.items():
            with equipped(Session(log=log)) as session:
                made = messages(count)
                for start in range(0, count, 100):
                    session.dispatch_all(made[start : start + 100])
            ours, floor = _best_of(
                lambda log=log, session=session: _open(log, session.session_id),
                lambda log=log, session=session: _read_and_decode(log, session.session_id),
                times=3 if quick else 4,
            )
            yield Row(
                f"open {count:,} messages in {name} beside reading and decoding them, ms",
                ours / 1e3,
                floor / 1e3,
                ours / floor,
            )
            log.close()


def _open(log: Log, session_id: UUID) -> None:
    session = equipped(Session.open(log, session_id, read_only=True))
    assert session[Progress].latest() is not None
    assert len(session[Message]) > 0


def _read_and_decode(log: Log, session_id: UUID) -> None:
    kept = []
    for envelope in log.read(session_id):
        kept.append(codec.decode(Message, envelope.payload))
    assert kept


# --- import ---------------------------------------------------------------------------------------------

PYDANTIC = "import pydantic\nclass Model(pydantic.BaseModel):\n    name: str"
IMPORTS = (
    "import treenail",
    "from treenail import Session, event",
    "from treenail import Agent, Limits, tool",
)


def _importing(quick: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="treenail-bench-") as place:
        sources = {name: name for name in IMPORTS}
        sources |= {"nothing": "pass", "pydantic": PYDANTIC}
        best = dict.fromkeys(sources, float("inf"))
        for _ in range(1 if quick else 10):
            for name, source in sources.items():
                best[name] = min(best[name], _process(source, place))
    nothing = best["nothing"]
    floor = best["pydantic"] - nothing
    for name in IMPORTS:
        ours = best[name] - nothing
        yield Row(f"{name}: beside pydantic with a BaseModel, ms", ours, floor, ours / floor)


def _process(source: str, cache: str) -> float:
    """Run a fresh interpreter with a cache of compiled files. Returns its milliseconds of processor time."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = cache
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", source], check=True, env=environment, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3


def _best_of(one: Callable[[], object], other: Callable[[], object], *, times: int) -> tuple[float, float]:
    """Run both in turn. Returns the best microseconds of each."""
    best = [float("inf"), float("inf")]
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(times):
            for index, work in enumerate((one, other)):
                before = time.perf_counter()
                work()
                best[index] = min(best[index], time.perf_counter() - before)
            gc.collect(0)
    finally:
        if collecting:
            gc.enable()
    return best[0] * 1e6, best[1] * 1e6
