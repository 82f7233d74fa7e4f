"""Opening a session again: the same state, whatever was stored, and a report of what was not understood."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from state_kit import Add, Box, CountingLog, Note, Page, Peeked, Said, Seen, Tally, Total, equip, opened_log

from treenail.codec import Codec, TypeRegistry, codec
from treenail.errors import (
    LeaseHeldError,
    LogDamagedError,
    SessionNotFoundError,
    SnapshotRestoreError,
    UsageError,
)
from treenail.log import Draft, Log, MemoryLog, SlicePolicy
from treenail.log.sqlite import SqliteLog
from treenail.state import Append, Session, append_all, core, replace_latest


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """A file: what is found again must come from the disk."""
    with opened_log("sqlite", tmp_path) as opened:
        yield opened


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store a snapshot every four events."""
    monkeypatch.setattr(core, "SNAPSHOT_EVERY", 4)


def reopened(session: Session) -> Session:
    session.close()
    return equip(Session.open(session.log, session.session_id))


def everything(session: Session) -> dict[type, tuple[Any, ...]]:
    return dict(session.snapshot(include_all=True).slices)


def test_a_session_is_found_again_as_it_was(log: Log) -> None:
    parent = Session(log=log)
    session = equip(Session(log=log, parent=parent, tags={"team": "a"}))
    session.dispatch_all([Note("a"), Said("b"), Add(3), Box([1, 2]), Page(title="t"), Peeked(1)])
    again = reopened(session)
    assert everything(again) == everything(session)
    assert again.head == session.head == 6
    assert again.tags == session.tags
    assert again.created_at == session.created_at
    assert again.parent_id == parent.session_id
    assert again.report.ok
    assert again.report.events == 6


def test_a_session_has_one_writer_and_any_number_of_readers(log: Log) -> None:
    session = Session(log=log)
    session.dispatch(Note("a"))
    with pytest.raises(LeaseHeldError, match="this very program") as refusal:
        Session.open(log, session.session_id)
    assert refusal.value.holder.startswith("this very program")
    assert Session.open(log, session.session_id, read_only=True)[Note].all() == (Note("a"),)
    with pytest.raises(SessionNotFoundError):
        Session.open(log, uuid4())
    with pytest.raises(UsageError, match="read_only"):
        Session.open(log, session.session_id, upto=1)


def test_a_session_can_be_seen_as_it_was_after_any_event(log: Log) -> None:
    session = equip(Session(log=log))
    for number in range(1, 5):
        session.dispatch(Add(number))
    seen = [
        equip(Session.open(log, session.session_id, read_only=True, upto=upto))[Total].all()
        for upto in range(5)
    ]
    assert seen == [(), (Total(1),), (Total(3),), (Total(6),), (Total(10),)]


# --- stored snapshots -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager")
def test_opening_starts_from_the_stored_snapshot_and_each_message_is_stored_once(log: Log) -> None:
    session = equip(Session(log=log))
    for number in range(40):
        session.dispatch_all([Said(f"message {number}"), Add(number)])
    session.dispatch(Note("after"))
    stored = log.latest_snapshot(session.session_id)
    assert stored is not None
    assert b"message" not in stored.payload, "items that are events are referred to"
    again = reopened(session)
    assert everything(again) == everything(session)
    assert again.report.snapshot_seq >= 40
    assert again.report.events < 41


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "registered",
    [
        lambda session: session[Total].register(Add, append_total),
        lambda session: (session[Note].register(Note, replace_latest), equip(session)),
        lambda session: (equip(session), session[Peeked].register(Add, lambda slice_, event: slice_)),
        lambda session: (session.install(Tally, initial=Tally), equip(session)),
        lambda session: (equip(session), session[Note].register(Note, append_all, policy=SlicePolicy.LOG)),
    ],
    ids=["another reducer", "one more", "another listener", "another order", "another policy"],
)
def test_a_stored_snapshot_by_other_reducers_is_not_used(log: Log, registered: Any) -> None:
    session = equip(Session(log=log))
    for number in range(10):
        session.dispatch_all([Add(number), Note(str(number))])
    session.close()
    assert log.latest_snapshot(session.session_id) is not None
    again = Session.open(log, session.session_id)
    registered(again)
    assert again.report.snapshot_seq == 0
    assert again.report.events == 20


def append_total(slice_: Any, event: Add, *, context: Any) -> Append[Total]:
    return Append(Total(event.number))


