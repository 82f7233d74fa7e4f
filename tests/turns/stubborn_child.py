"""A program in which somebody catches his cancellation and goes on: `stubborn_child.py WHO STORE WORK`."""

from __future__ import annotations

import asyncio
import sys

from treenail import Agent, tool
from treenail.judges import (
    Feedback,
    FeedbackContext,
    FeedbackProviderConfig,
    FeedbackTrigger,
    TaskCompletionContext,
    TaskCompletionResult,
)
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.tools import ToolContext

WHO = ""


async def swallow() -> None:
    print("ready", flush=True)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        print("swallowed", flush=True)


@tool(effects="workspace")
async def change(*, context: ToolContext) -> str:
    """Change a file, and finish whatever happens."""
    context.filesystem.write("half.txt", "half")
    if not context.is_resume:
        await swallow()
    return "changed"


@tool
async def fail() -> str:
    """Fail with something else."""
    await swallow()
    raise ValueError("what was that?")


@tool(effects="none")
async def look() -> str:
    """Look, and finish whatever happens."""
    if WHO == "a plain tool":
        await swallow()
    return "seen"


class Checker:
    async def check(self, context: TaskCompletionContext) -> TaskCompletionResult:
        await swallow()
        return TaskCompletionResult.ok()


class Onlooker:
    name = "onlooker"

    def should_run(self, *, context: FeedbackContext) -> bool:
        return True

    async def provide(self, *, context: FeedbackContext) -> Feedback:
        await swallow()
        raise ValueError("nothing to say")


FIRST = {
    "a tool": "change",
    "a plain tool": "look",
    "a tool that fails": "fail",
    "a check": "look",
    "feedback": "look",
}


def agent(who: str) -> Agent:
    watched = FeedbackProviderConfig(Onlooker(), FeedbackTrigger(every_n_calls=1))
    return Agent(
        "stubborn",
        tools=(change, fail, look),
        completion=Checker() if who == "a check" else None,
        feedback=(watched,) if who == "feedback" else (),
    )


def script(who: str) -> list[Answer | str]:
    return [Answer("", [(FIRST[who], {})]), "done"]


if __name__ == "__main__":
    WHO, store, work = sys.argv[1:]
    run = agent(WHO).run("go", provider=ScriptedProvider(script(WHO)), store=store, workspace=work)
    print("ended", run.state.value, flush=True)
