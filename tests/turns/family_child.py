"""Eight children of one run, each of which would spend 100 USD, in a process that is killed among them.

The children's conversations are in sessions of their own. Their ledger is the root's, or, as if each lived in
another process, their own.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from uuid import UUID

import anyio

from treenail import Agent, Limits, tool
from treenail.containment import ChainMetadata, ExecutionContext
from treenail.log.sqlite import SqliteLog
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import ExecutionState, Session
from treenail.turns import InnerLoop, TurnStarted, contain
from treenail.turns.ledger import ledger_of

PRICE = 0.03
CHILDREN = 8
ROOT = UUID(int=1)
LIMITS = Limits(max_cost_usd=1.0)


@tool(effects="none")
def ponder() -> str:
    """Think about it."""
    return "hm"


class Counting(ScriptedProvider):
    """Writes a line for each call that is really made; the process dies in one, with others under way."""

    calls = 0

    def __init__(self, tally: Path, die_at: int) -> None:
        super().__init__([Answer("hm", [("ponder", {})], cost_usd=PRICE)], repeat=True)
        self._tally = tally
        self._die_at = die_at

    async def stream(self, request):
        with self._tally.open("a") as tally:
            tally.write("call\n")
        Counting.calls += 1
        mine = Counting.calls
        # Everybody who can is in the middle of a call by now.
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        if mine == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        async for each in super().stream(request):
            yield each


def opened(log: SqliteLog, number: int) -> Session:
    session_id = UUID(int=number)
    known = {each.session_id for each in log.sessions()}
    if session_id in known:
        return Session.open(log, session_id)
    return Session(log=log, session_id=session_id)


async def live(session: Session, containment: ExecutionContext, provider: Counting, endings: list) -> None:
    agent = Agent("child", tools=(ponder,), max_iterations=5_000)
    loop = InnerLoop(
        ExecutionState(session), provider, agent.prompt, containment=containment, max_iterations=5_000
    )
    result = await (loop.run("spend") if session[TurnStarted].latest() is None else loop.resume())
    endings.append(result.error_kind)


async def main(directory: Path, die_at: int, kept: str) -> None:
    log = SqliteLog(directory / "runs.db")
    root = opened(log, 1)
    sessions = [opened(log, number) for number in range(2, 2 + CHILDREN)]
    provider = Counting(directory / "tally.txt", die_at)
    endings: list = []
    if kept == "root":
        run = contain(root, LIMITS)
        chains = [
            run.spawn_child(metadata=ChainMetadata(str(each.session_id), str(each.session_id)))
            for each in sessions
        ]
    else:
        # As in another process: a child that knows the ids above it, and an equal share of what is left.
        also = [event for each in sessions for event in ledger_of(each)]
        run = contain(root, LIMITS, also=also)
        left = run.remaining_usd or 0.0
        chains = []
        for each in sessions:
            spent = contain(each, Limits(), above=(str(ROOT),)).get_snapshot().cost_usd_accumulated
            share = spent + left / CHILDREN
            chains.append(contain(each, Limits(max_cost_usd=max(share, 1e-9)), above=(str(ROOT),)))
    async with anyio.create_task_group() as tasks:
        for session, chain in zip(sessions, chains, strict=True):
            tasks.start_soon(live, session, chain, provider, endings)
    print(*sorted(set(endings)), len(endings))


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
