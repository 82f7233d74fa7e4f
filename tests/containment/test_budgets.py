"""Money shared between chains, money divided among children, and partial results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.postgres import shared

from treenail.containment import (
    BudgetWindowHook,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    PartialResultBuffer,
    ShieldPipeline,
    WrapOptions,
)
from treenail.containment.pots import (
    DynamicAllocator,
    FairShareAllocator,
    LocalBudgetBackend,
    SharedPot,
    WeightedAllocator,
)
from treenail.errors import UsageError
from treenail.log.postgres import PostgresLog
from treenail.log.sqlite import SqliteLog

Config = Callable[..., ExecutionConfig]


def test_chains_draw_from_one_pot(config: Config, at_once: Any) -> None:
    """Sixteen chains with one pot of a dollar make exactly ten calls of ten cents."""
    pot = LocalBudgetBackend()
    limits = config(max_cost_usd=1.0, budget_backend=pot)
    contexts = [ExecutionContext(limits) for _ in range(16)]
    options = WrapOptions(cost_estimate_hint=0.10)
    decisions = at_once(16, lambda n: [contexts[n].wrap_llm_call(lambda: None, options) for _ in range(2)])
    flat = [decision for pair in decisions for decision in pair]
    assert flat.count(Decision.ALLOW) == 10
    assert (pot.get(), pot.get_reserved()) == (1.0, 0.0)
    refused = ExecutionContext(limits).call_llm(lambda: None, options)
    assert refused.stop_reason == "budget_exceeded"


def test_a_call_that_is_not_made_leaves_the_pot_alone(config: Config) -> None:
    """A reservation in the pot is dropped if a later guard refuses the call, and kept if the call fails."""
    pot = LocalBudgetBackend()
    ctx = ExecutionContext(
        config(max_cost_usd=1.0, max_steps=1, budget_backend=pot), ShieldPipeline(BudgetWindowHook(99))
    )
    options = WrapOptions(cost_estimate_hint=0.25)

    def fail() -> None:
        raise OSError

    ctx.wrap_llm_call(fail, options)
    assert (pot.get(), pot.get_reserved()) == (0.25, 0.0)
    ctx.wrap_llm_call(lambda: None, options)
    assert (pot.get(), pot.get_reserved()) == (0.25, 0.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda _: LocalBudgetBackend(),
        lambda place: SharedPot(SqliteLog(place), "team"),
        lambda place: SharedPot(PostgresLog(shared().url(place)), "team"),
    ],
)
def test_a_pot_keeps_books(make: Any, tmp_path: Path) -> None:
    """Reserve, commit, roll back, add and reset do what they say, and nothing is settled twice."""
    pot = make(tmp_path / "pot.db")
    first, second = pot.reserve(0.4, 1.0), pot.reserve(0.6, 1.0)
    assert first is not None
    assert second is not None
    assert pot.reserve(0.0, 1.0) is None
    pot.commit(first, 0.9)
    pot.rollback(second)
    assert (pot.get(), pot.get_reserved()) == (0.9, 0.0)
    with pytest.raises(UsageError, match="settled before"):
        pot.commit(first, 0.1)
    assert pot.add(0.2) == 1.1
    pot.reset()
    assert pot.get() == 0.0
    pot.close()


def test_a_pot_needs_a_ceiling() -> None:
    """A shared pot without `max_cost_usd` is a mistake in the configuration."""
    with pytest.raises(UsageError, match="budget_backend"):
        ExecutionConfig(None, None, None, 0, budget_backend=LocalBudgetBackend())


shares = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.01, 100), min_size=1)


@given(remaining=st.floats(0, 1000), weights=shares)
def test_shares_never_exceed_what_there_is(remaining: float, weights: dict[str, float]) -> None:
    """Whatever the allocator, the shares are not negative and together at most the whole."""
    dynamic = DynamicAllocator()
    for child, weight in weights.items():
        dynamic.observe(child, weight)
    for allocator in (FairShareAllocator(), WeightedAllocator(weights), dynamic):
        given_out = allocator.allocate(remaining, list(weights))
        assert set(given_out) == set(weights)
        assert all(share >= 0 for share in given_out.values())
        assert sum(given_out.values()) <= remaining + 1e-9


def test_shares_follow_their_rule() -> None:
    """Fair is equal, weighted is in proportion, dynamic follows what was spent above a certain part."""
    assert FairShareAllocator().allocate(1.0, ["a", "b"]) == {"a": 0.5, "b": 0.5}
    assert WeightedAllocator({"a": 3.0}).allocate(1.0, ["a", "b"]) == {"a": 0.75, "b": 0.25}
    dynamic = DynamicAllocator(least_share=0.5)
    assert dynamic.allocate(1.0, ["a", "b"]) == {"a": 0.5, "b": 0.5}
    dynamic.observe("a", 2.0)
    assert dynamic.allocate(1.0, ["a", "b"]) == {"a": 0.75, "b": 0.25}
    assert dynamic.allocate(1.0, []) == {}


def test_a_partial_result_is_kept_until_it_is_complete() -> None:
    """Pieces are joined in order; a complete buffer takes no more; it says whether it is partial."""
    buffer = PartialResultBuffer()
    assert not buffer.is_partial
    buffer.append("one ")
    buffer.append("two")
    buffer.metadata["model"] = "m"
    assert (buffer.get_partial(), buffer.is_partial) == ("one two", True)
    buffer.mark_complete()
    assert (buffer.is_partial, buffer.is_complete) == (False, True)
    with pytest.raises(UsageError, match="complete"):
        buffer.append("more")


def test_a_partial_result_has_ceilings() -> None:
    """Too many pieces or too many bytes are refused, and what is there stays."""
    pieces = PartialResultBuffer(max_chunks=2)
    pieces.append("a")
    pieces.append("b")
    with pytest.raises(UsageError, match="full"):
        pieces.append("c")
    size = PartialResultBuffer(max_bytes=4)
    size.append("éé")
    with pytest.raises(UsageError, match="full"):
        size.append("x")
    assert (pieces.get_partial(), size.get_partial()) == ("ab", "éé")
    assert (PartialResultBuffer()._max_chunks, PartialResultBuffer()._max_bytes) == (10_000, 10 * 1024 * 1024)
