"""What a turn writes down: each message is one of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from holdfast.state import Session
from holdfast.turns.record import TurnRecord


def record_of(session: Session) -> TurnRecord:
    return TurnRecord(session, "scripted", "m", "ns", "key", "t", "e")


def test_every_message_has_an_id_of_its_own() -> None:
    """Whichever turn it belongs to, and also if threads make them at the same time."""
    session = Session()
    with ThreadPoolExecutor(4) as threads:
        made = [
            each.message_id
            for record in (record_of(session), record_of(session))
            for each in threads.map(lambda place, to=record: to.message("tool", "", place), range(500))
        ]
    assert len(set(made)) == 1_000
    assert {each.version for each in made} == {4}
