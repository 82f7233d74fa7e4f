"""`treenail mcp list`, `test` and `add`, and servers in settings files, with the real program."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
from tests.mcp_client.mcp_kit import FAKE
from tests.stories.terminal import Terminal, treenail

from treenail.errors import UsageError
from treenail.presenters.cli.servers import servers_of
from treenail.presenters.cli.settings import load, user_file

COMMAND = [sys.executable, "-I", "-S", str(FAKE)]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    place.mkdir()
    return place


def test_a_server_is_added_tested_and_used_and_a_broken_one_is_told(project: Path) -> None:
    added = treenail("mcp", "add", "fake", "--workspace", "--trust", "--", *COMMAND, cwd=project)
    assert "try it with: treenail mcp test fake" in added.stdout, added.stderr
    file = project.parent / ".config" / "treenail" / "treenail.toml"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = treenail("mcp", "add", "fake", "--", *COMMAND, cwd=project)
    assert (again.returncode, "has an MCP server 'fake' already" in again.stderr) == (2, True)
    assert treenail("mcp", "add", "broken", "--", *COMMAND, "exit", cwd=project).returncode == 0
    listed = json.loads(treenail("mcp", "list", "--json", cwd=project).stdout)
    assert [(each["name"], each["state"], each["trusted"]) for each in listed] == [
        ("fake", "used", True),
        ("broken", "used", False),
    ]
    tested = treenail("mcp", "test", "fake", cwd=project)
    assert tested.returncode == 0
    for line in ("fake works: fake 1, protocol 2025-11-25, bubblewrap, no network", "  fake__look  none"):
        assert line in tested.stdout
    failed = treenail("mcp", "test", "broken", cwd=project)
    assert (failed.returncode, "the configuration is missing" in failed.stdout) == (1, True)

    script = project.parent / "script.json"
    call = {"name": "fake__write", "arguments": {"path": "new.txt", "content": "by the server"}}
    script.write_text(json.dumps([{"calls": [call]}, {"text": "Done."}]))
    ran = treenail("run", "go", "--model", f"scripted:{script}", cwd=project)
    assert ran.returncode == 0, ran.stderr
    assert "the MCP server broken failed" in ran.stderr
    assert (project / "new.txt").read_text() == "by the server"
    shown = treenail("show", "@last", cwd=project).stdout
    assert "fake: 26 tools of fake 1 (bubblewrap, no network), list " in shown
    assert treenail("undo", "@last", "--yes", cwd=project).returncode == 0
    assert not (project / "new.txt").exists()


def test_a_projects_server_is_started_only_after_approval_of_this_very_file(project: Path) -> None:
    file = project / "treenail.toml"
    words = ", ".join(json.dumps(each) for each in COMMAND)
    file.write_text(f"[mcp.fake]\ncommand = [{words}]\n")
    refused = treenail("mcp", "test", "fake", cwd=project)
    assert (refused.returncode, "which you have not approved" in refused.stderr) == (2, True)
    assert "not approved" in treenail("mcp", "list", cwd=project).stdout
    assert "not approved" in treenail("run", "go", "--model", "scripted:x", cwd=project).stderr
    assert treenail("config", "approve", cwd=project).returncode == 0
    assert treenail("mcp", "test", "fake", cwd=project).returncode == 0
    file.write_text(file.read_text() + "allow_network = true\n")
    assert treenail("mcp", "test", "fake", cwd=project).returncode == 2


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("[mcp.x]\ncommand = 'git'", "command: Input should be a valid list"),
        ("[mcp.x]\ncommand = ['a']\nnetwork = true", "network: Extra inputs are not permitted"),
        ("[mcp.X]\ncommand = ['a']", "is not a name for an MCP server"),
        ("mcp = 5", "must be tables, one per server"),
    ],
)
def test_a_mistake_in_a_table_names_the_file_and_the_field(tmp_path: Path, table: str, said: str) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    file = user_file(environ)
    file.parent.mkdir(parents=True)
    file.write_text(table)
    with pytest.raises(UsageError) as wrong:
        servers_of(load({}, environ, tmp_path / "project"))
    assert said in str(wrong.value)
    assert str(file) in str(wrong.value)


def test_a_person_at_a_terminal_is_asked_about_a_call_and_then_by_its_server(project: Path) -> None:
    """First whether it may run, since nobody has said that it is harmless; then what the server wants."""
    assert treenail("mcp", "add", "fake", "--", *COMMAND, cwd=project).returncode == 0
    script = project.parent / "script.json"
    script.write_text(json.dumps([{"calls": [{"name": "fake__ask", "arguments": {}}]}, {"text": "Done."}]))
    with Terminal("run", "go", "--model", f"scripted:{script}", cwd=project) as screen:
        screen.wait_for(r"\[y\]es")
        screen.type("y")
        screen.wait_for("your answer")
        assert "the server fake asks: Which colour? (colour: string)" in " ".join(screen.text.split())
        screen.type("red\r")
        assert screen.end() == 0
    shown = treenail("show", "@last", "--json", cwd=project).stdout
    assert '{\\"action\\": \\"accept\\", \\"content\\": {\\"colour\\": \\"red\\"}}' in shown
