"""Asking somebody who may hang, crash or answer nonsense, without being harmed by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from treenail.containment.threads import describe, wait_finished, workers
from treenail.errors import NestedEvaluationError

T = TypeVar("T")


async def on_worker(work: Callable[[], T]) -> T:
    """Call a function on a thread that can be left behind, and wait for it.

    If the waiting is cancelled, the function runs on, on a daemon thread that holds up nobody. What it
    raises is raised here, except that nothing on such a thread can be a person's interrupt or the
    task's own cancellation: those are a crash of the function.
    """
    future = workers.start(work)
    await wait_finished(future)
    try:
        return future.result()
    except Exception:
        raise
    except BaseException as error:
        raise NestedEvaluationError(f"the judge raised {describe(error)}", kind="crashed") from error
