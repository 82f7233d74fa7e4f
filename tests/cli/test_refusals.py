"""A command that is wrong is refused in one sentence, and nothing is run."""

from __future__ import annotations

import pytest
from tests.cli.conftest import Command


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run", "go", "--max-cost", "-1"), "--max-cost"),
        (("run", "go", "--ask", "--read-only"), "one of"),
        (("run", "  "), "the task is empty"),
        (("run", "go", "--agent", "none.toml"), "no agent file"),
        (("show", "zzz"), "there are no runs"),
        (("resume",), "there are no runs"),
        (("hold", "answer"), "answer with one of --yes, --no"),
        (("run", "go", "-C", "nowhere"), "not a directory"),
    ],
)
def test_bad_commands_are_refused_in_one_sentence(
    treenail: Command, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], told: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    said = treenail(*arguments)
    assert (said.code, said.out) == (2, "")
    assert told in said.err
    assert len(said.err.splitlines()) == 1
