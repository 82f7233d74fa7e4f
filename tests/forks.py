"""The one place where a test forks.

A forked child is a copy of the test runner. If it returned from the test, by whatever exception, it would
report the test a second time and run the tests that follow. So a child made here has one way out, `os._exit`:

- All signals are blocked around the fork, so none reaches the child before it is inside its `try`.
- It forgets the runner's handlers. Ctrl-C or the time limit of a test ends it, and raises nothing in it.
- It ends in a `finally` that blocks all signals again, so that no handler raises on the way to `os._exit`.
- It lives for `LIFE_S` at most: a lock that another thread held during the fork stays locked in the child.

Objects that other tests have left behind are frozen in the child: the collector does not finalise them there.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")

LIFE_S = 600
"""How long a child may live before its alarm ends it."""

FAILED = 1
"""How a child ends that raised something."""

PR_SET_CHILD_SUBREAPER = 36


class ProcessKilled(Exception):
    """A child was ended by SIGKILL."""


def fork(work: Callable[[], object]) -> int:
    """Start a child that does the work and ends; return its process id.

    It ends with 0, or, if the work raises anything at all, with `FAILED` and a trace on stderr.
    """
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            # The threads of the test runner do not matter to the child: it runs only the work.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
            if child == 0:
                _live(work, blocked_before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
    return child


def _live(work: Callable[[], object], blocked: set[signal.Signals]) -> NoReturn:
    status = FAILED
    try:
        gc.freeze()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.alarm(LIFE_S)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        work()
        status = 0
    except BaseException:  # noqa: BLE001  # whatever it is, it must not reach the test runner
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        finally:
            os._exit(status)


def ended(child: int) -> int:
    """Wait for a child; return its exit code, or the negative number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(work: Callable[[], T], *, orphans: bool = False) -> T:
    """Do the work in a child, and return its result or raise `AssertionError` with its trace.

    With `orphans`, return only when nothing is left of what the child had started.
    """
    read, write = os.pipe()

    def answer() -> None:
        try:
            told = (True, work())
        except BaseException:  # noqa: BLE001  # whatever it is, the parent is told
            told = (False, traceback.format_exc())
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(told, pipe)

    child = fork((lambda: _guard(answer)) if orphans else answer)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read()
    code = ended(child)
    if code == -signal.SIGKILL:
        raise ProcessKilled
    assert code == 0, f"the child ended with {code}"
    is_done, value = pickle.loads(told)
    assert is_done, f"the child failed:\n{value}"
    return value  # type: ignore[no-any-return]  # what the child answered with


def orphaned(work: Callable[[], object]) -> Callable[[], None]:
    """Do the work in a child that is killed by it, and return at once: what the child started still runs.

    The function that is returned waits until nothing of that is left.
    """
    read, write = os.pipe()

    def guard() -> None:
        _adopt_orphans()
        worker = fork(lambda: (os.close(write), work()))
        assert ended(worker) == -signal.SIGKILL
        os.write(write, b".")
        while _next_ended() is not None:
            pass

    guardian = fork(guard)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read(1) == b"."

    def wait() -> None:
        assert ended(guardian) == 0

    return wait


def _guard(work: Callable[[], object]) -> None:
    """Do the work in a child, wait for it and for all that it leaves behind, and end as it did."""
    _adopt_orphans()
    worker = fork(work)
    codes = {}
    while (found := _next_ended()) is not None:
        codes[found[0]] = os.waitstatus_to_exitcode(found[1])
    if codes[worker] < 0:
        os.kill(os.getpid(), -codes[worker])
    assert codes[worker] == 0, f"the worker ended with {codes[worker]}"


def _adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _next_ended() -> tuple[int, int] | None:
    try:
        return os.waitpid(-1, 0)
    except ChildProcessError:
        return None
