"""A program that says what its types are: mypy and pyright, both strict, must agree with every line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, assert_type

from pydantic import BaseModel
from typing_extensions import TypedDict

from treenail import Agent, Run, Tool, ToolContext, tool
from treenail.agent import AgentContext, RunEvent, toolset
from treenail.providers.scripted import ScriptedProvider

MODEL = ScriptedProvider(["done"])


@dataclass
class Shop:
    name: str
    prices: dict[str, int]


class Invoice(BaseModel):
    total: int


class Refusal(BaseModel):
    why: str


class Row(TypedDict):
    sku: str
    count: int


@tool(effects="none")
def price(sku: str, context: ToolContext[Shop]) -> int:
    """Look up a price."""
    return assert_type(context.deps.prices, dict[str, int])[sku]


def instructions(context: AgentContext[Shop]) -> str:
    return f"You sell at {context.deps.name}."


def more_tools(context: AgentContext[Shop]) -> Sequence[Tool[Any, Any]]:
    return [price] if context.deps.prices else []


text = Agent("plain")
assert_type(text, Agent[None, str])
assert_type(text.run("task", provider=MODEL), Run[str])
assert_type(text.run("task", provider=MODEL).output, str)

assert_type(Agent("int", output_type=int).run("task", provider=MODEL).output, int)
assert_type(Agent("mapping", output_type=dict[str, int]).run("task", provider=MODEL).output, dict[str, int])
assert_type(Agent("list", output_type=list[Invoice]).run("task", provider=MODEL).output, list[Invoice])
assert_type(Agent("typed dict", output_type=Row).run("task", provider=MODEL).output, Row)
assert_type(
    Agent("union", output_type=Invoice | Refusal).run("task", provider=MODEL).output, Invoice | Refusal
)
assert_type(
    Agent("literal", output_type=Literal["yes", "no"]).run("task", provider=MODEL).output,
    Literal["yes", "no"],
)

shop = Shop("Kelp", {"rope": 3})
seller = Agent(
    "seller",
    instructions=instructions,
    tools=[price, toolset(more_tools)],
    output_type=Invoice,
    deps_type=Shop,
)
assert_type(seller, Agent[Shop, Invoice])
assert_type(seller.run("Sell a rope.", provider=MODEL, deps=shop).output.total, int)
assert_type(Agent[Shop, Invoice]("seller").run("task", provider=MODEL, deps=shop).output, Invoice)
assert_type(seller.resume("runs.db", "an id", provider=MODEL, deps=shop).output, Invoice)


async def main() -> None:
    run = await seller.arun("Sell a rope.", provider="openai/gpt-5", deps=shop)
    assert_type(run.output, Invoice)


# What is wrong is an error: each of these comments would itself be one if it were not.
seller.run("Sell a rope.", provider=MODEL, deps="Kelp")  # type: ignore[arg-type]
seller.run("Sell a rope.", provider=MODEL, deps=shop).output.sum  # type: ignore[attr-defined]
Agent("seller", instructions=instructions, deps_type=int)  # type: ignore[arg-type]
seller.run(3, provider=MODEL)  # type: ignore[arg-type]


async def streamed() -> None:
    async with seller.stream(
        "Sell a rope.", provider=MODEL, deps=shop, key="order 17", store="runs.db"
    ) as run:
        async for event in run:
            assert_type(event, RunEvent)
        assert_type((await run.aresult()).output, Invoice)


assert_type(seller.start("Sell a rope.", provider=MODEL, deps=shop).result().output, Invoice)
