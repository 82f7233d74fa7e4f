"""The benches still run: each once, in its smallest size and without peers. No time is judged here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHES = sorted(path.stem for path in (ROOT / "bench").glob("*.py") if "def rows(" in path.read_text())


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key != "TREENAIL_BENCH_PEER"}
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("name", BENCHES)
def test_the_bench_runs(name: str) -> None:
    """Whatever it asserts holds, and it has something to say."""
    ran = bench("--check", name)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) > 2


def test_help_names_every_bench_and_runs_none() -> None:
    ran = bench("--help")
    assert ran.returncode == 0, ran.stderr
    listed = ran.stdout.partition("benches:")[2].splitlines()
    assert [line.split()[0] for line in listed if line] == BENCHES


def test_an_unknown_bench_is_refused() -> None:
    ran = bench("speed")
    assert ran.returncode == 2
    assert "there is no bench 'speed'" in ran.stderr
    assert "conversation" in ran.stderr
