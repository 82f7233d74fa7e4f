"""What a person says while a turn is under way, and pictures that go along with a task."""

from __future__ import annotations

from pathlib import Path

import pytest

from treenail import Agent, Limits, tool
from treenail.conversation import ImagePart
from treenail.conversation.excerpts import UNSEEN_IMAGE
from treenail.errors import UsageError
from treenail.history import opened_run, project
from treenail.providers.anthropic import Anthropic
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.testing.wire import WireServer
from treenail.turns import FollowUp, TurnState

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c63f8cfc0f01f000500"
    "01ffa2f4e00c0000000049454e44ae426082"
)


@tool(effects="none")
def look() -> str:
    """Look around."""
    return "a harbour"


def agent() -> Agent:
    return Agent("sailor", tools=[look])


def test_a_follow_up_is_logged_before_the_next_request_that_shows_it(tmp_path: Path) -> None:
    """It stands behind the results of the calls under way; the provider accepts that, in the same turn."""
    store = tmp_path / "runs.db"
    waiting = [FollowUp("and the weather?", (ImagePart("image/png", PNG),))]

    def inbox() -> list[FollowUp]:
        if not server.requests:
            return []
        said, waiting[:] = list(waiting), []
        return said

    with WireServer([Answer(calls=[("look", {})]), "rain"], by_conversation=True) as server:
        model = OpenAI("a-model", base_url=server.openai_url, api="chat")
        with agent().run(
            "what is here?", provider=model, store=store, inbox=inbox, limits=Limits(max_steps=9)
        ) as run:
            run_id = run.id
            assert run.state is TurnState.COMPLETED
        first, second = server.requests
    assert [each["role"] for each in first.body["messages"]] == ["system", "user"]
    *_, result, told = second.body["messages"]
    assert (result["role"], told["role"], told["content"][0]["text"]) == ("tool", "user", "and the weather?")
    assert told["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert first.violations == second.violations == ()
    with opened_run(store, run_id) as session:
        (turn,) = project(session).turns
        shown = [each.text for each in turn.items if each.kind == "user"]
    assert shown == ["what is here?", "and the weather?"]


def test_a_turn_that_asks_no_more_leaves_the_follow_up_for_the_next_one() -> None:
    waiting = [FollowUp("later")]
    asked: list[int] = []

    def inbox() -> list[FollowUp]:
        asked.append(1)
        return [] if len(asked) == 1 else list(waiting)

    with agent().run("go", provider=ScriptedProvider(["done"]), inbox=inbox) as run:
        assert run.state is TurnState.COMPLETED
        assert [each.content for each in run.messages if each.role == "user"] == ["go"]


def test_a_picture_goes_to_the_model_with_the_task() -> None:
    with WireServer(["a dot"], by_conversation=True) as server:
        model = Anthropic("a-model", base_url=server.anthropic_url, api_key="k")
        with agent().run("what is it?", images=[ImagePart("image/png", PNG)], provider=model) as run:
            assert run.text == "a dot"
        (said,) = server.requests[0].body["messages"]
    assert [each["type"] for each in said["content"]] == ["text", "image"]


def test_a_model_that_takes_no_pictures_is_refused_before_anything_is_called() -> None:
    with WireServer(["never"]) as server:
        model = OpenAI("openai/o3-mini", base_url=server.openai_url)
        with pytest.raises(UsageError, match="o3-mini takes no images"):
            agent().run("what is it?", images=[ImagePart("image/png", PNG)], provider=model)
        assert not server.requests


def test_a_model_that_takes_text_alone_can_continue_after_pictures(tmp_path: Path) -> None:
    """It is told that there was one; a model that takes pictures is shown it again."""
    store, picture = tmp_path / "runs.db", [ImagePart("image/png", PNG)]
    with WireServer(["a dot", "so I hear", "a dot still"], by_conversation=True) as server:
        models = [OpenAI(name, base_url=server.openai_url, api="chat") for name in ("a-model", "o3-mini")]
        with agent().run("what is it?", images=picture, provider=models[0], store=store) as run:
            run_id = run.id
        with agent().run("sure?", provider=models[1], store=store, run_id=run_id) as run:
            assert run.text == "so I hear"
        with agent().run("you?", provider=models[0], store=store, run_id=run_id) as run:
            assert run.text == "a dot still"
        _, blind, seeing = server.requests
    assert blind.body["messages"][1]["content"] == f"what is it?\n{UNSEEN_IMAGE}"
    assert seeing.body["messages"][1]["content"][1]["type"] == "image_url"
