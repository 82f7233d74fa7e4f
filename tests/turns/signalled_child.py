"""A run that says over a socket when it is at work, and then works until a signal ends it."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

import anyio

from treenail import Agent, Limits, tool
from treenail.providers import Stopped, TextDelta, ToolCallRequested
from treenail.tools import ToolCall

AT_WORK, DIRECTORY, PORT = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])


class Model:
    """Answers with one tool call, or hangs in the middle of its answer with a connection open."""

    name = "model"
    model = "a-model"

    def estimate_usd(self, request):
        return 0.01

    async def stream(self, request):
        if AT_WORK == "model":
            async with await anyio.connect_tcp("127.0.0.1", PORT) as connection:
                yield TextDelta("half")
                await connection.send(b"at work")
                await connection.receive()
        yield ToolCallRequested(ToolCall("call", AT_WORK, {}))
        yield Stopped("tools")


@tool(effects="workspace")
def sync_tool(*, context) -> str:
    """Write a file, and then listen to nobody."""
    context.filesystem.write("dirty.txt", "x")
    with socket.create_connection(("127.0.0.1", PORT)) as connection:
        connection.sendall(b"at work")
        threading.Event().wait()
    return "never"


@tool(effects="workspace")
async def async_tool(*, context) -> str:
    """Write a file, and then hang."""
    context.filesystem.write("dirty.txt", "x")
    async with await anyio.connect_tcp("127.0.0.1", PORT) as connection:
        await connection.send(b"at work")
        await anyio.sleep_forever()
    return "never"


if __name__ == "__main__":
    Agent("signalled", tools=(sync_tool, async_tool)).run(
        "go",
        provider=Model(),
        workspace=DIRECTORY / "work",
        store=DIRECTORY / "runs.db",
        limits=Limits(max_cost_usd=1.0, max_steps=10, timeout=600.0),
    )
