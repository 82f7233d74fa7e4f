"""Running a command so that none of its processes survives.

Theory of operation
-------------------
`run_command` blocks; it is called from a worker thread or from plain synchronous code, and
`run_command_async` wraps it for an event loop. Whatever ends the wait (the command's own end, the timeout,
the cancellation, an exception here, even the death of this process), the processes that are left are killed,
and only then does `run_command` return. So nothing changes the files any more when they are scanned
afterwards.

In a sandbox (`treenail.sandbox`) the kernel does that: the command has a process namespace of its own, whose
first process takes all others with it. Without one the command runs below a small supervisor process
(`supervisor.py`), which adopts every process that the command starts, daemons included, and ends only when
all of them have ended.

Output is read as it comes, so that the command never blocks on a full pipe, and only its beginning and its
end are kept. There is no input: a command that asks a question reads the end of the file.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import re
import select
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal, Required, TypedDict, Unpack

import anyio

from treenail.clock import Clock, SystemClock, new_id
from treenail.containment import CancellationToken, call_later, wait_finished, workers
from treenail.errors import SandboxError, ToolError, UsageError
from treenail.sandbox import (
    WITHOUT,
    Layer,
    Refusal,
    Sandbox,
    confined,
    landlocked,
    level_of,
    refusals,
)

MAX_OUTPUT_BYTES = 1024 * 1024
"""How much of each output stream is kept unless the caller says otherwise."""

DEFAULT_TIMEOUT_S = 120.0
"""How long a command may take unless the caller says otherwise."""

MARKER = "TREENAIL_COMMAND"
"""The environment variable that marks a command's processes, to find them if the supervisor dies."""

_STARTER, _PLACE = "TREENAIL_STARTER", "TREENAIL_PLACE"
"""What a command in a sandbox has in its environment, for `wait_for_orphans` in a later process."""

SUPERVISOR = Path(__file__).with_name("supervisor.py")
"""The script of the supervisor."""
_READ_BYTES = 65_536
_GIVE_UP_AFTER_S = 10.0
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
"""The bytes of a character of UTF-8 after its first one."""

