"""Names of models and files of agents: what works, and what is said when it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from treenail.errors import UsageError
from treenail.presenters.cli.agents import coding_agent, limits_of, load_agent
from treenail.presenters.cli.models import provider_for, scripted
from treenail.presenters.cli.settings import load


def provider(tmp_path: Path, environ: dict[str, str], **flags: str):
    return provider_for(load(flags, {}, tmp_path), environ)


def test_a_key_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    assert provider(tmp_path, {"OPENAI_API_KEY": "k"}).name == "openai.responses"
    assert provider(tmp_path, {"ANTHROPIC_API_KEY": "k"}).name == "anthropic.messages"


def test_a_model_says_its_provider_or_is_known_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    keys = {"OPENAI_API_KEY": "k", "ANTHROPIC_API_KEY": "k"}
    assert provider(tmp_path, keys, model="claude-x").name == "anthropic.messages"
    assert provider(tmp_path, keys, model="some-model").name == "openai.responses"
    named = provider(tmp_path, keys, model="anthropic/some-model")
    assert (named.name, named.model) == ("anthropic.messages", "some-model")


def test_a_local_server_is_asked_in_the_interface_that_all_of_them_speak(tmp_path: Path) -> None:
    local = provider(tmp_path, {}, model="meta/llama", base_url="http://127.0.0.1:1/v1")
    assert (local.name, local.model) == ("openai.chat", "meta/llama")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({}, "treenail demo"),
        ({"base_url": "http://127.0.0.1:1/v1"}, "--model"),
        ({"model": "openai/"}, "openai/NAME"),
        ({"model": "scripted:none.json"}, "cannot be read"),
    ],
)
def test_what_is_missing_is_said_with_the_next_step(tmp_path: Path, flags: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        provider(tmp_path, {}, **flags)


@pytest.mark.parametrize(
    "data", ['{"a": 1}', '[{"txt": "x"}]', '[{"calls": [{"arguments": {}}]}]', "[3]", "nonsense"]
)
def test_a_script_that_is_none_is_refused_in_words(tmp_path: Path, data: str) -> None:
    file = tmp_path / "script.json"
    file.write_text(data)
    with pytest.raises(UsageError, match=r"script\.json"):
        scripted(file)


def test_the_coding_agent_can_read_change_and_run() -> None:
    names = coding_agent().tool_registry().keys()
    assert {"read_file", "edit_file", "grep_files", "run_command"} <= names


def test_an_agent_comes_from_a_python_file(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("NAME = 'mine'\n")
    (tmp_path / "mine.py").write_text(
        "from helper import NAME\nfrom treenail import Agent\nagent = Agent(NAME)\n"
        "def make():\n    return Agent('made')\n"
    )
    assert load_agent("mine.py", tmp_path).name == "mine"
    assert load_agent("mine.py:make", tmp_path).name == "made"
    with pytest.raises(UsageError, match="it has: agent"):
        load_agent("mine.py:other", tmp_path)


@pytest.mark.parametrize("name", ["a.toml", "a.yaml"])
def test_an_agent_comes_from_a_file_that_runs_nothing(tmp_path: Path, name: str) -> None:
    text = {
        "a.toml": 'name = "reader"\ninstructions = "Costs $5."\ntools = ["reading"]\nmax_iterations = 3\n',
        "a.yaml": 'name: reader\ninstructions: "Costs $5."\ntools: [reading]\nmax_iterations: 3\n',
    }
    (tmp_path / name).write_text(text[name])
    agent = load_agent(name, tmp_path)
    assert (agent.name, agent.max_iterations) == ("reader", 3)
    assert "write_file" not in agent.tool_registry()
    assert "Costs $5." in agent.prompt.render().text


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.toml", 'instructions = "i"\nx = 1', "x: Extra inputs are not permitted"),
        ("a.toml", 'name = "n"', "instructions: Field required"),
        ("a.toml", 'instructions = "i"\ntools = ["magic"]', "tools.0: Input should be 'files', 'reading'"),
        (
            "a.toml",
            'instructions = "i"\nmax_iterations = 0',
            "max_iterations: Input should be greater than 0",
        ),
        ("a.toml", 'instructions = "i"\ntools = "files"', "tools: Input should be a valid list"),
        ("a.toml", 'instructions = "i"\nlimits = 3', "limits: Input should be a valid dictionary"),
        ("a.toml", 'instructions = "i"\n[limits]\nmax_costs = 3', "max_costs.*should be 'max_cost'"),
        ("a.toml", 'instructions = "i"\n[judges]\ncheck = 3', "judges.check: Input should be a valid string"),
        ("a.toml", 'instructions = "i"\n[judges]\nmodel = 3', "judges.model: .* valid boolean"),
        ("a.toml", "instructions = ", "cannot be read as TOML"),
        ("a.yaml", "- 1", "keys and values"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "cannot be read as YAML"),
        ("a.json", "{}", "must end in"),
        ("a.py", "1 / 0", "ZeroDivisionError"),
        ("a.py", "x = 1", "no agent named 'agent'"),
    ],
)
def test_a_wrong_agent_file_is_refused_with_its_name(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=told) as refused:
        load_agent(name, tmp_path)
    assert name in str(refused.value)


def test_an_agent_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no agent file"):
        load_agent("none.py:agent", tmp_path)


def test_an_agent_file_names_its_judges(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        'instructions = "i"\n[judges]\ncheck = "true"\nfiles = ["out.md"]\nmodel = true\n'
        "review_every_calls = 3\nstrict = true\n"
    )
    agent = load_agent("a.toml", tmp_path)
    assert [type(each).__name__ for each in agent.completion.checkers] == [
        "FileOutputChecker",
        "CommandChecker",
        "LLMCompletionVerifier",
    ]
    assert agent.feedback[0].trigger.every_n_calls == 3
    assert agent.nested.on_completion_failure == "closed"
    (tmp_path / "a.toml").write_text('instructions = "i"\n')
    assert load_agent("a.toml", tmp_path).completion is None


def test_an_agent_file_sets_limits_and_a_python_file_none(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("instructions: i\nlimits: {max_cost: 0.5}\n")
    (tmp_path / "a.py").write_text("")
    assert limits_of("a.yaml", tmp_path) == {"max_cost": 0.5}
    assert limits_of("a.py:agent", tmp_path) == {}
