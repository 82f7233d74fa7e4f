"""Calling a judge: in whichever way it answers, on a thread if it is a plain function."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from treenail.containment import describe, is_async, wait_finished, workers
from treenail.errors import NestedEvaluationError

T = TypeVar("T")


async def on_worker(work: Callable[[], T]) -> T:
    """Call a function on a worker thread, and wait for it.

    If the waiting is cancelled, the function runs on, on a daemon thread that nothing waits for. Its
    exception is raised here. An interrupt or a cancellation that it raises counts as a crash: neither
    can reach such a thread from outside.
    """
    future = workers.start(work)
    await wait_finished(future)
    try:
        return future.result()
    except Exception:
        raise
    except BaseException as error:
        raise NestedEvaluationError(f"the judge raised {describe(error)}", kind="crashed") from error


async def ask(judge: object, method: str, *args: Any, **kwargs: Any) -> object:
    """Call a judge's method: its async twin (`a` before the name) if it has one, else the method itself."""
    twin: Callable[..., Awaitable[object]] | None = getattr(judge, f"a{method}", None)
    if twin is not None:
        return await twin(*args, **kwargs)
    plain = getattr(judge, method)
    if is_async(plain):
        return await plain(*args, **kwargs)
    answer: object = await on_worker(lambda: plain(*args, **kwargs))
    return await answer if inspect.isawaitable(answer) else answer
