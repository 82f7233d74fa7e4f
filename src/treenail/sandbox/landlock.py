"""The command line that runs a command confined by Landlock, where bubblewrap is not to be had.

A fallback, and weaker. The kernel keeps the content of files: a command writes to the workspace, to a
temporary directory of its own and to the private caches, cannot read secrets, cannot send signals or trace,
and has no socket at all unless the network was granted. What it leaves open: a command can change modes,
owners, times and attributes of other files of the user, sees the names of all files and processes, and with
the network reaches the sockets of other programs too. There are no layers, because there are no mounts.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from treenail.errors import SandboxError
from treenail.sandbox.places import (
    TEMPORARY,
    confined_environment,
    emptied,
    is_in,
    live_directories,
    private_cache,
    running_python,
    writable_places,
)
from treenail.sandbox.policy import WITHOUT, CommandLine, Grants
from treenail.sandbox.seccomp import program
from treenail.sandbox.secrets import real_paths, secret_paths

SCRIPT = Path(__file__).with_name("landlock_exec.py")
"""The script that gives up its rights and becomes the command."""


def landlocked(
    argv: Sequence[str],
    *,
    workspace: Path,
    env: Mapping[str, str],
    temporary: str,
    grants: Grants,
    hidden: Collection[Path] = (),
    live: bool = False,
) -> CommandLine:
    """Make the command line that runs `argv` confined by Landlock, with a directory for temporary files.

    Raises `SandboxError` if something that must be hidden lies where the command may write.
    """
    rules = program(sockets=grants.network)
    assert rules is not None, "the probe has found that the system calls are known"
    place = (os.path.abspath(workspace), os.path.realpath(workspace))
    cache = private_cache(place, grants)
    write = writable_places(place, grants, cache) | {temporary}
    if live:
        write = (write - {place[1]}) | live_directories(place[1], grants, live)
    secret = {*secret_paths(), *real_paths(hidden)} - {str(each) for each in grants.write}
    uncovered = sorted(each for each in secret if is_in(each, write))
    if uncovered:
        raise SandboxError(
            f"the command was not run: {uncovered[0]} must be hidden, and Landlock cannot hide what lies "
            f"where a command may write; use another workspace, install bubblewrap, or {WITHOUT}"
        )
    seen = {place[1], *real_paths(running_python(emptied()))}
    unseen = {*secret, *emptied(), "/dev/shm"} - seen
    order = {
        "write": sorted(write),
        "read": sorted(each for each in seen if not is_in(each, secret)),
        "hidden": sorted(unseen),
        "network": grants.network,
        "program": base64.b64encode(rules).decode("ascii"),
    }
    line = [sys.executable, "-I", "-S", "-X", "utf8", str(SCRIPT), json.dumps(order), *argv]
    variables = confined_environment(cache, temporary, grants, env) | dict.fromkeys(TEMPORARY, temporary)
    return CommandLine(tuple(line), (), variables)
