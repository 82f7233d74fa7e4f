"""The conformance suite for logs: every promise of `treenail.log.Log`, as tests.

To run it on an implementation of your own, subclass in a pytest module:

```python
from treenail.testing.log import LogConformance

class TestMyLog(LogConformance):
    def make_log(self, directory, clock):
        return MyLog(directory / "store", clock=clock)
```

`make_log` is called again on the same directory to open what an earlier log has left there. A log
that beats the heart of its leases by itself must be made without that: the suite has its own time.

The suite looks at a log through the protocol alone. It needs `pytest` and `hypothesis`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from treenail.clock import Clock, new_id
from treenail.errors import LeaseHeldError, SessionNotFoundError, StaleWriterError, UsageError
from treenail.log import GENESIS, Draft, Lease, Log, Note, chain_checksum, this_process_owner
from treenail.testing.clock import FakeClock

BIRTH = datetime(2026, 1, 1, 12, 30, 15, 123456, tzinfo=UTC)
"""When the suite's sessions are created."""

WEIRD_TEXTS = (
    "a",
    "naïve.Ünïcode",
    "日本語",
    "🪸 kelp",
    "a|b|None",
    "'; DROP TABLE events; --",
    "\u2028\t\n\x01",
    "x" * 5000,
)
"""Type names and ids that must come back as they were."""

REFUSED_TEXTS = ("nul\0inside", "lone \ud800 surrogate", "\udfff")
"""Text that not every store can keep, so that none accepts it."""


def drafts(*payloads: bytes, at_us: int = 1_000_000) -> list[Draft]:
    """Make a batch of plain events."""
    return [Draft("test.Event", payload, at_us + index) for index, payload in enumerate(payloads)]


