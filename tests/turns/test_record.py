"""What a turn writes down: its messages, and what each model call was sent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

from hypothesis import given
from hypothesis.strategies import builds, integers, lists, none, one_of

from treenail import Agent, tool
from treenail.conversation import SHOWN_HASH, ProviderUsage, replay
from treenail.providers import CollectedAnswer
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import Session, TokenUsage
from treenail.turns.record import TurnRecord


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


def test_what_each_call_was_sent_can_be_checked_against_the_log() -> None:
    """The hash that is recorded with a call is that of the log's replay up to there."""

    @tool(effects="none")
    def look() -> str:
        """Look."""
        return "seen"

    script = [Answer("", [("look", {})]), Answer("", [("look", {}), ("look", {})]), Answer("done")]
    with Agent("looker", tools=[look]).run("go", provider=ScriptedProvider(script)) as run:
        session = run.execution_state.session
        calls = [
            (envelope.seq, each) for envelope, each in session.events() if isinstance(each, ProviderUsage)
        ]
        assert len(calls) == len(script)
        for seq, used in calls:
            sent = replay(session, upto=seq - 1, model=used.model, dialect=used.provider)
            assert len(used.prefix_hash) == SHOWN_HASH
            assert sent.prefix_hash().startswith(used.prefix_hash)
            assert len(sent.items) == used.input_items


counts = one_of(none(), integers(0, 10**9))


@given(lists(builds(TokenUsage, counts, counts, counts, counts), max_size=6), integers(1, 6))
def test_usage_adds_up_however_often_it_is_asked_for(used: list[TokenUsage], every: int) -> None:
    """What nobody reported stays unknown; what somebody did counts once."""
    record = record_of(Session())
    sums = list(accumulate(used, initial=TokenUsage()))
    for place, each in enumerate(used, start=1):
        record.usage_of_summary(CollectedAnswer(usage=each))
        if place % every == 0:
            assert record.usage == sums[place]
    assert record.usage == sums[-1]
