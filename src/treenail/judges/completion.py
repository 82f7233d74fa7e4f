"""Verification before a run may stop: checkers, and three that need no model.

A checker returns `TaskCompletionResult.ok()` or `.incomplete(why)`, or raises if it could not find out. What
that means for the run is configured in `NestedExecutionConfig`.

A check never changes the workspace. Checkers see it through a read-only view. `CommandChecker` holds the
workspace as a tool call does, and runs its command on a layer that is dropped afterwards, cache directories
excepted. Without layers it restores whatever the command changed, even if it is stopped or the process dies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Protocol, cast, runtime_checkable
from uuid import UUID

import anyio
import anyio.to_thread

from treenail.clock import Clock, SystemClock, new_id
from treenail.containment import number
from treenail.errors import CancelledByToken, UsageError
from treenail.judges.calls import ask
from treenail.judges.context import MAX_NESTED_DURATION, JudgeContext
from treenail.sandbox import told_to_the_model
from treenail.tools import CommandResult, command_environment, run_in_workspace, workspace_call_id
from treenail.workspace import Filesystem, layered, sandbox_of

MAX_CHECK_OUTPUT_BYTES = 8_000
"""How much of each output stream of a failed check the model is shown."""

CACHES = (".pytest_cache", "target")
"""The names of cache directories in which a check may leave something, unless it says otherwise."""

_ROLLBACK_GRACE = timedelta(seconds=30)
"""What a check may take beyond its command, to restore the workspace."""


@dataclass(frozen=True, slots=True)
class TaskCompletionResult:
    """Whether the work is done, and why, or what is missing."""

    complete: bool
    feedback: str | None = None

    @classmethod
    def ok(cls, feedback: str | None = None) -> TaskCompletionResult:
        """Return that the work is done."""
        return cls(True, feedback)

    @classmethod
    def incomplete(cls, feedback: str) -> TaskCompletionResult:
        """Return that the work is not done, and what is missing. The model reads this."""
        return cls(False, feedback)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCompletionContext(JudgeContext):
    """What a completion checker may read, and what it needs to ask a model or run a command."""

    tentative_output: object = None
    """What the agent would end with: its typed output, or its text."""
    stop_reason: str | None = None
    """Why the model stopped."""
    text: str = ""
    """The agent's last text."""
    _workspace: Callable[[], Filesystem | None] = field(init=False, repr=False, compare=False)
    """Returns the writable workspace, for `run_command`. A function, so that no attribute leads to it."""

    def __post_init__(self) -> None:
        workspace = self.filesystem
        object.__setattr__(self, "_workspace", lambda: workspace)
        JudgeContext.__post_init__(self)

    async def run_command(
        self,
        command: str | Sequence[str],
        *,
        directory: str = ".",
        timeout_s: float = 120.0,
        max_output_bytes: int = MAX_CHECK_OUTPUT_BYTES,
        env: Mapping[str, str] | None = None,
        caches: Collection[str] = (),
    ) -> CommandResult:
        """Run a command in the workspace, and drop whatever it changed there, except in caches.

        Those are directories with the names in `caches`, and those with a CACHEDIR.TAG; without layers they
        go back as well.

        It runs in a process group of its own, and no process that it starts survives it. Raises
        `UsageError` if there is no workspace on disk to run it in.
        """
        workspace = self._workspace()
        root = None if workspace is None else workspace.host_root
        if workspace is None or root is None or workspace.read_only:
            raise UsageError(
                "a command can only check a workspace on disk, and this run has none; use a HostFilesystem, "
                "or another checker"
            )
        place = (root / directory).resolve()
        if not place.is_relative_to(root.resolve()) or not place.is_dir():
            raise UsageError(f"the directory {directory!r} of the check is not in the workspace")
        if self.deadline is not None:
            timeout_s = min(timeout_s, max(self.deadline.remaining().total_seconds(), 0.001))
        session_id = cast("UUID | None", getattr(self.session, "session_id", None)) or new_id()
        clock = cast("Clock | None", getattr(self.session, "clock", None)) or SystemClock()
        call_id = workspace_call_id(session_id, f"check-{new_id().hex}")
        # Without layers the workspace is scanned before and after, which takes too long for the event loop.
        layers = layered(workspace)
        begin = partial(workspace.begin, call_id, tool_name="completion check", foreign=layers is None)
        held = await _finished(begin)
        try:
            ran = await run_in_workspace(
                workspace,
                command,
                directory=str(place.relative_to(root.resolve())),
                env=env,
                timeout_s=timeout_s,
                max_output_bytes=max_output_bytes,
                cancellation=self.cancellation,
                clock=clock,
                sandbox=sandbox_of(workspace),
            )
            if layers is not None and ran.way == "layer":
                await _finished(partial(layers.keep_caches, tuple(caches)))
            return ran.result
        finally:
            await _finished(held.rollback)


