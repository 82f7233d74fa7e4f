"""What a prompt says of its project: the real command, and a server that sees what is sent."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.stories.terminal import treenail

from treenail.prompt import read_project
from treenail.prompt.project import MAX_INSTRUCTIONS_BYTES
from treenail.providers.scripted import Answer
from treenail.testing.wire import WireServer

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)


def git(root: Path, *words: str) -> None:
    who = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    environ = {**os.environ, **who, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, env=environ)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    (root / "app" / "deep").mkdir(parents=True)
    git(root, "init", "-b", "feature/milk")
    (root / "AGENTS.md").write_text("Use tabs.\n")
    (root / "CLAUDE.md").write_text("Never read: there is an AGENTS.md.\n")
    (root / "app" / "CLAUDE.md").write_text("Here, use $spaces.\n")
    git(root, "add", ".")
    git(root, "commit", "-m", "first")
    return root


def system_of(request) -> str:
    return request.body["messages"][0]["content"]


def run(server: WireServer, cwd: Path, *words: str, stdin: str | None = None):
    flags = ("--model", "m", "--base-url", server.openai_url, "--unknown-price", "warn")
    flags = flags if words[0] == "run" else ()
    return treenail(*words, *flags, cwd=cwd, env={"OPENAI_API_KEY": "k"}, stdin=stdin)


def test_the_prompt_has_the_projects_instructions_and_where_one_is(repository: Path) -> None:
    """From the root down, marked with their paths, the deeper one later; and directory, system, date, git."""
    with WireServer(lambda request: Answer("Done.")) as server:
        ran = run(server, repository / "app", "run", "go")
        assert ran.returncode == 0, ran.stderr
        told = system_of(server.requests[0])
    assert told.index('path="../AGENTS.md">\nUse tabs.') < told.index('path="CLAUDE.md">\nHere, use $spaces.')
    assert "Never read" not in told
    assert f"Directory: {repository / 'app'}" in told and "System: " in told and "Date: 20" in told
    assert "on the branch feature/milk; no tracked file differs" in told


def test_a_run_keeps_its_prompt_byte_for_byte_and_is_told_of_changes(repository: Path) -> None:
    """After a kill and in later turns; a changed file is told once, to the model and to the person."""
    calls = [Answer("", [("list_directory", {"skip": 0})]), Answer("", [("list_directory", {})])]
    with WireServer([*calls, Answer("Done."), Answer("Again.")], by_conversation=True) as server:
        ran = run(server, repository, "run", "go", "--max-steps", "3")
        assert ran.returncode == 6, ran.stderr
        (repository / "AGENTS.md").write_text("Use spaces everywhere.\n")
        git(repository, "checkout", "-b", "other")
        ran = run(server, repository, "resume", "@last", "--max-steps", "9")
        assert ran.returncode == 0, ran.stderr
        assert "AGENTS.md has changed" in ran.stderr
        more = run(server, repository, "chat", "--run", "@last", stdin="and now?\n")
        assert more.returncode == 0, more.stderr
        first, *_, resumed, again = server.requests
    assert "AGENTS.md has changed" not in more.stderr
    for request in (resumed, again):
        assert system_of(request) == system_of(first)
        assert request.body["messages"][: len(first.body["messages"])] == first.body["messages"]
        notices = [each for each in request.body["messages"] if "<project-changed>" in json.dumps(each)]
        assert len(notices) == 1 and "Use spaces everywhere." in json.dumps(notices)
    told = json.loads(treenail("show", "--json", cwd=repository).stdout)
    assert any(
        "project-changed" in each["text"] for each in told["turns"][0]["items"] if each["kind"] == "notice"
    )


def test_instructions_are_bounded_and_the_deeper_ones_come_first(repository: Path) -> None:
    (repository / "AGENTS.md").write_text("é" * MAX_INSTRUCTIONS_BYTES)
    read = read_project(repository / "app", NOW)
    above, here = read.files
    assert here.text == "Here, use $spaces.\n" and above.is_cut and not here.is_cut
    assert sum(len(each.text.encode()) for each in read.files) <= MAX_INSTRUCTIONS_BYTES


@pytest.mark.parametrize("kind", ["link outside", "pipe", "directory"])
def test_only_files_of_the_repository_are_sent(repository: Path, kind: str) -> None:
    """A hostile project cannot have a secret sent to the model, nor make the program wait."""
    secret = repository.parent / "id_rsa"
    secret.write_text("PRIVATE KEY")
    place = repository / "app" / "deep" / "AGENTS.md"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to(secret)
    read = read_project(repository / "app" / "deep", NOW)
    assert [each.path for each in read.files] == ["../../AGENTS.md", "../CLAUDE.md"]


def test_a_link_within_the_repository_is_followed(repository: Path) -> None:
    (repository / "app" / "deep" / "AGENTS.md").symlink_to("../../AGENTS.md")
    assert read_project(repository / "app" / "deep", NOW).files[-1].text == "Use tabs.\n"


class TestGit:
    """The state is git's own, without running git: what a repository's configuration names is not run."""

    def state(self, root: Path) -> str:
        return read_project(root, NOW).facts[-1]

    def test_changed_and_deleted_files_are_named(self, repository: Path) -> None:
        (repository / "AGENTS.md").write_text("Use 8 tabs.\n")
        (repository / "app" / "CLAUDE.md").unlink()
        assert self.state(repository).endswith("differ from the index: AGENTS.md, app/CLAUDE.md")

    def test_a_touched_file_is_not_changed(self, repository: Path) -> None:
        os.utime(repository / "AGENTS.md", (1, 1))
        assert "no tracked file differs" in self.state(repository)

    def test_nothing_of_the_repository_is_run(self, repository: Path) -> None:
        git(repository, "config", "core.fsmonitor", f"touch {repository}/ran; false")
        (repository / "AGENTS.md").write_text("Use 8 tabs.\n")
        assert "AGENTS.md" in self.state(repository) and not (repository / "ran").exists()

    def test_no_branch_a_merge_and_a_linked_worktree(self, repository: Path) -> None:
        git(repository, "worktree", "add", "-b", "beside", str(repository.parent / "beside"))
        assert "on the branch beside" in self.state(repository.parent / "beside")
        git(repository, "checkout", "--detach")
        (repository / ".git" / "MERGE_HEAD").write_text("0" * 40)
        assert "on no branch; a merge is under way" in self.state(repository)

    @pytest.mark.parametrize(
        "content", [b"", b"DIRC", b"DIRC\0\0\0\2\0\0\0\7" + b"\xff" * 90, os.urandom(500)]
    )
    def test_a_damaged_index_leaves_the_state_out(self, repository: Path, content: bytes) -> None:
        (repository / ".git" / "index").write_bytes(content)
        assert self.state(repository) == "Git: on the branch feature/milk"
