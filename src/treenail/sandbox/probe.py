"""Whether commands can be confined on this machine: found out by doing it once."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from treenail.errors import SandboxError
from treenail.sandbox.bubblewrap import confined, system_program
from treenail.sandbox.landlock import landlocked
from treenail.sandbox.landlock_exec import MIN_ABI, abi
from treenail.sandbox.policy import NOTHING_MORE, WITHOUT, CommandLine, Level, Mode
from treenail.sandbox.seccomp import program

_SCRIPT = 'echo in > "$1/in"; echo out > "$2/out"; ls /sys/class/net /run; exit 0'
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Probe:
    """What was found out."""

    level: Level | None
    text: str
    """What confines commands, or why nothing does."""
    advice: str = ""

    @property
    def confines(self) -> bool:
        """Whether commands can be confined at all."""
        return self.level is not None


def level_of(mode: Mode) -> Level:
    """Return what confines commands here. Raises `SandboxError` if nothing does that is enough for a mode."""
    found = probe()
    if found.level is None or (mode == "require" and found.level != "bubblewrap"):
        raise SandboxError(f"commands cannot be confined: {found.text}; {found.advice or WITHOUT}")
    return found.level


@functools.cache
def probe() -> Probe:
    """Try a sandbox, once in the life of this process: does it start, and does it keep a write out?

    Bubblewrap first, then Landlock.
    """
    if not sys.platform.startswith("linux"):
        return Probe(None, f"not confined: there is no sandbox for {sys.platform}", WITHOUT)
    best = _trial(_by_bubblewrap)
    if best.confines or abi() < MIN_ABI or program() is None:
        return best
    second = _trial(_by_landlock)
    return replace(second, advice=f"for bubblewrap: {best.text}") if second.confines else best


def _trial(trial: Callable[[Path], Probe]) -> Probe:
    try:
        with tempfile.TemporaryDirectory(prefix="treenail-probe-") as directory:
            for name in ("inside", "outside", "temporary"):
                Path(directory, name).mkdir()
            return trial(Path(directory))
    except SandboxError as error:
        return Probe(None, f"not confined: {error}")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Probe(None, f"not confined: a trial failed: {error}", WITHOUT)


def _by_bubblewrap(directory: Path) -> Probe:
    inside = directory / "inside"
    with confined(_argv(directory), inside, workspace=inside, env={"PATH": os.defpath}) as line:
        failure = _failure(line, directory)
    if failure is not None:
        return failure
    version = subprocess.run(
        [system_program("bwrap"), "--version"], check=False, capture_output=True, text=True
    ).stdout.split()[-1:]
    how = "root keeps only the capabilities to write files" if os.geteuid() == 0 else "in a user namespace"
    calls = "system calls filtered" if program() is not None else "system calls not filtered on this machine"
    return Probe("bubblewrap", f"bubblewrap {''.join(version)}, {how}, {calls}")


def _by_landlock(directory: Path) -> Probe:
    line = landlocked(
        _argv(directory),
        workspace=directory / "inside",
        env={"PATH": os.defpath},
        temporary=str(directory / "temporary"),
        grants=NOTHING_MORE,
    )
    return _failure(line, directory) or Probe(
        "landlock",
        "Landlock, which is weaker than bubblewrap: a command cannot change the content of files outside, "
        "read secrets, use sockets or send signals, but can change modes, owners and times of your files, "
        "and see the names of all files and processes; --sandbox require refuses it",
    )


def _argv(directory: Path) -> list[str]:
    return ["/bin/sh", "-c", _SCRIPT, "sh", str(directory / "inside"), str(directory / "outside")]


def _failure(line: CommandLine, directory: Path) -> Probe | None:
    """Run a trial, and say what is wrong with it."""
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
    if ran.returncode or not (directory / "inside" / "in").exists():
        return Probe(None, f"not confined: {ran.stderr.strip() or 'the trial failed'}", _advice(ran.stderr))
    if (directory / "outside" / "out").exists():
        return Probe(None, "not confined: a command in a sandbox wrote outside of it", WITHOUT)
    return None


def _advice(errors: str) -> str:
    if "ermission denied" in errors or "not permitted" in errors or "No permissions" in errors:
        return (
            "this system refuses namespaces: in Docker use --security-opt seccomp=unconfined --security-opt "
            f"apparmor=unconfined, on Ubuntu 24.04 allow bwrap in AppArmor; or {WITHOUT}"
        )
    return WITHOUT
