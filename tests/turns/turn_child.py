"""The process that the turn tests kill: it dies right after the event that it is told."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from treenail import Agent, tool
from treenail.log.sqlite import SqliteLog
from treenail.providers.scripted import Answer, ScriptedProvider


@tool
def write_line(text: str, *, context) -> str:
    """Add a line to the notes."""
    context.filesystem.write("notes.txt", text + "\n", mode="append")
    return "noted"


CHILD_AGENT = Agent("child", tools=(write_line,))
CHILD_SCRIPT = ScriptedProvider(
    [
        Answer("", [("write_line", {"text": "first"})]),
        Answer("", [("write_line", {"text": "second"})]),
        "done",
    ]
)


class DyingLog(SqliteLog):
    """A log whose process dies as soon as a given event is stored."""

    kill_at = 0

    def append(self, lease, drafts, *, expected_seq):
        super().append(lease, drafts, expected_seq=expected_seq)
        if self.kill_at and expected_seq + len(drafts) >= self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def main(directory: Path, kill_at: int) -> None:
    (directory / "work").mkdir()
    DyingLog.kill_at = kill_at
    import anyio

    from treenail.state import ExecutionState, ResourceRegistry, Session
    from treenail.turns import InnerLoop
    from treenail.workspace import Filesystem
    from treenail.workspace.host import HostFilesystem

    session = Session(log=DyingLog(directory / "runs.db"), tags={"agent": "child"})
    filesystem = HostFilesystem(
        directory / "work", store=directory / "runs.db.files", line=f"session-{session.session_id}"
    )
    loop = InnerLoop(
        state=ExecutionState(session, ResourceRegistry.build({Filesystem: filesystem})),
        provider=CHILD_SCRIPT,
        prompt=CHILD_AGENT.prompt,
        workspace=str(directory / "work"),
    )
    anyio.run(loop.run, "write two lines")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
