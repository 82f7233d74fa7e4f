"""Timeouts, deadlines, `abort()` and Ctrl-C really stop the work, seen from the other side of a socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, cast

import anyio
import pytest
from tests.delegates import PassesOn

from treenail.clock import Clock, FixedClock, SystemClock
from treenail.containment import (
    CancellationToken,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    Settled,
    WrapOptions,
    call_later,
    current_call,
)
from treenail.errors import CancelledByToken
from treenail.testing import FakeClock
from treenail.testing.clock import Timers

Config = Callable[..., ExecutionConfig]


class Server:
    """Accepts one connection, reads from it for ever, and sets `closed` when the other side has gone."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.opened = threading.Event()
        self.closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return
        with connection:
            try:
                # Open is what has said hello: from then on the call has its connection in hand.
                while connection.recv(1024):
                    self.opened.set()
            except OSError:
                pass
        self.closed.set()

    def stop(self) -> None:
        self._socket.close()
        self._thread.join(60)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def async_client(server: Server) -> Callable[[], Any]:
    async def talk() -> bytes:
        async with await anyio.connect_tcp("127.0.0.1", server.port) as stream:
            await stream.send(b"hello")
            return await stream.receive()

    return talk


def sync_client(server: Server) -> Callable[[], bytes]:
    def talk() -> bytes:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            # Shutting down wakes the blocked receive; that is how a handler makes its token reach its socket.
            current_call().token.on_cancel(lambda: connection.shutdown(socket.SHUT_RDWR))  # type: ignore[union-attr]  # inside a call there is one
            connection.sendall(b"hello")
            return connection.recv(1024)

    return talk


# --- the connection closes ------------------------------------------------------------------------------


def when_open(server: Server, then: Callable[[], object]) -> threading.Thread:
    """Do something from another thread as soon as the call is in the middle of its work."""

    def run() -> None:
        assert server.opened.wait(60)
        then()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


CAUSES = ["call timeout", "chain timeout", "abort"]


def prepare(cause: str, config: Config, clock: FakeClock) -> tuple[ExecutionContext, WrapOptions]:
    ctx = ExecutionContext(config(timeout_ms=5000 if cause == "chain timeout" else 0), clock=clock)
    return ctx, WrapOptions(timeout_ms=2000 if cause == "call timeout" else None, stoppable=True)


def pull(cause: str, ctx: ExecutionContext, clock: FakeClock) -> Callable[[], object]:
    if cause == "abort":
        return lambda: ctx.abort("stop it")
    return lambda: clock.advance(5.0)


@pytest.mark.parametrize("cause", CAUSES)
async def test_an_async_call_is_cancelled_and_its_connection_closes(
    cause: str, server: Server, config: Config, clock: FakeClock
) -> None:
    """The server sees the connection close, and the call ends with the status of its cause."""
    ctx, options = prepare(cause, config, clock)
    thread = when_open(server, pull(cause, ctx, clock))
    outcome = await ctx.acall_llm(async_client(server), options)
    assert server.closed.wait(60)
    thread.join(60)
    assert outcome.node.status == ("aborted" if cause == "abort" else "timeout")
    assert outcome.decision is Decision.HALT


@pytest.mark.parametrize("cause", CAUSES)
def test_a_driven_coroutine_is_cancelled_too(
    cause: str, server: Server, config: Config, clock: FakeClock
) -> None:
    """A coroutine driven by the synchronous face is stopped like any other."""
    ctx, options = prepare(cause, config, clock)
    thread = when_open(server, pull(cause, ctx, clock))
    outcome = ctx.call_llm(async_client(server), options)
    assert server.closed.wait(60)
    thread.join(60)
    assert outcome.node.status == ("aborted" if cause == "abort" else "timeout")


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("face", ["sync", "async"])
def test_a_sync_handler_sees_its_token(
    cause: str, face: str, server: Server, config: Config, clock: FakeClock
) -> None:
    """A blocking handler hears of the stop through its token and closes its connection."""
    ctx, options = prepare(cause, config, clock)
    thread = when_open(server, pull(cause, ctx, clock))
    if face == "sync":
        outcome = ctx.call_tool(sync_client(server), options)
    else:
        outcome = anyio.run(ctx.acall_tool, sync_client(server), options)
    assert server.closed.wait(60)
    thread.join(60)
    assert outcome.node.status == ("aborted" if cause == "abort" else "timeout")


