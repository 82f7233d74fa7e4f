"""Signals are noted while a turn runs, and only then."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from treenail.turns.signals import noted_signals


def test_ctrl_c_is_noted_and_goes_on_to_whoever_handled_it_before() -> None:
    """The turn knows the cause; what happens then is what happened before."""
    with pytest.raises(KeyboardInterrupt), noted_signals() as note:
        signal.raise_signal(signal.SIGINT)
    assert note.reason == "interrupt"


def test_nothing_is_left_installed_however_turns_overlap() -> None:
    """Handlers are there while any turn runs, and are put back by the last one."""
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    first, second = noted_signals(), noted_signals()
    one, two = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    second.__exit__(None, None, None)
    assert (one.reason, two.reason) == (None, "interrupt")
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_program_that_handles_sigterm_itself_keeps_doing_so() -> None:
    """Its handler is called, and the turn is not stopped."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: seen.append(signum))
    try:
        with noted_signals() as note:
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (seen, note.reason) == ([signal.SIGTERM], None)


def test_a_turn_in_another_thread_installs_nothing() -> None:
    """Only the main thread may handle signals."""
    seen: list[object] = []

    def run() -> None:
        with noted_signals() as note:
            seen.extend((signal.getsignal(signal.SIGINT), note.reason))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT), None]


def outcome_of(program: str) -> tuple[list[str], str]:
    """Run a program of its own, and return the words it prints and its complaints."""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120
    )
    return done.stdout.split(), done.stderr


TWICE = """
import asyncio, collections, functools, itertools, operator, signal
from treenail.turns.signals import noted_signals

interrupt = functools.partial(signal.raise_signal, signal.SIGINT)

class Ready(collections.deque):
    pass

def first(ready):
    taken = iter(functools.partial(collections.deque.popleft, ready), None)
    # The next callback is taken from the queue, and the second signal comes before it is called.
    beside = map(operator.call, itertools.chain([interrupt], itertools.repeat(int)))
    ready.popleft = functools.partial(next, map(operator.itemgetter(0), zip(taken, beside)))
    interrupt()

async def main():
    loop = asyncio.get_running_loop()
    loop._ready = Ready(loop._ready)
    loop.call_soon(first, loop._ready)
    try:
        with noted_signals():
            await asyncio.Event().wait()
    finally:
        print("stopped")

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("left")
"""


def test_a_second_ctrl_c_that_meets_the_event_loop_itself_does_not_lose_what_the_first_one_woke() -> None:
    """The callback that the loop has in its hands is called all the same, so its task can end."""
    assert outcome_of(TWICE) == (["stopped", "left"], "")


BUSY = """
import asyncio, signal
from treenail.turns.signals import noted_signals

async def main():
    with noted_signals():
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            signal.raise_signal(signal.SIGINT)
            print("this line is not reached")

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("left")
"""


def test_a_second_ctrl_c_that_meets_a_programs_code_is_raised_there() -> None:
    """Code that takes long without waiting for events is broken off; the loop could not do that."""
    assert outcome_of(BUSY) == (["left"], "")


AGAIN = """
import asyncio, signal
from treenail.turns.signals import noted_signals

async def stubborn():
    loop = asyncio.get_running_loop()
    with noted_signals():
        loop.call_soon(signal.raise_signal, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            loop.call_soon(signal.raise_signal, signal.SIGINT)
            await asyncio.Event().wait()

async def calm():
    asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        print("cancelled")
        raise

for main in (stubborn, calm):
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print("left")
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_a_turn_that_ends_after_its_loop_leaves_ctrl_c_to_the_next_one() -> None:
    """The handler of a loop that is gone is not put back: the next loop would not have one of its own."""
    assert outcome_of(AGAIN) == (["left", "cancelled", "left", "True"], "")
