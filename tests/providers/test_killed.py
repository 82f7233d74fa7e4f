"""A run that is killed between any two messages goes on where it was, on every provider."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from treenail.providers.scripted import Answer
from treenail.testing.wire import WireServer

WARNINGS = (
    *("-W", "error"),
    # What LiteLLM does with pydantic is its own affair: it warns inside of its calls.
    *("-W", "ignore:Item:UserWarning", "-W", "ignore:Accessing the 'model:DeprecationWarning"),
)
ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("killed_child.py")

SCRIPT = [
    Answer("First.", [("note", {"line": "one"}), ("note", {"line": "two"})], thoughts=["Two notes first."]),
    Answer("Noted."),
]


def test_a_run_killed_between_any_two_messages_is_resumed_on_every_provider(tmp_path: Path) -> None:
    """SIGKILL after each message in turn, and before the first one: each note is taken exactly once."""
    with WireServer(SCRIPT, by_conversation=True) as server:
        ran = subprocess.run(
            [sys.executable, *WARNINGS, str(CHILD), server.url, str(tmp_path)],
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert [each.violations for each in server.requests if each.violations] == []
    assert ran.returncode == 0, ran.stderr
    resumed = [json.loads(line) for line in ran.stdout.splitlines()]
    # After the turn's start, which holds the first two messages, and after each of the other four.
    apis = ("openai.responses", "openai.chat", "anthropic.messages", "litellm.chat")
    points = [(api, die_at) for api in apis for die_at in range(1, 6)]
    assert [(each["api"], each["die_at"]) for each in resumed] == points, ran.stderr
    for each in resumed:
        assert (each["state"], each["output"]) == ("completed", "Noted."), each
        assert each["notes"] == "one\ntwo\n", each
        roles = [role for role, _ in each["messages"]]
        assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"], each
