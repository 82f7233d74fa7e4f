"""The loop: ask the model, record its answer, run its tools, until it is done.

Every message is durable before the next step. A tool's message is logged in the same
append as the tool's effects, so that a conversation never claims what did not happen
and never forgets what did.

A turn is over when the model stops asking for tools, its answer fits the prompt's output
type, and nobody who judges the work sends it back. Everything else that ends a turn has a
place in `treenail.turns.states`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import anyio

from treenail import telemetry
from treenail.containment import (
    CallOutcome,
    CancellationToken,
    Decision,
    DegradePlan,
    ExecutionContext,
    SafetyEvent,
    StopReason,
    WrapOptions,
    current_call,
)
from treenail.containment.dispatch import apause
from treenail.containment.threads import threadsafe
from treenail.conversation.compaction import CompactionSettings, Compactor
from treenail.conversation.excerpts import as_sent
from treenail.conversation.messages import InnerMessage, ToolCallRecord, get_pending_tool_calls
from treenail.conversation.replay import Replay, ReplayItem
from treenail.errors import (
    CallRefused,
    CancelledByToken,
    DeadlineExceededError,
    IllegalEndingError,
    LogError,
    ModelCallError,
    OutputParseError,
    PromptEvaluationError,
    VisibilityExpansionRequired,
)
from treenail.judges.events import CompletionChecked, Feedback
from treenail.judges.feedback import placed
from treenail.judges.judges import Judges
from treenail.prompt.events import PromptExecuted, PromptRendered, PromptResponse
from treenail.prompt.render import RenderedPrompt, parse_output
from treenail.prompt.template import Prompt
from treenail.prompt.visibility import SectionPath, SectionVisibility, expand, register_visibility
from treenail.providers.adapter import ProviderAdapter
from treenail.providers.answer import CollectedAnswer, Collector
from treenail.providers.base import (
    ModelEvent,
    ModelRequest,
    Provider,
    Stopped,
    UsageReported,
    takes_output_schema,
)
from treenail.providers.degradation import degraded, tool_tokens
from treenail.providers.errors import error_of_stop
from treenail.providers.usage import report_usage
from treenail.state.budget import BudgetTracker, Deadline, TokenUsage
from treenail.state.execution import ExecutionState
from treenail.state.run_context import RunContext
from treenail.state.transaction import stamped
from treenail.telemetry import Span
from treenail.tools.boundaries import recover
from treenail.tools.context import Heartbeat, ToolContext, filesystem_of
from treenail.tools.plan import Plan
from treenail.tools.policies import Permissions
from treenail.tools.runner import ToolRunner
from treenail.tools.tool import Tool, ToolCall, ToolResult
from treenail.turns.derivation import turn_state
from treenail.turns.endings import close_crashed_turn, end_turn
from treenail.turns.ledger import newly_set
from treenail.turns.live import (
    FeedbackGiven,
    LiveEvent,
    PlanChanged,
    PlanEntry,
    Status,
    StatusChanged,
    ToolCallBegan,
    ToolCallFinished,
    TurnFinished,
    UsageChanged,
    status_of,
)
from treenail.turns.record import TurnRecord
from treenail.turns.retries import RetryPolicy, Waits, not_tried_again
from treenail.turns.signals import noted_signals
from treenail.turns.states import Ending, TurnEnded, TurnResumed, TurnState, ending_for
from treenail.turns.traces import model_span, tool_failed, tool_span, turn_ended, turn_span
from treenail.turns.vendor import Seat, seated

_logger = logging.getLogger("treenail.turns")

_NOTHING_USED = UsageReported(TokenUsage())

DEFAULT_MAX_ITERATIONS = 100
"""How often a turn asks the model at most, unless it is told otherwise."""

MAX_REPAIRS = 2
"""How often an answer that does not fit the output type goes back to the model, until the turn ends."""

_SUMMARY_CHARS = 200
"""How much of a tool's result a screen is told while the turn runs."""

_REPAIR = "<invalid-answer>"
"""How the message begins that sends an answer back."""

Execute = Callable[[], Awaitable[ToolResult[Any]]]
"""Runs a tool call that was asked for."""

Watch = Callable[[LiveEvent], object]
"""Sees what the model says while it says it, and what the turn does, such as `LiveFeed.publish`.

It is for display only: nothing depends on it. It is called in the turn's own event loop, which it must not
hold up: whatever may be slow or hang belongs behind a `LiveFeed`. One that raises is not called again.
"""


