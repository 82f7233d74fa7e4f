"""What the page can do to a run: the operations of `treenail.history`, as the command line calls them.

Each is recorded in the run's log with who did it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

from treenail.errors import UsageError
from treenail.history import answer_run, fork_run, list_holds, redo_run, rollback_run, undo_run
from treenail.presenters.web.inspector import Inspector, person
from treenail.tools import RolledBack

BY = "in the inspector"
"""Where it was done, beside who did it."""


def _who() -> str:
    return f"{person()} {BY}"


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name, "")
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a text")
    return value


def answer(inspector: Inspector, run_id: UUID, given: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a call that waits for a person."""
    call, note, approved = _text(given, "call"), _text(given, "note"), given.get("approved")
    if not isinstance(approved, bool):
        raise UsageError("approved must be true or false")
    for each in list_holds(inspector.store, run_id):
        if each.call_id == call and each.is_question and approved and not note.strip():
            raise UsageError("the model asked a question; write the answer")
    held = answer_run(inspector.store, run_id, call or None, approved=approved, note=note, by=_who())
    return {"call": held.call_id, "approved": approved}


def undo(inspector: Inspector, run_id: UUID, given: Mapping[str, Any]) -> dict[str, Any]:
    """Undo everything that a run did to the files."""
    return _done(undo_run(inspector.store, run_id, by=_who()))


def redo(inspector: Inspector, run_id: UUID, given: Mapping[str, Any]) -> dict[str, Any]:
    """Take the last undo or rollback back."""
    return _done(redo_run(inspector.store, run_id, by=_who()))


def rollback(inspector: Inspector, run_id: UUID, given: Mapping[str, Any]) -> dict[str, Any]:
    """Go back to before a call."""
    return _done(rollback_run(inspector.store, run_id, _text(given, "call") or None, by=_who())[1])


def fork(inspector: Inspector, run_id: UUID, given: Mapping[str, Any]) -> dict[str, Any]:
    """Make a new run from a call, with its files in a new directory."""
    into = _text(given, "into").strip()
    if not into or "\0" in into:
        raise UsageError("name a new directory for the fork's files")
    made, _ = fork_run(
        inspector.store,
        run_id,
        Path(into).expanduser(),
        _text(given, "call") or None,
        after=given.get("after") is True,
        by=_who(),
    )
    return {"run": str(made)}


def _done(done: RolledBack) -> dict[str, Any]:
    return {
        "undone": [each.call_id for each in done.undone],
        "redone": [each.call_id for each in done.redone],
        "kept": list(done.kept),
    }


ACTIONS: Mapping[str, Callable[[Inspector, UUID, Mapping[str, Any]], dict[str, Any]]] = {
    "answer": answer,
    "fork": fork,
    "redo": redo,
    "rollback": rollback,
    "undo": undo,
}
"""What the page can ask for, by name."""
