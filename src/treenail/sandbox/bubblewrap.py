"""The command line that runs a command in a sandbox, by bubblewrap.

Theory of operation
-------------------
The command gets namespaces of its own: processes, mounts, network, IPC. It sees the system read-only, and
can write to its workspace, to an empty `/tmp`, to the workspace's private caches, and to what it was
granted. When its first process ends, or ours does, the kernel ends all others with it.

A layer is mounted before bubblewrap starts, by `unshare` and `mount`, in a mount namespace that only the
command has: bubblewrap mounts overlays itself only from 0.11 on. An ordinary user needs a user namespace for
that, in which they are root; bubblewrap then makes another one, in which the command has its own user again
and no capabilities. Root needs none, and keeps only the capabilities that writing other owners' files takes.

The mounts are sorted by path, so that the more specific one wins: a workspace inside a hidden directory is
visible, a hidden directory inside the workspace is not.

Programs are found in the system's directories and start with an empty environment: what an agent wrote must
not become the program, or a library of the program, that confines it. The command's own environment, which
may hold a secret that it was granted, goes through a descriptor, where no list of processes shows it.

Inside, a small shell script writes a line to its input, which is a socket, waits for one, runs the command,
and writes how many processes are left. When its first line comes, the sandbox is set up and dies with us; a
command whose starter has died by then reads no answer, and does not begin.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from treenail.errors import SandboxError
from treenail.sandbox.places import (
    above,
    confined_environment,
    emptied,
    is_in,
    live_directories,
    private_cache,
    running_python,
    writable_places,
)
from treenail.sandbox.policy import NOTHING_MORE, WITHOUT, CommandLine, Grants, Layer
from treenail.sandbox.seccomp import program
from treenail.sandbox.secrets import listening_sockets, real_paths, secret_paths

_SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin")

_CAPABILITIES = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID")
"""What root needs to write other owners' files. CAP_DAC_READ_SEARCH would open files by their handles."""

_MOUNT_LAYER = """
cd / &&
"$1" -i -n -t overlay -o "lowerdir=/proc/self/fd/7,upperdir=/proc/self/fd/8,workdir=/proc/self/fd/9$5" \\
    treenail "$2" 7<"$2" 8<"$3" 9<"$4" &&
shift 5 && exec "$@"
"""
"""Mounts by descriptors, so that no path has to be quoted. Only `mount` has them: they lead outside. It looks
for no program that could do its work, and keeps no list."""

_INSIDE = """
trap : TERM HUP INT QUIT
echo >&0
read -r _ || exit 125
"$@" </dev/null
code=$? left=-1
for each in /proc/[0-9]*/stat; do
    read -r line <"$each" && case $line in *") Z "*) ;; *) left=$((left + 1)) ;; esac
done 2>/dev/null
echo "$left" >&0
exit "$code"
"""
"""Runs the command when its line is answered, and then counts the processes that live besides itself.

It is the first process of its namespace: nothing inside can end it, and when it ends, so does everything."""


@contextmanager
def confined(
    argv: Sequence[str],
    directory: Path,
    *,
    workspace: Path,
    env: Mapping[str, str] | None = None,
    layer: Layer | None = None,
    grants: Grants = NOTHING_MORE,
    hidden: Collection[Path] = (),
    shown: Collection[Path] = (),
    mentioned: Collection[Path] = (),
    read_only: bool = False,
    report: int | None = None,
    waits: bool = False,
    live: bool = False,
) -> Iterator[CommandLine]:
    """Make the command line that runs `argv` in a directory of the workspace, in a sandbox.

    With a layer the command works on it in place of `layer.lower`. `hidden` are paths that it must not see,
    besides the user's secrets; `shown` are paths that it may read wherever they are, `mentioned` those that
    it may read unless they are hidden. With `read_only` it cannot write to the workspace; with `live`
    neither, except to the directories `grants.live`, which are made if they do not exist. On the descriptor
    `report` bubblewrap reports, in lines of JSON, the first process and its exit code. With `waits` its input
    is a socket: it writes a line when it is set up, begins when it reads one, and at its end writes how many
    processes are alive. Use the command line within the block: its descriptors are closed after it.

    Raises `SandboxError` if that is not possible on this system.
    """
    if not sys.platform.startswith("linux"):
        raise SandboxError(f"commands cannot be confined: there is no sandbox for {sys.platform}; {WITHOUT}")
    with ExitStack() as opened:
        passed = [] if report is None else [report]
        words = [] if report is None else ["--json-status-fd", str(report)]
        rules = program()
        if rules is not None:
            passed.append(_readable(rules, opened))
            words += ["--seccomp", str(passed[-1])]
        given = dict(os.environ if env is None else env)
        place = (os.path.abspath(workspace), os.path.realpath(workspace))
        cache = private_cache(place, grants)
        open_to = writable_places(place, grants, cache) | live_directories(place[1], grants, live)
        sealed = {place[1]} if read_only or live else set()
        variables = confined_environment(cache, "/tmp", grants, given)
        words += [
            *_namespaces(grants),
            *_mounts(open_to, sealed, grants, hidden, shown, mentioned),
            "--clearenv",
            *(word for name, value in variables.items() for word in ("--setenv", name, value)),
            "--chdir",
            os.path.realpath(directory),
        ]
        passed.append(_readable(os.fsencode("\0".join(words) + "\0"), opened))
        command = ["--as-pid-1", "--", "/bin/sh", "-c", _INSIDE, "sh"] if waits else ["--"]
        line = [*_layered(layer), system_program("bwrap"), "--args", str(passed[-1]), *command, *argv]
        yield CommandLine(tuple(line), tuple(passed), {"PATH": ":".join(_SYSTEM_PATH)})


