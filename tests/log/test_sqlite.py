"""SqliteLog: the conformance suite, and what it remembers between appends."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn
from uuid import UUID, uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.clock import Clock
from holdfast.errors import StaleWriterError
from holdfast.log import Log
from holdfast.log.base import Lease
from holdfast.log.event import Draft
from holdfast.log.sqlite import SqliteLog
from holdfast.testing.log import LogConformance


class TestConformance(LogConformance):
    def make_log(self, directory: Path, clock: Clock) -> Log:
        return SqliteLog(directory / "log.db", clock=clock, heartbeat=False, synchronous="NORMAL")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SqliteLog]:
    with SqliteLog(tmp_path / "log.db", heartbeat=False, synchronous="NORMAL") as made:
        yield made


def opened(log: SqliteLog) -> Lease:
    session_id = uuid4()
    log.create(session_id, created_at=datetime.now(UTC))
    return log.acquire(session_id, owner="somebody")


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["first", "second", "renewed first"]), st.booleans(), st.booleans())
    )
)
@settings(max_examples=30, deadline=None)
def test_sessions_of_one_log_do_not_mix_up_their_ends(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, bool, bool]]
) -> None:
    """Whoever appends, through whichever handle of a lease and of the file, finds its own session's end."""
    path = tmp_path_factory.mktemp("logs") / "log.db"
    with (
        SqliteLog(path, heartbeat=False, synchronous="NORMAL") as log,
        SqliteLog(path, heartbeat=False, synchronous="NORMAL") as other,
    ):
        first, second = opened(log), opened(log)
        leases = {"first": first, "second": second, "renewed first": log.renew(first)}
        written: dict[UUID, list[bytes]] = {first.session_id: [], second.session_id: []}
        for number, (name, through_other, after_a_refusal) in enumerate(steps):
            lease, payload = leases[name], str(number).encode()
            mine = written[lease.session_id]
            used = other if through_other else log
            if after_a_refusal:
                with pytest.raises(StaleWriterError):
                    used.append(lease, [Draft("event", b"never", 0)], expected_seq=len(mine) + 1)
            used.append(lease, [Draft("event", payload, 0)], expected_seq=len(mine))
            mine.append(payload)
        for session_id, payloads in written.items():
            assert [each.payload for each in log.read(session_id)] == payloads


def test_a_commit_that_fails_is_not_believed(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an append that was rolled back the next one continues where the session really ends."""
    lease = opened(log)
    log.append(lease, [Draft("event", b"one", 0)], expected_seq=0)
    with monkeypatch.context() as patched:
        # What every part of an append could meet: an interrupt when all is written and nothing committed.
        patched.setattr("holdfast.log.sqlite._Tail", interrupt)
        with pytest.raises(KeyboardInterrupt):
            log.append(lease, [Draft("event", b"lost", 0)], expected_seq=1)
    log.append(lease, [Draft("event", b"two", 0)], expected_seq=1)
    assert [each.payload for each in log.read(lease.session_id)] == [b"one", b"two"]


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
