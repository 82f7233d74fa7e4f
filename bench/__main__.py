"""Measure speed as ratios to a floor or a peer in the same run.

A row that misses its limit is marked. The summary at the end has the lines of docs/performance.md.
The exit code is 1 if a row missed its limit.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time
from collections.abc import Sequence

import bench
from bench.report import LINES, Row, Size


def names() -> list[str]:
    """Return the benches: every module here that has rows."""
    others = {"__main__", "outside", "report"}
    return sorted(each.name for each in pkgutil.iter_modules(bench.__path__) if each.name not in others)


def known(name: str) -> str:
    """Refuse a name that no bench has."""
    if name not in names():
        raise argparse.ArgumentTypeError(f"there is no bench {name!r}; choose from {', '.join(names())}")
    return name


def parser() -> argparse.ArgumentParser:
    described = [f"  {name:<14}{_first_line(name)}" for name in names()]
    made = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog="\n".join(["benches:", *described]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("benches", nargs="*", metavar="BENCH", type=known, help="what to run (default: all)")
    size = made.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", dest="size", action="store_const", const=Size.QUICK, help="small sizes, for an impression"
    )
    size.add_argument(
        "--check",
        dest="size",
        action="store_const",
        const=Size.LEAST,
        help="the smallest sizes, without peers and without limits: do the benches still run?",
    )
    made.set_defaults(size=Size.FULL)
    return made


def _first_line(name: str) -> str:
    return (importlib.import_module(f"bench.{name}").__doc__ or "").splitlines()[0]


def main(arguments: Sequence[str]) -> int:
    chosen = parser().parse_args(arguments)
    found: list[Row] = []
    print(_columns(" ", "measured", "ours", "floor/peer", "ratio", "limit"))
    for name in chosen.benches or names():
        began = time.perf_counter()
        for row in importlib.import_module(f"bench.{name}").rows(chosen.size):
            found.append(row)
            print(_printed(row), flush=True)
        print(f"  ({name}: {time.perf_counter() - began:.1f} s)", flush=True)
    if chosen.size is Size.LEAST:
        return 0
    print("\nThe lines of docs/performance.md:")
    for line in LINES:
        deciding = [row for row in found if row.line == line]
        print(f"  {line}{'' if deciding else ': not measured in this run'}")
        for row in deciding:
            print(f"  {_printed(row)}")
    missed = sum(row.is_missed for row in found)
    print(f"\n{missed} of {len(found)} rows missed their limit" if missed else "\nevery row met its limit")
    return 1 if missed else 0


def _printed(row: Row) -> str:
    mark = "✗" if row.is_missed else "✓" if row.limit is not None and row.ratio is not None else " "
    figures = (_figure(each) for each in (row.ours, row.other, row.ratio, row.limit))
    return _columns(mark, row.name, *figures)


def _columns(mark: str, name: str, *figures: str) -> str:
    return f"{mark} {name:<78}" + "".join(f"{each:>14}" for each in figures)


def _figure(value: float | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
