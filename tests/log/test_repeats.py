"""What an append says twice is stored once: very long texts, and every text in a file of version 3."""

import gzip
import json
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.errors import LogDamagedError
from treenail.log import Draft, Envelope
from treenail.log.migrations import LATEST
from treenail.log.repeats import REACH, with_repeats, without_repeats
from treenail.log.sqlite import SqliteLog

from .conftest import BIRTH

VERSION_3 = Path(__file__).with_name("version-3.db.gz")
SESSION = UUID(int=7)
SAID = "what a tool has said, at length; " * 40
MESSAGE = json.dumps({"role": "tool", "content": SAID + "and more"}).encode()
INVOKED = json.dumps({"name": "look", "result": {"message": SAID, "success": True}}).encode()
DRAFTS = [Draft("message", MESSAGE, 1, "turn"), Draft("invoked", INVOKED, 2, "turn", rolled_back=True)]


texts = st.text(st.sampled_from('ab"\\\n\u2028é'), max_size=12).map(lambda text: text * 40)
payloads = st.dictionaries(st.sampled_from("xyz"), texts).map(
    lambda data: json.dumps(data, ensure_ascii=False).encode()
) | st.binary(max_size=600)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Lay out a file that version 3 made: two appends of two events each, which are `DRAFTS`."""
    path = tmp_path / "log.db"
    path.write_bytes(gzip.decompress(VERSION_3.read_bytes()))
    return path


def contents(events: Iterable[Envelope]) -> list[tuple[int, bytes, bool]]:
    return [(each.seq, each.payload, each.rolled_back) for each in events]


ALL = [(1, MESSAGE, False), (2, INVOKED, True), (3, MESSAGE, False), (4, INVOKED, True)]


def test_damage_cannot_make_a_payload_grow_without_bounds() -> None:
    """A few bytes that name the same long text again and again are refused."""
    said = b"y" * 200_000
    assert with_repeats(b"0:1:0:200000\n", lambda back: said) == said
    assert with_repeats(b",".join([b"0:1:0:200000"] * 1000) + b"\n", lambda back: said) is None


def test_what_is_no_json_is_searched_in_one_pass() -> None:
    """A quote that nothing closes does not make the search begin again at every quote behind it."""
    payload = b'"' + b'\\"' * 20_000
    started = time.thread_time()
    stored = without_repeats(payload, [payload])
    assert time.thread_time() - started < 2
    assert stored is not None and with_repeats(stored, lambda back: payload) == payload


@given(st.lists(payloads, min_size=1, max_size=REACH + 2), st.data())
def test_a_payload_comes_back_byte_for_byte(before: list[bytes], data: st.DataObject) -> None:
    """Whatever the payload is, and whichever of those before it are stored whole."""
    payload = data.draw(payloads | st.sampled_from(before))
    known = [data.draw(st.sampled_from([each, None])) for each in before]
    stored = without_repeats(payload, known)
    if stored is not None:
        assert with_repeats(stored, lambda back: known[-back]) == payload


@given(st.binary(max_size=80) | st.from_regex(rb"\d{1,4}:[1-5]:\d{1,3}:\d{1,3}\n.*", fullmatch=True))
def test_nonsense_is_refused_and_never_raises(stored: bytes) -> None:
    """A damaged row may hold anything."""
    made = with_repeats(stored, lambda back: b"0123456789" if back < REACH else None)
    assert made is None or isinstance(made, bytes)


def test_it_is_read_as_it_was_written_and_left_as_it_is(path: Path) -> None:
    """The text that stands twice in each append is in the file once for each."""
    before = path.read_bytes()
    assert before.count(SAID.encode()) == 2
    with SqliteLog(path, heartbeat=False, read_only=True) as log:
        assert contents(log.read(SESSION)) == ALL
        assert log.info(SESSION).tags == (("made", "by version 3"),)
        assert log.check(SESSION).ok
    assert path.read_bytes() == before


def test_it_goes_on(path: Path) -> None:
    """What is there stays as it is, and what follows is written as it is written now."""
    with SqliteLog(path, heartbeat=False) as log:
        lease = log.acquire(SESSION, owner="me")
        log.append(lease, DRAFTS, expected_seq=4)
        more = [(5, MESSAGE, False), (6, INVOKED, True)]
        for after in range(6):
            assert contents(log.read(SESSION, after=after)) == [*ALL, *more][after:]
        assert log.check(SESSION).ok
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (LATEST,)
    assert connection.execute("SELECT seq FROM events ORDER BY seq").fetchall() == [
        (1,),
        (2,),
        (3,),
        (4,),
        (6,),
    ]
    connection.close()


def test_a_reference_says_what_belongs_where(path: Path) -> None:
    """One line, and JSON in which the text is empty."""
    connection = sqlite3.connect(path)
    (stored,) = connection.execute("SELECT payload FROM events WHERE seq = 2").fetchone()
    connection.close()
    line, rest = stored.split(b"\n", 1)
    at, back, start, length = map(int, line.split(b":"))
    assert json.loads(rest) == {"name": "look", "result": {"message": "", "success": True}}
    assert back == 1
    assert MESSAGE[start : start + length].decode() == SAID
    assert rest[:at].endswith(b'"message": "')


def test_reading_may_begin_between_a_text_and_its_repetition(path: Path) -> None:
    """What is needed of the event before is looked up."""
    with SqliteLog(path, heartbeat=False) as log:
        assert contents(log.read(SESSION, after=1)) == ALL[1:]
        assert contents(log.read(SESSION, after=3)) == ALL[3:]


def test_pruning_between_them_leaves_the_later_one_whole(path: Path) -> None:
    """What goes takes nothing along that stays."""
    with SqliteLog(path, heartbeat=False) as log:
        lease = log.acquire(SESSION, owner="me")
        log.put_snapshot(lease, 4, b"state")
        assert log.prune(lease, upto=3) == 3
        assert contents(log.read(SESSION)) == ALL[3:]
        assert log.check(SESSION).ok
    with SqliteLog(path, heartbeat=False) as log:
        assert contents(log.read(SESSION)) == ALL[3:]


def test_salvage_finds_both_whole(path: Path, tmp_path: Path) -> None:
    """Also without SQLite."""
    target = tmp_path / "new.db"
    (report,) = SqliteLog.salvage(path, target)
    assert report.ok
    with SqliteLog(target, heartbeat=False) as log:
        assert contents(log.read(SESSION)) == ALL


def test_a_changed_text_is_noticed_where_it_is_repeated_as_well(path: Path) -> None:
    """No reader is ever told something else than what was written, wherever it begins."""
    content, said = path.read_bytes(), SAID.encode()
    first = content.rindex(said)  # Pages are filled from their end.
    path.write_bytes(content[:first] + said.upper() + content[first + len(said) :])
    with SqliteLog(path, heartbeat=False) as log:
        for after in (0, 1):
            with pytest.raises(LogDamagedError, match="event 1 of session") as caught:
                list(log.read(SESSION, after=after))
            assert caught.value.last_good_seq == 0
        assert contents(log.read(SESSION, after=2)) == ALL[2:]


def test_very_long_texts_are_abbreviated_still(tmp_path: Path) -> None:
    """They are read, pruned and salvaged as those of version 3 are."""
    said = Random(9).randbytes(50_000).hex().encode()
    message, invoked = b'{"content":"%s"}' % said, b'{"result":"%s"}' % said
    batch = [Draft("message", message, 1), Draft("small", b"{}", 2), Draft("invoked", invoked, 3)]
    path = tmp_path / "log.db"
    with SqliteLog(path, heartbeat=False) as log:
        log.create(SESSION, created_at=BIRTH)
        lease = log.acquire(SESSION, owner="me")
        log.append(lease, batch, expected_seq=0)
        log.append(lease, batch, expected_seq=3)
        written = [message, b"{}", invoked] * 2
        for after in range(6):
            assert [each.payload for each in log.read(SESSION, after=after)] == written[after:]
        reader = sqlite3.connect(path)
        assert reader.execute("SELECT max(length(payload)) FROM events WHERE seq % 3 = 0").fetchone() < (100,)
        reader.close()
        log.put_snapshot(lease, 6, b"state")
        assert log.prune(lease, upto=2) == 2
        assert [each.payload for each in log.read(SESSION)] == written[2:]
        assert log.check(SESSION).ok
    (report,) = SqliteLog.salvage(path, tmp_path / "new.db")
    assert report.ok
    with SqliteLog(tmp_path / "new.db", heartbeat=False) as log:
        assert [each.payload for each in log.read(SESSION)] == written[2:]
