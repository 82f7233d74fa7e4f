"""What a command works on, and what it may do besides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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


NOTHING_MORE = Grants()
"""No grants: the default."""
