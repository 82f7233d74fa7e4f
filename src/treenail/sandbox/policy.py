"""What a command works on, and what it may do besides."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from treenail.errors import UsageError

Mode = Literal["require", "auto", "off"]
"""Whether commands are confined: by bubblewrap; by what there is, or a person is asked; not at all."""

Level = Literal["bubblewrap", "landlock"]
"""What confines a command; Landlock is a fallback, which leaves more open."""

MODES: tuple[Mode, ...] = ("require", "auto", "off")
"""The modes, strictest first."""


WITHOUT = "run commands without a sandbox: --sandbox off (in a program: Sandbox('off'))"
"""What a person can do where there is no sandbox."""


@dataclass(frozen=True, slots=True)
class Layer:
    """An overlay of a workspace: the command sees it in place of `lower`, and its changes land in `upper`.

    All three are existing directories; `upper` and `work` are on one filesystem, and `work` is empty. The
    overlay exists only in the command's own mount namespace.
    """

    lower: Path
    upper: Path
    work: Path
    options: tuple[str, ...] = ()
    """Further mount options of the overlay, such as `redirect_dir=on`."""


@dataclass(frozen=True, slots=True)
class Grants:
    """What a command may do besides writing to its workspace and to a temporary directory of its own."""

    network: bool = False
    write: tuple[Path, ...] = ()
    """Directories, files or sockets outside of the workspace that it may write to."""
    live: tuple[str, ...] = ()
    """Directories of the workspace, relative to it, that background processes may write to. They are outside
    of undo."""

    def __post_init__(self) -> None:
        for name in self.live:
            parts = Path(name).parts
            if not parts or Path(name).is_absolute() or ".." in parts or parts[0] == ".git":
                raise UsageError(
                    f"{name!r} is not a directory inside the workspace that a process could write to; "
                    "name one such as build or .cache"
                )
        object.__setattr__(self, "live", tuple(Path(each).as_posix() for each in self.live))
        # Links are not followed yet: in a place that commands may write to, a command may have made them.
        whole = tuple(Path(os.path.abspath(each)) for each in self.write)
        for each in whole:
            if not each.exists():
                raise UsageError(f"commands cannot be allowed to write to {each}: it does not exist; make it")
            if os.path.realpath(each) == "/":
                raise UsageError("commands cannot be allowed to write to /; --sandbox off allows everything")
        object.__setattr__(self, "write", whole)

    @property
    def reach_outside(self) -> bool:
        """Whether a grant is a socket: what is on its other side cannot be undone."""
        return any(each.is_socket() for each in self.write)


NOTHING_MORE = Grants()
"""No grants: the default."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """How the commands of a workspace are confined.

    `require` needs bubblewrap; `auto` takes Landlock where that is all there is. Where there is neither, a
    command is refused; the command line asks a person at a terminal if the mode is `auto`.
    """

    mode: Mode = "auto"
    grants: Grants = NOTHING_MORE
    hidden: tuple[Path, ...] = field(default=(), repr=False)
    """Paths that commands must not see, besides the user's secrets: the run's own store."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"the sandbox must be one of {', '.join(MODES)}, not {self.mode!r}")

    def described(self, level: Level = "bubblewrap") -> str:
        """Return what confines a command, as the log keeps it."""
        if self.mode == "off":
            return "none"
        how = "bubblewrap" if level == "bubblewrap" else "landlock (modes and times outside are open)"
        also = [f"may write {each}" for each in self.grants.write]
        return ", ".join([how, "network" if self.grants.network else "no network", *also])

    def hiding(self, paths: Iterable[Path | None]) -> Sandbox:
        """Return this sandbox with more hidden paths."""
        more = tuple(each for each in paths if each is not None and each not in self.hidden)
        return replace(self, hidden=(*self.hidden, *more)) if more else self


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A command line in a sandbox, and the descriptors that it must inherit."""

    argv: tuple[str, ...]
    descriptors: tuple[int, ...]
    env: Mapping[str, str]
    """The environment to start it with; the command's own is passed otherwise."""
