"""What a prompt declares holds while it is evaluated: parameters, sections, tools, rules and resources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from treenail import Agent, Session, tool
from treenail.conversation import InnerMessage
from treenail.errors import OutputParseError, PromptMismatch
from treenail.prompt import MarkdownSection, Prompt, PromptTemplate, SectionVisibility
from treenail.providers import ModelRequest
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import Binding, ResourceRegistry
from treenail.tools import SequentialDependencyPolicy
from treenail.turns import ModelAdapter


@dataclass(frozen=True)
class Topic:
    name: str


@dataclass(frozen=True)
class Fact:
    text: str


@dataclass(frozen=True)
class Permit:
    granted: bool


@tool(effects="none")
def look() -> str:
    """Look."""
    return "seen"


@tool(effects="none")
def fire() -> str:
    """Fire."""
    return "fired"


def told(session: Session) -> list[str]:
    return [each.content for each in session[InnerMessage].all() if each.role == "tool"]


def seen_by(prompt: Prompt[Any], session: Session) -> tuple[str, list[str]]:
    """Evaluate a prompt; return the system text and the tools that the model was given."""
    seen: list[tuple[str, list[str]]] = []

    def answer(request: ModelRequest) -> str:
        seen.append((request.items[0].text, [each.name for each in request.tools]))
        return "ok"

    ModelAdapter(ScriptedProvider([answer], repeat=True)).evaluate(prompt, session=session)
    return seen[0]


def test_bound_parameters_reach_the_model() -> None:
    section = MarkdownSection[Topic]("Task", template="Write about ${name}.")
    template = PromptTemplate(ns="t", key="k", sections=[section])
    text, _ = seen_by(Prompt(template).bind(Topic("kelp")), Session())
    assert "Write about kelp." in text


def test_a_section_that_the_session_disables_offers_neither_text_nor_tools() -> None:
    """Whether it is there is asked of the session as it is when the evaluation begins."""

    def is_granted(*, session: Session) -> bool:
        newest = session[Permit].latest()
        return newest is not None and newest.granted

    armed = MarkdownSection("Armed", template="You may fire.", enabled=is_granted, tools=[fire])
    prompt = Prompt(
        ns="t", key="k", sections=[MarkdownSection("Task", template="Look.", tools=[look]), armed]
    )
    session = Session()
    text, tools = seen_by(prompt, session)
    assert ("You may fire." in text, tools) == (False, ["look"])
    session.dispatch(Permit(True))
    text, tools = seen_by(prompt, session)
    assert ("You may fire." in text, tools) == (True, ["look", "fire"])


def test_a_tool_of_a_disabled_section_cannot_be_run_either() -> None:
    """A model that asks for it all the same is told that there is none."""
    off = MarkdownSection("Off", template="x", enabled=lambda: False, tools=[fire])
    prompt = Prompt(ns="t", key="k", sections=[MarkdownSection("Task", template="Look.", tools=[look]), off])
    session = Session()
    ModelAdapter(ScriptedProvider([Answer("", [("fire", {})]), "ok"])).evaluate(prompt, session=session)
    (answer,) = told(session)
    assert "fired" not in answer
    assert "fire" in answer


def test_visibility_follows_the_session() -> None:
    """A section shows its summary until the session says otherwise."""

    def when_granted(*, session: Session) -> SectionVisibility:
        granted = session[Permit].latest() is not None
        return SectionVisibility.FULL if granted else SectionVisibility.SUMMARY

    section = MarkdownSection("More", template="All of it.", summary="In short.", visibility=when_granted)
    prompt = Prompt(ns="t", key="k", sections=[section])
    session = Session()
    text, tools = seen_by(prompt, session)
    assert ("All of it." in text, "In short." in text, tools) == (False, True, ["read_section"])
    session.dispatch(Permit(True))
    text, tools = seen_by(prompt, session)
    assert ("All of it." in text, "In short." in text, tools) == (True, False, [])


def test_the_rules_of_a_section_are_enforced() -> None:
    """A call against them is refused and told; after what they ask for, the same call is run."""
    rule = SequentialDependencyPolicy({"fire": frozenset({"look"})})
    section = MarkdownSection("Task", template="Fire.", tools=[look, fire], policies=[rule])
    prompt = Prompt(ns="t", key="k", sections=[section])
    script = [Answer("", [("fire", {})]), Answer("", [("look", {})]), Answer("", [("fire", {})]), "ok"]
    session = Session()
    ModelAdapter(ScriptedProvider(script)).evaluate(prompt, session=session)
    refused, *rest = told(session)
    assert "look" in refused
    assert rest == ["seen", "fired"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_resources_of_a_section_are_closed_however_the_evaluation_ends(fails: bool) -> None:
    class Probe:
        closed = False

        def close(self) -> None:
            self.closed = True

    made: list[Probe] = []

    def provide(_: object) -> Probe:
        made.append(Probe())
        return made[-1]

    @tool(effects="none")
    def ask(*, context: Any) -> str:
        """Ask the probe."""
        return f"closed: {context.resources.get(Probe).closed}"

    class Probing(MarkdownSection):
        def resources(self) -> ResourceRegistry:
            return ResourceRegistry.of(Binding(Probe, provide))

    prompt = Prompt(ns="t", key="k", sections=[Probing("Task", template="Ask.", tools=[ask])])
    end = Answer("", error=RuntimeError("boom")) if fails else "ok"
    session = Session()
    adapter = ModelAdapter(ScriptedProvider([Answer("", [("ask", {})]), end]))
    if fails:
        with pytest.raises(RuntimeError, match="boom"):
            adapter.evaluate(prompt, session=session)
    else:
        adapter.evaluate(prompt, session=session)
    assert told(session) == ["closed: False"]
    assert [each.closed for each in made] == [True]


def test_a_list_is_an_output_and_each_of_it_goes_to_its_slice() -> None:
    prompt = Prompt[list[Fact]](ns="t", key="k", sections=[MarkdownSection("Task", template="Facts.")])
    session = Session()
    script = ScriptedProvider(['{"items": [{"text": "a"}, {"text": 2}]}', '[{"text": "a"}, {"text": "b"}]'])
    response = ModelAdapter(script).evaluate(prompt, session=session)
    assert response.output == [Fact("a"), Fact("b")]
    assert list(session[Fact].all()) == [Fact("a"), Fact("b")]


def test_extra_keys_are_an_error_unless_the_prompt_allows_them() -> None:
    answer = '{"text": "a", "mood": "good"}'

    def ask(allowed: bool) -> Fact | None:
        sections = [MarkdownSection("Task", template="A fact.")]
        template = PromptTemplate[Fact](ns="t", key="k", sections=sections, allow_extra_keys=allowed)
        adapter = ModelAdapter(ScriptedProvider([answer], repeat=True))
        return adapter.evaluate(Prompt(template), session=Session()).output

    assert ask(True) == Fact("a")
    with pytest.raises(OutputParseError, match="mood"):
        ask(False)


def test_a_conversation_is_resumed_with_its_own_prompt_alone() -> None:
    """Another key is another prompt; the same prompt goes on, and the mistake has changed nothing."""

    def prompt(key: str) -> Prompt[str]:
        return Prompt(ns="t", key=key, sections=[MarkdownSection("Task", template="Go.")])

    session = Session()
    broken = ModelAdapter(ScriptedProvider([Answer("", error=RuntimeError("boom"))]))
    with pytest.raises(RuntimeError, match="boom"):
        broken.evaluate(prompt("one"), session=session)
    before = len(list(session.events()))
    adapter = ModelAdapter(ScriptedProvider(["ok"]))
    with pytest.raises(PromptMismatch):
        adapter.evaluate(prompt("two"), session=session, resume=True)
    assert len(list(session.events())) == before
    assert adapter.evaluate(prompt("one"), session=session, resume=True).text == "ok"


SMALL = '''
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
agent = Agent("adder", instructions="You add.", tools=[add])
run = agent.run("What is 1 + 2?", provider=provider)
'''


def test_an_agent_with_a_tool_takes_five_lines() -> None:
    """It is a prompt like any other, with a section that has the tool, and it runs."""
    assert len(SMALL.strip().splitlines()) == 5
    names: dict[str, Any] = {
        "Agent": Agent,
        "provider": ScriptedProvider([Answer("", [("add", {"a": 1, "b": 2})]), "3"]),
    }
    exec(SMALL, names)  # the text is what is promised, so it is the text that runs
    run, agent = names["run"], names["agent"]
    assert (run.output, [each.content for each in run.messages if each.role == "tool"]) == ("3", ["3"])
    rendered = agent.prompt.render()
    assert [each.name for each in rendered.tools] == ["add"]
    assert "You add." in rendered.text
