"""The helper that makes every fork of the tests: no child returns from it, whatever it raises."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import NoReturn

import pytest
from tests.forks import FAILED, ProcessKilled, ended, fork, in_child, orphaned


def raises(error: BaseException) -> Callable[[], NoReturn]:
    def work() -> NoReturn:
        raise error

    return work


def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted_by_its_own_handler() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGTERM)


def fails_in_its_cleanup() -> None:
    try:
        raise ValueError("first")
    finally:
        raise SystemExit(0)  # the case itself


def fails_without_stderr() -> None:
    os.close(2)
    raise ValueError("x")


WAYS: dict[str, tuple[Callable[[], object], int]] = {
    "returns": (lambda: None, 0),
    "an exception": (raises(ValueError("x")), FAILED),
    "SystemExit": (raises(SystemExit(0)), FAILED),
    "KeyboardInterrupt": (raises(KeyboardInterrupt()), FAILED),
    "GeneratorExit": (raises(GeneratorExit()), FAILED),
    "pytest.exit": (lambda: pytest.exit("x"), FAILED),
    "pytest.fail": (lambda: pytest.fail("x"), FAILED),
    "its cleanup": (fails_in_its_cleanup, FAILED),
    "its report": (fails_without_stderr, FAILED),
    "too deep": (lambda: deeper(), FAILED),
    "Ctrl-C": (interrupted, -signal.SIGINT),
    "a handler of its own": (interrupted_by_its_own_handler, FAILED),
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    "its own exit": (lambda: os._exit(7), 7),
}


def deeper() -> None:
    deeper()


@pytest.mark.parametrize("way", WAYS)
def test_a_child_never_returns(way: str, capfd: pytest.CaptureFixture[str]) -> None:
    """However its work ends, the child ends there, and the parent learns how."""
    work, code = WAYS[way]
    assert ended(fork(work)) == code
    assert ("Traceback" in capfd.readouterr().err) == (code == FAILED and way != "its report")


def test_a_signal_that_waits_during_the_fork_reaches_the_child_inside() -> None:
    """Also one that is pending when the child begins finds no handler of the runner."""

    def work() -> None:
        signal.raise_signal(signal.SIGUSR1)

    def handler(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        assert ended(fork(work)) == -signal.SIGUSR1
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_the_parent_keeps_its_signals() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert ended(fork(lambda: None)) == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("orphans", [False, True], ids=["the child", "all it started"])
def test_a_child_answers_with_its_result_its_trace_or_its_death(orphans: bool) -> None:
    assert in_child(lambda: "a result", orphans=orphans) == "a result"
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        in_child(lambda: 1 // 0, orphans=orphans)
    with pytest.raises(AssertionError, match="SystemExit"):
        in_child(raises(SystemExit(0)), orphans=orphans)
    with pytest.raises(ProcessKilled):
        in_child(lambda: os.kill(os.getpid(), signal.SIGKILL), orphans=orphans)
    with pytest.raises(AssertionError, match="ended with 1"):
        in_child(lambda: lambda: "cannot be pickled", orphans=orphans)


def test_what_a_killed_child_leaves_behind_is_waited_for() -> None:
    """`orphaned` returns while a grandchild still runs, and what it returns waits for that grandchild."""
    go_read, go_write = os.pipe()
    done_read, done_write = os.pipe()

    def grandchild() -> None:
        os.read(go_read, 1)
        os.write(done_write, b"done")

    def work() -> None:
        fork(grandchild)
        os.kill(os.getpid(), signal.SIGKILL)

    wait = orphaned(work)
    os.write(go_write, b".")
    wait()
    assert os.read(done_read, 4) == b"done"
    for end in (go_read, go_write, done_read, done_write):
        os.close(end)


def test_a_worker_that_survives_its_work_is_an_error() -> None:
    with pytest.raises(AssertionError):
        orphaned(lambda: None)
