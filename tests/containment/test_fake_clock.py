"""The clock for tests: it stands still until it is advanced, and then wakes everybody who is due."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.clock import Clock
from treenail.errors import UsageError
from treenail.testing import FakeClock


def test_it_is_a_clock_that_moves_only_by_hand() -> None:
    """Both kinds of time move together, by exactly what was asked for."""
    start = datetime(2030, 5, 5, tzinfo=UTC)
    clock = FakeClock(start)
    assert isinstance(clock, Clock)
    assert (clock.now(), clock.utcnow(), clock.monotonic()) == (start, start, 0.0)
    clock.advance(1.5)
    assert (clock.now(), clock.monotonic()) == (start + timedelta(seconds=1.5), 1.5)


def test_it_refuses_nonsense() -> None:
    """Time has a zone, and does not go back."""
    with pytest.raises(UsageError, match="aware"):
        FakeClock(datetime(2030, 1, 1))
    with pytest.raises(UsageError, match="never goes back"):
        FakeClock().advance(-1)


def test_it_wakes_threads_when_they_are_due(clock: FakeClock) -> None:
    """A sleeper wakes at its time and not before."""
    woken: list[float] = []

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        woken.append(seconds)

    threads = [threading.Thread(target=sleep, args=(seconds,)) for seconds in (1.0, 5.0)]
    for thread in threads:
        thread.start()
    clock.wait_for_timers(2)
    clock.advance(4.9)
    threads[0].join(60)
    assert woken == [1.0]
    clock.advance(0.1)
    threads[1].join(60)
    assert (woken, clock.sleepers) == ([1.0, 5.0], 0)
    clock.sleep(0)
    clock.sleep(-1)


async def test_it_wakes_tasks_when_they_are_due(clock: FakeClock) -> None:
    """Tasks wake too, from the same thread or from another; a cancelled sleeper leaves nothing behind."""
    woken: list[float] = []

    async def sleep(seconds: float) -> None:
        await clock.async_sleep(seconds)
        woken.append(seconds)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sleep, 1.0)
        tasks.start_soon(sleep, 2.0)
        tasks.start_soon(sleep, 99.0)
        tasks.start_soon(sleep, 0.0)
        await anyio.wait_all_tasks_blocked()
        assert (woken, clock.sleepers) == ([0.0], 3)
        clock.advance(1.0)
        await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(clock.advance, 1.0)
        await anyio.wait_all_tasks_blocked()
        assert woken == [0.0, 1.0, 2.0]
        tasks.cancel_scope.cancel()
    assert clock.sleepers == 0
    clock.advance(1000)
    assert woken == [0.0, 1.0, 2.0]


@given(st.lists(st.integers(1, 50), max_size=20), st.lists(st.integers(0, 20), max_size=20))
def test_timers_fire_in_order_at_their_own_time(due: list[int], steps: list[int]) -> None:
    """Each timer fires once, in order, and sees the very time that it was set for."""
    clock = FakeClock()
    fired: list[float] = []
    for seconds in due:
        clock.call_later(seconds, lambda: fired.append(clock.monotonic()))
    for seconds in steps:
        clock.advance(seconds)
    assert fired == sorted(at for at in due if at <= sum(steps))


def test_a_timer_may_set_another(clock: FakeClock) -> None:
    """A timer that is set by a timer and due within the same advance fires in it."""
    fired: list[float] = []

    def again() -> None:
        fired.append(clock.monotonic())
        clock.call_later(2, again)

    clock.call_later(1, again)
    clock.advance(6)
    assert fired == [1.0, 3.0, 5.0]


def test_waiting_for_timers_gives_up(clock: FakeClock) -> None:
    """A test that waits for a sleeper that never comes fails instead of hanging."""
    with pytest.raises(UsageError, match="1 were expected"):
        clock.wait_for_timers(1, timeout_s=0.01)
