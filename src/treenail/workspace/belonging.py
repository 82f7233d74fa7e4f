"""Which machine has a run's files, for runs whose log is not on one.

The log of such a run can be opened from anywhere, and its files cannot: the workspace, the undo journal of a
call that was cut off, and the content that a rollback needs are in directories of one host. So the log says
which. The mark that is compared belongs to the directory and not to the machine's name: machines that mount
the same directory have the same files.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from treenail.errors import WorkspaceElsewhereError
from treenail.state import Session, event

_MARK = "host"


@event(name="treenail.WorkspaceHost")
@dataclass(frozen=True, slots=True)
class WorkspaceHost:
    """The run's files are in a directory of this host."""

    mark: str
    """What the directory of stored files is known by."""
    host: str
    """The machine's name when it was recorded, for people."""
    files: str
    """The directory of stored files there."""


def host_of(session: Session) -> WorkspaceHost | None:
    """Return where a run's files are; None if that was never recorded."""
    return session[WorkspaceHost].latest()


def check_host(session: Session, files: Path) -> None:
    """Raise `WorkspaceElsewhereError` if a run's files are not in this directory of stored files."""
    known = host_of(session)
    if known is not None and known.mark != _read(files):
        raise WorkspaceElsewhereError(
            f"the files of run {session.session_id} are on the host {known.host} (in {known.files}), and "
            f"this is {socket.gethostname()}; nothing was changed; do it there, or mount that directory and "
            f"the workspace here. Its log can be read from anywhere"
        )


def bind_to_host(session: Session, files: Path) -> None:
    """Record where a run's files are, once. Raises `WorkspaceElsewhereError` if they are elsewhere."""
    check_host(session, files)
    if host_of(session) is None:
        session.dispatch(WorkspaceHost(_made(files), socket.gethostname(), str(files)))


def _read(files: Path) -> str | None:
    try:
        return (files / _MARK).read_text("ascii")
    except OSError:
        return None


def _made(files: Path) -> str:
    """Return the mark of a directory, making both if needed."""
    files.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = files / f".{_MARK}-{uuid4().hex}"
    fresh.write_text(uuid4().hex, "ascii")
    try:
        os.link(fresh, files / _MARK)  # Whole or not at all, and never in place of another one.
    except FileExistsError:
        pass
    finally:
        fresh.unlink()
    found = _read(files)
    assert found is not None
    return found
