"""The tools and resources of `treenail mcp serve`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from anyio import to_thread
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import Completion, CompletionArgument, ToolAnnotations

import treenail
from treenail.errors import TreenailError
from treenail.presenters.mcp.runs import Runs

_LOOK_S = 0.5
"""How long to wait between two reports of progress."""

_MAX_WAIT_S = 600.0
_MAX_COMPLETIONS = 100

_INSTRUCTIONS = """\
Hand work on this project's files to an agent whose runs have hard ceilings and can be undone. start_run
returns at once; wait_run waits for the end. Only the state `completed` means that the work is done. A run
that is `held` waits for a person: show them the call, and pass on their answer with answer_hold. diff_run
shows what changed, and undo_run takes all of it back."""

_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_ACTS = ToolAnnotations(
    read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=True
)
_STOPS = ToolAnnotations(
    read_only_hint=False, destructive_hint=False, idempotent_hint=True, open_world_hint=False
)
_UNDOES = ToolAnnotations(
    read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=False
)

T = TypeVar("T")


async def _do(work: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Do something on a thread; an error of ours is the tool's answer, in one sentence."""
    try:
        return await to_thread.run_sync(partial(work, *arguments, **named))
    except TreenailError as error:
        raise ToolError(str(error)) from error


def server_for(runs: Runs) -> MCPServer[Any]:
    """Return a server with the tools and resources for these runs."""
    server: MCPServer[Any] = MCPServer(
        "treenail", instructions=_INSTRUCTIONS, version=treenail.__version__, log_level="WARNING"
    )

    @server.tool(annotations=_ACTS)
    async def start_run(
        task: str, key: str, max_cost_usd: float | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Start a run on a task, and return at once.

        The key is a text of your choice that names this piece of work: the same key and task give the same
        run, also after a restart, and resume it if it was cut off. Ceilings can only be lowered.
        """
        run_id = await _do(runs.start, task, key, max_cost_usd=max_cost_usd, timeout_s=timeout_s)
        return await _do(runs.data, str(run_id))

    @server.tool(annotations=_READS)
    async def get_run(run: str) -> dict[str, Any]:
        """Return how a run stands: state, answer, cost, and the calls that wait for a person."""
        return await _do(runs.data, run)

    @server.tool(annotations=_READS)
    async def wait_run(run: str, context: Context[Any, Any], timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until a run ends or waits for a person, at most for a time. Then return how it stands."""
        left, beats = min(timeout_s, _MAX_WAIT_S), 0
        while left > 0 and (doing := await _do(runs.wait, run, min(left, _LOOK_S))):
            left -= _LOOK_S
            beats += 1
            await context.report_progress(beats, message=doing)
        return await _do(runs.data, run)

    @server.tool(annotations=_STOPS)
    async def cancel_run(run: str) -> dict[str, Any]:
        """Interrupt a run. What its finished calls did stays; undo_run takes it back."""
        return await _do(runs.data, str(await _do(runs.cancel, run)))

    @server.tool(annotations=_ACTS)
    async def answer_hold(
        run: str, approved: bool, call: str | None = None, note: str = ""
    ) -> dict[str, Any]:
        """Answer a call that waits for a person, and resume the run. The note is given to its model."""
        run_id = await _do(runs.answer, run, call, approved=approved, note=note)
        return await _do(runs.data, str(run_id))

    @server.tool(annotations=_READS)
    async def list_runs(limit: int = 20) -> list[dict[str, Any]]:
        """List the runs of this project, newest first."""
        return await _do(runs.list, limit)

    @server.tool(annotations=_READS)
    async def diff_run(run: str) -> str:
        """Return what a run changed in the files, as a unified diff."""
        return await _do(runs.diff, run) or "nothing changed"

    @server.tool(annotations=_UNDOES)
    async def undo_run(run: str) -> dict[str, Any]:
        """Undo everything that a run did to the files.

        If somebody has edited one of them since, nothing is changed.
        """
        return {"undone": await _do(runs.undo, run)}

    @server.resource("treenail://runs/{run}/timeline", mime_type="text/plain")
    async def timeline(run: str) -> str:
        """What happened in a run, line by line."""
        return await _do(runs.timeline, run)

    @server.resource("treenail://runs/{run}/diff", mime_type="text/x-diff")
    async def diff(run: str) -> str:
        """What a run changed in the files."""
        return await _do(runs.diff, run)

    @server.completion()  # type: ignore[no-untyped-call,untyped-decorator]  # the SDK gives it no types
    async def complete(ref: Any, argument: CompletionArgument, context: Any) -> Completion:
        """Complete the name of a run in a resource's address."""
        found = await _do(runs.list, _MAX_COMPLETIONS) if argument.name == "run" else []
        names = [str(each["id"]) for each in found]
        return Completion(values=[each for each in names if each.startswith(argument.value)])

    return server
