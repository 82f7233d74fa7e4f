"""The process that holds a run: its tool says that it is at work, and then waits for ever."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from treenail import Agent, tool
from treenail.providers.scripted import Answer, ScriptedProvider


@tool
def write_line(text: str, *, context) -> str:
    """Add a line to the notes."""
    context.filesystem.write("notes.txt", text + "\n", mode="append")
    return f"noted {text}"


@tool
def linger(text: str, *, context) -> str:
    """Add a line to the notes, and stay, the first time."""
    context.filesystem.write("notes.txt", text + "\n", mode="append")
    if not context.is_resume:
        print("at work", flush=True)
        threading.Event().wait()
    return f"noted {text}"


HOLDER = Agent("holder", tools=(write_line, linger))
SCRIPT = [Answer("First.", [("write_line", {"text": "one"}), ("linger", {"text": "two"})]), Answer("Noted.")]


if __name__ == "__main__":
    place = Path(sys.argv[1])
    HOLDER.run("go", provider=ScriptedProvider(SCRIPT), store=place / "runs.db", workspace=place / "work")
