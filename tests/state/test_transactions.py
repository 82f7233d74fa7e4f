"""Transactions: everything that a call dispatches is kept together, or leaves no trace but history."""

from __future__ import annotations

import contextvars
import gc
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
import pytest
from state_kit import Add, Box, CountingLog, Note, Peeked, Said, Seen, Tally, Total, equip

from treenail.errors import EncodeError, StaleWriterError, UsageError
from treenail.log import Log, SlicePolicy
from treenail.state import InProcessDispatcher, Session, append_all


def test_what_is_staged_is_seen_inside_and_by_nobody_else(log: Log) -> None:
    session = equip(Session(log=log))
    session.dispatch(Add(1))
    begun = session.begin()
    begun.session.dispatch(Add(2))
    begun.session[Note].seed(Note("inside"))
    assert begun.session[Total].all() == (Total(3),)
    assert begun.session[Note].all() == (Note("inside"),)
    assert session[Total].all() == (Total(1),)
    assert session[Note].all() == ()
    assert session.read_only_view()[Note].all() == ()
    assert begun.session.read_only_view()[Note].all() == (Note("inside"),)
    assert session.head == 1
    assert [type(each).__name__ for each in begun.staged] == ["Add", "InitializeSlice"]
    begun.commit()
    assert session[Total].all() == (Total(3),)
    assert session[Note].all() == (Note("inside"),)


def test_a_commit_is_one_append_with_what_the_runtime_adds_at_its_end() -> None:
    log = CountingLog()
    session = equip(Session(log=log))
    begun = session.begin()
    with begun.active():
        for number in range(5):
            session.dispatch(Add(number))
    assert log.batches == []
    begun.commit(Said("done"), Note("last"))
    assert log.batches == [7]
    assert [type(value).__name__ for _, value in session.events()] == ["Add"] * 5 + ["Said", "Note"]


def test_a_rollback_leaves_state_as_it_was_and_logs_history_in_one_append() -> None:
    log = CountingLog()
    session = equip(Session(log=log))
    session.dispatch(Add(1))
    begun = session.begin()
    with begun.active():
        session.dispatch(Add(2))
        session.dispatch(Note("gone"))
        session.dispatch(Peeked(1))
        session[Total].clear()
    begun.rollback(Said("failed"))
    assert session[Total].all() == (Total(1),)
    assert session[Tally].all() == (Tally(count=1),)
    assert session[Note].all() == session[Peeked].all() == ()
    assert session[Said].all() == (Said("failed"),)
    assert session[Seen].all() == (Seen(1), Seen(2))
    assert log.batches == [1, 2]


def test_history_inside_a_transaction_does_not_wait_and_survives_its_rollback(log: Log) -> None:
    session = equip(Session(log=log))
    begun = session.begin()
    begun.session.dispatch(Said("now"))
    assert session[Said].all() == begun.session[Said].all() == (Said("now"),)
    assert begun.staged == ()
    begun.rollback()
    assert session[Said].all() == (Said("now"),)


def test_a_mixed_event_of_a_rolled_back_call_reaches_history_only_also_after_reopening(log: Log) -> None:
    session = equip(Session(log=log))
    session.dispatch(Add(1))
    begun = session.begin()
    begun.session.dispatch(Add(5))
    begun.session.dispatch(Add(6))
    begun.rollback()
    session.dispatch(Add(1))
    assert [each.rolled_back for each, _ in session.events()] == [False, True, True, False]
    session.close()
    for opened in (session, equip(Session.open(log, session.session_id))):
        assert opened[Total].all() == (Total(2),)
        assert opened[Tally].all() == (Tally(count=2),)
        assert opened[Seen].all() == (Seen(1), Seen(5), Seen(6), Seen(1))


def test_history_and_staged_events_on_one_slice_are_seen_in_the_order_of_the_log(log: Log) -> None:
    session = equip(Session(log=log))
    session[Seen].register(Seen, append_all)
    begun = session.begin()
    begun.session.dispatch(Add(1))
    begun.session.dispatch(Seen(100))
    assert begun.session[Seen].all() == (Seen(100), Seen(1))
    begun.commit()
    assert session[Seen].all() == (Seen(100), Seen(1))


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_late_use_of_a_call_that_is_over_is_refused(end: str) -> None:
    session = Session()
    begun = session.begin()
    with begun.active():
        late = contextvars.copy_context()
        getattr(begun, end)()
        for attempt in (
            lambda: begun.session.dispatch(Note("late")),
            lambda: begun.session[Note].seed(Note("late")),
            lambda: begun.session[Note].all(),
            lambda: begun.session.snapshot(),
            lambda: late.run(session.dispatch, Note("late")),
            lambda: session.dispatch(Note("late")),
        ):
            with pytest.raises(UsageError, match="this call is over"):
                attempt()
    with pytest.raises(UsageError, match="this call is over"):
        begun.commit()
    assert begun.rollback() == ()
    session.dispatch(Note("fine"))
    assert session[Note].all() == (Note("fine"),)


