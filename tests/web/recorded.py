"""Runs to look at: one of each ending, and one of each thing that a run can have in it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
from tests import forks

from treenail import Agent, Limits, tool
from treenail.containment import CancellationToken
from treenail.conversation import CompactionSettings
from treenail.errors import ModelCallError
from treenail.history import find_run, fork_run, undo_run
from treenail.judges import TaskCompletionContext, TaskCompletionResult
from treenail.log import store_named
from treenail.providers import ModelRequest
from treenail.providers.scripted import Answer, Scripted, ScriptedProvider
from treenail.state import TokenUsage
from treenail.subagents import with_subagents
from treenail.tools import FILE_TOOLS, PermissionMode, Permissions, ToolContext
from treenail.turns import RetryPolicy
from treenail.workflows import StepSpec, WorkflowSpec, run_workflow

MODEL = "claude-sonnet-4-5"
USAGE = TokenUsage(input_tokens=4_200, output_tokens=180, cached_tokens=3_600)

FILES = {
    "shop/cart.py": (
        "from decimal import Decimal\n\n\n"
        "class Cart:\n"
        '    """What a customer wants to buy."""\n\n'
        "    def __init__(self):\n"
        "        self.lines = []\n\n"
        "    def add(self, name, price, count=1):\n"
        "        self.lines.append((name, price, count))\n\n"
        "    def total(self):\n"
        "        return sum(price for name, price, count in self.lines)\n"
    ),
    "shop/tax.py": "RATE = 0.19\n\n\ndef with_tax(amount):\n    return amount * (1 + RATE)\n",
    "tests/test_cart.py": (
        "from shop.cart import Cart\n\n\n"
        "def test_total():\n"
        "    cart = Cart()\n"
        '    cart.add("tea", 3)\n'
        "    assert cart.total() == 3\n"
    ),
    "README.md": "# Shop\n\nA small shop.\n",
}


@tool(effects="workspace")
def move_money(old: str, new: str, *, context: ToolContext) -> str:
    """Replace a type in every file, and fail in the middle."""
    for match in context.filesystem.glob("**/*.py"):
        text = context.filesystem.read(match.path).content
        context.filesystem.write(match.path, text.replace(old, new) + "# touched\n")
    raise RuntimeError("shop/tax.py mixes floats and decimals; nothing was replaced")


@tool(effects="workspace")
def die(*, context: ToolContext) -> str:
    """Write half a file, and have the process killed."""
    context.filesystem.write("half.txt", "half of it")
    if not context.is_resume:
        os.kill(os.getpid(), signal.SIGKILL)
    return "written"


@tool(effects="none")
def look(n: int) -> str:
    """Look at something."""
    return f"seen {n}\n" * 3


@tool(effects="none")
async def wait() -> str:
    """Wait for ever."""
    await anyio.sleep_forever()
    return ""


@tool(effects="none")
def read_much() -> str:
    """Read a long text."""
    return "a line of a long text\n" * 150


class Checks:
    """Sends the agent back once."""

    name = "the tests must pass"

    def __init__(self) -> None:
        self.asked = 0

    def check(self, context: TaskCompletionContext) -> TaskCompletionResult:
        self.asked += 1
        if self.asked == 1:
            return TaskCompletionResult.incomplete("tests/test_cart.py fails: expected 6, got 3")
        return TaskCompletionResult.ok("2 passed")


def said(text: str, *calls: Any, cost_usd: float = 0.0131, **more: Any) -> Answer:
    return Answer(text, calls, usage=USAGE, cost_usd=cost_usd, **more)


def edit(path: str, old: str, new: str) -> tuple[str, dict[str, str]]:
    return ("edit_file", {"path": path, "old_text": old, "new_text": new})


FIX_CART: Sequence[Scripted] = (
    said(
        "I look at the cart first.", ("read_file", {"path": "shop/cart.py"}), ("glob", {"pattern": "**/*.py"})
    ),
    said("It ignores how many there are.", ("move_money", {"old": "price", "new": "Decimal"})),
    said(
        "That would touch too much. I change the one line.",
        edit(
            "shop/cart.py",
            "        return sum(price for name, price, count in self.lines)\n",
            "        return sum(\n            (price * count for name, price, count in self.lines),\n"
            "            start=Decimal(0),\n        )\n",
        ),
    ),
    said("The cart counts now."),
    said(
        "A test has to show it.",
        edit(
            "tests/test_cart.py",
            '"tea", 3)\n    assert cart.total() == 3',
            '"tea", 3, 2)\n    assert cart.total() == 6',
        ),
        ("write_file", {"path": "CHANGES.md", "content": "- A cart's total counts how many there are.\n"}),
    ),
    said("Done: the total counts how many there are of each, and a test shows it."),
)


class Recorded:
    """A store with its runs, by name."""

    def __init__(self, directory: Path, store: str | Path | None = None) -> None:
        self.directory = directory
        self.store = directory / "runs.db" if store is None else store
        self.runs: dict[str, UUID] = {}

    def place(self, name: str) -> Path:
        """Make a project of its own for a run."""
        top = self.directory / name
        for path, text in FILES.items():
            (top / path).parent.mkdir(parents=True, exist_ok=True)
            (top / path).write_text(text)
        return top

    def run(
        self,
        name: str,
        task: str,
        script: Sequence[Scripted] | ScriptedProvider,
        *,
        agent: Agent | None = None,
        limits: Limits | None = None,
        **options: Any,
    ) -> UUID:
        """Record a run."""
        made = agent or Agent(
            "engineer", "You keep a shop in order.", tools=(*FILE_TOOLS, move_money, look, wait)
        )
        provider = script if isinstance(script, ScriptedProvider) else ScriptedProvider(script, model=MODEL)
        with made.run(
            task,
            provider=provider,
            workspace=self.place(name),
            store=self.store,
            limits=limits or Limits(max_cost_usd=0.5, max_steps=60),
            **options,
        ) as run:
            self.runs[name] = run.id
            return run.id

    def all(self) -> Recorded:
        """Record one run of each ending, and of each kind of thing."""
        self.completed()
        self.run("failed", "Ask a server that is down", [Answer(error=DOWN)])
        self.run("cut_off", "Ask a server that stops in the middle", [said("The first half of", error=LOST)])
        self.held()
        self.run(
            "over_budget",
            "Think it over",
            ScriptedProvider([said("Hm.", ("look", {"n": 1}), cost_usd=0.11)], model=MODEL, repeat=True),
        )
        self.interrupted()
        self.run("timed_out", "Take your time", [said("I wait.", ("wait", {}))], limits=Limits(timeout=0.3))
        self.run("retried", "Ask a server that is busy", _Busy([], model=MODEL), agent=RETRYING)
        self.crashed()
        self.undone()
        self.forked()
        self.subagents()
        self.workflow()
        self.compacted()
        return self

    def completed(self) -> None:
        agent = Agent(
            "engineer",
            "You keep a shop in order.",
            tools=(*FILE_TOOLS, move_money, look),
            completion=Checks(),
        )
        self.run(
            "completed", "Make the total of a cart count how many there are of each", FIX_CART, agent=agent
        )

    def held(self) -> None:
        ask = Permissions(PermissionMode.ASK)
        script = [
            said(
                "I write it down.",
                ("write_file", {"path": "README.md", "content": "# Shop\n\nA small shop that counts.\n"}),
            ),
            said("Written."),
        ]
        self.run("held", "Say in the README that the shop counts", script, permissions=ask)

    def interrupted(self) -> None:
        token = CancellationToken()

        def stop(_: ModelRequest) -> Answer:
            token.cancel("a person pressed Ctrl-C")
            return said("I was about to say", ("look", {"n": 1}))

        self.run(
            "interrupted",
            "Look around until somebody stops you",
            [said("", ("look", {"n": 1})), stop],
            cancellation=token,
        )

    def crashed(self) -> None:
        agent = Agent("engineer", "You keep a shop in order.", tools=(*FILE_TOOLS, die))
        script = [said("Now the dangerous part.", ("die", {})), said("Done.")]
        try:
            forks.in_child(lambda: self.run("crashed", "Survive being killed", script, agent=agent))
        except forks.ProcessKilled:
            pass
        self.runs["crashed"] = find_run(store_named(self.store), "@last")

    def undone(self) -> None:
        script = [said("", edit("shop/tax.py", "0.19", "0.07")), said("The tax is lower.")]
        run_id = self.run("undone", "Lower the tax", script)
        undo_run(store_named(self.store), run_id, by="ada")

    def forked(self) -> None:
        made, _ = fork_run(
            store_named(self.store),
            self.runs["completed"],
            self.directory / "another-way",
            "call_3_1",
            by="ada",
        )
        self.runs["forked"] = made

    def subagents(self) -> None:
        worker = Agent("worker", "You take notes.", tools=FILE_TOOLS)
        boss = Agent("lead", "You hand work on.", tools=FILE_TOOLS, extensions=(with_subagents([worker]),))
        self.run("subagents", "Have somebody write the notes", _Team([], model=MODEL), agent=boss)

    def workflow(self) -> None:
        spec = WorkflowSpec(
            id="release",
            steps=(
                StepSpec(id="plan", task="plan it"),
                StepSpec(id="code", task="code it", depends_on=("plan",)),
                StepSpec(id="docs", task="docs it", depends_on=("plan",)),
                StepSpec(id="ship", task="ship it", depends_on=("code", "docs")),
            ),
        )
        agent = Agent("agent", "You work.", tools=FILE_TOOLS)
        run_workflow(
            spec,
            [agent],
            provider=_Steps([], model=MODEL),
            workspace=self.place("workflow"),
            store=self.store,
        )
        self.runs["workflow"] = find_run(store_named(self.store), "@last")

    def compacted(self) -> None:
        settings = CompactionSettings(window_tokens=6_000, tails=(8, 4, 2))
        agent = Agent("engineer", "You keep a shop in order.", tools=(read_much,), compaction=settings)
        usage = TokenUsage(output_tokens=20)
        script = [Answer("", [("read_much", {})], usage=usage, cost_usd=0.01) for _ in range(9)]
        self.run("compacted", "Read until it is too much", [*script, said("Enough read.")], agent=agent)


class _Team(ScriptedProvider):
    """The lead hands the work on; the worker does it."""

    def _next(self, request: ModelRequest) -> Answer:
        if "You take notes" in request.items[0].text:
            if request.answers_so_far:
                return said("The notes are written.")
            return said("", ("write_file", {"path": "NOTES.md", "content": "- the cart counts\n"}))
        spawn = (
            "spawn_agent",
            {"agent": "worker", "task": "Write notes about the cart", "workspace": "isolated"},
        )
        return [
            said("Somebody else can do this.", spawn),
            said("", ("wait_agent", {})),
            said("", ("apply_agent", {"id": "worker-1"})),
            said("The notes are in NOTES.md."),
        ][request.answers_so_far]


class _Steps(ScriptedProvider):
    """Every step writes a file named after it; `docs` fails."""

    def estimate_usd(self, request: ModelRequest) -> float | None:
        return 0.0

    def _next(self, request: ModelRequest) -> Answer:
        step = next(each.text for each in request.items if each.role == "user").split()[0]
        if not request.answers_so_far:
            return said("", ("write_file", {"path": f"{step}.txt", "content": step}))
        status = "failed" if step == "docs" else "checkpoint_ready"
        return said(json.dumps({"status": status, "summary": f"{step} is done"}))


LOST = ModelCallError("the connection was lost", kind="connection")
DOWN = ModelCallError("the key is not accepted", kind="authentication")
BUSY = ModelCallError("the server is overloaded", kind="transient", retryable=True)


RETRYING = Agent("engineer", "You keep a shop in order.", retry=RetryPolicy(base_s=0.01))


class _Busy(ScriptedProvider):
    """Overloaded twice, then it answers."""

    failures = 2

    def estimate_usd(self, request: ModelRequest) -> float | None:
        return 0.0131

    def _next(self, request: ModelRequest) -> Answer:
        if self.failures:
            self.failures -= 1
            return Answer(error=BUSY)
        return said("At last.")
