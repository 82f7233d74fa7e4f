"""The CLI's process: where it works, and how it is ended with everything that it started.

Theory of operation
-------------------
The SDK starts a program of our choice, so it is given a script. The script drops what is secret in this
process's environment and becomes the supervisor that commands run below (`treenail.tools.supervisor`), with
the CLI below it. Two named pipes lead to the supervisor: when the control pipe is closed, which our death
does too, it kills the CLI and all that was started below it; the status pipe ends when nothing of that is
left.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread
import claude_agent_sdk as sdk

from treenail.clock import new_id
from treenail.errors import UsageError
from treenail.providers.claude_agent.settings import Settings
from treenail.tools import SUPERVISOR, command_environment, end_processes, processes_marked

_IS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KILL_TIMEOUT_S = 15.0


class Cli:
    """The CLI's process, and what belongs to it on disk."""

    def __init__(self, settings: Settings, root: Path | None) -> None:
        self.program = program = _program(settings)
        self.directory = Path(tempfile.mkdtemp(prefix="treenail-claude-"))
        self.cwd = root if root is not None else _nowhere(self.directory)
        self.errors: deque[str] = deque(maxlen=20)
        self.marker = str(new_id())
        for name in ("control", "status"):
            os.mkfifo(self.directory / name, 0o600)
        # Ours is the only writer of one and reader of the other, so that an end is seen on both sides.
        self._control: int | None = os.open(self.directory / "control", os.O_RDWR)
        self._status: int | None = os.open(self.directory / "status", os.O_RDONLY | os.O_NONBLOCK)
        self._heard = b""
        """What its supervisor has said of it."""
        self.launcher = self.directory / "claude"
        self.launcher.write_text(_script(program, self.directory, self.cwd, _secret_names(settings)))
        self.launcher.chmod(0o700)

    def said(self, line: str) -> None:
        """Keep what the CLI complains about: its last words explain its end."""
        self.errors.append(line)

    async def processes(self) -> frozenset[int]:
        """Return what runs for this CLI: itself, and whatever it started."""
        return await anyio.to_thread.run_sync(processes_marked, self.marker)

    async def end_others(self, known: frozenset[int]) -> None:
        """End what was started since: what a command leaves running would outlive its call."""
        new = await self.processes() - known
        if new:
            await anyio.to_thread.run_sync(end_processes, new)

    def kill(self) -> None:
        """End the CLI and everything below it. It has happened when `wait` returns."""
        control, self._control = self._control, None
        if control is not None:
            self._kill_itself()
            os.close(control)

    def _kill_itself(self) -> None:
        """Kill the CLI's own process at once; on a busy machine it could act before its supervisor does."""
        if self._status is not None:
            with suppress(BlockingIOError):  # it has said nothing since
                self._heard += os.read(self._status, 4_096)
        said = self._heard.split()
        # Until it has said more than that, its id is not another process's.
        if len(said) == 2 and said[0] == b"started":
            with suppress(OSError):
                os.kill(int(said[1]), signal.SIGKILL)

    async def wait_until_ended(self) -> None:
        """Wait until the CLI itself has ended; what it started may be left."""
        while self._status is not None and not re.search(rb"^(failed|stopped|exited)", self._heard, re.M):
            await anyio.wait_readable(self._status)
            heard = os.read(self._status, 4_096)
            if not heard:
                return
            self._heard += heard

    async def wait(self) -> None:
        """Wait until nothing of it is left."""
        if self._status is None:
            return
        with anyio.move_on_after(_KILL_TIMEOUT_S):
            while True:
                await anyio.wait_readable(self._status)
                if not os.read(self._status, 4_096):
                    return

    def forget(self) -> None:
        """Close and remove what belongs to the process."""
        self.kill()
        status, self._status = self._status, None
        if status is not None:
            os.close(status)
        shutil.rmtree(self.directory, ignore_errors=True)


def _nowhere(private: Path) -> Path:
    """Return an empty directory, the same each time: the CLI finds its conversations by where it worked."""
    place = Path(tempfile.gettempdir()) / f"treenail-claude-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.is_symlink() or place.stat().st_uid != os.getuid():
        place = private / "empty"
        place.mkdir()
    return place


def _program(settings: Settings) -> Path:
    """Find the CLI: the one that was named, else the SDK's own, else whatever is installed."""
    cli = settings.cli_path or Path(sdk.__file__).parent / "_bundled" / "claude"
    if cli.exists():
        return cli
    found = shutil.which("claude")
    if found is None:
        raise UsageError(f"there is no CLI at {cli}; install claude-agent-sdk, or pass cli_path")
    return Path(found)


def _secret_names(settings: Settings) -> list[str]:
    """Name what is secret in this process's environment and not the CLI's own."""
    kept = command_environment(allow=settings.allow_env)
    return [
        name
        for name in os.environ
        if name not in kept
        and name not in settings.env
        and not name.startswith(("ANTHROPIC_", "CLAUDE_"))
        and _IS_NAME.fullmatch(name)
    ]


def _script(program: Path, directory: Path, cwd: Path, dropped: Sequence[str]) -> str:
    """Write the script that the SDK starts: it drops secrets and runs the CLI below the supervisor."""
    command = [sys.executable, "-I", "-S", "-X", "utf8", str(SUPERVISOR), "3", "4", str(program)]
    where = [str(os.getpid()), str(cwd.resolve())]
    control, status, itself, place = (
        shlex.quote(str(directory / each)) for each in ("control", "status", "claude", "")
    )
    return "\n".join(
        (
            "#!/bin/sh",
            *(f"unset {name}" for name in dropped),
            f"exec 3<{control} 4>{status}",
            # The names are needed no longer, and a killed process cannot remove them.
            f"rm -f {control} {status} {itself}; rmdir {place} 2> /dev/null",
            f'exec {shlex.join(command)} "$@" {shlex.join(where)}',
            "",
        )
    )
