"""Runs whose files travel: on a log in Postgres, two directories as two machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from tests.postgres import Shared

from treenail import Agent
from treenail.agent import reopened
from treenail.conversation import enable_inner_message_recording, get_inner_messages
from treenail.history import (
    diff_run,
    erase_run,
    fetch_run,
    fork_run,
    patch_run,
    prune_run,
    redo_run,
    undo_run,
)
from treenail.log.postgres import PostgresLog
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import Session
from treenail.tools import boundaries, filesystem_of, rollback_to_call
from treenail.tools.files import write_file
from treenail.tools.shell import run_command
from treenail.workspace import begin_with_directory, depot_of

AGENT = Agent("writer", instructions="Write.", tools=[write_file, run_command])


@pytest.fixture
def log(postgres: Shared, tmp_path: Path) -> Iterator[PostgresLog]:
    with PostgresLog(postgres.url(tmp_path)) as log:
        yield log


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (root / "a.txt").write_text("before\n")
    return root


def submitted(log: PostgresLog, project: Path) -> UUID:
    with Session(log=log) as session:
        session.dispatch(begin_with_directory(depot_of(log), session.session_id, project))
        return session.session_id


def worked(log: PostgresLog, run_id: UUID, machine: Path, *answers: Answer | str) -> Path:
    """Work on a run on a machine; return the directory that it worked in."""
    with Session.open(log, run_id, read_only=True) as session:
        enable_inner_message_recording(session)
        given = [each for each in get_inner_messages(session) if each.role == "assistant"]
    provider = ScriptedProvider([*("" for _ in given), *answers])
    with AGENT.run("go", provider=provider, store=log, run_id=run_id, checkouts=machine) as run:
        assert run.state.value == "completed", run.result
        workspace = filesystem_of(run.execution_state)
        assert workspace is not None
        return Path(workspace.root)


def writes(path: str, content: str) -> Answer:
    return Answer(calls=[("write_file", {"path": path, "content": content})])


def test_a_run_continues_on_another_machine(log: PostgresLog, project: Path, tmp_path: Path) -> None:
    """Calls and commands of one are there on the other; the directory it began with is as it was."""
    run_id = submitted(log, project)
    command = Answer(calls=[("run_command", {"command": "cat a.txt > copy; mkdir d; echo x > d/e"})])
    one = worked(log, run_id, tmp_path / "one", writes("a.txt", "after\n"), command, "done")
    assert (one / "copy").read_text() == "after\n"
    two = worked(log, run_id, tmp_path / "two", writes("b.txt", "two\n"), "done")
    assert {each.name for each in two.iterdir()} == {"a.txt", "b.txt", "copy", "d"}
    assert not (one / "b.txt").exists()
    worked(log, run_id, tmp_path / "one", "done")
    assert (one / "b.txt").read_text() == "two\n"
    assert [each.name for each in project.iterdir()] == ["a.txt"]
    assert (project / "a.txt").read_text() == "before\n"


def count(log: PostgresLog, table: str) -> int:
    with psycopg.connect(log.url.conninfo(), autocommit=True) as connection:
        found = connection.execute(f"SELECT count(*) FROM {log.url.schema}.{table}".encode()).fetchone()
    assert found is not None
    return int(found[0])


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has never seen a run."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))


@pytest.mark.usefixtures("elsewhere")
def test_whatever_is_done_to_a_run_is_done_from_any_machine(
    log: PostgresLog, project: Path, tmp_path: Path
) -> None:
    """Diff, fetch, patch, undo, redo and fork, on a machine that has only the log."""
    run_id = submitted(log, project)
    worked(log, run_id, tmp_path / "one", writes("a.txt", "after\n"), writes("b.txt", "b\n"), "done")
    assert "+after" in diff_run(log.url, run_id).diff.text
    fetch_run(log.url, run_id, tmp_path / "got")
    assert (tmp_path / "got" / "b.txt").read_text() == "b\n"
    assert b"+after" in patch_run(log.url, run_id)
    undo_run(log.url, run_id)
    fetch_run(log.url, run_id, tmp_path / "undone")
    assert [each.name for each in (tmp_path / "undone").iterdir()] == ["a.txt"]
    redo_run(log.url, run_id)
    made, _ = fork_run(log.url, run_id, tmp_path / "fork", "1", after=True)
    erase_run(log.url, run_id)
    forked = worked(log, made, tmp_path / "two", writes("c.txt", "c\n"), "done")
    assert sorted(each.name for each in forked.iterdir()) == ["a.txt", "c.txt"]
    assert (forked / "a.txt").read_text() == "after\n"


@pytest.mark.usefixtures("elsewhere")
def test_an_erased_run_takes_its_objects_along(log: PostgresLog, project: Path, tmp_path: Path) -> None:
    """What another run needs stays, and what none needs goes, the checkouts of this machine too."""
    first, second = submitted(log, project), submitted(log, project)
    worked(log, first, tmp_path / "one", writes("b.txt", "of the first\n"), "done")
    with reopened(log.url, first):
        pass
    assert list((tmp_path / "elsewhere").rglob("tree/a.txt"))
    erase_run(log.url, first)
    assert not list((tmp_path / "elsewhere").rglob("tree"))
    files = worked(log, second, tmp_path / "two", "done")
    assert (files / "a.txt").read_text() == "before\n"
    erase_run(log.url, second)
    assert [count(log, each) for each in ("objects", "object_uses", "object_shares")] == [0, 0, 0]


@pytest.mark.usefixtures("elsewhere")
def test_a_pruned_run_has_its_files_and_forgets_how_they_came_to_be(
    log: PostgresLog, project: Path, tmp_path: Path
) -> None:
    """Objects that only earlier boundaries needed are deleted; the run continues where it was."""
    run_id = submitted(log, project)
    for number in range(3):
        worked(log, run_id, tmp_path / "one", writes("a.txt", f"{number}\n"), "done")
    before = count(log, "objects")
    assert prune_run(log.url, run_id, keep_last=0) > 0
    assert count(log, "objects") < before
    files = worked(log, run_id, tmp_path / "two", writes("b.txt", "b\n"), "done")
    assert ((files / "a.txt").read_text(), (files / "b.txt").read_text()) == ("2\n", "b\n")
    files = worked(log, run_id, tmp_path / "one", "done")
    assert sorted(each.name for each in files.iterdir()) == ["a.txt", "b.txt"]


def test_a_rollback_travels(
    log: PostgresLog, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Undone on one machine, it is undone on the next."""
    run_id = submitted(log, project)
    worked(log, run_id, tmp_path / "one", writes("a.txt", "after\n"), "done")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "two"))
    with reopened(log.url, run_id) as state:
        rollback_to_call(state, boundaries(state.session)[0].call_id)
    three = worked(log, run_id, tmp_path / "three", "done")
    assert (three / "a.txt").read_text() == "before\n"
