"""Hooks around tool calls: the real command, real sandboxes, real files."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.stories.terminal import treenail

from treenail import Agent
from treenail.errors import UsageError
from treenail.presenters.cli.approval import drawn, question_for
from treenail.prompt import MarkdownSection
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.testing.wire import WireServer
from treenail.tools import Hook, PermissionMode, PermissionRequest, Permissions, Tool, ToolContext, ToolResult
from treenail.tools.files import FILE_TOOLS
from treenail.turns import InnerLoop, TurnState, prompt_extended

KEYS = {"OPENAI_API_KEY": "k"}

SETTINGS = """
[[hooks]]
when = "after"
tools = ["write_file", "edit_*"]
paths = ["**/*.txt"]
command = "tr a-z A-Z < $TREENAIL_PATH > up && cat up > $TREENAIL_PATH && rm up"

[[hooks]]
when = "turn_end"
command = "echo checked > report.md; test -e wanted.md || { echo write wanted.md; exit 1; }"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    return root


def results(request) -> list[str]:
    return [str(each["content"]) for each in request.body["messages"] if each["role"] == "tool"]


def write(path: str, content: str) -> Answer:
    return Answer("", [("write_file", {"path": path, "content": content})])


def test_hooks_of_a_project_run_after_approval_inside_the_call(project: Path) -> None:
    """What a formatter changes belongs to the call; a linter at the turn's end sends the model back."""
    (project / "treenail.toml").write_text(SETTINGS)
    answers = [
        write("a.txt", "quiet"),
        write("b.md", "quiet"),
        Answer("Done."),
        write("wanted.md", ""),
        Answer("Done."),
    ]
    with WireServer(answers, by_conversation=True) as server:
        flags = ("--model", "m", "--base-url", server.openai_url, "--unknown-price", "warn")
        refused = treenail("run", "go", *flags, cwd=project, env=KEYS)
        assert refused.returncode == 2 and "hooks" in refused.stderr and not server.requests
        assert treenail("config", "approve", cwd=project).returncode == 0
        ran = treenail("run", "go", *flags, cwd=project, env=KEYS)
        assert ran.returncode == 0, ran.stderr
        sent = json.dumps(server.requests[-1].body["messages"])
    assert (project / "a.txt").read_text() == "QUIET" and (project / "b.md").read_text() == "quiet"
    assert "<hook-failed>" in sent and "write wanted.md" in sent
    assert (project / "report.md").read_text() == "checked\n"
    diagnosed = treenail("diagnose", cwd=project)
    assert diagnosed.returncode == 0, diagnosed.stdout
    assert treenail("undo", "--yes", cwd=project).returncode == 0
    assert [each.name for each in project.iterdir()] == ["treenail.toml"]


class TestExitCodes:
    """What a hook's exit code means."""

    def run(self, project: Path, *hooks: Hook, content: str = "x"):
        agent = Agent("x", tools=FILE_TOOLS, hooks=hooks)
        model = ScriptedProvider([write("a.txt", content), *["Done."] * 9])
        with agent.run("go", provider=model, workspace=project) as run:
            return run.state, [each.content for each in run.messages if each.role == "tool"]

    def test_before_refuses(self, project: Path) -> None:
        guard = 'echo "$TREENAIL_ARGUMENTS" | grep -q secret && { echo no secrets; exit 1; } || exit 0'
        hook = Hook("before", guard, tools=("write_file",))
        state, (said,) = self.run(project, hook, content="a secret")
        assert state is TurnState.COMPLETED and "was not run" in said and "no secrets" in said
        assert not (project / "a.txt").exists()
        _, (said,) = self.run(project, hook, content="plain")
        assert "Created a.txt" in said and (project / "a.txt").read_text() == "plain"

    def test_after_undoes_with_2_and_tells_with_others(self, project: Path) -> None:
        _, (said,) = self.run(project, Hook("after", "echo more >> a.txt; touch b; echo bad; exit 2"))
        assert "it was undone" in said and "bad" in said and not list(project.iterdir())
        _, (said,) = self.run(project, Hook("after", "echo line 1 is long; exit 1", paths=("*.txt",)))
        assert "Created a.txt" in said and "A hook says" in said and "line 1 is long" in said
        assert (project / "a.txt").read_text() == "x"

    def test_a_hook_that_takes_too_long_undoes_the_call(self, project: Path) -> None:
        _, (said,) = self.run(project, Hook("after", "touch b; sleep 600", timeout_s=0.5))
        assert "was stopped after 0.5 s" in said and not list(project.iterdir())

    def test_a_turn_that_a_hook_never_lets_end_is_not_completed(self, project: Path) -> None:
        state, _ = self.run(project, Hook("turn_end", "touch never; exit 1"))
        assert state is not TurnState.COMPLETED and not (project / "never").exists()


