"""Every command on a Postgres store, as on a file; and from another machine, where the files are not."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from tests.cli.conftest import Command
from tests.postgres import Shared
from tests.stories.terminal import clean_environment

from treenail import Agent
from treenail.errors import UsageError, WorkspaceElsewhereError
from treenail.log import PostgresUrl, files_of
from treenail.log.postgres import PostgresLog
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.tools.files import write_file

SECRET = "hunter2"


def script(place: Path, *answers: object) -> str:
    file = place / f"script-{len(list(place.iterdir()))}.json"
    file.write_text(json.dumps(answers))
    return f"scripted:{file}"


def call(name: str, **arguments: object) -> dict[str, object]:
    return {"calls": [{"name": name, "arguments": arguments}]}


@pytest.fixture
def store(postgres: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with a password in its URL, which the commands find by the environment."""
    url = postgres.url(tmp_path).replace("postgres@", f"postgres:{SECRET}@")
    monkeypatch.setenv("TREENAIL_STORE", url)
    return url


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (root / "a.txt").write_text("before\n")
    return root


def test_every_command_works_on_postgres(
    store: str, project: Path, tmp_path: Path, treenail: Command
) -> None:
    """Started in one process, looked at, changed back and deleted in others; and no password is shown."""
    shown: list[str] = []

    def said(*arguments: str, code: int = 0) -> str:
        ran = treenail(*arguments)
        assert ran.code == code, (arguments, ran.code, ran.out, ran.err)
        shown.append(ran.out + ran.err)
        return shown[-1]

    def files() -> str:
        return (project / "a.txt").read_text()

    model = script(
        tmp_path,
        call("write_file", path="a.txt", content="after\n"),
        call("run_command", command="cat a.txt > b.txt"),
        "done",
    )
    assert "no runs" in said("list", code=1), "reading a store does not make it"
    said("run", "change a.txt", "--model", model, "-C", str(project))
    assert (files(), (project / "b.txt").read_text()) == ("after\n", "after\n")
    (run,) = json.loads(said("list", "--json"))
    short = str(run["id"])[:8]
    assert run["state"] == "completed"
    assert short in said("list")
    assert "write_file kept" in said("show", short)
    assert "+after" in said("diff", short)
    assert "change a.txt" in said("replay", short)
    said("diagnose", short)
    said("undo", short, "--yes")
    assert not (project / "b.txt").exists()
    said("redo", short)
    assert (project / "b.txt").read_text() == "after\n"
    said("rollback", short, "--call", "1")
    assert files() == "before\n"
    said("fork", str(tmp_path / "forked"), "--run", short, "--call", "1", "--after")
    assert (tmp_path / "forked" / "a.txt").read_text() == "after\n"
    said("export", short, "--out", str(tmp_path / "run.jsonl"))
    assert (tmp_path / "run.jsonl").stat().st_size > 1000
    said("hold", "list", short)
    said("recover")
    assert "is not a file" in said("salvage", str(tmp_path / "whole.db"), code=2)
    said("prune", short, "--keep-last", "3")
    assert "sessions)" in said("doctor", code=1)
    assert "postgresql://postgres@127.0.0.1" in said("config", "show")
    said("erase", short, "--yes")
    assert [each["id"] for each in json.loads(said("list", "--json"))] != [run["id"]]
    assert [each for each in shown if SECRET in each] == []
    with psycopg.connect(PostgresUrl.parse(store).conninfo()) as raw:
        found = raw.execute(
            f"SELECT count(*) FROM {PostgresUrl.parse(store).schema}.events "
            f"WHERE position('{SECRET}'::bytea IN payload) > 0".encode()
        ).fetchone()
    assert found == (0,)


