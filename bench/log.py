"""What the log costs: appends, reading and space, each against the same work on plain SQLite.

Peers are measured in the same run, in turns with ours, because the disk's mood changes from one
second to the next; the middle of the measurements counts.
"""

from __future__ import annotations

import random
import sqlite3
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from uuid import UUID, uuid4

from bench.report import Row, Size
from treenail.log import Draft, Lease, MemoryLog, this_process_owner
from treenail.log.sqlite import SqliteLog

KILOBYTE = random.Random(1).randbytes(1024)
INSERT = "INSERT INTO events (payload) VALUES (?)"
IDS = ("turn-" + "0" * 31, "run-" + "1" * 32, "2" * 32)


def draft(payload: bytes = KILOBYTE) -> Draft:
    return Draft("treenail.InnerMessage", payload, 1_760_000_000_000_000, *IDS)


def begin(log: SqliteLog | MemoryLog) -> Lease:
    session_id = uuid4()
    log.create(session_id, created_at=datetime.now(UTC))
    return log.acquire(session_id, owner=this_process_owner())


def timed(work: Callable[[int], object], count: int) -> list[float]:
    """Return how long each call took, in microseconds."""
    spent = []
    for number in range(count):
        start = time.perf_counter()
        work(number)
        spent.append((time.perf_counter() - start) * 1e6)
    return spent


def raw_sqlite(path: Path, synchronous: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, payload BLOB NOT NULL)")
    return connection


def durable_append(directory: Path, count: int) -> Iterator[Row]:
    """One event of 1 KB per commit, beside one row of 1 KB per commit."""
    raw = raw_sqlite(directory / "raw.db", "FULL")
    ours: list[float] = []
    theirs: list[float] = []
    with SqliteLog(directory / "durable.db", heartbeat=False) as log:
        lease = begin(log)
        for round_ in range(10):
            part, base = count // 10, round_ * (count // 10)
            theirs += timed(lambda _: raw.execute(INSERT, (KILOBYTE,)), part)
            ours += timed(lambda n, base=base: log.append(lease, [draft()], expected_seq=base + n), part)
    raw.close()
    middle, floor = median(ours), median(theirs)
    yield Row("durable append of 1 KB vs a raw SQLite commit (us, median)", middle, floor, middle / floor)
    mean, floor = sum(ours) / len(ours), sum(theirs) / len(theirs)
    yield Row("the same with checkpoints (us, mean)", mean, floor, mean / floor)


def tool_call(directory: Path, count: int) -> Iterator[Row]:
    """What a tool call appends, a message and a record with the same text, beside a row of 1 KB by hand."""
    raw = raw_sqlite(directory / "raw-call.db", "NORMAL")
    ours: list[float] = []
    theirs: list[float] = []
    with SqliteLog(directory / "call.db", synchronous="NORMAL", heartbeat=False) as log:
        lease = begin(log)
        for number in range(count):
            text = phrase(number)
            batch = [
                draft(b'{"role":"tool","sequence":%d,"content":"%s"}' % (number, text)),
                draft(b'{"name":"look","success":true,"result":{"message":"%s"}}' % text),
            ]
            theirs += timed(lambda _: raw.execute(INSERT, (KILOBYTE,)), 1)
            ours += timed(lambda _, n=number, b=batch: log.append(lease, b, expected_seq=2 * n), 1)
    raw.close()
    beside = median(ours) - median(theirs)
    yield Row("append of a tool call's message and record, beside a raw commit (us)", beside)


WORDS = [bytes(random.Random(number).choices(b"etaoinshrdlu", k=2 + number % 9)) for number in range(3000)]


def phrase(seed: int) -> bytes:
    """Return a kilobyte of words, another one for each seed, about as hard to deflate as prose."""
    return b" ".join(random.Random(seed).choices(WORDS, k=160))[:1024]


def noise(seed: int) -> bytes:
    """Return a kilobyte of text in which there is nothing to find."""
    return b64encode(random.Random(seed).randbytes(768))


def flatness(directory: Path, sizes: list[int]) -> Iterator[Row]:
    """The last tenth of a long session's appends against the first tenth, without waiting for the disk."""
    for size in sizes:
        yield flat_row("memory", lambda _: MemoryLog(heartbeat=False), size)
        yield flat_row("sqlite", lambda n: open_fast(directory / f"flat-{n}.db"), size)


