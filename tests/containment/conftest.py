"""What the containment's tests share: a clock, and ways to run many callers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from treenail.containment import ExecutionConfig
from treenail.testing import FakeClock

T = TypeVar("T")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def config() -> Callable[..., ExecutionConfig]:
    """Make ceilings that nobody reaches, except those that the test names."""

    def make(**changes: object) -> ExecutionConfig:
        wide = {"max_cost_usd": 1000.0, "max_steps": 100_000, "max_retries_total": 1000, "timeout_ms": 0}
        return ExecutionConfig(**{**wide, **changes})  # type: ignore[arg-type] # the test names the fields

    return make


@pytest.fixture
def at_once() -> Callable[[int, Callable[[int], T]], list[T]]:
    """Run a function in many threads that all start at the same moment; return what each returned."""

    def run(count: int, work: Callable[[int], T]) -> list[T]:
        barrier = threading.Barrier(count)
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def one(number: int) -> None:
            barrier.wait()
            try:
                results[number] = work(number)
            except BaseException as error:  # noqa: BLE001 - shown to the test
                errors.append(error)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not errors, errors
        assert len(results) == count, "a thread hangs"
        return [results[number] for number in range(count)]

    return run
