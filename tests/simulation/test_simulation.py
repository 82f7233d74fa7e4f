"""Every promise holds in every simulated world, and the simulation finds what breaks one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.mutations import MUTATIONS, Mutation, try_one

ROOT = Path(__file__).resolve().parents[2]


def simulated(
    *arguments: str, package: Path = ROOT / "src", hashes: str = "0"
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{package}:{ROOT}", "PYTHONHASHSEED": hashes}
    command = [sys.executable, "-m", "simulation", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_every_promise_holds_in_every_world(first: int) -> None:
    ran = simulated("--seed", str(first), "--worlds", "25")
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr


def test_a_seed_gives_the_same_trace_byte_for_byte() -> None:
    """Also in a process whose texts hash differently: it runs itself again with fixed hashes."""
    first = simulated("--seed", "6", "--trace")
    again = simulated("--seed", "6", "--trace", hashes="7")
    assert first.returncode == 0
    assert len(first.stdout.splitlines()) > 100
    assert first.stdout == again.stdout


def test_a_failure_prints_the_line_that_repeats_its_shortest_trace(tmp_path: Path) -> None:
    broken = next(each for each in MUTATIONS if each.breaks == "a rollback forgets the files")
    package = mutated(broken, tmp_path)
    ran = simulated("--worlds", "40", package=package)
    assert ran.returncode == 1
    counts = re.search(r"with (\d+) of (\d+) faults", ran.stdout)
    assert counts is not None and int(counts[1]) <= int(counts[2])
    line = re.search(r"again: python -m simulation --seed (\d+)(?: --spare '([^']*)')?", ran.stdout)
    assert line is not None
    spare = ["--spare", line[2]] if line[2] else ["--plain"]
    again = simulated("--seed", line[1], *spare, package=package)
    assert trace_of(again.stdout) == trace_of(ran.stdout)


@pytest.mark.parametrize(
    "breaks", ["recovery undoes what was committed", "a resumed run forgets what it spent", "nobody is asked"]
)
def test_a_change_that_breaks_a_promise_is_found(breaks: str) -> None:
    """Three of the table; `python -m simulation.mutations` tries all of them."""
    broken = next(each for each in MUTATIONS if each.breaks == breaks)
    assert try_one(broken).worlds is not None


def test_every_mutation_still_fits_the_code() -> None:
    gone = [
        each.breaks
        for each in MUTATIONS
        if each.before not in (ROOT / "src/treenail" / each.file).read_text("utf-8")
    ]
    assert gone == []
    assert len(MUTATIONS) >= 40


def mutated(mutation: Mutation, place: Path) -> Path:
    """Copy the package and change it."""
    subprocess.run(["cp", "-r", str(ROOT / "src/treenail"), str(place / "treenail")], check=True)
    file = place / "treenail" / mutation.file
    file.write_text(file.read_text("utf-8").replace(mutation.before, mutation.after, 1), "utf-8")
    return place


def trace_of(output: str) -> str:
    return output.partition("faults:\n")[2].rpartition("again:")[0]
