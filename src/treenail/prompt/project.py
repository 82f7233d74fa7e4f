"""What a prompt says of the project that an agent works in: where it is, and the project's own instructions.

Theory of operation
-------------------
`AGENTS.md`, or `CLAUDE.md` where there is none, is read in each directory from the repository's root down to
the working directory; the deeper one comes later, and wins where two disagree. Together with the directory,
the system, the date and git's branch and state they are one section of the prompt.

What was read is an event of the run (`ProjectRead`). Later turns and resumes make the same section of it,
byte by byte, so that what a provider has cached stays valid; the files are only compared. If one has changed,
the model and the person are told, and the new content is another event.

Git is not run: it would run what a repository's configuration names. The branch is read from `.git/HEAD`, and
what has changed is told by comparing the index with the files, as git does it; untracked files are not
counted. A link that leads out of the repository is not followed: what it leads to would be sent to the model.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from treenail.log import Channel, SlicePolicy
from treenail.state import Session, event

INSTRUCTION_FILES = ("AGENTS.md", "CLAUDE.md")
"""The files with a project's instructions; in each directory the first one that is there counts."""

MAX_INSTRUCTIONS_BYTES = 32_768
"""How much of all of them is part of a prompt."""

_MAX_FILE_BYTES = 10_000_000
_MAX_INDEX_ENTRIES = 10_000
_MAX_COMPARED_BYTES = 1_000_000
_MAX_COMPARED_FILES = 100
_MAX_NAMED = 5
_HEAD_REF = re.compile(r"ref: refs/heads/([^\s\x00-\x1f]{1,200})\s*")
_COMMIT = re.compile(r"[0-9a-f]{40,64}\s*")
_UNDER_WAY = {
    "MERGE_HEAD": "a merge",
    "rebase-merge": "a rebase",
    "rebase-apply": "a rebase",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "REVERT_HEAD": "a revert",
    "BISECT_LOG": "a bisect",
}


@dataclass(frozen=True, slots=True)
class InstructionFile:
    """A file with a project's instructions, as it was read."""

    path: str
    """Relative to the working directory; `../AGENTS.md` lies above it."""
    sha256: str
    """Of the whole file."""
    size_bytes: int
    text: str
    """What is part of the prompt: the beginning, if the files together are too long."""

    @property
    def is_cut(self) -> bool:
        """Whether the prompt has only the beginning."""
        return len(self.text.encode("utf-8", "replace")) < self.size_bytes


@event(name="treenail.ProjectRead", channel=Channel.AUDIT, policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class ProjectRead:
    """What a run knows of its project: the first one is part of its prompt, later ones were told."""

    facts: tuple[str, ...]
    """The directory, the system, the date, and what git says."""
    files: tuple[InstructionFile, ...] = ()


def read_project(directory: Path, now: datetime) -> ProjectRead:
    """Read what a prompt says of a project."""
    git = _repository(directory)
    facts = [
        f"Directory: {_one_line(str(directory))}",
        f"System: {_system()}",
        f"Date: {now.astimezone():%Y-%m-%d}",
    ]
    if git is not None:
        facts.append(f"Git: {_git_state(*git)}")
    return ProjectRead(tuple(facts), _instructions(directory, git[0] if git is not None else directory))


def project_of(session: Session) -> ProjectRead | None:
    """Return what the prompt of a run says of its project; None if it says nothing."""
    read = session[ProjectRead].all()
    return read[0] if read else None


def newest_project_of(session: Session) -> ProjectRead | None:
    """Return what a run knows of its project now: as in its prompt, or as it was told later."""
    return session[ProjectRead].latest()


def project_text(read: ProjectRead) -> str:
    """Return the section of a prompt about a project."""
    said = "\n".join(f"- {each}" for each in read.facts)
    if not read.files:
        return said
    told = (
        "The project's own instructions follow. Heed them, except where the person with the task says "
        "otherwise; where two disagree, the later one counts."
    )
    return "\n\n".join([said, told, *(_marked(each) for each in read.files)])


def project_changes(before: ProjectRead, after: ProjectRead) -> tuple[str, ...]:
    """Return what the model must know of a change: a sentence for each file, and for the directory."""
    moved = () if before.facts[:1] == after.facts[:1] else after.facts[:1]
    old = {each.path: each.sha256 for each in before.files}
    new = {each.path: each.sha256 for each in after.files}
    return moved + tuple(
        f"{path} {'was removed' if path not in new else 'is new' if path not in old else 'has changed'}"
        for path in sorted(old | new)
        if old.get(path) != new.get(path)
    )


def changes_text(before: ProjectRead, after: ProjectRead) -> str:
    """Return the notice to the model about changed instructions; empty if there is none."""
    changed = project_changes(before, after)
    if not changed:
        return ""
    known = {each.path: each.sha256 for each in before.files}
    new = [_marked(each) for each in after.files if known.get(each.path) != each.sha256]
    told = f"The project is not as you were told: {'; '.join(changed)}."
    if new:
        told += " From now on this counts:"
    return "\n\n".join(["<project-changed>\n" + told, *new]) + "\n</project-changed>"


def _marked(file: InstructionFile) -> str:
    cut = (
        f"\n[cut here: the file has {file.size_bytes} bytes; read the rest with read_file]"
        if file.is_cut
        else ""
    )
    return f'<instructions path="{_one_line(file.path)}">\n{file.text.rstrip()}{cut}\n</instructions>'


# --- instructions ----------------------------------------------------------------------------------


def _instructions(directory: Path, root: Path) -> tuple[InstructionFile, ...]:
    """Read the files from the root down. The deeper ones get their share of the bytes first."""
    between = directory.relative_to(root).parts
    places = [root.joinpath(*between[:depth]) for depth in range(len(between) + 1)]
    left = MAX_INSTRUCTIONS_BYTES
    found: list[InstructionFile] = []
    for place in reversed(places):
        for name in INSTRUCTION_FILES:
            content = _read(place / name, root)
            if content is not None:
                text = content[:left].decode("utf-8", "ignore")
                left -= len(text.encode())
                path = os.path.relpath(place / name, directory)
                found.append(InstructionFile(path, hashlib.sha256(content).hexdigest(), len(content), text))
                break
    return tuple(reversed(found))


def _read(path: Path, root: Path) -> bytes | None:
    """Read a regular file that really lies below the root; None if there is none."""
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(root)):
        return None
    try:
        # Not blocking: in place of the file there may be a pipe that nobody writes to.
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(_MAX_FILE_BYTES)
    except OSError:
        return None
    finally:
        os.close(descriptor)