def test_a_read_only_run_has_no_hooks_at_its_end(project: Path) -> None:
    agent = Agent("x", hooks=[Hook("turn_end", "touch changed")])
    read_only = Permissions(PermissionMode.READ_ONLY)
    with agent.run("?", provider=ScriptedProvider(["Yes."]), workspace=project, permissions=read_only) as run:
        assert run.state is TurnState.COMPLETED
    assert not list(project.iterdir())


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("write_file", {"path": "././secrets/key", "content": "x"}),
        ("write_file", {"path": "secrets//key", "content": "x"}),
        ("write_file", {"path": "link/key", "content": "x"}),
        ("delete_file", {"path": "secrets", "recursive": True}),
        ("move_file", {"path": "secrets", "target": "open"}),
        ("move_file", {"path": "./plain", "target": "secrets/more"}),
        ("move_file", {"path": "plain", "target": "link/more"}),
    ],
)
def test_a_guard_sees_every_way_to_its_paths(project: Path, tool: str, arguments: dict[str, object]) -> None:
    for name in ("secrets", "plain"):
        (project / name).mkdir()
        (project / name / "key").write_text("old")
    (project / "link").symlink_to("secrets")
    guard = Hook("before", "echo guarded; exit 1", paths=("secrets/**",))
    free = Answer("", [("write_file", {"path": "plain/free", "content": "x"})])
    model = ScriptedProvider([Answer("", [(tool, arguments)]), free, "Done."])
    with Agent("x", tools=FILE_TOOLS, hooks=[guard]).run("go", provider=model, workspace=project) as run:
        refused, ran = [each.content for each in run.messages if each.role == "tool"]
    assert "guarded" in refused and "Created plain/free" in ran
    assert [each.name for each in (project / "secrets").iterdir()] == ["key"]
    assert (project / "secrets" / "key").read_text() == "old"


def test_a_question_about_a_call_with_hooks_shows_its_diff(project: Path) -> None:
    shown: list[str] = []

    def approver(request: PermissionRequest) -> bool:
        shown.append(drawn(question_for(request)).plain)
        return True

    asking = Permissions(PermissionMode.ASK, approver=approver)
    agent = Agent("x", tools=FILE_TOOLS, hooks=[Hook("after", "true", paths=("*.txt",))])
    model = ScriptedProvider([write("a.txt", "new line\n"), "Done."])
    with agent.run("go", provider=model, workspace=project, permissions=asking) as run:
        assert run.state is TurnState.COMPLETED
    assert "+new line" in shown[0] and "hooks run with this call, and may change more" in shown[0]


def test_tools_that_a_source_brings_along_have_hooks(project: Path) -> None:
    """Such as those of an MCP server, whose parameters are a plain mapping."""

    async def save(params: dict[str, Any], *, context: ToolContext) -> ToolResult[str]:
        context.filesystem.write(params["path"], "saved")
        return ToolResult.ok(message="saved")

    class Source:
        @asynccontextmanager
        async def attached(self, loop: InnerLoop) -> AsyncIterator[None]:
            brought: Tool[Any, Any] = Tool(
                name="files__save", description="Save.", handler=save, params_type=dict, result_type=str
            )
            section: MarkdownSection[object] = MarkdownSection("Brought", template="x", tools=(brought,))
            with prompt_extended(loop, section):
                yield

    guard = Hook("before", "echo guarded; exit 1", tools=("files__*",), paths=("secrets/**",))
    calls = [("files__save", {"path": each}) for each in ("secrets/a", "plain")]
    model = ScriptedProvider([Answer("", calls), "Done."])
    with Agent("x", tools=[Source()], hooks=[guard]).run("go", provider=model, workspace=project) as run:
        refused, saved = [each.content for each in run.messages if each.role == "tool"]
    assert "guarded" in refused and "saved" in saved
    assert [each.name for each in project.iterdir()] == ["plain"]


@pytest.mark.parametrize("wrong", [{"when": "later"}, {"command": " "}, {"timeout_s": 0}])
def test_a_wrong_hook_is_an_error(wrong) -> None:
    with pytest.raises(UsageError):
        Hook(**{"when": "after", "command": "true"} | wrong)


def test_a_wrong_table_names_the_setting(project: Path) -> None:
    (project / "treenail.toml").write_text('[[hooks]]\nwhen = "after"\ncomand = "true"\n')
    ran = treenail("run", "go", "--model", "m", cwd=project, env=KEYS)
    assert ran.returncode == 2 and "hooks" in ran.stderr and "comand" in ran.stderr
