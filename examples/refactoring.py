"""A refactoring agent: it renames a symbol everywhere, or nowhere."""

from __future__ import annotations

import tempfile
from pathlib import Path

from treenail import Agent, Limits, ToolContext, tool
from treenail.providers.scripted import Answer, ScriptedProvider


@tool(effects="workspace")
def rename(old: str, new: str, context: ToolContext) -> str:
    """Rename a symbol in every file."""
    changed = 0
    for match in context.filesystem.glob("**/*.py"):
        text = context.filesystem.read(match.path, limit=-1).content
        if "frozen" in text and old in text:
            raise RuntimeError(f"{match.path} must not be touched")  # every file is as it was
        if old in text:
            context.filesystem.write(match.path, text.replace(old, new))
            changed += 1
    return f"{changed} files"


agent = Agent("refactorer", instructions="You rename things safely.", tools=[rename])
model = ScriptedProvider(
    [
        Answer(calls=[("rename", {"old": "totl", "new": "total"})]),
        Answer(calls=[("rename", {"old": "cst", "new": "cost"})]),
        "`cst` is `cost` now. `totl` stays: it is used in a frozen file.",
    ]
)


def main() -> None:
    """Run it in a scratch directory, and show what it changed."""
    with tempfile.TemporaryDirectory() as scratch:
        shop = Path(scratch) / "shop"
        shop.mkdir()
        (shop / "a.py").write_text("totl = cst = 1\n")
        (shop / "b.py").write_text("totl = 2  # frozen\n")
        limits = Limits(max_cost_usd=0.50, max_steps=40)
        with agent.run(
            "Rename totl and cst.",
            provider=model,
            workspace=shop,
            store=Path(scratch) / "runs.db",
            limits=limits,
        ) as run:
            print(run.output)
            for call in run.tool_calls:
                print(call.name, "kept" if call.success else "undone")
                print(call.diff().text)
        assert (shop / "a.py").read_text() == "totl = cost = 1\n"


if __name__ == "__main__":
    main()
