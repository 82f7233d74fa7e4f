"""Options of a model, and another model in the middle of a run: the real command, and servers on the wire."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.stories.terminal import treenail

from treenail.providers.scripted import Answer
from treenail.testing.wire import WireServer

KEYS = {"OPENAI_API_KEY": "k", "ANTHROPIC_API_KEY": "k"}
FREE = ("--unknown-price", "warn")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (root / "notes.txt").write_text("remember the milk\n")
    return root


@pytest.mark.parametrize(
    ("flags", "path", "sent"),
    [
        (
            ("--model", "openai/m", "--api", "responses"),
            "/v1",
            {"reasoning": {"effort": "low", "summary": "auto"}},
        ),
        (("--model", "openai/m", "--api", "chat"), "/v1", {"reasoning_effort": "low"}),
        (("--model", "anthropic/m"), "", {"output_config": {"effort": "low"}}),
    ],
)
def test_options_are_on_the_wire(project: Path, flags, path, sent) -> None:
    """By flag, setting and variable, in each provider's own words; and a resume keeps them."""
    (project / "treenail.toml").write_text("temperature = 0.25\n")
    with WireServer(lambda request: Answer("Done.")) as server:
        ran = treenail(
            "run", "go", *flags, *FREE, "--base-url", server.url + path, "--option", "top_p=0.5",
            cwd=project, env={**KEYS, "TREENAIL_EFFORT": "low"},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        more = treenail("chat", "--run", "@last", cwd=project, env=KEYS, stdin="and now?\n")
        assert more.returncode == 0, more.stderr
        bodies = [each.body for each in server.requests]
    assert len(bodies) == 2
    for body in bodies:
        assert {name: body[name] for name in sent} == sent
        assert (body["temperature"], body["top_p"]) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--model", "claude-agent/x", "--temperature", "0.5"),
            "--temperature .* means nothing to .* claude-agent",
        ),
        (("--model", "anthropic/x", "--temperature", "1.5"), "at most 1 for anthropic"),
        (("--model", "anthropic/x", "--effort", "minimal"), "one of low, medium, high, xhigh, max"),
        (("--model", "openai/x", "--temperature", "warm"), "must be a number"),
        (("--model", "openai/x", "--option", "top_p"), "NAME=VALUE"),
        (("--model", "openai/x", "--option", "base_url=http://elsewhere"), "use --base-url"),
    ],
)
def test_an_option_that_a_provider_does_not_know_is_an_error_before_any_call(project: Path, arguments, said):
    """One line, no run, no request."""
    ran = treenail("run", "go", *arguments, cwd=project, env=KEYS)
    assert ran.returncode == 2
    assert re.search(said, ran.stderr), ran.stderr
    assert (
        "no runs" in treenail("list", cwd=project).stdout or not treenail("list", cwd=project).stdout.strip()
    )


def test_options_are_shown_with_their_source(project: Path) -> None:
    (project / "treenail.toml").write_text('effort = "high"\n')
    shown = json.loads(
        treenail("config", "show", "--json", cwd=project, env={"TREENAIL_TEMPERATURE": "0"}).stdout
    )
    assert shown["temperature"] == {"value": 0.0, "source": "the variable TREENAIL_TEMPERATURE"}
    assert shown["effort"]["value"] == "high" and shown["effort"]["source"].endswith("treenail.toml")


def test_a_field_of_requests_in_a_projects_file_needs_approval(project: Path) -> None:
    """It may cost more, or change what the model is."""
    (project / "treenail.toml").write_text('option = ["service_tier=priority"]\n')
    ran = treenail("run", "go", "--model", "openai/x", cwd=project, env=KEYS)
    assert ran.returncode == 2 and "approve" in ran.stderr


def test_another_model_takes_over_in_the_middle_of_a_run(project: Path) -> None:
    """Its history is whole: the call and its result have their id, another interface's thought stays away.

    Money goes on counting, the log has the switch, and later turns stay with the new model.
    """
    first = [
        Answer("", [("read_file", {"path": "notes.txt"})], thoughts=("milk?",)),
        Answer("", [("list_directory", {})]),
        Answer("", [("list_directory", {"skip": 0})]),
    ]
    with WireServer(first, by_conversation=True) as server:
        ran = treenail(
            "run", "what is in the notes?", "--model", "openai/gpt-5-mini", "--api", "responses",
            "--base-url", server.openai_url, "--max-steps", "4", cwd=project, env=KEYS,
        )  # fmt: skip
    assert ran.returncode == 6, ran.stderr
    with WireServer(lambda request: Answer("Milk.")) as other:
        flags = ("--model", "anthropic/claude-sonnet-4-5", "--base-url", other.anthropic_url)
        ran = treenail("resume", "@last", *flags, "--max-steps", "9", cwd=project, env=KEYS)
        assert ran.returncode == 0, ran.stderr
        assert "Milk." in ran.stdout
        more = treenail("chat", "--run", "@last", cwd=project, env=KEYS, stdin="sure?\n")
        assert more.returncode == 0, more.stderr
        asked, again = other.requests
    assert asked.api == again.api == "anthropic.messages" and not asked.violations
    blocks = [block for message in asked.body["messages"] for block in message["content"]]
    used = [each["id"] for each in blocks if each["type"] == "tool_use"]
    assert used and used == [each["tool_use_id"] for each in blocks if each["type"] == "tool_result"]
    assert "remember the milk" in json.dumps(blocks) and "thinking" not in {each["type"] for each in blocks}
    told = json.loads(treenail("show", "--json", cwd=project).stdout)
    said = [each["text"] for turn in told["turns"] for each in turn["items"] if each["kind"] == "notice"]
    assert "the model is claude-sonnet-4-5 now, and was gpt-5-mini" in said
    costs = [turn["usage"]["cost_usd"] for turn in told["turns"]]
    assert told["usage"]["cost_usd"] == pytest.approx(sum(costs)) and min(costs) > 0