CTRL_C = """
import sys, socket, anyio
from treenail.containment import ExecutionContext, Limits, current_call

port, face = int(sys.argv[1]), sys.argv[2]
ctx = ExecutionContext(Limits(max_cost_usd=1.0, timeout=60.0))

async def talk():
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(b"hello")
        await stream.receive()

def block():
    with socket.create_connection(("127.0.0.1", port)) as connection:
        current_call().token.on_cancel(lambda: connection.shutdown(socket.SHUT_RDWR))
        connection.sendall(b"hello")
        connection.recv(1024)

try:
    if face == "async":
        anyio.run(ctx.acall_llm, talk)
    elif face == "driven":
        ctx.call_llm(talk)
    else:
        ctx.call_tool(block)
except KeyboardInterrupt:
    print([node.status for node in ctx.get_snapshot().nodes], flush=True)
    # Stay, so that it is the cancellation that closes the connection and not the end of the process.
    sys.stdin.read()
"""


@pytest.mark.parametrize("face", ["async", "driven", "sync"])
def test_ctrl_c_closes_the_connection(face: str, server: Server) -> None:
    """SIGINT in the middle of a call closes its connection while the process lives on, recorded."""
    process = subprocess.Popen(
        [sys.executable, "-c", CTRL_C, str(server.port), face],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.opened.wait(60)
        process.send_signal(signal.SIGINT)
        assert server.closed.wait(60)
        assert process.stdout is not None
        assert process.stdout.readline() == "['aborted']\n"
        assert process.poll() is None
    finally:
        process.communicate(timeout=60)


async def test_a_subprocess_of_a_stopped_call_is_gone(config: Config, clock: FakeClock) -> None:
    """A call that runs a process takes the process down with it."""
    ctx = ExecutionContext(config(timeout_ms=1000), clock=clock)
    pids: list[int] = []

    async def run() -> None:
        async with await anyio.open_process([sys.executable, "-c", "input()"]) as process:
            pids.append(process.pid)
            clock.advance(1.0)
            await process.wait()

    outcome = await ctx.acall_tool(run)
    assert outcome.node.status == "timeout"
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


# --- the caller is released -----------------------------------------------------------------------------


@pytest.mark.parametrize("cause", CAUSES)
def test_the_caller_of_a_deaf_handler_is_released(cause: str, config: Config, clock: FakeClock) -> None:
    """A handler that ignores its token cannot be killed, but its caller goes on at once."""
    ctx, options = prepare(cause, config, clock)
    inside, leave = threading.Event(), threading.Event()

    def deaf() -> None:
        inside.set()
        leave.wait(30)

    thread = threading.Thread(target=lambda: (inside.wait(60), pull(cause, ctx, clock)()))
    thread.start()
    outcome = ctx.call_tool(deaf, options)
    assert not leave.is_set()
    assert outcome.node.status == ("aborted" if cause == "abort" else "timeout")
    thread.join(60)
    leave.set()


async def test_a_handler_hears_that_its_task_was_cancelled(config: Config) -> None:
    """When the task that waits for a plain function is cancelled, the function's token is set."""
    ctx = ExecutionContext(config())
    started, heard = threading.Event(), threading.Event()

    def work() -> None:
        token = current_call().token  # type: ignore[union-attr]  # inside a call there is one
        started.set()
        if token.wait(60):
            heard.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ctx.acall_tool, work)
        await anyio.to_thread.run_sync(started.wait, 10)
        tasks.cancel_scope.cancel()
    assert heard.wait(60)
    assert [node.status for node in ctx.get_snapshot().nodes] == ["aborted"]


def test_a_timeout_makes_a_call_stoppable_by_itself(config: Config, clock: FakeClock) -> None:
    """With a deadline and no further settings, a blocked caller is released when it passes."""
    ctx = ExecutionContext(config(timeout_ms=50), clock=clock)
    leave = threading.Event()
    outcome = ctx.call_tool(lambda: (clock.advance(0.05), leave.wait(30)))
    assert not leave.is_set()
    leave.set()
    assert (outcome.node.status, outcome.stop_reason) == ("timeout", "timeout")
    assert ctx.get_snapshot().elapsed_ms == 50


def test_what_a_released_handler_still_spends_is_booked(config: Config, clock: FakeClock) -> None:
    """Money that is reported after the caller was released is added, journalled and told of."""
    settled: list[Settled] = []
    leave, booked = threading.Event(), threading.Event()

    def journal(event: object) -> None:
        if isinstance(event, Settled):
            settled.append(event)
            if len(settled) == 2:
                booked.set()

    ctx = ExecutionContext(config(), clock=clock, journal=journal)

    def slow() -> None:
        call = current_call()
        ctx.abort("enough")
        leave.wait(30)
        call.report(cost_usd=0.75)  # type: ignore[union-attr]  # inside a call there is one

    outcome = ctx.call_tool(slow, WrapOptions(cost_estimate_hint=0.25, stoppable=True))
    assert outcome.node.cost_usd == 0.25
    leave.set()
    assert booked.wait(60)
    snapshot = ctx.get_snapshot()
    assert snapshot.cost_usd_accumulated == 0.75
    assert snapshot.events[-1].event_type == "late_cost"
    assert [event.cost_usd for event in settled] == [0.25, 0.75]
    assert {event.reservation_id for event in settled} == {settled[0].reservation_id}


