"""The events of an append share a row, and whoever reads does not notice."""

import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.errors import LogDamagedError, StaleWriterError
from treenail.log import Draft
from treenail.log.database import still_in_use
from treenail.log.rows import DEFLATED, SEVERAL, EventRow, first_of, pack, packed, parts_of, unpack
from treenail.log.sqlite import CONTINUE, SqliteLog

from .conftest import BIRTH

SESSION = UUID(int=7)
HEXADECIMAL = Random(3).randbytes(1500).hex().encode()
NOISE = Random(4).randbytes(2000)
LONG = Random(5).randbytes(40_000).hex().encode()

kinds = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=8)
ids = st.none() | st.sampled_from(["turn", "t\nü"])
payloads = st.binary(max_size=30) | st.sampled_from(
    [HEXADECIMAL, NOISE, b"a" * 5000, b"\0" * 40_000, b'"%s"' % LONG, b'{"text": "%s"}' % LONG]
)
drafts = st.builds(Draft, kinds, payloads, st.integers(-(10**15), 10**15), ids, ids, ids, st.booleans())
batches = st.lists(drafts, min_size=1, max_size=6)


def row(part: list[Draft], seq: int = 0, **changes: object) -> EventRow:
    """Make the row that holds these events."""
    last, (flags, payload) = part[-1], pack(part)
    kind, _, at_us, turn_id, run_id, trace_id, _ = last
    values = {
        "position": 1,
        "seq": seq or len(part),
        "at_us": at_us,
        "kind": kind,
        "turn_id": turn_id,
        "run_id": run_id,
        "trace_id": trace_id,
        "flags": flags,
        "checksum": b"",
        "payload": payload,
    } | changes
    return tuple(values.values())  # type: ignore[return-value]  # also rows that make no sense


def nothing_before(_: int) -> None:
    return None


# --- one row -----------------------------------------------------------------------------------------


@given(batches)
def test_events_come_back_as_they_were(batch: list[Draft]) -> None:
    """Whatever they hold, and however many rows they need."""
    whole: list[bytes] = []
    for part, flags, payload in packed(batch):
        there = list(whole)
        stored = row(list(part), flags=flags, payload=payload)
        assert unpack(stored, lambda back, there=there: there[-back]) == list(part)
        assert first_of((*stored[:1], 40, *stored[2:])) == 41 - len(part)
        whole += [draft.payload for draft in part]
    assert whole == [draft.payload for draft in batch]


@given(st.lists(drafts, max_size=40))
def test_a_row_is_bounded_and_has_one_set_of_ids(batch: list[Draft]) -> None:
    """What one damaged page can cost has a limit."""
    for part in parts_of(batch):
        assert len({draft[3:6] for draft in part}) == 1
        assert len(part) == 1 or sum(len(draft.payload) for draft in part) <= 64 * 1024


def test_very_long_texts_are_stored_once_without_deflating_them() -> None:
    """What shares no row is abbreviated: a line that says what belongs where, and the rest."""
    batch = [
        Draft("a", b'{"content":"%s"}' % LONG, 1),
        Draft("b", b"", 2),
        Draft("c", b'{"message":"%s"}' % LONG, 3),
    ]
    (_, *first), (_, *second) = packed(batch)[0], packed(batch)[-1]
    assert first == [0, batch[0].payload]
    assert second == [2, b'12:2:12:80000\n{"message":""}']


def test_ten_thousand_empty_events_do_not_share_one_row() -> None:
    """What has no length still takes room."""
    parts = parts_of([Draft("t", b"", 1)] * 10_000)
    assert max(map(len, parts)) == 1024


def test_nothing_needs_no_row() -> None:
    """An empty append writes nothing."""
    assert parts_of([]) == []


def test_what_two_events_have_in_common_takes_the_room_of_one() -> None:
    """Even if nothing else could be gained: hexadecimal digits need half of their room at least."""
    part = [Draft("a", b"<" + HEXADECIMAL + b">", 1), Draft("b", b"{" + HEXADECIMAL + b"}", 2)]
    flags, stored = pack(part)
    assert flags == SEVERAL + DEFLATED
    assert len(HEXADECIMAL) / 2 < len(stored) < len(HEXADECIMAL) * 0.7


