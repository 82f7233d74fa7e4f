"""Reading a commit or a tar: what is in it goes into an object store, and no path of it touches a disk."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from treenail.errors import UsageError
from treenail.workspace.diffs import shown_path
from treenail.workspace.manifest import State
from treenail.workspace.objects import ObjectStore
from treenail.workspace.packs import CHUNK_BYTES
from treenail.workspace.paths import ROOT
from treenail.workspace.scan import SnapshotLimits

_COMMIT = re.compile(r"[0-9a-f]{40}")
_GIT_S = 600
_KINDS = {"100644": ("file", 0o644), "100755": ("file", 0o755), "120000": ("link", 0o777)}


# --- a commit ----------------------------------------------------------------------------------------------


def read_commit(url: str, commit: str, scratch: Path, objects: ObjectStore) -> tuple[str, dict[str, State]]:
    """Read a commit of a repository; return its id, and what every path is."""
    if url.startswith("-") or not url or "::" in url:
        raise UsageError(f"{shown_url(url)!r} is not a URL that a repository can be read from")
    if commit.startswith("-") or not commit:
        raise UsageError(f"{commit!r} is not a commit; name one by its id, or a branch or a tag")
    # A repository of our own: hooks, filters and settings of theirs are files there, and are not fetched.
    _git(["init", "--quiet", "--bare", "--template=", os.fspath(scratch)], scratch.parent)
    fetch = ["fetch", "--quiet", "--no-tags", "--no-recurse-submodules", "--no-write-fetch-head"]
    target = "refs/treenail/origin"
    try:
        _git([*fetch, "--depth=1", "--end-of-options", url, f"+{commit}:{target}"], scratch)
    except UsageError:
        # Some servers give out only what a branch or a tag names.
        if not _COMMIT.fullmatch(commit):
            raise
        _git([*fetch, "--end-of-options", url, "+refs/*:refs/treenail/all/*"], scratch)
        _git(["update-ref", target, commit], scratch)
    found = _git(["rev-parse", "--verify", f"{target}^{{commit}}"], scratch).decode().strip()
    if not _COMMIT.fullmatch(found):
        raise UsageError(f"{shown_url(url)} names its objects by SHA-256, which is not read here")
    seconds = int(_git(["show", "--quiet", "--no-show-signature", "--format=%ct", found], scratch))
    return found, _states(scratch, found, seconds * 1_000_000_000, objects)


def _states(scratch: Path, commit: str, mtime_ns: int, objects: ObjectStore) -> dict[str, State]:
    states = {ROOT: State("directory", 0o755)}
    wanted: list[tuple[str, str, str]] = []
    for line in _git(["ls-tree", "-r", "-z", "--full-tree", commit], scratch).split(b"\0")[:-1]:
        head, _, raw = line.partition(b"\t")
        mode, kind, oid = head.decode().split()
        path = os.fsdecode(raw)
        _check_path(path)
        if kind != "blob":
            raise UsageError(
                f"{shown_path(path)} is a submodule, and those do not travel; begin with a directory"
            )
        wanted.append((path, mode, oid))
        for above in _above(path):
            states[above] = State("directory", 0o755)
    with subprocess.Popen(
        ["git", "cat-file", "--batch"],
        cwd=scratch,
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for path, mode, oid in wanted:
            process.stdin.write(oid.encode() + b"\n")
            process.stdin.flush()
            size = int(process.stdout.readline().split()[2])
            stored = objects.write_stream(size, _exactly(process.stdout, size))
            process.stdout.read(1)
            if stored is None or stored.hex() != oid:
                raise UsageError(f"the object {oid} of {commit} is damaged")
            name, bits = _KINDS.get(mode, ("file", 0o644))
            states[path] = State("link" if name == "link" else "file", bits, stored, size, mtime_ns)
        process.stdin.close()
    return states


def _exactly(stream: object, size: int) -> Iterator[bytes | None]:
    left = size
    while left:
        chunk: bytes = stream.read(min(left, CHUNK_BYTES))  # type: ignore[attr-defined]  # any binary stream
        if not chunk:
            yield None
            return
        left -= len(chunk)
        yield chunk


def _environment() -> dict[str, str]:
    """Return what git needs to reach a repository as its user does, and nothing that asks questions."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return {
        **kept,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
        "LC_ALL": "C",
    }


