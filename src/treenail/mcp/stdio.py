"""A server's process: in the sandbox, with named variables, spoken to by lines of JSON.

The SDK has a transport of its own for this. Ours differs in what it lets a server do: the process is confined
and has no variables but the named ones, a message has a limit, text that is not a message is noted and left
out, and what the process writes to its error output is kept for the error that a person reads.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from treenail.errors import McpError
from treenail.mcp.server import McpServer
from treenail.sandbox import CommandLine, Grants, Sandbox, confined

MAX_MESSAGE_BYTES = 16_000_000
"""How long one message of a server may be. A longer one ends the connection."""

_KEPT_ERRORS = 2_000
_KEPT_GARBAGE = 200
_PATIENCE_S = 2.0
"""How long a server may take to end by itself."""


@dataclass(slots=True)
class Output:
    """What a process has said besides messages, and how it ended."""

    errors: bytes = b""
    """The end of its error output."""
    garbage: bytes = b""
    """The beginning of the first line that is not a message."""
    garbage_lines: int = 0
    too_long: bool = False
    ended_by_itself: bool = False
    exit_code: int | None = None
    over: anyio.Event = field(default_factory=anyio.Event)
    """Set when nothing more can come."""

    def described(self) -> str:
        """Say what is known about a server that is gone or silent; empty if nothing is."""
        said = []
        if self.too_long:
            said.append(f"it sent a message of more than {MAX_MESSAGE_BYTES:,} bytes")
        if self.exit_code is not None:
            how = f"exit code {self.exit_code}"
            if self.exit_code < 0 or self.exit_code > 128:
                number = -self.exit_code if self.exit_code < 0 else self.exit_code - 128
                with suppress(ValueError):
                    how = f"ended by {signal.Signals(number).name}"
            said.append(f"its process ended ({how})")
        if self.garbage_lines:
            text = self.garbage.decode("utf-8", "replace")
            said.append(f"it wrote {self.garbage_lines} lines that are not messages, the first: {text!r}")
        if self.errors.strip():
            last = self.errors.decode("utf-8", "replace").strip()[-600:]
            said.append(f"its error output ended: {last!r}")
        return "; ".join(said)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server's process is started, and how it is confined."""

    directory: Path
    sandbox: Sandbox

    def confinement(self, server: McpServer) -> Sandbox:
        """Return the sandbox of a server's process: the run's, with the server's own grants."""
        grants = Grants(server.allow_network, tuple(Path(each).expanduser() for each in server.allow_write))
        return Sandbox(self.sandbox.mode, grants, self.sandbox.hidden)


@asynccontextmanager
async def process(server: McpServer, place: Place, output: Output) -> AsyncIterator[tuple[Any, Any]]:
    """Start a server, and yield the streams that the SDK's client reads and writes."""
    program = shutil.which(server.command[0], path=server.environment().get("PATH"))
    if program is None:
        raise McpError(
            f"the MCP server {server.name} cannot be started: there is no program {server.command[0]!r}; "
            "install it, or correct the command"
        )
    argv = (program, *server.command[1:])
    with _command_line(server, place, argv) as line:
        started = subprocess.Popen(  # noqa: ASYNC220  # in a loop that only this server has
            line.argv,
            env=dict(line.env),
            cwd=place.directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=line.descriptors,
        )
    to_client, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    sent, from_client = anyio.create_memory_object_stream[SessionMessage](0)
    with started:
        pipes = [_Pipe(each) for each in (started.stdin, started.stdout, started.stderr) if each is not None]
        to_server, from_server, errors = pipes
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_read, from_server, to_client, output)
            tasks.start_soon(_keep_errors, errors, output)
            tasks.start_soon(_write, to_server, from_client)
            try:
                yield received, sent
            finally:
                with anyio.CancelScope(shield=True):
                    for stream in (received, sent):
                        await stream.aclose()
                    to_server.close()
                    await _end(started)
                output.exit_code = started.returncode if output.ended_by_itself else None
                for each in pipes:
                    each.close()
                tasks.cancel_scope.cancel()


