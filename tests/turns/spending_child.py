"""A run that would spend 100 USD, in a process that is killed after a number of model calls."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from uuid import UUID

from treenail import Agent, Limits, tool
from treenail.providers.scripted import Answer, ScriptedProvider

PRICE = 0.07


@tool(effects="none")
def ponder() -> str:
    """Think about it."""
    return "hm"


SPENDER = Agent("spender", tools=(ponder,), max_iterations=2_000)


class CountingProvider(ScriptedProvider):
    """Writes a line for each call that is really made, and dies in the middle of a given one."""

    def __init__(self, tally: Path, die_at: int) -> None:
        super().__init__([Answer("hm", [("ponder", {})], cost_usd=PRICE)], repeat=True)
        self._tally = tally
        self._die_at = die_at
        self._calls = 0

    async def stream(self, request):
        with self._tally.open("a") as tally:
            tally.write("call\n")
        self._calls += 1
        if self._calls == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        async for each in super().stream(request):
            yield each


def main(directory: Path, die_at: int, run_id: str | None) -> None:
    provider = CountingProvider(directory / "tally.txt", die_at)
    limits = Limits(max_cost_usd=1.0)
    store = directory / "runs.db"
    if run_id is None:
        run = SPENDER.run("spend", provider=provider, store=store, limits=limits)
    else:
        run = SPENDER.resume(store, UUID(run_id), provider=provider, limits=limits)
    print(run.result.error_kind)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