_SECRET_NAME = re.compile(
    r"(?:_|^)(?:KEY|KEYS|TOKEN|TOKENS|SECRET|SECRETS|PASSWORD|PASSWD|PASS|PASSPHRASE|PWD|CREDENTIAL|CREDENTIALS"
    r"|CREDS|AUTH|PAT|DSN|COOKIE)$|PASSWORD|PASSWD|SECRET|ACCESS_KEY|PRIVATE_KEY|API_?KEY|_TOKEN_",
    re.IGNORECASE,
)
_URL_WITH_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@]+@")
_HARMLESS = frozenset({"PWD", "OLDPWD"})


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended and what it wrote.

    `exit_code` is negative for a signal, as in `subprocess` (in a sandbox it is 128 plus the signal, as in a
    shell), and None if the command was stopped before it ended by itself. `leftover_processes` counts the
    background processes that it left running; they were killed.
    """

    exit_code: int | None
    stdout: str
    stderr: str
    truncated: bool
    timed_out: bool
    cancelled: bool
    elapsed: timedelta
    leftover_processes: int = 0
    confinement: str = "none"
    """What confined it, as the log keeps it: `none`, or for example `bubblewrap, no network`."""
    refused: tuple[Refusal, ...] = ()
    """What the sandbox refused, as far as the output tells."""


def command_environment(
    base: Mapping[str, str] | None = None,
    *,
    allow: Collection[str] = (),
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return an environment for a command, without secrets.

    Starts from `base` (this process's own by default) and drops the variables whose names say that
    they are secret (`..._KEY`, `..._TOKEN`, `..._SECRET`, `PASSWORD` ...) and those whose values contain a
    URL with a password, unless `allow` names them. Pagers and prompts, which would wait for input, are turned
    off. `extra` is added unchanged.
    """
    source = os.environ if base is None else base
    kept = {
        name: value
        for name, value in source.items()
        if name in allow
        or name in _HARMLESS
        or not (_SECRET_NAME.search(name) or _URL_WITH_PASSWORD.search(value))
    }
    kept.update({"PAGER": "cat", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0", "TERM": "dumb"})
    kept.update(extra or {})
    return kept


def default_shell() -> str:
    """Return the shell that runs commands given as text: bash if it is installed, else sh."""
    return "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"


class CommandOptions(TypedDict, total=False):
    """Options of `run_command` and `run_command_async`."""

    cwd: Required[str | Path]
    env: Mapping[str, str] | None
    """The whole environment; `command_environment()` by default."""
    timeout_s: float | None
    max_output_bytes: int
    """How much of each output stream is kept: half of it from the beginning, half from the end."""
    clock: Clock | None
    sandbox: Sandbox | None
    """How to confine it; None or the mode `off` for not at all."""
    workspace: str | Path
    """The directory that it may write to in a sandbox; `cwd` by default."""
    layer: Layer | None
    """An overlay of the workspace to run it on, in a sandbox."""
    live: bool
    """Let it see the workspace itself, in a sandbox, and write only where the sandbox's grants allow that."""
    on_output: Callable[[bytes], object] | None
    """Is given what the command writes while it runs, on the thread that reads it."""


def run_command(
    command: str | Sequence[str],
    *,
    cancellation: CancellationToken | None = None,
    **options: Unpack[CommandOptions],
) -> CommandResult:
    """Run a command until it ends, times out or is cancelled, and return when all its processes have ended.

    Text is run by the shell; a sequence is a program and its arguments. A timeout or a cancellation is a
    result, not an exception.

    Raises `OSError` if the command cannot be started, `SandboxError` if it cannot be confined, and
    `ToolError` if processes could not be killed.
    """
    argv = [default_shell(), "-c", command] if isinstance(command, str) else [str(part) for part in command]
    timeout_s = options.get("timeout_s", DEFAULT_TIMEOUT_S)
    max_output_bytes = options.get("max_output_bytes", MAX_OUTPUT_BYTES)
    _check(argv, timeout_s, max_output_bytes)
    env = options.get("env")
    sandbox, cwd = options.get("sandbox"), Path(options["cwd"])
    if sandbox is None or sandbox.mode == "off":
        kind: type[_Run] = _Run
    else:
        kind = _ConfinedRun if level_of(sandbox.mode) == "bubblewrap" else _LandlockRun
    make = partial(
        kind,
        argv=argv,
        cwd=cwd,
        env=command_environment() if env is None else dict(env),
        max_output_bytes=max_output_bytes,
        clock=options.get("clock") or SystemClock(),
        sandbox=sandbox or Sandbox("off"),
        workspace=Path(options.get("workspace", cwd)),
        layer=options.get("layer"),
        live=options.get("live", False),
        on_output=options.get("on_output"),
    )
    try:
        return make().to_the_end(timeout_s, cancellation)
    except SandboxError:
        # Nothing was run. A file that was to be hidden may have gone meanwhile, so it is tried once more.
        return make().to_the_end(timeout_s, cancellation)


async def run_command_async(
    command: str | Sequence[str],
    *,
    cancellation: CancellationToken | None = None,
    **options: Unpack[CommandOptions],
) -> CommandResult:
    """Do the same as `run_command` without blocking the event loop.

    If the awaiting task is cancelled, the command is killed, and the cancellation continues when all its
    processes have ended.
    """
    stop = CancellationToken(parent=cancellation)
    running = workers.start(partial(run_command, command, cancellation=stop, **options))
    try:
        await wait_finished(running)
    finally:
        # Does nothing after the command's own end. After a cancellation or an interrupt it kills the command.
        stop.cancel(detail="the awaiting task was cancelled")
        with anyio.CancelScope(shield=True):
            await wait_finished(running)
        stop.unlink()
    return running.result()


def wait_for_orphans(directory: Path) -> None:
    """Wait for the end of commands in a directory whose starting process has died.

    The kernel ends a sandbox with its starter, and a supervisor stops its command when it notices the death,
    which may take a while on a busy machine. Raises `ToolError` if one still runs after 20 seconds.
    """
    give_up_at = time.monotonic() + 2 * _GIVE_UP_AFTER_S
    for pid in _processes():
        if _is_orphan(pid, directory) and not _wait_ended(pid, give_up_at - time.monotonic()):
            raise ToolError(
                f"a command that an earlier process started in {directory} is still running, in or below "
                f"process {pid}; end it before the workspace is used again"
            )


def _is_orphan(pid: int, directory: Path) -> bool:
    """Say whether a process is, or holds, a command in a directory whose starter has died."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1]
    except (OSError, IndexError):
        return False  # it has ended meanwhile
    if os.fsencode(SUPERVISOR) in words and len(words) >= 5:
        # The last word also ends with a zero byte.
        starter, place = words[-3], words[-2]
        has_lost_it = parent != starter
    else:
        held = dict(each.split(b"=", 1) for each in _environment_of(pid) if b"=" in each)
        starter, place = held.get(_STARTER.encode(), b""), held.get(_PLACE.encode(), b"")
        has_lost_it = starter.isdigit() and not Path(f"/proc/{int(starter)}").exists()
    return has_lost_it and Path(os.fsdecode(place)).is_relative_to(directory.resolve())


def _check(argv: Sequence[str], timeout_s: float | None, max_output_bytes: int) -> None:
    if not argv or not argv[0]:
        raise UsageError("there is no command to run; pass a shell command or a program with its arguments")
    if any("\0" in part for part in argv):
        raise UsageError(
            "the command contains a NUL character, which cannot be passed to a program; remove it"
        )
    if timeout_s is not None and not timeout_s > 0:
        raise UsageError(f"timeout_s is {timeout_s}; it must be more than 0, or None for no timeout")
    if max_output_bytes < 2:
        raise UsageError(f"max_output_bytes is {max_output_bytes}; it must be at least 2")


class _Output:
    """The beginning and the end of a stream of any length."""

    def __init__(self, max_bytes: int) -> None:
        self._max_head = max_bytes // 2
        self._max_tail = max_bytes - self._max_head
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def add(self, data: bytes) -> None:
        room = self._max_head - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        # Trimmed when twice too long, so that trimming costs O(1) per byte.
        if len(self._tail) > 2 * self._max_tail:
            self._trim()

    def _trim(self) -> None:
        excess = len(self._tail) - self._max_tail
        if excess > 0:
            del self._tail[:excess]
            self._dropped += excess

    @property
    def is_truncated(self) -> bool:
        return self._dropped > 0 or len(self._tail) > self._max_tail

    def text(self) -> str:
        self._trim()
        if not self._dropped:
            return (self._head + self._tail).decode("utf-8", "replace")
        # Characters that the cut goes through are left out.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        head = decoder.decode(bytes(self._head))
        tail = self._tail.lstrip(_CONTINUATION_BYTES)
        left_out = self._dropped + len(decoder.getstate()[0]) + len(self._tail) - len(tail)
        return f"{head}\n[... {left_out} bytes left out ...]\n{tail.decode('utf-8', 'replace')}"


class _Control:
    """The supervisor's control pipe. Closing it stops the command; any thread may close it, repeatedly."""

    def __init__(self, descriptor: int) -> None:
        self._lock = threading.Lock()
        self._descriptor: int | None = descriptor

    def send(self, data: bytes) -> None:
        with self._lock:
            while data and self._descriptor is not None:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BrokenPipeError:
                    return  # the supervisor has died; its exit code is reported

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)


class _Run:
    """One command under its supervisor."""

    def __init__(
        self,
        *,
        argv: list[str],
        cwd: Path,
        env: dict[str, str],
        max_output_bytes: int,
        clock: Clock,
        sandbox: Sandbox,
        workspace: Path,
        layer: Layer | None,
        live: bool = False,
        on_output: Callable[[bytes], object] | None = None,
    ) -> None:
        if live and sandbox.mode == "off":
            raise UsageError("only a sandbox keeps a process from writing; pass one that is not off")
        self._live = live
        if layer is not None and sandbox.mode == "off":
            raise UsageError("a command runs on a layer only in a sandbox; pass a sandbox that is not off")
        self._sandbox = sandbox
        self._workspace = workspace
        self._layer = layer
        self._on_output = on_output
        self._argv = argv
        self._cwd = cwd
        self._clock = clock
        self._marker = str(new_id())
        self._env = env
        self._outputs = (_Output(max_output_bytes), _Output(max_output_bytes))
        self._status = b""
        self._stopped_by: Literal["timeout", "cancellation"] | None = None

    def to_the_end(self, timeout_s: float | None, cancellation: CancellationToken | None) -> CommandResult:
        """Start the command, and wait until all its processes have ended."""
        if not self._cwd.is_dir():
            # The supervisor could not distinguish this from a missing program.
            raise NotADirectoryError(
                errno.ENOTDIR, "the directory to run the command in is missing", str(self._cwd)
            )
        started = self._clock.monotonic()
        process, control, status_read = self._start()
        with process, closing(control):
            timer = forget = None
            try:
                if timeout_s is not None:
                    timer = call_later(self._clock, timeout_s, partial(self._stop, control, "timeout"))
                if cancellation is not None:
                    forget = cancellation.on_cancel(partial(self._stop, control, "cancellation"))
                self._begin(control)
                self._attend(process, status_read)
            finally:
                # After an exception too, the command ends before the caller continues.
                if timer is not None:
                    timer.cancel()
                if forget is not None:
                    forget()
                control.close()
                process.wait()
                self._outlast(status_read)
            self._read_the_rest(process)
        return self._result(process.returncode, timedelta(seconds=self._clock.monotonic() - started))

    def _start(self) -> tuple[subprocess.Popen[bytes], _Control, int]:
        control_read, control_write = os.pipe()
        status_read, status_write = os.pipe()
        try:
            process = subprocess.Popen(
                # Isolated, without site packages, and in UTF-8 whatever the locale.
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-X",
                    "utf8",
                    str(SUPERVISOR),
                    str(control_read),
                    str(status_write),
                    # For `wait_for_orphans` in a later process.
                    str(os.getpid()),
                    str(self._cwd.resolve()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(control_read, status_write),
                # The command can read its parent's environment, so that must not hold secrets either.
                env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                # The terminal's Ctrl-C goes to this process, which then stops the command.
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            os.close(control_write)
            os.close(status_read)
            raise
        finally:
            os.close(control_read)
            os.close(status_write)
        return process, _Control(control_write), status_read

    def _check_program(self) -> None:
        """Raise what starting the program would raise; inside the sandbox it would be an exit code."""
        name = self._argv[0]
        path = str(self._cwd / name) if "/" in name else shutil.which(name, path=self._env.get("PATH"))
        number = errno.ENOENT if path is None or not os.path.exists(path) else errno.EACCES
        if path is None or not os.access(path, os.X_OK) or os.path.isdir(path):
            raise OSError(number, f"the command cannot be started: {os.strerror(number)}", name)

    def _begin(self, control: _Control) -> None:
        order = {"argv": self._argv, "env": {**self._env, MARKER: self._marker}, "cwd": str(self._cwd)}
        control.send(json.dumps(order).encode() + b"\n")

    def _stop(self, control: _Control, by: Literal["timeout", "cancellation"]) -> None:
        if self._stopped_by is None:
            self._stopped_by = by
        control.close()

    def _attend(self, process: subprocess.Popen[bytes], status_read: int) -> None:
        """Read all output until the supervisor has ended."""
        assert process.stdout is not None
        assert process.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, self._outputs[0])
            selector.register(process.stderr, selectors.EVENT_READ, self._outputs[1])
            selector.register(status_read, selectors.EVENT_READ, None)
            while True:
                for key, _ in selector.select():
                    try:
                        data = os.read(key.fd, _READ_BYTES)
                    except ConnectionResetError:
                        data = b""  # a sandbox was ended before it had read what it was told
                    if key.data is None:
                        self._status += data
                        if not data:
                            return
                        self._heard()
                    else:
                        key.data.add(data)
                        if not data:
                            selector.unregister(key.fileobj)
                        elif self._on_output is not None:
                            self._on_output(data)

    def _heard(self) -> None:
        """Act on what the status says so far."""

    def _outlast(self, status_read: int) -> None:
        """Wait for what the supervisor did not wait for, and let go of what it said."""
        os.close(status_read)

    def _read_the_rest(self, process: subprocess.Popen[bytes]) -> None:
        """Read what the pipes still contain. All their writers have ended, so this does not wait."""
        for stream, output in zip((process.stdout, process.stderr), self._outputs, strict=True):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            try:
                while data := os.read(stream.fileno(), _READ_BYTES):
                    output.add(data)
                    if self._on_output is not None:
                        self._on_output(data)
            except BlockingIOError:
                pass  # a process outside of the tree holds the pipe: its output is not the command's

    def _result(self, supervisor_exit: int, elapsed: timedelta) -> CommandResult:
        report: dict[str, str] = {}
        for line in self._status.decode("ascii").splitlines():
            word, _, rest = line.partition(" ")
            report[word] = rest
        if "failed" in report:
            number = int(report["failed"])
            raise OSError(number, f"the command cannot be started: {os.strerror(number)}", self._argv[0])
        if supervisor_exit != 0:
            killed = self._kill_marked()
            raise ToolError(
                f"the supervisor of {shown_command(self._argv)!r} was killed (exit {supervisor_exit}), so "
                f"the command was stopped and {killed} of its processes were killed; change the command so "
                "that it does not kill its parent"
            )
        if "survived" in report:
            raise self._survived([int(pid) for pid in report["survived"].split()])
        was_stopped = "stopped" in report
        out, err = self._outputs
        return CommandResult(
            exit_code=None if was_stopped else int(report["exited"]),
            stdout=out.text(),
            stderr=err.text(),
            truncated=out.is_truncated or err.is_truncated,
            # A command that ended by itself just in time was not stopped, whatever the clock says.
            timed_out=was_stopped and self._stopped_by == "timeout",
            cancelled=was_stopped and self._stopped_by == "cancellation",
            elapsed=elapsed,
            leftover_processes=int(report.get("leftover", 0)),
        )

    def _kill_marked(self) -> int:
        """Kill the processes with this command's marker, wait for their end, and return their number."""
        seen: set[int] = set()
        give_up_at = time.monotonic() + _GIVE_UP_AFTER_S
        while found := processes_marked(self._marker):
            if time.monotonic() > give_up_at:
                raise self._survived(sorted(found))
            seen |= found
            end_processes(found)
        return len(seen)

    def _survived(self, pids: Sequence[int]) -> ToolError:
        return ToolError(
            f"processes of {shown_command(self._argv)!r} could not be killed and are still running: "
            f"{', '.join(map(str, pids)) or 'unknown'}; end them by hand before the workspace is used again"
        )


class _LandlockRun(_Run):
    """One command under its supervisor, confined by Landlock."""

    def to_the_end(self, timeout_s: float | None, cancellation: CancellationToken | None) -> CommandResult:
        """Run it with a directory of its own for temporary files."""
        if self._layer is not None:
            raise SandboxError("there are no layers where only Landlock confines commands")
        if self._cwd.is_dir():
            self._check_program()
        with tempfile.TemporaryDirectory(prefix="treenail-", ignore_cleanup_errors=True) as temporary:
            line = landlocked(
                self._argv,
                workspace=self._workspace,
                env=self._env,
                temporary=os.path.realpath(temporary),
                grants=self._sandbox.grants,
                hidden=self._sandbox.hidden,
                live=self._live,
            )
            argv, self._argv, self._env = self._argv, list(line.argv), dict(line.env)
            result = super().to_the_end(timeout_s, cancellation)
            self._argv = argv
        return replace(
            result,
            confinement=self._sandbox.described("landlock"),
            refused=refusals(self._sandbox, result.stdout, result.stderr, result.exit_code, "landlock"),
        )


class _Leash(_Control):
    """Holds a sandbox by the first process of its namespace, whose end is the end of all the others."""

    def __init__(self, line: socket.socket) -> None:
        self._lock = threading.Lock()
        self._line = line
        self._first: int | None = None
        self._is_closed = False

    def begin(self, first: int) -> None:
        """Let the command begin, below the process `first`."""
        with self._lock:
            if not self._is_closed:
                try:
                    self._first = os.pidfd_open(first)
                    self._line.sendall(b"\n")
                except (ProcessLookupError, BrokenPipeError):
                    pass  # it has failed already; the report says so

    def close(self) -> None:
        """End everything. A command that has not begun does not begin."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            # An error means that it has ended.
            with suppress(OSError):
                self._line.shutdown(socket.SHUT_WR)
            # Before that it ends by itself when it finds no line; if bubblewrap were killed while it sets up
            # the sandbox, a process that waits for it would be left.
            if self._first is not None:
                with suppress(OSError):
                    signal.pidfd_send_signal(self._first, signal.SIGKILL)

    def outlast(self) -> None:
        """Wait until everything has ended."""
        self._line.close()
        if self._first is not None:
            ended = select.select([self._first], [], [], _GIVE_UP_AFTER_S)[0]
            os.close(self._first)
            if not ended:
                raise ToolError(
                    "processes of the command could not be killed and are still running; end them by hand "
                    "before the workspace is used again"
                )


class _ConfinedRun(_Run):
    """One command in a sandbox.

    The status is what the shell in the sandbox says: an empty line when everything is set up, and at the
    command's end how many processes are alive. Bubblewrap reports the first process and the exit code.
    """

    _leash: _Leash
    _report: int
    """The pipe on which bubblewrap reports."""

    def _start(self) -> tuple[subprocess.Popen[bytes], _Control, int]:
        self._check_program()
        self._report, report_write = os.pipe()
        ours, theirs = socket.socketpair()
        env = {**self._env, _STARTER: str(os.getpid()), _PLACE: os.path.realpath(self._cwd)}
        try:
            with (
                theirs,
                confined(
                    self._argv,
                    self._cwd,
                    workspace=self._workspace,
                    env=env,
                    layer=self._layer,
                    grants=self._sandbox.grants,
                    hidden=self._sandbox.hidden,
                    report=report_write,
                    waits=True,
                    live=self._live,
                ) as line,
            ):
                process = subprocess.Popen(
                    line.argv,
                    stdin=theirs.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=line.descriptors,
                    env=line.env,
                    start_new_session=True,
                    bufsize=0,
                )
        except BaseException:
            ours.close()
            os.close(self._report)
            raise
        finally:
            os.close(report_write)
        self._leash = _Leash(ours)
        return process, self._leash, ours.fileno()

    def _begin(self, control: _Control) -> None:
        pass  # when everything is set up

    def _heard(self) -> None:
        if not self._reported:
            while b"\n" not in self._reported and (said := os.read(self._report, _READ_BYTES)):
                self._reported += said
            self._leash.begin(self._said("child-pid") or 0)

    _reported = b""

    def _outlast(self, status_read: int) -> None:
        os.set_blocking(self._report, False)
        with suppress(BlockingIOError):
            while said := os.read(self._report, _READ_BYTES):
                self._reported += said
        os.close(self._report)
        self._leash.outlast()

    def _said(self, name: str) -> int | None:
        """Return what bubblewrap has said about the first process or the exit code."""
        lines = [json.loads(line) for line in self._reported.split(b"\n")[:-1]]
        found: int | None = next((line[name] for line in lines if name in line), None)
        return found

    def _result(self, supervisor_exit: int, elapsed: timedelta) -> CommandResult:
        out, err = self._outputs
        alive = int(self._status) if self._status.strip() else None
        was_stopped = self._stopped_by is not None and alive is None
        code = self._said("exit-code")
        if alive is None and not was_stopped and self._status:
            raise ToolError(
                f"the sandbox of {shown_command(self._argv)!r} was killed from outside, and the command with "
                "it; look for the reason, such as a lack of memory, before it is run again"
            )
        if alive is None and not was_stopped:
            raise SandboxError(
                f"the command was not run, because its sandbox could not start: {err.text().strip()[-500:]}; "
                f"see `treenail doctor`, or {WITHOUT}"
            )
        return CommandResult(
            exit_code=None if was_stopped else code,
            stdout=out.text(),
            stderr=err.text(),
            truncated=out.is_truncated or err.is_truncated,
            timed_out=was_stopped and self._stopped_by == "timeout",
            cancelled=was_stopped and self._stopped_by == "cancellation",
            elapsed=elapsed,
            leftover_processes=alive or 0,
            confinement=self._sandbox.described(),
            refused=refusals(self._sandbox, out.text(), err.text(), code),
        )


def shown_command(argv: Sequence[str]) -> str:
    """Return a command on one shortened line, for messages."""
    text = argv[2] if len(argv) == 3 and argv[1] == "-c" else shlex.join(argv)
    line = " ".join(text.split())
    return line if len(line) <= 100 else line[:97] + "..."


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # it has ended meanwhile, or belongs to another user


def processes_marked(marker: str) -> frozenset[int]:
    """Return the processes in whose environment `MARKER` has this value."""
    wanted = f"{MARKER}={marker}".encode()
    return frozenset(pid for pid in _processes() if wanted in _environment_of(pid))


def end_processes(pids: Collection[int]) -> None:
    """Kill processes, and wait up to a second for the end of each."""
    for pid in pids:
        _wait_ended(pid, 1.0, kill=True)


def _wait_ended(pid: int, timeout_s: float, *, kill: bool = False) -> bool:
    """Wait until a process has ended, killing it first if asked to; return whether it has."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        if kill:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return bool(select.select([descriptor], [], [], max(0.0, timeout_s))[0])
    except OSError:
        return False  # this process may not kill it
    finally:
        os.close(descriptor)
