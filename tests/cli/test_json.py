"""`--json` has one vocabulary: what every command prints is what docs/json-schema.json says."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest

from treenail.presenters.cli.main import app

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "json-schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
LINES = {"run", "resume", "chat", "export", "workflow run", "workflow resume"}
"""The commands that print one object a line."""

PYTHON = re.compile(r"[A-Z]\w+\.[A-Z_]+|<.* object at .*>|\d{4}-\d\d-\d\d \d\d:.*")
"""How Python writes what JSON has no word for: a state, an object, a time."""

Call = Callable[..., Any]


def commands_with_json(group: click.Group, before: str = "") -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands_with_json(command, f"{before}{name} ")
        elif command is not None and any(each.name == "as_json" for each in command.params):
            yield before + name


def test_the_schema_has_every_command_and_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert sorted(SCHEMA["properties"]) == sorted(commands_with_json(app))


def words_of(data: object) -> Iterator[str]:
    """Yield every key and every short text in a document."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield key
            yield from words_of(value)
    elif isinstance(data, list):
        for each in data:
            yield from words_of(each)
    elif isinstance(data, str):
        yield data


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command with --json in a project of its own; return what it printed, held to the schema."""
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def run(command: str, *words: str) -> Any:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            app.main([*command.split(), "--json", *words], prog_name="treenail", standalone_mode=False)
        text = printed.getvalue()
        documents = (
            [json.loads(each) for each in text.splitlines()] if command in LINES else [json.loads(text)]
        )
        for each in documents:
            VALIDATOR.validate({command: each})
            python = [word for word in words_of(each) if PYTHON.fullmatch(word)]
            assert python == [], "a value is in Python's words"
        return documents if command in LINES else documents[0]

    return run


def test_every_command_prints_what_the_schema_says(call: Call, tmp_path: Path) -> None:
    """One project from its first run to its last: every command that is about runs, settings and prices."""
    write = [{"name": "write_file", "arguments": {"path": "a.txt", "content": f"{n}\n"}} for n in range(2)]
    script = [
        {"calls": [write[0]], "cost_usd": 0.01},
        {"calls": [write[1]]},
        {"text": "done", "cost_usd": 0.02},
    ]
    (tmp_path / "script.json").write_text(json.dumps(script))
    model = ("--model", f"scripted:{tmp_path}/script.json", "--sandbox", "off")

    ended = call("run", "go", *model)[-1]
    assert (ended["event"], ended["state"], ended["exit_code"]) == ("ended", "completed", 0)
    first = ended["run"]
    assert call("run", "go", "--ask", *model)[-1]["state"] == "held"
    assert [each["tool"] for each in call("hold list")] == ["write_file"]
    assert call("hold answer", "--yes")["approved"] is True
    assert call("resume", "@last", "--auto")[-1]["state"] == "completed"

    one, two = call("list")
    assert (one["run"], one["state"], one["input_tokens"], one["output_tokens"]) == (
        first,
        "completed",
        300,
        60,
    )
    assert one["cost_usd"] == pytest.approx(0.03) and one["elapsed_s"] >= 0
    shown = call("show", first)
    assert shown["turns"][0]["state"] == shown["state"] == "completed"
    assert shown["cost_usd"] == pytest.approx(0.03) and shown["elapsed_s"] == one["elapsed_s"]
    assert call("replay", first)["run"] == call("diagnose", first)["run"] == first
    assert call("diff", first)["changes"] == [{"path": "a.txt", "kind": "added"}]
    assert call("export", first)[1]["type"] == "treenail.TurnStarted"

    assert call("rollback", two["run"])["undone"] == call("redo", two["run"])["redone"]
    assert call("undo", two["run"], "--yes")["is_undone"] is True
    call("recover")
    assert call("fork", str(tmp_path / "fork"), "--run", first)["from"] == first
    assert call("prune", first)["run"] == first
    assert call("salvage", str(tmp_path / "new.db"))["sessions"]
    assert call("erase", first, "--yes")["erased"] == first

    Path("treenail.toml").write_text('check = "true"\n')
    assert call("config approve")["approved"] == ["check"]
    Path("treenail.toml").unlink()
    assert call("permissions", "--allow", "run_command: pytest *")["rules"] == call("config show")["rules"]
    assert call("prices show", "gpt-5")["price"]["input_per_mtok"] > 0
    call("version")
    assert call("mcp add", "notes", "--", "true")["name"] == call("mcp list")[0]["name"] == "notes"
    assert call("config show")["mcp"][0]["name"] == "notes"
    assert {each["what"] for each in call("doctor")} >= {"python", "store", "model"}


def test_a_workflow_prints_what_the_schema_says(call: Call, tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text("id: demo\nsteps:\n  - {id: one, task: Greet.}\n")
    (tmp_path / "script.json").write_text(json.dumps(["Hello."]))
    model = ("--model", f"scripted:{tmp_path}/script.json", "--sandbox", "off")
    ended = call("workflow run", str(tmp_path / "flow.yaml"), *model)[-1]
    assert ended["event"] == "ended"
    assert call("workflow status")["state"] == ended["state"]
    assert {each["state"] for each in call("list")} == {ended["state"]}
