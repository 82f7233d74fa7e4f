"""The tools of a request: in an order that no set or dict of the caller decides, and that the log keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treenail import Agent, Limits, TurnState, tool
from treenail.prompt import MarkdownSection, PromptRendered
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.testing.wire import WireRequest, WireServer


@tool(effects="none")
def cod() -> str:
    """Fish."""
    return "cod"


@tool(effects="none")
def ale() -> str:
    """Drink."""
    return "ale"


@tool(effects="none")
def bun() -> str:
    """Bake."""
    return "bun"


def names(request: WireRequest) -> list[str]:
    return [each["function"]["name"] for each in request.body["tools"]]


def offered(tools: Any) -> list[str]:
    with WireServer(["ok"]) as server:
        provider = OpenAI("m", api="chat", base_url=server.openai_url)
        Agent("cook", tools=tools).run("Go", provider=provider)
    return names(server.requests[0])


def test_a_list_keeps_its_order_and_everything_else_is_sorted() -> None:
    """Two processes would iterate a set in two orders, and callers fill dicts in theirs."""
    assert offered([cod, ale, bun]) == ["cod", "ale", "bun"]
    assert offered((bun, cod, ale)) == ["bun", "cod", "ale"]
    for given in ({cod, ale, bun}, {"x": cod, "y": ale, "z": bun}, {"z": bun, "x": cod, "y": ale}.values()):
        assert offered(given) == ["ale", "bun", "cod"]
    section: Any = MarkdownSection("Kitchen", template="Cook.", tools={cod, ale, bun})  # type: ignore[arg-type]
    assert [each.name for each in section.own_tools] == ["ale", "bun", "cod"]


def test_a_resumed_run_sends_the_tools_as_before(tmp_path: Path) -> None:
    """The log has the order: whoever resumes with another one, and with a new tool, changes no prefix."""
    store = tmp_path / "runs.db"
    script = [Answer("", [("cod", {})]), Answer("done")]
    with WireServer(script) as server:
        provider = OpenAI("m", api="chat", base_url=server.openai_url)
        first = Agent("cook", tools=[cod, ale])
        run = first.run("Go", provider=provider, store=store, limits=Limits(max_steps=2))
        assert run.state is TurnState.FAILED
        logged = run.execution_state.session[PromptRendered].all()[-1]
        run.close()
        assert logged.tools == ("cod", "ale")
        again = Agent("cook", tools=[ale, bun, cod])
        resumed = again.resume(store, run.id, provider=provider, limits=Limits())
    assert resumed.state is TurnState.COMPLETED
    before, after = (each.body["tools"] for each in server.requests)
    assert after[:2] == before
    assert names(server.requests[1]) == ["cod", "ale", "bun"]


def test_the_next_task_of_a_run_has_the_order_of_the_first(tmp_path: Path) -> None:
    """Several turns of one conversation share their beginning."""
    store = tmp_path / "runs.db"
    run = Agent("cook", tools=[cod, ale]).run("One", provider=ScriptedProvider(["1"]), store=store)
    run.close()
    with WireServer(["2"]) as server:
        provider = OpenAI("m", api="chat", base_url=server.openai_url)
        Agent("cook", tools=[ale, cod]).run("Two", provider=provider, store=store, run_id=run.id)
    assert names(server.requests[0]) == ["cod", "ale"]
