"""Runs an agent on the vendor's loop; if told to, it dies after a number of messages."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from treenail import Agent, tool
from treenail.log.sqlite import SqliteLog
from treenail.providers.claude_agent import ClaudeAgent
from treenail.testing.claude_wire import claude_environment


@tool
def note(line: str, *, context: Any) -> str:
    """Add a line to the notes."""
    filesystem = context.filesystem
    held = filesystem.read("notes.txt").content if filesystem.exists("notes.txt") else ""
    filesystem.write("notes.txt", f"{held}{line}\n")
    return f"noted {line}"


NOTER = Agent("noter", instructions="You take notes.", tools=(note,))


def provider_of(url: str, where: Path) -> ClaudeAgent:
    return ClaudeAgent(
        "a-model", native=["Bash"], base_url=url, api_key="k", env=claude_environment(where / "home")
    )


class DyingLog(SqliteLog):
    """Kills its process right after the append that holds the last message it was to live for."""

    left = 0

    def append(self, lease: Any, drafts: Any, **keywords: Any) -> None:
        super().append(lease, drafts, **keywords)
        self.left -= any(draft.type in ("treenail.InnerMessage", "treenail.TurnStarted") for draft in drafts)
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main(url: str, where: Path, lives_for: int) -> None:
    store: Path | DyingLog = where / "runs.db"
    if lives_for:
        store = DyingLog(where / "runs.db")
        store.left = lives_for
    NOTER.run("Take notes", provider=provider_of(url, where), store=store, workspace=where / "files")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
