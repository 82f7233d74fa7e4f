"""Children spend their parent's money, steps, retries and time, and can only be narrower."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.containment import (
    ChainMetadata,
    CircuitBreaker,
    CircuitBreakers,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    Limits,
    LoopPolicy,
    SafeModeHook,
    ShieldPipeline,
    WrapOptions,
    current_call,
)
from treenail.containment.breaker import CircuitState
from treenail.errors import CallRefused, UsageError
from treenail.testing import FakeClock

Config = Callable[..., ExecutionConfig]


def fail() -> None:
    raise OSError("no luck")


def stops(ctx: ExecutionContext) -> list[str]:
    return [event.event_type for event in ctx.get_snapshot().events if event.hook == "ExecutionContext"]


def test_a_child_spends_the_parents_money(config: Config) -> None:
    """What a child spends is spent for its parent too, and the other way round."""
    parent = ExecutionContext(config(max_cost_usd=1.0))
    child = parent.spawn_child()
    child.wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=0.6))
    assert parent.get_snapshot().cost_usd_accumulated == 0.6
    assert child.remaining_usd == parent.remaining_usd == pytest.approx(0.4)
    assert parent.wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=0.5)) is Decision.HALT
    parent.wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=0.4))
    assert child.wrap_llm_call(lambda: None) is Decision.HALT


def test_steps_and_retries_are_the_parents_too(config: Config) -> None:
    """A step or a retry of a child is one of its parent's."""
    parent = ExecutionContext(config(max_steps=3, max_retries_total=2))
    child = parent.spawn_child()
    assert child.wrap_llm_call(fail) is Decision.RETRY
    assert parent.wrap_llm_call(lambda: None) is Decision.ALLOW
    assert child.wrap_llm_call(fail) is Decision.RETRY
    snapshot = parent.get_snapshot()
    assert (snapshot.step_count, snapshot.retries_used) == (3, 2)
    assert child.get_snapshot().step_count == 2


def test_a_parents_ceiling_ends_child_and_parent_with_their_own_records(config: Config) -> None:
    """Each chain in the line records the stop once, in its own events, and says whose ceiling it was."""
    root = ExecutionContext(config(max_steps=1), metadata=ChainMetadata("r", "root"))
    middle = root.spawn_child()
    leaf = middle.spawn_child()
    leaf.wrap_llm_call(lambda: None)
    for _ in range(3):
        assert leaf.wrap_llm_call(lambda: None) is Decision.HALT
    for ctx in (root, middle, leaf):
        assert stops(ctx) == ["step_limit_exceeded"]
        assert ctx.stop_reason == "step_limit_exceeded"
        assert ctx.wrap_tool_call(lambda: None) is Decision.HALT
    assert "root" in leaf.get_snapshot().events[0].reason


def test_a_childs_own_ceiling_ends_the_child_alone(config: Config) -> None:
    """A judge on a small budget may use it up without ending the run that it judges."""
    parent = ExecutionContext(config(max_cost_usd=1.0))
    judge = parent.spawn_child(Limits(max_cost_usd=0.1))
    assert judge.wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=0.1)) is Decision.ALLOW
    assert judge.wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=0.1)) is Decision.HALT
    assert stops(judge) == ["budget_exceeded"]
    assert stops(parent) == []
    assert parent.wrap_llm_call(lambda: None) is Decision.ALLOW


def test_a_child_cannot_widen_anything(config: Config) -> None:
    """Ceilings above the parent's change nothing."""
    parent = ExecutionContext(config(max_cost_usd=1.0, max_steps=2, timeout_ms=1000), clock=FakeClock())
    child = parent.spawn_child(config(max_cost_usd=50.0, max_steps=50, timeout_ms=60_000))
    assert child.remaining_usd == 1.0
    assert child.remaining_s == 1.0
    assert [child.wrap_tool_call(lambda: None) for _ in range(3)] == [Decision.ALLOW] * 2 + [Decision.HALT]


def test_a_child_inherits_shield_and_breaker_and_adds_its_own(config: Config, clock: FakeClock) -> None:
    """Both the parent's and the child's guards are asked; the child's do not guard the parent."""
    mode, breaker = SafeModeHook(enabled=False), CircuitBreaker(1, clock=clock)
    parent = ExecutionContext(config(), ShieldPipeline(hooks=[mode]), circuit_breaker=breaker, clock=clock)
    own_mode, own_breaker = SafeModeHook(enabled=False), CircuitBreaker(1, clock=clock)
    child = parent.spawn_child(pipeline=ShieldPipeline(hooks=[own_mode]), circuit_breaker=own_breaker)
    assert child.wrap_llm_call(lambda: None) is Decision.ALLOW
    mode.enable()
    assert child.wrap_llm_call(lambda: None) is Decision.HALT
    mode.disable()
    own_mode.enable()
    assert (child.wrap_llm_call(lambda: None), parent.wrap_llm_call(lambda: None)) == (
        Decision.HALT,
        Decision.ALLOW,
    )
    own_mode.disable()
    breaker.record_failure()
    assert child.call_llm(lambda: None).stop_reason == "circuit_open"
    breaker.reset()
    own_breaker.record_failure()
    assert child.call_llm(lambda: None).stop_reason == "circuit_open"
    assert parent.wrap_llm_call(lambda: None) is Decision.ALLOW