@pytest.mark.usefixtures("eager")
def test_an_event_that_a_reducer_changed_is_stored_as_the_reducers_making(log: Log) -> None:
    def double(slice_: Any, event: Box, *, context: Any) -> Append[Box]:
        event.things.extend(event.things)
        return Append(event)

    def opened() -> Session:
        session = Session.open(log, session_id)
        session[Box].register(Box, double)
        return session

    with Session(log=log) as made:
        session_id = made.session_id
    session = opened()
    for number in range(10):
        session.dispatch(Box([number]))
    session.close()
    again = opened()
    assert again.report.snapshot_seq > 0
    assert again[Box].all() == session[Box].all() == tuple(Box([number, number]) for number in range(10))


@pytest.mark.parametrize("payload", [b"", b"[]", b"{}", b'{"version":1}', b"\xff"], ids=repr)
def test_a_stored_snapshot_that_cannot_be_read_is_passed_over_and_reported(log: Log, payload: bytes) -> None:
    session = equip(Session(log=log))
    session.dispatch_all([Add(1), Note("a")])
    assert session._core.lease is not None
    log.put_snapshot(session._core.lease, 2, payload)
    again = reopened(session)
    assert everything(again) == everything(session)
    (problem,) = again.report.problems
    assert problem.type == "stored snapshot"
    assert "folded from the events instead" in problem.message


@pytest.mark.parametrize(
    "slices",
    [
        [3],
        [{"slice_type": "state_kit:Note"}],
        [{"slice_type": "state_kit:Note", "keep": 0, "items": [{"origin": 99}]}],
        [{"slice_type": "state_kit:Note", "keep": 0, "items": [{"origin": "x"}]}],
        [{"slice_type": "state_kit:Note", "keep": 0, "items": [{"origin": 0, "item": 3}]}],
        [{"slice_type": "state_kit:Note", "keep": 0, "items": [{"origin": 2}]}],
        [{"slice_type": "state_kit:Note", "keep": 0, "items": {"$": "class", "v": "builtins:int"}}],
    ],
    ids=lambda value: json.dumps(value),
)
def test_a_stored_snapshot_of_another_shape_is_passed_over(slices: Any) -> None:
    """Items from nowhere, of no type or of another slice's type: the events are folded instead."""
    log = MemoryLog(heartbeat=False)
    session = Session(log=log)
    session.dispatch_all([Note("a"), Said("b")])
    assert session._core.lease is not None
    stored = {"version": 2, "folding": {"reducers": [], "policies": []}, "pruned_upto": 0, "slices": slices}
    payload = json.dumps(stored).encode()
    log.put_snapshot(session._core.lease, 2, payload)
    session.close()
    again = Session.open(log, session.session_id)
    assert again[Note].all() == (Note("a"),)
    assert again[Said].all() == (Said("b"),)
    assert len(again.report.problems) == 1


@pytest.mark.usefixtures("eager")
def test_a_snapshot_that_cannot_be_stored_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Full(MemoryLog):
        tries = 0

        def put_snapshot(self, *arguments: Any, **named: Any) -> None:
            self.tries += 1
            raise OSError("no space")

    log = Full(heartbeat=False)
    session = Session(log=log)
    for number in range(100):
        session.dispatch(Add(number))
    assert len(session[Add]) == 100
    assert 1 <= log.tries < 10
    assert "no space" in caplog.text
    session.close()
    assert len(Session.open(log, session.session_id)[Add]) == 100


# --- pruning --------------------------------------------------------------------------------------------


def test_pruning_keeps_working_state_and_forgets_history(log: Log) -> None:
    session = equip(Session(log=log))
    session.dispatch_all([Note("old"), Said("old"), Add(1), Box([1])])
    session.dispatch_all([Said("new"), Add(2)])
    told: list[int] = []
    session.observe(Said, lambda old, new: told.append(len(new)))
    assert session.prune(upto=4) == 4
    for opened in (session, reopened(session)):
        assert opened[Note].all() == (Note("old"),)
        assert opened[Box].all() == (Box([1]),)
        assert opened[Total].all() == (Total(3),)
        assert opened[Said].all() == (Said("new"),)
        assert opened[Seen].all() == (Seen(2),)
        assert opened.head == 6
    assert told == [1]


@pytest.mark.usefixtures("eager")
def test_a_pruned_session_goes_on_for_long_and_opens_again(log: Log) -> None:
    """Items whose events are gone are stored as values from then on."""
    session = equip(Session(log=log))
    session.dispatch(Note("old"))
    session.prune(keep_last=0)
    for number in range(30):
        session.dispatch(Add(number))
    again = reopened(session)
    assert again.report.snapshot_seq > 1
    assert again[Note].all() == (Note("old"),)
    assert again[Total].all() == (Total(sum(range(30))),)
    assert again.prune(keep_last=3) == 27
    again.dispatch(Note("new"))
    assert reopened(again)[Note].all() == (Note("old"), Note("new"))


