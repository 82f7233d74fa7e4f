"""An agent knows its types: what the caller passes in, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from treenail import Agent, Limits, ToolContext, TurnState, tool
from treenail.agent import AgentContext, toolset
from treenail.errors import PromptValidationError, RunNotCompletedError, UsageError
from treenail.providers import ModelRequest
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.subagents import with_subagents


@dataclass
class Shop:
    name: str
    secret: str = "hunter2-of-the-shop"


class Invoice(BaseModel):
    total: int


@dataclass(frozen=True)
class Refusal:
    why: str


class Row(TypedDict):
    sku: str
    count: int


def says(context: AgentContext[Shop]) -> str:
    """Sell things."""
    return f"You sell at {context.deps.name} for $5. The task: {context.task}"


@tool(effects="none")
def where(context: ToolContext[Shop]) -> str:
    """Say where we are."""
    return context.deps.name


def results(run: Any) -> list[str]:
    return [each.content for each in run.messages if each.role == "tool"]


# --- output ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "answer", "output"),
    [
        (int, '{"value": 3}', 3),
        (int, "3", 3),
        (bool, 'Sure.\n```json\n{"value": true}\n```', True),
        (dict[str, int], '{"value": {"rope": 3}}', {"rope": 3}),
        (list[int], '{"items": [1, 2]}', [1, 2]),
        (tuple[int, str], '{"value": [1, "x"]}', (1, "x")),
        (Literal["yes", "no"], '{"value": "no"}', "no"),
        (Row, '{"sku": "rope", "count": 1}', {"sku": "rope", "count": 1}),
        (Invoice | Refusal, '{"value": {"total": 7}}', Invoice(total=7)),
        (Invoice | Refusal, '{"value": {"why": "no rope"}}', Refusal("no rope")),
        (Invoice | None, '{"value": null}', None),
    ],
    ids=str,
)
def test_the_output_may_be_any_type_that_pydantic_can_describe(
    kind: Any, answer: str, output: object, tmp_path: Path
) -> None:
    agent, store = Agent("seller", output_type=kind), tmp_path / "runs.db"
    with agent.run("go", provider=ScriptedProvider([answer]), store=store) as run:
        assert run.output == output
    with agent.resume(store, run.id, provider=ScriptedProvider([])) as again:
        assert again.output == output


def test_an_answer_that_does_not_fit_goes_back_with_the_shape_that_is_wanted() -> None:
    script = ScriptedProvider(['{"value": "three"}', '{"value": 3}'])
    with Agent("seller", output_type=int).run("go", provider=script) as run:
        assert run.output == 3
        (told,) = [each.content for each in run.messages if "<invalid-answer>" in each.content]
        assert 'one JSON object {"value": ...}' in told


def test_subscripting_an_agent_declares_its_types() -> None:
    """`Agent[Shop, int]("seller")` would otherwise promise an int to a type checker and return text."""
    agent = Agent[Shop, int]("seller")
    assert (agent.deps_type, agent.output_type) == (Shop, int)
    with agent.run("go", provider=ScriptedProvider(["3"]), deps=Shop("Kelp")) as run:
        assert run.output == 3


def test_a_type_that_cannot_be_described_is_refused_when_the_prompt_is_made() -> None:
    with pytest.raises(PromptValidationError, match="a type that pydantic can describe"):
        Agent("seller", output_type=type(print)).run("go", provider=ScriptedProvider(["x"]))


def test_a_run_that_is_not_completed_has_no_output_and_says_why() -> None:
    script = ScriptedProvider([Answer(calls=[("where", {})])], repeat=True)
    with Agent("seller", tools=[where]).run(
        "go", provider=script, deps=Shop("Kelp"), limits=Limits(max_steps=3)
    ) as run:
        assert (run.state, run.text) == (TurnState.FAILED, "")
        with pytest.raises(RunNotCompletedError, match=r"is failed \(step_limit_exceeded\)") as refused:
            _ = run.output
    assert refused.value.next_actions == run.next_actions
    assert run.next_actions[0] in str(refused.value)


# --- deps --------------------------------------------------------------------------------------------


def test_tools_and_instructions_are_given_the_deps_and_nothing_stores_them(tmp_path: Path) -> None:
    agent = Agent("seller", instructions=says, tools=[where], deps_type=Shop)
    script = ScriptedProvider([Answer(calls=[("where", {})]), "done"])
    shop, store = Shop("Kelp"), tmp_path / "runs.db"
    with agent.run("sell", provider=script, deps=shop, store=store, workspace=tmp_path) as run:
        assert results(run) == ["Kelp"]
        assert "You sell at Kelp for $5. The task: sell" in run.messages[0].content
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or shop.secret.encode() not in path.read_bytes()


@pytest.mark.parametrize("deps", [None, "Kelp"])
def test_missing_or_wrong_deps_are_refused_before_anything_is_stored(deps: Any, tmp_path: Path) -> None:
    agent = Agent("seller", tools=[where], deps_type=Shop)
    with pytest.raises(UsageError, match="deps of the type Shop") as refused:
        agent.run("go", provider=ScriptedProvider(["x"]), deps=deps, store=tmp_path / "runs.db")
    assert "Kelp" not in str(refused.value), "deps may hold secrets"
    assert not (tmp_path / "runs.db").exists()


def test_subagents_have_the_deps_of_their_parent() -> None:
    child = Agent("child", instructions=says, tools=[where])
    parent = Agent("parent", deps_type=Shop, extensions=[with_subagents([child])])
    seen: list[str] = []

    def answer(request: ModelRequest) -> Answer | str:
        said = request.items[0].text
        if "You sell at" in said:
            seen.append(said)
            return "sold" if request.answers_so_far else Answer(calls=[("where", {})])
        if request.answers_so_far == 0:
            return Answer(calls=[("spawn_agent", {"agent": "child", "task": "sell a rope"})])
        if request.answers_so_far == 1:
            return Answer(calls=[("wait_agent", {})])
        return "done"

    with parent.run("go", provider=ScriptedProvider([answer], repeat=True), deps=Shop("Kelp")) as run:
        assert run.output == "done"
    assert "You sell at Kelp for $5. The task: sell a rope" in seen[0]


# --- what depends on the run -------------------------------------------------------------------------


async def test_instructions_may_be_made_by_an_async_function() -> None:
    async def made(context: AgentContext[Shop]) -> str:
        return f"You sell at {context.deps.name}."

    run = await Agent("seller", instructions=made).arun(
        "go", provider=ScriptedProvider(["x"]), deps=Shop("A")
    )
    with run:
        assert "You sell at A." in run.messages[0].content


def test_instructions_are_made_once_for_a_run(tmp_path: Path) -> None:
    """A later turn and a resume send the same bytes, so that what the provider has cached stays valid."""
    agent, store, script = (
        Agent("seller", instructions=says),
        tmp_path / "runs.db",
        ScriptedProvider(["a", "b"]),
    )
    with agent.run("first", provider=script, deps=Shop("Kelp"), store=store) as run:
        first = run.messages[0].content
    with agent.run("second", provider=script, deps=Shop("Moss"), store=store, run_id=run.id) as later:
        system = [each.content for each in later.messages if each.role == "system"]
    assert system == [first, first]


def test_instructions_that_are_not_text_are_refused() -> None:
    with pytest.raises(UsageError, match="instructions must be text, or a function"):
        Agent("seller", instructions=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="must return text, not 3"):
        Agent("seller", instructions=lambda context: 3).run("go", provider=ScriptedProvider(["x"]))  # type: ignore[arg-type,return-value]


def test_a_toolset_chooses_the_tools_of_each_run() -> None:
    offered: list[list[str]] = []

    def answer(request: ModelRequest) -> str:
        offered.append([each.name for each in request.tools])
        return "done"

    def plain(sku: str) -> str:
        """Look something up."""
        return sku

    async def chosen(context: AgentContext[Shop]) -> list[Any]:
        return [plain] if context.deps.name == "Kelp" else []

    agent = Agent("seller", tools=[where, toolset(chosen)])
    for name in ("Kelp", "Moss"):
        agent.run("go", provider=ScriptedProvider([answer]), deps=Shop(name)).close()
    assert offered == [["where", "plain"], ["where"]]


def test_a_toolset_cannot_bring_a_name_that_is_taken() -> None:
    agent = Agent("seller", tools=[where, toolset(lambda context: [where])])
    with pytest.raises(PromptValidationError, match="where"):
        agent.run("go", provider=ScriptedProvider(["x"]), deps=Shop("Kelp"))


# --- what can be a tool ------------------------------------------------------------------------------


class Counter:
    """Its methods are tools."""

    def __init__(self, start: int) -> None:
        self.start = start

    def plus(self, number: int, *, context: ToolContext[Shop]) -> str:
        """Add."""
        return f"{context.deps.name} {self.start + number}"

    async def aplus(self, number: int) -> int:
        """Add, without haste."""
        return self.start + number

    def up_to(self, number: int):
        """Count."""
        yield from range(self.start, number)

    async def aup_to(self, number: int, ctx: ToolContext[Shop]):
        """Count, without haste."""
        for each in range(self.start, number):
            yield f"{ctx.deps.name} {each}"

    @classmethod
    def kind(cls) -> str:
        """Say what it is."""
        return cls.__name__

    @staticmethod
    def twice(number: int) -> int:
        """Double."""
        return 2 * number


def times(factor: int, number: int, *, context: ToolContext[Shop]) -> str:
    """Multiply."""
    return f"{context.deps.name} {factor * number}"


def test_methods_partials_and_generators_are_tools_with_an_injected_context() -> None:
    counter = Counter(3)
    kinds = (counter.plus, counter.aplus, counter.up_to, counter.aup_to, Counter.kind, Counter.twice)
    tools = [*kinds, tool(name="triple")(partial(times, 3)), partial(times, factor=4)]
    calls = [
        ("plus", {"number": 4}),
        ("aplus", {"number": 4}),
        ("up_to", {"number": 6}),
        ("aup_to", {"number": 5}),
        ("kind", {}),
        ("twice", {"number": 4}),
        ("triple", {"number": 4}),
        ("times", {"number": 4}),
    ]
    script = ScriptedProvider([Answer(calls=calls), "done"])
    with Agent("counter", tools=tools).run("go", provider=script, deps=Shop("Kelp")) as run:
        assert results(run) == [
            "Kelp 7", "7", "[3, 4, 5]", '["Kelp 3", "Kelp 4"]', "Counter", "8", "Kelp 12", "Kelp 16",
        ]  # fmt: skip


def test_the_model_is_not_asked_for_the_context() -> None:
    (made,) = Agent("counter", tools=[Counter(3).aup_to]).own_tools
    assert list(made.parameters_schema["properties"]) == ["number"]