def test_aborting_the_parent_stops_the_child_at_work(config: Config) -> None:
    """The work under way in a child hears of its grandparent's abort; each chain records it."""
    root = ExecutionContext(config())
    leaf = root.spawn_child().spawn_child()

    def work() -> str | None:
        root.abort("stop everything")
        token = current_call().token  # type: ignore[union-attr]  # inside a call there is one
        return token.reason if token.wait(60) else None

    outcome = leaf.call_tool(work, WrapOptions(stoppable=True))
    assert outcome.node.status == "aborted"
    assert (stops(root), stops(leaf)) == (["aborted"], ["aborted"])
    assert "stop everything" in leaf.get_snapshot().events[0].reason


def test_aborting_a_child_leaves_its_parent_and_siblings(config: Config) -> None:
    """Cancellation goes down, never up or sideways."""
    parent = ExecutionContext(config())
    child, sibling = parent.spawn_child(), parent.spawn_child()
    child.abort("not needed")
    assert child.wrap_tool_call(lambda: None) is Decision.HALT
    assert parent.wrap_tool_call(lambda: None) is Decision.ALLOW
    assert sibling.wrap_tool_call(lambda: None) is Decision.ALLOW


def test_a_child_of_an_aborted_parent_is_born_stopped(config: Config) -> None:
    """Spawning late changes nothing."""
    parent = ExecutionContext(config())
    parent.abort("over")
    child = parent.spawn_child()
    assert child.call_tool(lambda: None).stop_reason == "aborted"


@pytest.mark.parametrize(("child_ms", "ended"), [(500, ["child"]), (5000, ["child", "parent"])])
async def test_the_nearer_deadline_counts(
    child_ms: int, ended: list[str], config: Config, clock: FakeClock
) -> None:
    """A child's earlier deadline ends the child; the parent's ends both, and each records its own timeout."""
    parent = ExecutionContext(config(timeout_ms=1000), clock=clock)
    child = parent.spawn_child(config(timeout_ms=child_ms))

    async def work() -> None:
        clock.advance(min(child_ms, 1000) / 1000)
        await anyio.sleep_forever()

    outcome = await child.acall_llm(work)
    assert outcome.node.status == "timeout"
    named = {"child": child, "parent": parent}
    assert [name for name, ctx in named.items() if stops(ctx) == ["timeout"]] == ended


def test_eight_children_in_parallel_share_exactly_n(config: Config, at_once: Any) -> None:
    """Children in threads of their own take exactly the parent's 20 steps and no more."""
    parent = ExecutionContext(config(max_steps=20))
    made: list[int] = []

    def child_run(number: int) -> None:
        child = parent.spawn_child()
        while child.wrap_tool_call(lambda: made.append(number)) is not Decision.HALT:
            pass

    at_once(8, child_run)
    assert len(made) == parent.get_snapshot().step_count == 20


def test_a_childs_nodes_hang_below_the_call_that_spawned_it(config: Config) -> None:
    """The tree goes on across chains: parent call, child call, grandchild call."""
    root = ExecutionContext(config())
    ids: dict[str, Any] = {}

    def leaf_call() -> None:
        ids["leaf"] = current_call().node_id  # type: ignore[union-attr]  # inside a call there is one

    def middle_call() -> None:
        ids["middle"] = current_call().node_id  # type: ignore[union-attr]  # inside a call there is one
        # From another thread the running call is not seen; the spawning one is.
        leaf = root.spawn_child()
        thread = threading.Thread(target=lambda: ids.setdefault("node", leaf.call_tool(leaf_call).node))
        thread.start()
        thread.join(60)

    middle = root.spawn_child()
    outer = root.call_llm(lambda: ids.setdefault("inner", middle.call_tool(middle_call).node))
    assert ids["inner"].parent_id == outer.node.node_id
    assert ids["node"].parent_id == ids["middle"]
    assert (ids["node"].node_id, outer.node.parent_id) == (ids["leaf"], None)
    assert middle.get_snapshot().parent_chain_id == root.chain_id