def test_a_prune_that_was_cut_off_is_finished_by_whoever_opens_the_session_next(log: Log) -> None:
    class CutOff(Exception):
        pass

    session = equip(Session(log=log))
    session.dispatch_all([Note("old"), Said("old"), Add(1)])
    session.dispatch(Said("new"))
    with pytest.MonkeyPatch.context() as patch:

        def cut_off(*arguments: Any, **named: Any) -> int:
            raise CutOff

        patch.setattr(type(log), "prune", cut_off)
        with pytest.raises(CutOff):
            session.prune(upto=3)
    assert session[Said].all() == (Said("old"), Said("new")), "it did not happen"
    assert log.info(session.session_id).first == 1
    again = reopened(session)
    assert again[Said].all() == (Said("new"),)
    assert again[Total].all() == (Total(1),)
    assert log.info(session.session_id).first == 4
    again.dispatch(Add(1))
    assert reopened(again)[Total].all() == (Total(2),)


def test_prune_counts_from_either_end_and_refuses_nonsense(log: Log) -> None:
    session = Session(log=log)
    session.dispatch_all([Said(str(number)) for number in range(10)])
    assert session.prune(keep_last=20) == 0
    assert session.prune(upto=0) == 0
    assert session.prune(keep_last=6) == 4
    assert session.prune(upto=4) == 0
    assert session.prune(upto=100) == 6
    for arguments in ({}, {"upto": 1, "keep_last": 1}, {"upto": -1}, {"keep_last": -1}):
        with pytest.raises(UsageError):
            session.prune(**arguments)


def test_a_pruned_session_can_be_forked_from_where_it_can_still_be_seen(log: Log) -> None:
    session = equip(Session(log=log))
    session.dispatch_all([Note("a"), Add(1), Said("gone")])
    session.prune(upto=3)
    session.dispatch(Add(2))
    session.dispatch(Add(3))
    for at, total in ((None, 6), (5, 6), (4, 3), (3, 1)):
        twin = session.fork(at=at)
        assert twin[Total].all() == (Total(total),)
        assert twin[Note].all() == (Note("a"),)
        assert twin[Said].all() == ()
    with pytest.raises(UsageError, match="pruned"):
        session.fork(at=2)


def test_a_program_without_the_reducers_cannot_prune_or_overwrite_their_state(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "SNAPSHOT_EVERY", 4)
    session = equip(Session(log=log))
    for number in range(10):
        session.dispatch(Add(number))
    session.prune(upto=5)
    session.close()
    stranger = Session.open(log, session.session_id)
    with pytest.raises(UsageError, match=r"state_kit:Add -> state_kit:Total"):
        stranger.prune(keep_last=0)
    for number in range(10):
        stranger.dispatch(Add(number))
    again = reopened(stranger)
    assert again[Total].all() == (Total(90),)
    assert again[Tally].all() == (Tally(count=20),)


# --- types that are not known ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    number: int


@dataclass(frozen=True)
class Outer:
    inside: object


@dataclass(frozen=True)
class Count:
    value: int


def foreign_codec() -> Codec:
    """A process of its own, as far as types are concerned."""
    return Codec(TypeRegistry())


def name(kind: type) -> str:
    return codec.registry.name_of(kind)


def test_events_of_unknown_types_are_carried_reported_and_folded_once_the_type_is_known(log: Log) -> None:
    session = Session(log=log)
    session.dispatch_all([Note("a"), Inner(1), Note("b"), Inner(2)])
    session.close()
    stranger = Session.open(log, session.session_id, codec=foreign_codec())
    assert stranger[Note].all() == (Note("a"), Note("b"))
    assert stranger.report.unknown_types == {name(Inner): 2}
    assert not stranger.report.ok
    assert [value for _, value in stranger.events()] == [Note("a"), None, Note("b"), None]
    stranger.dispatch(Note("c"))
    with pytest.raises(UsageError, match="Inner"):
        stranger.prune(keep_last=0)
    twin = stranger.fork()
    assert stranger[Inner].all() == (Inner(1), Inner(2)), "using the type makes it known"
    assert stranger.report.ok
    assert stranger[Note].all() == (Note("a"), Note("b"), Note("c"))
    twin.close()
    stranger.close()
    for session_id in (twin.session_id, stranger.session_id):
        again = Session.open(log, session_id)
        assert again[Inner].all() == (Inner(1), Inner(2)), "nothing was lost on the way"


