"""A run with eight subagents, all of which would go on for ever, in a process that dies in a model call."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from uuid import UUID

import anyio

from treenail import Agent, Limits, tool
from treenail.log.sqlite import SqliteLog
from treenail.providers import ModelEvent, ModelRequest
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.subagents import SubagentLimits, with_subagents

PRICE = 0.03
CHILDREN = 8


@tool(effects="none")
def ponder() -> str:
    """Think about it."""
    return "hm"


class Model(ScriptedProvider):
    """Writes a line for each call that is really made; the process dies in one, with others under way."""

    calls = 0

    def __init__(self, tally: Path, die_at: int) -> None:
        super().__init__([])
        self._tally = tally
        self._die_at = die_at

    def _next(self, request: ModelRequest) -> Answer:
        if "You spend" in request.items[0].text:
            return Answer("hm", [("ponder", {})], cost_usd=PRICE)
        if request.answers_so_far == 0:
            spawned = [
                ("spawn_agent", {"agent": "spender", "task": f"spend {each}"}) for each in range(CHILDREN)
            ]
            return Answer("", spawned, cost_usd=PRICE)
        return Answer("", [("wait_agent", {})], cost_usd=PRICE)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        with self._tally.open("a") as tally:
            tally.write("call\n")
        Model.calls += 1
        mine = Model.calls
        # Everybody who can is in the middle of a call by now.
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        if mine == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        async for each in super().stream(request):
            yield each


SPENDER = Agent("spender", "You spend.", tools=(ponder,), max_iterations=5_000)
BOSS = Agent(
    "boss",
    "You hand work on.",
    max_iterations=5_000,
    extensions=(with_subagents([SPENDER], limits=SubagentLimits(max_threads=CHILDREN)),),
)


def boss_in(store: Path) -> UUID:
    with SqliteLog(store) as log:
        return next(each.session_id for each in log.sessions() if dict(each.tags).get("agent") == "boss")


def main(directory: Path, die_at: int) -> None:
    store = directory / "runs.db"
    model, limits = Model(directory / "tally.txt", die_at), Limits(max_cost_usd=1.0)
    if store.exists():
        run = BOSS.resume(store, boss_in(store), provider=model, limits=limits)
    else:
        run = BOSS.run("go", provider=model, limits=limits, store=store)
    with run:
        print(run.state.value, run.result.error_kind)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
