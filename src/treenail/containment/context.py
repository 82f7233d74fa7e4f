"""`ExecutionContext`: the container that a whole run happens in.

Theory of operation
-------------------

Every call goes the same way, whether its caller waits in a thread or in a task:

1. *Consult.* Are the ceilings reached, is the run going in circles, what does the shield say? A call that is
   degraded gets its plan here, and waits here if the plan says so.
2. *Reserve.* Charge hooks, circuit breaker and policies are asked; then the ledger checks every ceiling and
   books the call in one locked step. `Reserved` is in the journal before anything is dispatched.
3. *Dispatch.* The only step that waits, and the only one that the synchronous and the asynchronous face do
   differently.
4. *Settle.* The real cost is booked, whatever happened. A failure takes a unit of the retry budget and is
   either dispatched again (`retry_policy_override`) or answered with RETRY.

Stopping is one mechanism: a token is cancelled, by `abort()` or by a timer, and whoever is at work hears of
it. An async call's cancel scope is cancelled, so its connections close. A synchronous function that runs on a
worker thread sees its token, and its caller is released at once; what it still spends afterwards is booked
when it ends.

A chain keeps each reason for stopping once. Reaching a ceiling, the deadline and `abort()` end the chain; an
open circuit, a full window and a call that is too dear for what is left only refuse the call at hand, and are
told of once until a call goes through again.

Locks: the ledger's lock guards the accounts of the whole tree and the lists of nodes and events. It is held
for arithmetic and appends only, never while a hook, a journal, a callback or a call runs.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, TypeVar, cast, overload

from treenail.clock import Clock, SystemClock, new_id
from treenail.containment.breaker import (
    CircuitBreaker,
    CircuitBreakers,
    CircuitState,
    Policy,
    PolicyContext,
    PolicyDecision,
)
from treenail.containment.budgets import BudgetBackend
from treenail.containment.call import ActiveCall, Call, current
from treenail.containment.cancel import CancellationToken, PartialResultBuffer, pause
from treenail.containment.costing import Costing
from treenail.containment.dispatch import STOPPED, adispatch, apause, close_token, dispatch
from treenail.containment.ledger import (
    ChainStopped,
    Journal,
    Ledger,
    LedgerEvent,
    Reserved,
    RetryTaken,
    Settled,
    fold,
)
from treenail.containment.limits import (
    UNLIMITED,
    Account,
    ExecutionConfig,
    Limits,
    StopReason,
    WithoutRetries,
    as_config,
    number,
    to_usd,
)
from treenail.containment.loops import LoopDetector, LoopPolicy
from treenail.containment.pricing import (
    FALLBACK_PRICE,
    CallUsage,
    Price,
    PriceTable,
    estimate_usage,
)
from treenail.containment.rates import RatePolicy, RateWatch
from treenail.containment.records import (
    NO_OPTIONS,
    CallOutcome,
    ChainMetadata,
    ContextSnapshot,
    Frozen,
    GraphSummary,
    Kind,
    NodeRecord,
    Status,
    WrapOptions,
)
from treenail.containment.shield import (
    Boundary,
    Decision,
    DegradePlan,
    SafetyEvent,
    ShieldPipeline,
    ToolCallContext,
    Verdict,
)
from treenail.containment.threads import call_later, describe, logger
from treenail.errors import CallRefused, CancelledByToken, UsageError

T = TypeVar("T")

HOOK = "ExecutionContext"

# A caller that ignores HALT must not fill the memory with records of it; beyond this they are only counted.
MAX_BLOCKED_NODES = 10_000

# The same for events; the chain's own stops, which are few, are kept beyond it.
MAX_EVENTS = 10_000

_STRICTEST_FIRST = ("halt", "estimate", "warn")

_LAST_WORD_S = 2.0
"""How long a timer that is stopping its chain is waited for: a journal on a disk that hangs is not."""


class Metrics(Protocol):
    """Hears of every call that has ended."""

    def record_call(self, node: NodeRecord) -> None:
        """Take note of a call; an error in here is logged and changes nothing."""
        ...


class ExecutionContext:
    """Hard ceilings for one run and everything that it starts.

    Share one context among the threads and tasks of a run. It is a context manager, sync and async:
    leaving it disarms the timers, and leaving it by an interrupt or a cancellation aborts what is still
    under way. It also works without.

    `above` names the chains, from the root down, that this one is a child of although they live in another
    process: what it writes to its journal counts for them too, once they are given those events.

    A *synchronous* function is run on the caller's own thread, unless a timeout applies to it or
    `stoppable` is set: then it runs on a worker thread, so that `abort()` and timeouts release its caller
    at once.
    """

    def __init__(
        self,
        config: ExecutionConfig | Limits,
        pipeline: ShieldPipeline | None = None,
        metadata: ChainMetadata | None = None,
        *,
        circuit_breaker: CircuitBreaker | CircuitBreakers | None = None,
        parent: ExecutionContext | None = None,
        clock: Clock | None = None,
        prices: PriceTable | None = None,
        journal: Journal | None = None,
        loops: LoopPolicy | None = None,
        rates: RatePolicy | None = None,
        memory_governor: Policy | None = None,
        metrics: Metrics | None = None,
        stoppable: bool | None = None,
        fallback_price: Price = FALLBACK_PRICE,
        ends_parent: bool = False,
        onlooker: bool = False,
        above: Sequence[str] = (),
        _ledger: Ledger | None = None,
        _below: Call | None = None,
    ) -> None:
        self.config = as_config(config)
        if metadata is None:
            chain_id = str(new_id())
            metadata = ChainMetadata(request_id=chain_id, chain_id=chain_id)
        self.metadata = metadata
        self.chain_id = metadata.chain_id
        self.parent = parent
        self._ends_parent = ends_parent
        self._is_onlooker = onlooker
        self._account = Account(self.config)
        if parent is not None and above:
            raise UsageError(
                "a child chain is below its parent; `above` is for one whose parent is elsewhere"
            )
        self._above_ids: tuple[str, ...] = tuple(above) if parent is None else parent._above_ids
        ancestors: tuple[ExecutionContext, ...] = ()
        if parent is None:
            self._ledger = _ledger or Ledger(journal)
            self.clock = clock or SystemClock()
        else:
            if journal is not None or clock is not None:
                raise UsageError(
                    "a child chain shares its parent's journal and clock; do not pass it its own"
                )
            ancestors = parent._ancestry
            self._ledger = parent._ledger
            self.clock = parent.clock
            prices = prices or parent._costing.prices
            metrics = metrics or parent._metrics
            stoppable = parent._stoppable if stoppable is None else stoppable
        if self.chain_id in (*self._above_ids, *(each.chain_id for each in ancestors)):
            raise UsageError(
                f"the chain {self.chain_id} is above this one; a child chain needs an id of its own, or what "
                f"it spends would count twice"
            )
        self._ancestry: tuple[ExecutionContext, ...] = (self, *ancestors)
        self.depth: int = (
            len(self._above_ids) if parent is None else parent.depth + (0 if self._is_onlooker else 1)
        )
        """How many chains are above this one, onlookers apart; 0 for a run's own."""
        if parent is not None and not self._is_onlooker:
            parent._check_depth()
        theirs: tuple[Account, ...] = () if parent is None else parent._accounts
        # Places in `_accounts` are places in `_ancestry`, whichever way an account is looked at.
        self._accounts: tuple[Account, ...] = (
            self._account,
            *(map(WithoutRetries, theirs) if onlooker else theirs),
        )
        self._lineage = self._above_ids + tuple(context.chain_id for context in reversed(self._ancestry))
        above_retries = self._above_ids if parent is None else parent._retry_lineage
        self._retry_lineage: tuple[str, ...] = (*(() if onlooker else above_retries), self.chain_id)
        self._root = self._ancestry[-1]
        self._names_model = metadata.model is not None
        self._metrics: Metrics | None = metrics
        self._stoppable: bool | None = stoppable
        # Guards only add up on the way down: whatever an ancestor asks is asked first.
        self._pipelines: tuple[ShieldPipeline, ...] = (parent._pipelines if parent else ()) + _some(pipeline)
        told = parent if parent is not None and not onlooker else None
        self._breakers: tuple[CircuitBreaker | CircuitBreakers, ...] = (
            told._breakers if told else ()
        ) + _some(circuit_breaker)
        # An onlooker's calls are stopped by the circuits above it, but say nothing to them.
        self._heeded: tuple[CircuitBreaker | CircuitBreakers, ...] = (
            () if parent is None else parent._heeded + (parent._breakers if onlooker else ())
        )
        self._policies: tuple[Policy, ...] = (parent._policies if parent else ()) + _some(memory_governor)
        self._detectors: tuple[LoopDetector, ...] = (told._detectors if told else ()) + (
            () if loops is None else (LoopDetector(loops),)
        )
        self._watches: tuple[RateWatch, ...] = (parent._watches if parent else ()) + (
            () if rates is None else (RateWatch(rates, self.clock),)
        )
        capped = [context.config for context in self._ancestry if context.config.max_cost_usd is not None]
        self._costing: Costing = Costing(
            prices,
            min((config.on_unknown_price for config in capped), key=_STRICTEST_FIRST.index, default=None),
            fallback_price,
            self._tell,
        )
        self._pots = _pots(capped)
        # With nothing to consult, a call goes straight to the ledger.
        self._must_consult = bool(self._pipelines or self._policies or self._detectors or self._pots)

        self.id_prefix = _id_prefix()
        self._nodes: list[Call] = []
        self.serials: Iterator[int] = itertools.count()
        self.partials: dict[str, PartialResultBuffer] = {}
        self._running: dict[int, Call] = {}
        self._blocked = 0
        self._llm_calls = 0
        self._events: list[SafetyEvent] = []
        self._spawned_by = _below or (current.get() if parent is not None else None)

        # Stops that have been told of: the final ones for good, the passing ones until a call goes through.
        self._final_stops: dict[str, str] = {}
        self._passing_stops: dict[str, str] = {}
        self._abort_reason: str | None = None
        self._refused_charge: str | None = None
        self.stop_snapshot: ContextSnapshot | None = None
        """The state just before the chain first stopped, so that intermediate results are never lost."""

        self._ledger.open_account(self._account, self.chain_id)
        carried = self._ledger.carried.get(self.chain_id)
        self._started = self.clock.monotonic() - (carried.elapsed_ms / 1000 if carried else 0.0)
        self._deadline: float | None = None
        self.cancellation_token = CancellationToken()
        """Cancelled when the chain is aborted or its time is over; its reason says which."""
        self._expiring = threading.RLock()
        """Held by the timer while it stops the chain."""
        self._disarm = self._arm()

    # --- opening and closing ----------------------------------------------------------------------

    @classmethod
    def resume(
        cls,
        config: ExecutionConfig | Limits,
        events: Iterable[LedgerEvent],
        pipeline: ShieldPipeline | None = None,
        metadata: ChainMetadata | None = None,
        *,
        circuit_breaker: CircuitBreaker | CircuitBreakers | None = None,
        clock: Clock | None = None,
        prices: PriceTable | None = None,
        journal: Journal | None = None,
        loops: LoopPolicy | None = None,
        rates: RatePolicy | None = None,
        memory_governor: Policy | None = None,
        metrics: Metrics | None = None,
        stoppable: bool | None = None,
        above: Sequence[str] = (),
    ) -> ExecutionContext:
        """Return a context that goes on from what a journal says was spent.

        A call that was reserved and never settled counts in full. The time that the chain was running
        counts, the time between its processes does not. Without `metadata` the chain keeps the id
        that the events name. Children continue too, if they are spawned with the chain ids that they
        had. The events may come from several journals, in any order, and some of them more than once.
        """
        recorded = list(events)
        if metadata is None and recorded:
            root = recorded[0].lineage[0]
            metadata = ChainMetadata(request_id=str(new_id()), chain_id=root)
        return cls(
            config,
            pipeline,
            metadata,
            circuit_breaker=circuit_breaker,
            clock=clock,
            prices=prices,
            loops=loops,
            rates=rates,
            memory_governor=memory_governor,
            metrics=metrics,
            stoppable=stoppable,
            above=above,
            _ledger=Ledger(journal, fold(recorded)),
        )

    def spawn_child(
        self,
        config: ExecutionConfig | Limits = UNLIMITED,
        *,
        metadata: ChainMetadata | None = None,
        pipeline: ShieldPipeline | None = None,
        circuit_breaker: CircuitBreaker | CircuitBreakers | None = None,
        loops: LoopPolicy | None = None,
        rates: RatePolicy | None = None,
        memory_governor: Policy | None = None,
        ends_parent: bool = False,
        onlooker: bool = False,
        below: ActiveCall | None = None,
    ) -> ExecutionContext:
        """Return a context for a nested run that spends this one's money, steps, retries and time.

        Its own ceilings and guards come on top of ours, so it can only be narrower. A ceiling of ours that it
        reaches ends both, each with its own record; a ceiling of its own ends it alone, unless `ends_parent`.
        An `onlooker` only looks at the work, so its failures and repetitions are its own: they take none of
        our retries, open no circuit of ours (an open one stops it all the same), are no loop of ours, and it
        is no level of depth.
        Its nodes hang below the call that runs now, or below the one that `below` names: the call that asked
        for the child may be over when the child begins.
        `CallRefused` if this chain, or one above it, lets no child be so deep.
        """
        if metadata is None:
            mine = self.metadata
            metadata = ChainMetadata(
                request_id=mine.request_id,
                chain_id=str(new_id()),
                org_id=mine.org_id,
                team=mine.team,
                service=mine.service,
                user_id=mine.user_id,
                model=mine.model,
                tags=mine.tags,
            )
        return ExecutionContext(
            config,
            pipeline,
            metadata,
            parent=self,
            circuit_breaker=circuit_breaker,
            loops=loops,
            rates=rates,
            memory_governor=memory_governor,
            ends_parent=ends_parent,
            onlooker=onlooker,
            _below=None if below is None else below._call,
        )

    @property
    def remaining_depth(self) -> int | None:
        """How many levels of children may still be below this chain; None without a ceiling."""
        left: list[int] = []
        levels = 0
        for context in self._ancestry:
            if context.config.max_depth is not None:
                left.append(context.config.max_depth - levels)
            levels += not context._is_onlooker
        return max(0, min(left)) if left else None

    def _check_depth(self) -> None:
        """Refuse a child that would be too deep; the refusal is recorded and ends nothing."""
        if self.remaining_depth == 0:
            detail = (
                f"a child of the chain {self.chain_id} would be {self.depth + 1} levels deep, and that is "
                f"more than max_depth allows; raise max_depth, or do the work without a child"
            )
            self._tell("depth_exceeded", Decision.HALT, detail)
            raise CallRefused(detail)

    def __enter__(self) -> ExecutionContext:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        if exc_val is not None and not isinstance(exc_val, Exception):
            # An interrupt or a cancellation ends the run: whoever still works on another thread
            # must hear of it.
            self.abort(f"{type(exc_val).__name__} left the run")
        self.close()

    async def __aenter__(self) -> ExecutionContext:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.__exit__(exc_type, exc_val, exc_tb)

    def close(self) -> None:
        """Disarm the timers and stop following the parent. Ceilings still hold for calls made afterwards."""
        self._is_closed = True
        self._disarm()
        # A timer that is at it has its say first: whoever closes us may close the journal next.
        if self._expiring.acquire(timeout=_LAST_WORD_S):
            self._expiring.release()

    def keep_time(self) -> None:
        """Set the timer again for a call that is made after `close()`; its deadline holds all the same."""
        if self._is_closed and self._deadline is not None:
            self._is_closed = False
            self._disarm = self._arm()

    def _arm(self) -> Callable[[], object]:
        """Set the deadline, the timer that keeps it, and the link to the parent's token."""
        own_s = self.config.timeout_ms / 1000
        inherited = self.parent._deadline if self.parent else None
        self._deadline = inherited
        self._is_closed = False
        undo: list[Callable[[], object]] = []
        # Timers and the parent's token outlive a finished child; they must not keep it alive.
        this = weakref.ref(self)
        if own_s and (inherited is None or self._started + own_s < inherited):
            self._deadline = self._started + own_s
        # A child sets a timer of its own for what it inherits, too: its parent may be closed before it.
        if self._deadline is not None:
            remaining = max(0.0, self._deadline - self.clock.monotonic())
            undo.append(call_later(self.clock, remaining, lambda: _expire(this)).cancel)
        if self.parent is not None:
            token = self.parent.cancellation_token
            undo.append(token.on_cancel(lambda: _follow(this, token)))

        def disarm() -> None:
            while undo:
                undo.pop()()

        if undo:
            finalizer = weakref.finalize(self, disarm)
            finalizer.atexit = False
        return disarm

    # --- the face that returns decisions -----------------------------------------------------------------

    def wrap_llm_call(self, fn: Callable[[], object], options: WrapOptions | None = None) -> Decision:
        """Make a model call and say what was decided; `call_llm` also returns what came back.

        ALLOW: it went well. DEGRADE: it went well, with less. RETRY: it failed, another attempt may
        follow. HALT and the other decisions: it was not made, or nothing more must follow.
        """
        return self._decision(self._drive(self._begin("llm", fn, options)))

    def wrap_tool_call(self, fn: Callable[[], object], options: WrapOptions | None = None) -> Decision:
        """Make a tool call under containment and say what was decided; see `wrap_llm_call`."""
        return self._decision(self._drive(self._begin("tool", fn, options)))

    # --- the fuller face, synchronous and asynchronous --------------------------------------------

    def call_llm(self, fn: Callable[[], T], options: WrapOptions | None = None) -> CallOutcome[T]:
        """Make a model call and return its value, its error, the decision and the node.

        A coroutine function is driven to its end; inside a running event loop it is refused with
        `UsageError`, because `acall_llm` is the way there. An exception of the call is in `error`, of
        its own class; `KeyboardInterrupt` and cancellation pass through, recorded.
        """
        return self._outcome(self._drive(self._begin("llm", fn, options)))

    def call_tool(self, fn: Callable[[], T], options: WrapOptions | None = None) -> CallOutcome[T]:
        """Make a tool call and return its value, its error, the decision and the node; see `call_llm`."""
        return self._outcome(self._drive(self._begin("tool", fn, options)))

    @overload
    async def acall_llm(
        self, fn: Callable[[], Awaitable[T]], options: WrapOptions | None = None
    ) -> CallOutcome[T]: ...
    @overload
    async def acall_llm(self, fn: Callable[[], T], options: WrapOptions | None = None) -> CallOutcome[T]: ...
    async def acall_llm(self, fn: Callable[[], Any], options: WrapOptions | None = None) -> CallOutcome[Any]:
        """Make a model call from async code. A timeout or `abort()` cancels it, and its connections close.

        A plain function runs on a worker thread, so that it does not block the loop; if it returns an
        awaitable, that is awaited.
        """
        return self._outcome(await self._adrive(self._begin("llm", fn, options)))

    @overload
    async def acall_tool(
        self, fn: Callable[[], Awaitable[T]], options: WrapOptions | None = None
    ) -> CallOutcome[T]: ...
    @overload
    async def acall_tool(self, fn: Callable[[], T], options: WrapOptions | None = None) -> CallOutcome[T]: ...
    async def acall_tool(self, fn: Callable[[], Any], options: WrapOptions | None = None) -> CallOutcome[Any]:
        """Make a tool call from async code; see `acall_llm`."""
        return self._outcome(await self._adrive(self._begin("tool", fn, options)))

    def check_egress(self, url: str, method: str = "GET") -> Decision:
        """Ask the shield whether a request may leave; a blocked one is recorded.

        It is no call and costs nothing.
        """
        call = current.get()
        ctx = (
            call.shield_ctx
            if call is not None and call.shield_ctx is not None
            else ToolCallContext(request_id=self.metadata.request_id, endpoint=url)
        )
        for pipeline in self._pipelines:
            verdict = pipeline.judge("before_egress", ctx, url, method)
            self._note(*verdict.events)
            if verdict.is_blocking:
                return verdict.decision
        return Decision.ALLOW

    def check_call_egress(self, call: Call, url: str, method: str) -> None:
        """Ask whether a call's request may leave; see `ActiveCall.check_egress`."""
        ctx = call.dispatched.shield_ctx or ToolCallContext(self.metadata.request_id, endpoint=url)
        for pipeline in self._pipelines:
            verdict = pipeline.judge("before_egress", ctx, url, method)
            self._note(*verdict.events)
            if verdict.is_blocking:
                call.is_blocked = True
                raise self._refused(call, verdict.decision, None, verdict.reason)

    def record_event(self, event: SafetyEvent) -> None:
        """Add an event of your own; beyond `MAX_EVENTS` only the chain's own stops are kept."""
        self._note(event)

    def abort(self, reason: str) -> None:
        """Stop the chain, its children and everything under way; later calls are refused.

        It raises nothing.
        """
        with self._ledger.lock:
            if self._abort_reason is None and self.cancellation_token.reason is None:
                self._abort_reason = reason
        if self.cancellation_token.reason is None:
            self._stop(StopReason.ABORTED, reason)

    def get_snapshot(self) -> ContextSnapshot:
        """Return the state of the chain now.

        It costs the same however many calls were made, and never changes.
        """
        with self._ledger.lock:
            return self._snapshot()

    def get_partial(self, node_id: str) -> str | None:
        """Return what the call with that node id had produced so far; None if it kept nothing."""
        buffer = self.partials.get(node_id)
        return None if buffer is None else buffer.get_partial()

    @property
    def remaining_usd(self) -> float | None:
        """What may still be spent here, by this chain's ceiling and those above; None without a ceiling."""
        with self._ledger.lock:
            left = [
                account.max_cost - account.spent - account.reserved
                for account in self._accounts
                if account.max_cost is not None
            ]
        return to_usd(max(0, min(left))) if left else None

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline, never negative; None without one."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - self.clock.monotonic())

    @property
    def stop_reason(self) -> str | None:
        """Why the chain stopped, or why its last call was refused; None while it goes on."""
        with self._ledger.lock:
            return self._first_stop()

    def _first_stop(self) -> str | None:
        """Read the reason for stopping; with the lock held."""
        return next(iter(self._final_stops), None) or next(iter(self._passing_stops), None)

    # --- one call: begin, consult, reserve --------------------------------------------------------

    def _begin(self, kind: Kind, fn: Callable[[], object], options: WrapOptions | None) -> Call:
        if options is not None and not isinstance(options, WrapOptions):
            raise UsageError(f"options must be WrapOptions, not {options!r} ({type(options).__name__})")
        if not callable(fn):
            raise UsageError(f"fn must be a function without arguments, not {fn!r} ({type(fn).__name__})")
        call = Call(self, kind, fn, NO_OPTIONS if options is None else options)
        parent = current.get()
        if parent is not None and parent.context._root is self._root:
            call.parent = parent
        elif self._spawned_by is not None:
            call.parent = self._spawned_by
        if options is not None and options.partial_buffer is not None:
            call.buffer = self.partials[call.node_id] = options.partial_buffer
        return call

    def _enter(self, call: Call) -> None:
        """Put a call on the list of nodes; with the lock held."""
        call.index = len(self._nodes)
        self._nodes.append(call)
        self._running[call.index] = call
        if call.kind == "llm":
            self._llm_calls += 1

    def _consult(self, call: Call) -> bool:
        """Estimate the cost and ask the guards; True if that ended the call."""
        options = call.options
        hint = options.cost_estimate_hint
        if hint or options.model is not None or self._names_model:
            estimate = self._costing.estimate(call)
            if estimate is None:
                return self._refuse_unknown_price(call)
            call.estimate = estimate
        if not self._must_consult:
            return False
        # The shield is not asked about a call that a ceiling forbids anyway. It may make a dear one cheaper.
        if self._limits_forbid(call, 0 if self._pipelines else call.estimate):
            return True
        if not (call.is_retry or call.retries):
            for detector in self._detectors:
                finding = detector.observe(call.kind, options.operation_name, options.fingerprint)
                if finding is None:
                    continue
                decision = Decision.HALT if finding.must_halt else Decision.ALLOW
                if finding.is_new or finding.must_halt:
                    self._note(
                        self._event("loop_detected", decision, finding.description, hook="LoopDetector")
                    )
                if finding.must_halt:
                    return self._block(call, Decision.HALT, None, f"a loop: {finding.description}")
        call.verdicts = []
        call.shield_ctx = self._shield_context(call)
        boundary: Boundary = "before_llm_call" if call.kind == "llm" else "before_tool_call"
        for pipeline in self._pipelines:
            verdict = pipeline.judge(boundary, call.shield_ctx)
            if self._heed(call, pipeline, verdict):
                return True
            call.degrade(verdict.plan)
        if call.plan is not None and self._degraded_price_refuses(call):
            return True
        return self._charge_is_refused(call, call.shield_ctx)

    def _degraded_price_refuses(self, call: Call) -> bool:
        """Reserve what a degraded call will cost, not what was asked for; True if nobody can say."""
        estimate = self._costing.estimate_degraded(call)
        if estimate is None:
            return self._refuse_unknown_price(call)
        call.estimate = estimate
        return False

    def _charge_is_refused(self, call: Call, ctx: ToolCallContext) -> bool:
        """Ask the charge hooks about the reservation; one that degrades makes it a smaller one."""
        before = call.plan
        for pipeline in self._pipelines:
            verdict = pipeline.judge("before_charge", ctx, to_usd(call.estimate))
            if self._heed(call, pipeline, verdict):
                return True
            call.degrade(verdict.plan)
        return call.plan is not None and call.plan is not before and self._degraded_price_refuses(call)

    def _reserve(self, call: Call) -> bool:
        """Ask the guards of the dispatch, then check and book in one step; True if the call was refused."""
        if self._must_consult and self._dispatch_guards_refuse(call):
            return True
        if (self._breakers or self._heeded) and self._circuit_is_open(call):
            return True
        if self._is_stopped():
            return self._refuse_stopped(call)
        estimate, ledger = call.estimate, self._ledger
        with ledger.lock:
            # Check and booking are one step: nobody can take the last place in between.
            refused = ledger.book(
                self._accounts, estimate, is_retry=call.is_retry, takes_retry=bool(call.retries)
            )
            if refused is None and call.index < 0:
                self._enter(call)
        if refused is not None:
            return self._refuse_limit(call, *refused)
        call.reserved = estimate
        call.is_open = True
        call.attempts += 1
        if self._passing_stops:
            with ledger.lock:
                self._passing_stops.clear()
        if ledger.journal is not None:
            if call.retries:
                self._journal_retry(call.node_id, call.retries)
            ledger.journal(
                Reserved(
                    reservation_id=call.reservation_id,
                    lineage=self._lineage,
                    node_id=call.node_id,
                    kind=call.kind,
                    operation_name=call.options.operation_name,
                    cost_usd=to_usd(estimate),
                    at=self.clock.now(),
                    elapsed_ms=self._elapsed_ms(),
                    elapsed_above_ms=self._elapsed_above_ms(),
                )
            )
        call.is_dispatched = True
        return False

    def _refuse_unknown_price(self, call: Call) -> bool:
        detail = (
            f"no price is known for {call.model()!r}, so a ceiling in USD cannot be kept; give "
            f"cost_estimate_hint or prices=, or set on_unknown_price"
        )
        self._tell("price_unknown", Decision.HALT, detail)
        return self._block(call, Decision.HALT, None, detail)

    def _limits_forbid(self, call: Call, cost: int) -> bool:
        if self._is_stopped():
            return self._refuse_stopped(call)
        with self._ledger.lock:
            refused = self._ledger.refusal(self._accounts, cost, is_retry=call.is_retry)
        if refused is not None:
            return self._refuse_limit(call, *refused)
        if self._refused_charge is not None:
            reason, self._refused_charge = self._refused_charge, None
            self._passing_stop(StopReason.BUDGET_EXCEEDED, reason)
            return self._block(call, Decision.HALT, StopReason.BUDGET_EXCEEDED, reason)
        return False

    def _is_stopped(self) -> bool:
        if self.cancellation_token.reason is not None:
            return True
        # The timer may be late, or the clock may be one that fires none.
        if self._deadline is not None and self.clock.monotonic() >= self._deadline:
            for context in reversed(self._ancestry):
                if context._deadline is not None and self.clock.monotonic() >= context._deadline:
                    context._stop(StopReason.TIMEOUT, context._timeout_detail())
            return True
        return False

    def _timeout_detail(self) -> str:
        return f"the chain's time is over: {self._elapsed_ms():.0f} ms have passed"

    def _refuse_stopped(self, call: Call) -> bool:
        token = self.cancellation_token
        reason = StopReason(token.reason) if token.reason else StopReason.TIMEOUT
        return self._block(call, Decision.HALT, reason, token.detail)

    def _refuse_limit(self, call: Call, place: int, reason: StopReason) -> bool:
        owner = self._ancestry[place]
        detail = owner._limit_detail(reason, call.estimate)
        is_final = owner._account.is_spent_out(reason)
        if reason is StopReason.RETRY_BUDGET_EXCEEDED and call.cause is not None:
            # It is this failure that no retry is left for, as when the containment itself tries again.
            reason, detail = StopReason.PROVIDER_ERROR, f"{describe(call.cause)}; {detail}"
        # The chain whose ceiling it is and every chain between it and the caller end with their own records.
        for context in self._ancestry[place::-1]:
            said = detail if context is owner else f"the chain {owner.chain_id} above has stopped: {detail}"
            if is_final:
                context._stop(reason, said)
            else:
                context._passing_stop(reason, said)
        return self._block(call, Decision.HALT, reason, detail)

    def _limit_detail(self, reason: StopReason, cost: int) -> str:
        account, config = self._account, self.config
        if reason is StopReason.BUDGET_EXCEEDED:
            return (
                f"{to_usd(account.spent):.6g} USD are spent and {to_usd(account.reserved):.6g} reserved of "
                f"{config.max_cost_usd:g}; the call needs {to_usd(cost):.6g} more"
            )
        if reason is StopReason.STEP_LIMIT_EXCEEDED:
            return f"{account.steps} of {config.max_steps} steps are used"
        return f"{account.retries} of {config.max_retries_total} retries are used"

    def _dispatch_guards_refuse(self, call: Call) -> bool:
        for policy in self._policies:
            try:
                answer = policy.check(self._policy_context(call))
                is_allowed = answer.allowed
            except Exception as error:  # noqa: BLE001 - a policy that cannot answer has not allowed the call
                answer = PolicyDecision(allowed=False, reason=f"raised {describe(error)}")
                is_allowed = False
            if not is_allowed:
                detail = answer.reason or f"{type(policy).__name__} denied the call"
                kind = answer.policy_type or "policy_denied"
                self._note(self._event(kind, Decision.HALT, detail, hook=type(policy).__name__))
                return self._block(call, Decision.HALT, None, detail)
        return self._shared_money_refuses(call)

    def _shared_money_refuses(self, call: Call) -> bool:
        if not self._pots:
            return False
        # Every pot on the way up, each once; what one of them refuses is given back to those asked before.
        for pot, ceiling in self._pots:
            pot_id = pot.reserve(to_usd(call.estimate), ceiling)
            if pot_id is None:
                detail = f"the money shared with other chains ({ceiling:g} USD) is spent or reserved"
                self._passing_stop(StopReason.BUDGET_EXCEEDED, detail)
                return self._block(call, Decision.HALT, StopReason.BUDGET_EXCEEDED, detail)
            call.pots += ((pot, pot_id),)
        return False

    def _circuits(self, call: Call) -> Iterator[tuple[CircuitBreaker, bool]]:
        """Yield the breakers that a call has to pass, and whether it only heeds them."""
        entity = self._entity(call)
        for guard in (*self._heeded, *self._breakers):
            breaker = guard.get(entity) if isinstance(guard, CircuitBreakers) else guard
            yield breaker, guard in self._heeded

    @staticmethod
    def _entity(call: Call) -> str:
        """Name the provider or the tool that a call goes to."""
        return call.options.entity_id or (
            (call.model() or "llm") if call.kind == "llm" else call.options.operation_name
        )

    def _circuit_is_open(self, call: Call) -> bool:
        for breaker, is_heeded in self._circuits(call):
            if is_heeded:
                # The probe of a half-open circuit is for the work itself.
                if breaker.state is CircuitState.CLOSED:
                    continue
            elif (permit := breaker.acquire()) is not None:
                call.permits += (permit,)
                continue
            return self._refuse_open_circuit(call, breaker)
        return False

    def _circuit_stays_open(self, call: Call, delay_s: float) -> bool:
        """Refuse a call if no probe is due by the end of that wait, so that nobody waits in vain."""
        for breaker, _ in self._circuits(call):
            if breaker.probe_due_s > delay_s:
                return self._refuse_open_circuit(call, breaker)
        return False

    def _refuse_open_circuit(self, call: Call, breaker: CircuitBreaker) -> bool:
        detail = f"{self._entity(call) or 'the provider'}: {breaker.describe()}"
        self._passing_stop(StopReason.CIRCUIT_OPEN, detail)
        return self._block(call, Decision.HALT, StopReason.CIRCUIT_OPEN, detail)

    def _heed(self, call: Call, pipeline: ShieldPipeline, verdict: Verdict) -> bool:
        """Take a verdict into account; True if it blocks the call."""
        self._note(*verdict.events)
        if call.verdicts is not None:
            call.verdicts.append((pipeline, verdict))
        if not verdict.is_blocking:
            return False
        reason = _stop_reason_of(verdict.hook)
        if reason is not None and verdict.decision is Decision.HALT:
            self._passing_stop(reason, verdict.reason)
        return self._block(call, verdict.decision, reason, verdict.reason)

    def _block(self, call: Call, decision: Decision, reason: StopReason | None, detail: str) -> bool:
        """End a call that is not to be made; its guards take back what they counted for it."""
        self._take_back(call)
        call.stop_reason = reason
        call.detail = detail
        # A retry that is not let through leaves the call as it was: failed.
        self._finish(call, "error" if call.attempts else "halted", decision)
        return True

    def _take_back(self, call: Call) -> None:
        """Let the guards take back what they counted for an attempt that is not dispatched."""
        for permit in call.permits:
            permit.release()
        self._drop_pots(call)
        verdicts, call.verdicts = call.verdicts, None
        if verdicts and call.shield_ctx is not None:
            for pipeline, verdict in verdicts:
                pipeline.release(call.shield_ctx, [verdict])

    def _drop_pots(self, call: Call) -> None:
        pots, call.pots = call.pots, ()
        for pot, pot_id in pots:
            pot.rollback(pot_id)

    # --- one call: attempts that the called function makes itself ---------------------------------

    def end_attempt(self, call: Call, error: BaseException, delay_s: float) -> float:
        """Settle a failed attempt and ask the guards for another; see `ActiveCall.end_attempt`."""
        number("end_attempt", "delay_s", delay_s, zero_ok=True)
        failed = call.dispatched
        with self._ledger.lock:
            if call.is_over:
                raise self._refused(call, Decision.HALT, call.stop_reason, "the call is over")
            if not failed.is_open:
                raise UsageError(f"{call.name} has no attempt under way; begin one before you end it")
            # Taken here: a caller that is released at this moment must not settle it a second time.
            failed.is_open = False
        self._replace_reservation(failed, None, "error")
        for permit in failed.permits:
            permit.fail(error)
        ctx = failed.shield_ctx
        again = Call(self, call.kind, _nothing, call.options)
        again.parent, again.retries, again.cause = call, failed.reservation_id, error
        # What was made less for the attempt before stays so; its delay is over.
        again.degrade(None if failed.plan is None else replace(failed.plan, delay_ms=0))
        if failed is not call:
            self._finish(failed, "error", Decision.RETRY)
        token = call.token or self.cancellation_token
        if token.reason is not None:
            raise self._refused(call, Decision.HALT, token.reason, token.detail)
        for pipeline in self._pipelines if ctx is not None else ():
            # Without a hook for errors there is only a default, and it is not meant for whoever tries again.
            if ctx is None or not pipeline.has_retry_hook:
                continue
            verdict = pipeline.judge_error(ctx, error)
            self._note(*verdict.events)
            again.degrade(verdict.plan)
            if verdict.is_blocking and verdict.decision is not Decision.RETRY:
                raise self._refused(call, verdict.decision, None, verdict.reason)
        # Asked before the wait, so that nobody waits in vain; booked after it.
        if self._consult(again) or self._limits_forbid(again, again.estimate):
            raise self._refused(call, again.decision, again.stop_reason, again.detail)
        delay_s = max(delay_s, again.delay_s)
        if self._circuit_stays_open(again, delay_s):
            raise self._refused(call, again.decision, again.stop_reason, again.detail)
        if self._is_too_late(call, delay_s):
            detail = f"the next attempt is due in {delay_s:g} s, and there is not so much time left"
            self._passing_stop(StopReason.TIMEOUT, f"{describe(error)}; {detail}")
            self._block(again, Decision.HALT, StopReason.TIMEOUT, detail)
            raise self._refused(call, Decision.HALT, StopReason.TIMEOUT, detail)
        if not self._adopt(call, again, is_begun=False):
            self._take_back(again)
            raise self._refused(call, Decision.HALT, call.stop_reason, "the call is over")
        return delay_s

    def begin_attempt(self, call: Call) -> None:
        """Book another attempt of the called function's own; see `ActiveCall.begin_attempt`."""
        with self._ledger.lock:
            again, call.pending = call.pending, None
        token = call.token or self.cancellation_token
        if call.is_over or token.reason is not None:
            if again is not None:
                self._take_back(again)
            raise self._refused(call, Decision.HALT, token.reason or call.stop_reason, token.detail)
        if again is None:
            raise UsageError(f"{call.name} has not asked for another attempt; end the one before it first")
        if self._reserve(again):
            raise self._refused(call, again.decision, again.stop_reason, again.detail)
        if not self._adopt(call, again, is_begun=True):
            # The caller was released while this was being booked; nobody else would close it.
            again.reported = 0
            self._settle(again, None, "aborted")
            for permit in again.permits:
                permit.release()
            self._finish(again, "aborted", Decision.HALT)
            raise self._refused(call, Decision.HALT, call.stop_reason, "the call is over")

    def _adopt(self, call: Call, again: Call, *, is_begun: bool) -> bool:
        """Make an attempt the call's next one, or its present one once it is booked; not if it is over."""
        with self._ledger.lock:
            if not call.is_over and is_begun:
                call.retry = again
                call.further += 1
                call.retries_used += 1
            elif not call.is_over:
                call.pending = again
            return not call.is_over

    def _is_too_late(self, call: Call, delay_s: float) -> bool:
        """Say whether that long a wait would not end before the chain's time does, or the call's."""
        now = self.clock.monotonic()
        return any(due is not None and now + delay_s >= due for due in (self._deadline, call.due_at))

    def _refused(self, call: Call, decision: Decision | None, reason: str | None, detail: str) -> CallRefused:
        """Remember that the call was not let to try again: it decides what its failure means."""
        decision = decision or Decision.HALT
        call.refusal = (decision, reason, detail)
        return CallRefused(
            f"{call.name} may not be tried again ({reason or decision}): {detail}",
            decision=str(decision),
            stop_reason=None if reason is None else str(reason),
        )

    def _close_attempts(
        self, call: Call, value: object, status: Status, error: BaseException | None = None
    ) -> None:
        """Settle and close what the called function has booked itself, before its call is closed."""
        if call.retry is None and call.pending is None and call.work is None:
            return
        with self._ledger.lock:
            # A function that is left behind on its worker may be asking for an attempt at this moment.
            call.is_over = True
            pending, call.pending = call.pending, None
            last = call.retry
        if pending is not None:
            self._take_back(pending)
        if last is None or not last.is_open:
            return
        last.work, call.work = call.work, None
        self._settle(last, value, status)
        call.is_abandoned = last.is_abandoned
        for permit in last.permits:
            if status == "ok":
                permit.succeed()
            elif error is not None:
                permit.fail(error)
            else:
                permit.release()
        self._finish(last, status, Decision.ALLOW if status == "ok" else Decision.HALT)

    # --- one call: the two ways to wait -----------------------------------------------------------

    def _drive(self, call: Call) -> Call:
        try:
            while True:
                try:
                    if self._consult(call):
                        return call
                    if call.delay_s:
                        pause(self.clock, call.delay_s, self.cancellation_token)
                    if self._reserve(call):
                        return call
                    value = dispatch(call, stoppable=self._must_be_stoppable(call))
                except BaseException as error:  # noqa: BLE001 - _failed raises again what must pass
                    ended = self._failed(call, error)
                else:
                    ended = self._succeeded(call, value)
                if ended:
                    return call
        finally:
            if call.status == "running":
                self._give_up(call)

    async def _adrive(self, call: Call) -> Call:
        try:
            while True:
                try:
                    if self._consult(call):
                        return call
                    if call.delay_s:
                        await apause(self.clock, call.delay_s, self.cancellation_token)
                    if self._reserve(call):
                        return call
                    value = await adispatch(call)
                except BaseException as error:  # noqa: BLE001 - _failed raises again what must pass
                    ended = self._failed(call, error)
                else:
                    ended = self._succeeded(call, value)
                if ended:
                    return call
        finally:
            if call.status == "running":
                self._give_up(call)

    def _give_up(self, call: Call) -> None:
        """Close a call whose own ending failed (a journal that cannot write), so that nothing stays taken."""
        last = call.retry
        if last is not None and last.status == "running":
            for permit in last.permits:
                permit.release()
            self._finish(last, "error", Decision.HALT)
        for permit in call.permits:
            permit.release()
        self._finish(call, "error", Decision.HALT)

    def _must_be_stoppable(self, call: Call) -> bool:
        if call.options.stoppable is not None:
            return call.options.stoppable
        if self._stoppable is not None:
            return self._stoppable
        return self._deadline is not None or call.options.timeout_ms is not None

    def _late(self, call: Call, attempt: int, work: Future[object]) -> None:
        """Book what a handler spent after its caller was released and its attempt was settled."""
        if call.attempts != attempt:
            # A later attempt has taken over the call's reports, and settles them.
            return
        value = None if work.exception() else work.result()
        cost = self._costing.real(call, value) - call.settled
        if cost <= 0:
            return
        self._ledger.add_cost(self._accounts, cost)
        for pot, _ in self._pots:
            pot.add(to_usd(cost))
        detail = f"{call.name} spent {to_usd(cost):.6g} USD more after it was stopped"
        self._note(self._event("late_cost", Decision.ALLOW, detail, node_id=call.node_id))
        self._journal_settled(call, call.settled + cost, call.status)

    # --- one call: settle -------------------------------------------------------------------------

    def _succeeded(self, call: Call, value: object) -> bool:
        call.value = None if value is STOPPED else value
        call.error = None
        token = call.token or self.cancellation_token
        if token.reason is not None:
            # It came back, but only after it was told to stop: what it brought is kept, the stop stands.
            return self._stopped(call, token, None)
        self._close_attempts(call, value, "ok")
        self._settle(call, value, "ok")
        for permit in call.permits:
            permit.succeed()
        self._finish(call, "ok", Decision.ALLOW if call.plan is None else Decision.DEGRADE)
        return True

    def _failed(self, call: Call, error: BaseException) -> bool:
        """Settle a failed attempt; False if it is to be dispatched again. Raises what must pass through."""
        call.error = error
        if call.is_misused:
            self._close_attempts(call, None, "error")
            self._settle(call, None, "error")
            self._finish(call, "error", Decision.HALT)
            call.error = None
            raise error
        if not isinstance(error, Exception) or not call.is_dispatched:
            # Interrupts and cancellation belong to the caller; and so does an error from before
            # the dispatch, such as a journal's that cannot write.
            call.stop_reason = StopReason.ABORTED if not isinstance(error, Exception) else None
            status: Status = "aborted" if not isinstance(error, Exception) else "error"
            if not call.is_dispatched:
                self._take_back(call)
            self._close_attempts(call, None, status)
            self._settle(call, None, status)
            for permit in call.permits:
                permit.release()
            self._finish(call, status, Decision.HALT)
            call.error = None
            raise error
        token = call.token or self.cancellation_token
        if token.reason is not None:
            return self._stopped(call, token, error)
        if call.is_blocked and call.refusal is not None and isinstance(error, CallRefused):
            decision, _, call.detail = call.refusal
            self._close_attempts(call, None, "halted")
            self._settle(call, None, "halted")
            for permit in call.permits:
                permit.release()
            self._finish(call, "halted", decision)
            return True
        self._close_attempts(call, None, "error", error)
        self._settle(call, None, "error")
        return self._answer_failure(call, error, "error")

    def _stopped(self, call: Call, token: CancellationToken, error: BaseException | None) -> bool:
        """Settle an attempt that was told to stop; False if it is to be dispatched again."""
        chain = self.cancellation_token
        call.error = None if isinstance(error, CancelledByToken) else error
        reason = StopReason(token.reason) if token.reason else StopReason.ABORTED
        call.stop_reason = reason
        call.detail = token.detail
        status: Status = "timeout" if reason is StopReason.TIMEOUT else "aborted"
        is_own = chain.reason is None and reason is StopReason.TIMEOUT
        self._close_attempts(call, call.value, status, TimeoutError(token.detail) if is_own else None)
        self._settle(call, call.value, status)
        if chain.reason is None and reason is StopReason.TIMEOUT:
            # Only this call ran out of time. That says something about the provider, and it may
            # be tried again.
            self._note(self._event(reason, Decision.HALT, token.detail, node_id=call.node_id))
            return self._answer_failure(call, TimeoutError(token.detail), "timeout")
        for permit in call.permits:
            permit.release()
        self._finish(call, status, Decision.HALT)
        return True

    def _answer_failure(self, call: Call, error: BaseException, status: Status) -> bool:
        """Decide what follows a failed attempt: another one, RETRY, or HALT."""
        options = call.options
        for permit in call.permits:
            permit.fail(error)
        wanted = options.retry_policy_override
        decision = Decision.RETRY
        plan: DegradePlan | None = None
        ctx = call.shield_ctx
        if ctx is not None and call.refusal is None:
            for pipeline in self._pipelines:
                # The pipeline's default for errors is not meant against a call that asks for retries itself.
                if wanted is not None and not pipeline.has_retry_hook:
                    continue
                verdict = pipeline.judge_error(ctx, error)
                self._note(*verdict.events)
                if verdict.plan is not None:
                    plan = verdict.plan if plan is None else plan.merged(verdict.plan)
                elif verdict.is_blocking and verdict.decision is not Decision.RETRY:
                    decision = verdict.decision
                    break
        again = wanted is not None and call.retries_used < wanted and decision is Decision.RETRY
        if call.refusal is not None and not call.is_blocked:
            # It asked for another attempt itself, and was told no.
            again, wanted = False, None
            refused, call.stop_reason, detail = call.refusal
            call.detail = f"{describe(error)}; not tried again: {detail}"
            decision = Decision.HALT if refused is Decision.RETRY else refused
        if wanted is not None and not again:
            # Its own retries are used up, or a hook forbids more: nothing is taken from the chain's.
            self._finish(call, status, Decision.HALT if decision is Decision.RETRY else decision)
            return True
        if status == "timeout" and not again:
            decision = Decision.HALT
        if self._ledger.take_retry(self._accounts):
            call.retries_used += 1
            self._journal_retry(call.node_id, call.dispatched.reservation_id)
            if again:
                self._prepare_retry(call, plan)
                return False
            drained = bool(call.permits) and self._retries_are_spent()
        else:
            drained = True
        if drained:
            if call.stop_reason is None or call.refusal is None:
                call.stop_reason = StopReason.PROVIDER_ERROR
                call.detail = f"{describe(error)}; no retries are left"
            for context in self._ancestry:
                account = context._account
                if account.max_retries is not None and account.retries >= account.max_retries:
                    context._stop(StopReason.PROVIDER_ERROR, f"{describe(error)}; no retries are left")
            if decision is Decision.RETRY:
                decision = Decision.HALT
        self._finish(call, status, decision)
        return True

    def _retries_are_spent(self) -> bool:
        return any(
            account.max_retries is not None and account.retries >= account.max_retries
            for account in self._accounts
        )

    def _prepare_retry(self, call: Call, plan: DegradePlan | None) -> None:
        close_token(call)
        call.token = None
        call.is_retry = True
        call.is_over = False
        call.is_blocked = False
        call.retry = call.pending = call.refusal = None
        call.reported = None
        call.usage = None
        call.value = None
        call.stop_reason = None
        call.is_dispatched = False
        call.is_abandoned = False
        call.work = None
        call.permits = ()
        call.verdicts = None
        call.plan, call.delay_s = None, 0.0
        call.degrade(plan)

    def _settle(self, call: Call, value: object, status: Status) -> None:
        """Settle an attempt whose function is over, or is left behind; once."""
        if call.is_open:
            call.is_open = False
            self._replace_reservation(call, value, status)
            if call.work is not None:
                handover, call.work, attempt = call.work, None, call.attempts
                call.is_abandoned = not handover.done()
                handover.add_done_callback(lambda work: self._late(call, attempt, work))
        elif call.work is not None:
            call.is_abandoned = not call.work.done()
            call.work = None

    def _replace_reservation(self, call: Call, value: object, status: Status) -> None:
        """Replace an attempt's reservation by the real cost, and tell those who keep count."""
        reserved = call.reserved
        # Most calls carry nothing to read a cost from.
        is_plain = not (call.reported or self._names_model or self._pipelines or self._watches)
        if is_plain and call.reported is None and call.options.model is None and call.options.cost_of is None:
            cost = call.settled = reserved
        else:
            cost = call.settled = self._costing.real(call, value)
        call.cost += cost
        self._ledger.settle(self._accounts, reserved, cost)
        pots, call.pots = call.pots, ()
        for pot, pot_id in pots:
            pot.commit(pot_id, to_usd(cost))
        if self._ledger.journal is not None:
            self._journal_settled(call, cost, status)
        callback = call.options.reconciliation_callback
        if callback is not None:
            try:
                callback(to_usd(reserved), to_usd(cost))
            except Exception:  # noqa: BLE001 - logged; the cost is booked already
                logger.exception("a reconciliation callback failed")
        for watch in self._watches:
            tokens = call.usage.input_tokens + call.usage.output_tokens if call.usage else 0
            for event_type, reason in watch.observe(to_usd(cost), tokens):
                self._note(self._event(event_type, Decision.ALLOW, reason, hook="RateWatch"))
        if self._pipelines:
            self._tell_shield(call, value, cost, status)

    def _journal_retry(self, node_id: str, failed_id: str) -> None:
        if self._ledger.journal is not None:
            self._ledger.journal(
                RetryTaken(
                    reservation_id=failed_id,
                    lineage=self._retry_lineage,
                    node_id=node_id,
                    at=self.clock.now(),
                    elapsed_ms=self._elapsed_ms(),
                    elapsed_above_ms=self._elapsed_above_ms()[
                        len(self._lineage) - len(self._retry_lineage) :
                    ],
                )
            )

    def _journal_settled(self, call: Call, cost: int, status: Status) -> None:
        if self._ledger.journal is not None:
            self._ledger.journal(
                Settled(
                    reservation_id=call.reservation_id,
                    lineage=self._lineage,
                    node_id=call.node_id,
                    status=status,
                    cost_usd=to_usd(cost),
                    at=self.clock.now(),
                    elapsed_ms=self._elapsed_ms(),
                    elapsed_above_ms=self._elapsed_above_ms(),
                )
            )

    def _tell_shield(self, call: Call, value: object, cost: int, status: Status) -> None:
        # A failed call of which nothing is known has used no tokens; a good one has used what it asked for.
        usage = call.usage or (None if status == "ok" else CallUsage())
        ctx = self._shield_context(call, cost=cost, usage=usage)
        over = cost - call.reserved
        for pipeline in self._pipelines:
            if over > 0:
                # The reservation was judged before; this is the rest. The money is gone: a
                # refusal is for the next.
                verdict = pipeline.judge("before_charge", ctx, to_usd(over))
                self._note(*verdict.events)
                if verdict.is_blocking:
                    self._refused_charge = verdict.reason
            if call.kind == "llm":
                after = (
                    pipeline.after_llm_call(ctx, value) if status == "ok" else pipeline.after_failed_call(ctx)
                )
                self._note(*after)

    def _finish(self, call: Call, status: Status, decision: Decision) -> None:
        """Close the node. Nothing about it changes afterwards, so snapshots may share it."""
        if call.token is not None:
            close_token(call)
        call.fn = None
        if not call.is_abandoned:
            # Requests and responses are large, and the node does not need them any more.
            call.options = NO_OPTIONS
            call.token = None
            if status == "ok" and call.buffer is not None:
                call.buffer = None
                self.partials.pop(call.node_id, None)
        if call.permits:
            call.permits = ()
        if call.shield_ctx is not None:
            call.shield_ctx = None
            call.verdicts = None
        call.decision = decision
        call.end_ts = self.clock.now()
        call.status = status
        if call.index < 0:
            with self._ledger.lock:
                self._blocked += 1
                if self._blocked <= MAX_BLOCKED_NODES:
                    self._enter(call)
        self._running.pop(call.index, None)
        if self._metrics is not None:
            try:
                self._metrics.record_call(call.record())
            except Exception:  # noqa: BLE001 - logged; metrics change nothing
                logger.exception("the metrics could not record a call")

    @staticmethod
    def _decision(call: Call) -> Decision:
        # The node is kept for as long as the chain is; what the call returned or raised must not be.
        call.value = call.error = None
        return call.decision or Decision.HALT

    def _outcome(self, call: Call) -> CallOutcome[T]:
        value, call.value = call.value, None
        error, call.error = call.error, None
        kept = call.status != "ok" and call.buffer is not None
        return CallOutcome(
            decision=call.decision or Decision.HALT,
            value=cast("T | None", value),
            error=error,
            node=call.record(),
            plan=call.plan,
            partial=call.buffer.get_partial() if kept and call.buffer is not None else None,
            detail=call.detail,
        )

    # --- stops, events, snapshots -----------------------------------------------------------------

    def _stop(self, reason: StopReason, detail: str) -> None:
        """End the chain for good, once per reason; abort and timeout also cancel the work under way."""
        with self._ledger.lock:
            if reason in self._final_stops:
                return
            if self.stop_snapshot is None:
                self.stop_snapshot = self._snapshot()
            was_told = reason in self._passing_stops
            self._final_stops[reason] = detail
            if not was_told:
                self._events.append(self._event(reason, Decision.HALT, detail))
        if reason in (StopReason.ABORTED, StopReason.TIMEOUT):
            self.cancellation_token.cancel(reason, detail=detail)
        if self._ledger.journal is not None:
            stopped = ChainStopped(
                self._lineage,
                str(reason),
                detail,
                self.clock.now(),
                self._elapsed_ms(),
                self._elapsed_above_ms(),
            )
            try:
                self._ledger.journal(stopped)
            except Exception:  # noqa: BLE001 - logged; the stop is for the record, and holds without it
                logger.exception("the journal could not be told that the chain %s stopped", self.chain_id)
        if self._ends_parent and self.parent is not None:
            self.parent._stop(reason, f"the child chain {self.chain_id} has stopped: {detail}")

    def _passing_stop(self, reason: StopReason, detail: str) -> None:
        """Tell of a refusal that may pass, once until a call goes through again."""
        with self._ledger.lock:
            if reason in self._passing_stops or reason in self._final_stops:
                return
            if self.stop_snapshot is None:
                self.stop_snapshot = self._snapshot()
            self._passing_stops[reason] = detail
            self._events.append(self._event(reason, Decision.HALT, detail))

    def _note(self, *events: SafetyEvent) -> None:
        if events:
            with self._ledger.lock:
                room = MAX_EVENTS - len(self._events)
                self._events.extend(events[: max(0, room)])

    def _tell(self, event_type: str, decision: Decision, reason: str) -> None:
        self._note(self._event(event_type, decision, reason))

    def _event(
        self,
        event_type: str,
        decision: Decision,
        reason: str,
        *,
        hook: str = HOOK,
        node_id: str | None = None,
    ) -> SafetyEvent:
        return SafetyEvent(
            event_type=str(event_type),
            decision=decision,
            reason=reason,
            hook=hook,
            request_id=self.metadata.request_id,
            ts=self.clock.now(),
            metadata=MappingProxyType({"chain_id": self.chain_id, "node_id": node_id}),
        )

    def _snapshot(self) -> ContextSnapshot:
        account, metadata = self._account, self.metadata
        count = len(self._nodes)
        stop = self._first_stop()
        return ContextSnapshot(
            chain_id=self.chain_id,
            request_id=metadata.request_id,
            step_count=account.steps,
            cost_usd_accumulated=to_usd(account.spent),
            retries_used=account.retries,
            aborted=StopReason.ABORTED in self._final_stops,
            abort_reason=self._abort_reason or stop,
            elapsed_ms=self._elapsed_ms(),
            nodes=Frozen(
                self._nodes,
                count,
                _read_node,
                # Copied in one step: calls leave this dict without the lock.
                {index: call.record() for index, call in self._running.copy().items()},
            ),
            events=Frozen(self._events, len(self._events), _read_event),
            cost_usd_reserved=to_usd(account.reserved),
            stop_reason=stop,
            graph_summary=GraphSummary(
                node_count=count,
                llm_calls=self._llm_calls,
                tool_calls=count - self._llm_calls,
                running=len(self._running),
                blocked=self._blocked,
            ),
            parent_chain_id=self.parent.chain_id if self.parent else None,
            agent_identity=metadata.service or None,
            policy_metadata=self._ceilings(),
        )

    def _ceilings(self) -> Mapping[str, object]:
        config = self.config
        return MappingProxyType(
            {
                "max_cost_usd": config.max_cost_usd,
                "max_steps": config.max_steps,
                "max_retries_total": config.max_retries_total,
                "timeout_ms": config.timeout_ms,
                "max_depth": config.max_depth,
            }
        )

    def _elapsed_ms(self) -> float:
        # A clock of somebody else's may be set back; no chain has run for less than no time.
        return max(0.0, (self.clock.monotonic() - self._started) * 1000)

    def _elapsed_above_ms(self) -> tuple[float, ...]:
        # How long a chain elsewhere has been running is for its own journal to say.
        return (0.0,) * len(self._above_ids) + tuple(c._elapsed_ms() for c in self._ancestry[:0:-1])

    def _shield_context(
        self, call: Call, *, cost: int | None = None, usage: CallUsage | None = None
    ) -> ToolCallContext:
        metadata, options = self.metadata, call.options
        capped = next((account for account in self._accounts if account.max_cost is not None), None)
        return ToolCallContext(
            request_id=metadata.request_id,
            user_id=metadata.user_id,
            session_id=call.node_id,
            tool_name=options.operation_name,
            model=call.model(),
            tokens_in=usage.input_tokens
            if usage
            else estimate_usage(input_tokens=options.input_tokens, request=options.request).input_tokens,
            tokens_out=usage.output_tokens if usage else options.max_output_tokens,
            cost_usd=to_usd(call.estimate if cost is None else cost),
            metadata=MappingProxyType(
                {
                    **metadata.tags,
                    "chain_id": self.chain_id,
                    "org_id": metadata.org_id,
                    "team": metadata.team,
                    "service": metadata.service,
                    "cost_usd_accumulated": to_usd(capped.spent) if capped else to_usd(self._account.spent),
                    "max_cost_usd": to_usd(capped.max_cost) if capped and capped.max_cost else None,
                }
            ),
        )

    def _policy_context(self, call: Call) -> PolicyContext:
        return PolicyContext(
            cost_usd=to_usd(self._account.spent),
            step_count=self._account.steps,
            entity_id=call.options.entity_id or call.options.operation_name,
            chain_id=self.chain_id,
            timestamp=self.clock.monotonic(),
        )


