"""Ceilings and many processes: a forked context refuses, and a shared pot is never overdrawn."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests.forks import ended, fork, in_child
from tests.stores import STORES, open_store, store_in

from treenail.containment import (
    Decision,
    ExecutionConfig,
    ExecutionContext,
    JsonlJournal,
    Limits,
    WrapOptions,
    fold,
    read_journal,
)
from treenail.containment.pots import SharedPot
from treenail.errors import LogDamagedError, UsageError
from treenail.log.sqlite import SqliteLog

DIME = WrapOptions("ask", cost_estimate_hint=0.10)
CENT = WrapOptions("ask", cost_estimate_hint=0.01)
PROCESSES = 64


def dispatched(path: Path) -> int:
    return path.stat().st_size


def note(path: Path) -> None:
    """Leave one byte for a call that was made; appended in one step, also by many processes."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b".")
    os.close(file)


# --- forks ----------------------------------------------------------------------------------------


def test_a_forked_context_refuses_and_says_how_to_share(tmp_path: Path) -> None:
    """Eight workers under 1 USD make no call with a copy of their parent's context, in any of its faces."""
    calls, place = tmp_path / "calls", tmp_path / "spent.jsonl"
    with JsonlJournal(place) as journal, ExecutionContext(Limits(max_cost_usd=1.0), journal=journal) as run:
        child = run.spawn_child()

        def work() -> list[str]:
            told = []
            for attempt in (
                lambda: run.wrap_llm_call(lambda: note(calls), DIME),
                lambda: run.call_tool(lambda: note(calls), DIME),
                lambda: child.call_llm(lambda: note(calls), DIME),
                run.spawn_child,
            ):
                with pytest.raises(UsageError) as refused:
                    attempt()
                told.append(str(refused.value))
            run.get_snapshot()
            run.abort("a copy stops nothing")
            run.close()
            return told

        for _ in range(8):
            for told in in_child(work):
                assert "fork" in told
                assert "SharedPot" in told
        assert not calls.exists()
        decisions = [run.wrap_llm_call(lambda: note(calls), DIME) for _ in range(12)]
    assert decisions == [Decision.ALLOW] * 10 + [Decision.HALT] * 2
    assert dispatched(calls) == 10
    assert fold(read_journal(place))[run.chain_id].steps == 10


FORKS_IN_A_CALL = """
import os, sys
from treenail.containment import ExecutionConfig, ExecutionContext, JsonlJournal, WrapOptions, read_journal
from treenail.containment.pots import SharedPot
from treenail.log.sqlite import SqliteLog

log, journal = SqliteLog("pot.db"), JsonlJournal("spent.jsonl")
pot = SharedPot(log, "team")
seen = []

def forking():
    child = os.fork()
    if not child:
        sys.exit(7)  # leaves the call, the context and the program
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    seen.append((len(read_journal("spent.jsonl")), pot.get_reserved()))

with ExecutionContext(ExecutionConfig(1.0, None, None, 0, budget_backend=pot), journal=journal) as run:
    assert run.call_llm(forking, WrapOptions("ask", cost_estimate_hint=0.1)).ok
print(seen, len(read_journal("spent.jsonl")), pot.get(), run.get_snapshot().cost_usd_accumulated)
"""


def test_a_fork_within_a_call_settles_nothing(tmp_path: Path) -> None:
    """The call is over when it is over in the process that made it, whatever becomes of the other one."""
    program = [sys.executable, "-c", FORKS_IN_A_CALL]
    ran = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert ran.stdout == "[(1, 0.1)] 2 0.1 0.1\n", ran.stderr


# --- a shared pot ---------------------------------------------------------------------------------


def pot_of(store: str | Path) -> ExecutionConfig:
    return ExecutionConfig(1.0, None, None, 0, budget_backend=SharedPot(open_store(store), "team"))


@pytest.mark.parametrize(("kind", "are_killed"), [("sqlite", False), ("sqlite", True), ("postgres", True)])
def test_64_processes_under_one_dollar_never_spend_more(kind: str, are_killed: bool, tmp_path: Path) -> None:
    """Each call is reserved in the store first; the call of a process that was killed counts in full."""
    calls, store = tmp_path / "calls", store_in(kind, tmp_path)
    open_store(store).close()

    def worker(number: int) -> None:
        run = ExecutionContext(pot_of(store))
        made = 0

        def call() -> None:
            nonlocal made
            made += 1
            note(calls)
            if are_killed and number % 2 and made == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        while run.wrap_llm_call(call, CENT) is not Decision.HALT:
            pass
        assert run.stop_reason == "budget_exceeded"

    children = [fork(lambda number=number: worker(number)) for number in range(PROCESSES)]
    if are_killed:
        # From outside too, wherever they are: in a transaction, in a call, or not begun yet.
        while not calls.exists() or dispatched(calls) < 20:
            os.sched_yield()
        for child in children[::8]:
            os.kill(child, signal.SIGKILL)
    codes = [ended(child) for child in children]
    assert set(codes) <= {0, -signal.SIGKILL}
    with open_store(store) as log:
        pot = SharedPot(log, "team")
        assert round(pot.get() + pot.get_reserved(), 9) == 1.0
        assert dispatched(calls) <= 100
        if not are_killed:
            assert (codes, dispatched(calls)) == ([0] * PROCESSES, 100)
            assert (pot.get(), pot.get_reserved()) == (1.0, 0.0)
        assert pot.reserve(0.01, 1.0) is None


@pytest.mark.parametrize("kind", STORES)
def test_pots_of_one_file_are_apart_and_outlive_their_processes(kind: str, tmp_path: Path) -> None:
    """A pot is known by its name; what was spent is there when the store is opened again."""
    store = store_in(kind, tmp_path)
    with open_store(store) as log:
        mine, yours = SharedPot(log, "mine"), SharedPot(log, "yours")
        reserved = mine.reserve(0.75, 1.0)
        assert reserved is not None
        with pytest.raises(UsageError, match="no open reservation"):
            yours.commit(reserved, 0.5)
        mine.commit(reserved, 0.5)
        assert yours.add(0.25) == 0.25
    with open_store(store) as log:
        assert (SharedPot(log, "mine").get(), SharedPot(log, "yours").get()) == (0.5, 0.25)
        assert SharedPot(log, "mine").reserve(0.6, 1.0) is None
    with pytest.raises(UsageError, match="name"):
        SharedPot(log, "")


def test_a_damaged_pot_is_refused_and_not_guessed(tmp_path: Path) -> None:
    """No call is made from a pot whose row does not match its checksum, also not in a salvaged file."""
    store = tmp_path / "pot.db"
    with SqliteLog(store) as log:
        log.create(uuid4(), created_at=datetime.now(UTC))
        SharedPot(log, "team").add(0.9)
    connection = sqlite3.connect(store)
    connection.execute("UPDATE pots SET spent = 0")
    connection.commit()
    connection.close()
    SqliteLog.salvage(store, tmp_path / "salvaged.db")
    for place in (store, tmp_path / "salvaged.db"):
        made: list[Any] = []
        with pytest.raises(LogDamagedError, match="pot 'team'"):
            ExecutionContext(pot_of(place)).wrap_llm_call(lambda made=made: made.append(1), CENT)
        assert not made
