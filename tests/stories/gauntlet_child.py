"""A run that says over a socket that it is in the middle of something, and then waits for a signal."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

from treenail import Agent, tool
from treenail.providers import Stopped, TextDelta, ToolCallRequested
from treenail.tools import ToolCall


@tool(effects="workspace")
async def write_half(*, context) -> str:
    """Write half of a file, say so, and hang."""
    context.filesystem.write("half.txt", "half")
    await _say_so(int(sys.argv[2]))
    return "never"


async def _say_so(port: int) -> None:
    async with await anyio.connect_tcp("127.0.0.1", port) as connection:
        await connection.send(b"at work")
        await connection.receive()


class Model:
    """Says half of its answer, or asks for the tool that hangs."""

    name = "model"
    model = "a-model"

    def estimate_usd(self, request):
        return None

    async def stream(self, request):
        yield TextDelta("half an ")
        if sys.argv[3] == "model":
            await _say_so(int(sys.argv[2]))
        yield ToolCallRequested(ToolCall("call", "write_half", {}))
        yield Stopped("tools")


AGENT = Agent("gauntlet", tools=(write_half,))

if __name__ == "__main__":
    PLACE = Path(sys.argv[1])
    AGENT.run("Do it", provider=Model(), workspace=PLACE / "work", store=PLACE / "runs.db")
