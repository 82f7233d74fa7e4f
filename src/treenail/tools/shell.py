"""A tool that runs shell commands in the workspace.

A command works on a layer over the workspace where the system has layers (`files="commands"`): its changes
reach the workspace when the call is committed, and not at all if somebody else changed the same files
meanwhile. Elsewhere the workspace is scanned before and after, and every change in between belongs to the
call. If the command times out, the call fails and its changes are dropped. A command that ends with an exit
code other than zero has still done its work (a failing test, a search without matches): the model gets its
result and its changes stay, unless the tool is made with `undo_on_failure=True`.

Commands run in a sandbox (`treenail.sandbox`) as the workspace says: they write to the workspace and to a
private `/tmp`, see the rest of the system read-only and without the user's secrets, and have no network.
Where no sandbox can be had, they are refused unless it is turned off. No process they start survives them.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

from treenail.errors import PathEscapeError, SandboxError, UsageError
from treenail.sandbox import told_to_the_model
from treenail.tools.commands import run_in_workspace
from treenail.tools.context import ToolContext
from treenail.tools.events import CommandRan
from treenail.tools.live_output import LiveOutput
from treenail.tools.process import CommandResult, command_environment
from treenail.tools.tool import ReadyTool, Tool, ToolExample, ToolResult, described
from treenail.workspace import Filesystem, layered, normalize, sandbox_of

MAX_OUTPUT_BYTES = 20_000
"""How much of each output stream is shown to the model."""

MAX_TIMEOUT_S = 3_600.0
"""The longest timeout that a model may request."""


@dataclass(frozen=True, slots=True)
class RunCommand:
    """What `run_command` takes."""

    command: str = described("The command, as for bash -c.")
    directory: str = described("Directory to run it in, relative to the workspace root.", default=".")
    timeout_seconds: float | None = described(
        f"When to stop it, at most {MAX_TIMEOUT_S:g}; leave out for the default.", default=None
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

    `timeout_s` applies unless the model requests another. `allow_env` names secret-looking variables of
    this process that commands may see, `env` adds variables. With `undo_on_failure` an exit code other
    than zero is a failed call, whose changes are rolled back.
    """
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise UsageError(f"timeout_s is {timeout_s}; it must be more than 0 and at most {MAX_TIMEOUT_S:g}")

    # Async, because a cancelled call must wait until all processes of the command have ended: only then can
    # the workspace be rolled back.
    async def handle(params: RunCommand, *, context: ToolContext) -> ToolResult[str]:
        wanted_s = timeout_s if params.timeout_seconds is None else params.timeout_seconds
        if not 0 < wanted_s <= MAX_TIMEOUT_S:
            return ToolResult.error(f"timeout_seconds must be more than 0 and at most {MAX_TIMEOUT_S:g}.")
        if not params.command.strip() or "\0" in params.command:
            return ToolResult.error("The command is empty or contains a NUL character; send a shell command.")
        refusal = _refusal(context.filesystem, params.directory)
        if refusal is not None:
            return ToolResult.error(refusal)
        if context.deadline is not None:
            wanted_s = min(wanted_s, max(context.deadline.remaining().total_seconds(), 0.001))
        sandbox, show = sandbox_of(context.filesystem), context.output
        try:
            ran = await run_in_workspace(
                context.filesystem,
                params.command,
                directory=normalize(params.directory),
                env=command_environment(allow=allow_env, extra=env),
                timeout_s=wanted_s,
                max_output_bytes=max_output_bytes,
                cancellation=context.cancellation,
                clock=context.state.clock,
                sandbox=sandbox,
                on_output=show and LiveOutput(partial(show, context.call_id)),
            )
        except SandboxError as error:
            context.session.dispatch(CommandRan(context.call_id, "refused", ("command",)))
            return ToolResult.error(f"{error}{told_to_the_model(('command',))}")
        result = ran.result
        context.session.dispatch(
            CommandRan(
                context.call_id, result.confinement, result.refused, ran.way, ran.because, result.exit_code
            )
        )
        if result.cancelled:
            context.cancellation.raise_if_cancelled()
        text = _shown(result, wanted_s) + told_to_the_model(result.refused)
        if ran.way == "layer" and ran.because:
            text += f"\n[workspace] The result differs from that of a plain run: {ran.because}."
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
            f"terminal, so it cannot ask questions. It is stopped after {timeout_s:g} seconds unless "
            "timeout_seconds says otherwise. Background processes are stopped when it ends, and "
            "/tmp may be empty in the next one. Long output is cut in the middle."
        ),
        handler=handle,
        effects="workspace",
        files="commands",
        examples=(
            ToolExample(
                "Run the tests",
                RunCommand("python -m pytest -q tests", timeout_seconds=300),
                "Exit code 0 after 2.1 s.\n--- output ---\n14 passed in 1.90s\n",
            ),
            ToolExample(
                "Search the logs in a directory",
                RunCommand("grep -c error *.log", directory="logs"),
                "Exit code 1 after 0.1 s.\n--- output ---\napp.log:0\n",
            ),
        ),
    )


def _refusal(filesystem: Filesystem, directory: str) -> str | None:
    """Say why no command can run in a directory of the workspace, or None if one can."""
    if filesystem.host_root is None and layered(filesystem) is None:
        reason = "is read-only here" if filesystem.read_only else "is not on disk"
        return f"Commands cannot run: the workspace {reason}. Use the file tools instead."
    try:
        if normalize(directory) != ".":
            filesystem.list(directory)
    except PathEscapeError as error:
        return f"Cannot run in {directory!r}: it is outside of the workspace: {error}."
    except (FileNotFoundError, NotADirectoryError):
        return f"Cannot run in {directory!r}: there is no such directory in the workspace."
    except (OSError, ValueError) as error:
        return f"Cannot run in {directory!r}: {error}."
    return None


def _shown(result: CommandResult, timeout_s: float) -> str:
    """Return a result as text for the model."""
    seconds = result.elapsed.total_seconds()
    if result.timed_out:
        text = f"The command timed out and was stopped after {timeout_s:g} s."
    elif result.exit_code is not None and result.exit_code < 0:
        text = f"The command was ended by signal {-result.exit_code} after {seconds:.1f} s."
    else:
        text = f"Exit code {result.exit_code} after {seconds:.1f} s."
        if 0 < (result.exit_code or 0) - 128 < signal.NSIG:
            text += f" Such a code usually means: ended by signal {(result.exit_code or 0) - 128}."
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
"""Runs shell commands, with the default limits."""
