"""Signals are noted while a turn runs, and only then."""

from __future__ import annotations

import signal
import threading

import pytest

from holdfast.turns.signals import noted_signals


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