class _Pipe:
    """One of our ends of a process's pipes. After `close` it is at its end."""

    def __init__(self, file: Any) -> None:
        self._file = file
        os.set_blocking(file.fileno(), False)

    async def receive(self) -> bytes:
        """Return what has come; nothing at the end."""
        while not self._file.closed:
            try:
                return os.read(self._file.fileno(), 65_536)
            except BlockingIOError:
                pass
            try:
                await anyio.wait_readable(self._file.fileno())
            except anyio.ClosedResourceError:
                break
        return b""

    async def send(self, data: bytes) -> bool:
        """Send everything. Returns whether somebody was there to take it."""
        rest = memoryview(data)
        while rest and not self._file.closed:
            try:
                rest = rest[os.write(self._file.fileno(), rest) :]
            except BlockingIOError:
                try:
                    await anyio.wait_writable(self._file.fileno())
                except anyio.ClosedResourceError:
                    break
            except OSError:
                break
        return not rest

    def close(self) -> None:
        """Close it. Whoever waits for it is woken."""
        if not self._file.closed:
            anyio.notify_closing(self._file.fileno())
            self._file.close()


def _command_line(server: McpServer, place: Place, argv: tuple[str, ...]) -> Any:
    env = server.environment()
    sandbox = place.confinement(server)
    if sandbox.mode == "off":
        return nullcontext(CommandLine(argv, (), env))
    return confined(
        argv,
        place.directory,
        workspace=place.directory,
        env=env,
        grants=sandbox.grants,
        hidden=sandbox.hidden,
        shown=_absolute(map(str, server.allow_read)),
        mentioned=_absolute(argv),
        read_only=server.effects != "workspace",
    )


def _absolute(words: Iterable[str]) -> list[Path]:
    return [Path(each).expanduser() for each in words if os.path.isabs(os.path.expanduser(each))]


async def _read(pipe: _Pipe, to_client: Any, output: Output) -> None:
    """Pass the messages of a process on; note what is not one."""
    parts: list[bytes] = []
    try:
        async with to_client:
            with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                while not output.too_long:
                    came = await pipe.receive()
                    if not came:
                        output.ended_by_itself = True
                        break
                    *lines, last = came.split(b"\n")
                    for line in lines:
                        await _pass_on(b"".join((*parts, line)), to_client, output)
                        parts.clear()
                    parts.append(last)
                    output.too_long = sum(map(len, parts)) > MAX_MESSAGE_BYTES
    finally:
        output.over.set()
    # A process that is not read any more would wait for ever with a full pipe.
    while await pipe.receive():
        pass


async def _pass_on(line: bytes, to_client: Any, output: Output) -> None:
    if not line.strip():
        return
    try:
        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        output.garbage = output.garbage or line[:_KEPT_GARBAGE]
        output.garbage_lines += 1
        return
    await to_client.send(SessionMessage(message))


async def _keep_errors(pipe: _Pipe, output: Output) -> None:
    while came := await pipe.receive():
        output.errors = (output.errors + came)[-_KEPT_ERRORS:]


async def _write(pipe: _Pipe, from_client: Any) -> None:
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        async with from_client:
            async for sent in from_client:
                text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                if not await pipe.send(text.encode() + b"\n"):
                    return


async def _end(started: subprocess.Popen[bytes]) -> None:
    """End a process that was asked to end, by the end of its input, with everything it has started."""
    with anyio.move_on_after(_PATIENCE_S):
        await _gone(started)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(started.pid, signal.SIGKILL)
    await _gone(started)


async def _gone(started: subprocess.Popen[bytes]) -> None:
    while started.poll() is None:  # noqa: ASYNC110  # nothing else tells when a process has ended
        await anyio.sleep(0.005)
