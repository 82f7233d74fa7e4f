"""What was spent survives the process: the journal, its fold, and a run that is killed in the middle."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.containment import (
    ChainMetadata,
    ChainStopped,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    JsonlJournal,
    LedgerEvent,
    Limits,
    Reserved,
    RetryTaken,
    Settled,
    WrapOptions,
    current_call,
    fold,
    read_journal,
)
from treenail.containment.journal import event_from_json, event_to_json
from treenail.errors import LogDamagedError, UsageError
from treenail.testing import FakeClock

Config = Callable[..., ExecutionConfig]
NOW = datetime(2026, 11, 15, tzinfo=UTC)
EVENTS: list[LedgerEvent] = [
    Reserved("n:1", ("root", "child"), "n", "llm", "think", 0.25, NOW, 10.0),
    Settled("n:1", ("root", "child"), "n", "ok", 0.5, NOW, 20.0),
    RetryTaken("n:1", ("root",), "n", NOW, 30.0),
    ChainStopped(("root",), "aborted", "by hand", NOW, 40.0),
]


def fail() -> None:
    raise OSError("no luck")


# --- events and their fold ------------------------------------------------------------------------------


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_survives_a_line_of_json(event: LedgerEvent) -> None:
    """What is written is what is read."""
    assert event_from_json(event_to_json(event)) == event


@pytest.mark.parametrize("line", ["", "{}", "[]", "nonsense", '{"type":"os.system"}', '{"type":"reserved"}'])
def test_a_line_that_is_no_event_is_refused(line: str) -> None:
    """Only the ledger's own events are read; nothing else is looked up by its name."""
    with pytest.raises(UsageError, match="not a ledger event"):
        event_from_json(line)


def test_a_reservation_without_its_settlement_counts_in_full() -> None:
    """A call that was dispatched and never heard of again cost what was reserved for it."""
    events = [*EVENTS, replace(EVENTS[0], reservation_id="m:1", cost_usd=0.1)]  # type: ignore[arg-type]  # one of several kinds of events
    spent = fold(events)
    assert (spent["root"].cost_pico, spent["root"].unsettled) == (600_000_000_000, 1)
    assert (spent["root"].steps, spent["root"].retries, spent["root"].elapsed_ms) == (2, 1, 40.0)
    assert (spent["child"].steps, spent["child"].retries) == (2, 0)


def test_a_repeated_event_counts_once() -> None:
    """Folding an event twice, or a settlement that was corrected upwards, adds nothing twice."""
    late = replace(EVENTS[1], cost_usd=0.75)  # type: ignore[type-var]  # one of several kinds of events
    spent = fold([*EVENTS, *EVENTS, late, EVENTS[1]])["root"]
    assert (spent.cost_pico, spent.steps, spent.retries) == (750_000_000_000, 1, 1)


@given(st.permutations(EVENTS), st.integers(0, 4))
def test_the_order_of_events_does_not_matter(events: list[LedgerEvent], cut: int) -> None:
    """The fold of all events is the same in any order, and more events never mean fewer steps."""
    assert fold(events) == fold(EVENTS)
    part = fold(events[:cut])
    whole = fold(events)
    assert all(part[chain].steps <= whole[chain].steps for chain in part)


scripts = st.lists(
    st.tuples(st.sampled_from(["root", "child"]), st.sampled_from(["ok", "fail"]), st.integers(0, 50)),
    max_size=30,
)


@given(script=scripts)
def test_the_journal_says_what_the_chain_says(script: list[tuple[str, str, int]]) -> None:
    """Folding the journal of any run gives the steps, retries and money of its live snapshot."""
    journal: list[LedgerEvent] = []
    root = ExecutionContext(
        Limits(max_cost_usd=3.0, max_steps=20, max_retries=5),
        metadata=ChainMetadata("r", "root"),
        journal=journal.append,
    )
    child = root.spawn_child(Limits(max_steps=8), metadata=ChainMetadata("r", "child"))
    for who, fate, cents in script:

        def call(fate: str = fate, cents: int = cents) -> None:
            current_call().report(cost_usd=cents / 50)  # type: ignore[union-attr]  # inside a call there is one
            if fate == "fail":
                raise OSError

        ctx = root if who == "root" else child
        ctx.wrap_llm_call(call, WrapOptions(cost_estimate_hint=cents / 100))
    spent = fold(journal)
    for ctx in (root, child):
        snapshot = ctx.get_snapshot()
        if snapshot.step_count:
            folded = spent[ctx.chain_id]
            assert (folded.steps, folded.retries) == (snapshot.step_count, snapshot.retries_used)
            assert folded.cost_pico / 1e12 == snapshot.cost_usd_accumulated
    resumed = ExecutionContext.resume(root.config, journal).get_snapshot()
    before = root.get_snapshot()
    assert (resumed.step_count, resumed.retries_used) == (before.step_count, before.retries_used)
    assert resumed.cost_usd_accumulated == before.cost_usd_accumulated


