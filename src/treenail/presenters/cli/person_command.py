"""`!command`: a command of the person's own, with their own rights, that the model is shown afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
from codecs import getincrementaldecoder
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from treenail.presenters.cli.attachments import fenced
from treenail.printable import printable

MAX_TOLD_CHARS = 20_000
"""How much of a command's output the model is shown: its beginning and its end."""

_REST_S = 0.5
"""How long the output is read after the command has ended: something that it started may keep it open."""


class PersonCommand:
    """One command of the person's, under way."""

    def __init__(self, command: str, directory: Path) -> None:
        self.command, self._directory = command, directory
        self._process: asyncio.subprocess.Process | None = None
        self._head = self._tail = ""
        self._count = 0
        self._kills = 0

    async def run(self, show: Callable[[str], object]) -> str:
        """Run it to its end, and return what the model is told. `show` gets its output as it comes."""
        self._process = await asyncio.create_subprocess_exec(
            os.environ.get("SHELL") or "/bin/sh",
            "-c",
            self.command,
            cwd=self._directory,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        if self._kills:
            self._kill()  # It was stopped before it had begun.
        reading = asyncio.create_task(self._read(show))
        try:
            code = await self._process.wait()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(reading), _REST_S)
        finally:
            reading.cancel()
        ended = f"exit code {code}" if code >= 0 else f"ended by signal {-code}"
        left_out = self._count - len(self._head) - len(self._tail)
        text = self._head + (f"\n[... {left_out} characters left out ...]\n" if left_out else "") + self._tail
        said = f"I ran this command myself ({ended}):\n{fenced(f'$ {self.command}')}"
        return f"{said}\nIts output:\n{fenced(text)}" if text.strip() else f"{said}\nIt printed nothing."

    async def _read(self, show: Callable[[str], object]) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        decoder = getincrementaldecoder("utf-8")("replace")
        half = MAX_TOLD_CHARS // 2
        while piece := await self._process.stdout.read(8192):
            text = decoder.decode(piece)
            show(printable(text))
            self._count += len(text)
            room = half - len(self._head)
            self._head += text[:room]
            self._tail = (self._tail + text[room:])[-half:]

    def stop(self) -> None:
        """End it as Ctrl-C would; the second time, at once."""
        self._kills += 1
        self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGINT if self._kills == 1 else signal.SIGKILL)