async def _finished(work: Any) -> Any:
    """Run a function on a worker thread to its end, even if the task is cancelled."""
    with anyio.CancelScope(shield=True):
        return await anyio.to_thread.run_sync(work)


@runtime_checkable
class TaskCompletionChecker(Protocol):
    """Decides whether the work is done.

    `check` may be `async`; if there is an `acheck` as well, that is used. Raise if it cannot be decided. An
    attribute `time_limit` (a timedelta) says how long it may take, if that is longer than the
    configuration's `max_nested_duration`.
    """

    def check(self, context: TaskCompletionContext) -> TaskCompletionResult | Awaitable[TaskCompletionResult]:
        """Return whether the work is done."""
        ...


def name_of_checker(checker: object) -> str:
    """Return a checker's `name`, or the name of its class."""
    name = getattr(checker, "name", None)
    return name if isinstance(name, str) and name else type(checker).__qualname__


async def check_with(checker: TaskCompletionChecker, context: TaskCompletionContext) -> TaskCompletionResult:
    """Call a checker, in whichever way it answers, and check the type of its answer."""
    answer = await ask(checker, "check", context)
    if not isinstance(answer, TaskCompletionResult):
        raise UsageError(
            f"{name_of_checker(checker)}.check returned {answer!r:.200}; return TaskCompletionResult.ok() or "
            f".incomplete(...)"
        )
    return answer


# --- checkers without a model --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileOutputChecker:
    """The work is done when these files are in the workspace; never without a workspace."""

    files: Sequence[str]
    allow_empty: bool = True
    """Whether an empty file counts."""

    def __post_init__(self) -> None:
        if isinstance(self.files, str):
            raise UsageError(f"FileOutputChecker.files is a list of paths; write [{self.files!r}]")
        object.__setattr__(self, "files", tuple(self.files))

    def check(self, context: TaskCompletionContext) -> TaskCompletionResult:
        """Check that the files exist."""
        if not self.files:
            return TaskCompletionResult.ok("No files are required.")
        if context.filesystem is None:
            return TaskCompletionResult.incomplete(
                f"There is no workspace, so these files are missing: {', '.join(self.files)}."
            )
        missing = [each for each in self.files if not self._is_there(context.filesystem, each)]
        if missing:
            return TaskCompletionResult.incomplete(
                f"These files must be in the workspace and are not{'' if self.allow_empty else ' (or empty)'}"
                f": {', '.join(missing)}. Create them before you stop."
            )
        return TaskCompletionResult.ok(f"All {len(self.files)} required files exist.")

    def _is_there(self, filesystem: Filesystem, path: str) -> bool:
        try:
            found = filesystem.stat(path)
        except FileNotFoundError:
            return False
        return found.is_file and (self.allow_empty or found.size_bytes > 0)


