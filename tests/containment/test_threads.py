"""A job and whoever waits for it: one of them may leave first, and neither keeps the other alive."""

from __future__ import annotations

import gc
import threading
import weakref

import anyio
import anyio.lowlevel
import pytest

from treenail.containment import threads
from treenail.containment.cancel import CancellationToken
from treenail.containment.threads import Handover

pytestmark = pytest.mark.timeout(120)


def test_a_job_is_finished_within_a_moment_or_is_not() -> None:
    let_go = threading.Event()
    handover = Handover()
    handover.submit(lambda: let_go.wait(10) and "done")
    assert not handover.is_finished_within(0.001)
    assert not handover.is_finished
    let_go.set()
    assert handover.is_finished_within(10)
    assert handover.is_finished_within(0)
    assert handover.result() == "done"


@pytest.mark.parametrize("is_early", [False, True])
def test_an_event_loop_waits_for_a_job_that_has_ended_already_or_will(is_early: bool) -> None:
    let_go = threading.Event()

    async def main() -> object:
        handover = Handover()
        handover.submit(lambda: let_go.wait(10) and "done")
        if is_early:
            let_go.set()
            assert handover.is_finished_within(10)
        async with anyio.create_task_group() as group:
            group.start_soon(handover.wait_finished)
            await anyio.lowlevel.checkpoint()
            let_go.set()
        return handover.result()

    assert anyio.run(main) == "done"


def test_a_wait_that_was_given_up_can_be_begun_again() -> None:
    let_go = threading.Event()

    async def main() -> object:
        handover = Handover()
        handover.submit(lambda: let_go.wait(10) and "done")
        with anyio.move_on_after(0.001) as first:
            await handover.wait_finished()
        let_go.set()
        await handover.wait_finished()
        return first.cancelled_caught, handover.result()

    assert anyio.run(main) == (True, "done")


def test_what_a_job_raises_is_raised_where_its_result_is_taken() -> None:
    handover = Handover()
    handover.submit(lambda: 1 // 0)
    assert handover.is_finished_within(10)
    with pytest.raises(ZeroDivisionError):
        handover.result()


def test_a_job_that_is_over_leaves_nothing_for_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits holds the job; if the job held it as well, only a collection would free them."""

    class Result:
        pass

    # One worker that nobody else uses: it gets both jobs.
    monkeypatch.setattr(threads, "workers", threads.Workers())

    handover = Handover()
    handover.submit(Result)
    assert handover.is_finished_within(10)
    alive = weakref.ref(handover.result())
    gc.disable()
    try:
        del handover
        # The worker lets go of the job when it is on its way to wait for the next one.
        other = Handover()
        other.submit(int)
        assert other.is_finished_within(10)
        assert alive() is None
    finally:
        gc.enable()


def test_a_token_that_was_let_go_does_not_follow_any_more() -> None:
    parent = CancellationToken()
    kept, let_go = CancellationToken(parent), CancellationToken(parent)
    let_go.unlink()
    let_go.unlink()
    parent.cancel(detail="enough")
    assert (kept.is_cancelled, kept.detail) == (True, "enough")
    assert not let_go.is_cancelled
    assert CancellationToken(parent).detail == "enough"
