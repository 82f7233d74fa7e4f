"""What is sent of a conversation that has to be shorter this once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.conversation.conversation_kit import fold, said, violations

from treenail.conversation import InnerMessage, ReplayItem, as_sent, trimmed
from treenail.conversation.excerpts import size_bytes


def exchange(number: int, size: int) -> list[InnerMessage]:
    """An answer that asks for a tool, and the tool's result."""
    return [
        said("assistant", f"a{number}", f"c{number}"),
        said("tool", "r" * size, result_of=f"c{number}"),
    ]


@st.composite
def conversations(draw: st.DrawFn) -> list[InnerMessage]:
    events = [said("system", "S" * draw(st.integers(1, 200))), said("user", "first request")]
    for number in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["tools", "two tools", "text", "request"]))
        if kind == "tools":
            events += exchange(number, draw(st.integers(1, 500)))
        elif kind == "two tools":
            events += [
                said("assistant", "two", f"x{number}", f"y{number}"),
                said("tool", "1" * draw(st.integers(1, 300)), result_of=f"x{number}"),
                said("tool", "2", result_of=f"y{number}"),
            ]
        else:
            events += [said("assistant", f"said {number}"), said("user", f"request {number}")]
    return events


def texts(items: tuple[ReplayItem, ...]) -> list[str]:
    return [f"{each.role}:{each.text[:20]}" for each in items]


@given(conversations(), st.integers(0, 6000))
def test_what_is_left_is_a_conversation_that_every_provider_takes(
    events: list[InnerMessage], max_bytes: int
) -> None:
    """No pair of call and result is split, it begins with a request, and the order is as it was."""
    whole = fold(*events).items
    kept = trimmed(whole, max_bytes)
    assert violations(kept) == []
    places = [list(whole).index(each) for each in kept]
    assert places == sorted(places)
    assert kept[0] == whole[0]
    assert kept[-1] == whole[-1]
    assert next(each for each in reversed(whole) if each.role == "user") in kept


@given(conversations(), st.integers(0, 6000))
def test_it_fits_or_nothing_more_could_go(events: list[InnerMessage], max_bytes: int) -> None:
    """Larger than asked for only if system text, newest request and newest exchange are alone too large."""
    whole = fold(*events).items
    kept = trimmed(whole, max_bytes)
    if sum(map(size_bytes, kept)) > max_bytes:
        blocks = sum(each.role in ("assistant", "user") for each in kept)
        assert blocks <= 2
    if sum(map(size_bytes, whole)) <= max_bytes:
        assert kept == tuple(whole)


def test_answers_go_before_requests_and_the_oldest_first() -> None:
    """The task stays in sight of a model whose first steps are left out."""
    events = [
        said("system", "S"),
        said("user", "task"),
        *exchange(1, 400),
        *exchange(2, 400),
        *exchange(3, 40),
    ]
    whole = fold(*events).items
    kept = trimmed(whole, sum(map(size_bytes, whole)) - 300)
    assert texts(kept) == [
        "system:S",
        "user:task",
        "assistant:a2",
        f"tool:{'r' * 20}",
        "assistant:a3",
        f"tool:{'r' * 20}",
    ]


def test_sizes_are_those_that_the_replay_counts() -> None:
    events = [said("system", "S"), said("user", "täsk"), *exchange(1, 77)]
    replayed = fold(*events)
    assert sum(map(size_bytes, replayed.items)) == replayed.size_bytes


def test_a_trimmed_input_does_not_extend_the_one_before() -> None:
    """What was left out is a break, and the hash is of what was sent."""
    replayed = fold(said("system", "S"), said("user", "task"), *exchange(1, 50), *exchange(2, 50))
    sent = as_sent(replayed, trimmed(replayed.items, 0))
    assert len(sent.breaks) == len(replayed.breaks) + 1
    assert (
        sent.prefix_hash() == fold(said("system", "S"), said("user", "task"), *exchange(2, 50)).prefix_hash()
    )
    assert sent.size_bytes < replayed.size_bytes