def test_an_unstoppable_call_runs_on_its_callers_thread(config: Config) -> None:
    """Without a timeout a function stays on the caller's thread; its token still says what happened."""
    ctx = ExecutionContext(config())
    seen: list[object] = []

    def call() -> str:
        ctx.abort("from within")
        seen.extend([threading.get_ident(), current_call().token.reason])  # type: ignore[union-attr]  # inside a call there is one
        return "kept"

    outcome = ctx.call_tool(call)
    assert seen == [threading.get_ident(), "aborted"]
    assert (outcome.node.status, outcome.decision, outcome.value) == ("aborted", Decision.HALT, "kept")


def test_a_worker_sees_the_callers_context_variables(config: Config) -> None:
    """On a worker thread the function finds its call, and whatever else its caller had set."""
    ctx = ExecutionContext(config())
    outcome = ctx.call_tool(
        lambda: (threading.get_ident(), current_call().node_id),  # type: ignore[union-attr]  # inside a call there is one
        WrapOptions(stoppable=True),
    )
    thread, node_id = outcome.unwrap()
    assert (thread == threading.get_ident(), node_id) == (False, outcome.node.node_id)


# --- timeouts -------------------------------------------------------------------------------------------


def test_a_call_timeout_ends_the_call_and_not_the_chain(config: Config, clock: FakeClock) -> None:
    """One slow call is a timeout of its own; the chain goes on."""
    ctx = ExecutionContext(config(), clock=clock)
    slow = WrapOptions(operation_name="slow", timeout_ms=100)

    def hang() -> None:
        clock.advance(0.1)
        current_call().token.wait(60)  # type: ignore[union-attr]  # inside a call there is one

    outcome = ctx.call_llm(hang, slow)
    assert (outcome.node.status, outcome.decision) == ("timeout", Decision.HALT)
    assert "100 ms" in outcome.detail
    (event,) = ctx.get_snapshot().events
    assert (event.event_type, event.hook) == ("timeout", "ExecutionContext")
    assert ctx.wrap_llm_call(lambda: None, slow) is Decision.ALLOW


def test_a_call_on_its_callers_thread_hears_of_its_own_timeout(config: Config, clock: FakeClock) -> None:
    """Nobody can release its caller, but its token is set in time, and coming back late is no success."""
    ctx = ExecutionContext(config(), clock=clock)

    def slow() -> str:
        call = current_call()
        assert call is not None
        clock.advance(0.9)
        before = call.token.is_cancelled
        clock.advance(0.1)
        return f"{before} {call.token.is_cancelled}"

    outcome = ctx.call_tool(slow, WrapOptions(timeout_ms=1000, stoppable=False))
    assert (outcome.node.status, outcome.value) == ("timeout", "False True")
    assert outcome.decision is Decision.HALT
    assert ctx.stop_reason is None
    assert clock.timers == 0


def test_a_call_that_timed_out_is_retried_when_asked(config: Config, clock: FakeClock) -> None:
    """A timeout counts as a failure of the attempt, so the containment's own retries apply to it."""
    ctx = ExecutionContext(config(), clock=clock)

    def slow_once() -> str:
        call = current_call()
        assert call is not None
        if call.attempt == 1:
            clock.advance(0.1)
            call.token.wait(60)
        call.token.raise_if_cancelled()
        return "in time"

    outcome = ctx.call_llm(slow_once, WrapOptions(timeout_ms=100, retry_policy_override=1))
    assert (outcome.value, outcome.node.retries_used, outcome.node.status) == ("in time", 1, "ok")


def test_a_calls_timeout_never_outlasts_the_chains(config: Config, clock: FakeClock) -> None:
    """A longer timeout of a call does not lift the chain's deadline."""
    ctx = ExecutionContext(config(timeout_ms=1000), clock=clock)

    def hang() -> None:
        clock.advance(1.0)
        current_call().token.wait(60)  # type: ignore[union-attr]  # inside a call there is one

    outcome = ctx.call_llm(hang, WrapOptions(timeout_ms=60_000))
    assert outcome.node.status == "timeout"
    assert ctx.stop_reason == "timeout"


def test_a_handlers_own_error_after_the_stop_is_kept(config: Config, clock: FakeClock) -> None:
    """A handler that raises because it was stopped counts as stopped, and its error is there to be read."""
    ctx = ExecutionContext(config(), clock=clock)

    def call() -> None:
        ctx.abort("stop")
        raise ConnectionResetError("closed under me")

    outcome = ctx.call_tool(call)
    assert outcome.node.status == "aborted"
    assert isinstance(outcome.error, ConnectionResetError)


