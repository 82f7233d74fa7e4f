"""Runs an agent against a server, killed after each message in turn, and resumes it.

One process loads everything once and forks a process per attempt, because loading an SDK takes longer than a
whole run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.forks import ended, fork

from treenail import Agent, tool
from treenail.log.sqlite import SqliteLog
from treenail.providers import Provider
from treenail.providers.anthropic import Anthropic
from treenail.providers.litellm import LiteLLM
from treenail.providers.openai import OpenAI

KILLS_AT_MOST = 30


@tool
def note(line: str, *, context: Any) -> str:
    """Add a line to the notes."""
    filesystem = context.filesystem
    held = filesystem.read("notes.txt").content if filesystem.exists("notes.txt") else ""
    filesystem.write("notes.txt", f"{held}{line}\n")
    return f"noted {line}"


NOTER = Agent("noter", instructions="You take notes.", tools=(note,))


class DyingLog(SqliteLog):
    """Kills its process right after the append that holds a message, or the turn's start."""

    left = 0

    def append(self, lease: Any, drafts: Any, **keywords: Any) -> None:
        super().append(lease, drafts, **keywords)
        self.left -= any(draft.type in ("treenail.InnerMessage", "treenail.TurnStarted") for draft in drafts)
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def provider_of(api: str, url: str) -> Provider:
    if api == "anthropic.messages":
        return Anthropic("a-model", base_url=url, api_key="k")
    if api == "litellm.chat":
        return LiteLLM("openai/a-model", base_url=f"{url}/v1", api_key="k")
    return OpenAI("a-model", api=api.split(".")[1], base_url=f"{url}/v1", api_key="k")  # type: ignore[arg-type]  # one of the two, from a parameter


def attempt(api: str, url: str, where: Path, die_at: int) -> bool:
    """Run until the given message, be killed, resume; print what came of it. Return whether it was killed."""
    root = where / "files"
    root.mkdir(parents=True)
    store = where / "runs.db"

    def run() -> None:
        log = DyingLog(store)
        log.left = die_at
        NOTER.run("Take notes", provider=provider_of(api, url), store=log, workspace=root)

    def resume() -> None:
        log = SqliteLog(store)
        run_id = log.sessions()[0].session_id
        ended = NOTER.resume(log, run_id, provider=provider_of(api, url), workspace=root)
        notes = root / "notes.txt"
        told = {
            "api": api,
            "die_at": die_at,
            "state": ended.state.value,
            "details": ended.result.details,
            "output": ended.output,
            "notes": notes.read_text() if notes.exists() else "",
            "messages": [[each.role, each.content] for each in ended.messages],
        }
        print(json.dumps(told), flush=True)

    if ended(fork(run)) != -signal.SIGKILL:
        return False
    ended(fork(resume))
    return True


def main(url: str, directory: Path) -> None:
    for api in ("openai.responses", "openai.chat", "anthropic.messages", "litellm.chat"):
        # The first call loads what an SDK loads late; done here, no fork has to do it again.
        NOTER.run("Warm up", provider=provider_of(api, url))
        for die_at in range(1, KILLS_AT_MOST):
            if not attempt(api, url, directory / f"{api}-{die_at}", die_at):
                break


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
