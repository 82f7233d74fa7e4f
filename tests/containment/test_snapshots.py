"""Snapshots never change, cost nothing, and show calls as a tree."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from uuid import UUID

import anyio
import pytest

from treenail.containment import (
    ChainMetadata,
    ContextSnapshot,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    Limits,
    NodeRecord,
    WrapOptions,
    current_call,
    threads,
)
from treenail.testing import FakeClock

Config = Callable[..., ExecutionConfig]


def test_calls_within_calls_are_children(config: Config) -> None:
    """A call made during another is its child; the one after it is its sibling, not its child."""
    ctx = ExecutionContext(config())

    def outer() -> None:
        ctx.wrap_tool_call(lambda: ctx.wrap_llm_call(lambda: None, WrapOptions("deep")), WrapOptions("a"))
        ctx.wrap_tool_call(lambda: None, WrapOptions("b"))

    ctx.wrap_llm_call(outer, WrapOptions("top"))
    ctx.wrap_llm_call(lambda: None, WrapOptions("next"))
    nodes = {node.operation_name: node for node in ctx.get_snapshot().nodes}
    parents = {
        name: next((other for other in nodes if nodes[other].node_id == node.parent_id), None)
        for name, node in nodes.items()
    }
    assert parents == {"top": None, "a": "top", "deep": "a", "b": "top", "next": None}


async def test_parallel_tasks_are_siblings(config: Config) -> None:
    """Calls made by tasks of one call are all its children, whatever order they end in."""
    ctx = ExecutionContext(config())

    async def fan_out() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(ctx.acall_tool, anyio.lowlevel.checkpoint)

    outer = await ctx.acall_llm(fan_out)
    children = ctx.get_snapshot().nodes[1:]
    assert [child.parent_id for child in children] == [outer.node.node_id] * 5


@pytest.mark.parametrize("stoppable", [False, True])
def test_the_tree_survives_worker_threads(config: Config, stoppable: bool) -> None:
    """A call on a worker thread is still the parent of the calls it makes."""
    ctx = ExecutionContext(config())
    options = WrapOptions(stoppable=stoppable)
    inner: list[NodeRecord] = []
    outer = ctx.call_tool(lambda: inner.append(ctx.call_tool(lambda: None, options).node), options)
    assert inner[0].parent_id == outer.node.node_id


def test_another_runs_call_is_no_parent(config: Config) -> None:
    """A run started inside another run's call, without being its child, has its own root."""
    mine, other = ExecutionContext(config()), ExecutionContext(config())
    outcome = mine.call_tool(lambda: other.call_tool(lambda: None))
    assert outcome.value is not None
    assert outcome.value.node.parent_id is None


def test_node_ids_are_uuids_of_their_own(config: Config) -> None:
    """Each call of each chain has another valid UUID."""
    contexts = [ExecutionContext(config()) for _ in range(20)]
    ids = [ctx.call_tool(lambda: None).node.node_id for ctx in contexts for _ in range(20)]
    assert len({UUID(node_id) for node_id in ids}) == 400


def test_a_snapshot_shows_what_is_under_way(config: Config, clock: FakeClock) -> None:
    """A running call has no end and its reservation is visible; the snapshot keeps it so for ever."""
    ctx = ExecutionContext(config(), clock=clock)
    taken: list[ContextSnapshot] = []

    def call() -> None:
        clock.advance(2)
        taken.append(ctx.get_snapshot())

    ctx.wrap_llm_call(call, WrapOptions("think", cost_estimate_hint=0.5))
    ctx.wrap_llm_call(lambda: None)
    (during,) = taken
    (node,) = during.nodes
    assert (node.status, node.end_ts, node.attempts) == ("running", None, 1)
    assert (during.step_count, during.cost_usd_accumulated, during.cost_usd_reserved) == (1, 0.0, 0.5)
    assert (during.elapsed_ms, during.graph_summary.running) == (2000, 1)
    after = ctx.get_snapshot()
    assert (len(after.nodes), after.nodes[0].status, after.cost_usd_reserved) == (2, "ok", 0)
    assert after.nodes[0].start_ts == during.nodes[0].start_ts
    assert after.nodes[0].end_ts == clock.now()


