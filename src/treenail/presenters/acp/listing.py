"""The list of sessions: the runs of a project's store."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from pathlib import Path

from acp import RequestError, schema

from treenail.agent import workspace_of
from treenail.errors import SessionNotFoundError
from treenail.history import is_workflow, opened_log, short, summarize
from treenail.log import Log, SessionInfo, Store
from treenail.presenters.acp import wire
from treenail.printable import printable
from treenail.state import Session

_PAGE = 50
_MAX_TITLE = 80


def page(
    store: Store, directory: Path, cursor: str | None, only_here: bool
) -> tuple[list[schema.SessionInfo], str | None]:
    """Return a page of runs, the newest first, and where the next page begins."""
    if cursor is not None and not cursor.isdecimal():
        raise RequestError(-32602, f"{cursor!r} is not a cursor of this list")
    if isinstance(store, Path) and not store.is_file():
        return [], None
    begin, found = int(cursor or 0), list[schema.SessionInfo]()
    with opened_log(store) as log:
        runs = [
            each for each in log.sessions() if each.parent_id is None and each.head and not is_workflow(each)
        ][::-1]
        for place, info in enumerate(runs[begin:], start=begin):
            if len(found) == _PAGE:
                return found, str(place)
            with suppress(SessionNotFoundError):  # It is being erased.
                with Session.open(log, info.session_id, read_only=True) as session:
                    where = Path(workspace_of(session) or directory)
                summary = summarize(log, info)
                if only_here and where.resolve() != directory.resolve():
                    continue
                found.append(
                    schema.SessionInfo(
                        session_id=str(info.session_id),
                        cwd=str(where),
                        title=printable(short(summary.task, _MAX_TITLE)),
                        updated_at=_newest(log, info).isoformat(),
                        field_meta={wire.META: {"state": summary.state, "reason": summary.reason}},
                    )
                )
    return found, None


def _newest(log: Log, info: SessionInfo) -> datetime:
    """Return when something was last written to a run."""
    return next((each.at for each in log.read(info.session_id, after=info.head - 1)), info.created_at)
