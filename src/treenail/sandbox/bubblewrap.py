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

Inside, a small shell script waits for a line on its input, runs the command, and writes how many processes
are left. The line is sent when bubblewrap has said that it dies with us: a command whose starter died before
that does not begin.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from treenail.errors import SandboxError
from treenail.sandbox.caches import cache_directory, redirected
from treenail.sandbox.policy import NOTHING_MORE, WITHOUT, Grants, Layer
from treenail.sandbox.seccomp import program
from treenail.sandbox.secrets import SOCKET_VARIABLES, listening_sockets, secret_paths

_SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin")

_CAPABILITIES = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID")
"""What root needs to write other owners' files. CAP_DAC_READ_SEARCH would open files by their handles."""

_MOUNT_LAYER = """
cd / &&
"$1" -t overlay -o "lowerdir=/proc/self/fd/7,upperdir=/proc/self/fd/8,workdir=/proc/self/fd/9$5" \\
    treenail "$2" 7<"$2" 8<"$3" 9<"$4" &&
shift 5 && exec "$@"
"""
"""Mounts by descriptors, so that no path has to be quoted. Only `mount` has them: they lead outside."""

_INSIDE = """
trap : TERM HUP INT QUIT
read -r _ || exit 125
"$@" </dev/null
code=$? left=0
for each in /proc/[0-9]*/stat; do
    read -r line <"$each" && case $line in *") Z "*) ;; *) left=$((left + 1)) ;; esac
done 2>/dev/null
echo "$left" >&0
exit "$code"
"""
"""Runs the command when a line comes, and then counts the living processes, its own and bubblewrap's too."""

OWN_PROCESSES = 2
"""How many processes of a sandbox are not the command's."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A command line in a sandbox, and the descriptors that it must inherit."""

    argv: tuple[str, ...]
    descriptors: tuple[int, ...]
    env: Mapping[str, str]
    """The environment to start it with; the command's own is passed otherwise."""


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
    status: int | None = None,
    waits: bool = False,
    live: bool = False,
) -> Iterator[CommandLine]:
    """Make the command line that runs `argv` in a directory of the workspace, in a sandbox.

    With a layer the command works on it in place of `layer.lower`. `hidden` are paths that it must not see,
    besides the user's secrets; `shown` are paths that it may read wherever they are, `mentioned` those that
    it may read unless they are hidden. With `read_only` it cannot write to the workspace; with `live`
    neither, except to the directories `grants.live`, which are made if they do not exist. On the descriptor
    `status` bubblewrap reports, in lines of JSON, the first process and its exit code. With `waits` it begins
    when it reads a line, and at its end it writes how many processes are alive, on its input. Use the command
    line within the block: its descriptors are closed after it.

    Raises `SandboxError` if that is not possible on this system.
    """
    if not sys.platform.startswith("linux"):
        raise SandboxError(f"commands cannot be confined: there is no sandbox for {sys.platform}; {WITHOUT}")
    with ExitStack() as opened:
        passed = [] if status is None else [status]
        words = [] if status is None else ["--json-status-fd", str(status)]
        rules = program()
        if rules is not None:
            passed.append(_readable(rules, opened))
            words += ["--seccomp", str(passed[-1])]
        given = dict(os.environ if env is None else env)
        cache = _cache(workspace, grants)
        words += [
            *_namespaces(grants),
            *_mounts(
                workspace,
                grants,
                hidden,
                cache,
                shown=shown,
                mentioned=mentioned,
                read_only=read_only,
                live=live,
            ),
            *_environment(cache, grants, given),
            "--chdir",
            os.path.realpath(directory),
        ]
        passed.append(_readable(os.fsencode("\0".join(words) + "\0"), opened))
        command = ["/bin/sh", "-c", _INSIDE, "sh", *argv] if waits else list(argv)
        line = [*_layered(layer), system_program("bwrap"), "--args", str(passed[-1]), "--", *command]
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
    workspace: Path,
    grants: Grants,
    hidden: Collection[Path],
    cache: str | None,
    *,
    shown: Collection[Path] = (),
    mentioned: Collection[Path] = (),
    read_only: bool = False,
    live: bool = False,
) -> list[str]:
    """Return the words that make the command's view of the files."""
    open_to = _open_to(workspace, grants, cache) | (_live_directories(workspace, grants) if live else set())
    shows = {os.path.realpath(each) for each in shown if os.path.exists(each)}
    shows = {each for each in shows if not any(Path(each).is_relative_to(other) for other in open_to)}
    sealed_off = {os.path.realpath(workspace)} if read_only or live else set()
    emptied = _emptied()
    # Most of them do not exist, and resolving a path costs more than a look.
    hides = {os.path.realpath(each) for each in (*secret_paths(), *map(str, hidden)) if os.path.lexists(each)}
    secret = hides | {each for each in listening_sockets() if os.path.lexists(each)}
    seen = {os.path.realpath(each) for each in (*mentioned, *map(Path, _running(emptied))) if each.exists()}
    shows |= {
        each for each in seen if not any(Path(each).is_relative_to(other) for other in (*open_to, *secret))
    }
    open_to |= shows
    hides = secret - emptied - open_to
    hides -= {str(each) for each in grants.write}
    words = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    if os.geteuid() == 0:
        # Without capabilities too root could write there: `sys/kernel/core_pattern` names a program.
        words += ["--remount-ro", "/proc"]
    empty: set[str] = set()
    sealed: list[str] = []
    for place in sorted(open_to | emptied | hides, key=lambda place: place.count("/")):
        above = next((each for each in _above(place) if each in open_to or each in empty), None)
        if place in open_to:
            words += ["--ro-bind" if place in shows or place in sealed_off else "--bind", place, place]
        elif above in empty:
            continue  # It is gone together with the directory above.
        elif place in emptied:
            words += ["--perms", "1777" if place.endswith("tmp") else "0755", "--tmpfs", place]
        elif os.path.isdir(place):
            words += ["--tmpfs", place]
            sealed += ["--remount-ro", place]
        else:
            words += ["--dev-bind", "/dev/null", place]
        if place not in open_to:
            empty.add(place)
    # Without it a name of the network is not found.
    if grants.network and (resolver := os.path.realpath("/etc/resolv.conf")).startswith("/run/"):
        words += ["--ro-bind-try", resolver, resolver]
    return words + sealed  # Sealed last: a workspace may lie in a hidden directory.