def test_raise_if_cancelled_ends_a_handler_as_stopped(config: Config) -> None:
    """`CancelledByToken` out of a handler is the stop itself, not an error of the call."""
    ctx = ExecutionContext(config())

    def call() -> None:
        ctx.abort("stop")
        current_call().token.raise_if_cancelled()  # type: ignore[union-attr]  # inside a call there is one

    outcome = ctx.call_tool(call)
    assert (outcome.node.status, outcome.error) == ("aborted", None)
    with pytest.raises(CancelledByToken, match="stop"):
        outcome.unwrap()


def test_a_deadline_holds_without_a_timer(config: Config) -> None:
    """A clock that fires no timers is asked at each call, so the deadline holds even then."""

    class StillClock(FixedClock):
        __slots__ = ()
        at = 0.0

        def monotonic(self) -> float:
            return StillClock.at

    clock = StillClock(SystemClock().now())
    ctx = ExecutionContext(config(timeout_ms=1000), clock=clock)
    assert ctx.wrap_tool_call(lambda: None) is Decision.ALLOW
    StillClock.at = 1.0
    assert ctx.wrap_tool_call(lambda: None) is Decision.HALT
    assert ctx.stop_reason == "timeout"


# --- tokens and timers ----------------------------------------------------------------------------------


def test_a_token_cancels_downwards_only() -> None:
    """Cancelling a parent cancels its children with the same reason; a child leaves its parent alone."""
    parent = CancellationToken()
    child, other = CancellationToken(parent), CancellationToken(parent)
    assert child.cancel("timeout") is True
    assert (parent.is_cancelled, other.is_cancelled) == (False, False)
    parent.cancel(detail="because")
    assert (other.reason, other.detail, child.reason) == ("aborted", "because", "timeout")
    assert parent.cancel("timeout") is False


def test_callbacks_run_once_and_in_spite_of_each_other() -> None:
    """Each callback is called once, also if one raises; a late one is called at once; a removed one never."""
    token, heard = CancellationToken(), []

    def broken() -> None:
        raise ValueError("mine")

    token.on_cancel(broken)
    token.on_cancel(lambda: heard.append("first"))
    remove = token.on_cancel(lambda: heard.append("removed"))
    remove()
    token.cancel()
    token.cancel()
    token.on_cancel(lambda: heard.append("late"))
    assert heard == ["first", "late"]


def test_waiting_for_a_token() -> None:
    """`wait` says whether the token was cancelled, and returns when it is."""
    token = CancellationToken()
    assert token.wait(0) is False
    thread = threading.Thread(target=token.cancel)
    thread.start()
    assert token.wait(60) is True
    thread.join()


def test_a_finished_call_leaves_nothing_behind(config: Config, clock: FakeClock) -> None:
    """Tokens of finished calls let go of the chain's, and their timers are gone: no chain grows by them."""
    ctx = ExecutionContext(config(), clock=clock)
    for _ in range(50):
        ctx.call_tool(lambda: None, WrapOptions(stoppable=True, timeout_ms=60_000))
    assert not ctx.cancellation_token._callbacks
    assert clock.timers == 0


def test_timers_are_due_in_the_order_of_their_times() -> None:
    """A timer that is due earlier comes out earlier, also if it was set later."""
    timers = Timers()
    due: list[str] = []
    timers.add(2.0, lambda: due.append("late"))
    timers.add(1.0, lambda: due.append("early"))
    timers.add(1.5, lambda: due.append("never")).cancel()
    while (callback := timers.pop_due(3.0)) is not None:
        callback()
    assert due == ["early", "late"]
    assert len(timers) == 0


def test_a_timer_that_fails_keeps_no_other_from_firing_on_the_system_clock() -> None:
    """Timers fire each on its own, so that one that fails or hangs harms no other."""
    failed, late = threading.Event(), threading.Event()

    def broken() -> None:
        failed.set()
        raise ValueError

    clock = SystemClock()
    call_later(clock, 0.02, late.set)
    call_later(clock, 0.01, broken)
    assert failed.wait(60)
    assert late.wait(60)


def test_a_clock_without_timers_fires_them_in_real_time() -> None:
    """On a clock without a `call_later` of its own, timers count real time."""
    fired = threading.Event()
    call_later(FixedClock(datetime.now(UTC)), 0.01, fired.set)
    assert fired.wait(60)


def test_a_clock_that_passes_requests_on_fires_timers_as_the_one_behind_it_does() -> None:
    clock = FakeClock()
    fired: list[float] = []
    call_later(cast(Clock, PassesOn(clock)), 5, lambda: fired.append(clock.monotonic()))
    due = clock.monotonic() + 5
    clock.advance(4)
    assert fired == []
    clock.advance(1)
    assert fired == [due]
