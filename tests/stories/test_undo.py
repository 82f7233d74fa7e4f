"""Undoing what a run did, and taking that back: told by every command, and to the model."""

from __future__ import annotations

import getpass
import json
from pathlib import Path

import pytest
from tests.stories.terminal import Terminal, treenail

WRITES = (("a.txt", "two\n"), ("b.txt", "new\n"), ("a.txt", "three\n"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (root / "a.txt").write_text("one\n")
    (root / "mine.txt").write_text("mine\n")
    return root


def script(project: Path, *answers: object) -> str:
    file = project.parent / f"script-{len(list(project.parent.iterdir()))}.json"
    file.write_text(json.dumps(answers))
    return f"scripted:{file}"


def write(path: str, content: str) -> dict[str, object]:
    return {"calls": [{"name": "write_file", "arguments": {"path": path, "content": content}}]}


def work(project: Path) -> None:
    """Run an agent that makes three calls: call_1_1, call_2_1 and call_3_1."""
    model = script(project, *(write(*each) for each in WRITES), "Done.")
    ran = treenail("run", "go", "--model", model, cwd=project)
    assert ran.returncode == 0, ran.stderr


def files(project: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in project.iterdir()}


def told(project: Path) -> str:
    """Return what the model would be sent next."""
    said = treenail("replay", "--json", cwd=project)
    assert said.returncode == 0, said.stderr
    return said.stdout


def tools(project: Path) -> list[tuple[str, str]]:
    shown = json.loads(treenail("show", "--json", cwd=project).stdout)
    items = [each for turn in shown["turns"] for each in turn["items"]]
    return [(each["status"], each["undone"]) for each in items if each["kind"] == "tool"]


def test_a_rollback_is_told_by_every_command_and_a_second_one_undoes_the_call_before(project: Path) -> None:
    """By whom and when; also the next turn's model hears which calls were undone."""
    work(project)
    before = told(project)
    assert "undone" not in before
    first = treenail("rollback", cwd=project)
    assert first.returncode == 0, first.stderr
    assert files(project) == {"a.txt": "two\n", "b.txt": "new\n", "mine.txt": "mine\n"}
    who = getpass.getuser()
    assert [status for status, _ in tools(project)] == ["kept", "kept", "undone"]
    assert tools(project)[2][1].startswith(f"by {who}, 20")
    assert f"write_file undone by {who}, 20" in treenail("show", cwd=project).stdout
    diff = treenail("diff", cwd=project).stdout
    assert f"# write_file (call_3_1) was undone by {who}, 20" in diff
    assert "+two" in diff
    assert "+three" not in diff
    assert "+three" in treenail("diff", "--call", "call_3_1", cwd=project).stdout
    assert f"A person ({who}) undid these calls: write_file (call_3_1)." in told(project)

    second = treenail("rollback", cwd=project)
    assert second.returncode == 0, second.stderr
    assert files(project) == {"a.txt": "two\n", "mine.txt": "mine\n"}
    assert [status for status, _ in tools(project)] == ["kept", "undone", "undone"]
    again = treenail("rollback", "--call", "call_2_1", cwd=project)
    assert again.returncode == 2
    assert "call_2_1) was undone by" in again.stderr
    treenail("rollback", cwd=project)
    assert treenail("rollback", cwd=project).returncode == 2
    assert files(project) == {"a.txt": "one\n", "mine.txt": "mine\n"}
    nothing = json.loads(treenail("diff", "--json", cwd=project).stdout)
    assert (nothing["changes"], len(nothing["undone"])) == ([], 3)


def test_a_whole_run_is_undone_after_a_look_and_redone(project: Path) -> None:
    """The preview shows what would change; what a person did beside the run stays; redo takes it back."""
    work(project)
    after = files(project)
    (project / "mine.txt").write_text("mine, later\n")
    refused = treenail("undo", cwd=project)
    assert refused.returncode == 2
    assert "-three" in refused.stdout
    assert "--yes" in refused.stderr
    assert files(project)["a.txt"] == "three\n"
    with Terminal("undo", cwd=project) as terminal:
        terminal.wait_for("undo 2 changes of run .*y/N")
        assert "+one" in terminal.text
        terminal.type("n\n")
        assert terminal.end() == 1
    assert files(project)["a.txt"] == "three\n"
    with Terminal("undo", cwd=project) as terminal:
        terminal.wait_for("y/N")
        terminal.type("y\n")
        assert terminal.end() == 0, terminal.text
    assert files(project) == {"a.txt": "one\n", "mine.txt": "mine, later\n"}
    assert {status for status, _ in tools(project)} == {"undone"}
    assert "undid, by" in treenail("show", cwd=project).stdout

    redone = treenail("redo", cwd=project)
    assert redone.returncode == 0, redone.stderr
    assert files(project) == {**after, "mine.txt": "mine, later\n"}
    assert {status for status, _ in tools(project)} == {"kept"}
    assert "stand again: write_file (call_1_1), write_file (call_2_1), write_file (call_3_1)" in told(project)
    assert treenail("redo", cwd=project).returncode == 2


@pytest.mark.parametrize("command", [("undo", "--yes"), ("rollback",), ("redo",)], ids=lambda each: each[0])
def test_nothing_is_undone_or_redone_over_a_persons_later_edit(
    project: Path, command: tuple[str, ...]
) -> None:
    """It is refused before anything is changed, and says which file is in the way."""
    work(project)
    if command == ("redo",):
        assert treenail("rollback", cwd=project).returncode == 0
    (project / "a.txt").write_text("a person's\n")
    before = files(project)
    refused = treenail(*command, cwd=project)
    assert refused.returncode == 1
    assert "somebody else changed a.txt since" in refused.stderr
    assert files(project) == before
    assert "a person's" not in told(project)


def test_what_an_undo_or_redo_leaves_is_said(project: Path) -> None:
    """A pipe goes with the command that made it, and does not come back with it."""
    command = {"calls": [{"name": "run_command", "arguments": {"command": "echo 2 > a.txt; mkfifo pipe"}}]}
    ran = treenail("run", "go", "--model", script(project, command, "Done."), cwd=project)
    assert ran.returncode == 0, ran.stderr
    undone = treenail("undo", "--yes", cwd=project)
    assert undone.returncode == 0, undone.stderr
    assert files(project) == {"a.txt": "one\n", "mine.txt": "mine\n"}
    redone = treenail("redo", cwd=project)
    assert redone.returncode == 0, redone.stderr
    assert "note: pipe was not brought back" in redone.stdout
    assert files(project) == {"a.txt": "2\n", "mine.txt": "mine\n"}


def test_a_fork_is_told_in_both_runs(project: Path) -> None:
    work(project)
    first = json.loads(treenail("list", "--json", cwd=project).stdout)[0]["id"]
    forked = treenail("fork", "../other", "--call", "call_2_1", "--json", cwd=project)
    assert forked.returncode == 0, forked.stderr
    made = json.loads(forked.stdout)["run"]
    who = getpass.getuser()
    assert f"made {made[:8]}" in (shown := treenail("show", first, cwd=project).stdout)
    assert f"before call_2_1, by {who}, in /" in shown
    assert f"from {first[:8]}, before call_2_1" in treenail("show", made, cwd=project).stdout
    assert "Another branch of this conversation" in treenail("replay", made, "--json", cwd=project).stdout