def test_a_view_taken_inside_outlives_the_call_and_then_shows_what_was_kept() -> None:
    session = Session()
    begun = session.begin()
    begun.session.dispatch(Note("a"))
    view = begun.session.read_only_view()
    assert view[Note].all() == (Note("a"),)
    assert Note in view.snapshot().slices
    begun.rollback()
    assert view[Note].all() == ()
    assert Note not in view.snapshot().slices


def test_transactions_do_not_nest_and_a_call_cannot_close_or_prune_its_session() -> None:
    session = Session()
    begun = session.begin()
    with pytest.raises(UsageError, match="open here already"):
        begun.session.begin()
    with pytest.raises(UsageError, match="cannot close"):
        begun.session.close()
    with pytest.raises(UsageError, match="transaction is open"):
        begun.session.prune(keep_last=0)
    with begun.active(), pytest.raises(UsageError, match="open here already"):
        session.begin()
    begun.rollback()


def test_the_context_manager_commits_or_rolls_back_whatever_is_raised(log: Log) -> None:
    session = Session(log=log)
    with session.transaction() as inside:
        inside.dispatch(Note("kept"))
        session.dispatch(Note("kept too"))

    def fail(error: BaseException) -> None:
        with session.transaction() as inside:
            inside.dispatch(Note("dropped"))
            raise error

    for error in (ValueError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fail(error)
    assert session[Note].all() == (Note("kept"), Note("kept too"))


def test_an_empty_transaction_logs_nothing() -> None:
    log = CountingLog()
    session = Session(log=log)
    begun = session.begin()
    assert begun.commit() == []
    assert begun.is_committed
    assert session.begin().rollback() == []
    assert log.batches == []


# --- where staging reaches ------------------------------------------------------------------------------


def test_worker_threads_that_take_the_context_along_stage_too() -> None:
    session = equip(Session())
    begun = session.begin()

    async def handler() -> None:
        await anyio.to_thread.run_sync(session.dispatch, Add(1))
        async with anyio.create_task_group() as group:
            for number in (2, 3):
                group.start_soon(anyio.to_thread.run_sync, session.dispatch, Add(number))

    with begun.active():
        anyio.run(handler)
        thread = threading.Thread(target=contextvars.copy_context().run, args=(session.dispatch, Add(4)))
        thread.start()
        thread.join()
    assert session[Total].all() == ()
    assert begun.session[Total].all() == (Total(10),)
    begun.commit()
    assert session[Total].all() == (Total(10),)


def test_a_thread_outside_the_context_stages_through_the_handle_or_not_at_all() -> None:
    session = Session()
    begun = session.begin()
    with begun.active():
        for target in (session, begun.session):
            thread = threading.Thread(target=target.dispatch, args=(Note(repr(target is session)),))
            thread.start()
            thread.join()
        assert session[Note].all() == (Note("True"), Note("False"))
    assert session[Note].all() == (Note("True"),)
    begun.rollback()
    assert session[Note].all() == (Note("True"),)


def test_staging_reaches_one_session_and_not_its_relatives() -> None:
    parent = Session()
    child = Session(parent=parent)
    begun = parent.begin()
    with begun.active():
        parent.dispatch(Note("staged"))
        child.dispatch(Note("direct"))
        inner = child.begin()
        with inner.active():
            parent.dispatch(Note("staged too"))
            child.dispatch(Note("staged in the child"))
        inner.rollback()
    assert child[Note].all() == (Note("direct"),)
    begun.commit()
    assert parent[Note].all() == (Note("staged"), Note("staged too"))


def test_parallel_transactions_are_folded_one_after_the_other() -> None:
    """What a call stages is decided on the state into which it is committed: no update is lost."""
    session = equip(Session())
    session[Note].seed([Note("keep"), Note("drop")])
    one, two = session.begin(), session.begin()
    one.session.dispatch(Add(1))
    two.session.dispatch(Add(10))
    assert one.session[Total].all() == (Total(1),)
    assert two.session[Total].all() == (Total(10),)
    one.session[Note].clear(lambda note: note.text == "drop")
    two.session[Note].seed([Note("drop"), Note("keep"), Note("drop")])
    two.commit()
    assert one.session[Total].all() == (Total(11),)
    assert one.session[Note].all() == (Note("keep"),)
    one.commit()
    assert session[Total].all() == (Total(11),)
    assert session[Note].all() == (Note("keep"),), "the predicate chose among the items that were there"


def test_what_the_caller_does_to_a_staged_object_before_the_commit_is_not_recorded(log: Log) -> None:
    session = Session(log=log)
    box = Box([1])
    begun = session.begin()
    begun.session.dispatch(box)
    begun.session[Tally].seed(Tally(1))
    box.things.append(2)
    assert begun.session[Box].all() == (Box([1]),)
    begun.commit()
    assert session[Box].all() == (Box([1]),)
    session.close()
    assert Session.open(log, session.session_id)[Box].all() == (Box([1]),)


def test_a_snapshot_taken_inside_can_be_gone_back_to_inside() -> None:
    session = equip(Session())
    session.dispatch(Add(1))
    begun = session.begin()
    begun.session.dispatch(Add(2))
    snapshot = begun.session.snapshot()
    begun.session.dispatch(Add(4))
    begun.session.rollback(snapshot)
    assert begun.session[Total].all() == (Total(3),)
    begun.commit()
    assert session[Total].all() == (Total(3),)


def test_a_reducer_registered_inside_counts_for_what_is_staged() -> None:
    session = Session()
    begun = session.begin()
    begun.session.dispatch(Add(1))
    assert begun.session[Add].all() == (Add(1),)
    session.dispatch(Note("logged"))
    equip(session)
    assert begun.session[Total].all() == (Total(1),)
    assert begun.session[Add].all() == ()


# --- telling others -------------------------------------------------------------------------------------


def test_observers_and_subscribers_hear_of_staged_events_when_they_are_committed() -> None:
    bus = InProcessDispatcher()
    session = equip(Session(bus))
    heard: list[Any] = []
    bus.subscribe(Note, heard.append)
    session.observe(Note, lambda old, new: heard.append(len(new)))
    begun = session.begin()
    with begun.active():
        session.dispatch(Note("a"))
        session.dispatch(Note("b"))
        assert heard == []
        begun.commit()
    assert heard == [2, Note("a"), Note("b")]
    dropped = session.begin()
    dropped.session.dispatch(Note("c"))
    dropped.rollback()
    assert heard == [2, Note("a"), Note("b")]


def test_an_observer_stands_outside_the_call_that_it_is_told_about() -> None:
    """It sees what is kept, and what it dispatches is not staged."""
    session = Session()
    captured: list[Any] = []

    def save(old: Any, new: Any) -> None:
        captured.append(dict(session.snapshot(include_all=True).slices))
        session.dispatch(Peeked(len(new)))

    session.observe(Said, save)
    begun = session.begin()
    with begun.active():
        session.dispatch(Note("staged"))
        session.dispatch(Said("history"))
        begun.rollback(Said("over"))
    assert all(Note not in slices for slices in captured)
    assert session[Peeked].all() == (Peeked(1), Peeked(2))
    assert session[Note].all() == ()


# --- when the log says no -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Odd:
    value: object


def test_a_commit_that_the_log_refuses_changes_nothing_and_can_be_rolled_back() -> None:
    log = CountingLog()
    session = equip(Session(log=log))
    session.dispatch(Add(1))
    told: list[object] = []
    session.observe(Total, lambda old, new: told.append(new))
    begun = session.begin()
    begun.session.dispatch(Add(2))
    log.refusal = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        begun.commit(Said("done"))
    assert begun.is_open
    assert not begun.is_committed
    assert session[Total].all() == (Total(1),)
    assert session[Said].all() == ()
    assert session.head == 1
    assert told == []
    log.refusal = None
    begun.rollback(Said("failed"))
    assert session[Total].all() == (Total(1),)
    assert session[Said].all() == (Said("failed"),)


def test_an_extra_event_that_cannot_be_stored_refuses_the_whole_commit() -> None:
    session = Session()
    begun = session.begin()
    begun.session.dispatch(Note("a"))
    with pytest.raises(EncodeError):
        begun.commit(Odd(threading.Lock()))
    assert begun.is_open
    assert session.head == 0
    begun.commit()
    assert session[Note].all() == (Note("a"),)


def test_an_extra_event_that_cannot_be_stored_does_not_stop_a_rollback() -> None:
    session = equip(Session())
    begun = session.begin()
    begun.session.dispatch(Add(1))
    with pytest.raises(EncodeError):
        begun.rollback(Said("failed"), Odd(threading.Lock()))
    assert not begun.is_open
    assert session[Total].all() == ()
    assert session[Seen].all() == (Seen(1),)
    assert session[Said].all() == (Said("failed"),)


def test_a_commit_after_the_lease_was_taken_over_is_refused_whole(log: Log) -> None:
    session = Session(log=log)
    begun = session.begin()
    begun.session.dispatch(Note("a"))
    assert session._core.lease is not None
    log.release(session._core.lease)
    other = Session.open(log, session.session_id)
    with pytest.raises(StaleWriterError):
        begun.commit(Said("done"))
    assert begun.rollback() == []
    assert session[Note].all() == ()
    assert other[Note].all() == ()
    other.dispatch(Note("b"))
    with pytest.raises(StaleWriterError):
        session.dispatch(Note("c"))
    assert other[Note].all() == (Note("b"),)


def test_a_commit_that_failed_after_it_was_written_is_a_commit(caplog: pytest.LogCaptureFixture) -> None:
    """The log is the truth, also about whether an append happened."""
    log = CountingLog()
    session = equip(Session(log=log))
    begun = session.begin()
    begun.session.dispatch(Add(2))
    log.refusal, log.fails_after_writing = OSError("connection lost"), True
    begun.commit(Said("done"))
    assert begun.is_committed
    assert session[Total].all() == (Total(2),)
    assert "connection lost" in caplog.text
    log.refusal = None
    session.dispatch(Add(1))
    assert session[Total].all() == (Total(3),)


def test_an_interrupt_right_after_the_write_goes_on_and_the_commit_stands() -> None:
    log = CountingLog()
    session = equip(Session(log=log))
    begun = session.begin()
    begun.session.dispatch(Add(2))
    log.refusal, log.fails_after_writing = KeyboardInterrupt(), True
    with pytest.raises(KeyboardInterrupt):
        begun.commit()
    log.refusal = None
    assert begun.is_committed
    assert begun.rollback() == ()
    assert session[Total].all() == (Total(2),)
    session.dispatch(Add(1))
    assert session[Total].all() == (Total(3),)


def test_a_transaction_left_open_by_a_closed_session_can_only_be_forgotten() -> None:
    session = equip(Session())
    begun = session.begin()
    begun.session.dispatch(Note("a"))
    session.close()
    with pytest.raises(UsageError, match="is closed"):
        begun.commit()
    assert begun.rollback() == []
    assert session[Note].all() == ()


def test_a_rollback_that_cannot_log_history_says_so_and_leaves_nothing_staged() -> None:
    log = CountingLog()
    session = equip(Session(log=log))
    begun = session.begin()
    begun.session.dispatch(Add(1))
    log.refusal = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        begun.rollback()
    assert begun.staged == ()
    assert not begun.is_open
    log.refusal = None
    assert session[Total].all() == ()
    session.dispatch(Add(5))
    assert session[Total].all() == (Total(5),)


def test_policies_decide_what_waits(log: Log) -> None:
    session = Session(log=log)
    session[Note].register(Note, append_all, policy=SlicePolicy.LOG)
    begun = session.begin()
    begun.session.dispatch_all([Note("history"), Said("history"), Peeked(1)])
    assert begun.staged == (Peeked(1),)
    assert session[Note].all() == (Note("history"),)
    begun.rollback()
    assert session[Peeked].all() == ()


def test_a_transaction_that_is_over_goes_without_the_collector_of_garbage() -> None:
    """It and its handle do not hold each other, so that a long run does not pile them up."""
    session = Session()
    begun = session.begin()
    begun.session.dispatch(Note("a"))
    begun.commit()
    gc.disable()
    try:
        last = begun.session
        handle = weakref.ref(last)
        del begun, last
        assert handle() is None
    finally:
        gc.enable()


def test_results_of_a_batch_are_a_sequence_like_any_other() -> None:
    """They are made when somebody looks, and say the same each time."""
    session = Session()
    results = session.dispatch_all((Note("a"), Note("b"), Note("c")))
    assert len(results) == 3
    assert [each.event for each in results] == [Note("a"), Note("b"), Note("c")]
    assert [each.event for each in results[1:]] == [Note("b"), Note("c")]
    assert results[-1].event == Note("c")
    assert results == list(results)
    assert results != list(results)[:2]
    with pytest.raises(IndexError):
        results[3]
