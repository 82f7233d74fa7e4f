"""Atomix' four kill points, by real kills: before the effect, after it, before the record, after the record.

Atomix (arXiv 2602.14849) simulates a crash at four points of a step; its published artifact recovers from
two of them and is blocked at the others. Here a process with a run of five steps is killed with SIGKILL
at one point of its third step, and another process resumes it. A run has **recovered** if it completes,
each step's file was written once, and no file is half-written.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS = 5
KILLED_STEP = 2
POINTS = ("before the effect", "after the effect", "before the record", "after the record")


def die_once(place: Path) -> None:
    """Kill this process, the first time that it comes here."""
    mark = place / "killed"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class DyingLog:
    """A log that is killed right before or right after it records the end of a step."""

    def __init__(self, log: Any, place: Path, point: str) -> None:
        self._log, self._place, self._point = log, place, point

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def append(self, lease: Any, drafts: Sequence[Any], *, expected_seq: int) -> None:
        """Append, and die at the chosen side."""
        is_record = (self._place / "reached").exists() and any(
            each.type == "treenail.ToolInvoked" for each in drafts
        )
        if is_record and self._point == "before the record":
            die_once(self._place)
        self._log.append(lease, drafts, expected_seq=expected_seq)
        if is_record and self._point == "after the record":
            die_once(self._place)


def child(place: Path, point: str) -> None:
    """Run the five steps, or resume them."""
    from treenail import Agent, tool
    from treenail.log.sqlite import SqliteLog
    from treenail.providers.scripted import Answer, ScriptedProvider

    @tool(effects="workspace")
    def step(number: int, *, context: Any) -> str:
        """Write the step's file."""
        is_it = number == KILLED_STEP
        if is_it and point == "before the effect":
            die_once(place)
        name = f"step-{number}.txt"
        text = context.filesystem.read(name).content if context.filesystem.exists(name) else ""
        context.filesystem.write(name, text + "done\n")
        if is_it:
            (place / "reached").touch()
        if is_it and point == "after the effect":
            die_once(place)
        return "done"

    agent = Agent("steps", tools=[step])
    model = ScriptedProvider(
        [*(Answer(calls=[("step", {"number": each})]) for each in range(STEPS)), "Done."]
    )
    with SqliteLog(place / "runs.db") as log:
        dying: Any = DyingLog(log, place, point)
        known = log.sessions()
        if known:
            run = agent.resume(dying, known[0].session_id, provider=model, workspace=place / "work")
        else:
            run = agent.run("Do it.", provider=model, workspace=place / "work", store=dying)
        with run:
            (place / "state").write_text(run.state.value)


def recovers(point: str) -> bool:
    """Kill a run at a point, resume it, and see what is left."""
    with tempfile.TemporaryDirectory(prefix="kill-points-") as made:
        place = Path(made)
        (place / "work").mkdir()
        command = [sys.executable, __file__, "--child", str(place), point]
        first = subprocess.run(command, check=False)
        assert first.returncode == -signal.SIGKILL, f"{point}: it was not killed"
        subprocess.run(command, check=True, timeout=120)
        files = {each.name: each.read_text() for each in (place / "work").iterdir()}
        wanted = {f"step-{number}.txt": "done\n" for number in range(STEPS)}
        return files == wanted and (place / "state").read_text() == "completed"


def overhead_us(rounds: int) -> tuple[float, float]:
    """Return what a step costs in memory in a transaction, and as a bare call, in microseconds."""
    from treenail.state import ExecutionState, ResourceRegistry, Session
    from treenail.tools import ToolCall, ToolRunner, tool
    from treenail.workspace import Filesystem, InMemoryFilesystem

    @tool(effects="workspace")
    async def step(*, context: Any) -> str:
        """Write the step's file."""
        context.filesystem.write("step.txt", "done\n")
        return "done"

    async def measure() -> tuple[float, float]:
        files = InMemoryFilesystem()
        state = ExecutionState(Session(), ResourceRegistry.build({Filesystem: files}))
        runner = ToolRunner(state, {"step": step})
        began = time.perf_counter()
        for number in range(rounds):
            await runner.aexecute(ToolCall(f"c{number}", "step"))
        ours = time.perf_counter() - began
        began = time.perf_counter()
        for _ in range(rounds):
            files.write("step.txt", "done\n")
        return 1e6 * ours / rounds, 1e6 * (time.perf_counter() - began) / rounds

    import asyncio

    return asyncio.run(measure())


def main() -> None:
    """Print one line of JSON per point, and one for the overhead."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--child", nargs=2)
    chosen = parser.parse_args()
    if chosen.child:
        child(Path(chosen.child[0]), chosen.child[1])
        return
    for point in POINTS:
        recovered = sum(recovers(point) for _ in range(chosen.rounds))
        print(json.dumps({"point": point, "rounds": chosen.rounds, "recovered": recovered}), flush=True)
    ours, bare = overhead_us(2_000)
    print(json.dumps({"step_us": round(ours, 1), "bare_us": round(bare, 1)}), flush=True)


if __name__ == "__main__":
    main()