def _in_threads(count: int, work: Callable[[], object]) -> None:
    """Do the same in several threads at once, and wait for all of them."""
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class LogConformance:
    """Subclass it, say how a log is made, and pytest checks it against the protocol."""

    histories = 15
    """How many random histories are compared with the model; fewer, where each step takes long."""

    def make_log(self, directory: Path, clock: Clock) -> Log:
        """Open the log in `directory`, which is empty at first, with that clock for its leases."""
        raise NotImplementedError

    def reopen(self, log: Log, directory: Path, clock: Clock) -> Log:
        """Close a log and open it again. A log that lives in memory only returns itself."""
        log.close()
        return self.make_log(directory, clock)

    @pytest.fixture
    def clock(self) -> FakeClock:
        """Make the clock of the log under test."""
        return FakeClock(BIRTH)

    @pytest.fixture
    def log(self, tmp_path: Path, clock: FakeClock) -> Iterator[Log]:
        """Make the log under test."""
        log = self.make_log(tmp_path, clock)
        yield log
        log.close()

    @pytest.fixture
    def session_id(self, log: Log) -> UUID:
        """Make an empty session."""
        session_id = new_id()
        log.create(session_id, created_at=BIRTH)
        return session_id

    @pytest.fixture
    def lease(self, log: Log, session_id: UUID) -> Lease:
        """Take the writer's lease on the empty session."""
        return log.acquire(session_id, owner=this_process_owner())

    def test_it_is_a_log(self, log: Log) -> None:
        """The implementation has every method of the protocol."""
        assert isinstance(log, Log)

    # --- sessions ------------------------------------------------------------------------------------

    def test_a_new_session_is_empty_and_described_as_it_was_made(self, log: Log) -> None:
        """Time, parent and tags come back exactly, in order."""
        session_id, parent_id = new_id(), new_id()
        tags = {"b": "2", "a": "1", "🪸": "naïve 'quoted' \"text\""}
        log.create(session_id, created_at=BIRTH, parent_id=parent_id, tags=tags)
        info = log.info(session_id)
        assert (info.session_id, info.created_at, info.parent_id) == (session_id, BIRTH, parent_id)
        assert info.tags == tuple(tags.items())
        assert (info.head, info.first, info.owner) == (0, 1, None)
        assert list(log.read(session_id)) == []
        assert log.note(session_id) is None
        assert log.latest_snapshot(session_id) is None

    def test_a_session_cannot_be_created_twice(self, log: Log, session_id: UUID) -> None:
        """The second attempt is refused, and the first session is as it was."""
        with pytest.raises(UsageError, match=str(session_id)):
            log.create(session_id, created_at=BIRTH + timedelta(days=1), tags={"other": "one"})
        assert log.info(session_id).created_at == BIRTH
        assert log.info(session_id).tags == ()

    def test_a_naive_time_is_refused(self, log: Log) -> None:
        """A time without a zone means something else on every machine."""
        session_id = new_id()
        with pytest.raises(UsageError):
            log.create(session_id, created_at=BIRTH.replace(tzinfo=None))
        with pytest.raises(SessionNotFoundError):
            log.info(session_id)

    def test_tags_that_not_every_store_can_keep_are_refused(self, log: Log) -> None:
        """Neither as a name nor as a value; no session is made."""
        for text in REFUSED_TEXTS:
            for tags in ({text: "value"}, {"name": text}):
                with pytest.raises(UsageError):
                    log.create(new_id(), created_at=BIRTH, tags=tags)
        assert list(log.sessions()) == []

    def test_sessions_are_listed_oldest_first(self, log: Log) -> None:
        """By the time of creation, whatever the order of the calls; children can be asked for alone."""
        ids = [new_id() for _ in range(5)]
        for place in (3, 0, 4, 2, 1):
            parent_id = ids[0] if place in (2, 4) else None
            log.create(ids[place], created_at=BIRTH + timedelta(seconds=place), parent_id=parent_id)
        assert [info.session_id for info in log.sessions()] == ids
        assert [info.session_id for info in log.sessions(parent_id=ids[0])] == [ids[2], ids[4]]
        assert list(log.sessions(parent_id=ids[1])) == []

    def test_an_unknown_session_is_said_to_be_unknown(self, log: Log, lease: Lease) -> None:
        """Every method that names a session raises `SessionNotFoundError`, at the call."""
        unknown = new_id()
        nobody = Lease(unknown, 1, "nobody", 10.0, BIRTH)
        for attempt in (
            lambda: log.info(unknown),
            lambda: log.acquire(unknown, owner="x"),
            lambda: log.renew(nobody),
            lambda: log.append(nobody, drafts(b"x"), expected_seq=0),
            lambda: log.read(unknown),
            lambda: log.put_snapshot(nobody, 0, b""),
            lambda: log.latest_snapshot(unknown),
            lambda: log.prune(nobody, upto=0),
            lambda: log.erase(unknown),
            lambda: log.check(unknown),
        ):
            with pytest.raises(SessionNotFoundError, match=str(unknown)):
                attempt()

    # --- appending and reading -----------------------------------------------------------------------

    def test_every_field_comes_back(self, log: Log, session_id: UUID, lease: Lease) -> None:
        """Times to the microsecond, absent ids as absent, the mark of a rolled back call as it was."""
        batch = [
            Draft("a.B", b"", 0),
            Draft("a.B", bytes(range(256)), -62_000_000_000_000_000, "turn", None, "trace", True),
            Draft("a.B", b"\0", 250_000_000_000_123_456, None, "run", None, False),
            Draft("a.B", b"", 1, "", "", "", True),
        ]
        log.append(lease, batch, expected_seq=0)
        assert [event.draft for event in log.read(session_id)] == batch

    def test_any_text_names_a_type_or_an_id(self, log: Log, session_id: UUID, lease: Lease) -> None:
        """Names are data: nothing in them is interpreted or changed."""
        batch = [Draft(text, b"x", 1, text, text, text) for text in WEIRD_TEXTS]
        batch += [Draft(text, b"x", 1, None, text, None) for text in WEIRD_TEXTS]
        log.append(lease, batch, expected_seq=0)
        assert [event.draft for event in log.read(session_id)] == batch

    def test_text_that_not_every_store_can_keep_is_refused(self, log: Log, lease: Lease) -> None:
        """A whole batch is refused for one bad name, and nothing is written."""
        for text in REFUSED_TEXTS:
            for bad in (
                Draft(text, b"x", 1),
                Draft("t", b"x", 1, text),
                Draft("t", b"x", 1, None, text),
                Draft("t", b"x", 1, None, None, text),
            ):
                with pytest.raises(UsageError):
                    log.append(lease, [*drafts(b"good"), bad], expected_seq=0)
        assert log.info(lease.session_id).head == 0

    def test_what_could_not_be_read_again_is_refused(self, log: Log, lease: Lease) -> None:
        """Refused before anything is written, with the good events of the same batch."""
        for bad in (
            Draft("", b"x", 1),
            Draft("t", "text", 1),  # type: ignore[arg-type]  # what a caller without types may do
            Draft("t", bytearray(b"x"), 1),  # type: ignore[arg-type]  # it could change after the append
            Draft("t", b"x", 1.5),  # type: ignore[arg-type]  # not whole microseconds
            Draft("t", b"x", 1 << 63),
            Draft("t", b"x", -(1 << 62)),
            Draft("t", b"x", 1, rolled_back=2),  # type: ignore[arg-type]  # neither true nor false
            Draft("t", b"x", 1, rolled_back=None),  # type: ignore[arg-type]  # what is wrong is the point
        ):
            with pytest.raises(UsageError):
                log.append(lease, [*drafts(b"good"), bad], expected_seq=0)
        assert log.info(lease.session_id).head == 0

    def test_checksums_are_chained(self, log: Log, session_id: UUID, lease: Lease) -> None:
        """Each event's checksum follows from its content and its predecessor's checksum alone."""
        log.append(lease, drafts(b"one", b"two"), expected_seq=0)
        log.append(lease, drafts(b"three"), expected_seq=2)
        previous = GENESIS
        for event in log.read(session_id):
            previous = chain_checksum(previous, session_id, event.seq, event.draft)
            assert event.checksum == previous

    def test_an_append_that_expects_another_head_is_refused(
        self, log: Log, session_id: UUID, lease: Lease
    ) -> None:
        """Behind or ahead: the message names both numbers, and nothing is written."""
        log.append(lease, drafts(b"one", b"two"), expected_seq=0)
        before = list(log.read(session_id))
        for expected_seq in (-1, 0, 1, 3, 100):
            with pytest.raises(StaleWriterError, match=rf"\b2\b.*{expected_seq}"):
                log.append(lease, drafts(b"three"), expected_seq=expected_seq)
        assert list(log.read(session_id)) == before

    def test_a_range_is_open_below_and_closed_above(self, log: Log, session_id: UUID, lease: Lease) -> None:
        """Exactly the events with `after < seq <= upto`; ends that are out of reach are not an error."""
        log.append(lease, drafts(*(bytes([n]) for n in range(5))), expected_seq=0)
        for after in (-5, 0, 1, 4, 5, 6, 100):
            for upto in (None, -1, 0, 1, 3, 5, 100):
                want = [seq for seq in range(1, 6) if after < seq and (upto is None or seq <= upto)]
                assert [event.seq for event in log.read(session_id, after=after, upto=upto)] == want

    def test_a_reader_can_take_its_time(self, log: Log, session_id: UUID, lease: Lease) -> None:
        """Half-read events neither block the writer nor see what it adds; another reader does."""
        log.append(lease, drafts(*[b"x"] * 1500), expected_seq=0)
        slow = log.read(session_id)
        seen = [next(slow).seq]
        log.append(lease, drafts(b"new"), expected_seq=1500)
        seen += [event.seq for event in slow]
        assert seen == list(range(1, 1501))
        assert len(list(log.read(session_id))) == 1501

    def test_a_big_payload(self, log: Log, session_id: UUID, lease: Lease) -> None:
        """Ten megabytes in one event, between two small ones."""
        big = bytes(range(256)) * (10 * 4096)
        log.append(lease, drafts(b"before", big, b"after"), expected_seq=0)
        assert [event.payload for event in log.read(session_id)] == [b"before", big, b"after"]

    def test_ten_thousand_events(
        self, log: Log, session_id: UUID, lease: Lease, tmp_path: Path, clock: FakeClock
    ) -> None:
        """A long session is read whole, and survives being closed."""
        for start in range(0, 10_000, 500):
            log.append(lease, drafts(*(b"%d" % n for n in range(start, start + 500))), expected_seq=start)
        again = self.reopen(log, tmp_path, clock)
        try:
            assert again.info(session_id).head == 10_000
            assert [event.payload for event in again.read(session_id)] == [b"%d" % n for n in range(10_000)]
            assert [event.seq for event in again.read(session_id, after=9_998)] == [9_999, 10_000]
            assert again.check(session_id).ok
        finally:
            again.close()

    # --- one writer at a time ------------------------------------------------------------------------

    def test_a_lease_says_what_was_asked_for(self, log: Log, session_id: UUID, clock: FakeClock) -> None:
        """Owner, duration and expiry; the session names its writer."""
        lease = log.acquire(session_id, owner="somebody", ttl_s=2.5)
        assert (lease.session_id, lease.owner, lease.ttl_s) == (session_id, "somebody", 2.5)
        assert lease.expires_at == clock.now() + timedelta(seconds=2.5)
        assert log.info(session_id).owner == "somebody"
        assert [info.owner for info in log.sessions()] == ["somebody"]

    def test_a_held_lease_is_refused(self, log: Log, session_id: UUID) -> None:
        """To others and to the holder alike: two writers in one process are two writers."""
        held = log.acquire(session_id, owner="somebody")
        for owner in ("somebody", "somebody else"):
            with pytest.raises(LeaseHeldError, match="somebody") as refusal:
                log.acquire(session_id, owner=owner)
            assert refusal.value.owner == "somebody"
        log.append(held, drafts(b"still mine"), expected_seq=0)
        assert log.info(session_id).head == 1

    def test_a_lease_lasts_for_some_time(self, log: Log, session_id: UUID) -> None:
        """Neither no time nor for ever."""
        for ttl_s in (0, -1.0, float("nan"), float("inf")):
            with pytest.raises(UsageError):
                log.acquire(session_id, owner="somebody", ttl_s=ttl_s)
        assert log.info(session_id).owner is None

    def test_an_expired_lease_is_taken_over(self, log: Log, session_id: UUID, clock: FakeClock) -> None:
        """Not a moment before its time, and then at once; the old writer is fenced off."""
        old = log.acquire(session_id, owner="old", ttl_s=10)
        log.append(old, drafts(b"one"), expected_seq=0)
        clock.advance(9.999999)
        with pytest.raises(LeaseHeldError):
            log.acquire(session_id, owner="new")
        clock.advance(0.000001)
        assert log.info(session_id).owner is None
        new = log.acquire(session_id, owner="new")
        assert new.epoch > old.epoch
        for attempt in (
            lambda: log.append(old, drafts(b"stale"), expected_seq=1),
            lambda: log.put_snapshot(old, 1, b"stale"),
            lambda: log.prune(old, upto=0),
            lambda: log.renew(old),
            lambda: log.put_note(old, b"stale"),
        ):
            with pytest.raises(StaleWriterError, match=str(session_id)):
                attempt()
        assert log.latest_snapshot(session_id) is None
        log.append(new, drafts(b"two"), expected_seq=1)
        assert [event.payload for event in log.read(session_id)] == [b"one", b"two"]

    def test_an_expired_lease_that_nobody_took_still_counts(
        self, log: Log, session_id: UUID, clock: FakeClock
    ) -> None:
        """A writer that slept too long may continue if no other has taken over."""
        lease = log.acquire(session_id, owner="sleeper", ttl_s=10)
        clock.advance(1000)
        log.append(lease, drafts(b"late"), expected_seq=0)
        renewed = log.renew(lease)
        assert renewed.expires_at == clock.now() + timedelta(seconds=10)
        with pytest.raises(LeaseHeldError):
            log.acquire(session_id, owner="other")

    def test_a_heartbeat_extends_the_lease(self, log: Log, session_id: UUID, clock: FakeClock) -> None:
        """It counts from the moment of the heartbeat; epoch and owner stay."""
        lease = log.acquire(session_id, owner="writer", ttl_s=10)
        for _ in range(5):
            clock.advance(9)
            renewed = log.renew(lease)
            assert renewed.expires_at == clock.now() + timedelta(seconds=10)
            assert (renewed.epoch, renewed.owner, renewed.ttl_s) == (lease.epoch, "writer", 10)
        with pytest.raises(LeaseHeldError):
            log.acquire(session_id, owner="other")
        log.append(lease, drafts(b"the first object is as good as the renewed one"), expected_seq=0)
        assert log.info(session_id).head == 1

    def test_a_released_lease_is_free_and_dead(self, log: Log, session_id: UUID) -> None:
        """Somebody else may write at once, with a greater epoch; the old lease writes nothing."""
        old = log.acquire(session_id, owner="old")
        log.release(old)
        assert log.info(session_id).owner is None
        with pytest.raises(StaleWriterError):
            log.append(old, drafts(b"stale"), expected_seq=0)
        with pytest.raises(StaleWriterError):
            log.renew(old)
        new = log.acquire(session_id, owner="new")
        assert new.epoch > old.epoch
        log.release(old)
        log.append(new, drafts(b"a late release takes nothing away"), expected_seq=0)
        assert log.info(session_id).owner == "new"

    # --- notes ---------------------------------------------------------------------------------------

    def test_a_note_replaces_the_one_before(
        self, log: Log, session_id: UUID, tmp_path: Path, clock: FakeClock
    ) -> None:
        """It says who wrote it, costs no event, and survives a release and a reopening."""
        assert log.note(session_id) is None
        lease = log.acquire(session_id, owner="writer")
        for payload in (b"one", b"", b"three"):
            log.put_note(lease, payload)
            assert log.note(session_id) == Note(lease.epoch, payload)
        assert log.info(session_id).head == 0
        log.release(lease)
        with pytest.raises(StaleWriterError):
            log.put_note(lease, b"too late")
        again = self.reopen(log, tmp_path, clock)
        try:
            assert again.note(session_id) == Note(lease.epoch, b"three")
            assert again.acquire(session_id, owner="next").epoch != lease.epoch
            assert again.check(session_id).ok
        finally:
            again.close()

    # --- stored snapshots ----------------------------------------------------------------------------

    def test_a_snapshot_of_no_place_is_refused(self, log: Log, session_id: UUID, lease: Lease) -> None:
        """It must belong to an event that is there, or to the beginning."""
        log.append(lease, drafts(b"1", b"2"), expected_seq=0)
        for seq in (-1, 3, 1000):
            with pytest.raises(UsageError):
                log.put_snapshot(lease, seq, b"state")
        assert log.latest_snapshot(session_id) is None

    # --- deleting ------------------------------------------------------------------------------------

    def test_prune_needs_a_snapshot(self, log: Log, session_id: UUID, lease: Lease) -> None:
        """Only what a stored snapshot covers can go; a refusal changes nothing."""
        log.append(lease, drafts(*[b"x"] * 5), expected_seq=0)
        events = list(log.read(session_id))
        with pytest.raises(UsageError, match="snapshot"):
            log.prune(lease, upto=1)
        log.put_snapshot(lease, 3, b"state")
        with pytest.raises(UsageError, match=r"\b3\b"):
            log.prune(lease, upto=4)
        assert list(log.read(session_id)) == events
        assert log.info(session_id).first == 1

    def test_an_erased_session_is_gone(self, log: Log, session_id: UUID, lease: Lease) -> None:
        """With its events, snapshots and lease; its neighbours are as they were; its id is free."""
        other = new_id()
        log.create(other, created_at=BIRTH, parent_id=session_id)
        neighbour = log.acquire(other, owner=this_process_owner())
        log.append(neighbour, drafts(b"kept"), expected_seq=0)
        kept = list(log.read(other))
        log.append(lease, drafts(b"gone"), expected_seq=0)
        log.put_snapshot(lease, 1, b"gone")
        log.put_note(lease, b"gone")
        log.release(lease)
        log.erase(session_id)
        assert [info.session_id for info in log.sessions()] == [other]
        for attempt in (
            lambda: log.read(session_id),
            lambda: log.append(lease, drafts(b"back"), expected_seq=1),
            lambda: log.erase(session_id),
        ):
            with pytest.raises(SessionNotFoundError):
                attempt()
        assert list(log.read(other)) == kept
        log.create(session_id, created_at=BIRTH)
        assert list(log.read(session_id)) == []
        assert log.latest_snapshot(session_id) is None

    def test_a_session_that_is_being_written_is_not_erased(
        self, log: Log, session_id: UUID, lease: Lease, clock: FakeClock
    ) -> None:
        """Refused while the lease is held, allowed afterwards."""
        log.append(lease, drafts(b"alive"), expected_seq=0)
        with pytest.raises(LeaseHeldError):
            log.erase(session_id)
        assert log.info(session_id).head == 1
        clock.advance(lease.ttl_s + 1)
        log.erase(session_id)
        assert list(log.sessions()) == []

    # --- checking, threads ---------------------------------------------------------------------------

    def test_a_sound_session_has_a_good_report(self, log: Log, session_id: UUID, lease: Lease) -> None:
        """It counts the events and finds nothing."""
        report = log.check(session_id)
        assert (report.ok, report.events, report.last_good_seq) == (True, 0, 0)
        log.append(lease, drafts(b"1", b"2"), expected_seq=0)
        log.put_snapshot(lease, 1, b"state")
        report = log.check(session_id)
        assert (report.session_id, report.ok, report.events, report.last_good_seq) == (session_id, True, 2, 2)

    def test_threads_that_race_for_one_place_take_turns(
        self, log: Log, session_id: UUID, lease: Lease
    ) -> None:
        """Each number is given once; a late writer is refused, and nothing is lost or doubled."""
        written: list[bytes] = []
        start = threading.Barrier(4)

        def write() -> None:
            start.wait()
            name = b"%d" % threading.get_ident()
            for attempt in range(1000):
                if len(written) >= 100:
                    return
                payload = b"%s-%d" % (name, attempt)
                try:
                    log.append(lease, drafts(payload), expected_seq=log.info(session_id).head)
                except StaleWriterError:
                    continue
                written.append(payload)

        _in_threads(4, write)
        events = list(log.read(session_id))
        assert len(written) >= 100
        assert [event.seq for event in events] == list(range(1, len(written) + 1))
        assert sorted(event.payload for event in events) == sorted(written)

    def test_threads_read_while_others_write(self, log: Log, session_id: UUID, lease: Lease) -> None:
        """A reader sees whole batches only: every prefix that it gets ends where an append ended."""
        stop = threading.Event()
        lengths: list[int] = []
        failures: list[BaseException] = []

        def read() -> None:
            try:
                while not stop.is_set():
                    lengths.append(len(list(log.read(session_id))))
            except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
                failures.append(error)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for step in range(30):
            log.append(lease, drafts(b"a", b"b", b"c"), expected_seq=3 * step)
        stop.set()
        for reader in readers:
            reader.join()
        assert failures == []
        assert lengths
        assert all(length % 3 == 0 for length in lengths)

    def test_only_one_of_many_gets_the_lease(self, log: Log, session_id: UUID) -> None:
        """However many threads ask at the same moment."""
        start = threading.Barrier(8)
        got: list[Lease] = []
        refused: list[LeaseHeldError] = []

        def ask() -> None:
            start.wait()
            try:
                got.append(log.acquire(session_id, owner=this_process_owner()))
            except LeaseHeldError as error:
                refused.append(error)

        _in_threads(8, ask)
        assert (len(got), len(refused)) == (1, 7)

    # --- the law -------------------------------------------------------------------------------------

    def test_any_history_equals_the_model(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Appends, snapshots, prunes, take-overs, restarts and erasures in any order, against a list."""
        suite = self

        class Machine(_History):
            def open(self) -> None:
                self.directory = tmp_path_factory.mktemp("history")
                self.log = suite.make_log(self.directory, self.clock)

            def restart(self) -> None:
                self.log = suite.reopen(self.log, self.directory, self.clock)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=self.histories,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


_payloads = st.binary(max_size=40) | st.integers(1, 9000).map(lambda size: b"*" * size)
_texts = st.none() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
_drafts = st.builds(
    Draft,
    type=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8),
    payload=_payloads,
    at_us=st.integers(-(10**15), 10**15),
    turn_id=_texts,
    run_id=_texts,
    trace_id=_texts,
    rolled_back=st.booleans(),
)


class _History(RuleBasedStateMachine):
    """A log beside the simplest thing that could be one: a list of drafts and a few numbers."""

    log: Log
    directory: Path

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock(BIRTH)
        self.session_id = new_id()
        self.neighbour = new_id()

    def open(self) -> None:
        """Open the log for the first time."""
        raise NotImplementedError

    def restart(self) -> None:
        """Close the log and open it again."""
        raise NotImplementedError

    def teardown(self) -> None:
        """Close the log."""
        self.log.close()

    @initialize()
    def begin(self) -> None:
        self.open()
        self.log.create(self.neighbour, created_at=BIRTH)
        other = self.log.acquire(self.neighbour, owner="neighbour", ttl_s=1e6)
        self.log.append(other, drafts(b"neighbour"), expected_seq=0)
        self.stale: list[Lease] = []
        self.lease: Lease | None = None
        self.create()

    def create(self) -> None:
        self.log.create(self.session_id, created_at=BIRTH)
        self.events: list[Draft] = []
        self.pruned = 0
        self.snapshots: dict[int, bytes] = {}

    @precondition(lambda self: self.lease is None)
    @rule()
    def acquire(self) -> None:
        self.lease = self.log.acquire(self.session_id, owner="me")
        assert all(self.lease.epoch > old.epoch for old in self.stale)

    @precondition(lambda self: self.lease is not None)
    @rule(batch=st.lists(_drafts, max_size=4))
    def append(self, batch: list[Draft]) -> None:
        assert self.lease is not None
        self.log.append(self.lease, batch, expected_seq=len(self.events))
        self.events += batch

    @rule(batch=st.lists(_drafts, max_size=2), off=st.sampled_from([-1, 1]))
    def append_stale(self, batch: list[Draft], off: int) -> None:
        attempts = [(old, len(self.events)) for old in self.stale]
        if self.lease is not None:
            attempts.append((self.lease, len(self.events) + off))
        for lease, expected_seq in attempts:
            with pytest.raises(StaleWriterError):
                self.log.append(lease, batch, expected_seq=expected_seq)

    @precondition(lambda self: self.lease is not None)
    @rule(data=st.data(), payload=_payloads)
    def snapshot(self, data: st.DataObject, payload: bytes) -> None:
        assert self.lease is not None
        seq = data.draw(st.integers(self.pruned, len(self.events)))
        self.log.put_snapshot(self.lease, seq, payload)
        self.snapshots[seq] = payload

    @precondition(lambda self: self.lease is not None and self.snapshots)
    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        assert self.lease is not None
        upto = data.draw(st.integers(0, max(self.snapshots)))
        assert self.log.prune(self.lease, upto=upto) == max(upto - self.pruned, 0)
        self.pruned = max(upto, self.pruned)

    @precondition(lambda self: self.lease is not None)
    @rule()
    def release(self) -> None:
        assert self.lease is not None
        self.log.release(self.lease)
        self.stale.append(self.lease)
        self.lease = None

    @precondition(lambda self: self.lease is not None)
    @rule()
    def take_over(self) -> None:
        assert self.lease is not None
        self.clock.advance(self.lease.ttl_s)
        self.stale.append(self.lease)
        self.lease = self.log.acquire(self.session_id, owner="another")

    @rule()
    def reopen(self) -> None:
        if self.lease is not None:
            self.stale.append(self.lease)
            self.lease = None
        self.restart()

    @precondition(lambda self: self.lease is None)
    @rule()
    def erase(self) -> None:
        self.log.erase(self.session_id)
        with pytest.raises(SessionNotFoundError):
            self.log.info(self.session_id)
        self.stale.clear()
        self.create()

    @invariant()
    def everything_is_as_in_the_model(self) -> None:
        info = self.log.info(self.session_id)
        assert (info.first, info.head) == (self.pruned + 1, len(self.events))
        assert info.owner == (self.lease.owner if self.lease else None)
        stored = list(self.log.read(self.session_id))
        assert [event.draft for event in stored] == self.events[self.pruned :]
        assert [event.seq for event in stored] == list(range(self.pruned + 1, len(self.events) + 1))
        found = self.log.latest_snapshot(self.session_id)
        assert (found and (found.seq, found.payload)) == (
            max(self.snapshots.items()) if self.snapshots else None
        )
        assert self.log.check(self.session_id).ok
        assert [event.payload for event in self.log.read(self.neighbour)] == [b"neighbour"]
