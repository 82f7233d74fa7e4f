"""The usage examples of the specification of messages run as they are written, but for their imports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treenail import tool
from treenail.conversation import InnerMessage, get_inner_messages, get_pending_tool_calls
from treenail.prompt import MarkdownSection, Prompt
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import InProcessEventBus, Session
from treenail.turns import ModelAdapter, TurnState, turn_state

BASIC_RESUME = """
from treenail.state import Session, Snapshot
from treenail.conversation import (
    InnerMessage,
    inner_message_append,
    get_inner_messages,
)

# Setup session with recording
session = Session(bus=InProcessEventBus())
session.mutate(InnerMessage).register(
    InnerMessage,
    inner_message_append,
)

# Save checkpoint after each message
def save_on_change(old, new):
    if len(new) > len(old):
        Path("/tmp/checkpoint.json").write_text(session.snapshot().to_json())

session.observe(InnerMessage, save_on_change)

# Run evaluation
response = adapter.evaluate(prompt, session=session)
"""

RESUME_FROM_CHECKPOINT = """
# Load checkpoint
snapshot = Snapshot.from_json(Path("/tmp/checkpoint.json").read_text())

session = Session(bus=InProcessEventBus())
session.mutate(InnerMessage).register(
    InnerMessage,
    inner_message_append,
)
session.mutate().rollback(snapshot)

# Resume - will detect pending tools and continue
response = adapter.evaluate(prompt, session=session, resume=True)
"""

INSPECTING_CONVERSATION = """
# Get all messages
messages = session.select_all(InnerMessage)

# Get messages for specific evaluation
from treenail.conversation import get_inner_messages, get_latest_evaluation_id

eval_id = get_latest_evaluation_id(session)
conversation = get_inner_messages(session, eval_id)

for msg in conversation:
    print(f"[{msg.sequence}] {msg.role}: {msg.content[:50]}...")
"""

MANUAL_REGISTRATION = """
from treenail.conversation import (
    InnerMessage,
    inner_message_append,
    enable_inner_message_recording,
)

# Option 1: Manual registration
session.mutate(InnerMessage).register(
    InnerMessage,
    inner_message_append,
)
"""

CONVENIENCE_FUNCTION = """
from treenail.conversation import (
    InnerMessage,
    inner_message_append,
    enable_inner_message_recording,
)

# Option 2: Convenience function
enable_inner_message_recording(session)
"""


class World:
    """What the examples take for granted: an adapter, a prompt, and a place for the checkpoint."""

    def __init__(self, place: Path) -> None:
        self.checkpoint = place / "checkpoint.json"
        self.at_the_crash = place / "at_the_crash.json"
        self.ran: list[tuple[str, bool]] = []
        self.names: dict[str, Any] = {
            "InProcessEventBus": InProcessEventBus,
            "Path": self._path,
            "adapter": ModelAdapter(ScriptedProvider([Answer("", [("a", {}), ("b", {})]), "done"])),
            "prompt": self._prompt(),
        }

    def _path(self, said: str) -> Path:
        assert said == "/tmp/checkpoint.json"
        return self.checkpoint

    def _prompt(self) -> Prompt[Any]:
        @tool(effects="workspace")
        def a(*, context: Any) -> str:
            """Do the first thing."""
            self.ran.append(("a", context.is_resume))
            return "1"

        @tool(effects="workspace")
        def b(*, context: Any) -> str:
            """Do the second thing; a process that dies in it leaves the checkpoint as it is now."""
            self.at_the_crash.write_text(self.checkpoint.read_text())
            self.ran.append(("b", context.is_resume))
            return "2"

        return Prompt(ns="t", key="k", sections=[MarkdownSection("Task", template="Go.", tools=[a, b])])

    def run(self, example: str) -> Any:
        """Run an example; return its session."""
        exec(compile(example, "<example>", "exec"), self.names)
        return self.names["session"]


def test_basic_resume_saves_a_checkpoint_after_each_message(tmp_path: Path) -> None:
    """The evaluation runs to its end, and the checkpoint has all of it."""
    world = World(tmp_path)
    session = world.run(BASIC_RESUME)
    assert world.names["response"].text == "done"
    assert turn_state(session) is TurnState.COMPLETED
    saved = world.names["Snapshot"].from_json(world.checkpoint.read_text())
    assert tuple(saved.slices[InnerMessage]) == session.select_all(InnerMessage)


def test_resume_from_checkpoint_runs_the_pending_tool_and_no_other(tmp_path: Path) -> None:
    """The process died in the second tool: the first one's result is in the checkpoint, and stays."""
    world = World(tmp_path)
    world.run(BASIC_RESUME)
    world.checkpoint.write_text(world.at_the_crash.read_text())
    world.ran.clear()
    session = world.run(RESUME_FROM_CHECKPOINT)
    assert world.names["response"].text == "done"
    assert world.ran == [("b", True)]
    assert [each.sequence for each in get_inner_messages(session)] == [0, 1, 2, 3, 4]
    assert [each.turn for each in get_inner_messages(session)] == [0, 1, 1, 1, 2]
    assert turn_state(session) is TurnState.COMPLETED
    assert get_pending_tool_calls(session, get_inner_messages(session)[0].evaluation_id) == ()


def test_inspecting_a_conversation_shows_its_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, with their places and roles."""
    world = World(tmp_path)
    world.run(BASIC_RESUME)
    world.run(INSPECTING_CONVERSATION)
    # The system's text has lines of its own.
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert [line.split(":")[0] for line in lines] == [
        "[0] system",
        "[1] assistant",
        "[2] tool",
        "[3] tool",
        "[4] assistant",
    ]
    assert lines[-1] == "[4] assistant: done..."
    assert world.names["conversation"] == world.names["messages"]


@pytest.mark.parametrize("enable", [MANUAL_REGISTRATION, CONVENIENCE_FUNCTION], ids=["manual", "convenience"])
def test_both_ways_of_enabling_recording_keep_messages_in_their_order(tmp_path: Path, enable: str) -> None:
    """A message that comes late stands in its place all the same."""
    world = World(tmp_path)
    session = world.names["session"] = Session()
    world.run(enable)
    late, early = (InnerMessage("user", str(place), "e", place) for place in (1, 0))
    session.mutate(InnerMessage).append(late)
    session.mutate(InnerMessage).append(early)
    assert [each.sequence for each in session.select_all(InnerMessage)] == [0, 1]


def test_what_cannot_be_resumed_can_be_caught_as_the_specification_says(tmp_path: Path) -> None:
    """No conversation, and another prompt's: whoever wrote `except ValueError` catches both."""
    world = World(tmp_path)
    evaluate: Callable[..., Any] = world.names["adapter"].evaluate
    with pytest.raises(ValueError, match="no conversation to resume"):
        evaluate(world.names["prompt"], session=Session(), resume=True)
    other = Prompt(ns="t", key="other", sections=[MarkdownSection("Task", template="Go.")])
    with pytest.raises(ValueError, match="belongs to the prompt"):
        evaluate(other, session=world.run(BASIC_RESUME), resume=True)
