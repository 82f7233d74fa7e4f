"""Running a command in a workspace: on a layer where there is one, else on the tree itself, with scans.

Theory of operation
-------------------
On a layer the command has done nothing to anybody until its call is committed. So it may be run again, on the
tree itself, where a layer cannot give what a plain directory gives:

- a directory of the workspace was to be renamed (EXDEV; `mv` copies by itself, `git mv` does not);
- a file belongs to a user or group that the layer does not know (EOVERFLOW);
- a file with several names was changed: on a layer its other names do not follow.

A command that may use the network or write elsewhere is not repeated. It keeps its result, which says what is
different.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import anyio
import anyio.to_thread

from treenail.clock import Clock
from treenail.containment import CancellationToken
from treenail.errors import SandboxError, UsageError, WorkspaceError
from treenail.sandbox import Layer, Sandbox, level_of
from treenail.tools.events import Way
from treenail.tools.process import CommandResult, default_shell, run_command_async, shown_command
from treenail.workspace import CommandLayer, Filesystem, LayeredFilesystem, layered

_logger = logging.getLogger("treenail.tools")

_UNLIKE = {
    "a directory was to be renamed, which a layer cannot do": ("Invalid cross-device link", "EXDEV"),
    "a file belongs to a user or group that a layer does not know": (
        "Value too large for defined data type",
        "EOVERFLOW",
    ),
}
"""What a layer cannot do, and how programs name it."""

_CHANGE_DIRECTORY = ("/bin/sh", "-c", 'cd -- "$1" && shift && exec "$@"', "sh")

_refused: dict[str, str] = {}
"""The workspaces over which no layer could be mounted in this process, and why."""


class RunOptions(TypedDict, total=False):
    """Options of `run_in_workspace`, as `run_command` has them."""

    env: Mapping[str, str] | None
    timeout_s: float | None
    max_output_bytes: int
    clock: Clock | None
    on_output: Callable[[bytes], object] | None


@dataclass(frozen=True, slots=True)
class WorkspaceRun:
    """How a command ended, and on what it worked."""

    result: CommandResult
    way: Way
    because: str = ""
    """Why it did not work on a layer, or was run again without one."""


async def run_in_workspace(
    filesystem: Filesystem,
    command: str | Sequence[str],
    *,
    directory: str = ".",
    sandbox: Sandbox | None = None,
    cancellation: CancellationToken | None = None,
    **options: Unpack[RunOptions],
) -> WorkspaceRun:
    """Run a command in a directory of the workspace that the open call holds; see the theory of operation.

    The call must have been begun without a scan if the filesystem has layers, and with one if not.
    """
    sandbox = sandbox or Sandbox("off")
    start = partial(run_command_async, cancellation=cancellation, sandbox=sandbox, **options)

    def run(root: Path, layer: Layer | None = None) -> Awaitable[CommandResult]:
        if layer is None or (root / directory).is_dir():
            return start(command, cwd=root / directory, workspace=root, layer=layer)
        # The layer of a copy has directories that are not there without it.
        words = [default_shell(), "-c", command] if isinstance(command, str) else command
        return start([*_CHANGE_DIRECTORY, directory, *words], cwd=root, workspace=root, layer=layer)

    layers = layered(filesystem)
    if layers is None:
        return WorkspaceRun(await run(_root(filesystem)), "scan", "this kind of workspace has no layers")
    if layers.open_call is None:
        because = "no call holds the workspace, so nothing can be undone"
        return WorkspaceRun(await run(_root(filesystem)), "scan", because)
    result, because = await _on_layer(layers, run, sandbox)
    if result is not None and not because:
        return WorkspaceRun(result, "layer")
    if result is not None and (sandbox.grants.network or sandbox.grants.write):
        return WorkspaceRun(result, "layer", f"{because}; it was not run again, since it may act outside")
    layers.drop_layer()
    level = logging.INFO if result is None else logging.WARNING
    _logger.log(level, "%s runs without a layer: %s", shown_command([str(command)]), because)
    await _to_the_end(layers.capture)
    return WorkspaceRun(await run(_root(filesystem)), "scan", because)


def _root(filesystem: Filesystem) -> Path:
    root = filesystem.host_root
    if root is None:
        raise UsageError("a command needs a workspace on disk that can be written, and this one is not")
    return root


async def _on_layer(
    layers: LayeredFilesystem, run: Any, sandbox: Sandbox
) -> tuple[CommandResult | None, str]:
    """Run on a layer. Return the result, if there is one, and why it does not do, if so."""
    if sandbox.mode == "off":
        return None, "there is no sandbox"
    if level_of(sandbox.mode) == "landlock":
        return None, "Landlock has no layers"
    because = root = ""
    for elsewhere in (False, True):
        try:
            layer = layers.open_layer(elsewhere=elsewhere)
        except (OSError, WorkspaceError) as error:
            layer = str(error)
        if isinstance(layer, str):
            return None, because or layer
        root = layer.lower
        if root in _refused:
            return None, _refused[root]
        mounted = Layer(Path(root), Path(layer.upper), Path(layer.work), layer.options)
        try:
            result: CommandResult = await run(Path(root), mounted)
        except SandboxError as error:
            # The layer's filesystem cannot hold one, or no layer can be mounted, or there is no sandbox.
            because = f"no layer can be mounted here: {error}"
            layers.drop_layer()
            continue
        return result, "" if result.timed_out or result.cancelled else _unlike(result, layer)
    _refused[root] = because
    return None, because


def _unlike(result: CommandResult, layer: CommandLayer) -> str:
    """Say what a layer could not give the command, or nothing."""
    for reason, names in _UNLIKE.items():
        if any(name in output for name in names for output in (result.stderr, result.stdout)):
            return reason
    try:
        linked = layer.read().linked
    except OSError as error:
        return f"its layer cannot be read: {error}"
    return f"{', '.join(linked[:10])} has other names, which a layer does not follow" if linked else ""


async def _to_the_end(work: Any) -> Any:
    """Run a function on a worker thread to its end, even if the task is cancelled."""
    with anyio.CancelScope(shield=True):
        return await anyio.to_thread.run_sync(work)