def test_a_child_may_begin_after_the_call_that_asked_for_it(config: Config) -> None:
    """Its nodes hang below that call all the same."""
    parent = ExecutionContext(config())
    asked = parent.call_tool(current_call)
    outcome = parent.spawn_child(below=asked.value).call_llm(lambda: None)
    assert outcome.node.parent_id == asked.node.node_id
    assert parent.spawn_child().call_llm(lambda: None).node.parent_id is None


def test_a_child_that_is_opened_again_goes_on_from_what_it_had_spent(config: Config) -> None:
    """Under the same id it is the same child: asking it again and again buys it no second allowance."""
    parent = ExecutionContext(config())
    made = 0

    def call() -> None:
        nonlocal made
        made += 1
        if made == 2:
            raise OSError("no")

    for _ in range(3):
        limits = Limits(max_steps=3, max_cost_usd=0.03, max_retries=3)
        with parent.spawn_child(limits, metadata=ChainMetadata("r", "the child")) as child:
            for _ in range(2):
                child.wrap_llm_call(call, WrapOptions(cost_estimate_hint=0.01))
    spent = child.get_snapshot()
    assert (spent.step_count, spent.cost_usd_accumulated, spent.retries_used) == (3, 0.03, 1)
    assert made == 3
    assert parent.get_snapshot().step_count == 3
    with parent.spawn_child(Limits(max_steps=1), metadata=ChainMetadata("r", "another")) as other:
        assert other.wrap_llm_call(lambda: None) is Decision.ALLOW


def test_two_live_children_with_one_id_share_one_allowance(config: Config, clock: FakeClock) -> None:
    """Of money, steps, retries and time, also while a call of the other one is under way."""
    parent = ExecutionContext(config(), clock=clock)
    limits = Limits(max_steps=3, max_cost_usd=0.03, max_retries=1, timeout=10.0)
    first, second = (parent.spawn_child(limits, metadata=ChainMetadata("r", "one")) for _ in range(2))
    dear = WrapOptions("ask", cost_estimate_hint=0.02)
    during = first.call_llm(lambda: second.call_llm(lambda: None, dear), dear)
    assert during.value is not None
    assert during.value.stop_reason == "budget_exceeded"

    def fail() -> None:
        raise OSError("no")

    assert second.wrap_llm_call(fail) is Decision.RETRY
    assert first.wrap_llm_call(lambda: None) is Decision.HALT
    assert first.stop_reason == "retry_budget_exceeded"
    spent = [each.get_snapshot() for each in (first, second)]
    assert {(each.step_count, each.cost_usd_accumulated, each.retries_used) for each in spent} == {
        (2, 0.02, 1)
    }
    assert parent.get_snapshot().step_count == 2
    clock.advance(6)
    third = parent.spawn_child(limits, metadata=ChainMetadata("r", "one"))
    assert third.remaining_s == 4
    for each in (first, second, third):
        each.close()
    clock.advance(100)
    again = parent.spawn_child(limits, metadata=ChainMetadata("r", "one"))
    assert again.remaining_s == 4, "the time between two contexts of a chain is not the chain's"


def test_a_child_has_an_id_of_its_own(config: Config) -> None:
    """Under its parent's id, what it spends would count twice."""
    parent = ExecutionContext(config(), metadata=ChainMetadata("r", "run"))
    below = parent.spawn_child(metadata=ChainMetadata("r", "child"))
    for name in ("run", "child"):
        with pytest.raises(UsageError, match="needs an id of its own"):
            below.spawn_child(metadata=ChainMetadata("r", name))


def test_finished_children_are_not_kept_alive(config: Config) -> None:
    """A long-running parent with a deadline does not hold on to the children that it had."""
    parent = ExecutionContext(config(timeout_ms=60_000))
    child = parent.spawn_child(Limits(timeout=30.0, max_steps=5))
    child.wrap_tool_call(lambda: None)
    gone = weakref.ref(child)
    del child
    gc.collect()
    assert gone() is None
    assert not parent.cancellation_token._callbacks


def test_a_child_shares_journal_and_clock() -> None:
    """Passing a child its own is a mistake, because there is one ledger."""
    parent = ExecutionContext(Limits())
    with pytest.raises(UsageError, match="shares its parent's journal and clock"):
        ExecutionContext(Limits(), parent=parent, clock=FakeClock())


def test_depth_is_enforced_where_children_are_made(config: Config) -> None:
    """A run that lets children be two levels deep refuses the third, whatever the children ask for."""
    root = ExecutionContext(config(max_depth=2))
    child = root.spawn_child(config(max_depth=9))
    grandchild = child.spawn_child()
    assert [ctx.depth for ctx in (root, child, grandchild)] == [0, 1, 2]
    assert [ctx.remaining_depth for ctx in (root, child, grandchild)] == [2, 1, 0]
    with pytest.raises(CallRefused, match="3 levels deep"):
        grandchild.spawn_child()
    with pytest.raises(CallRefused):
        ExecutionContext(Limits(), parent=grandchild)
    assert stops(grandchild) == ["depth_exceeded", "depth_exceeded"]
    assert grandchild.wrap_tool_call(lambda: None) is Decision.ALLOW


