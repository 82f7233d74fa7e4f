"""The pipe to an editor: one JSON message a line on the input and the output that this process began with.

They belong to the protocol alone. `claim` takes both away before anything else runs: from then on, whatever
prints, a tool, a library or a program that they start, prints to the error stream, and whatever reads, reads
nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import sys
import threading
from contextlib import suppress
from typing import Any

_logger = logging.getLogger("treenail.acp")

_PARSE_ERROR = {"code": -32700, "message": "Parse error: each line must be one JSON object"}


def claim() -> tuple[int, int]:
    """Take input and output for the protocol, and return their descriptors."""
    sys.stdout.flush()
    reading, writing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return reading, writing


class StdioTransport:
    """Messages to and from an editor, as the SDK wants them.

    Threads read and write, so that any kind of descriptor will do and an editor that does not read holds up
    nobody else. They are daemons: an editor that is stuck cannot keep this process from ending.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._received: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._to_send: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]]] = queue.SimpleQueue()
        for target, descriptor in ((self._read, reading), (self._write, writing)):
            threading.Thread(target=target, args=(descriptor,), name="treenail-acp", daemon=True).start()

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message; None when the editor has closed its end."""
        return await self._received.get()

    async def send(self, message: dict[str, Any]) -> None:
        """Write a message. Raises `ConnectionError` if the editor is gone."""
        # ASCII: a lone surrogate of a file's name must not break the line.
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        done: asyncio.Future[None] = self._loop.create_future()
        self._to_send.put((data, done))
        await done

    async def flush(self) -> None:
        """Wait until everything that was sent is written. Raises `ConnectionError` if the editor is gone."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._to_send.put((b"", done))
        await done

    async def close(self) -> None:
        """Nothing: the threads end with the process."""

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as lines:
            try:
                for line in lines:
                    if line.strip():
                        self._take(line)
            except OSError as error:
                _logger.warning("the editor's input cannot be read: %s", error)
        self._call(self._received.put_nowait, None)

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if isinstance(message, dict):
            self._call(self._received.put_nowait, message)
        else:
            answer = json.dumps({"jsonrpc": "2.0", "id": None, "error": _PARSE_ERROR}).encode() + b"\n"
            self._call(lambda: self._to_send.put((answer, self._loop.create_future())))

    def _write(self, descriptor: int) -> None:
        broken: OSError | None = None
        while True:
            data, done = self._to_send.get()
            try:
                while data and broken is None:
                    data = data[os.write(descriptor, data) :]
            except OSError as error:
                broken = error
            self._call(_settle, done, broken)

    def _call(self, function: Any, *arguments: Any) -> None:
        with suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(function, *arguments)


def _settle(done: asyncio.Future[None], broken: OSError | None) -> None:
    if done.done():
        return
    if broken is None:
        done.set_result(None)
    else:
        done.set_exception(ConnectionError(f"the editor is gone: {broken}"))