def _pots(configs: Sequence[ExecutionConfig]) -> tuple[tuple[BudgetBackend, float], ...]:
    """Return each shared pot once, with the lowest ceiling that any of the chains sets on it."""
    pots: dict[int, tuple[BudgetBackend, float]] = {}
    for config in configs:
        pot, ceiling = config.budget_backend, config.max_cost_usd
        if pot is not None and ceiling is not None:
            pots[id(pot)] = (pot, min(ceiling, pots.get(id(pot), (pot, ceiling))[1]))
    return tuple(pots.values())


def _nothing() -> None:
    """Stand for the function of an attempt that is made within another call's."""


def _stop_reason_of(hook: object) -> StopReason | None:
    """Read which of the eight reasons a hook stops for; a word of its own is none of them."""
    said = getattr(hook, "stop_reason", None)
    return next((each for each in StopReason if each == said), None)


def _some(item: T | None) -> tuple[T, ...]:
    return () if item is None else (item,)


def _id_prefix() -> str:
    digits = secrets.token_hex(9)
    return f"{digits[:8]}-{digits[8:12]}-8{digits[12:15]}-8{digits[15:18]}-"


def _read_node(call: object) -> NodeRecord:
    return cast("Call", call).record()


def _read_event(event: object) -> SafetyEvent:
    return cast("SafetyEvent", event)


def _expire(this: weakref.ref[ExecutionContext]) -> None:
    context = this()
    if context is not None:
        with context._expiring:
            if not context._is_closed:
                context._stop(StopReason.TIMEOUT, context._timeout_detail())


def _follow(this: weakref.ref[ExecutionContext], token: CancellationToken) -> None:
    context = this()
    if context is not None:
        reason = StopReason(token.reason) if token.reason else StopReason.ABORTED
        context._stop(reason, f"the parent chain has stopped: {token.detail}")