@pytest.mark.parametrize(
    "payload", [NOISE, b"short" * 10, b"a" * 100_000], ids=["noise", "a short one", "a very long one"]
)
def test_what_gains_nothing_or_takes_too_long_is_stored_as_it_is(payload: bytes) -> None:
    """Such a row is the one that the first version wrote."""
    assert pack([Draft("t", payload, 1)]) == (0, payload)
    assert pack([Draft("t", payload, 1, rolled_back=True)]) == (1, payload)


junk = st.none() | st.integers() | st.text(max_size=5) | st.binary(max_size=60)


@given(
    st.sampled_from(["seq", "at_us", "kind", "turn_id", "flags", "payload"]),
    junk | st.sampled_from([4, 8, 12, 13, 16, -4]),
    st.integers(0, 16),
)
def test_nonsense_is_refused_or_unpacked_and_never_raises(column: str, value: object, flags: int) -> None:
    """A damaged row may hold anything; what it says is believed because of its checksum only."""
    part = [Draft("a", HEXADECIMAL, 1), Draft("b", HEXADECIMAL, 2)]
    damaged = row(part, **({"flags": flags} | {column: value}))
    unpacked = unpack(damaged, nothing_before)
    assert unpacked is None or all(type(draft.payload) is bytes for draft in unpacked)
    first = first_of(damaged)
    assert first is None or type(first) is int


@given(st.binary(max_size=60) | st.from_regex(rb"(a\x00[0-9-]{1,3}\x00[01x]\x00-?\d{1,3}\x00){1,3}\x00.*"))
def test_a_damaged_front_is_refused_or_unpacked_and_never_raises(payload: bytes) -> None:
    """Lengths beyond the end or below zero, numbers that are none, too few of them."""
    unpacked = unpack(row([Draft("t", b"", 1)], flags=SEVERAL, payload=payload), nothing_before)
    assert unpacked is None or all(type(draft.payload) is bytes for draft in unpacked)


@pytest.mark.parametrize("change", [b"", b"more"], ids=["too long", "more behind it"])
def test_damage_cannot_make_a_row_grow_without_bounds(change: bytes) -> None:
    """A few bytes that inflate to many are refused, and so is what follows the end."""
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = deflater.compress(b"\0" * (100 if change else 10**8)) + deflater.flush()
    assert unpack(row([Draft("t", b"", 1)], flags=DEFLATED, payload=packed + change), nothing_before) is None


def test_lengths_that_go_back_and_forth_cannot_make_a_row_grow() -> None:
    """Each event of a row has its own bytes of it, so together they are never longer than the row."""
    front = b"".join(b"a\0001\0000\0%d\0" % length for length in [30_000, -29_999] * 500)
    payload = front + b"\0" + bytes(30_500)
    assert unpack(row([Draft("t", b"", 1)], flags=SEVERAL, payload=payload), nothing_before) is None


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
    """The columns are the last event's."""
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT seq, type, at_us, rolled_back & 1 FROM events ORDER BY seq").fetchall()
    connection.close()
    assert found == [(3, "type 3", 3, 1), (4, "type 4", 4, 0), (8, "type 8", 8, 0), (10, "type 10", 10, 0)]


def test_reading_may_begin_and_end_anywhere(path: Path) -> None:
    """Also in the middle of a row."""
    with SqliteLog(path, heartbeat=False) as log:
        for after in range(12):
            for upto in range(12):
                assert contents(log, after=after, upto=upto) == DRAFTS[after:upto]
            assert contents(log, after=after) == DRAFTS[after:]


@pytest.mark.parametrize("upto", range(1, 11))
def test_pruning_may_end_anywhere(path: Path, tmp_path: Path, upto: int) -> None:
    """What stays is whole, can be pruned and salvaged, and the session goes on."""
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