def _running(emptied: Collection[str]) -> set[str]:
    """Return where this very Python and what it imports lie, if that is in a directory that is emptied.

    Else a checkout in `/tmp` could not run its own interpreter.
    """
    begins = tuple(f"{each}/" for each in emptied)
    return {each for each in (sys.prefix, sys.base_prefix, *sys.path) if each.startswith(begins)}


@functools.cache
def _emptied() -> frozenset[str]:
    """Return the directories that are empty to a command."""
    places = ("/run", "/var/run", "/tmp", "/var/tmp")
    return frozenset(os.path.realpath(each) for each in places if os.path.isdir(each))


def _above(place: str) -> Iterator[str]:
    """Yield the directories above a path, innermost first."""
    while place := place.rpartition("/")[0]:
        yield place


def _open_to(workspace: Path, grants: Grants, cache: str | None) -> set[str]:
    """Return the directories to mount for writing.

    A command may replace what it can write to by links that lead elsewhere, which the next one must not
    follow. So a grant below another one, or in the workspace, is not mounted by itself.
    """
    named, root = os.path.abspath(workspace), os.path.realpath(workspace)
    if root == "/":
        raise SandboxError(
            f"commands cannot be confined: their workspace is the whole system; choose another, or {WITHOUT}"
        )
    covered, found = [named, root], {root}
    for each in sorted(grants.write, key=lambda each: len(each.parts)):
        if named != root and Path(named).is_relative_to(each):
            raise SandboxError(
                f"the command was not run: the way to the workspace {named} leads through a link in {each}, "
                "which commands may write to; remove the link"
            )
        if not any(each.is_relative_to(other) for other in covered):
            real = os.path.realpath(each)
            covered += [str(each), real]
            found.add(real)
    return found if cache is None else {*found, os.path.realpath(cache)}


def _live_directories(workspace: Path, grants: Grants) -> set[str]:
    """Return the directories in a workspace that a process may write to while others see it.

    A command may have put a link in the place of one, which would lead the process elsewhere.
    """
    root = os.path.realpath(workspace)
    found: set[str] = set()
    for name in grants.live:
        place = os.path.join(root, name)
        above = os.path.dirname(place)
        if os.path.realpath(above) == above and not os.path.lexists(place):
            os.makedirs(place)
        if os.path.realpath(place) != place or not os.path.isdir(place):
            raise SandboxError(
                f"the process was not run: {name} in the workspace is not a directory, or a link leads to it"
            )
        found.add(place)
    return found


def _cache(workspace: Path, grants: Grants) -> str | None:
    """Make the directory of the workspace's private caches; None if there is no place for it."""
    cache = cache_directory(str(workspace))
    writable = [os.path.abspath(workspace), os.path.realpath(workspace), *map(str, grants.write)]
    if any(f"{cache}/".startswith(f"{each}/") for each in writable):
        return None  # A command could put a link in its place.
    try:
        os.makedirs(cache, mode=0o700, exist_ok=True)
    except OSError:
        return None
    return cache


def _environment(cache: str | None, grants: Grants, given: Mapping[str, str]) -> list[str]:
    """Return the words that set the command's environment."""
    granted = [str(each) for each in grants.write]
    env = {
        name: value
        for name, value in given.items()
        if name not in ("TMPDIR", "TEMP", "TMP")
        and (name not in SOCKET_VARIABLES or any(each in value for each in granted))
    }
    env |= redirected(cache or "/tmp/caches", grants.write, given)
    return ["--clearenv", *(word for name, value in env.items() for word in ("--setenv", name, value))]
