"""Commands of the operator's around tool calls and at the end of a turn: a formatter, a linter, a guard.

Theory of operation
-------------------
A hook is part of the call that it belongs to. The call is begun as one whose files may change in any way: the
workspace is scanned before and after, and what the tool and its hooks change is kept together, or undone
together. Hooks run where commands run, in the sandbox, at the workspace's root, with the tool's name, the
path and the arguments in their environment. Only tools with effects have hooks, and not those of the plan.

    before    exit code 0 lets the call run; any other refuses it, and the model reads the output
    after     0 keeps the call as it is now; 2 undoes it, and the model reads the output; with any other the
              call stands, and the output is added to its result
    turn_end  a call of its own, on a layer; 0 keeps its changes; any other undoes them, and the model reads
              the output and continues

A hook that takes too long counts as one that refuses. A read-only run has no hooks at the end of a turn.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread

from treenail.errors import PathEscapeError, SandboxError, TreenailError
from treenail.tools.commands import run_in_workspace
from treenail.tools.context import ToolContext
from treenail.tools.events import CommandRan
from treenail.tools.hook import Hook
from treenail.tools.process import command_environment
from treenail.tools.tool import ReadyTool, Tool, ToolResult, as_result
from treenail.tools.values import as_text
from treenail.workspace import Filesystem, normalize, sandbox_of

UNDO = 2
"""The exit code by which a hook after a call undoes it."""

_MAX_TOUCHED = 10_000
"""How many paths of a call are compared with a hook's; with more, the hook runs."""

MAX_SHOWN_CHARS = 10_000
"""How much of a hook's output the model reads."""


def hooked(tool: Tool[Any, Any], hooks: Sequence[Hook]) -> Tool[Any, Any]:
    """Return a tool with its hooks around it; the tool itself if it has none, or no effects."""
    mine = [each for each in hooks if each.is_for(tool.name)]
    if not mine or tool.effects == "none" or tool.is_note or tool.handler is None:
        return tool

    async def handle(params: Any, *, context: ToolContext) -> ToolResult[Any]:
        named = _named(params)
        about = {"TREENAIL_TOOL": tool.name, "TREENAIL_PATH": named[0] if named else ""}
        about["TREENAIL_ARGUMENTS"] = "" if params is None else as_text(params, "")
        paths = _touched(named, context.filesystem) if any(each.paths for each in mine) and named else named
        chosen = [each for each in mine if paths is None or each.matches(paths)]
        for hook in (each for each in chosen if each.when == "before"):
            code, said = await _run(hook, context, about)
            if code != 0:
                return ToolResult.error(f"A hook refused this call, so it was not run: {said}")
        given = context if tool.takes_context else None
        if tool.is_async:
            outcome = await tool.call(params, given)
        else:
            outcome = await anyio.to_thread.run_sync(partial(tool.call, params, given))
            if inspect.isawaitable(outcome):
                outcome = await outcome
        result = as_result(outcome)
        notes: list[str] = []
        for hook in (each for each in chosen if each.when == "after" and result.success):
            code, said = await _run(hook, context, about)
            if code in (UNDO, None):
                return ToolResult.error(
                    f"{result.render()}\nA hook refused what this call did; it was undone: {said}"
                )
            if code != 0:
                notes.append(f"A hook says: {said}")
        return _with_notes(result, notes)

    return replace(tool, handler=handle, spread=False, files="any", wraps=tool)


def _with_notes(result: ToolResult[Any], notes: Sequence[str]) -> ToolResult[Any]:
    if not notes:
        return result
    return replace(result, message="\n".join([result.render(), *notes]), value=None)


def _named(params: Any) -> list[str]:
    """Return the paths that a call names, in their one spelling: its fields `path` and `target`."""
    fields = params if isinstance(params, Mapping) else {}
    found = [fields.get(name, getattr(params, name, None)) for name in ("path", "target")]
    return [_normal(each) for each in found if isinstance(each, str)]


def _normal(path: str) -> str:
    try:
        return normalize(path)
    except (PathEscapeError, ValueError):
        return path  # The tool refuses it.


def _touched(named: Sequence[str], filesystem: Filesystem) -> list[str] | None:
    """Return the paths that a call is about: those that it names, where their links lead, and what is in a
    directory, also as it would be called at the target. None if there are too many."""
    found: list[str] = []
    for each in (path for name in named for path in {name, _behind_links(name, filesystem)}):
        found.append(each)
        waiting = [each]
        while waiting:
            try:
                listed = filesystem.list(waiting.pop())
            except (OSError, ValueError, TreenailError):
                continue  # It is not a directory.
            found += [entry.path for entry in listed]
            waiting += [entry.path for entry in listed if entry.is_directory]
            if len(found) > _MAX_TOUCHED:
                return None
    if len(named) > 1:
        source, target = named[0], named[1]
        moved = [each.removeprefix(f"{source}/") for each in found if each.startswith(f"{source}/")]
        found += [f"{base}/{each}" for base in {target, _behind_links(target, filesystem)} for each in moved]
    return found


def _behind_links(path: str, filesystem: Filesystem) -> str:
    """Return the path in the workspace that links lead to; the path itself if they lead outside."""
    root = Path(filesystem.root)
    if not root.is_absolute() or not root.is_dir():
        return path
    try:
        return (root / path).resolve().relative_to(root.resolve()).as_posix()
    except (OSError, ValueError, RuntimeError):
        return path


async def _run(hook: Hook, context: ToolContext, about: dict[str, str]) -> tuple[int | None, str]:
    """Run a hook; returns its exit code (None if it was stopped or could not run), and what to tell."""
    try:
        ran = await run_in_workspace(
            context.filesystem,
            hook.command,
            env=command_environment(extra=about),
            timeout_s=hook.timeout_s,
            cancellation=context.cancellation,
            clock=context.state.clock,
            sandbox=sandbox_of(context.filesystem),
        )
    except SandboxError as error:
        return None, f"{hook.command!r} could not be run: {error}"
    result = ran.result
    context.session.dispatch(
        CommandRan(context.call_id, result.confinement, result.refused, ran.way, ran.because)
    )
    if result.cancelled:
        context.cancellation.raise_if_cancelled()
    said = "\n".join(each.strip() for each in (result.stdout, result.stderr) if each.strip())
    said = said[-MAX_SHOWN_CHARS:] or "it wrote nothing"
    if result.timed_out:
        return None, f"{hook.command!r} was stopped after {hook.timeout_s:g} s: {said}"
    return result.exit_code, f"{hook.command!r} ended with exit code {result.exit_code}: {said}"


def turn_end_tool(hook: Hook) -> Tool[Any, Any]:
    """Make the call by which a hook at the end of a turn is run, in a transaction of its own."""

    async def handle(params: None, *, context: ToolContext) -> ToolResult[str]:
        code, said = await _run(hook, context, {"TREENAIL_TOOL": TURN_END})
        return ToolResult.ok(message=said) if code == 0 else ToolResult.error(said)

    return ReadyTool[None, str](
        name=TURN_END,
        description="A command of the operator's at the end of a turn.",
        handler=handle,
        effects="workspace",
        files="commands",
    )


TURN_END = "turn_end_hook"
"""The name of the calls that run hooks at the end of a turn."""
