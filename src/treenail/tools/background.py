"""Processes that run beside the agent: a development server, a watcher, a long build.

Theory of operation
-------------------
A command of `run_command` works on a layer and ends with its call. A background process sees the workspace
itself, live, so that it notices edits, and for the same reason it cannot write to it: nobody could undo that.
The exceptions are directories that the person names (`Grants.live`, such as `build` or `.cache`); what is
written there is outside of undo. Otherwise it is in the sandbox that commands are in.

A `ProcessTable` holds the processes of a program. Each has a thread that runs it to its end, and it ends with
the table, the program or a kill of the program: bubblewrap dies with the thread. The log has its start and,
once the model was told, its end. A turn that begins in another program finds starts without an end there, and
tells the model that those processes are gone (`with_processes`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from treenail.containment import CancellationToken
from treenail.errors import SandboxError, ToolError, UsageError
from treenail.log import SlicePolicy
from treenail.sandbox import Sandbox, level_of
from treenail.state import Session, event
from treenail.tools.context import ToolContext
from treenail.tools.process import CommandResult, command_environment, run_command
from treenail.tools.tool import ReadyTool, Tool, ToolExample, ToolResult, described
from treenail.workspace import normalize, sandbox_of

MAX_PROCESSES = 8
"""How many processes a run may have at a time."""

MAX_KEPT_CHARS = 1_000_000
"""How much of a process's output is kept for the model to read."""

MAX_SHOWN_CHARS = 20_000
"""How much of it one answer shows: the end."""

MAX_WAIT_S = 600.0

_FIRST_LOOK_S = 1.0
"""How long a start waits for a process that fails at once."""