@dataclass(frozen=True, slots=True)
class CommandChecker:
    """The work is done when a command exits with 0: a test run, a build, a linter.

    The command runs in the workspace, in a process group of its own, with a time limit and an output
    limit, and without secrets in its environment. Whatever it changes in the workspace is dropped, except in
    cache directories: a check must not change what it checks. A command that times out has not exited with 0.
    """

    command: str | Sequence[str]
    """Text for the shell, or a program and its arguments."""
    timeout_s: float = 120.0
    max_output_bytes: int = MAX_CHECK_OUTPUT_BYTES
    directory: str = "."
    name: str = ""
    allow_env: Collection[str] = ()
    """Environment variables that the command may see although their names look secret."""
    caches: Collection[str] = CACHES
    """Names of directories that keep what the command wrote, besides those with a CACHEDIR.TAG."""

    def __post_init__(self) -> None:
        number("CommandChecker", "timeout_s", self.timeout_s)
        if not self.command:
            raise UsageError("CommandChecker.command is empty; give the command that must exit with 0")
        if not self.name:
            object.__setattr__(self, "name", f"CommandChecker({self._shown()})")

    @property
    def time_limit(self) -> timedelta:
        """How long a check may take: the command, and restoring the workspace."""
        return timedelta(seconds=self.timeout_s) + _ROLLBACK_GRACE

    def check(self, context: TaskCompletionContext) -> TaskCompletionResult:
        """Run the command. Inside an event loop, use `acheck`."""
        return anyio.run(self.acheck, context)

    async def acheck(self, context: TaskCompletionContext) -> TaskCompletionResult:
        """Run the command."""
        result = await context.run_command(
            self.command,
            directory=self.directory,
            timeout_s=self.timeout_s,
            max_output_bytes=self.max_output_bytes,
            env=command_environment(allow=self.allow_env),
            caches=self.caches,
        )
        if result.cancelled and context.cancellation is not None:
            context.cancellation.raise_if_cancelled()
        if result.exit_code == 0 and not result.timed_out:
            return TaskCompletionResult.ok(f"`{self._shown()}` exits with 0.")
        if result.timed_out:
            if context.deadline is not None:
                context.deadline.raise_if_passed(f"the check `{self._shown()}`")
            how = f"was stopped after {self.timeout_s:g} s"
        else:
            how = f"exits with {result.exit_code}"
        said = "".join(
            f"\n--- {title} ---\n{text.rstrip()}"
            for title, text in (("output", result.stdout), ("errors", result.stderr))
            if text.strip()
        )
        return TaskCompletionResult.incomplete(
            f"`{self._shown()}` {how}; it must exit with 0 before you stop.{said}"
            f"{told_to_the_model(result.refused)}"
        )

    def _shown(self) -> str:
        text = self.command if isinstance(self.command, str) else " ".join(self.command)
        return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True, slots=True)
class CompositeChecker:
    """Several checkers: all of them must agree (AND), or one is enough (`mode="any"`, OR).

    They are asked in order, until the result is decided. The error of one that could not decide is raised
    only if the others do not decide the result.
    """

    checkers: Sequence[TaskCompletionChecker]
    mode: Literal["all", "any"] = "all"

    def __post_init__(self) -> None:
        object.__setattr__(self, "checkers", tuple(self.checkers))
        if not self.checkers:
            raise UsageError("a CompositeChecker needs at least one checker")
        if self.mode not in ("all", "any"):
            raise UsageError(f'CompositeChecker.mode must be "all" or "any", not {self.mode!r}')

    @property
    def name(self) -> str:
        """The names of its checkers, joined by 'and' or 'or'."""
        joined = " and " if self.mode == "all" else " or "
        return joined.join(name_of_checker(each) for each in self.checkers)

    @property
    def time_limit(self) -> timedelta | None:
        """The sum of its checkers' time limits; None if none has one."""
        said = [getattr(each, "time_limit", None) for each in self.checkers]
        if not any(said):
            return None
        return sum((each or MAX_NESTED_DURATION for each in said), start=timedelta(0))

    def check(self, context: TaskCompletionContext) -> TaskCompletionResult:
        """Ask the checkers. Inside an event loop, use `acheck`."""
        return anyio.run(self.acheck, context)

    async def acheck(self, context: TaskCompletionContext) -> TaskCompletionResult:
        """Ask the checkers."""
        decisive = self.mode == "any"
        said: list[str] = []
        unknown: Exception | None = None
        for each in self.checkers:
            try:
                answer = await check_with(each, context)
            except CancelledByToken:
                raise
            except Exception as error:  # noqa: BLE001 - raised below, unless the others decide
                unknown = unknown or error
                continue
            if answer.complete is decisive:
                return answer
            if answer.feedback:
                said.append(answer.feedback)
        if unknown is not None:
            raise unknown
        together = "\n".join(said)
        return TaskCompletionResult(not decisive, together or None)