def test_a_type_that_becomes_known_elsewhere_is_noticed(log: Log) -> None:
    """Also one that is only inside of an event."""
    session = Session(log=log)
    session.dispatch_all([Outer(Inner(1)), Outer("text")])
    session[Count].seed([Count(1)])
    session.close()
    own = foreign_codec()
    stranger = Session.open(log, session.session_id, codec=own)
    assert stranger[Outer].all() == (Outer("text"),)
    assert stranger.report.unknown_types == {name(Inner): 1, name(Count): 1}
    own.registry.register(Inner)
    assert stranger[Outer].all() == (Outer(Inner(1)), Outer("text"))
    assert stranger[Count].all() == (Count(1),)
    assert stranger.report.ok


def test_a_restore_reaches_the_slices_that_are_known(log: Log) -> None:
    session = Session(log=log)
    session.dispatch_all([Note("a"), Inner(1)])
    snapshot = session.snapshot()
    session.dispatch_all([Note("b"), Inner(2)])
    session.rollback(snapshot)
    session.close()
    stranger = Session.open(log, session.session_id, codec=foreign_codec())
    assert stranger[Note].all() == (Note("a"),)
    assert not stranger.report.ok
    assert stranger[Inner].all() == (Inner(1),)


def test_a_reducer_for_an_event_that_was_unknown_folds_it_in_its_place(log: Log) -> None:
    def count(slice_: Any, event: Any, *, context: Any) -> Append[Count]:
        return Append(Count(len(context.session[Note].all())))

    session = Session(log=log)
    session.dispatch_all([Note("a"), Inner(1), Note("b"), Inner(2), Note("c")])
    session.close()
    stranger = Session.open(log, session.session_id, codec=foreign_codec())
    assert len(stranger[Note]) == 3
    stranger[Count].register(Inner, count)
    assert stranger[Count].all() == (Count(1), Count(2))


@pytest.mark.usefixtures("eager")
def test_a_stored_snapshot_with_unknown_slices_is_used_and_completed_later(log: Log) -> None:
    session = Session(log=log)
    for number in range(10):
        session.dispatch_all([Note(str(number)), Inner(number)])
    session.close()
    stranger = Session.open(log, session.session_id, codec=foreign_codec())
    assert len(stranger[Note]) == 10
    assert stranger.report.snapshot_seq > 0
    assert name(Inner) in stranger.report.unknown_types
    stored = log.latest_snapshot(session.session_id)
    for number in range(50):
        stranger.dispatch(Note(str(number)))
    assert log.latest_snapshot(session.session_id) == stored, "half a fold is not worth storing"
    assert len(stranger[Inner]) == 10


def test_events_that_do_not_fit_their_type_are_reported_and_stay(log: Log) -> None:
    session = Session(log=log)
    session.dispatch(Note("a"))
    lease = session._core.lease
    assert lease is not None
    odd = [
        Draft(name(Note), b'{"text": 3}', 0),
        Draft(name(Note), b"not json", 0),
        Draft(name(Note), b"{}", 0),
        Draft("treenail.InitializeSlice", b'{"slice_type": "state_kit:Note", "items": [3]}', 0),
        Draft("treenail.InitializeSlice", b'{"slice_type": "no.Such", "items": []}', 0),
        Draft("treenail.StateRestored", _restored(origin=77), 0),
    ]
    log.append(lease, odd, expected_seq=1)
    session.close()
    again = Session.open(log, session.session_id)
    assert again[Note].all() == (Note("a"),)
    assert [problem.seq for problem in again.report.problems] == [2, 3, 4, 5, 7]
    assert again.report.unknown_types == {"no.Such": 1}
    assert all(problem.message for problem in again.report.problems)
    assert [value is None for _, value in again.events()] == [False, True, True, True, False, False, False]
    again.dispatch(Note("b"))
    assert again[Note].all() == (Note("a"), Note("b"))


def _restored(*, origin: int) -> bytes:
    item = {"origin": origin, "upto": origin, "item": None}
    return json.dumps(
        {"slices": [{"slice_type": "state_kit:Note", "keep": 0, "items": [item]}], "reason": "x"}
    ).encode()