def test_a_killed_run_is_resumed_by_another_process(store: str, project: Path, tmp_path: Path) -> None:
    """Killed with -9 in the middle of a call: the call is undone, made again, and nothing is there twice."""
    wait = call(
        "run_command",
        command="echo half >> a.txt; touch ../outside/begun; test -e ../outside/go || sleep 600",
    )
    model = script(tmp_path, wait, "done")
    (tmp_path / "outside").mkdir()
    common = {"cwd": project, "env": {**clean_environment(project), "TREENAIL_STORE": store}, "text": True}
    command = [sys.executable, "-m", "treenail"]
    run = [*command, "run", "wait", "--model", model, "--allow-write", "../outside"]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **common) as process:  # type: ignore[call-overload]
        try:
            while not (tmp_path / "outside" / "begun").exists():
                assert process.poll() is None, process.stdout.read()
        finally:
            process.send_signal(signal.SIGKILL)
    (tmp_path / "outside" / "go").touch()
    resumed = subprocess.run([*command, "resume", "@last"], capture_output=True, check=False, **common)  # type: ignore[call-overload]
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert (project / "a.txt").read_text() == "before\nhalf\n"


def written(store: str | PostgresLog, project: Path, run_id: UUID | None = None) -> UUID:
    agent = Agent("writer", instructions="Write.", tools=[write_file])
    answers = [Answer(calls=[("write_file", {"path": "a.txt", "content": "after\n"})]), Answer("done")]
    with agent.run(
        "write", provider=ScriptedProvider(answers), workspace=project, store=store, run_id=run_id
    ) as run:
        assert run.state.value == "completed"
        return run.id


def test_on_another_machine_a_run_says_where_its_files_are(
    store: str, project: Path, tmp_path: Path, treenail: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log can be read there; whatever needs its files is refused, and changes neither log nor files."""
    run_id = written(store, project)
    files = files_of(PostgresUrl.parse(store))
    assert files.is_relative_to(tmp_path / "state")
    copy = tmp_path / "elsewhere"
    shutil.copytree(project, copy)
    # Another machine: another state directory.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other-machine"))
    with PostgresLog(store) as log:
        before = [each.seq for each in log.read(run_id)]
        short = str(run_id)[:8]
        assert "write_file kept" in treenail("show", short).out
        for arguments in (
            ["undo", short, "--yes"],
            ["rollback", short],
            ["diff", short],
            ["resume", short],
            ["prune", short],
            ["erase", short, "--yes"],
        ):
            ran = treenail(*arguments)
            assert ran.code in (1, 2), (arguments, ran.out)
            if arguments[0] != "resume":
                assert "are on the host" in ran.err and "do it there" in ran.err, (arguments, ran.err)
        with pytest.raises(WorkspaceElsewhereError, match="on the host"):
            written(store, copy, run_id)
        assert [each.seq for each in log.read(run_id)] == before
        assert log.info(run_id).owner is None
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert treenail("undo", short, "--yes").code == 0
    assert (project / "a.txt").read_text() == "before\n"


def test_a_run_may_change_between_a_url_and_an_open_log(store: str, project: Path) -> None:
    """Both lead to the same files, and so does another name of the same server."""
    with PostgresLog(store.replace("127.0.0.1", "localhost")) as log:
        run_id = written(log, project)
    agent = Agent("writer", instructions="Write.", tools=[write_file])
    with agent.run("again", provider=ScriptedProvider(["", "", "yes"]), store=store, run_id=run_id) as run:
        assert (run.text, len(run.tool_calls)) == ("yes", 1)
        assert "+after" in run.tool_calls[0].diff().text


def test_a_path_is_not_taken_for_a_url(store: str) -> None:
    with pytest.raises(UsageError, match="named by a string"):
        Agent("x", instructions="").run("x", provider=ScriptedProvider([]), store=Path(store))


def test_a_missing_driver_is_one_sentence_with_the_command_that_installs_it(
    store: str, treenail: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in sys.modules if each.startswith(("psycopg", "treenail.log.postgres"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    ran = treenail("list")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "pip install '.[postgres]'" in ran.err


def test_a_server_that_is_not_there_is_one_sentence(treenail: Command) -> None:
    ran = treenail("list", "--store", "postgresql://me:hunter2@127.0.0.1:1/db")
    assert ran.code == 1
    assert ran.err.count("\n") == 1 and "no connection to postgresql://me@127.0.0.1:1/db" in ran.err
    assert SECRET not in ran.err
