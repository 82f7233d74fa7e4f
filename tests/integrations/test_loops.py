"""A tool call in another framework's own loop is a transaction, whatever the framework."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.forks import ended, fork
from tests.integrations.loops import DONE, LOOPS
from tests.stores import store_in

from treenail import Limits
from treenail.errors import CallRefused
from treenail.integrations import Transactions, current_context
from treenail.tools import ToolInvoked


@dataclass(frozen=True)
class Noted:
    text: str


@pytest.fixture
def work(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    (made / "a.txt").write_text("original")
    return made


@pytest.fixture
def transactions(tmp_path: Path, work: Path) -> Iterator[Transactions]:
    with Transactions(work, store=tmp_path / "runs.db", run="thread-1") as made:
        yield made


def files(work: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in work.iterdir()}


def told(loop: str, error: type[Exception], text: str) -> AbstractContextManager[object]:
    """Expect an exception to come out of a loop; OpenAI Agents tells its model instead."""
    return nullcontext() if loop == "openai_agents" else pytest.raises(error, match=text)


def write(path: str, text: str) -> str:
    """Write two files, and fail if the text is bad."""
    place = Path(path)
    (place / "a.txt").write_text(text)
    current_context().session.dispatch(Noted(text))
    (place / "b.txt").write_text(text)
    if text == "bad":
        raise ValueError("the pen broke")
    return f"wrote {text}"


async def awrite(path: str, text: str) -> str:
    """Write two files, and fail if the text is bad."""
    return write(path, text)


@pytest.mark.parametrize("function", [write, awrite], ids=["sync", "async"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_tool_that_writes_and_raises_leaves_nothing(
    loop: str, function: Any, transactions: Transactions, work: Path, tmp_path: Path
) -> None:
    """Neither in the files nor in the state; and the loop hears of it as it always would."""
    if loop == "langchain" and function is awrite:
        function = write  # LangGraph's sync loop takes no coroutines.
    script = [[("c1", function.__name__, {"path": str(work), "text": "bad"})]]
    with told(loop, ValueError, "the pen broke"):
        LOOPS[loop](transactions, [function], script, tmp_path)
    assert files(work) == {"a.txt": "original"}
    assert transactions.state.session[Noted].all() == ()
    (ended,) = transactions.state.session[ToolInvoked].all()
    assert (ended.name, ended.call_id, ended.outcome) == (function.__name__, "c1", "failed")
    assert "the pen broke" in ended.result.message


@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_tool_does_is_kept_when_it_returns(
    loop: str, transactions: Transactions, work: Path, tmp_path: Path
) -> None:
    """Files, state and log; the loop gets the tool's own value, and runs to its own end."""
    script = [[(f"c{text}", "write", {"path": str(work), "text": text})] for text in ("one", "two")]
    assert LOOPS[loop](transactions, [write], script, tmp_path) == DONE
    assert files(work) == {"a.txt": "two", "b.txt": "two"}
    assert [each.text for each in transactions.state.session[Noted].all()] == ["one", "two"]
    ended = transactions.state.session[ToolInvoked].all()
    assert [(each.outcome, each.result.message) for each in ended] == [
        ("ok", "wrote one"),
        ("ok", "wrote two"),
    ]
    assert dict(ended[0].params) == {"path": str(work), "text": "one"}


def run_and_die(loop: str, store: str, place: Path) -> str:
    """Run a loop whose second tool kills its process in the middle, or resume it after that."""
    work, killed = place / "work", place / "killed"

    def first() -> str:
        """Do the first thing."""
        with (place / "first.txt").open("a") as file:
            file.write("ran\n")
        (work / "first.txt").write_text("done")
        return "done"

    def second() -> str:
        """Do the second thing."""
        if killed.exists():
            found = " ".join(sorted(each.name for each in work.iterdir()))
            text = (work / "a.txt").read_text()
            (place / "found.txt").write_text(f"{found}; {text}; resumed {current_context().is_resume}")
            (work / "second.txt").write_text("whole")
            return "done"
        (work / "a.txt").write_text("half")
        (work / "half.txt").write_text("half")
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
        return "never"

    with Transactions(work, store=store, run="thread-1") as transactions:
        script = [[("c1", "first", {})], [("c2", "second", {})]]
        return LOOPS[loop](transactions, [first, second], script, place)


def killed_and_resumed(loop: str, store: str, place: Path) -> str:
    """Return what the second tool found when its loop was resumed."""
    assert ended(fork(partial(run_and_die, loop, store, place))) == -signal.SIGKILL
    assert run_and_die(loop, store, place) == DONE
    return (place / "found.txt").read_text()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_tool_that_was_killed_finds_nothing_half_written(loop: str, work: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of a tool, in the framework's own loop with its own store, which then resumes.

    The finished tool does not run again, and the other one is told that it has begun before.
    """
    found = killed_and_resumed(loop, store_in("sqlite", tmp_path), tmp_path)
    assert found == "a.txt first.txt; original; resumed True"
    assert files(work) == {"a.txt": "original", "first.txt": "done", "second.txt": "whole"}
    assert (tmp_path / "first.txt").read_text() == "ran\n"


@pytest.mark.usefixtures("work")
def test_the_same_holds_with_the_log_on_postgres(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    found = killed_and_resumed("langchain", store_in("postgres", tmp_path), tmp_path)
    assert found == "a.txt first.txt; original; resumed True"


@pytest.mark.parametrize("loop", LOOPS)
def test_a_ceiling_holds_in_their_loop(loop: str, work: Path, tmp_path: Path) -> None:
    """The third call is not made, and neither is one after the run was opened again."""
    script = [[(f"c{number}", "write", {"path": str(work), "text": str(number)})] for number in range(3)]
    limits = Limits(max_steps=2)
    store = tmp_path / "runs.db"
    with (
        Transactions(work, store=store, run="1", limits=limits) as limited,
        told(loop, CallRefused, "2 of 2 steps are used"),
    ):
        LOOPS[loop](limited, [write], script, tmp_path)
    assert files(work) == {"a.txt": "1", "b.txt": "1"}
    (tmp_path / "again").mkdir()
    with (
        Transactions(work, store=store, run="1") as again,
        told(loop, CallRefused, "2 of 2 steps are used"),
    ):
        LOOPS[loop](again, [write], script, tmp_path / "again")
    assert files(work) == {"a.txt": "1", "b.txt": "1"}