# --- facts -----------------------------------------------------------------------------------------


def _one_line(text: str) -> str:
    return "".join(each if each.isprintable() and each not in '<>"' else "?" for each in text)


def _system() -> str:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = ""
    kernel = f"{platform.system()} {platform.release()}, {platform.machine()}"
    return f"{name} ({kernel})" if name else kernel


def _repository(directory: Path) -> tuple[Path, Path] | None:
    """Return the root of the repository that a directory lies in, and its git directory."""
    for each in (directory, *directory.parents):
        git = each / ".git"
        if git.is_dir():
            return each, git
        if git.is_file():
            said = (_small(git) or b"").decode("utf-8", "surrogateescape").strip()
            return each, each / said.removeprefix("gitdir: ")
    return None


def _small(path: Path) -> bytes | None:
    try:
        if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
            return None
        return path.read_bytes()
    except (OSError, ValueError):
        return None


def _git_state(root: Path, git: Path) -> str:
    head = (_small(git / "HEAD") or b"").decode("utf-8", "replace")
    if branch := _HEAD_REF.fullmatch(head):
        said = f"on the branch {_one_line(branch[1])}"
    elif _COMMIT.fullmatch(head):
        said = f"at the commit {head[:12]}, on no branch"
    else:
        return "a repository whose HEAD cannot be read"
    under_way = [what for name, what in _UNDER_WAY.items() if (git / name).exists()]
    if under_way:
        said += f"; {under_way[0]} is under way"
    changed = _changed(root, git)
    if changed is None:
        return said
    if not changed:
        return f"{said}; no tracked file differs from the index"
    names = ", ".join(_one_line(each) for each in changed[:_MAX_NAMED])
    more = f" and {len(changed) - _MAX_NAMED} more" if len(changed) > _MAX_NAMED else ""
    return f"{said}; tracked files that differ from the index: {names}{more}"


def _changed(root: Path, git: Path) -> Sequence[str] | None:
    """Return the tracked files that are not as the index has them; None if that is not known."""
    try:
        entries = list(_index(_small(git / "index") or b""))
    except (ValueError, struct.error, IndexError):
        return None
    changed: list[str] = []
    compared = 0
    for path, mtime_s, mtime_ns, mode, size, blob in entries:
        place = os.path.join(os.fsencode(root), path)
        try:
            status = os.lstat(place)
        except OSError:
            changed.append(os.fsdecode(path))
            continue
        if stat.S_IFMT(mode) == 0o160000 or not stat.S_ISREG(status.st_mode):
            continue  # Another repository, or a link.
        seconds, nanoseconds = divmod(status.st_mtime_ns, 10**9)
        # As for git, a time without its fraction fits any.
        if (status.st_size, seconds) == (size, mtime_s) and mtime_ns in (0, nanoseconds):
            continue
        compared += 1
        if compared > _MAX_COMPARED_FILES or status.st_size > _MAX_COMPARED_BYTES:
            return None
        if status.st_size != size or _blob_id(place) != blob:
            changed.append(os.fsdecode(path))
    return changed


def _blob_id(place: bytes) -> bytes:
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            content = file.read(_MAX_COMPARED_BYTES + 1)
    except OSError:
        return b""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).digest()


def _index(content: bytes) -> Iterator[tuple[bytes, int, int, int, int, bytes]]:
    """Read the entries of git's index: path, time, mode, size and blob. Raises `ValueError` if it cannot."""
    signature, version, count = struct.unpack_from(">4sII", content)
    if signature != b"DIRC" or version not in (2, 3) or count > _MAX_INDEX_ENTRIES:
        raise ValueError(f"an index of version {version} with {count} entries is not read")
    place = 12
    for _ in range(count):
        _, _, mtime_s, mtime_ns, _, _, mode, _, _, size = struct.unpack_from(">10I", content, place)
        blob = content[place + 40 : place + 60]
        (flags,) = struct.unpack_from(">H", content, place + 60)
        start = place + (64 if version == 3 and flags & 0x4000 else 62)
        end = content.index(b"\0", start)
        yield content[start:end], mtime_s, mtime_ns, mode, size, blob
        place += (end - place + 8) // 8 * 8