def open_fast(path: Path) -> SqliteLog:
    path.unlink(missing_ok=True)
    return SqliteLog(path, synchronous="NORMAL", heartbeat=False)


def flat_row(kind: str, make: Callable[[int], MemoryLog | SqliteLog], size: int) -> Row:
    first: list[float] = []
    last: list[float] = []
    # Short sessions are repeated, or one pause of the machine would decide.
    for attempt in range(max(1, min(20, 5000 // size))):
        with make(attempt) as log:
            lease = begin(log)
            # Statements and pages are warm before the first tenth counts.
            head = len([log.append(lease, [draft()], expected_seq=seq) for seq in range(200)])
            spent = timed(lambda n: log.append(lease, [draft()], expected_seq=head + n), size)  # noqa: B023 - used at once
            first += spent[: size // 10]
            last += spent[-(size // 10) :]
    ours, floor = quartile(last), quartile(first)
    return Row(
        f"{kind} append, last tenth of {size:,} events vs the first (us)", ours, floor, ours / floor, 1.2
    )


def quartile(spent: list[float]) -> float:
    """Return the time that a quarter of the calls stayed under: what the work costs on a shared machine."""
    return quantiles(spent, n=4)[0]


def space(directory: Path, count: int) -> Iterator[Row]:
    """Bytes of the closed file per event of 1 KB."""
    for sessions in (1, 10):
        path = directory / f"space-{sessions}.db"
        with SqliteLog(path, synchronous="NORMAL", heartbeat=False) as log:
            leases = [begin(log) for _ in range(sessions)]
            for number in range(count):
                log.append(leases[number % sessions], [draft()], expected_seq=number // sessions)
        per_event = path.stat().st_size / count
        name = f"file size per 1 KB event, {sessions} interleaved session{'s' * (sessions > 1)} (bytes)"
        yield Row(name, per_event, 1024.0, per_event / 1024)


def room(directory: Path, count: int) -> Iterator[Row]:
    """Bytes of the closed file per byte of text, where each text stands in two events of an append."""
    for kind, text in (("words", phrase), ("noise", noise)):
        path = directory / f"room-{kind}.db"
        with SqliteLog(path, synchronous="NORMAL", heartbeat=False) as log:
            lease = begin(log)
            for number in range(count):
                batch = [draft(b'{"content":"%s"}' % text(number)), draft(b'{"result":"%s"}' % text(number))]
                log.append(lease, batch, expected_seq=2 * number)
        stored, given = path.stat().st_size, 1024 * count
        yield Row(
            f"file size for {count:,} texts of 1 KB, {kind}, twice each (bytes)",
            stored,
            given,
            stored / given,
        )


def reading(directory: Path, count: int) -> Iterator[Row]:
    """All events of a session, verified, beside fetching the same rows without looking at them."""
    path = directory / "reading.db"
    with SqliteLog(path, synchronous="NORMAL", heartbeat=False) as log:
        lease = begin(log)
        session_id: UUID = lease.session_id
        for start in range(0, count, 1000):
            batch = [draft(phrase(number)) for number in range(start, min(start + 1000, count))]
            log.append(lease, batch, expected_seq=start)
        raw = sqlite3.connect(path)
        ours = timed(lambda _: sum(1 for _ in log.read(session_id)), 3)
        theirs = timed(lambda _: raw.execute("SELECT * FROM events ORDER BY session_key, seq").fetchall(), 3)
        raw.close()
    yield Row(f"read {count} events (us)", min(ours), min(theirs), min(ours) / min(theirs))


def rows(size: Size) -> Iterator[Row]:
    """Measure everything."""
    appends, kept = {Size.FULL: (2_000, 10_000), Size.QUICK: (500, 2_000), Size.LEAST: (50, 200)}[size]
    sessions = {Size.FULL: [10, 1_000, 100_000], Size.QUICK: [10, 1_000], Size.LEAST: [10]}[size]
    with tempfile.TemporaryDirectory(prefix="treenail-bench-") as name:
        directory = Path(name)
        yield from durable_append(directory, appends)
        yield from tool_call(directory, appends)
        yield from flatness(directory, sessions)
        yield from space(directory, kept)
        yield from room(directory, kept // 2)
        yield from reading(directory, kept)
