"""What `Transactions` promises to every loop, whoever wrote it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import anyio
import pytest
from tests.forks import ended, fork, in_child

from treenail import Agent, Limits
from treenail.errors import (
    CallRefused,
    LeaseHeldError,
    OutcomeUnknownError,
    ToolCommitError,
    UsageError,
)
from treenail.integrations import Transactions, current_context
from treenail.log.sqlite import SqliteLog
from treenail.providers.scripted import ScriptedProvider
from treenail.tools import ToolCall, ToolInvoked, diff_calls, rollback_to_call

CALL = ToolCall("c1", "write", {"text": "x"})


@pytest.fixture
def work(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    (made / "a.txt").write_text("original")
    return made


@pytest.fixture
def opened(tmp_path: Path, work: Path) -> Callable[..., Transactions]:
    def open_run(**options: Any) -> Transactions:
        return Transactions(work, **{"store": tmp_path / "runs.db", "run": "one", **options})

    return open_run


@pytest.fixture
def transactions(opened: Callable[..., Transactions]) -> Iterator[Transactions]:
    with opened() as made:
        yield made


def names(work: Path) -> list[str]:
    return sorted(each.name for each in work.iterdir())


def outcomes(transactions: Transactions) -> list[str]:
    return [each.outcome for each in transactions.state.session[ToolInvoked].all()]


@pytest.mark.parametrize(
    "value",
    ["text", None, 7, object(), iter("abc"), {"a": {1, 2}}, b"\xff", float("nan"), "\ud800"],
    ids=lambda value: type(value).__name__,
)
def test_a_loop_gets_the_very_value_that_its_function_returns(
    transactions: Transactions, value: object
) -> None:
    """Whatever it is, also what no log can hold."""
    assert transactions.run(CALL, lambda: value) is value
    assert outcomes(transactions) == ["ok"]


class Odd:
    def __repr__(self) -> str:
        return "an odd one"


def test_arguments_that_no_log_can_hold_are_written_as_text(transactions: Transactions) -> None:
    for given in ({"it": Odd()}, {"it": Odd(), "broken": "\ud800"}, "free text", {"it": float("inf")}, ""):
        assert transactions.run(ToolCall("c1", "write", given), lambda: 1) == 1
    odd, broken, text, big, nothing = (each.params for each in transactions.state.session[ToolInvoked].all())
    assert (odd["it"], broken["it"], text["input"]) == ("an odd one", "an odd one", "free text")
    assert (big["it"], dict(nothing)) == (float("inf"), {})


def test_a_failure_that_is_a_value_is_undone_and_returned(transactions: Transactions, work: Path) -> None:
    def body() -> str:
        (work / "b.txt").write_text("half")
        return "error: no"

    assert transactions.run(CALL, body, is_error=lambda said: said.startswith("error")) == "error: no"
    assert names(work) == ["a.txt"]
    assert outcomes(transactions) == ["failed"]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_loop_gets_the_very_exception_that_its_function_raises(
    transactions: Transactions, work: Path, error: BaseException
) -> None:
    def body() -> None:
        (work / "b.txt").write_text("half")
        raise error

    with pytest.raises(type(error)) as caught:
        transactions.run(CALL, body)
    assert caught.value is error
    assert names(work) == ["a.txt"]


def test_a_cancelled_call_is_undone(transactions: Transactions, work: Path) -> None:
    async def main() -> None:
        begun = asyncio.Event()

        async def body() -> None:
            (work / "b.txt").write_text("half")
            begun.set()
            await anyio.sleep_forever()

        task = asyncio.create_task(transactions.arun(CALL, body))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert names(work) == ["a.txt"]
    assert outcomes(transactions) == ["interrupted"]


def test_calls_that_change_something_run_one_at_a_time(transactions: Transactions, work: Path) -> None:
    """So that each one's changes are its own; those of threads and of tasks alike."""
    inside: list[str] = []
    overlaps: list[list[str]] = []

    def body(name: str) -> str:
        inside.append(name)
        overlaps.append([each for each in inside if each != name])
        (work / name).write_text(name)
        inside.remove(name)
        if name.startswith("bad"):
            raise ValueError(name)
        return name

    def in_thread(name: str) -> object:
        try:
            return transactions.run(ToolCall(name, "write"), partial(body, name))
        except ValueError as error:
            return error

    wanted = [f"{kind}{number}" for number in range(4) for kind in ("good", "bad")]
    with ThreadPoolExecutor(len(wanted)) as pool:
        list(pool.map(in_thread, wanted))
    assert overlaps == [[]] * len(wanted)
    assert names(work) == ["a.txt", "good0", "good1", "good2", "good3"]


