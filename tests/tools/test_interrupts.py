"""Ctrl-C at any moment: the call has happened wholly or not at all, and nothing is stuck afterwards."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import pytest
from tools_kit import World, failing_tool, make_world, succeeds, succeeds_async

import treenail
from treenail.state import Deadline
from treenail.tools import ToolCall, ToolContext, ToolStarted, recover, tool

pytestmark = pytest.mark.timeout(240)

ROOT = str(Path(treenail.__file__).parent)
TOOLS = f"{ROOT}/tools/"


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    """What other tests have left is not finalised in the middle of a test that interrupts at every moment."""
    gc.disable()
    yield
    gc.enable()


class Interrupter:
    """Raises `KeyboardInterrupt` at the nth moment at which the interpreter would look for a signal.

    That is at the entry of a function and after a call into C; a profile function is called there, and
    what it raises is raised there.
    """

    def __init__(self, at: int, prefix: str) -> None:
        self.at = at
        self.prefix = prefix
        self.seen = 0
        self.place = ""

    def __call__(self, work: Callable[[], Any]) -> bool:
        """Do the work; say whether it was interrupted."""
        sys.setprofile(self._look)
        try:
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        return bool(self.place)

    def _look(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        # What a generator raises while it is thrown away is lost, as a real interrupt would be.
        if code.co_name == "<genexpr>" or not code.co_filename.startswith(self.prefix):
            return
        if event in ("call", "c_return"):
            self.seen += 1
            if self.seen == self.at:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno} ({event})"
                raise KeyboardInterrupt


@tool
def quiet(*, context: ToolContext) -> str:
    """Change nothing, with the right to."""
    return "done"


def blocking(world: World, one: Any) -> None:
    world.run(one)


def awaited(backend: str) -> Callable[[World, Any], None]:
    """Run a call in an event loop of its own."""

    def run(world: World, one: Any) -> None:
        runner = world.runner(one)
        anyio.run(lambda: runner.aexecute(ToolCall("c1", one.name)), backend=backend)

    return run


def try_every_moment(
    make: Callable[[], World],
    one: Any,
    prefix: str,
    stride: int = 1,
    run: Callable[[World, Any], None] = blocking,
) -> int:
    """Interrupt a call at one moment after the other, each in a world of its own. Returns how many."""
    whole = make()
    before = whole.facts()
    whole.run(succeeds)
    after = whole.facts()
    at = 1
    while True:
        world = make()
        interrupter = Interrupter(at, prefix)
        if not interrupter(partial(run, world, one)):
            return at // stride
        assert world.facts() in (before, after), interrupter.place
        # Nobody calls recover: the next call itself must find everything in order.
        deadline = Deadline.after(timedelta(seconds=5))
        try:
            world.runner(quiet).execute(
                ToolCall("c2", "quiet"), context=ToolContext(world.state, deadline=deadline)
            )
        except Exception as error:
            raise AssertionError(f"stuck after an interrupt at {interrupter.place}") from error
        assert world.outcomes()[-1] == "ok", interrupter.place
        happened = any(each.success and each.call_id == "c1" for each in world.ends())
        assert world.facts() == (after if happened else before), interrupter.place
        recover(world.state)
        ended = {each.attempt_id for each in world.ends()}
        assert all(each.attempt_id in ended for each in world.session[ToolStarted].all()), interrupter.place
        assert list(world.filesystem.unfinished()) == [], interrupter.place
        at += stride


@pytest.mark.parametrize("one", [succeeds, failing_tool], ids=["succeeds", "fails"])
def test_an_interrupt_at_any_moment_of_a_call_leaves_all_or_nothing(tmp_path: Path, one: Any) -> None:
    """Every moment in the code of the tools room is tried; new code is covered without being listed."""
    assert try_every_moment(lambda: make_world("memory", "memory", tmp_path), one, TOOLS) > 100


# Between making a coroutine and awaiting it there is a moment, too.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("one", [succeeds, succeeds_async], ids=["sync", "async"])
def test_an_interrupt_in_an_event_loop_leaves_all_or_nothing(tmp_path: Path, one: Any, backend: str) -> None:
    """Also where the error of the task that was interrupted keeps everything alive that the call had."""
    moments = try_every_moment(
        lambda: make_world("memory", "memory", tmp_path), one, TOOLS, run=awaited(backend)
    )
    assert moments > 60


@pytest.mark.parametrize("one", [succeeds, failing_tool], ids=["succeeds", "fails"])
def test_an_interrupt_on_disk_leaves_all_or_nothing(tmp_path: Path, one: Any) -> None:
    """The same with a workspace on disk, at every seventh moment."""
    worlds = iter(range(10_000))

    def make() -> World:
        place = tmp_path / str(next(worlds))
        place.mkdir()
        return make_world("memory", "host", place)

    assert try_every_moment(make, one, TOOLS, stride=7) > 15


@pytest.mark.parametrize("one", [succeeds, failing_tool], ids=["succeeds", "fails"])
def test_an_interrupt_below_the_tools_leaves_all_or_nothing(tmp_path: Path, one: Any) -> None:
    """In the session, the fold, the codec and the filesystem in memory as well, at every third moment."""
    assert try_every_moment(lambda: make_world("memory", "memory", tmp_path), one, ROOT, stride=3) > 100
