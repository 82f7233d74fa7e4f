"""`sys.exit` in a tool's code fails the call; it does not end the program."""

from __future__ import annotations

import signal
import threading
import traceback

from treenail.errors import ToolError


def failed_exit(what: str, error: SystemExit) -> ToolError:
    """Make the error for a call in which `what` has called `sys.exit`.

    Raises the exit itself if a signal handler of the program's has raised it: that one is meant to end it.
    """
    if _is_from_a_signal(error):
        raise error
    return ToolError(
        f"{what} called sys.exit({error.code!r}), which only fails the call; "
        "let the tool return, or raise an error"
    )


def _is_from_a_signal(error: BaseException) -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = [signal.getsignal(each) for each in signal.valid_signals()]
    codes = {getattr(each, "__code__", None) for each in handlers if callable(each)} - {None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