# --- resuming -------------------------------------------------------------------------------------------


def test_a_resumed_chain_goes_on_from_what_was_spent(config: Config) -> None:
    """Steps, retries and money continue, under the same chain id; an abort does not."""
    journal: list[LedgerEvent] = []
    first = ExecutionContext(
        config(max_steps=3), metadata=ChainMetadata("r", "run-1"), journal=journal.append
    )
    first.wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=0.25))
    first.wrap_llm_call(fail)
    first.abort("the process must go")
    second = ExecutionContext.resume(config(max_steps=3), journal, journal=journal.append)
    snapshot = second.get_snapshot()
    assert (snapshot.chain_id, snapshot.step_count, snapshot.retries_used) == ("run-1", 2, 1)
    assert (snapshot.cost_usd_accumulated, snapshot.aborted) == (0.25, False)
    decisions = [second.wrap_llm_call(lambda: None) for _ in range(2)]
    assert decisions == [Decision.ALLOW, Decision.HALT]
    third = ExecutionContext.resume(config(max_steps=3), journal)
    assert third.wrap_llm_call(lambda: None) is Decision.HALT
    assert ExecutionContext.resume(config(max_steps=9), journal).wrap_llm_call(lambda: None) is Decision.ALLOW


def test_running_time_continues_and_down_time_does_not_count(config: Config, clock: FakeClock) -> None:
    """A resumed chain has what was left of its time, however long nobody ran it."""
    journal: list[LedgerEvent] = []
    first = ExecutionContext(config(timeout_ms=10_000), clock=clock, journal=journal.append)
    clock.advance(6)
    first.wrap_tool_call(lambda: None)
    first.close()
    clock.advance(3600)
    second = ExecutionContext.resume(config(timeout_ms=10_000), journal, clock=clock)
    assert second.remaining_s == 4.0
    clock.advance(4)
    assert second.call_tool(lambda: None).stop_reason == "timeout"


def test_children_continue_under_their_ids(config: Config) -> None:
    """A child that is spawned again with its old chain id goes on from its own spending."""
    journal: list[LedgerEvent] = []
    parent = ExecutionContext(config(), metadata=ChainMetadata("r", "run"), journal=journal.append)
    step_2 = ChainMetadata("r", "run/step-2")
    child = parent.spawn_child(Limits(max_cost_usd=0.3), metadata=step_2)
    child.wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=0.2))
    again = ExecutionContext.resume(config(), journal).spawn_child(Limits(max_cost_usd=0.3), metadata=step_2)
    assert again.remaining_usd == pytest.approx(0.1)
    fresh = ExecutionContext.resume(config(), journal).spawn_child(Limits(max_cost_usd=0.3))
    assert fresh.remaining_usd == 0.3


def test_nothing_to_resume_is_a_fresh_chain(config: Config) -> None:
    """An empty journal gives a chain that has spent nothing."""
    ctx = ExecutionContext.resume(config(), [])
    assert ctx.get_snapshot().step_count == 0
    assert ctx.wrap_llm_call(lambda: None) is Decision.ALLOW


# --- the file -------------------------------------------------------------------------------------------


def test_a_journal_file_is_appended_to(tmp_path: Path) -> None:
    """Opening a journal again goes on after what it holds; a file that is not there holds nothing."""
    path = tmp_path / "ledger.jsonl"
    assert read_journal(path) == []
    for event in EVENTS:
        with JsonlJournal(path) as journal:
            journal(event)
    assert read_journal(path) == EVENTS


@pytest.mark.parametrize("cut", [1, 10, 100])
def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path, cut: int) -> None:
    """A torn last line was never acknowledged: it is neither read nor glued to the next."""
    path = tmp_path / "ledger.jsonl"
    with JsonlJournal(path) as journal:
        journal(EVENTS[0])
        journal(EVENTS[1])
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_journal(path) == EVENTS[:1]
    with JsonlJournal(path) as journal:
        journal(EVENTS[2])
    assert read_journal(path) == [EVENTS[0], EVENTS[2]]


def test_damage_in_the_middle_is_told_of(tmp_path: Path) -> None:
    """A damaged line that is not the last means that money is unaccounted for: nothing is guessed."""
    path = tmp_path / "ledger.jsonl"
    with JsonlJournal(path) as journal:
        for event in EVENTS:
            journal(event)
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1][:-5]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(LogDamagedError, match="line 2") as caught:
        read_journal(path)
    assert caught.value.last_good_seq == 1