def test_a_child_may_allow_fewer_levels_and_not_more(config: Config) -> None:
    """0 is no children at all; None is no ceiling of its own."""
    root = ExecutionContext(config(max_depth=5))
    assert root.spawn_child(Limits(max_depth=0)).remaining_depth == 0
    assert root.spawn_child(Limits()).remaining_depth == 4
    assert ExecutionContext(Limits()).remaining_depth is None
    for wrong in (-1, 1.0, True, "1"):
        with pytest.raises(UsageError, match="max_depth"):
            Limits(max_depth=wrong)  # type: ignore[arg-type] # the wrong types are the test


def test_an_onlooker_is_no_level_of_depth(config: Config) -> None:
    """A run that lets nobody have children is looked at all the same; children below an onlooker count."""
    root = ExecutionContext(config(max_depth=1))
    judge = root.spawn_child(onlooker=True)
    assert (judge.depth, judge.remaining_depth) == (0, 1)
    below = judge.spawn_child()
    assert (below.depth, below.remaining_depth) == (1, 0)
    with pytest.raises(CallRefused):
        below.spawn_child()
    assert below.spawn_child(onlooker=True).wrap_llm_call(lambda: None) is Decision.ALLOW
    assert ExecutionContext(config(max_depth=0)).spawn_child(onlooker=True).depth == 0


def test_an_onlooker_heeds_circuits_and_tells_them_nothing(config: Config, clock: FakeClock) -> None:
    """Its failures open no circuit of the work, and a half-open one's probe is left to the work."""
    breaker, each = CircuitBreaker(2, 10.0, clock=clock), CircuitBreakers(2, 10.0, clock=clock)
    for guard, entity in ((breaker, breaker), (each, each.get("m"))):
        root = ExecutionContext(config(), circuit_breaker=guard, clock=clock)
        judge = root.spawn_child(onlooker=True).spawn_child()
        for _ in range(5):
            judge.wrap_llm_call(fail, WrapOptions("m", entity_id="m"))
        assert (entity.state, entity.failure_count) == (CircuitState.CLOSED, 0)
        for _ in range(2):
            root.wrap_llm_call(fail, WrapOptions("m", entity_id="m"))
        assert judge.call_llm(lambda: 1, WrapOptions("m", entity_id="m")).stop_reason == "circuit_open"
        clock.advance(11)
        assert judge.call_llm(lambda: 1, WrapOptions("m", entity_id="m")).stop_reason == "circuit_open"
        assert root.call_llm(lambda: 1, WrapOptions("m", entity_id="m")).value == 1
        assert judge.call_llm(lambda: 1, WrapOptions("m", entity_id="m")).value == 1


def test_what_an_onlooker_repeats_is_no_loop_of_the_work(config: Config) -> None:
    """Nor does what it does in between hide a loop of the work."""
    root = ExecutionContext(config(), loops=LoopPolicy(halt_repeats=3))
    judge = root.spawn_child(onlooker=True)
    for _ in range(6):
        assert judge.wrap_tool_call(lambda: None, WrapOptions("look")) is Decision.ALLOW
    decided = []
    for _ in range(3):
        decided.append(root.wrap_tool_call(lambda: None, WrapOptions("look")))
        judge.wrap_tool_call(lambda: None, WrapOptions("other"))
    assert decided == [Decision.ALLOW, Decision.ALLOW, Decision.HALT]


@given(
    ceilings=st.lists(st.integers(1, 100), min_size=1, max_size=4),
    calls=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=30),
)
def test_in_a_line_of_chains_every_ceiling_holds(ceilings: list[int], calls: list[tuple[int, int]]) -> None:
    """Whoever spends, no ceiling in the line is passed, and each chain's total is the sum below it."""
    line = [ExecutionContext(Limits(max_cost_usd=ceilings[0] / 100))]
    for cents in ceilings[1:]:
        line.append(line[-1].spawn_child(Limits(max_cost_usd=cents / 100)))
    spent = [0] * len(line)
    for place, cents in calls:
        who = min(place, len(line) - 1)
        fits = all(spent[at] < ceilings[at] and spent[at] + cents <= ceilings[at] for at in range(who + 1))
        decision = line[who].wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=cents / 100))
        assert (decision is Decision.ALLOW) == fits
        if fits:
            for at in range(who + 1):
                spent[at] += cents
    totals = [ctx.get_snapshot().cost_usd_accumulated for ctx in line]
    assert totals == [pytest.approx(cents / 100) for cents in spent]
