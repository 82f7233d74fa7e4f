"""Digs until its conversation is compacted, and is killed in the middle of that."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import anyio
from digging_kit import digging, is_summary, loop_on

from treenail.conversation import CompactionSettings
from treenail.log.sqlite import SqliteLog
from treenail.providers import ModelRequest
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import Session


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingLog(SqliteLog):
    """Kills its process right before, or right after, the append that holds a compaction."""

    when = ""

    def append(self, lease: Any, drafts: Any, **keywords: Any) -> None:
        is_compaction = any(draft.type == "treenail.HistoryCompacted" for draft in drafts)
        if is_compaction and self.when == "before it is logged":
            die()
        super().append(lease, drafts, **keywords)
        if is_compaction and self.when == "after it is logged":
            die()


def main(directory: Path, when: str) -> None:
    log = DyingLog(directory / "runs.db")
    log.when = when

    def answer(request: ModelRequest) -> Answer:
        if is_summary(request) and when == "while the summary is written":
            die()
        return digging()[0](request)

    settings = CompactionSettings(window_tokens=5_000, model_written=True)
    provider = ScriptedProvider([answer] * 100)
    anyio.run(loop_on(Session(log=log), provider, settings).run, "Dig for the key.")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