def test_a_snapshot_cannot_be_changed(config: Config) -> None:
    """Neither its fields nor its sequences take a new value."""
    ctx = ExecutionContext(config())
    ctx.wrap_llm_call(lambda: None)
    snapshot = ctx.get_snapshot()
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.step_count = 0  # type: ignore[misc]  # that it is frozen is the point
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.nodes[0].status = "error"  # type: ignore[misc]  # that it is frozen is the point
    with pytest.raises(TypeError):
        snapshot.nodes[0] = None  # type: ignore[index]  # that it is frozen is the point
    assert not hasattr(snapshot.nodes, "append")


def test_a_snapshots_nodes_are_a_sequence(config: Config) -> None:
    """They index, slice, iterate and compare as a list does."""
    ctx = ExecutionContext(config())
    for name in "abc":
        ctx.wrap_llm_call(lambda: None, WrapOptions(name))
    nodes = ctx.get_snapshot().nodes
    assert [node.operation_name for node in nodes] == ["a", "b", "c"]
    assert (nodes[-1].operation_name, nodes[0].operation_name) == ("c", "a")
    assert [node.operation_name for node in nodes[1:]] == ["b", "c"]
    assert nodes == list(nodes)
    assert nodes == ctx.get_snapshot().nodes
    assert nodes[0] in nodes
    assert ExecutionContext(config()).get_snapshot().nodes == []
    with pytest.raises(IndexError):
        nodes[3]


def test_a_snapshot_describes_its_chain(config: Config) -> None:
    """It names the chain, the service that runs it, and the ceilings that apply."""
    metadata = ChainMetadata("req", "chain", service="agent")
    ctx = ExecutionContext(config(max_steps=7), metadata=metadata)
    ctx.wrap_llm_call(lambda: None)
    ctx.wrap_tool_call(lambda: None)
    snapshot = ctx.get_snapshot()
    assert (snapshot.chain_id, snapshot.request_id, snapshot.agent_identity) == ("chain", "req", "agent")
    assert snapshot.policy_metadata["max_steps"] == 7
    summary = snapshot.graph_summary
    assert (summary.node_count, summary.llm_calls, summary.tool_calls) == (2, 1, 1)