@event(name="treenail.ProcessStarted", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """A background process was started."""

    process_id: str
    call_id: str
    command: str
    writes: tuple[str, ...] = ()
    """The directories of the workspace that it may write to; they are outside of undo."""
    confinement: str = ""


@event(name="treenail.ProcessEnded", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The model was told that a background process has ended."""

    process_id: str
    reason: Literal["ended", "stopped", "lost"]
    """By itself; stopped by the model; or together with the program that ran it."""
    exit_code: int | None = None


class BackgroundProcess:
    """One process, and what it has written."""

    def __init__(self, process_id: str, command: str) -> None:
        self.process_id = process_id
        self.command = command
        self.changed = threading.Condition()
        """Notified whenever there is output, and at the end."""
        self.stop = CancellationToken()
        self.result: CommandResult | None = None
        self.error: Exception | None = None
        self.is_over = False
        self._pieces: list[bytes] = []
        self._kept = 0
        self._left_out = 0
        self._thread: threading.Thread | None = None

    def start(self, directory: Path, workspace: Path, env: Mapping[str, str], sandbox: Sandbox) -> None:
        """Start it on a thread of its own."""

        def run() -> None:
            try:
                self.result = run_command(
                    self.command,
                    cwd=directory,
                    workspace=workspace,
                    env=env,
                    timeout_s=None,
                    sandbox=sandbox,
                    cancellation=self.stop,
                    live=True,
                    on_output=self._add,
                )
            except (SandboxError, ToolError, UsageError, OSError) as error:
                self.error = error
            finally:
                with self.changed:
                    self.is_over = True
                    self.changed.notify_all()

        # The sandbox dies with this thread, and the thread with the program.
        self._thread = threading.Thread(target=run, name=f"treenail-{self.process_id}", daemon=True)
        self._thread.start()

    def _add(self, data: bytes) -> None:
        with self.changed:
            self._pieces.append(data)
            self._kept += len(data)
            while self._kept > MAX_KEPT_CHARS and len(self._pieces) > 1:
                gone = len(self._pieces.pop(0))
                self._kept -= gone
                self._left_out += gone
            self.changed.notify_all()

    def has_said(self, text: str) -> bool:
        """Say whether the output that was not read yet has a text in it. Hold `changed`."""
        return text.encode() in b"".join(self._pieces)

    def read(self) -> str:
        """Return what was written since the last time; of much, the end."""
        with self.changed:
            said = b"".join(self._pieces).decode("utf-8", "replace")
            left_out, self._pieces, self._kept, self._left_out = self._left_out, [], 0, 0
        if len(said) > MAX_SHOWN_CHARS:
            left_out += len(said) - MAX_SHOWN_CHARS
            said = said[-MAX_SHOWN_CHARS:]
        return f"[... {left_out} more before this ...]\n{said}" if left_out else said

    def wait(self, seconds: float, until: str = "", cancellation: CancellationToken | None = None) -> bool:
        """Wait until it ends or says something; return whether that came before the time was over."""

        def wake() -> None:
            with self.changed:
                self.changed.notify_all()

        def is_enough() -> bool:
            if cancellation is not None and cancellation.is_cancelled:
                return True
            return self.is_over or bool(until and self.has_said(until))

        forget = None if cancellation is None else cancellation.on_cancel(wake)
        try:
            with self.changed:
                return self.changed.wait_for(is_enough, seconds)
        finally:
            if forget is not None:
                forget()

    def end(self) -> None:
        """Stop it, and wait until all its processes have ended."""
        self.stop.cancel(detail="the process was stopped")
        if self._thread is not None:
            self._thread.join()

    @property
    def state(self) -> str:
        """How it is, in words."""
        if not self.is_over:
            return "is running"
        if self.error is not None:
            return f"could not run: {self.error}"
        assert self.result is not None
        if self.result.exit_code is None:
            return "was stopped"
        return f"has ended with exit code {self.result.exit_code}"


class ProcessTable:
    """The background processes of a program, by session. Close it to end them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[UUID, dict[str, BackgroundProcess]] = {}

    def __enter__(self) -> ProcessTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, session: Session, command: str) -> BackgroundProcess:
        """Make room for a process. Raises `UsageError` if there are too many."""
        with self._lock:
            known = self._known.setdefault(session.session_id, {})
            if sum(not each.is_over for each in known.values()) >= MAX_PROCESSES:
                raise UsageError(f"{MAX_PROCESSES} processes are running, which is the most; stop one first")
            number = 1 + len({each.process_id for each in session[ProcessStarted].all()} | known.keys())
            made = known[f"p{number}"] = BackgroundProcess(f"p{number}", command)
            return made

    def get(self, session: Session, process_id: str) -> BackgroundProcess | None:
        """Return a process of a session."""
        return self._known.get(session.session_id, {}).get(process_id)

    def forget(self, session: Session, process_id: str) -> None:
        """Forget a process that could not be started."""
        with self._lock:
            self._known.get(session.session_id, {}).pop(process_id, None)

    def names(self, session: Session) -> list[str]:
        """Return the processes of a session, by id and command."""
        known = self._known.get(session.session_id, {})
        return [f"{each.process_id} ({each.command[:60]})" for each in known.values()]

    def close(self) -> None:
        """End all processes, and wait for their end."""
        with self._lock:
            found = [each for known in self._known.values() for each in known.values()]
            self._known = {}
        for each in found:
            each.stop.cancel(detail="the run is over")
        for each in found:
            each.end()


def lost_processes(session: Session, table: ProcessTable) -> list[ProcessStarted]:
    """Return the processes that a session's log has as running, and this program does not have."""
    ended = {each.process_id for each in session[ProcessEnded].all()}
    return [
        each
        for each in session[ProcessStarted].all()
        if each.process_id not in ended and table.get(session, each.process_id) is None
    ]


def lost_text(lost: list[ProcessStarted]) -> str:
    """Return what the model is told of processes that are gone."""
    named = ", ".join(f"{each.process_id} ({each.command[:200]})" for each in lost)
    return (
        f"<processes-ended>\nThese background processes have ended, because the program that ran them has: "
        f"{named}. Start them again if you need them.\n</processes-ended>"
    )


# --- the tools -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartProcess:
    """What `start_process` takes."""

    command: str = described("The command, as for bash -c.")
    directory: str = described("Directory to run it in, relative to the workspace root.", default=".")


@dataclass(frozen=True, slots=True)
class ReadProcess:
    """What `read_process` and `stop_process` take."""

    process: str = described("The process, as start_process named it, such as p1.")


@dataclass(frozen=True, slots=True)
class WaitProcess:
    """What `wait_process` takes."""

    process: str = described("The process, as start_process named it, such as p1.")
    seconds: float = described(f"How long to wait at most; up to {MAX_WAIT_S:g}.", default=60.0)
    until: str = described("Wait only until its new output has this text in it.", default="")


@dataclass(frozen=True, slots=True)
class _Handlers:
    """The handlers of the tools, for one table."""

    table: ProcessTable
    env: Mapping[str, str] | None = field(default=None, repr=False)

    def start(self, params: StartProcess, *, context: ToolContext) -> ToolResult[str]:
        filesystem = context.filesystem
        root, sandbox = filesystem.host_root, sandbox_of(filesystem)
        if root is None:
            return ToolResult.error("Processes cannot run: the workspace is not a directory on disk.")
        if sandbox.mode == "off":
            return ToolResult.error(
                "Background processes need the sandbox, which is off here: without it nothing keeps them "
                "from writing to the workspace. Use run_command."
            )
        if not params.command.strip() or "\0" in params.command:
            return ToolResult.error("The command is empty or contains a NUL character.")
        if normalize(params.directory) != ".":
            filesystem.list(params.directory)
        try:
            process = self.table.add(context.session, params.command)
        except UsageError as error:
            return ToolResult.error(f"{error}: {', '.join(self.table.names(context.session))}.")
        env = command_environment(extra=self.env)
        process.start(root / normalize(params.directory), root, env, sandbox)
        try:
            process.wait(_FIRST_LOOK_S, cancellation=context.cancellation)
            context.cancellation.raise_if_cancelled()
        except BaseException:
            process.end()
            self.table.forget(context.session, process.process_id)
            raise
        if process.error is not None:
            self.table.forget(context.session, process.process_id)
            return ToolResult.error(f"It could not be started: {process.error}")
        writes = sandbox.grants.live
        context.session.dispatch(
            ProcessStarted(
                process.process_id,
                context.call_id,
                params.command,
                writes,
                sandbox.described(level_of(sandbox.mode)),
            )
        )
        where = f"only in {', '.join(writes)}, which no undo touches" if writes else "nowhere in it"
        told = f"Started {process.process_id}. It sees the workspace as it is, and can write {where}."
        return self._shown(process, context, told)

    def read(self, params: ReadProcess, *, context: ToolContext) -> ToolResult[str]:
        process = self.table.get(context.session, params.process)
        return self._unknown(params.process, context) if process is None else self._shown(process, context)

    def wait(self, params: WaitProcess, *, context: ToolContext) -> ToolResult[str]:
        process = self.table.get(context.session, params.process)
        if process is None:
            return self._unknown(params.process, context)
        if not 0 < params.seconds <= MAX_WAIT_S:
            return ToolResult.error(f"seconds must be more than 0 and at most {MAX_WAIT_S:g}.")
        seconds = params.seconds
        if context.deadline is not None:
            seconds = min(seconds, max(context.deadline.remaining().total_seconds(), 0.001))
        came = process.wait(seconds, params.until, context.cancellation)
        context.cancellation.raise_if_cancelled()
        return self._shown(process, context, "" if came else f"Nothing of that came in {params.seconds:g} s.")

    def stop(self, params: ReadProcess, *, context: ToolContext) -> ToolResult[str]:
        process = self.table.get(context.session, params.process)
        if process is None:
            return self._unknown(params.process, context)
        process.end()
        return self._shown(process, context)

    def _shown(self, process: BackgroundProcess, context: ToolContext, told: str = "") -> ToolResult[str]:
        said = process.read()
        state = f"{process.process_id} {process.state}."
        if process.is_over and not any(
            each.process_id == process.process_id for each in context.session[ProcessEnded].all()
        ):
            code = None if process.result is None else process.result.exit_code
            reason: Literal["ended", "stopped"] = "stopped" if code is None else "ended"
            context.session.dispatch(ProcessEnded(process.process_id, reason, code))
        output = f"\n--- new output ---\n{said.rstrip()}" if said.strip() else " It wrote nothing new."
        return ToolResult.ok(message=f"{told} {state}{output}".strip())

    def _unknown(self, process: str, context: ToolContext) -> ToolResult[str]:
        known = ", ".join(self.table.names(context.session)) or "none"
        return ToolResult.error(f"There is no process {process!r}. There are: {known}.")


def process_tools(table: ProcessTable, *, env: Mapping[str, str] | None = None) -> tuple[Tool[Any, str], ...]:
    """Make the tools that start, read, wait for and stop the processes of a table."""
    handlers = _Handlers(table, env)
    return (
        ReadyTool[StartProcess, str](
            name="start_process",
            description=(
                "Start a process that keeps running beside you, such as a development server or a watcher. "
                "It sees the workspace as it is, so that it notices your edits, and cannot write to it, "
                "except in directories that the person has named. Without permission for the network it has "
                "only a loopback of its own, which other commands cannot reach. It ends with the run. For a "
                "command that ends by itself and changes files use run_command."
            ),
            handler=handlers.start,
            effects="workspace",
            files="context",
            examples=(
                ToolExample(
                    "Watch the tests",
                    StartProcess("npx vitest --watch"),
                    "Started p1. It sees the workspace as it is, and can write nowhere in it. p1 is running.",
                ),
            ),
        ),
        ReadyTool[ReadProcess, str](
            name="read_process",
            description="Show what a background process has written since you last looked, and if it runs.",
            handler=handlers.read,
            effects="none",
        ),
        ReadyTool[WaitProcess, str](
            name="wait_process",
            description=(
                "Wait until a background process ends, or until its output has a text in it, and show what "
                "it has written since you last looked."
            ),
            handler=handlers.wait,
            effects="none",
        ),
        ReadyTool[ReadProcess, str](
            name="stop_process",
            description="Stop a background process and everything that it started, and show its last output.",
            handler=handlers.stop,
            effects="none",
        ),
    )