WITHOUT_TYPES = """
import json, sys
from uuid import UUID
from treenail.log.sqlite import SqliteLog
from treenail.state import Session

before = set(sys.modules)
with SqliteLog(sys.argv[1]) as log:
    session = Session.open(log, UUID(sys.argv[2]), read_only=True)
    report = session.report
    values = [value for _, value in session.events()]
    print(json.dumps([dict(report.unknown_types), session.head, values, "state_kit" in sys.modules]))
    with Session.open(log, UUID(sys.argv[2])) as writer:
        writer[tuple]
        writer.fork().close()
"""


def test_a_process_that_does_not_import_the_types_carries_them_along(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    with SqliteLog(path) as log, Session(log=log) as session:
        session.dispatch_all([Note("a"), Said("b"), Box([1])])
    command = [sys.executable, "-c", WITHOUT_TYPES, str(path), str(session.session_id)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    unknown = {"state_kit:Note": 1, "kit.Said": 1, "state_kit:Box": 1}
    assert json.loads(done.stdout) == [unknown, 3, [None, None, None], False]
    with SqliteLog(path) as log:
        ids = [info.session_id for info in log.sessions()]
        assert len(ids) == 2
        for session_id in ids:
            again = Session.open(log, session_id, read_only=True)
            assert again[Note].all() == (Note("a"),)
            assert again[Box].all() == (Box([1]),)


# --- damage ---------------------------------------------------------------------------------------------


def damaged(tmp_path: Path, seq: int, *, eager: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, UUID]:
    monkeypatch.setattr(core, "SNAPSHOT_EVERY", 4 if eager else 10**9)
    path = tmp_path / "log.db"
    with SqliteLog(path) as log, Session(log=log) as session:
        for number in range(1, 11):
            session.dispatch(Said(f"text number {number}"))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "UPDATE events SET payload = CAST(replace(CAST(payload AS TEXT), 'text', 'tExt') AS BLOB)"
            " WHERE seq = ?",
            (seq,),
        )
        assert connection.total_changes == 1
        connection.commit()
    return path, session.session_id


@pytest.mark.parametrize("eager", [False, True], ids=["fold", "stored snapshot"])
@pytest.mark.parametrize("seq", [1, 5, 10])
def test_a_damaged_log_is_readable_up_to_the_damage_and_writable_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seq: int, eager: bool
) -> None:
    path, session_id = damaged(tmp_path, seq, eager=eager, monkeypatch=monkeypatch)
    with SqliteLog(path) as log:
        reader = Session.open(log, session_id, read_only=True)
        assert reader[Said].all() == tuple(Said(f"text number {number}") for number in range(1, seq))
        assert reader.head == seq - 1
        assert not reader.report.ok
        assert reader.report.damage is not None
        writer = Session.open(log, session_id)
        with pytest.raises(LogDamagedError) as caught:
            writer[Said].all()
        assert caught.value.last_good_seq == seq - 1
        with pytest.raises(LogDamagedError):
            writer.dispatch(Said("on top"))
        writer.close()


def test_a_pruned_session_whose_snapshot_is_lost_says_so() -> None:
    class Forgetful(MemoryLog):
        def latest_snapshot(self, session_id: UUID) -> None:
            return None

    log = MemoryLog(heartbeat=False)
    with Session(log=log) as session:
        session.dispatch_all([Note("a"), Note("b")])
        session.prune(upto=1)
    log.__class__ = Forgetful
    with pytest.raises(LogDamagedError, match="pruned"):
        Session.open(log, session.session_id)[Note].all()


def test_a_pruned_session_whose_snapshot_cannot_be_read_says_so() -> None:
    log = MemoryLog(heartbeat=False)
    with Session(log=log) as session:
        session.dispatch_all([Note("a"), Note("b")])
        session.prune(upto=1)
        assert session._core.lease is not None
        log.put_snapshot(session._core.lease, 2, b"{}")
    with pytest.raises(SnapshotRestoreError, match="pruned"):
        Session.open(log, session.session_id)[Note].all()


def test_a_load_that_fails_can_be_tried_again() -> None:
    class Flaky(CountingLog):
        broken = True

        def read(self, *arguments: Any, **named: Any) -> Any:
            if self.broken:
                raise OSError("gone for a moment")
            return super().read(*arguments, **named)

    log = Flaky()
    with Session(log=log) as session:
        session.dispatch(Note("a"))
    again = Session.open(log, session.session_id)
    with pytest.raises(OSError, match="moment"):
        again[Note].all()
    with pytest.raises(OSError, match="moment"):
        again.dispatch(Note("b"))
    log.broken = False
    again.dispatch(Note("b"))
    assert again[Note].all() == (Note("a"), Note("b"))