@dataclass(slots=True)
class TurnResult:
    """What came of a turn, as the log tells it."""

    state: TurnState
    text: str
    error_kind: str | None = None
    details: str = ""
    next_actions: tuple[str, ...] = ()
    output: Any = None
    """The answer as the prompt's output type; the text itself for a prompt without one."""
    error: Exception | None = None
    """What ended the turn, if it was an exception."""


@dataclass(slots=True)
class InnerLoop:
    """One turn of an agent on one session."""

    state: ExecutionState
    provider: Provider
    prompt: Prompt[Any]
    agent: str = ""
    """Whose turn it is, as the log has it; the prompt's name if it is left out."""
    containment: ExecutionContext | None = None
    permissions: Permissions = field(default_factory=Permissions)
    deadline: Deadline | None = None
    budget_tracker: BudgetTracker | None = None
    max_iterations: int = DEFAULT_MAX_ITERATIONS
    retry: RetryPolicy | None = None
    """How failed model calls are tried again; None for not at all."""
    watch: Watch | None = None
    cancellation: CancellationToken = field(default_factory=CancellationToken)
    workspace: str | None = None
    run_context: RunContext | None = None
    heartbeat: Heartbeat | None = None
    compaction: CompactionSettings = field(default_factory=CompactionSettings)
    """When the conversation is told to the model as a summary, and how that is written."""
    adapter: ProviderAdapter | None = None
    """Who evaluates for the judges, unless their configuration names somebody else."""
    _record: TurnRecord = field(init=False, repr=False)
    _compactor: Compactor = field(init=False, repr=False)
    _rendered: RenderedPrompt[Any] = field(init=False, repr=False)
    _runner: ToolRunner = field(init=False, repr=False)
    _context: ToolContext = field(init=False, repr=False)
    """What every tool call of the turn is given."""
    _told: int = 0
    _tool_tokens: int = 0
    _output_schema: Mapping[str, Any] | None = None
    """What the provider makes the model follow, if it can do that."""
    _results: dict[int, InnerMessage] = field(default_factory=dict)
    """The messages of the tools that are running, by their place."""
    _places: dict[str, int] = field(default_factory=dict)
    """The places of the results of the calls that are running, by call id."""
    _expansions: list[tuple[ToolCall, int, VisibilityExpansionRequired]] = field(default_factory=list)
    """The calls that want sections opened, with their places in the conversation."""
    _seat: Seat = field(init=False, repr=False)
    _judges: Judges = field(init=False, repr=False)
    _began: float = 0.0
    _is_waiting: bool = False
    _shown_plan: Plan | None = None

    def __post_init__(self) -> None:
        self.agent = self.agent or self.prompt.name
        self._seat = Seat(self.provider)
        if self.budget_tracker is None:
            self.budget_tracker = self.state.resources.get(BudgetTracker, None)

    # .. the two ways in ..

    async def run(self, task: str = "") -> TurnResult:
        """Take up a task: a new turn. Without a task the prompt speaks alone."""
        with self._traced() as (span, self.run_context):
            self._prepare()
            close_crashed_turn(self.state.session)
            self._record.new_turn()
            with stamped(turn_id=self._record.turn_id):
                beside = (self._as_rendered(), *newly_set(self.state.session, self.containment))
                self._record.begin(self.agent, self._rendered.text, task, self.workspace, beside)
                self._judges = self._who_judges(task, refusals_after=0)
                return self._told_of(await self._to_its_end(()), span)

    async def resume(self) -> TurnResult:
        """Go on with the newest turn after a crash, an interrupt or an answered hold.

        What a crash cut off is rolled back first; finished tools are not run again, pending ones are.
        A turn that is completed already is not touched.
        """
        with self._traced() as (span, self.run_context):
            return self._told_of(await self._go_on(), span)

    async def _go_on(self) -> TurnResult:
        session = self.state.session
        self._prepare()
        started = self._record.go_on(self.agent, self._rendered.text, self.workspace)
        if turn_state(session) is TurnState.COMPLETED:
            last = self._record.last
            text = "" if last is None else last.content
            return TurnResult(TurnState.COMPLETED, text, output=parse_output(text, self._rendered))
        pending = get_pending_tool_calls(session, self._record.evaluation_id)
        close_crashed_turn(session)
        with stamped(turn_id=self._record.turn_id):
            resumed = TurnResumed(self._record.turn_id, self.provider.name, self.provider.model)
            session.dispatch_all((resumed, *newly_set(session, self.containment)))
            self._judges = self._who_judges(started.task, refusals_after=self._ended_as("incomplete"))
            return await self._to_its_end(pending)

    def _traced(self) -> AbstractContextManager[tuple[Span, RunContext | None]]:
        """Let telemetry watch the turn; what the turn records is to carry the trace's ids."""
        session_id, provider = self.state.session.session_id, self.provider
        return turn_span(self.agent, session_id, provider.name, provider.model, self.run_context)

    def _told_of(self, result: TurnResult, span: Span) -> TurnResult:
        turn_ended(span, result.state.value, result.error_kind)
        return result

    def _prepare(self) -> None:
        session, provider, prompt = self.state.session, self.provider, self.prompt
        self._record = TurnRecord(session, provider.name, provider.model, prompt.ns, prompt.key)
        self._compactor = Compactor(
            self.compaction, summarise=self._summarise, on_begin=lambda: self._status("compacting")
        )
        register_visibility(session)
        recover(self.state)
        self._skip_logged_events()
        self._render()

    def _render(self, opened: Mapping[str | SectionPath, SectionVisibility] | None = None) -> None:
        """Make the prompt's text and tools as the session wants them now, with some sections opened."""
        rendered = self.prompt.render(self.state.session, visibility=opened, deadline=self.deadline)
        output, follows = rendered.structured_output, takes_output_schema(self.provider)
        self._rendered = rendered if follows else rendered.with_output_format()
        self._output_schema = output.schema if output is not None and follows else None
        self._tool_tokens = tool_tokens(rendered.tools)
        self._runner = ToolRunner(
            self.state,
            self._registry(),
            self.agent,
            adapter=self.provider.name,
            policies=rendered.policies if any(rendered.policies.values()) else (),
            permissions=self.permissions,
            watches_token=False,
        )
        self._context = ToolContext(
            self.state,
            deadline=self.deadline,
            budget_tracker=self.budget_tracker,
            cancellation=self.cancellation,
            run_context=self.run_context,
            prompt=self.prompt,
            rendered_prompt=self._rendered,
            adapter=self.provider.name,
            heartbeat=self.heartbeat,
        )

    def _as_rendered(self) -> PromptRendered:
        session = self.state.session
        return PromptRendered.of(
            self.prompt,
            self._rendered,
            adapter=self.provider.name,
            session_id=session.session_id,
            created_at=session.clock.now(),
            run_context=self.run_context,
        )

    # .. the loop ..

    async def _to_its_end(self, pending: Sequence[ToolCallRecord]) -> TurnResult:
        self._began = self.state.clock.monotonic()
        self._show_plan()
        with noted_signals() as noted:
            try:
                return await self._in_seat(pending)
            except _Halted as halt:
                return self._stopped_by_limits(halt)
            except (
                KeyboardInterrupt,
                SystemExit,
                BaseExceptionGroup,
                anyio.get_cancelled_exc_class(),
            ) as stopped:
                if isinstance(stopped, Exception):
                    return self._ended_by(stopped)
                # What a person or the program wants goes on; a provider with tasks of its own wraps it.
                interrupt = _leaf(stopped, KeyboardInterrupt) or stopped
                # It may come just after the turn's ending was logged, which stands.
                with suppress(IllegalEndingError):
                    self._end(self._ending(interrupt, stop_reason=noted.reason))
                if interrupt is not stopped:
                    raise interrupt from None
                raise
            except LogError:
                raise  # What cannot be written down cannot be given an ending either.
            except Exception as error:  # noqa: BLE001  # every stop has an ending, also one that nobody foresaw
                return self._ended_by(error)

    async def _in_seat(self, pending: Sequence[ToolCallRecord]) -> TurnResult:
        """Run the loop with the provider in its seat: one that brings a loop of its own is held there."""
        ended: TurnResult | None = None
        try:
            async with seated(
                self.provider, self.state, deadline=self.deadline, cancellation=self.cancellation
            ) as self._seat:
                self._runner.tool_registry = self._registry()
                # The turn's token cuts off whatever is waited for, model calls and tools alike.
                with anyio.CancelScope() as scope:
                    forget = self.cancellation.on_cancel(threadsafe(scope.cancel))
                    try:
                        ended = await self._loop(pending)
                    finally:
                        forget()
        except Exception:
            if ended is None:
                raise
            _logger.exception("the turn has ended; its provider's loop could not be closed as it should")
        if ended is None:
            raise self.cancellation.error()
        return ended

    def _registry(self) -> Mapping[str, Tool[Any, Any]]:
        """Return the tools that can be run: the prompt's, and the native ones of a vendor's loop."""
        native = self._seat.native_tools
        return {**self._rendered.tool_registry, **native} if native else self._rendered.tool_registry

    async def _loop(self, pending: Sequence[ToolCallRecord]) -> TurnResult:
        if pending:
            await self._run_tools([ToolCall(p.call_id, p.name, p.arguments) for p in pending], resumed=True)
            if self._judges.has_feedback:
                await self._hear_feedback()
        last = self._record.last
        if last is not None and last.role == "assistant" and not last.tool_calls:
            ended = await self._finish(last.content)
            if ended is not None:
                return ended
        for _ in range(self.max_iterations):
            answer = await self._ask()
            if isinstance(answer, TurnResult):
                return answer
            if answer.calls:
                await self._run_tools(answer.calls)
                if self._judges.has_feedback:
                    await self._hear_feedback()
                continue
            ended = await self._finish(answer.text)
            if ended is not None:
                return ended
        asked = f"the turn asked the model {self.max_iterations} times and was not done"
        return self._end(self._ending("iteration_cap", details=asked))

    async def _finish(self, text: str) -> TurnResult | None:
        """End the turn with this answer; None if the answer has to go back to the model."""
        try:
            output = parse_output(text, self._rendered)
        except OutputParseError as error:
            return self._send_back(error)
        if not self._judges.has_completion:
            return self._completed(text, output)
        told: list[InnerMessage] = []
        typed = None if self._rendered.structured_output is None else output
        self._count_use()
        self._status("judging")
        refused = await self._judges.before_stop(text, typed, "stop", self._as_said(told))
        if self._judges.exhausted:
            return self._end(self._ending("incomplete", details=self._judges.last_reason))
        if refused is None:
            return self._completed(text, output)
        self._keep_said(told)
        checked = self.state.session[CompletionChecked].latest()
        if checked is not None:
            self._show(FeedbackGiven(checked.checker, checked.feedback[:_SUMMARY_CHARS], "caution"))
        return None

    def _who_judges(self, task: str, *, refusals_after: int) -> Judges:
        return Judges(
            prompt=self.prompt,
            session=self.state.session,
            adapter=self.adapter,
            containment=self.containment,
            deadline=self.deadline,
            budget_tracker=self.budget_tracker,
            run_context=self.run_context,
            filesystem=filesystem_of(self.state),
            cancellation=self.cancellation,
            clock=self.state.clock,
            task=task,
            evaluation_id=self._record.evaluation_id,
            refusals_after=refusals_after,
        )

    def _ended_as(self, kind: str) -> int:
        """Return where the turn last ended for that reason; whoever takes it up again may try as often."""
        mine = self._record.turn_id
        endings = placed(self.state.session, TurnEnded)
        return max((at for each, at in endings if (each.turn_id, each.error_kind) == (mine, kind)), default=0)

    async def _hear_feedback(self) -> None:
        """Let whoever looks at the work speak: behind the results, so that what was sent stays a prefix."""
        told: list[InnerMessage] = []
        self._count_use()
        self._status("judging")
        heard = len(self.state.session[Feedback].view())
        await self._judges.after_tools(self._as_said(told))
        self._keep_said(told)
        for each in self.state.session[Feedback].view()[heard:]:
            self._show(FeedbackGiven(each.provider_name, each.summary[:_SUMMARY_CHARS], each.severity))

    def _keep_said(self, told: Sequence[InnerMessage]) -> None:
        for each in told:
            self._record.keep(each)

    def _as_said(self, told: list[InnerMessage]) -> Callable[[str], Sequence[object]]:
        """Make what a judge says a message of the conversation, in one append with its judgement."""

        def record(text: str) -> Sequence[object]:
            told.append(self._record.message("user", text, self._record.reserve()))
            return tuple(told)

        return record

    def _send_back(self, error: OutputParseError) -> TurnResult | None:
        """Tell the model what is wrong with its answer, a few times at most."""
        told = sum(
            each.evaluation_id == self._record.evaluation_id
            and each.role == "user"
            and each.content.startswith(_REPAIR)
            and at > self._ended_as("output_parse")
            for each, at in placed(self.state.session, InnerMessage)
        )
        if told >= MAX_REPAIRS:
            return self._ended_by(error)
        self._record.add("user", f"{_REPAIR}\n{error}\n</invalid-answer>")
        return None

    def _completed(self, text: str, output: Any) -> TurnResult:
        """Record the answer as what the evaluation came to. Its records go to their slices."""
        session = self.state.session
        response: PromptResponse[Any] = PromptResponse(
            self.prompt.name, text, output if self._rendered.structured_output is not None else None
        )
        executed = PromptExecuted.of(
            response,
            adapter=self.provider.name,
            session_id=session.session_id,
            created_at=session.clock.now(),
            usage=self._record.usage,
            run_context=self.run_context,
        )
        self._count_use()
        self._log_safety_events()
        ended = TurnEnded(self._record.turn_id, TurnState.COMPLETED)
        session.dispatch_all((*response.typed_outputs(), executed, ended))
        self._show_ending(ended)
        return TurnResult(TurnState.COMPLETED, text, output=output)

    async def _ask(self) -> CollectedAnswer | TurnResult:
        """Call the model once, inside the containment, and record its answer."""
        if self.budget_tracker is not None:
            self._count_use()
            self.budget_tracker.check()
        record, compactor = self._record, self._compactor
        record.catch_up()
        compacted = await compactor.before_call(
            self.state.session, record.replayer, model=record.model, beside=self._tool_tokens
        )
        if compacted is not None:
            record.catch_up()  # Writing the summary may have taken a while.
        if compactor.pressure is not None:
            self._show(compactor.pressure)
        self._status("thinking", ahead=1)
        replayed = record.replayer.input()
        request = ModelRequest(
            replayed.items, self._rendered.tools, self._output_schema, record.answers_so_far
        )
        asked = _Asked(request, replayed)
        try:
            answer = await self._in_time(asked)
        except BaseException as error:
            self._log_usage(asked)
            if not isinstance(error, PromptEvaluationError | OSError):
                raise
            if not asked.collector.text and await self._is_shortened(error):
                return await self._ask()
            return self._provider_failed(asked.collector.text, error)
        compactor.settled()
        usage = record.usage_of(answer, asked.replayed, notes=asked.notes, pressure=compactor.pressure)
        # An answer that was cut off, filtered or refused is no answer: what was said is evidence.
        no_answer = error_of_stop(answer.stop, provider=record.provider, model=record.model)
        if no_answer is not None:
            self.state.session.dispatch(usage)
            return self._provider_failed(answer.text, no_answer)
        record.add_answer(answer, usage)
        self._show_usage()
        return answer

    async def _answered(self, asked: _Asked) -> CollectedAnswer:
        """Have a request answered once, with less if the shield wants that."""
        contained = current_call()
        if contained is not None:
            # The money is reserved as the shield's plan has it, so the request must be made that way.
            self._follow(asked, contained.plan)
        model = asked.request.model or self._record.model
        with model_span(self._record.provider, model, self.state.clock, asked.collector):
            try:
                # Closed whatever happens: an answer that nobody reads any more is not paid for.
                async with aclosing(self._seat.provider.stream(asked.request)) as events:
                    async for each in events:
                        asked.add(each)
                        if self.watch is not None and not asked.is_summary:
                            self._show_model(each)
            finally:
                if contained is not None:
                    report_usage(contained, asked.collector.usage)
        return asked.collector.answer()

    def _follow(self, asked: _Asked, plan: DegradePlan | None) -> None:
        """Send less, if the shield wants that, and note what became less."""
        asked.request, less = self._degraded(asked.request, plan)
        if less:
            asked.replayed = as_sent(asked.replayed, asked.request.items)
            asked.notes += less

    async def _is_shortened(self, error: Exception) -> bool:
        """Compact the conversation if that is what the provider complains about, and if it can be done."""
        if not isinstance(error, ModelCallError) or error.kind != "context_too_long":
            return False
        done = await self._compactor.after_overflow(self.state.session, self._record.replayer)
        return done is not None

    async def _summarise(self, prompt: str) -> str:
        """Have the model write a summary: a call like any other, contained, counted and recorded."""
        item = ReplayItem("user", prompt)
        request = ModelRequest((item,), answers_so_far=self._record.answers_so_far)
        asked = _Asked(request, Replay((item,), size_bytes=len(item.canonical())), is_summary=True)
        try:
            return (await self._in_time(asked)).text
        finally:
            self._log_usage(asked)

    def _log_usage(self, asked: _Asked) -> None:
        """Record what an attempt has used that brought no answer, or that wrote a summary."""
        if asked.collector.usage != _NOTHING_USED:
            answer = asked.collector.answer()
            self.state.session.dispatch(
                self._record.usage_of_summary(answer)
                if asked.is_summary
                else self._record.usage_of(answer, asked.replayed, is_cut_off=True, notes=asked.notes)
            )

    def _degraded(
        self, request: ModelRequest, plan: DegradePlan | None
    ) -> tuple[ModelRequest, tuple[str, ...]]:
        """Make a request with less, if the shield wants that, and say what became less."""
        return degraded(request, plan, model=self.provider.model)

    def _count_use(self) -> None:
        """Tell the tracker what the evaluation has used so far."""
        if self.budget_tracker is not None:
            self.budget_tracker.record_cumulative(
                self._record.evaluation_id, self._record.usage, self._record.cost_usd
            )

    async def _in_time(self, asked: _Asked) -> CollectedAnswer:
        """Make a model call, in as many attempts as it takes; the turn's deadline cuts it off."""
        self.cancellation.raise_if_cancelled()
        if self.deadline is None:
            return await self._in_attempts(asked)
        with anyio.move_on_after(max(self.deadline.remaining().total_seconds(), 0)):
            return await self._in_attempts(asked)
        raise DeadlineExceededError("the deadline passed while the model was answering")

    async def _in_attempts(self, asked: _Asked) -> CollectedAnswer:
        """Ask the model, and again after a failure that may pass, if the policy and the limits allow it."""
        waits = Waits(self.retry, self.state.clock)
        while True:
            try:
                return await self._attempt(asked)
            except ModelCallError as error:
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
        failed, containment = asked.outcome, self.containment
        token = self.cancellation
        if containment is not None and failed is not None:
            if failed.decision is not Decision.RETRY:
                raise not_tried_again(error, failed.stop_reason or failed.decision, failed.detail)
            if failed.next_plan is not None:
                delay_s = max(delay_s, failed.next_plan.delay_ms / 1000)
            asked.options = replace(self._options(asked), retry_of=failed)
            refused = containment.refuses_retry("llm", asked.options, delay_s)
            if refused is not None:
                raise not_tried_again(error, refused.reason or refused.decision, refused.detail)
            token = containment.cancellation_token
        self._log_usage(asked)
        asked.start_over(error)
        why = f"attempt {failures} failed: {error}"
        self._status("waiting", ahead=1, detail=f"{why}; the next one in {delay_s:.1f} s")
        await apause(self.state.clock, delay_s, token)

    async def _attempt(self, asked: _Asked) -> CollectedAnswer:
        """Ask the model once, inside the containment."""
        call = partial(self._answered, asked)
        if self.containment is None:
            return await call()
        outcome = asked.outcome = await self.containment.acall_llm(call, self._options(asked))
        if outcome.ok:
            assert outcome.value is not None
            return outcome.value
        if outcome.node.status == "error" and outcome.error is not None:
            raise outcome.error
        is_stopped = outcome.stop_reason in (StopReason.ABORTED, StopReason.TIMEOUT)
        if asked.error is not None and not outcome.was_dispatched and not is_stopped:
            raise not_tried_again(asked.error, outcome.stop_reason or outcome.decision, outcome.detail)
        raise self._halted(outcome)

    def _options(self, asked: _Asked) -> WrapOptions:
        """Say what is known of a model call before it is made: above all, what to reserve for it."""
        if asked.options is not None:
            return asked.options
        request = asked.request
        estimate = self.provider.estimate_usd(request)
        asked.options = WrapOptions(
            operation_name=self.provider.name,
            model=self.provider.model,
            # A provider that knows the price itself, nothing included, needs no price table.
            cost_estimate_hint=estimate or 0.0,
            estimate_degraded=lambda plan: self.provider.estimate_usd(self._degraded(request, plan)[0]),
            is_free=estimate == 0,
            input_tokens=-(-asked.replayed.size_bytes // 3) + self._tool_tokens,
            will_retry=self.retry is not None,
        )
        return asked.options

    def _halted(self, outcome: CallOutcome[Any]) -> _Halted:
        assert self.containment is not None
        kind = outcome.stop_reason or self.containment.stop_reason or "halted"
        return _Halted(str(kind), outcome.detail)

    def _show(self, seen: LiveEvent) -> None:
        """Let whoever watches see it. What goes wrong on a screen is no failure of the turn."""
        if self.watch is not None:
            try:
                self.watch(seen)
            except Exception:
                _logger.exception("whoever watches the turn failed; the turn goes on unwatched")
                self.watch = None

    def _status(self, status: Status, *, ahead: int = 0, detail: str = "") -> None:
        """Say what the turn does now; `ahead` is 1 while the next answer is being made."""
        self._is_waiting = status == "waiting"
        if self.watch is not None:
            last = self._record.last
            step = ahead + (0 if last is None else last.turn)
            self._show(StatusChanged(status, self._record.turn_id, step, detail))

    def _show_model(self, said: ModelEvent) -> None:
        if self._is_waiting:
            self._status("thinking", ahead=1)
        self._show(said)

    def _show_plan(self) -> None:
        """Show the agent's plan, if it is another one than was shown last."""
        if self.watch is None:
            return
        plan = self.state.session[Plan].latest()
        if plan is not None and plan != self._shown_plan:
            self._shown_plan = plan
            self._show(PlanChanged(tuple(PlanEntry(each.title, each.status) for each in plan.steps)))

    def _show_usage(self) -> None:
        if self.watch is None:
            return
        used, last = self._record.usage, self._record.last
        elapsed_s = self.state.clock.monotonic() - self._began
        steps = 0 if last is None else last.turn
        self._show(UsageChanged(steps, used.total or 0, self._record.cost_usd, elapsed_s))

    def _show_ending(self, ended: TurnEnded) -> None:
        self._status(status_of(ended.state))
        self._show(TurnFinished(ended.turn_id, ended.state, ended.error_kind, ended.next_actions))

    async def _run_tools(self, calls: Sequence[ToolCall], *, resumed: bool = False) -> None:
        context = replace(self._context, is_resume=True) if resumed else self._context
        self._expansions.clear()
        self._status("running_tools")
        await self._runner.aexecute_all(calls, context=context, record=self._recorder, around=self._one_call)
        for sequence in sorted(self._results):
            self._record.messages.append(self._results.pop(sequence))
        for call, sequence, required in self._expansions:
            self._open_sections(call, sequence, required)

    def _one_call(self, call: ToolCall, execute: Execute) -> Awaitable[ToolResult[Any]]:
        """Run a call, if the containment allows it."""
        run = self._traced_call if telemetry.is_on() else self._run_call
        working = run(call, execute) if self.containment is None else self._contained(call, execute, run)
        return working if self.watch is None else self._shown(call, working)

    async def _run_call(self, call: ToolCall, execute: Execute) -> ToolResult[Any]:
        """Run a call that is allowed. That it wants sections opened is no failure."""
        seat = self._seat
        try:
            if seat.vendor is None:
                return await execute()
            return await seat.run(call, execute, self._runner.tool_registry)
        except VisibilityExpansionRequired as required:
            self._expansions.append((call, self._places[call.id], required))
            return ToolResult.ok(message=str(required))

    async def _traced_call(self, call: ToolCall, execute: Execute) -> ToolResult[Any]:
        """Let telemetry watch a call that is allowed."""
        with tool_span(call, self.state.clock) as span:
            result = await self._run_call(call, execute)
            if not result.success:
                tool_failed(span, call)
            return result

    async def _shown(self, call: ToolCall, working: Awaitable[ToolResult[Any]]) -> ToolResult[Any]:
        """Let whoever watches see a call begin and end."""
        self._show(ToolCallBegan(call.id, call.name, call.arguments_json))
        began = self.state.clock.monotonic()
        success, summary = False, ""
        try:
            result = await working
            success, summary = result.success, result.message
        finally:
            # Also for one that was refused, held or cut off: a screen must not show it as running.
            elapsed_ms = 1000 * (self.state.clock.monotonic() - began)
            self._show(ToolCallFinished(call.id, call.name, success, summary[:_SUMMARY_CHARS], elapsed_ms))
        self._show_plan()
        return result

    async def _contained(
        self,
        call: ToolCall,
        execute: Execute,
        run: Callable[[ToolCall, Execute], Awaitable[ToolResult[Any]]],
    ) -> ToolResult[Any]:
        """Let the containment allow a tool call first. A refusal ends the turn."""
        assert self.containment is not None
        options = WrapOptions(
            operation_name=call.name, fingerprint=call.arguments_json, cost_of=_costs_nothing
        )

        def allowed() -> Awaitable[ToolResult[Any]]:
            return run(call, execute)

        outcome = await self.containment.acall_tool(allowed, options)
        if outcome.value is not None:
            return outcome.value
        if outcome.error is not None and not isinstance(outcome.error, CancelledByToken):
            raise outcome.error
        if outcome.error is not None and self.cancellation.is_cancelled:
            raise outcome.error
        raise self._halted(outcome)

    def _recorder(self, call: ToolCall) -> Callable[[ToolResult[Any]], Sequence[object]]:
        """Make the tool's message part of the append that ends the call."""
        place = self._places[call.id] = self._record.reserve()

        def record(result: ToolResult[Any]) -> Sequence[object]:
            # Asked again if the commit fails: the same place, another text.
            message = self._results[place] = self._record.result(call, result, place)
            return (message,)

        return record

    def _open_sections(self, call: ToolCall, place: int, required: VisibilityExpansionRequired) -> None:
        """Show the sections that a call asked for: in one append with the new text and the call's result."""
        done = sum(each.role == "system" for each in self._record.messages) - 1
        overrides = expand(required, expansions=done, prompt_name=self.prompt.name)
        self._render({each.path: each.visibility for each in overrides})
        opened = ", ".join(required.section_keys)
        answer = self._record.message(
            "tool", f"Open now: {opened}.", place, tool_call_id=call.id, tool_name=call.name
        )
        system = self._record.message("system", self._rendered.text, self._record.reserve())
        self.state.session.dispatch_all((*overrides, answer, system, self._as_rendered()))
        self._record.keep(answer)
        self._record.keep(system)

    # .. recording ..

    def _skip_logged_events(self) -> None:
        """Leave out what an earlier turn under the same containment has logged already."""
        if self.containment is not None:
            logged = self.state.session[SafetyEvent].all()
            self._told = sum(each in logged for each in self.containment.get_snapshot().events)

    def _log_safety_events(self) -> None:
        """Keep the containment's incidents as history, each once."""
        if self.containment is None:
            return
        events = self.containment.get_snapshot().events
        for each in events[self._told :]:
            self.state.session.dispatch(each)
        self._told = len(events)

    # .. endings ..

    def _ending(
        self,
        cause: BaseException | str,
        *,
        details: str = "",
        said: str = "",
        stop_reason: str | None = None,
    ) -> Ending:
        """Look the cause up in the table of endings."""
        stopped = self.cancellation.reason or (self.containment.stop_reason if self.containment else None)
        return ending_for(
            cause,
            details=details,
            said=said,
            stop_reason=stop_reason or stopped,
            session_id=self.state.session.session_id,
        )

    def _end(self, ending: Ending, error: Exception | None = None) -> TurnResult:
        self._count_use()
        self._log_safety_events()
        ended = end_turn(self.state.session, self._record.turn_id, ending)
        self._show_ending(ended)
        return TurnResult(ended.state, "", ended.error_kind, ended.details, ended.next_actions, error=error)

    def _ended_by(self, error: Exception, said: str = "") -> TurnResult:
        ending = self._ending(error, said=said)
        if ending.error_kind == "bug":
            _logger.exception("the turn failed", exc_info=error)
        return self._end(ending, error)

    def _provider_failed(self, said: str, error: Exception) -> TurnResult:
        if isinstance(error, PromptEvaluationError):
            return self._ended_by(error, said)
        details = f"{type(error).__name__}: {error}"
        return self._end(self._ending("provider_error", details=details, said=said), error)

    def _stopped_by_limits(self, halt: _Halted) -> TurnResult:
        assert self.containment is not None
        snapshot = self.containment.get_snapshot()
        spent = f"{snapshot.step_count} steps, ${snapshot.cost_usd_accumulated:.4f}"
        why = f": {halt.detail}" if halt.detail else ""
        details = f"the run's limits stopped it after {spent}{why}"
        return self._ended_by(CallRefused(details, stop_reason=halt.kind))


@dataclass(slots=True)
class _Asked:
    """A model call under way: what is sent, and what has come back from the newest attempt."""

    request: ModelRequest
    replayed: Replay
    is_summary: bool = False
    collector: Collector = field(default_factory=Collector)
    notes: tuple[str, ...] = ()
    """What was sent less of."""
    has_begun: bool = False
    """Whether text, thought or a call was seen: then the answer cannot be started over."""
    options: WrapOptions | None = None
    """What the containment is told of it."""
    outcome: CallOutcome[CollectedAnswer] | None = None
    """What the containment said of the newest attempt."""
    error: ModelCallError | None = None
    """What the attempt before failed with."""

    def add(self, said: ModelEvent) -> None:
        self.collector.add(said)
        self.has_begun = self.has_begun or not isinstance(said, UsageReported | Stopped)

    def start_over(self, error: ModelCallError) -> None:
        self.collector, self.error = Collector(), error


class _Halted(Exception):
    """The containment refused or stopped a call."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        self.detail = detail
        super().__init__(kind)


def _leaf(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    """Return an exception of that kind: this one, or one of those in the group that it is."""
    if isinstance(error, BaseExceptionGroup):
        found = (_leaf(each, kind) for each in error.exceptions)
        return next((each for each in found if each is not None), None)
    return error if isinstance(error, kind) else None


def _costs_nothing(result: object) -> float:
    return 0.0
