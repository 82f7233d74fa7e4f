"""What the conversation costs: recording, replay, resume and compaction, each beside a floor in the same run.

Turns of both sides alternate and the best of each counts, so that a busy moment of the machine does not
decide; what is only computed is measured in processor time.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

from bench.report import Row, Size
from treenail.codec import codec
from treenail.conversation import (
    InnerMessage,
    ProviderUsage,
    Replayer,
    ToolCallRecord,
    enable_inner_message_recording,
    replay_events,
)
from treenail.conversation.compaction import plan_session
from treenail.log import Log
from treenail.log.sqlite import SqliteLog
from treenail.state import Session, TokenUsage
from treenail.turns import TurnResumed, TurnStarted, TurnState, end_turn, ending_for, turn_state

START = datetime(2026, 3, 14, 15, 9, 26, tzinfo=UTC)
TEXT = "The fixture opens the file twice; the second handle is never closed. " * 10
USAGE = ProviderUsage("bench", "model", 1, TokenUsage(input_tokens=1_000, output_tokens=100))


def conversation(count: int) -> list[InnerMessage]:
    """A request, and rounds of an answer with a call and its result, about 1 KB each."""
    made = []
    for place in range(count):
        at = START + timedelta(seconds=place)
        if place == 0:
            message = InnerMessage("system", "You repair fixtures.", "evaluation", place, created_at=at)
        elif place == 1:
            message = InnerMessage("user", "Repair them all.", "evaluation", place, created_at=at)
        elif place % 2 == 0:
            calls = (ToolCallRecord(f"call-{place}", "read_file", '{"path": "src/package/module.py"}'),)
            message = InnerMessage("assistant", TEXT, "evaluation", place, calls, turn=place, created_at=at)
        else:
            message = InnerMessage(
                "tool",
                TEXT,
                "evaluation",
                place,
                tool_call_id=f"call-{place - 1}",
                tool_name="read_file",
                created_at=at,
            )
        made.append(message)
    return made


def rows(size: Size) -> Iterator[Row]:
    """Measure the conversation; each row is a name, our figure, the floor's, the ratio, the target."""
    quick = size.is_small
    yield from _recording(quick)
    yield from _replaying(quick)
    yield from _growing(quick)
    yield from _ending(quick)
    yield from _resuming(quick)


# --- recording ------------------------------------------------------------------------------------------


def _recording(quick: bool) -> Iterator[Row]:
    for count in (1_000,) if quick else (1_000, 100_000):
        first = last = float("inf")
        for _ in range(8 if count == 1_000 and not quick else 1):
            one, other = _ends_of_a_run(conversation(count))
            first, last = min(first, one), min(last, other)
        yield Row(f"record message {count:,} beside the first ones, us", last, first, last / first, 1.25)


