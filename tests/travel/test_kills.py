"""A worker is killed with -9 at each statement and file operation of a call, and another machine goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest
from tests.crash.killing import STATEMENT, Disk, Moment, Watch, killed, moments, sample
from tests.postgres import Shared

from treenail.agent import open_state
from treenail.errors import DepotError
from treenail.log.postgres import PostgresLog
from treenail.state import Session
from treenail.tools import ToolCall, ToolInvoked, ToolRunner, ToolStarted, filesystem_of, recover, tool
from treenail.workspace import WorkspaceOrigin, begin_with_directory, depot_of, write_tree

BEFORE = {"a.txt": "before\n", "d/b.txt": "b\n"}
AFTER = {"a.txt": "after\n", "d/b.txt": "b\n", "new/c.txt": "c\n"}


@tool(effects="workspace")
def edit(*, context: object) -> str:
    """Change two files."""
    files = context.filesystem  # type: ignore[attr-defined]
    files.write("a.txt", "after\n")
    files.write("new/c.txt", "c\n")
    return "done"


def contents(root: Path) -> dict[str, str]:
    return {
        each.relative_to(root).as_posix(): each.read_text()
        for each in sorted(root.rglob("*"))
        if each.is_file()
    }


class World:
    """A log on a server, and machines that are directories."""

    def __init__(self, url: str, top: Path) -> None:
        self.url, self.top = url, top
        self.project = top / "project"
        (self.project / "d").mkdir(parents=True)
        for name, content in BEFORE.items():
            (self.project / name).write_text(content)
        self.log = PostgresLog(url, heartbeat=False)

    def submit(self) -> UUID:
        with Session(log=self.log) as session:
            session.dispatch(begin_with_directory(depot_of(self.log), session.session_id, self.project))
            self.disk(session.session_id).directories[0].mkdir(parents=True)
            return session.session_id

    def disk(self, run_id: UUID) -> Disk:
        return Disk([self.top / "one" / str(run_id)])

    def call(self, run_id: UUID) -> Callable[[Watch], None]:
        """Return the work of one machine: check out, and make one call."""

        def work(watch: Watch) -> None:
            with PostgresLog(self.url, heartbeat=False) as log, Session.open(log, run_id) as session, watch():
                state, _ = open_state(session, None, log, checkouts=self.top / "one" / str(run_id))
                runner = ToolRunner(state, {"edit": edit})
                assert runner.execute(ToolCall("call", "edit")).success

        return work

    def judge(self, run_id: UUID) -> bool:
        """Say whether the call has happened; what the log names is there, and the files are as it says."""
        depot = depot_of(self.log)
        with Session.open(self.log, run_id) as session:
            named = [
                each.snapshot if isinstance(each, WorkspaceOrigin) else each.workspace
                for kind in (WorkspaceOrigin, ToolStarted, ToolInvoked)
                for each in session[kind].all()
            ]
            for number, each in enumerate(each for each in named if each is not None):
                write_tree(depot, each, self.top / "named" / f"{run_id}-{number}")
            happened = any(each.success for each in session[ToolInvoked].all())
            for machine in ("two", "one"):
                state, root = open_state(session, None, self.log, checkouts=self.top / machine / str(run_id))
                recover(state)
                assert root is not None
                assert contents(Path(root)) == (AFTER if happened else BEFORE), machine
                filesystem_of(state).close()  # type: ignore[union-attr]
            if not happened:
                state, root = open_state(session, None, self.log, checkouts=self.top / "two" / str(run_id))
                assert ToolRunner(state, {"edit": edit}).execute(ToolCall("call", "edit")).success
                assert contents(Path(root or "")) == AFTER
                filesystem_of(state).close()  # type: ignore[union-attr]
        return happened


@pytest.fixture
def world(postgres: Shared, tmp_path: Path) -> World:
    return World(postgres.url(tmp_path), tmp_path)


def test_a_killed_worker_leaves_a_log_that_names_only_what_is_there(world: World) -> None:
    """Killed while it checks out, writes, sends and appends: the call has happened, or it has not."""
    run_id = world.submit()
    found, _ = moments(world.call(run_id), world.disk(run_id))
    statements = [each for each in found if each.function == STATEMENT]
    assert len(statements) > 10, "the statements were not seen"
    others = [each for each in found if each.function != STATEMENT]
    chosen: list[Moment] = [each for each in found if each in set(statements) | set(sample(others, 6))]
    outcomes = []
    for moment in chosen:
        run_id = world.submit()
        killed(world.call(run_id), moment, world.disk(run_id))
        try:
            outcomes.append(world.judge(run_id))
        except Exception as error:
            error.add_note(f"killed {moment}")
            raise
    assert outcomes[0] is False and outcomes[-1] is True
    assert outcomes == sorted(outcomes), "once a call has happened, it has happened"


def test_a_missing_or_damaged_object_is_one_clear_error(world: World, postgres: Shared) -> None:
    """Nothing is made up, and no file is written with other content."""
    run_id = world.submit()
    schema, origin = world.log.url.schema, None
    with Session.open(world.log, run_id, read_only=True) as session:
        origin = session[WorkspaceOrigin].latest()
    assert origin is not None
    depot = depot_of(world.log)
    postgres.execute(
        f"UPDATE {schema}.objects SET payload = set_byte(payload, 9, 255 - get_byte(payload, 9))"
    )
    with pytest.raises(DepotError, match="is damaged: its content does not match its name"):
        write_tree(depot, origin.snapshot, world.top / "damaged")
    postgres.execute(f"DELETE FROM {schema}.objects WHERE encode(oid, 'hex') = '{origin.snapshot.record}'")
    with pytest.raises(DepotError, match=f"{origin.snapshot.record} is missing"):
        write_tree(depot, origin.snapshot, world.top / "missing")
