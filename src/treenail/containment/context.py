"""`ExecutionContext`: the container that a whole run happens in.

Theory of operation
-------------------

Every call takes the same path, `_make` in a thread and `_amake` in a task:

1. *Admit.* Are the ceilings reached, is the run going in circles, what does the shield say? A call that is
   degraded gets its plan here, and waits here if the plan says so.
2. *Reserve.* The guards of the dispatch are asked (policies, shared money, circuit breakers); then the ledger
   checks every ceiling and books the call in one locked step. `Reserved` is in the journal before anything
   is dispatched.
3. *Dispatch.* The only step that waits, and the only one that the synchronous and the asynchronous face do
   differently.
4. *Settle.* The real cost is booked, whatever happened. A failure takes a unit of the retry budget and is
   either dispatched again (`retry_policy_override`), as a new `Attempt`, or answered with RETRY.

Stopping is one mechanism: a token is cancelled, by `abort()` or by a timer, and the work in flight hears of
it. An async call's cancel scope is cancelled, so its connections close. A synchronous function that runs on a
worker thread sees its token, and its caller is released at once; what it still spends afterwards is booked
when it ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, overload

from treenail.clock import Clock, SystemClock, new_id
from treenail.containment.attempts import ActiveCall, Attempt, Call, call_around, current
from treenail.containment.breaker import CircuitBreaker, CircuitBreakers, Policy
from treenail.containment.cancel import CancellationToken, pause
from treenail.containment.chain import Chain
from treenail.containment.costs import Costs
from treenail.containment.dispatch import STOPPED, adispatch, apause, dispatch
from treenail.containment.guards import Guards, Refusal, refuse, reprice
from treenail.containment.heartbeat import NoteTime
from treenail.containment.ledger import Account, Journal, Ledger, LedgerEvent, UsedTime, fold
from treenail.containment.limits import (
    UNLIMITED,
    ExecutionConfig,
    Limits,
    StopReason,
    as_config,
    to_ms,
    to_usd,
)
from treenail.containment.loops import LoopPolicy
from treenail.containment.pricing import PriceTable
from treenail.containment.rates import RatePolicy
from treenail.containment.records import (
    NO_OPTIONS,
    CallOutcome,
    ChainMetadata,
    ContextSnapshot,
    Kind,
    NodeRecord,
    Status,
    WrapOptions,
)
from treenail.containment.shield import Decision, SafetyEvent, ShieldPipeline
from treenail.containment.threads import describe, logger
from treenail.errors import CallRefused, CancelledByToken, UsageError

T = TypeVar("T")

_STRICTEST_FIRST = ("halt", "estimate", "warn")


class Metrics(Protocol):
    """Hears of every call that has ended."""

    def record_call(self, node: NodeRecord) -> None:
        """Take note of a call; an error in here is logged and changes nothing."""
        ...


class GuardOptions(TypedDict, total=False):
    """The guards that a chain can bring along; a child's come on top of its parent's."""

    pipeline: ShieldPipeline | None
    circuit_breaker: CircuitBreaker | CircuitBreakers | None
    loops: LoopPolicy | None
    rates: RatePolicy | None
    memory_governor: Policy | None


class ChildOptions(GuardOptions, total=False):
    """What `spawn_child` passes on to a child."""

    onlooker: bool
    below: ActiveCall | None


class RunOptions(GuardOptions, total=False):
    """What `resume` passes on to the context that continues."""

    clock: Clock | None
    prices: PriceTable | None
    metrics: Metrics | None
    stoppable: bool | None
    above: Sequence[str]
    note_time: NoteTime | None


class ExecutionContext:
    """Hard ceilings for one run and everything that it starts.

    Share one context among the threads and tasks of a run. It is a context manager, sync and async:
    leaving it disarms the timers, and leaving it by an interrupt or a cancellation aborts the work in
    flight. It also works without.

    `above` names the chains, from the root down, that this one is a child of although they live in another
    process: what it writes to its journal counts for them too, once they are given those events.
    `note_time` keeps the time that the run has used so far, in place of what it kept before. It is called at
    least every `HEARTBEAT_S`; without it, the `note_time` of the journal is called, if the journal has one.

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
        onlooker: bool = False,
        below: ActiveCall | None = None,
        above: Sequence[str] = (),
        note_time: NoteTime | None = None,
        _ledger: Ledger | None = None,
    ) -> None:
        if parent is not None and above:
            raise UsageError(
                "a child chain is below its parent; `above` is for one whose parent is elsewhere"
            )
        if parent is not None and (journal is not None or clock is not None):
            raise UsageError("a child chain shares its parent's journal and clock; do not pass it its own")
        is_named = metadata is not None
        if metadata is None and parent is not None:
            metadata = replace(parent.metadata, chain_id=str(new_id()))
        elif metadata is None:
            chain_id, is_named = str(new_id()), True
            metadata = ChainMetadata(request_id=chain_id, chain_id=chain_id)
        if parent is not None:
            note_time = None  # A run has one heartbeat, its root's.
        elif note_time is None:
            note_time = getattr(journal if _ledger is None else _ledger.journal, "note_time", None)
        self.parent = parent
        self.clock: Clock = parent.clock if parent else clock or SystemClock()
        self.chain: Chain = Chain(
            as_config(config),
            metadata,
            self.clock,
            parent.chain.ledger if parent else _ledger or Ledger(journal),
            parent=parent.chain if parent else None,
            above=above,
            is_onlooker=onlooker,
            is_named=is_named,
            note_time=note_time,
        )
        self.config = self.chain.config
        self.metadata: ChainMetadata = metadata
        self.chain_id = metadata.chain_id
        self.cancellation_token = self.chain.token
        """Cancelled when the chain is aborted or its time is over; its reason says which."""
        self._metrics: Metrics | None = metrics or (parent._metrics if parent else None)
        self._stoppable: bool | None = parent._stoppable if parent and stoppable is None else stoppable
        self._ledger = self.chain.ledger
        self._books = self.chain.books
        configs = [chain.config for chain in self.chain.line]
        capped = [each for each in configs if each.max_cost_usd is not None or each.pots]
        self._costs: Costs = Costs(
            prices or (parent._costs.prices if parent else None),
            min((each.on_unknown_price for each in capped), key=_STRICTEST_FIRST.index, default=None),
            self.chain.tell,
        )
        self._guards: Guards = Guards(
            self.chain,
            self._costs,
            parent._guards if parent else None,
            pipeline=pipeline,
            breaker=circuit_breaker,
            loops=loops,
            rates=rates,
            policy=memory_governor,
            is_onlooker=onlooker,
        )
        self._spawned_by = call_around(below) if parent else None

    # --- opening and closing ----------------------------------------------------------------------

    @classmethod
    def resume(
        cls,
        config: ExecutionConfig | Limits,
        events: Iterable[LedgerEvent | UsedTime],
        *,
        metadata: ChainMetadata | None = None,
        journal: Journal | None = None,
        **options: Unpack[RunOptions],
    ) -> ExecutionContext:
        """Return a context that continues from what a journal says was spent.

        A call that was reserved and never settled counts in full. The time that the chain was running
        counts, the time between its processes does not; after a kill, what was last seen and `HEARTBEAT_S`
        count. Without `metadata` the chain keeps the id
        that the events name. Children continue too, if they are spawned with the chain ids that they
        had. The events may come from several journals, in any order, and some of them more than once. A
        journal that keeps the time of its runs, as `JsonlJournal` does, is asked for it.
        """
        recorded = list(events)
        if metadata is None and recorded:
            first = recorded[0]
            root = first.root if isinstance(first, UsedTime) else first.lineage[0]
            metadata = ChainMetadata(request_id=str(new_id()), chain_id=root)
        noted_times: Callable[[], Iterable[UsedTime]] = getattr(journal, "noted_times", tuple)
        if metadata is not None:
            recorded.extend(each for each in noted_times() if each.root == metadata.chain_id)
        return cls(config, metadata=metadata, _ledger=Ledger(journal, fold(recorded)), **options)

    def spawn_child(
        self,
        config: ExecutionConfig | Limits = UNLIMITED,
        *,
        metadata: ChainMetadata | None = None,
        **options: Unpack[ChildOptions],
    ) -> ExecutionContext:
        """Return a context for a nested run that spends this one's money, steps, retries and time.

        Its own ceilings and guards come on top of ours, so it can only be narrower. A ceiling of ours that it
        reaches ends both, each with its own record; a ceiling of its own ends it alone.
        An `onlooker` only looks at the work, so its failures and repetitions are its own: they take none of
        our retries, open no circuit of ours (an open one stops it all the same) and are not a loop of ours,
        and it is not a level of depth.
        Its nodes hang below the call that runs now, or below the one that `below` names: the call that asked
        for the child may be over when the child begins.
        `CallRefused` if a child would be deeper than this chain, or one above it, allows.
        """
        self._ledger.refuse_copy()
        return ExecutionContext(config, metadata=metadata, parent=self, **options)

    def left(self) -> ExecutionConfig | None:
        """Return what is left of the ceilings here and above, as ceilings; None if nothing is left of one."""
        with self._ledger.lock:
            accounts, counted = self._books.accounts, self._books.retry_accounts
            steps = [each.max_steps - each.tally.steps for each in accounts if each.max_steps is not None]
            retries = [
                each.max_retries - each.tally.retries for each in counted if each.max_retries is not None
            ]
        usd, seconds = self.remaining_usd, self.remaining_s
        most_steps, most_retries = min(steps, default=None), min(retries, default=None)
        if any(each is not None and each <= 0 for each in (usd, seconds, most_steps, most_retries)):
            return None
        return ExecutionConfig(
            max_cost_usd=usd,
            max_steps=most_steps,
            max_retries_total=most_retries,
            timeout_ms=0 if seconds is None else max(1, to_ms(seconds)),
            on_unknown_price=self._costs.on_unknown_price or self.config.on_unknown_price,
            max_depth=self.remaining_depth,
        )

    def apart(self) -> ExecutionContext:
        """Return a context with what is left here as its ceilings, from which no attribute leads back here.

        What is spent there is not spent here, and what stops there does not stop here.
        """
        left = self.left()
        made = ExecutionContext(left or UNLIMITED, clock=self.clock, prices=self._costs.prices)
        if left is None:
            made.abort("nothing is left of the limits of the run")
        return made

    def seen_ms(self, chain_id: str) -> float | None:
        """Return how long a chain of this run was seen to run in processes before this one; None if never.

        It ran no shorter. What it is charged may be more.
        """
        spent = self._ledger.carried.get(chain_id)
        return None if spent is None else spent.seen_ms

    @property
    def depth(self) -> int:
        """How many chains are above this one, onlookers apart; 0 for a run's own."""
        return self.chain.depth

    @property
    def remaining_depth(self) -> int | None:
        """How many levels of children may still be below this chain; None without a ceiling."""
        return self.chain.remaining_depth

    def __enter__(self) -> ExecutionContext:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is not None and not issubclass(exc_type, Exception):
            # An interrupt or a cancellation ends the run: work on other threads must hear of it.
            self.abort(f"{exc_type.__name__} left the run")
        self.close()

    async def __aenter__(self) -> ExecutionContext:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self.__exit__(exc_type)

    def close(self) -> None:
        """Disarm the timers and stop following the parent. Ceilings still hold for calls made afterwards."""
        self.chain.close()

    # --- the face that returns decisions -----------------------------------------------------------------

    def wrap_llm_call(self, fn: Callable[[], object], options: WrapOptions | None = None) -> Decision:
        """Make a model call and say what was decided; `call_llm` also returns what came back.

        ALLOW: it went well. DEGRADE: it went well, with less. RETRY: it failed, another attempt may
        follow. HALT and the other decisions: it was not made, or nothing more must follow.
        """
        return self._make("llm", fn, options).take_decision()

    def wrap_tool_call(self, fn: Callable[[], object], options: WrapOptions | None = None) -> Decision:
        """Make a tool call under containment and say what was decided; see `wrap_llm_call`."""
        return self._make("tool", fn, options).take_decision()

    # --- the fuller face, synchronous and asynchronous --------------------------------------------

    def call_llm(self, fn: Callable[[], T], options: WrapOptions | None = None) -> CallOutcome[T]:
        """Make a model call and return its value, its error, the decision and the node.

        A coroutine function is driven to its end; inside a running event loop it is refused with
        `UsageError`, because `acall_llm` is the way there. An exception of the call is in `error`, of
        its own class; `KeyboardInterrupt` and cancellation pass through, recorded.
        """
        return self._make("llm", fn, options).take_outcome()

    def call_tool(self, fn: Callable[[], T], options: WrapOptions | None = None) -> CallOutcome[T]:
        """Make a tool call and return its value, its error, the decision and the node; see `call_llm`."""
        return self._make("tool", fn, options).take_outcome()

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
        return (await self._amake("llm", fn, options)).take_outcome()

    @overload
    async def acall_tool(
        self, fn: Callable[[], Awaitable[T]], options: WrapOptions | None = None
    ) -> CallOutcome[T]: ...
    @overload
    async def acall_tool(self, fn: Callable[[], T], options: WrapOptions | None = None) -> CallOutcome[T]: ...
    async def acall_tool(self, fn: Callable[[], Any], options: WrapOptions | None = None) -> CallOutcome[Any]:
        """Make a tool call from async code; see `acall_llm`."""
        return (await self._amake("tool", fn, options)).take_outcome()

    # --- questions and commands -------------------------------------------------------------------

    def check_egress(self, url: str, method: str = "GET") -> Decision:
        """Ask the shield whether a request may leave; a blocked one is recorded.

        It is not a call and costs nothing.
        """
        verdict = self._guards.shield.egress(current.get(), url, method)
        return Decision.ALLOW if verdict is None else verdict.decision

    def check_attempt_egress(self, attempt: Attempt, url: str, method: str) -> None:
        """Ask whether a call's request may leave; see `ActiveCall.check_egress`."""
        verdict = self._guards.shield.egress(attempt, url, method)
        if verdict is not None:
            attempt.refused = (verdict.decision, verdict.reason)
            raise CallRefused(
                f"a request of {attempt.call.name} may not leave ({verdict.decision}): {verdict.reason}",
                decision=str(verdict.decision),
            )

    def record_event(self, event: SafetyEvent) -> None:
        """Add an event of your own; beyond `MAX_EVENTS` only the chain's own stops are kept."""
        self.chain.note(event)

    def abort(self, reason: str) -> None:
        """Stop the chain, its children and the work in flight; later calls are refused.

        It raises nothing.
        """
        self.chain.abort(reason)

    def get_snapshot(self) -> ContextSnapshot:
        """Return the state of the chain now.

        It costs the same however many calls were made, and never changes.
        """
        with self._ledger.lock:
            return self.chain.snapshot()

    @property
    def stop_snapshot(self) -> ContextSnapshot | None:
        """The state just before the chain first stopped, so that intermediate results are never lost."""
        return self.chain.stop_snapshot

    def get_partial(self, node_id: str) -> str | None:
        """Return what the call with that node id had produced so far; None if it kept nothing."""
        buffer = self.chain.partials.get(node_id)
        return None if buffer is None else buffer.get_partial()

    @property
    def remaining_usd(self) -> float | None:
        """What may still be spent here, by this chain's ceiling and those above; None without a ceiling."""
        with self._ledger.lock:
            left = self._books.left
        return None if left is None else to_usd(max(0, left))

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline, never negative; None without one."""
        deadline = self.chain.deadline
        return None if deadline is None else max(0.0, deadline - self.clock.monotonic())

    @property
    def stop_reason(self) -> str | None:
        """Why the chain stopped, or why its last call was refused; None while it may continue."""
        with self._ledger.lock:
            return self.chain.stop_reason

    def must_be_stoppable(self, options: WrapOptions) -> bool:
        """Say whether a synchronous function runs on a worker, so that its caller can be released."""
        if options.stoppable is not None:
            return options.stoppable
        if self._stoppable is not None:
            return self._stoppable
        return self.chain.deadline is not None or options.timeout_ms is not None

    def refuses_retry(self, kind: Kind, options: WrapOptions, delay_s: float) -> Refusal | None:
        """Say why a retry after that wait would be refused, so that its caller does not wait in vain.

        None is not a promise: the retry is booked, or refused, when it is made.
        """
        attempt = Attempt(Call(self, kind, options.operation_name), _nothing, options, options.retry_of)
        refusal = self._estimate(attempt) or self._limits(attempt, attempt.estimate)
        if refusal is None:
            refusal = self._guards.circuits.forecast(attempt, delay_s)
        left = self.remaining_s
        if refusal is None and left is not None and delay_s >= left:
            detail = f"the next attempt is due in {delay_s:g} s, and only {left:g} s are left"
            refusal = refuse(self.chain, StopReason.TIMEOUT, detail)
        return refusal

    # --- the path of a call -----------------------------------------------------------------------

    def _make(self, kind: Kind, fn: Callable[[], object], options: WrapOptions | None) -> Call:
        """Make one call in as many attempts as its options ask for, blocking this thread."""
        call, attempt = self._begin(kind, fn, options)
        try:
            while True:
                try:
                    if not self._admit(attempt):
                        return call
                    if attempt.delay_s:
                        pause(self.clock, attempt.delay_s, self.cancellation_token)
                    if not self._reserve(attempt):
                        return call
                    value = dispatch(attempt)
                except BaseException as error:  # noqa: BLE001 - _failed raises again what must pass
                    is_over = self._failed(attempt, error)
                else:
                    is_over = self._returned(attempt, value)
                if is_over:
                    return call
                attempt = Attempt(call, fn, attempt.options, call)
        finally:
            if call.status == "running":
                self._abandon(attempt)

    async def _amake(self, kind: Kind, fn: Callable[[], object], options: WrapOptions | None) -> Call:
        """Do what `_make` does, and let other tasks run; only the two lines that wait differ."""
        call, attempt = self._begin(kind, fn, options)
        try:
            while True:
                try:
                    if not self._admit(attempt):
                        return call
                    if attempt.delay_s:
                        await apause(self.clock, attempt.delay_s, self.cancellation_token)
                    if not self._reserve(attempt):
                        return call
                    value = await adispatch(attempt)
                except BaseException as error:  # noqa: BLE001 - _failed raises again what must pass
                    is_over = self._failed(attempt, error)
                else:
                    is_over = self._returned(attempt, value)
                if is_over:
                    return call
                attempt = Attempt(call, fn, attempt.options, call)
        finally:
            if call.status == "running":
                self._abandon(attempt)

    def _begin(
        self, kind: Kind, fn: Callable[[], object], options: WrapOptions | None
    ) -> tuple[Call, Attempt]:
        if options is None:
            options = NO_OPTIONS
        elif not isinstance(options, WrapOptions):
            raise UsageError(f"options must be WrapOptions, not {options!r} ({type(options).__name__})")
        if not callable(fn):
            raise UsageError(f"fn must be a function without arguments, not {fn!r} ({type(fn).__name__})")
        if self._ledger.is_copy:
            self._ledger.refuse_copy()
        call = Call(self, kind, options.operation_name)
        outer = current.get()
        if outer is not None and outer.call.context.chain.line[-1] is self.chain.line[-1]:
            call.parent = outer.call
        elif self._spawned_by is not None:
            call.parent = self._spawned_by
        if options.partial_buffer is not None:
            call.buffer = self.chain.partials[call.node_id] = options.partial_buffer
        return call, Attempt(call, fn, options, options.retry_of)

    def _abandon(self, attempt: Attempt) -> None:
        """End a call whose own ending failed (a journal that cannot write): nothing stays taken."""
        self._guards.withdraw(attempt)
        self._finish(attempt, "error", Decision.HALT)

    def _admit(self, attempt: Attempt) -> bool:
        """Estimate the cost, and ask the ceilings and the guards that come before a plan's delay."""
        refusal = self._estimate(attempt)
        guards = self._guards
        if refusal is None and guards.has_any:
            # No guard is asked about a call that a ceiling forbids. The shield may make a dear one cheaper.
            refusal = self._limits(attempt, 0 if guards.has_shield else attempt.estimate)
            for guard in guards.before_wait:
                refusal = refusal or guard.admit(attempt)
        return refusal is None or self._block(attempt, refusal)

    def _reserve(self, attempt: Attempt) -> bool:
        """Ask the guards of the dispatch, then check and book in one step."""
        for guard in self._guards.before_dispatch:
            refusal = guard.admit(attempt)
            if refusal is not None:
                return self._block(attempt, refusal)
        if self.chain.is_stopped():
            return self._block(attempt, self._stop_refusal())
        call, ledger = attempt.call, self._ledger
        while True:
            with ledger.lock:
                # Check and booking are one step: no other call can take the last place in between.
                refused = self._books.book(attempt.estimate, attempt.is_retry)
                if refused is None and call.index < 0:
                    self.chain.enter(call)
                left = self._books.left if refused is not None else None
            if refused is None:
                break
            if not self._is_shortened(attempt, refused[1], left):
                return self._block(attempt, self._limit_refusal(*refused, attempt))
        attempt.reserved = attempt.estimate
        attempt.is_open = True
        call.attempts = attempt.number = call.attempts + 1
        if self.chain.has_refusals:
            self.chain.forget_refusals()
        if ledger.journal is not None:
            self.chain.journal_reserved(attempt)
        attempt.is_dispatched = True
        if self._guards.has_shield:
            self._guards.shield.made(attempt)
        return True

    def _estimate(self, attempt: Attempt) -> Refusal | None:
        options = attempt.options
        if options.cost_estimate_hint or options.model is not None or self.metadata.model is not None:
            return reprice(self.chain, self._costs, attempt)
        return None

    def _limits(self, attempt: Attempt, cost: int) -> Refusal | None:
        """Say which ceiling forbids the attempt, if one does."""
        if self.chain.is_stopped():
            return self._stop_refusal()
        with self._ledger.lock:
            refused = self._books.refusal(cost, attempt.is_retry)
            left = self._books.left if refused is not None else None
        if refused is None or (cost and self._is_shortened(attempt, refused[1], left)):
            return None
        return self._limit_refusal(*refused, attempt)

    def _is_shortened(self, attempt: Attempt, reason: StopReason, left: int | None) -> bool:
        """Make an attempt that is too dear with a shorter answer, if that is still of use."""
        is_dear = reason is StopReason.BUDGET_EXCEEDED and left is not None
        return is_dear and self._costs.fit(attempt, left or 0)

    def _stop_refusal(self) -> Refusal:
        token = self.cancellation_token
        reason = StopReason(token.reason) if token.reason else StopReason.TIMEOUT
        return Refusal(Decision.HALT, reason, token.detail)

    def _limit_refusal(self, account: Account, reason: StopReason, attempt: Attempt) -> Refusal:
        """Record that a ceiling forbids a call, in its chain and in every chain between it and this one."""
        place = self._books.accounts.index(account)
        owner = self.chain.line[place]
        detail = _limit_detail(owner, reason, self._costs.least(attempt), attempt.estimate)
        for chain in self.chain.line[place::-1]:
            said = detail if chain is owner else f"the chain {owner.id} above has stopped: {detail}"
            if account.is_final(reason):
                chain.stop(reason, said)
            else:
                chain.refuse(reason, said)
        return Refusal(Decision.HALT, reason, detail)

    def _block(self, attempt: Attempt, refusal: Refusal) -> bool:
        """End a call that is not to be made; its guards take back what they counted for it."""
        self._guards.withdraw(attempt)
        call = attempt.call
        call.stop_reason, call.detail = refusal.reason, refusal.detail
        # A retry that is not let through leaves the call as it was: failed.
        self._finish(attempt, "error" if call.attempts else "halted", refusal.decision)
        return False

    # --- how an attempt ends: each method says whether the call is over ----------------------------

    def _returned(self, attempt: Attempt, value: object) -> bool:
        call, token = attempt.call, attempt.token or self.cancellation_token
        call.value = None if value is STOPPED else value
        call.error = None
        if token.reason is not None:
            # It returned, but only after it was told to stop: its value is kept, the stop stands.
            return self._stopped(attempt, token, None)
        self._settle(attempt, value, "ok")
        self._finish(attempt, "ok", Decision.ALLOW if attempt.plan is None else Decision.DEGRADE)
        return True

    def _failed(self, attempt: Attempt, error: BaseException) -> bool:
        """Settle an attempt that raised. What must pass through is raised again."""
        call, token = attempt.call, attempt.stop_token
        is_interrupt = not isinstance(error, Exception)
        if is_interrupt or attempt.is_misused or not attempt.is_dispatched:
            # Interrupts and cancellation are the caller's, and so are its mistakes and errors from before the
            # dispatch, such as a journal's that cannot write.
            status: Status = "aborted" if is_interrupt else "error"
            call.stop_reason = StopReason.ABORTED if is_interrupt else None
            self._settle(attempt, None, status)
            self._finish(attempt, status, Decision.HALT)
            raise error
        call.value, call.error = None, error
        if token.reason is not None:
            return self._stopped(attempt, token, error)
        if attempt.refused is not None and isinstance(error, CallRefused):
            decision, call.detail = attempt.refused
            self._settle(attempt, None, "halted")
            self._finish(attempt, "halted", decision)
            return True
        self._settle(attempt, None, "error", error)
        return self._answer_failure(attempt, error, "error")

    def _stopped(self, attempt: Attempt, token: CancellationToken, error: BaseException | None) -> bool:
        """Settle an attempt that was told to stop."""
        call = attempt.call
        call.error = None if isinstance(error, CancelledByToken) else error
        reason = StopReason(token.reason) if token.reason else StopReason.ABORTED
        call.stop_reason, call.detail = reason, token.detail
        if self.cancellation_token.reason is None and reason is StopReason.TIMEOUT:
            # Only this call ran out of time. That says something about the provider.
            timeout = TimeoutError(token.detail)
            self._settle(attempt, call.value, "timeout", timeout)
            self.chain.tell(reason, Decision.HALT, token.detail, node_id=call.node_id)
            return self._answer_failure(attempt, timeout, "timeout")
        status: Status = "timeout" if reason is StopReason.TIMEOUT else "aborted"
        self._settle(attempt, call.value, status)
        self._finish(attempt, status, Decision.HALT)
        return True

    def _answer_failure(self, attempt: Attempt, error: BaseException, status: Status) -> bool:
        """Decide what follows a failed attempt: another one, RETRY, or HALT."""
        call, options = attempt.call, attempt.options
        wanted = options.retry_policy_override
        decision, plan = self._guards.shield.after_error(attempt, error)
        attempt_again = wanted is not None and call.retries_used < wanted and decision is Decision.RETRY
        if wanted is not None and not attempt_again:
            # Its own retries are used up, or a hook forbids more: nothing is taken from the chain's.
            if decision is Decision.RETRY:
                decision = Decision.HALT
                detail = f"{call.name}: {describe(error)}; its own {wanted} retries are used up"
                self.chain.tell("call_retries_exhausted", decision, detail, node_id=call.node_id)
            self._finish(attempt, status, decision)
            return True
        if status == "timeout" and not attempt_again:
            decision = Decision.HALT
        is_drained = not self._ledger.take_retry(self._books)
        if not is_drained:
            call.retries_used += 1
            self.chain.journal_retry(attempt)
            call.next_plan = attempt.carried_plan(plan)
            if attempt_again:
                call.value = call.stop_reason = None
                attempt.close_token()
                return False
            # With breakers, the last unit gives the provider up, unless the caller is going to use it.
            is_drained = (
                self._guards.has_breakers and not options.will_retry and self._books.is_out_of_retries
            )
        if is_drained:
            call.stop_reason = StopReason.PROVIDER_ERROR
            call.detail = f"{describe(error)}; no retries are left"
            counted = self._books.retry_accounts
            drained = [place for place, account in enumerate(counted) if account.is_out_of_retries]
            # The chain whose retries are used up and every chain below it end with their own records.
            for chain in self.chain.line[: max(drained, default=-1) + 1]:
                chain.stop(StopReason.PROVIDER_ERROR, call.detail)
            if decision is Decision.RETRY:
                decision = Decision.HALT
        self._finish(attempt, status, decision)
        return True

    def _settle(
        self, attempt: Attempt, value: object, status: Status, error: BaseException | None = None
    ) -> None:
        """Replace an attempt's reservation by the real cost, and tell the guards and the journal."""
        if not attempt.is_open:
            self._guards.withdraw(attempt)
            return
        attempt.is_open = False
        if self._ledger.is_copy:
            return  # The call continues in the process that this one was forked from, and is settled there.
        if not attempt.is_dispatched:
            # Its reservation could not be written down, so it was not made.
            self._ledger.unbook(self._books, attempt.reserved)
            attempt.call.attempts -= 1
            self._guards.withdraw(attempt)
            return
        attempt.settled = self._costs.real(attempt, value)
        attempt.call.cost += attempt.settled
        self._ledger.settle(self._books, attempt.reserved, attempt.settled)
        for guard in self._guards.all:
            guard.settle(attempt, value, status, error)
        if self._ledger.journal is not None:
            self.chain.journal_settled(attempt, status)
        # Behind the journal, which refuses a writer that was replaced: what it reserved counts in full.
        self._guards.settle_pots(attempt)
        callback = attempt.options.reconciliation_callback
        if callback is not None:
            _tell(callback, to_usd(attempt.reserved), to_usd(attempt.settled))
        if attempt.work is not None:
            attempt.work.add_done_callback(partial(self._book_late, attempt))

    def _book_late(self, attempt: Attempt, work: Future[object]) -> None:
        """Book what a function spent after its caller was released and its attempt was settled."""
        cost = self._costs.real(attempt, None if work.exception() else work.result()) - attempt.settled
        if cost <= 0:
            return
        attempt.settled += cost
        self._ledger.settle(self._books, 0, cost)
        for pot in self._guards.pots:
            pot.add(to_usd(cost))
        call = attempt.call
        detail = f"{call.name} spent {to_usd(cost):.6g} USD more after it was stopped"
        self.chain.tell("late_cost", Decision.ALLOW, detail, node_id=call.node_id)
        self.chain.journal_settled(attempt, call.status)

    def _finish(self, attempt: Attempt, status: Status, decision: Decision) -> None:
        """Close the node. Nothing about it changes afterwards, so snapshots may share it."""
        call = attempt.call
        if attempt.token is not None:
            attempt.close_token()
        call.plan = attempt.plan
        if status == "ok" and call.buffer is not None:
            call.buffer = None
            self.chain.partials.pop(call.node_id, None)
        call.decision = decision
        call.end_ts = self.clock.now()
        call.status = status
        self.chain.leave(call)
        if self._metrics is not None:
            _tell(self._metrics.record_call, call.record())


def _tell(listener: Callable[..., object], *details: object) -> None:
    """Tell a caller's listener about a call; an error in it is logged and changes nothing."""
    try:
        listener(*details)
    except Exception:  # noqa: BLE001 - the call is over and booked already
        logger.exception("%r could not take note of a call", listener)


def _limit_detail(chain: Chain, reason: StopReason, least: int, cost: int) -> str:
    tally, config = chain.account.tally, chain.config
    if reason is StopReason.BUDGET_EXCEEDED:
        full = "" if least == cost else f" for a short answer, {to_usd(cost):.6g} USD for one of full length"
        return (
            f"{to_usd(tally.spent):.6g} USD are spent and {to_usd(tally.reserved):.6g} USD reserved of "
            f"{config.max_cost_usd:g} USD; the call needs {to_usd(least):.6g} USD{full}"
        )
    if reason is StopReason.STEP_LIMIT_EXCEEDED:
        return f"{tally.steps} of {config.max_steps} steps are used"
    return f"{tally.retries} of {config.max_retries_total} retries are used"


def _nothing() -> None:
    """Stand for the function of an attempt that is only asked about."""
