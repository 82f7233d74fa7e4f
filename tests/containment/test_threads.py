"""A function on a worker thread and its caller: either may leave first, and neither keeps the other alive."""

from __future__ import annotations

import threading
import weakref

import anyio
import anyio.lowlevel
import pytest

from treenail.containment import CancellationToken, wait_finished, workers
from treenail.containment.threads import Workers

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("is_early", [False, True])
def test_an_event_loop_waits_for_a_function_that_has_ended_already_or_will(is_early: bool) -> None:
    let_go = threading.Event()

    async def main() -> object:
        future = workers.start(lambda: let_go.wait(60) and "done")
        if is_early:
            let_go.set()
            future.result(60)
        async with anyio.create_task_group() as group:
            group.start_soon(wait_finished, future)
            await anyio.lowlevel.checkpoint()
            let_go.set()
        return future.result()

    assert anyio.run(main) == "done"


def test_a_wait_that_was_given_up_can_be_begun_again() -> None:
    let_go = threading.Event()

    async def main() -> object:
        future = workers.start(lambda: let_go.wait(60) and "done")
        with anyio.move_on_after(0.001) as first:
            await wait_finished(future)
        let_go.set()
        await wait_finished(future)
        return first.cancelled_caught, future.result()

    assert anyio.run(main) == (True, "done")


def test_an_idle_worker_keeps_no_result_alive() -> None:
    """A worker lets go of a function's result before it waits for the next function."""

    class Result:
        pass

    pool = Workers()
    future = pool.start(Result)
    alive = weakref.ref(future.result(60))
    del future
    pool.start(int).result(60)  # on the same worker
    assert alive() is None


def test_a_token_that_was_let_go_does_not_follow_any_more() -> None:
    parent = CancellationToken()
    kept, let_go = CancellationToken(parent), CancellationToken(parent)
    let_go.unlink()
    let_go.unlink()
    parent.cancel(detail="enough")
    assert (kept.is_cancelled, kept.detail) == (True, "enough")
    assert not let_go.is_cancelled
    assert CancellationToken(parent).detail == "enough"
