"""Reads SQLite's write-ahead log without SQLite, to tell a torn write from lost commits.

Theory of operation
-------------------
Every committed transaction is first a run of frames in the `-wal` file. Each
frame carries a checksum that is chained to the frame before, and the salts of
the log's present generation. When SQLite opens a file after a crash, it takes
the frames up to the last whole commit and *silently* ignores the rest. After a
crash in the middle of a write that is right: the rest was never acknowledged.
After a flipped byte in the middle it is not: later commits, acknowledged long
ago, would vanish without a word, and be overwritten by the next append.

So the frames are counted here before SQLite sees the file. A killed process can tear
at most the one transaction that was being written. Frames of this generation
behind a broken one that hold more than one commit mark are therefore damage.

A power cut can tear two: the one that was being written, and one before it that nobody had
waited for (`database.py`). A file system writes blocks in any order, so both may have
their commit mark. What is missing then was never written: where it should be stands
what stood there before, zeros or frames of an earlier generation, which share neither
salt with the present one. A damaged frame still has at least one of them.

The `-wal` file carries no locks, so it may be opened by hand. The other files
may not: closing any descriptor of a database file drops every lock that this
process holds on it.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_MAGIC = 0x377F0682
_MASK = 0xFFFFFFFF
_PAGE_SIZES = frozenset(1 << power for power in range(9, 17))
_DEFAULT_PAGE = 4096


@dataclass(frozen=True, slots=True)
class WalReport:
    """What stands in a write-ahead log."""

    frames: int
    """How many frames are whole, counted from the start."""
    rejected: int = 0
    """How many frames of the same generation follow a broken one."""
    rejected_commits: int = 0
    """How many of those end a transaction."""
    has_gap: bool = False
    """Whether something that was never written stands in front of the last of those."""
    header_ok: bool = True

    @property
    def is_torn(self) -> bool:
        """Whether the last transaction is incomplete, as a crash leaves it."""
        return self.rejected > 0 and not self.is_damaged

    @property
    def is_damaged(self) -> bool:
        """Whether commits that had been completed cannot be read any more."""
        return self.rejected_commits > (1 + self.has_gap if self.header_ok else 0)


def _checksum(words: tuple[int, ...], first: int, second: int) -> tuple[int, int]:
    pairs = iter(words)
    for left, right in zip(pairs, pairs, strict=True):
        first = (first + left + second) & _MASK
        second = (second + right + first) & _MASK
    return first, second


def _scan(wal: BinaryIO, size: int) -> WalReport:
    header = wal.read(_HEADER.size)
    magic, version, page, _, salt_1, salt_2, sum_1, sum_2 = _HEADER.unpack(header)
    order = ">" if magic & 1 else "<"
    sums = _checksum(struct.unpack(f"{order}6I", header[:24]), 0, 0)
    header_ok = magic & ~1 == _MAGIC and version == 3007000 and sums == (sum_1, sum_2)
    if not header_ok:
        page = page if page in _PAGE_SIZES else _DEFAULT_PAGE
    frame_words = struct.Struct(f"{order}{page // 4}I")
    head_words = struct.Struct(f"{order}2I")
    whole = rejected = commits = 0
    pending = 0
    is_gap = has_gap = False
    intact = header_ok
    for index in range((size - _HEADER.size) // (_FRAME.size + page)):
        wal.seek(_HEADER.size + index * (_FRAME.size + page))
        head = wal.read(_FRAME.size)
        if len(head) < _FRAME.size:
            break
        number, commit, one, two, want_1, want_2 = _FRAME.unpack(head)
        mine = (one, two) == (salt_1, salt_2)
        if intact:
            body = wal.read(page)
            if len(body) < page:
                break
            if mine and number:
                after = _checksum(frame_words.unpack(body), *_checksum(head_words.unpack(head[:8]), *sums))
                if after == (want_1, want_2):
                    sums = after
                    pending += 1
                    if commit:
                        whole += pending
                        pending = 0
                    continue
            intact = False
        # Without a header there is no telling which generation is the present one: count them all.
        if mine or not header_ok:
            rejected += 1
            commits += bool(commit)
            has_gap = is_gap
        elif one != salt_1 and two != salt_2:
            is_gap = True
    return WalReport(whole, rejected, commits, has_gap, header_ok)


def page_images(wal: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield the number and the place of each page image up to the last commit mark, whole or not.

    Only for reading from a wreck: nothing says that these pages fit together.
    """
    header = wal.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return
    _, _, page, _, salt_1, salt_2, _, _ = _HEADER.unpack(header)
    page = page if page in _PAGE_SIZES else _DEFAULT_PAGE
    size = os.fstat(wal.fileno()).st_size
    images: list[tuple[int, int]] = []
    generations: Counter[tuple[int, int]] = Counter()
    frames: list[tuple[int, int, int, tuple[int, int]]] = []
    for place in range(_HEADER.size, size - _FRAME.size - page + 1, _FRAME.size + page):
        wal.seek(place)
        number, commit, one, two, _, _ = _FRAME.unpack(wal.read(_FRAME.size))
        if number:  # Else it is room (`database.py`) that nothing was written to.
            frames.append((number, place + _FRAME.size, commit, (one, two)))
            generations[one, two] += 1
    # A header whose salts match no frame is itself damaged: then the frames decide.
    salts = (salt_1, salt_2)
    if generations and salts not in generations:
        salts = generations.most_common(1)[0][0]
    for number, place, commit, mark in frames:
        if mark == salts:
            images.append((number, place))
            if commit:
                yield from images
                images.clear()


def examine(path: Path) -> WalReport | None:
    """Count the frames of a `-wal` file; None if there is nothing in it. Changes nothing.

    Other processes may be writing to it: what looks broken is looked at again, and counts only
    if it has not changed.
    """
    previous: WalReport | None = None
    for _ in range(5):
        try:
            with path.open("rb") as wal:
                size = os.fstat(wal.fileno()).st_size
                if size <= _HEADER.size:
                    return None
                before = wal.read(_HEADER.size)
                wal.seek(0)
                report = _scan(wal, size)
                wal.seek(0)
                restarted = wal.read(_HEADER.size) != before
        except (FileNotFoundError, struct.error):
            # Gone, or cut off under our eyes: somebody alive has just finished a checkpoint.
            return None
        if not report.is_damaged:
            return report
        if not restarted and previous is not None and previous.frames == report.frames:
            return report
        previous = None if restarted else report
    return None
