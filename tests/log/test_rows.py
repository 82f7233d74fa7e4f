"""The events of an append share a row, and reading does not show it."""

import json
import sqlite3
import zlib
from pathlib import Path
from random import Random
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.errors import LogBusyError, LogDamagedError
from treenail.log import GENESIS, Draft
from treenail.log.event import chained
from treenail.log.rows import MAX_ROW_BYTES, Row, pack, split, unpack, verified
from treenail.log.sqlite import SqliteLog

from .conftest import BIRTH

SESSION = UUID(int=7)
HEXADECIMAL = Random(3).randbytes(1500).hex().encode()
NOISE = Random(4).randbytes(2000)
LONG = Random(5).randbytes(40_000).hex().encode()

kinds = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=8)
ids = st.none() | st.sampled_from(["turn", "t\nü"])
payloads = st.binary(max_size=30) | st.sampled_from([HEXADECIMAL, NOISE, b"a" * 5000, b"\0" * 40_000, LONG])
drafts = st.builds(Draft, kinds, payloads, st.integers(-(10**15), 10**15), ids, ids, ids, st.booleans())


# --- one row -----------------------------------------------------------------------------------------


@given(st.lists(drafts, min_size=1, max_size=6))
def test_events_come_back_as_they_were(batch: list[Draft]) -> None:
    """Whatever they hold, and however many rows they need."""
    assert [draft for part in split(batch) for draft in unpack(pack(part)) or ()] == batch


@given(st.lists(drafts, max_size=40))
def test_a_row_is_bounded(batch: list[Draft]) -> None:
    """What one damaged page can cost has a limit."""
    parts = split(batch)
    assert [draft for part in parts for draft in part] == batch
    for part in parts:
        assert len(part) == 1 or sum(len(draft.payload) for draft in part) <= MAX_ROW_BYTES


def test_ten_thousand_empty_events_do_not_share_one_row() -> None:
    """What has no length still takes room."""
    assert max(map(len, split([Draft("t", b"", 1)] * 10_000))) == 512


def test_what_two_events_have_in_common_takes_the_room_of_one() -> None:
    """Even if nothing else could be gained: hexadecimal digits need half of their room at least."""
    part = [Draft("a", b"<" + HEXADECIMAL + b">", 1), Draft("b", b"{" + HEXADECIMAL + b"}", 2)]
    assert len(HEXADECIMAL) / 2 < len(pack(part)) < len(HEXADECIMAL) * 0.7


@pytest.mark.parametrize(
    "payload", [NOISE, b"short" * 10, b"a" * 100_000], ids=["noise", "a short one", "a very long one"]
)
def test_what_gains_nothing_or_takes_too_long_is_stored_as_it_is(payload: bytes) -> None:
    assert pack([Draft("t", payload, 1)]).endswith(b"\n" + payload)


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([])


@given(st.lists(st.lists(values, min_size=6, max_size=8), max_size=3) | values, st.binary(max_size=40))
def test_a_damaged_row_is_refused_and_never_raises(front: object, rest: bytes) -> None:
    """Lengths beyond the end or below zero, numbers where texts were, too few of them."""
    payload = json.dumps(front).encode() + b"\n" + rest
    assert verified(SESSION, GENESIS, 0, Row(1, 1, b"another", payload)) is None


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda rest: b"z" + rest) | values)
def test_nonsense_is_refused_and_never_raises(payload: object) -> None:
    """A damaged row may hold anything."""
    assert unpack(payload) is None


@pytest.mark.parametrize("column", ["seq", "at_us", "checksum"])
def test_every_column_is_verified(column: str) -> None:
    part = [Draft("a", HEXADECIMAL, 1), Draft("b", HEXADECIMAL, 2)]
    row = Row(2, 2, chained(SESSION, GENESIS, 1, part)[-1].checksum, pack(part))
    assert [each.type for each in verified(SESSION, GENESIS, 0, row) or ()] == ["a", "b"]
    for value in (None, 3, "text", b"bytes"):
        assert verified(SESSION, GENESIS, 0, row._replace(**{column: value})) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [b"", b"more"], ids=["too long", "more behind it"])