@functools.cache
def system_program(name: str) -> str:
    """Return the path of a program that only root could have installed. Raises `SandboxError`."""
    others = [each for each in os.environ.get("PATH", "").split(":") if os.path.isabs(each)]
    for place in (*_SYSTEM_PATH, *others):
        path = os.path.join(place, name)
        try:
            status = os.stat(path)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) and status.st_uid == 0 and not status.st_mode & 0o022:
            return path
    package = {"bwrap": "bubblewrap"}.get(name, "util-linux")
    raise SandboxError(
        f"commands cannot be confined: {name} is not installed; install the package {package}, or {WITHOUT}"
    )


def _readable(content: bytes, opened: ExitStack) -> int:
    """Return a descriptor from which these bytes can be read, once."""
    descriptor = os.memfd_create("treenail")
    opened.callback(os.close, descriptor)
    while content:
        content = content[os.write(descriptor, content) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _layered(layer: Layer | None) -> list[str]:
    """Return the words before `bwrap` that mount a layer."""
    if layer is None:
        return []
    is_root = os.geteuid() == 0
    user = [] if is_root else ["--user", "--map-root-user"]
    options = "".join(f",{each}" for each in (*layer.options, *(() if is_root else ("userxattr",))))
    paths = [os.path.abspath(each) for each in (layer.lower, layer.upper, layer.work)]
    mounted = ["/bin/sh", "-c", _MOUNT_LAYER, "sh", system_program("mount"), *paths, options]
    return [system_program("unshare"), *user, "--mount", "--", *mounted]


def _namespaces(grants: Grants) -> list[str]:
    words = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if not grants.network:
        words.append("--unshare-net")
    if os.geteuid() == 0:
        return [*words, *(word for each in _CAPABILITIES for word in ("--cap-add", each))]
    return [*words, "--unshare-user", "--uid", str(os.geteuid()), "--gid", str(os.getegid())]


def _mounts(
    open_to: set[str],
    sealed: set[str],
    grants: Grants,
    hidden: Collection[Path],
    shown: Collection[Path],
    mentioned: Collection[Path],
) -> list[str]:
    """Return the words that make the command's view of the files."""
    shows = {each for each in real_paths(shown) if not is_in(each, open_to)}
    empty, gone = emptied(), {"/dev", "/proc"}
    secret = {*secret_paths(), *real_paths((*hidden, *listening_sockets()))}
    seen = real_paths((*mentioned, *running_python(empty)))
    shows |= {each for each in seen if not is_in(each, open_to | secret)}
    open_to, sealed = open_to | shows, sealed | shows
    hides = secret - empty - open_to - {str(each) for each in grants.write}
    words = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    if os.geteuid() == 0:
        # Without capabilities too root could write there: `sys/kernel/core_pattern` names a program.
        words += ["--remount-ro", "/proc"]
    for place in sorted(open_to | empty | hides, key=lambda place: place.count("/")):
        covered = next((each for each in above(place) if each in open_to or each in gone), None)
        if place in open_to:
            words += ["--ro-bind" if place in sealed else "--bind", place, place]
        elif covered in gone:
            continue  # It is gone together with the directory above.
        elif place in empty:
            words += ["--perms", "1777" if place.endswith("tmp") else "0755", "--tmpfs", place]
        elif os.path.isdir(place):
            # Not sealed by a mount of its own, which would cost ten times as much.
            words += ["--perms", "0555", "--tmpfs", place]
        else:
            words += ["--dev-bind", "/dev/null", place]
        if place not in open_to:
            gone.add(place)
    # Without it a name of the network is not found.
    if grants.network and (resolver := os.path.realpath("/etc/resolv.conf")).startswith("/run/"):
        words += ["--ro-bind-try", resolver, resolver]
    return words