def test_calls_that_only_read_run_beside_others(opened: Callable[..., Transactions]) -> None:
    with opened(effects={"look": "none"}) as transactions:
        meet = threading.Barrier(2, timeout=60)
        with ThreadPoolExecutor(2) as pool:
            both = [
                pool.submit(transactions.run, ToolCall(f"c{n}", name), meet.wait)
                for n, name in enumerate(("look", "write"))
            ]
            assert sorted(each.result() for each in both) == [0, 1]


def test_a_thread_that_carries_the_context_of_a_task_can_make_calls(transactions: Transactions) -> None:
    """Frameworks hand contexts to threads, and anyio would take such a thread for an event loop."""
    import contextvars

    async def main() -> int:
        context = contextvars.copy_context()
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(context.run, transactions.run, CALL, lambda: 5).result()

    assert anyio.run(main) == 5


def test_the_sync_face_says_what_to_await_in_an_event_loop(transactions: Transactions) -> None:
    async def main() -> None:
        with pytest.raises(UsageError, match=r"await.*Transactions\.arun"):
            transactions.run(CALL, lambda: 5)

    anyio.run(main)


# --- what is there when a run is opened again ---------------------------------------------------------------


def die(opened: Callable[..., Transactions], work: Path, **options: Any) -> None:
    transactions = opened(**options)

    def body() -> None:
        (work / "a.txt").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    transactions.run(CALL, body)


def test_opening_a_run_undoes_what_a_killed_process_left_half_done(
    opened: Callable[..., Transactions], work: Path
) -> None:
    """Before anything else: the other loop may run the tool again at once, which is told so."""
    assert ended(fork(partial(die, opened, work))) == -signal.SIGKILL
    assert (work / "a.txt").read_text() == "half"
    with opened() as transactions:
        assert (work / "a.txt").read_text() == "original"
        assert [(each.call_id, each.outcome) for each in transactions.recovered] == [("c1", "rolled_back")]
        assert transactions.run(CALL, lambda: current_context().is_resume) is True
        other = ToolCall("c2", "write")
        assert transactions.run(other, lambda: current_context().is_resume) is False


def test_a_call_that_may_have_acted_outside_is_not_made_again(
    opened: Callable[..., Transactions], work: Path
) -> None:
    """The loop is told once that nobody knows; if it makes the call again all the same, that is its word."""
    external: dict[str, Any] = {"effects": {"write": "external"}}
    assert ended(fork(partial(die, opened, work, **external))) == -signal.SIGKILL
    with opened(**external) as transactions:
        with pytest.raises(OutcomeUnknownError, match="outcome of write is unknown"):
            transactions.run(CALL, lambda: 1)
        assert transactions.run(CALL, lambda: 2) == 2


def test_an_idempotent_call_is_made_again(opened: Callable[..., Transactions], work: Path) -> None:
    options: dict[str, Any] = {"effects": {"write": "external"}, "idempotent": ["write"]}
    assert ended(fork(partial(die, opened, work, **options))) == -signal.SIGKILL
    with opened(**options) as transactions:
        assert transactions.run(CALL, lambda: 2) == 2


def test_a_run_has_one_process_at_a_time(
    opened: Callable[..., Transactions], transactions: Transactions
) -> None:
    def second() -> str:
        try:
            opened()
        except LeaseHeldError as error:
            return str(error)
        return ""

    assert str(os.getpid()) in in_child(second)
    assert transactions.run(CALL, lambda: 1) == 1


def test_a_run_is_found_by_its_name_or_by_an_id_of_its_own(opened: Callable[..., Transactions]) -> None:
    with opened() as first:
        known = first.id
    with opened() as again:
        assert again.id == known
    own = uuid4()
    with opened(run=own) as made:
        assert made.id == own


def test_a_call_can_be_shown_and_undone_like_every_other(transactions: Transactions, work: Path) -> None:
    transactions.run(CALL, lambda: (work / "a.txt").write_text("new"))
    assert [each.path for each in diff_calls(transactions.state, "c1").changes] == ["a.txt"]
    rollback_to_call(transactions.state, "c1")
    assert (work / "a.txt").read_text() == "original"


