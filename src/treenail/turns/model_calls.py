"""Asking the model, inside the containment and in time: for an answer, or for a summary."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import anyio

from treenail import telemetry
from treenail.containment import (
    DEFAULT_MAX_OUTPUT_TOKENS,
    MIN_OUTPUT_TOKENS,
    ActiveCall,
    CallOutcome,
    Decision,
    DegradePlan,
    StopReason,
    WrapOptions,
    apause,
    current_call,
)
from treenail.conversation import CompactionSettings, Compactor, Replay, ReplayItem, as_sent, without_images
from treenail.errors import DeadlineExceededError, ModelCallError, PromptEvaluationError
from treenail.providers import (
    CollectedAnswer,
    Collector,
    ModelEvent,
    ModelRequest,
    Provider,
    Stopped,
    UsageReported,
    bounds_output,
    degraded,
    error_of_stop,
    output_bound,
    report_usage,
    takes_images,
)
from treenail.state import TokenUsage
from treenail.turns.frame import TurnFrame, refused
from treenail.turns.retries import RetryPolicy, Waits, not_tried_again
from treenail.turns.traces import model_span

_NOTHING_USED = UsageReported(TokenUsage())


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """The model gave no answer that can be used."""

    error: Exception
    said: str
    """What it had said by then."""


@dataclass(slots=True)
class _Asked:
    """A model call under way: what is sent, and what has come back from the newest attempt."""

    request: ModelRequest
    replayed: Replay
    is_summary: bool = False
    collector: Collector = field(default_factory=Collector)
    notes: tuple[str, ...] = ()
    """What the request was shortened by."""
    short_of: str = ""
    """Why the answer has to be shorter than the provider would allow."""
    has_begun: bool = False
    """Whether text, thought or a call was seen: then the answer cannot be started over."""
    options: WrapOptions | None = None
    """What the containment is told of it."""
    outcome: CallOutcome[CollectedAnswer] | None = None
    """What the containment said of the newest attempt."""
    error: ModelCallError | None = None
    """The error of the attempt before."""

    def add(self, said: ModelEvent) -> None:
        self.collector.add(said)
        self.has_begun = self.has_begun or not isinstance(said, (UsageReported, Stopped))

    def start_over(self, error: ModelCallError) -> None:
        self.collector, self.error = Collector(), error


class ModelCaller:
    """Calls the model for one turn, and records what was used and answered."""

    def __init__(
        self,
        frame: TurnFrame,
        provider: Provider,
        compaction: CompactionSettings,
        retry: RetryPolicy | None,
        idle_timeout_s: float | None = None,
    ) -> None:
        self._frame = frame
        self._provider = provider
        self._retry = retry
        self._idle_timeout_s = idle_timeout_s
        self._takes_images = takes_images(provider)
        self._compactor = Compactor(
            compaction, summarise=self._summarise, on_begin=lambda: frame.display.status("compacting")
        )

    async def ask(self) -> CollectedAnswer | NoAnswer:
        """Call the model once, and record its answer."""
        frame, record, compactor = self._frame, self._frame.record, self._compactor
        record.catch_up()
        compacted = await compactor.before_call(
            frame.state.session, record.replayer, model=record.model, beside=frame.tool_tokens
        )
        if compacted is not None:
            record.catch_up()  # Writing the summary may have taken a while.
        if compactor.pressure is not None:
            frame.display.show(compactor.pressure)
        frame.display.status("thinking", ahead=1)
        replayed = record.replayer.input()
        if not self._takes_images:
            replayed = without_images(replayed)
        request = ModelRequest(
            replayed.items,
            frame.rendered.tools,
            frame.output_schema,
            record.answers_so_far,
            idle_timeout_s=self._idle_timeout_s,
        )
        asked = _Asked(request, replayed)
        try:
            answer = await self._in_time(asked)
        except BaseException as error:
            self._log_usage(asked)
            if not isinstance(error, PromptEvaluationError | OSError):
                raise
            said = asked.collector.text
            if not said and await self._is_shortened(error):
                return await self.ask()
            return NoAnswer(error, said)
        compactor.settled()
        usage = record.usage_of(answer, asked.replayed, notes=asked.notes, pressure=compactor.pressure)
        # An answer that was cut off, filtered or refused is not an answer: its text is kept as evidence.
        no_answer = error_of_stop(
            answer.stop,
            provider=record.provider,
            model=record.model,
            said=answer.stop_said,
            short_of=asked.short_of,
        )
        if no_answer is not None:
            frame.state.session.dispatch(usage)
            return NoAnswer(no_answer, answer.text)
        record.add_answer(answer, usage)
        frame.display.usage()
        return answer

    async def _answered(self, asked: _Asked) -> CollectedAnswer:
        """Have a request answered once, with less if the shield wants that."""
        contained = current_call()
        if contained is not None:
            # The money is reserved according to the shield's plan, so the request must follow the plan.
            self._degrade(asked, contained.plan)
            self._bound(asked, contained)
        frame = self._frame
        try:
            if not telemetry.is_on():
                await self._collect(asked)
            else:
                model = asked.request.model or frame.record.model
                with model_span(frame.record.provider, model, frame.state.clock, asked.collector):
                    await self._collect(asked)
        finally:
            if contained is not None:
                report_usage(contained, asked.collector.usage)
        return asked.collector.answer()

    async def _collect(self, asked: _Asked) -> None:
        """Take what the model says, and show it unless it is a summary."""
        display = self._frame.display
        is_shown = display.watch is not None and not asked.is_summary
        events = self._frame.seat.provider.stream(asked.request)
        try:
            async for each in events:
                asked.add(each)
                if is_shown:
                    display.model(each)
        finally:
            # Whatever happens, no answer is paid for that will not be read.
            await events.aclose()

    def _degrade(self, asked: _Asked, plan: DegradePlan | None) -> None:
        """Send less, if the shield wants that, and note what was left out."""
        asked.request, less = degraded(asked.request, plan, model=self._provider.model)
        if less:
            asked.replayed = as_sent(asked.replayed, asked.request.items)
            asked.notes += less

    def _bound(self, asked: _Asked, contained: ActiveCall) -> None:
        """Let the request allow no longer answer than money is reserved for."""
        most, said = contained.max_output_tokens, asked.request.max_output_tokens
        if most is None or (said is not None and said <= most):
            return
        asked.request = replace(asked.request, max_output_tokens=most)
        if contained.is_shortened:
            asked.short_of = f"the rest of the money pays for an answer of {most} tokens"
            asked.notes += (asked.short_of,)

    async def _is_shortened(self, error: Exception) -> bool:
        """Compact the conversation if the provider says that it is too long, and if it can be done."""
        if not isinstance(error, ModelCallError) or error.kind != "context_too_long":
            return False
        frame = self._frame
        done = await self._compactor.after_overflow(frame.state.session, frame.record.replayer)
        return done is not None

    async def _summarise(self, prompt: str) -> str:
        """Have the model write a summary: a call like any other, contained, counted and recorded."""
        item = ReplayItem("user", prompt)
        so_far = self._frame.record.answers_so_far
        request = ModelRequest((item,), answers_so_far=so_far, idle_timeout_s=self._idle_timeout_s)
        asked = _Asked(request, Replay((item,), size_bytes=len(item.canonical())), is_summary=True)
        try:
            return (await self._in_time(asked)).text
        finally:
            self._log_usage(asked)

    def _log_usage(self, asked: _Asked) -> None:
        """Record what an attempt has used that brought no answer, or that wrote a summary."""
        if asked.collector.usage != _NOTHING_USED:
            record, answer = self._frame.record, asked.collector.answer()
            self._frame.state.session.dispatch(
                record.usage_of_summary(answer)
                if asked.is_summary
                else record.usage_of(answer, asked.replayed, is_cut_off=True, notes=asked.notes)
            )

    async def _in_time(self, asked: _Asked) -> CollectedAnswer:
        """Make a model call, in as many attempts as it takes; the turn's deadline cuts it off."""
        self._frame.cancellation.raise_if_cancelled()
        deadline = self._frame.deadline
        if deadline is None:
            return await self._in_attempts(asked)
        with anyio.move_on_after(max(deadline.remaining().total_seconds(), 0)):
            return await self._in_attempts(asked)
        raise DeadlineExceededError("the deadline passed while the model was answering")

    async def _in_attempts(self, asked: _Asked) -> CollectedAnswer:
        """Ask the model, and again after a failure that may pass, if the policy and the limits allow it."""
        waits: Waits | None = None
        while True:
            try:
                return await self._attempt(asked)
            except ModelCallError as error:
                waits = waits or Waits(self._retry, self._frame.state.clock, self._frame.state.rng)
                delay_s = waits.after(error)
                if asked.has_begun:
                    error.partial = error.partial or asked.collector.text
                if delay_s is None or asked.has_begun:
                    raise
                await self._wait_for_retry(asked, error, waits.failures, delay_s)

    async def _wait_for_retry(
        self, asked: _Asked, error: ModelCallError, failures: int, delay_s: float
    ) -> None:
        """Wait before the next attempt; raise the error at once if the run's limits would refuse that."""
        frame = self._frame
        failed, containment, token = asked.outcome, frame.containment, frame.cancellation
        if containment is not None and failed is not None:
            if failed.decision is not Decision.RETRY:
                raise not_tried_again(error, failed.stop_reason or failed.decision, failed.detail)
            if failed.next_plan is not None:
                delay_s = max(delay_s, failed.next_plan.delay_ms / 1000)
            asked.options = replace(self._options(asked), retry_of=failed)
            refusal = containment.refuses_retry("llm", asked.options, delay_s)
            if refusal is not None:
                raise not_tried_again(error, refusal.reason or refusal.decision, refusal.detail)
            token = containment.cancellation_token
        self._log_usage(asked)
        asked.start_over(error)
        why = f"attempt {failures} failed: {error}"
        frame.display.status("waiting", ahead=1, detail=f"{why}; the next one in {delay_s:.1f} s")
        await apause(frame.state.clock, delay_s, token)

    async def _attempt(self, asked: _Asked) -> CollectedAnswer:
        """Ask the model once, inside the containment."""
        containment = self._frame.containment
        if containment is None:
            return await self._answered(asked)
        call = partial(self._answered, asked)
        outcome = asked.outcome = await containment.acall_llm(call, self._options(asked))
        if outcome.ok:
            assert outcome.value is not None
            return outcome.value
        if outcome.node.status == "error" and outcome.error is not None:
            raise outcome.error
        is_stopped = outcome.stop_reason in (StopReason.ABORTED, StopReason.TIMEOUT)
        if asked.error is not None and not outcome.was_dispatched and not is_stopped:
            raise not_tried_again(asked.error, outcome.stop_reason or outcome.decision, outcome.detail)
        raise refused(outcome, containment)

    def _options(self, asked: _Asked) -> WrapOptions:
        """Say what is known of a model call before it is made: above all, what to reserve for it."""
        if asked.options is None:
            provider, request = self._provider, asked.request
            estimate, bound = provider.estimate_usd(request), output_bound(provider, request)
            if bound is None and estimate is None:
                bound = request.max_output_tokens or DEFAULT_MAX_OUTPUT_TOKENS
            is_unbounded = not bounds_output(provider)
            asked.options = WrapOptions(
                operation_name=provider.name,
                model=provider.model,
                max_output_tokens=bound,
                min_output_tokens=None if bound is None or is_unbounded else MIN_OUTPUT_TOKENS,
                is_unbounded=is_unbounded,
                # A provider that knows the price itself, also if it is nothing, needs no price table.
                cost_estimate_hint=estimate or 0.0,
                estimate_degraded=lambda plan: provider.estimate_usd(
                    degraded(request, plan, model=provider.model)[0]
                ),
                is_free=estimate == 0,
                input_tokens=-(-asked.replayed.size_bytes // 3) + self._frame.tool_tokens,
                will_retry=self._retry is not None,
            )
        return asked.options
