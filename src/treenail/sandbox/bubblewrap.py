"""The command line that runs a command in a sandbox, by bubblewrap.

Theory of operation
-------------------
The command gets namespaces of its own: processes, mounts, network, IPC. It sees the system read-only, and can
write to its workspace, to an empty `/tmp`, and to what it was granted. When its first process ends, or ours
does, the kernel ends all others with it.

A layer is mounted before bubblewrap starts, by `unshare` and `mount`, in a mount namespace that only the
command has: bubblewrap mounts overlays itself only from 0.11 on. An ordinary user needs a user namespace for
that, in which they are root; bubblewrap then makes another one, in which the command has its own user again
and no capabilities. Root needs none, and keeps only the capabilities that writing other owners' files takes.

The mounts are sorted by path, so that the more specific one wins: a workspace inside a hidden directory is
visible, a hidden directory inside the workspace is not.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from treenail.sandbox.policy import NOTHING_MORE, Grants, Layer
from treenail.sandbox.seccomp import program

_CAPABILITIES = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID")
"""What root needs to write other owners' files. CAP_DAC_READ_SEARCH would open files by their handles."""

_PROC_READ_ONLY = (
    "sys",
    "sysrq-trigger",
    "irq",
    "bus",
    "fs",
    "acpi",
    "scsi",
    "driver",
    "mtrr",
    "tty",
    "asound",
)
"""What root could write in a new `/proc` without any capability: `core_pattern` names a program to run."""

_MOUNT_LAYER = (
    'cd / && exec 7<"$1" 8<"$2" 9<"$3" && '
    'mount -t overlay -o "lowerdir=/proc/self/fd/7,upperdir=/proc/self/fd/8,workdir=/proc/self/fd/9$4" '
    'treenail "$1" && exec 7<&- 8<&- 9<&- && shift 4 && exec "$@"'
)
"""Mounts by descriptors, so that no path has to be quoted, and closes them: they lead out of the sandbox."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A command line in a sandbox, and the descriptors that it must inherit."""

    argv: tuple[str, ...]
    descriptors: tuple[int, ...]


@contextmanager
def confined(
    argv: Sequence[str],
    directory: Path,
    *,
    workspace: Path,
    layer: Layer | None = None,
    grants: Grants = NOTHING_MORE,
    hidden: Collection[Path] = (),
    status: int | None = None,
) -> Iterator[CommandLine]:
    """Make the command line that runs `argv` in a directory of the workspace, in a sandbox.

    With a layer the command works on it in place of `layer.lower`. `hidden` are paths that it must not see.
    On the descriptor `status` bubblewrap reports, in lines of JSON, the first process and its exit code. Use
    the command line within the block: its descriptors are closed after it.
    """
    words = ["bwrap", *_namespaces(grants), *_mounts(workspace, grants, hidden)]
    descriptors = [] if status is None else [status]
    if status is not None:
        words += ["--json-status-fd", str(status)]
    rules = program()
    if rules is not None:
        descriptors.append(_readable(rules))
        words += ["--seccomp", str(descriptors[-1])]
    try:
        words += ["--chdir", str(directory), "--", *argv]
        yield CommandLine((*_layered(layer), *words), tuple(descriptors))
    finally:
        if rules is not None:
            os.close(descriptors[-1])


def _readable(content: bytes) -> int:
    """Return a descriptor from which some bytes, fewer than a pipe holds, can be read."""
    read, write = os.pipe()
    try:
        os.write(write, content)
    finally:
        os.close(write)
    # The numbers up to 9 are those that a shell can use for the layer.
    high = fcntl.fcntl(read, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(read)
    return high


def _layered(layer: Layer | None) -> list[str]:
    """Return the words before `bwrap` that mount a layer."""
    if layer is None:
        return []
    is_root = os.geteuid() == 0
    user = [] if is_root else ["--user", "--map-root-user"]
    options = "".join(f",{each}" for each in (*layer.options, *(() if is_root else ("userxattr",))))
    paths = [str(layer.lower), str(layer.upper), str(layer.work)]
    return ["unshare", *user, "--mount", "--", "/bin/sh", "-c", _MOUNT_LAYER, "sh", *paths, options]


def _namespaces(grants: Grants) -> list[str]:
    words = [
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
    ]
    if not grants.network:
        words.append("--unshare-net")
    if os.geteuid() == 0:
        return [*words, *(word for each in _CAPABILITIES for word in ("--cap-add", each))]
    return [*words, "--unshare-user", "--uid", str(os.geteuid()), "--gid", str(os.getegid())]


def _mounts(workspace: Path, grants: Grants, hidden: Collection[Path]) -> list[str]:
    # Of two mounts on one path the later one wins: a grant over what is hidden.
    mounts: dict[str, tuple[str, ...]] = {}
    for each in ("/run", "/tmp", "/var/tmp", "/var/run"):
        if os.path.isdir(each):
            real = os.path.realpath(each)
            mounts[real] = ("--perms", "1777", "--tmpfs", real) if each.endswith("tmp") else ("--tmpfs", real)
    for path in hidden:
        real = os.path.realpath(path)
        if os.path.isdir(real):
            mounts[real] = ("--tmpfs", real, "--remount-ro", real)
        elif os.path.exists(real):
            mounts[real] = ("--dev-bind", "/dev/null", real)
    for path in (workspace, *grants.write):
        real = os.path.realpath(path)
        mounts[real] = ("--bind", real, real)
    words = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    if os.geteuid() == 0:
        for name in _PROC_READ_ONLY:
            if os.path.exists(f"/proc/{name}"):
                words += ["--ro-bind", f"/proc/{name}", f"/proc/{name}"]
    for place in sorted(mounts, key=lambda place: place.count("/")):
        words += mounts[place]
    return words