KILLED = """
import os, signal, sys
from treenail.containment import *

path, moment = sys.argv[1:]
journal = JsonlJournal(path)

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def write(event):
    name = type(event).__name__
    if moment == f"before {name}":
        die()
    journal(event)
    if moment == f"after {name}":
        die()

ctx = ExecutionContext(Limits(max_cost_usd=1.0), metadata=ChainMetadata("r", "run"), journal=write)
def call():
    current_call().report(cost_usd=0.1)
    if moment == "in the call":
        die()

ctx.wrap_llm_call(call, WrapOptions(cost_estimate_hint=0.25))
"""


@pytest.mark.parametrize(
    ("moment", "steps", "cost"),
    [
        ("before Reserved", 0, 0.0),
        ("after Reserved", 1, 0.25),
        ("in the call", 1, 0.25),
        ("before Settled", 1, 0.25),
        ("after Settled", 1, 0.1),
    ],
)
def test_a_killed_run_is_charged_for_what_it_dispatched(
    tmp_path: Path, moment: str, steps: int, cost: float
) -> None:
    """SIGKILL at each moment: a call counts from its reservation, in full until its settlement is on disk."""
    path = tmp_path / "ledger.jsonl"
    result = subprocess.run([sys.executable, "-c", KILLED, str(path), moment], check=False)
    assert result.returncode == -signal.SIGKILL
    snapshot = ExecutionContext.resume(Limits(max_cost_usd=1.0), read_journal(path)).get_snapshot()
    assert (snapshot.step_count, snapshot.cost_usd_accumulated) == (steps, cost)


def test_the_journal_is_on_disk_before_the_call(tmp_path: Path) -> None:
    """While the call runs, another process can already read its reservation."""
    path = tmp_path / "ledger.jsonl"
    with JsonlJournal(path) as journal:
        ctx = ExecutionContext(Limits(max_cost_usd=1.0), journal=journal)
        outcome = ctx.call_llm(lambda: path.read_text(), WrapOptions(cost_estimate_hint=0.5))
    assert outcome.unwrap().count("\n") == 1
    assert '"type":"reserved"' in outcome.unwrap()


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    """If a line cannot be written whole, it is taken back, and the call is not made."""
    path = tmp_path / "ledger.jsonl"
    journal = JsonlJournal(path)
    ctx = ExecutionContext(Limits(max_cost_usd=1.0), journal=journal)
    ctx.wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=0.1))
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
        with pytest.raises(OSError, match="File too large"):
            ctx.wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=0.1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert path.stat().st_size == size
    assert len(read_journal(path)) == 2
    journal.close()


def describe(events: list[LedgerEvent]) -> list[Any]:
    return [type(event).__name__ for event in events]


def test_stops_are_journalled_once(config: Config) -> None:
    """The journal tells of each final stop, for the record."""
    journal: list[LedgerEvent] = []
    ctx = ExecutionContext(config(max_steps=1), journal=journal.append)
    for _ in range(4):
        ctx.wrap_tool_call(lambda: None)
    assert describe(journal) == ["Reserved", "Settled", "ChainStopped"]


def test_a_chain_that_runs_out_of_time_is_closed_when_its_journal_has_heard_of_it(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever closes the chain closes the journal next, and the stop belongs into it."""
    monkeypatch.setattr("treenail.containment.chain._LAST_WORD_S", 3600.0)
    journal: list[LedgerEvent] = []
    may_write, cancelled = threading.Event(), threading.Event()

    def slowly(event: LedgerEvent) -> None:
        may_write.wait(30)
        journal.append(event)

    ctx = ExecutionContext(config(timeout_ms=1), journal=slowly)
    ctx.cancellation_token.on_cancel(cancelled.set)
    assert cancelled.wait(30)
    closing = threading.Thread(target=ctx.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    may_write.set()
    closing.join(30)
    assert describe(journal) == ["ChainStopped"]


def test_a_chain_may_be_closed_by_what_its_timeout_cancels(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for itself."""
    monkeypatch.setattr("treenail.containment.chain._LAST_WORD_S", 3600.0)
    journal: list[LedgerEvent] = []
    is_over = threading.Event()

    def written(event: LedgerEvent) -> None:
        journal.append(event)
        is_over.set()

    ctx = ExecutionContext(config(timeout_ms=1), journal=written)
    ctx.cancellation_token.on_cancel(ctx.close)
    assert is_over.wait(60)
    assert describe(journal) == ["ChainStopped"]