# --- what is refused ----------------------------------------------------------------------------------------


def test_a_ceiling_refuses_before_the_function_is_called(
    opened: Callable[..., Transactions], work: Path
) -> None:
    with opened(limits=Limits(max_steps=1)) as transactions:
        assert transactions.run(CALL, lambda: 1) == 1
        with pytest.raises(CallRefused, match="1 of 1 steps"):
            transactions.run(ToolCall("c2", "write"), lambda: (work / "b.txt").write_text("no"))
    assert names(work) == ["a.txt"]
    with opened(limits=Limits(max_steps=2)) as again:
        assert again.run(ToolCall("c3", "write"), lambda: 3) == 3


def test_a_call_that_takes_too_long_is_cut_off_and_undone(
    opened: Callable[..., Transactions], work: Path
) -> None:
    async def body() -> None:
        (work / "b.txt").write_text("half")
        await anyio.sleep_forever()

    with opened(limits=Limits(timeout=0.2)) as transactions, pytest.raises(CallRefused, match="limits"):
        anyio.run(partial(transactions.arun, CALL, body))
    assert names(work) == ["a.txt"]


def test_a_call_inside_a_call_is_refused_with_a_way_out(opened: Callable[..., Transactions]) -> None:
    """One call is one transaction. A tool that is an agent is named, and left alone."""
    inner = ToolCall("c2", "write")
    outer = ToolCall("c1", "ask_agent")
    with opened() as transactions, pytest.raises(UsageError, match=r"effects=\{'ask_agent': None\}"):
        transactions.run(outer, lambda: transactions.run(inner, lambda: 1))
    with opened(effects={"ask_agent": None}) as transactions:
        assert transactions.run(outer, lambda: transactions.run(inner, lambda: 1)) == 1
        assert [each.name for each in transactions.state.session[ToolInvoked].all()][-1] == "write"


@pytest.mark.parametrize("run", ["", "  ", None, 7])
def test_a_run_needs_a_name(opened: Callable[..., Transactions], run: Any) -> None:
    with pytest.raises(UsageError, match="run must be the name of the run"):
        opened(run=run)


def test_a_run_of_our_own_loop_is_not_taken_for_another_loops(
    opened: Callable[..., Transactions], work: Path, tmp_path: Path
) -> None:
    with Agent("own").run(
        "go", provider=ScriptedProvider(["Done."]), workspace=work, store=tmp_path / "runs.db"
    ) as run:
        own: UUID = run.id
    with pytest.raises(UsageError, match="is a run of a Treenail agent"):
        opened(run=own)
    with opened() as still:
        assert still.run(CALL, lambda: 1) == 1


def test_a_run_stays_in_its_directory(opened: Callable[..., Transactions], tmp_path: Path) -> None:
    with opened():
        pass
    (tmp_path / "other").mkdir()
    with pytest.raises(UsageError, match=r"works in .*/work, and not in .*/other"):
        Transactions(tmp_path / "other", store=tmp_path / "runs.db", run="one")


def test_a_workspace_that_is_not_there_is_named(opened: Callable[..., Transactions], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make it first"):
        Transactions(tmp_path / "nowhere", store=tmp_path / "runs.db", run="one")
    with opened() as transactions:
        assert transactions.run(CALL, lambda: 1) == 1


def test_outside_of_a_call_there_is_no_context() -> None:
    with pytest.raises(UsageError, match="no tool call"):
        current_context()


class FullLog(SqliteLog):
    """A log that loses its disk in the middle of a call."""

    is_full = False

    def append(self, *given: Any, **named: Any) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        super().append(*given, **named)


def test_a_call_that_cannot_be_recorded_is_not_kept(
    opened: Callable[..., Transactions], work: Path, tmp_path: Path
) -> None:
    log = FullLog(tmp_path / "full.db")

    def body() -> str:
        (work / "b.txt").write_text("new")
        log.is_full = True
        return "done"

    transactions = opened(store=log)
    with pytest.raises((ToolCommitError, OSError)):
        transactions.run(CALL, body)
    log.is_full = False
    assert names(work) == ["a.txt"]
    transactions.close()
    log.close()
