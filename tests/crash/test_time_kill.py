"""Killing a run never gives it time: what was last seen counts, and a whole interval with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from treenail.containment import HEARTBEAT_S

CHILD = Path(__file__).with_name("timed_child.py")
TIMEOUT_S = 2.5
MAX_LIVES = 6


def told(place: Path) -> list[dict[str, float | str]]:
    """Return what the lives have told so far; a line that a kill cut off is left out."""
    lines = (place / "told.jsonl").read_text().split("\n")[:-1] if (place / "told.jsonl").exists() else []
    return [json.loads(each) for each in lines if each.endswith("}")]


def live(mode: str, place: Path, kill_after_s: float) -> bool:
    """Start the process, kill it once its tool has worked for that long, and say whether it was killed."""
    before = len(told(place))
    process = subprocess.Popen([sys.executable, str(CHILD), mode, str(place), str(TIMEOUT_S)])
    try:
        while process.poll() is None:
            seen = [float(each["worked_s"]) for each in told(place)[before:] if "worked_s" in each]
            if max(seen, default=0.0) >= kill_after_s:
                os.kill(process.pid, signal.SIGKILL)
            # Its next tick, or its end, comes soon; a wait that is over too early does no harm.
            try:
                process.wait(0.01)
            except subprocess.TimeoutExpired:
                continue
    finally:
        process.kill()
        process.wait()
    return process.returncode == -signal.SIGKILL


def worked_s(lives: list[list[dict[str, float | str]]]) -> float:
    """Return for how long the tool has worked in some lives, all together."""
    return sum(
        max([float(each["worked_s"]) for each in life if "worked_s" in each], default=0) for life in lives
    )


@pytest.mark.parametrize("mode", ["run", "contained", "workflow"])
def test_a_kill_gives_no_time_back(mode: str, tmp_path: Path) -> None:
    """Each life begins with at least the time that the ones before it have worked, and all end in time."""
    lives: list[list[dict[str, float | str]]] = []
    for number in range(MAX_LIVES):
        before = len(told(tmp_path))
        was_killed = live(mode, tmp_path, kill_after_s=0.3 + 0.4 * (number % 2))
        lives.append(told(tmp_path)[before:])
        for charged in [float(each["charged_s"]) for each in lives[-1] if "charged_s" in each]:
            assert charged >= worked_s(lives[:-1]), f"life {number} was given time back: {lives}"
        if not was_killed:
            break
    ended = lives[-1][-1]
    assert ended["ended"] in ("failed", "halted", "timeout", "timed_out"), ended
    assert len(lives) >= 2, "the first life was to be killed"
    assert worked_s(lives[:-1]) <= TIMEOUT_S
    if mode == "workflow":
        kills = len(lives) - 1
        assert float(ended["elapsed_s"]) >= worked_s(lives[:-1]), "what a life before had used is left out"
        assert float(ended["elapsed_s"]) >= min(TIMEOUT_S, kills * HEARTBEAT_S)