def _git(arguments: list[str], directory: Path) -> bytes:
    try:
        ran = subprocess.run(
            ["git", "-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0", *arguments],
            cwd=directory,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise UsageError("a run cannot begin with a commit here: git is not installed") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"git did not answer for {_GIT_S} s; check the address of the repository") from None
    if ran.returncode:
        said = " ".join(ran.stderr.decode("utf-8", "replace").split())[:500]
        raise UsageError(f"git could not read that commit: {_without_logins(said)}")
    return ran.stdout


def shown_url(url: str) -> str:
    """Return an address without the name and password in it."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an address that cannot be read"
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if parts.scheme else url


def _without_logins(text: str) -> str:
    return re.sub(r"//[^/\s@]*@", "//", text)


# --- a tar -------------------------------------------------------------------------------------------------


def read_tar(path: Path, objects: ObjectStore, limits: SnapshotLimits) -> dict[str, State]:
    """Read a tar; return what every path is."""
    states = {ROOT: State("directory", 0o755)}
    left = limits.max_bytes
    try:
        with tarfile.open(path, "r:*") as tar:
            for member in tar:
                name = "/".join(part for part in member.name.split("/") if part not in ("", "."))
                if not name:
                    continue
                if member.name.startswith("/"):
                    raise UsageError(
                        f"{shown_path(member.name)} in {path} is an absolute path; nothing was kept"
                    )
                _check_path(name)
                if len(states) > limits.max_files:
                    raise UsageError(f"{path} has more than {limits.max_files} files")
                left -= member.size if member.isfile() else 0
                if left < 0 or (member.isfile() and member.size > limits.max_file_bytes):
                    raise UsageError(f"{shown_path(name)} makes {path} larger than what may be kept")
                state = _member(tar, member, name, objects, states)
                _put_member(states, name, state, path)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UsageError(f"{path} cannot be read as a tar: {error}") from error
    return states


def _member(
    tar: tarfile.TarFile, member: tarfile.TarInfo, name: str, objects: ObjectStore, states: dict[str, State]
) -> State:
    mtime_ns = int(member.mtime) * 1_000_000_000
    if member.isdir():
        return State("directory", member.mode & 0o777 or 0o755)
    if member.isfile():
        stream = tar.extractfile(member)
        assert stream is not None
        stored = objects.write_stream(member.size, _exactly(stream, member.size))
        if stored is None:
            raise tarfile.ReadError(f"it ends in the middle of {name}")
        return State("file", member.mode & 0o777, stored, member.size, mtime_ns)
    if member.issym():
        target = os.fsencode(member.linkname)
        depth = len(name.split("/")) - 1
        for part in member.linkname.split("/"):
            depth += -1 if part == ".." else 0 if part in ("", ".") else 1
            if depth < 0 or member.linkname.startswith("/"):
                raise UsageError(f"the link {shown_path(name)} leads out of the workspace; nothing was kept")
        return State("link", 0o777, objects.write("blob", target), len(target), mtime_ns)
    if member.islnk():
        same = states.get("/".join(part for part in member.linkname.split("/") if part not in ("", ".")))
        if same is None or same.kind != "file":
            raise UsageError(f"{shown_path(name)} is a link to a file that is not there; nothing was kept")
        return same
    raise UsageError(f"{shown_path(name)} is neither a file nor a directory nor a link; nothing was kept")


def _put_member(states: dict[str, State], name: str, state: State, path: Path) -> None:
    for above in _above(name):
        if states.setdefault(above, State("directory", 0o755)).kind != "directory":
            raise UsageError(
                f"{shown_path(name)} in {path} lies below {shown_path(above)}, which is not a directory"
            )
    replaced = states.get(name)
    is_directory_no_more = replaced is not None and replaced.kind == "directory" and state.kind != "directory"
    if is_directory_no_more and any(each.startswith(f"{name}/") for each in states):
        raise UsageError(f"{shown_path(name)} in {path} is a directory, and then something else")
    states[name] = state


def _check_path(path: str) -> None:
    parts = path.split("/")
    if not path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise UsageError(f"the path {shown_path(path)!r} leaves the workspace; nothing was kept")


def _above(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path
