"""Whether commands can be confined on this machine: found out by doing it once."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from treenail.errors import SandboxError
from treenail.sandbox.bubblewrap import confined, system_program
from treenail.sandbox.policy import WITHOUT
from treenail.sandbox.seccomp import program

_SCRIPT = 'echo in > "$1/in"; echo out > "$2/out"; ls /sys/class/net /run; exit 0'
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Probe:
    """What was found out."""

    confines: bool
    text: str
    """What confines commands, or why nothing does."""
    advice: str = ""


@functools.cache
def probe() -> Probe:
    """Try a sandbox, once in the life of this process: does it start, and does it keep a write out?"""
    if not sys.platform.startswith("linux"):
        return Probe(False, f"not confined: there is no sandbox for {sys.platform}", WITHOUT)
    try:
        with tempfile.TemporaryDirectory(prefix="treenail-probe-") as directory:
            return _tried(Path(directory))
    except SandboxError as error:
        return Probe(False, f"not confined: {error}")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Probe(False, f"not confined: a trial failed: {error}", WITHOUT)


def _tried(directory: Path) -> Probe:
    inside, outside = directory / "inside", directory / "outside"
    inside.mkdir()
    outside.mkdir()
    argv = ["/bin/sh", "-c", _SCRIPT, "sh", str(inside), str(outside)]
    with confined(argv, inside, workspace=inside, env={"PATH": os.defpath}) as line:
        ran = subprocess.run(
            line.argv,
            env=dict(line.env),
            pass_fds=line.descriptors,
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=_PATIENCE_S,
        )
    if ran.returncode or not (inside / "in").exists():
        return Probe(False, f"not confined: {ran.stderr.strip() or 'bwrap failed'}", _advice(ran.stderr))
    if (outside / "out").exists():
        return Probe(False, "not confined: a command in a sandbox wrote outside of it", WITHOUT)
    version = subprocess.run(
        [system_program("bwrap"), "--version"], check=False, capture_output=True, text=True
    ).stdout.split()[-1:]
    how = "root keeps only the capabilities to write files" if os.geteuid() == 0 else "in a user namespace"
    calls = "system calls filtered" if program() is not None else "system calls not filtered on this machine"
    return Probe(True, f"bubblewrap {''.join(version)}, {how}, {calls}")


def _advice(errors: str) -> str:
    if "ermission denied" in errors or "not permitted" in errors or "No permissions" in errors:
        return (
            "this system refuses namespaces: in Docker use --security-opt seccomp=unconfined --security-opt "
            f"apparmor=unconfined, on Ubuntu 24.04 allow bwrap in AppArmor; or {WITHOUT}"
        )
    return WITHOUT