@pytest.mark.parametrize("seq", [3, 4, 8, 10])
@pytest.mark.parametrize(
    "damage",
    [
        "rolled_back = rolled_back + 1",
        "rolled_back = 4",
        "rolled_back = 2",
        "payload = zeroblob(2000)",
        "payload = substr(payload, 2)",
        "at_us = at_us + 1",
        "turn_id = 'other'",
        "checksum = zeroblob(16)",
        "type = ''",
        "seq = seq + 100",
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
        assert contents(log) == DRAFTS[pruned:]
    (report,) = SqliteLog.salvage(path, tmp_path / "new.db")
    assert report.events == 10 - pruned
    with SqliteLog(tmp_path / "new.db", heartbeat=False) as log:
        assert contents(log) == DRAFTS[pruned:]


# --- who writes --------------------------------------------------------------------------------------


@pytest.fixture
def logs(path: Path) -> Iterator[tuple[SqliteLog, SqliteLog]]:
    with SqliteLog(path, heartbeat=False) as first, SqliteLog(path, heartbeat=False) as second:
        yield first, second


def test_a_writer_that_remembers_its_place_is_refused_once_it_was_replaced(
    logs: tuple[SqliteLog, SqliteLog],
) -> None:
    """What an append remembers of the one before counts only while nobody else has written."""
    first, second = logs
    old = first.acquire(SESSION, owner="me")
    first.append(old, DRAFTS[:1], expected_seq=10)
    second.release(old)
    new = second.acquire(SESSION, owner="somebody else")
    with pytest.raises(StaleWriterError, match="taken over"):
        first.append(old, DRAFTS[:1], expected_seq=11)
    second.append(new, DRAFTS[:1], expected_seq=11)
    with pytest.raises(StaleWriterError, match="taken over"):
        first.append(old, DRAFTS[:1], expected_seq=12)
    assert contents(first) == [*DRAFTS, DRAFTS[0], DRAFTS[0]]


def test_a_lease_given_back_through_the_same_log_counts_no_more(path: Path) -> None:
    """What the log itself has written since is seen as well."""
    with SqliteLog(path, heartbeat=False) as log:
        lease = log.acquire(SESSION, owner="me")
        log.append(lease, DRAFTS[:1], expected_seq=10)
        log.release(lease)
        with pytest.raises(StaleWriterError, match="given back"):
            log.append(lease, DRAFTS[:1], expected_seq=11)


def test_two_logs_that_take_turns_continue_each_others_events(logs: tuple[SqliteLog, SqliteLog]) -> None:
    """One lease may be used through both; every append goes on from what is in the file."""
    lease = logs[0].acquire(SESSION, owner="me")
    for turn in range(6):
        logs[turn % 2].append(lease, DRAFTS[:1], expected_seq=10 + turn)
        logs[turn % 3 % 2].append(lease, [], expected_seq=11 + turn)
    for log in logs:
        assert contents(log) == DRAFTS + DRAFTS[:1] * 6
        assert log.check(SESSION).ok


def test_an_append_that_failed_is_not_remembered(path: Path) -> None:
    """The next one goes on from what was committed."""
    with SqliteLog(path, heartbeat=False) as log:
        lease = log.acquire(SESSION, owner="me")
        log.append(lease, DRAFTS[:1], expected_seq=10)
        with pytest.raises(StaleWriterError, match="is at event 11"):
            log.append(lease, DRAFTS[:1], expected_seq=10)
        log.append(lease, DRAFTS[:2], expected_seq=11)
        assert contents(log, after=10) == [DRAFTS[0], *DRAFTS[:2]]
        assert log.check(SESSION).ok


class _BusyOnce:
    """A connection where one statement finds the file in use at first, as another process may have it."""

    def __init__(self, connection: sqlite3.Connection, statement: str) -> None:
        self._connection = connection
        self._statement = statement
        self.refused = 0

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        if statement == self._statement and not self.refused:
            self.refused += 1
            raise still_in_use("not now")
        return self._connection.execute(statement, *values)

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)


@pytest.mark.parametrize(
    ("statement", "batch"),
    [
        pytest.param(CONTINUE, DRAFTS[:2], id="in one row"),
        pytest.param("COMMIT", [DRAFTS[0], DRAFTS[1]._replace(turn_id="another")], id="in two rows"),
    ],
)
def test_an_append_that_is_tried_again_begins_where_the_first_attempt_began(
    path: Path, statement: str, batch: list[Draft]
) -> None:
    """What was not committed does not count, not even for the writer itself."""
    with SqliteLog(path, heartbeat=False) as log:
        lease = log.acquire(SESSION, owner="me")
        log.append(lease, DRAFTS[:1], expected_seq=10)
        connection = log._database._connection
        assert connection is not None
        busy = _BusyOnce(connection, statement)
        log._database._connection = busy  # type: ignore[assignment]  # it does what a connection does
        log.append(lease, batch, expected_seq=11)
        assert busy.refused == 1
        assert contents(log, after=10) == [DRAFTS[0], *batch]
        assert log.check(SESSION).ok
