"""A rollback is killed at every moment: files, state and log all say that it happened, or none does."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest
from tests.crash.killing import EVERY_MOMENT, Disk, Moment, Watch, killed, moments
from tests.forks import in_child

from treenail import tool
from treenail.agent import reopened
from treenail.log.sqlite import SqliteLog
from treenail.state import Session
from treenail.tools import (
    RolledBack,
    SessionForked,
    ToolCall,
    ToolContext,
    ToolRunner,
    boundaries,
    redo,
    rollback_to_call,
)

KILLS = 15
BEFORE = {"a.txt": "original\n"}
AFTER = {"a.txt": "changed\n", "b.txt": "new\n"}


@tool(effects="workspace")
def change(*, context: ToolContext) -> str:
    """Change one file and make another."""
    context.filesystem.write("a.txt", "changed\n")
    context.filesystem.write("b.txt", "new\n")
    return "changed"


def _made(base: Path) -> UUID:
    """Make a run with one call in it."""
    root = base / "workspace"
    root.mkdir(parents=True)
    (root / "a.txt").write_text("original\n")
    log = SqliteLog(base / "runs.db")
    session = Session(log=log)
    session.dispatch(SessionForked("", 0, "", "before", str(root)))
    run = session.session_id
    session.close()
    log.close()
    with reopened(base / "runs.db", run) as state:
        assert ToolRunner(state, {"change": change}).execute(ToolCall("call", "change", {})).success
    return run


def _go_back(base: Path, run: UUID, is_redo: bool, watch: Watch) -> None:
    with reopened(base / "runs.db", run) as state, watch():
        if is_redo:
            redo(state, by="ada")
        else:
            rollback_to_call(state, "call", by="ada")


def _found(base: Path, run: UUID) -> tuple[dict[str, str], bool, int]:
    """Recover, and return the files, whether the call stands, and how often somebody went back."""
    with reopened(base / "runs.db", run) as state:
        [boundary] = boundaries(state.session)
        events = len(state.session[RolledBack].all())
    root = base / "workspace"
    return {each.name: each.read_text() for each in root.iterdir()}, boundary.stands, events


@pytest.mark.parametrize("is_redo", [False, True], ids=["rollback", "redo"])
def test_a_rollback_that_is_killed_has_happened_or_has_not(tmp_path: Path, is_redo: bool) -> None:
    """And a second try completes it."""
    base, prepared = tmp_path / "base", tmp_path / "prepared"
    run = in_child(partial(_made, base))
    if is_redo:
        in_child(partial(_go_back, base, run, False, _unwatched))
    shutil.copytree(base, prepared)
    before, after = (BEFORE, AFTER) if is_redo else (AFTER, BEFORE)

    def fresh() -> None:
        shutil.rmtree(base)
        shutil.copytree(prepared, base)

    disk = Disk([base], [str(base / "runs.db"), str(base / "runs.db.files/treenail/writer-")])
    found, _ = moments(partial(_go_back, base, run, is_redo), disk)
    chosen: list[Moment] = found if EVERY_MOMENT else found[:: -(-len(found) // KILLS)]
    sides = set()
    for moment in [*chosen, found[-1]]:
        fresh()
        assert killed(partial(_go_back, base, run, is_redo), moment, disk), f"never came: {moment}"
        files, stands, events = in_child(partial(_found, base, run))
        happened = events == is_redo + 1
        assert (files, stands) == ((after if happened else before), happened is is_redo), moment
        if not happened:
            in_child(partial(_go_back, base, run, is_redo, _unwatched))
            assert in_child(partial(_found, base, run)) == (after, is_redo, is_redo + 1), moment
        sides.add(happened)
    assert sides == {True, False}


class _unwatched:
    """Watches nothing."""

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return
