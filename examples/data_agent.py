"""A data agent: subagents count in parallel, a judge checks the report, and the answer is a typed value."""

from __future__ import annotations

from dataclasses import dataclass

from treenail import Agent, ToolContext, tool
from treenail.judges import FileOutputChecker
from treenail.providers import ModelRequest
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.subagents import with_subagents


@dataclass
class Warehouse:
    """What the caller has, and passes to every run."""

    sales: dict[str, list[int]]


@dataclass
class Totals:
    """What comes out."""

    totals: dict[str, int]


@tool(effects="none")
def total(region: str, context: ToolContext[Warehouse]) -> int:
    """Add the sales of a region up."""
    return sum(context.deps.sales[region])


@tool(effects="workspace")
def report(text: str, context: ToolContext[Warehouse]) -> str:
    """Write the report."""
    context.filesystem.write("report.md", text)
    return "written"


counter = Agent("counter", instructions="You count one region.", tools=[total])
analyst = Agent(
    "analyst",
    instructions="You hand regions to counters, and write a report.",
    tools=[report],
    output_type=Totals,
    deps_type=Warehouse,
    extensions=[with_subagents([counter])],
    completion=FileOutputChecker(["report.md"]),
)


def play(request: ModelRequest) -> Answer | str:
    """Play the model: a counter, or the analyst."""
    step, system = request.answers_so_far, request.items[0].text
    if "You count" in system:
        region = "north" if "north" in request.items[1].text else "south"
        return Answer(calls=[("total", {"region": region})]) if step == 0 else request.items[-1].text
    spawn = [("spawn_agent", {"agent": "counter", "task": f"Count {each}."}) for each in ("north", "south")]
    totals_json = '{"totals": {"north": 6, "south": 15}}'
    waits = Answer(calls=[("wait_agent", {})])
    writes = Answer(calls=[("report", {"text": "north 6, south 15"})])
    plan: list[Answer | str] = [Answer(calls=spawn), waits, waits, totals_json, writes, totals_json]
    return plan[step]


def main() -> None:
    """Run it, and show what came of it."""
    warehouse = Warehouse({"north": [1, 2, 3], "south": [4, 5, 6]})
    model = ScriptedProvider([play], repeat=True)
    with analyst.run("Report the sales.", provider=model, deps=warehouse) as run:
        print(run.output.totals)
        assert run.output == Totals({"north": 6, "south": 15})


if __name__ == "__main__":
    main()