def _ends_of_a_run(messages: list[InnerMessage]) -> tuple[float, float]:
    """Record messages. Returns microseconds per message near the beginning and at the end."""
    session = Session()
    enable_inner_message_recording(session)
    took = []
    begin = 0
    stretch = min(len(messages) // 10, 1_000)
    for start in (0, len(messages) - stretch):
        for each in messages[begin:start]:
            session.dispatch(each)
        best = float("inf")
        # Short stretches: the best of them was not disturbed by others.
        for at in range(start, start + stretch, 50):
            part = messages[at : at + 50]
            before = time.process_time()
            for each in part:
                session.dispatch(each)
            best = min(best, (time.process_time() - before) / len(part))
        begin = start + stretch
        took.append(best * 1e6)
    return took[0], took[1]


# --- replay ---------------------------------------------------------------------------------------------


def _replaying(quick: bool) -> Iterator[Row]:
    count = 500 if quick else 10_000
    messages = conversation(count)
    payloads = [codec.encode(each) for each in messages]
    plain = [json.loads(each) for each in payloads]

    def fold() -> None:
        replayed = replay_events((seq, each, "") for seq, each in enumerate(messages, start=1))
        assert len(replayed.items) == count

    def decode() -> None:
        for each in payloads:
            codec.decode(InnerMessage, each)

    def dump() -> None:
        for each in plain:
            json.dumps(each)

    ours, floor = _best_of(fold, decode, times=3 if quick else 6)
    yield Row(f"replay {count:,} messages beside decoding them, ms", ours / 1e3, floor / 1e3, ours / floor)
    ours, floor = _best_of(fold, dump, times=3 if quick else 6)
    yield Row(f"replay {count:,} messages beside json.dumps, ms", ours / 1e3, floor / 1e3, ours / floor)


def _growing(quick: bool) -> Iterator[Row]:
    """One round of a loop: an answer, its result, and the input for the next call."""
    sizes = (100, 500 if quick else 10_000)
    messages = conversation(sizes[-1] + 1_000)
    took = []
    for size in sizes:
        best = float("inf")
        for _ in range(3):
            best = min(best, _round_at(messages, size))
        took.append(best * 1e6)
    few, many = took
    yield Row(f"input for the next call at {sizes[1]:,} messages beside 100, us", many, few, many / few, 1.25)

    sessions = []
    for size in sizes:
        session = Session()
        enable_inner_message_recording(session)
        session.dispatch_all(messages[:size])
        replayer = Replayer()
        replayer.catch_up(session)
        sessions.append((session, replayer, size))
    best_of = [float("inf"), float("inf")]
    for step in range(30 if quick else 300):
        for index, (session, replayer, size) in enumerate(sessions):
            at = size + 2 * step
            session.dispatch_all((USAGE, *messages[at : at + 2]))
            before = time.process_time()
            replayer.catch_up(session)
            replayer.input()
            best_of[index] = min(best_of[index], time.process_time() - before)
    few, many = (each * 1e6 for each in best_of)
    yield Row(f"the same from the log at {sizes[1]:,} messages beside 100, us", many, few, many / few, 1.25)


def _round_at(messages: list[InnerMessage], size: int) -> float:
    replayer = Replayer()
    for seq, each in enumerate(messages[:size], start=1):
        replayer.add(seq, each)
    replayer.input()
    best = float("inf")
    for start in range(size, size + 500, 50):
        before = time.process_time()
        for at in range(start, start + 50, 2):
            replayer.add(at + 1, messages[at])
            replayer.add(at + 2, messages[at + 1])
            replayer.input()
        best = min(best, (time.process_time() - before) / 25)
    return best


# --- endings --------------------------------------------------------------------------------------------


def _ending(quick: bool) -> Iterator[Row]:
    """One more answer, how the turn stands then, and its end: in a turn that was followed all along."""
    sizes = (100, 500 if quick else 10_000)
    asked, ended = [], []
    for size in sizes:
        session = Session()
        enable_inner_message_recording(session)
        session.dispatch(TurnStarted("turn", "evaluation", "bench", "Repair them all.", "bench", "model"))
        session.dispatch_all(conversation(size))
        turn_state(session)
        best = [float("inf"), float("inf")]
        for place in range(size, size + 100):
            answer = InnerMessage("assistant", TEXT, "evaluation", place, created_at=START)
            session.dispatch_all((TurnResumed("turn"), answer))
            for index, work in enumerate((turn_state, _end)):
                before = time.process_time()
                work(session)
                best[index] = min(best[index], time.process_time() - before)
        asked.append(best[0] * 1e6)
        ended.append(best[1] * 1e6)
    for name, (few, many) in (("ask how a turn stands", asked), ("end a turn", ended)):
        yield Row(f"{name} at {sizes[1]:,} messages beside 100, us", many, few, many / few, 1.25)


def _end(session: Session) -> object:
    return end_turn(session, "turn", ending_for("interrupt", session_id=session.session_id))


# --- resume ---------------------------------------------------------------------------------------------


def _resuming(quick: bool) -> Iterator[Row]:
    count = 500 if quick else 10_000
    with tempfile.TemporaryDirectory(prefix="treenail-bench-") as folder:
        log = SqliteLog(Path(folder) / "runs.db")
        session = Session(log=log)
        enable_inner_message_recording(session)
        session.dispatch(TurnStarted("turn", "evaluation", "bench", "Repair them all.", "bench", "model"))
        for place, each in enumerate(conversation(count)):
            session.dispatch(replace(each, sequence=place))
        session_id = session.session_id
        session.close()

        def resume() -> None:
            opened = Session.open(log, session_id)
            replayer = Replayer()
            replayer.catch_up(opened)
            assert len(replayer.input().items) == count
            assert turn_state(opened) is TurnState.UNFINISHED
            opened.close()

        def plan() -> None:
            opened = Session.open(log, session_id, read_only=True)
            assert plan_session(opened) is not None

        def floor() -> None:
            _read_and_decode(log, session_id)

        ours, least = _best_of(resume, floor, times=3 if quick else 5)
        name = f"resume {count:,} messages (open, replay, state) beside reading and decoding, ms"
        yield Row(name, ours / 1e3, least / 1e3, ours / least)
        ours, least = _best_of(plan, floor, times=2 if quick else 4)
        name = f"plan the compaction of {count:,} messages beside reading and decoding, ms"
        yield Row(name, ours / 1e3, least / 1e3, ours / least)
        log.close()


def _read_and_decode(log: Log, session_id: UUID) -> None:
    kinds: dict[str, type] = {"treenail.InnerMessage": InnerMessage, "treenail.TurnStarted": TurnStarted}
    kept: list[object] = [
        codec.decode(kinds[envelope.type], envelope.payload) for envelope in log.read(session_id)
    ]
    assert kept


def _best_of(one: Callable[[], object], other: Callable[[], object], *, times: int) -> tuple[float, float]:
    """Run both in turn. Returns the best microseconds of each."""
    best = [float("inf"), float("inf")]
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(times):
            for index, work in enumerate((one, other)):
                before = time.process_time()
                work()
                best[index] = min(best[index], time.process_time() - before)
            gc.collect(0)
    finally:
        if collecting:
            gc.enable()
    return best[0] * 1e6, best[1] * 1e6
