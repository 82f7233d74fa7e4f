"""`make bench`: every figure as a ratio to a floor or a peer measured in the same run.

    python -m bench             everything, full size
    python -m bench --quick     small sizes, to see that it works
    python -m bench log state   some rooms only

A row that misses its target is marked; the exit code says how many did.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
from collections.abc import Iterator

import bench


def _rooms() -> list[str]:
    found = (each.name for each in pkgutil.iter_modules(bench.__path__) if not each.name.startswith("_"))
    return sorted(found)


def _rows(room: str, quick: bool) -> Iterator[tuple[object, ...]]:
    module = importlib.import_module(f"bench.{room}")
    yield from module.rows(quick)


def _figure(value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return "-" if value is None else str(value)


def main(arguments: list[str]) -> int:
    quick = "--quick" in arguments
    wanted = [each for each in arguments if not each.startswith("-")] or _rooms()
    missed = 0
    print(f"{'':2} {'measured':<74} {'ours':>12} {'floor/peer':>12} {'ratio':>9} {'target':>9}")
    for room in wanted:
        began = time.perf_counter()
        for name, ours, peer, ratio, target in _rows(room, quick):
            is_missed = (
                isinstance(ratio, (int, float)) and isinstance(target, (int, float)) and ratio > target
            )
            missed += is_missed
            mark = "✗" if is_missed else "✓"
            print(
                f"{mark:2} {name!s:<74} {_figure(ours):>12} {_figure(peer):>12} {_figure(ratio):>9} "
                f"{_figure(target):>9}",
                flush=True,
            )
        print(f"   ({room}: {time.perf_counter() - began:.1f} s)", flush=True)
    print(f"{missed} rows missed their target" if missed else "every row met its target")
    return min(missed, 100)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