def ended_before(instruction: int) -> tuple[Any, bool]:
    """Snapshot a call that ends before the n-th instruction of what reads its node; say if there is one."""
    ctx = ExecutionContext(Limits())
    begun, may_end = threading.Event(), threading.Event()
    call = threading.Thread(target=ctx.wrap_tool_call, args=[lambda: (begun.set(), may_end.wait())])
    call.start()
    begun.wait()
    left = instruction

    def let_it_end(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_name == "record":
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if left < 0:
                may_end.set()
                call.join()
        return let_it_end

    tracer = sys.gettrace()
    sys.settrace(let_it_end)
    try:
        node = ctx.get_snapshot().nodes[0]
    finally:
        sys.settrace(tracer)
        may_end.set()
        call.join()
    return node, left < 0


def test_a_snapshot_under_contention_shows_no_torn_node() -> None:
    """A call that ends meanwhile, at whatever moment, is shown as running, or with all of its end."""
    for moment in itertools.count():
        node, has_ended = ended_before(moment)
        is_running = node.status == "running"
        assert is_running is (node.decision is None), (moment, node)
        assert is_running is (node.end_ts is None), (moment, node)
        if not has_ended:
            break
    assert moment > 20, "nobody looked at the node"


def test_the_tags_of_a_chain_cannot_be_changed() -> None:
    """Neither through the metadata nor through the mapping that they were given as."""
    given = {"env": "prod"}
    metadata = ChainMetadata("r", "c", tags=given)
    given["env"] = "test"
    with pytest.raises(TypeError):
        metadata.tags["env"] = "test"  # type: ignore[index]  # that it is read-only is the point
    assert metadata.tags == {"env": "prod"}
    assert dataclasses.replace(metadata, team="t").tags == {"env": "prod"}


def test_a_snapshot_costs_the_same_at_ten_thousand_nodes() -> None:
    """Its cost does not grow with the calls: 10,000 nodes cost at most ten times what 100 do."""

    def cost(nodes: int) -> float:
        ctx = ExecutionContext(Limits())
        for _ in range(nodes):
            ctx.wrap_tool_call(int)
        best = float("inf")
        for _ in range(20):
            started = time.thread_time()  # Work, not waiting for others to do theirs.
            snapshot = ctx.get_snapshot()
            best = min(best, time.thread_time() - started)
        assert len(snapshot.nodes) == nodes
        assert snapshot.nodes[nodes - 1].status == "ok"
        return best

    assert cost(10_000) < 10 * cost(100)


class Big:
    """Stands for a request, a response or an error that is large."""


@pytest.mark.parametrize("stoppable", [False, True])
@pytest.mark.parametrize("fate", ["ok", "fail", "interrupt"])
def test_a_finished_call_keeps_only_its_record(
    config: Config, fate: str, stoppable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes stay for as long as the chain does; what a call was given, returned or raised does not."""
    # One worker that nobody else uses: it gets every job.
    monkeypatch.setattr(threads, "workers", threads.Workers())
    ctx = ExecutionContext(config())
    seen: list[weakref.ref[Big]] = []

    def big() -> Big:
        made = Big()
        seen.append(weakref.ref(made))
        return made

    def call() -> Big:
        current_call().partial.append("so far")  # type: ignore[union-attr]  # inside a call there is one
        if fate == "ok":
            return big()
        inside = big()
        raise (KeyboardInterrupt if fate == "interrupt" else OSError)(id(inside))

    options = WrapOptions("op", request=big(), stoppable=stoppable)
    try:
        ctx.wrap_llm_call(call, options)
        ctx.call_llm(call, options)
    except KeyboardInterrupt:
        pass
    del options
    # A worker lets go of a job when it is on its way to wait for the next one, which this is.
    assert ExecutionContext(config()).call_llm(int, WrapOptions(stoppable=True)).ok
    gc.collect()
    assert [ref() for ref in seen] == [None] * len(seen)
    assert {node.operation_name for node in ctx.get_snapshot().nodes} == {"op"}


def test_a_signal_handler_may_abort_at_any_moment(config: Config) -> None:
    """`abort()` and `get_snapshot()` from a signal handler do not wait for the thread that they interrupt."""
    ctx = ExecutionContext(config())
    done = threading.Event()

    def handler() -> None:
        with ctx._ledger.lock, ctx.cancellation_token._lock:
            # Where a signal would strike in the worst case: this thread holds every lock that there is.
            ctx.abort("Ctrl-C")
            ctx.get_snapshot()
            done.set()

    thread = threading.Thread(target=handler, daemon=True)
    thread.start()
    assert done.wait(60)
    assert ctx.stop_reason == "aborted"


def test_snapshots_are_consistent_while_threads_work(config: Config, at_once: Any) -> None:
    """Taken at any moment, steps, nodes and money of a snapshot belong together."""
    ctx = ExecutionContext(config())
    stop = threading.Event()
    wrong: list[ContextSnapshot] = []

    def watch() -> None:
        while not stop.is_set():
            snapshot = ctx.get_snapshot()
            charged = round((snapshot.cost_usd_accumulated + snapshot.cost_usd_reserved) * 100)
            nodes = list(snapshot.nodes)
            if charged != snapshot.step_count or len(nodes) != snapshot.step_count:
                wrong.append(snapshot)

    watcher = threading.Thread(target=watch)
    watcher.start()
    options = WrapOptions(cost_estimate_hint=0.01)
    at_once(8, lambda _: [ctx.wrap_llm_call(lambda: None, options) for _ in range(200)])
    stop.set()
    watcher.join(60)
    assert wrong == []
    assert {node.decision for node in ctx.get_snapshot().nodes} == {Decision.ALLOW}
