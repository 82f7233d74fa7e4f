"""A real terminal for stories: a program in a pty, what it has shown, and what is typed."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from fcntl import ioctl
from pathlib import Path
from time import monotonic

LIMIT_S = 60.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b\][^\x07]*\x07|\r")


_NOT_A_PERSONS = {"CI", "PYTHONDONTWRITEBYTECODE", "COLUMNS", "LINES"}
"""What machines set and people do not; the second makes each start compile everything anew."""


class Terminal:
    """Runs `treenail` in a pty of its own."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        columns: int = 120,
        before: Sequence[str] = (),
    ) -> None:
        master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self._master = master
        self._seen = ""
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "treenail", *arguments],
            cwd=cwd,
            env={**clean_environment(cwd), "TERM": "xterm", **(env or {})},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # The pty becomes the controlling terminal, so that a typed Ctrl-C is a signal.
            preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  # no thread holds a lock here
        )
        os.close(slave)

    @property
    def written(self) -> str:
        """Everything that the program has written so far, control sequences included."""
        return self._seen

    def resize(self, columns: int, rows: int = 40) -> None:
        """Give the window another size; the program is told by a signal."""
        ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def text(self) -> str:
        """What has been shown so far, without the terminal's control sequences."""
        return _ESCAPES.sub("", self._seen)

    def wait_for(self, pattern: str) -> str:
        """Read until the screen shows something."""
        until = monotonic() + LIMIT_S
        while not re.search(pattern, self.text):
            if not self._read(until - monotonic()):
                raise AssertionError(f"{pattern!r} was not shown; the screen has:\n{self.text}")
        return self.text

    def type(self, text: str) -> None:
        """Type something; \\x03 is Ctrl-C."""
        os.write(self._master, text.encode())

    def kill(self) -> None:
        """Kill the program and everything in its session."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)

    def end(self) -> int:
        """Read to the end and return the exit code."""
        until = monotonic() + LIMIT_S
        while self._read(until - monotonic()):
            pass
        return self.process.wait(LIMIT_S)

    def _read(self, seconds: float) -> bool:
        if seconds <= 0:
            raise AssertionError(f"the program goes on and on; the screen has:\n{self.text}")
        ready, _, _ = select.select([self._master], [], [], seconds)
        if not ready:
            return True
        try:
            piece = os.read(self._master, 65536)
        except OSError:
            return False  # Linux says so when the other end is closed.
        self._seen += piece.decode("utf-8", "replace")
        return bool(piece)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        os.close(self._master)


def clean_environment(cwd: Path) -> dict[str, str]:
    """An environment without keys or settings, whose state lies beside the directory."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TREENAIL_", "OPENAI_", "ANTHROPIC_", "XDG_")) and name not in _NOT_A_PERSONS
    }
    state = cwd.parent / f"{cwd.name}-state"
    return {**kept, "XDG_STATE_HOME": str(state), "HOME": str(cwd.parent), "NO_COLOR": "1"}


def treenail(
    *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `treenail` without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "treenail", *arguments],
        cwd=cwd,
        env={**clean_environment(cwd), **(env or {})},
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S * 2,
    )
