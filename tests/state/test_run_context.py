"""Run contexts: a request keeps its identity over attempts and children, a run never shares its own."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from uuid import uuid4

import pytest

from treenail.codec import codec
from treenail.errors import UsageError
from treenail.state import RunContext


def test_a_new_run_starts_a_trace() -> None:
    run = RunContext.new(session_id=uuid4(), worker_id="w1")
    assert run.attempt == 1
    assert run.parent_span_id is None
    assert run.trace_id is not None
    assert run.span_id is not None
    assert (len(run.trace_id), len(run.span_id)) == (32, 16)
    assert RunContext.new().run_id != run.run_id


def test_a_new_run_can_join_a_trace_and_a_request_that_exist() -> None:
    request_id = uuid4()
    run = RunContext.new(request_id=request_id, trace_id="ab" * 16)
    assert (run.request_id, run.trace_id) == (request_id, "ab" * 16)


def test_a_child_has_a_run_of_its_own_in_the_same_trace() -> None:
    parent = RunContext.new(session_id=uuid4(), worker_id="w1").next_attempt()
    session_id = uuid4()
    child = parent.child(session_id)
    assert child.session_id == session_id
    assert child.request_id == parent.request_id
    assert child.trace_id == parent.trace_id
    assert child.worker_id == parent.worker_id
    assert child.parent_span_id == parent.span_id
    assert child.attempt == 1
    assert child.run_id != parent.run_id
    assert child.span_id != parent.span_id


def test_an_attempt_keeps_the_request_and_changes_the_run() -> None:
    first = RunContext.new(session_id=uuid4(), worker_id="w1").child(uuid4())
    second = first.next_attempt(worker_id="w2")
    assert second.attempt == 2
    assert second.worker_id == "w2"
    assert second.run_id != first.run_id
    assert second.span_id != first.span_id
    for kept in ("request_id", "session_id", "trace_id", "parent_span_id"):
        assert getattr(second, kept) == getattr(first, kept), kept
    assert first.next_attempt().worker_id == "w1"
    assert second.next_attempt().attempt == 3


def test_a_run_context_can_be_stored() -> None:
    run = RunContext.new(session_id=uuid4()).child(uuid4())
    assert codec.decode(RunContext, codec.encode(run)) == run


def test_a_run_context_is_frozen() -> None:
    run = RunContext.new()
    with pytest.raises(FrozenInstanceError):
        run.attempt = 2  # type: ignore[misc]  # that it is frozen is the point


@pytest.mark.parametrize("attempt", [0, -1, True, 1.5])
def test_attempts_count_from_one(attempt: int) -> None:
    with pytest.raises(UsageError, match="counts from 1"):
        RunContext(attempt=attempt)
