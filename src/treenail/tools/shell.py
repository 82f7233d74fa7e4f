"""A tool that runs shell commands in the workspace.

A command is another program let loose on the tree, so the tool says `foreign=True`: the workspace is
scanned before and after, and everything that changed belongs to the call. When the command is stopped by
its timeout the call fails, and what it changed is rolled back. A command that ends by itself with an exit
code other than zero has done its work (a test that fails, a search that finds nothing): its result goes to
the model and its changes stay, unless the tool is made with `undo_on_failure=True`.

Commands run with the rights of this process. Their environment is free of secrets by name, and nothing
they start survives them, but they are not in a sandbox: what they do outside the workspace is not undone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from treenail.errors import UsageError
from treenail.tools.context import ToolContext
from treenail.tools.process import CommandResult, command_environment, run_command_async
from treenail.tools.tool import ReadyTool, Tool, ToolExample, ToolResult
from treenail.workspace.base import Filesystem
from treenail.workspace.paths import normalize

MAX_OUTPUT_BYTES = 20_000
"""How much of each output stream the model is shown."""

MAX_TIMEOUT_S = 3_600.0
"""The longest time that a model may ask for."""


@dataclass(frozen=True, slots=True)
class RunCommand:
    """What `run_command` takes."""

    command: str = field(metadata={"description": "The command, as for bash -c."})
    directory: str = field(
        default=".",
        metadata={"description": "Directory to run it in, relative to the workspace root."},
    )
    timeout_seconds: float | None = field(
        default=None,
        metadata={"description": f"When to stop it, at most {MAX_TIMEOUT_S:g}; leave out for the default."},
    )


def shell_tool(
    *,
    name: str = "run_command",
    timeout_s: float = 120.0,
    max_output_bytes: int = MAX_OUTPUT_BYTES,
    allow_env: Collection[str] = (),
    env: Mapping[str, str] | None = None,
    undo_on_failure: bool = False,
) -> Tool[RunCommand, str]:
    """Make a tool that runs shell commands in the workspace.

    `timeout_s` holds where the model asks for nothing else. `allow_env` names secret-looking variables of
    this process that commands may see, `env` adds variables. With `undo_on_failure` an exit code other
    than zero is a failed call, whose changes are rolled back.
    """
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise UsageError(f"timeout_s is {timeout_s}; it must be more than 0 and at most {MAX_TIMEOUT_S:g}")

    # Async, because a call that is cancelled must wait until nothing of the command is left: only then
    # can the workspace be rolled back.
    async def handle(params: RunCommand, *, context: ToolContext) -> ToolResult[str]:
        wanted_s = timeout_s if params.timeout_seconds is None else params.timeout_seconds
        if not 0 < wanted_s <= MAX_TIMEOUT_S:
            return ToolResult.error(f"timeout_seconds must be more than 0 and at most {MAX_TIMEOUT_S:g}.")
        if not params.command.strip() or "\0" in params.command:
            return ToolResult.error("The command is empty or holds a NUL character; send a shell command.")
        directory = _directory(context.filesystem, params.directory)
        if isinstance(directory, str):
            return ToolResult.error(directory)
        if context.deadline is not None:
            wanted_s = min(wanted_s, max(context.deadline.remaining().total_seconds(), 0.001))
        result = await run_command_async(
            params.command,
            cwd=directory,
            env=command_environment(allow=allow_env, extra=env),
            timeout_s=wanted_s,
            max_output_bytes=max_output_bytes,
            cancellation=context.cancellation,
            clock=context.state.clock,
        )
        if result.cancelled:
            context.cancellation.raise_if_cancelled()
        text = _shown(result, wanted_s)
        if result.timed_out:
            if context.deadline is not None:
                context.deadline.raise_if_passed(f"the command {params.command[:80]!r}")
            return ToolResult.error(
                f"{text}\nWhat it had changed in the workspace was undone. Run something shorter, or ask for "
                "more time with timeout_seconds."
            )
        if undo_on_failure and result.exit_code != 0:
            return ToolResult.error(f"{text}\nWhat it had changed in the workspace was undone.")
        return ToolResult.ok(message=text)

    return ReadyTool[RunCommand, str](
        name=name,
        description=(
            "Run a shell command in the workspace and see its output and exit code. There is no input and no "
            f"terminal, so nothing can ask questions. It is stopped after {timeout_s:g} seconds unless "
            "timeout_seconds says otherwise. What it leaves running in the background is stopped when it "
            "ends. Long output is cut in the middle."
        ),
        handler=handle,
        effects="workspace",
        foreign=True,
        examples=(
            ToolExample(
                "Run the tests",
                RunCommand("python -m pytest -q tests", timeout_seconds=300),
                "Exit code 0 after 2.1 s.\n--- output ---\n14 passed in 1.90s\n",
            ),
            ToolExample(
                "Look for a word in the logs of a directory",
                RunCommand("grep -c error *.log", directory="logs"),
                "Exit code 1 after 0.1 s.\n--- output ---\napp.log:0\n",
            ),
        ),
    )


def _directory(filesystem: Filesystem, directory: str) -> Path | str:
    """Find the directory on disk to run in, or say why there is none."""
    root = filesystem.host_root
    if root is None:
        reason = "is read-only here" if filesystem.read_only else "is not on disk"
        return f"Commands cannot run: the workspace {reason}. Use the file tools instead."
    try:
        wanted = (root / normalize(directory)).resolve()
    except (OSError, ValueError) as error:
        return f"Cannot run in {directory!r}: {error}."
    if not wanted.is_relative_to(root.resolve()):
        return f"Cannot run in {directory!r}: it leads out of the workspace."
    if not wanted.is_dir():
        return f"Cannot run in {directory!r}: there is no such directory in the workspace."
    return wanted


def _shown(result: CommandResult, timeout_s: float) -> str:
    """Write a result for the model."""
    seconds = result.elapsed.total_seconds()
    if result.timed_out:
        text = f"The command was stopped after {timeout_s:g} s; it had not ended."
    elif result.exit_code is not None and result.exit_code < 0:
        text = f"The command was ended by signal {-result.exit_code} after {seconds:.1f} s."
    else:
        text = f"Exit code {result.exit_code} after {seconds:.1f} s."
    if result.leftover_processes:
        text += (
            f" It left {result.leftover_processes} processes running in the background; they were stopped."
        )
    for title, output in (("output", result.stdout), ("errors", result.stderr)):
        if output:
            text += f"\n--- {title} ---\n{output.rstrip()}"
    if not result.stdout and not result.stderr:
        text += " It wrote nothing."
    if result.truncated:
        text += "\n[output cut in the middle; write it to a file and read the part you need]"
    return text


run_command: Tool[RunCommand, str] = shell_tool()
"""Runs shell commands, with the usual limits."""
