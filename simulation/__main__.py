"""Run simulated worlds: `python -m simulation --seed 7`, or `--minutes 1` of seeds from a first one on.

A failure prints its seed, what is wrong, the shortest trace that leaving faults out still gives, and the
line that repeats it byte for byte.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

from simulation.coverage import EXPECTED, missing, table
from simulation.run import Outcome, simulate
from simulation.shrink import shrunk


def main() -> int:
    """Run what the command line asks for. Returns 1 if something that must hold did not."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument(
        "--seed", type=int, help="the world to run; with --minutes or --worlds, the first of them"
    )
    parser.add_argument("--minutes", type=float, help="run one world after the other for that long")
    parser.add_argument("--worlds", type=int, help="run that many worlds")
    parser.add_argument("--spare", default="", help="faults that are left out, separated by commas")
    parser.add_argument("--plain", action="store_true", help="do not look for a shorter trace")
    parser.add_argument("--trace", action="store_true", help="print the trace also if everything holds")
    chosen = parser.parse_args()
    _fix_hashes()
    spared = frozenset(filter(None, chosen.spare.split(",")))
    if chosen.minutes is None and chosen.worlds is None:
        outcome = simulate(chosen.seed or 0, spared)
        if outcome.problems:
            return _report(outcome, is_shrunk=bool(spared) or chosen.plain)
        if chosen.trace:
            sys.stdout.write(outcome.trace)
        print(f"seed {outcome.seed}: {outcome.simulated_s:.0f} s, {len(outcome.strikes)} faults; all holds")
        return 0
    return _many(chosen.seed or 0, chosen.minutes, chosen.worlds, is_plain=chosen.plain)


def _many(first: int, minutes: float | None, worlds: int | None, *, is_plain: bool) -> int:
    ends = None if minutes is None else time.monotonic() + 60 * minutes
    met: Counter[tuple[str, str]] = Counter()
    simulated_s, faults, seed = 0.0, 0, first
    while (ends is None or time.monotonic() < ends) and (worlds is None or seed < first + worlds):
        outcome = simulate(seed)
        if outcome.problems:
            return _report(outcome, is_shrunk=is_plain)
        met.update(outcome.met)
        simulated_s += outcome.simulated_s
        faults += len(outcome.strikes)
        seed += 1
    print(
        f"{seed - first} worlds from seed {first}: {simulated_s / 3600:.1f} hours simulated, {faults} faults"
    )
    print(table(met))
    never = missing(met)
    if never and seed - first >= EXPECTED:
        print(f"faults that never struck: {', '.join(never)}")
        return 1
    return 0


def _report(outcome: Outcome, *, is_shrunk: bool) -> int:
    shortest, spared = (outcome, "") if is_shrunk else shrunk(outcome)
    print(f"seed {outcome.seed} breaks a promise:")
    for each in shortest.problems:
        print(f"  {each}")
    print(f"the shortest trace, with {len(shortest.strikes)} of {len(outcome.strikes)} faults:")
    sys.stdout.write(shortest.trace)
    again = f" --spare '{spared}'" if spared else ""
    print(f"again: python -m simulation --seed {outcome.seed}{again}")
    return 1


def _fix_hashes() -> None:
    """Run again with fixed hashes of texts, so that no order depends on the process."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        sys.stdout.flush()
        os.execve(
            sys.executable,
            [sys.executable, "-m", "simulation", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )


if __name__ == "__main__":
    sys.exit(main())