def test_damage_cannot_make_a_row_grow_without_bounds(change: bytes) -> None:
    """A few bytes that inflate to many are refused, and so is what follows the end."""
    inner = b'[["t",1,false,null,null,null,%d]]\n' % (100 if change else 10**8)
    deflated = zlib.compress(inner + b"\0" * (100 if change else 10**8), 9)
    assert unpack(b"z" + deflated + change) is None


def test_lengths_that_go_back_and_forth_cannot_make_a_row_grow() -> None:
    """Each event of a row has its own bytes of it, so together they are never longer than the row."""
    front = [["a", 1, False, None, None, None, length] for length in [30_000, -29_999] * 500]
    assert unpack(json.dumps(front).encode() + b"\n" + bytes(30_500)) is None


# --- in a file ---------------------------------------------------------------------------------------

BATCHES = (3, 1, 4, 2)
DRAFTS = [
    Draft(f"type {n}", b'{"n":%d,"text":"%s"}' % (n, HEXADECIMAL[:800]), n, "turn", rolled_back=n % 3 == 0)
    for n in range(1, 11)
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Make a file with ten events in four appends."""
    path = tmp_path / "log.db"
    with SqliteLog(path, heartbeat=False) as log:
        log.create(SESSION, created_at=BIRTH)
        lease = log.acquire(SESSION, owner="me")
        done = 0
        for count in BATCHES:
            log.append(lease, DRAFTS[done : done + count], expected_seq=done)
            done += count
    return path


def contents(log: SqliteLog, **bounds: int) -> list[Draft]:
    return [
        Draft(each.type, each.payload, each.at_us, each.turn_id, rolled_back=each.rolled_back)
        for each in log.read(SESSION, **bounds)
    ]


def test_an_append_is_one_row_with_the_number_of_its_last_event(path: Path) -> None:
    """So is its time."""
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT seq, at_us FROM events ORDER BY seq").fetchall()
    connection.close()
    assert found == [(3, 3), (4, 4), (8, 8), (10, 10)]


def test_reading_may_begin_and_end_anywhere(path: Path) -> None:
    """Also in the middle of a row."""
    with SqliteLog(path, heartbeat=False) as log:
        for after in range(12):
            for upto in range(12):
                assert contents(log, after=after, upto=upto) == DRAFTS[after:upto]
            assert contents(log, after=after) == DRAFTS[after:]


@pytest.mark.parametrize("upto", [1, 3, 5, 10])
def test_pruning_may_end_anywhere(path: Path, tmp_path: Path, upto: int) -> None:
    """What stays is whole, can be pruned and salvaged, and the session can be written."""
    with SqliteLog(path, heartbeat=False) as log:
        checksums = [each.checksum for each in log.read(SESSION)]
        lease = log.acquire(SESSION, owner="me")
        log.put_snapshot(lease, 10, b"state")
        assert log.prune(lease, upto=upto) == upto
        assert contents(log) == DRAFTS[upto:]
        assert [each.checksum for each in log.read(SESSION)] == checksums[upto:]
        assert log.info(SESSION).first == upto + 1
        assert log.check(SESSION).ok
        log.append(lease, DRAFTS[:2], expected_seq=10)
        assert contents(log) == DRAFTS[upto:] + DRAFTS[:2]
    (report,) = SqliteLog.salvage(path, tmp_path / "new.db")
    assert (report.ok, report.events, report.last_good_seq) == (True, 12 - upto, 12)
    with SqliteLog(tmp_path / "new.db", heartbeat=False) as log:
        assert contents(log) == DRAFTS[upto:] + DRAFTS[:2]
        lease = log.acquire(SESSION, owner="me")
        log.put_snapshot(lease, 12, b"state")
        assert log.prune(lease, upto=12) == 12 - upto
        assert contents(log) == []


@pytest.mark.parametrize(
    ("seq", "damage"),
    [
        (3, "payload = zeroblob(2000)"),
        (3, "seq = seq + 100"),
        (4, "at_us = at_us + 1"),
        (8, "payload = substr(payload, 2)"),
        (8, "checksum = zeroblob(16)"),
        (8, "seq = seq + 100"),
        (10, "payload = substr(payload, 1, 500)"),
        (10, "checksum = zeroblob(16)"),
    ],
)
def test_a_damaged_row_is_noticed_and_everything_before_it_is_whole(
    path: Path, tmp_path: Path, seq: int, damage: str
) -> None:
    """Whatever is changed in it: reading, checking and salvaging end before its first event."""
    connection = sqlite3.connect(path)
    connection.execute(f"UPDATE events SET {damage} WHERE seq = ?", (seq,))
    connection.commit()
    connection.close()
    good = {3: 0, 4: 3, 8: 4, 10: 8}[seq]
    with SqliteLog(path, heartbeat=False) as log:
        for after in range(10):
            begins_with = max(end for end in (0, 3, 4, 8) if end <= after)
            if after < seq or (damage.startswith("checksum") and begins_with == seq):
                with pytest.raises(LogDamagedError) as caught:
                    list(log.read(SESSION, after=after))
                assert caught.value.last_good_seq == good
            elif damage.startswith("seq"):
                # The number promises later events.
                with pytest.raises(LogDamagedError):
                    list(log.read(SESSION, after=after))
            else:
                # Who begins behind the damaged row does not come across it.
                assert contents(log, after=after) == DRAFTS[after:]
        report = log.check(SESSION)
        assert (report.ok, report.events, report.last_good_seq) == (False, good, good)
    (report,) = SqliteLog.salvage(path, tmp_path / "new.db")
    assert (report.ok, report.events) == (False, good)
    with SqliteLog(tmp_path / "new.db", heartbeat=False) as log:
        assert contents(log) == DRAFTS[:good]


@pytest.mark.parametrize("pruned", [0, 2, 5])
def test_events_say_where_a_session_begins_whose_own_row_is_damaged(
    path: Path, tmp_path: Path, pruned: int
) -> None:
    """Also if it begins in what was the middle of a row."""
    with SqliteLog(path, heartbeat=False) as log:
        lease = log.acquire(SESSION, owner="me")
        log.put_snapshot(lease, 10, b"state")
        log.prune(lease, upto=pruned)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE sessions SET first_seq = 77, created_us = 5")
    connection.commit()
    connection.close()
    with SqliteLog(path, heartbeat=False) as log:
        assert not log.check(SESSION).ok
        with pytest.raises(LogDamagedError, match="salvage"):
            contents(log)
    (report,) = SqliteLog.salvage(path, tmp_path / "new.db")
    assert report.events == 10 - pruned
    with SqliteLog(tmp_path / "new.db", heartbeat=False) as log:
        assert contents(log) == DRAFTS[pruned:]


# --- another try ---------------------------------------------------------------------------------------


class _BusyOnce:
    """A connection where one statement finds the file in use at first, as another process may have it."""

    def __init__(self, connection: sqlite3.Connection, statement: str) -> None:
        self._connection = connection
        self._statement = statement
        self.refused = 0

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        if statement == self._statement and not self.refused:
            self.refused += 1
            raise LogBusyError("not now")
        return self._connection.execute(statement, *values)

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)


def test_an_append_that_is_tried_again_begins_where_the_first_attempt_began(path: Path) -> None:
    """What was not committed does not count, not even for the writer itself."""
    batch = DRAFTS[:2]
    with SqliteLog(path, heartbeat=False) as log:
        lease = log.acquire(SESSION, owner="me")
        log.append(lease, DRAFTS[:1], expected_seq=10)
        connection = log._database._connection
        assert connection is not None
        busy = _BusyOnce(connection, "COMMIT")
        log._database._connection = busy  # type: ignore[assignment]  # it does what a connection does
        log.append(lease, batch, expected_seq=11)
        assert busy.refused == 1
        assert contents(log, after=10) == [DRAFTS[0], *batch]
        assert log.check(SESSION).ok
