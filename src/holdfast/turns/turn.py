"""The loop: ask the model, record its answer, run its tools, until it is done.

Every message is durable before the next step. A tool's message is logged in the same
append as the tool's effects, so that a conversation never claims what did not happen
and never forgets what did.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import anyio

from holdfast.clock import new_id
from holdfast.containment import (
    CallOutcome,
    CallUsage,
    CancellationToken,
    ExecutionContext,
    SafetyEvent,
    WrapOptions,
    current_call,
    estimate_tokens,
)
from holdfast.containment.threads import threadsafe
from holdfast.conversation.events import ProviderUsage
from holdfast.conversation.messages import (
    InnerMessage,
    ToolCallRecord,
    enable_inner_message_recording,
    get_inner_messages,
    get_pending_tool_calls,
)
from holdfast.conversation.replay import ORPHAN_TEXT, Replay, Replayer
from holdfast.errors import (
    CancelledByToken,
    ConversationNotFound,
    DeadlineExceededError,
    HoldRequired,
    ModelCallError,
    PromptEvaluationError,
    PromptMismatch,
    UsageError,
)
from holdfast.providers.base import ModelEvent, ModelRequest, Provider, UsageReported
from holdfast.providers.collect import CollectedAnswer, Collector
from holdfast.providers.errors import error_of_stop
from holdfast.state.budget import Deadline, TokenUsage
from holdfast.state.execution import ExecutionState
from holdfast.state.session import stamped
from holdfast.tools.boundaries import recover
from holdfast.tools.context import ToolContext
from holdfast.tools.policies import Permissions
from holdfast.tools.runner import ToolRunner
from holdfast.tools.tool import Tool, ToolCall, ToolResult
from holdfast.turns.states import PartialText, TurnEnded, TurnStarted, TurnState

_logger = logging.getLogger("holdfast.turns")

_NOTHING_USED = UsageReported(TokenUsage())

DEFAULT_MAX_ITERATIONS = 100
"""How often a turn asks the model at most, unless it is told otherwise."""

_LIMIT_ENDINGS = {"timeout": TurnState.TIMED_OUT, "aborted": TurnState.INTERRUPTED}
"""How a turn ends when the containment stops it; every other reason is a failure of its own kind."""

Watch = Callable[[ModelEvent], object]
"""Sees what the model says while it says it. It is for display only: nothing depends on it."""


@dataclass(slots=True)
class TurnResult:
    """What came of a turn, as the log tells it."""

    state: TurnState
    text: str
    error_kind: str | None = None
    details: str = ""
    next_actions: tuple[str, ...] = ()


@dataclass(slots=True)
class InnerLoop:
    """One turn of an agent on one session."""

    state: ExecutionState
    provider: Provider
    instructions: str
    tools: Mapping[str, Tool[Any, Any]]
    agent: str
    containment: ExecutionContext | None = None
    permissions: Permissions = field(default_factory=Permissions)
    deadline: Deadline | None = None
    max_iterations: int = DEFAULT_MAX_ITERATIONS
    watch: Watch | None = None
    cancellation: CancellationToken = field(default_factory=CancellationToken)
    workspace: str | None = None
    _turn_id: str = ""
    _evaluation_id: str = ""
    _sequence: int = 0
    _turn: int = 0
    _messages: list[InnerMessage] = field(default_factory=list)
    _told: int = 0
    _replayer: Replayer = field(default_factory=Replayer)
    _answers_so_far: int = 0
    _breaks_seen: int = 0
    _tool_tokens: int | None = None
    _results: dict[int, InnerMessage] = field(default_factory=dict)
    """The messages of the tools that are running, by their place."""

    # .. the two ways in ..

    async def run(self, task: str) -> TurnResult:
        """Take up a task: a new turn."""
        enable_inner_message_recording(self.state.session)
        recover(self.state)
        self._skip_logged_events()
        self._read_history()
        self._turn_id, self._evaluation_id = new_id().hex, new_id().hex
        with stamped(turn_id=self._turn_id):
            self._close_orphans()
            self.state.session.dispatch(
                TurnStarted(
                    self._turn_id,
                    self._evaluation_id,
                    self.agent,
                    task,
                    self.provider.name,
                    self.provider.model,
                    self.workspace,
                )
            )
            self._record("system", self.instructions)
            self._record("user", task)
            return await self._to_its_end(())

    async def resume(self) -> TurnResult:
        """Go on with the newest turn after a crash, an interrupt or an answered hold.

        What a crash cut off is rolled back first; finished tools are not run again, pending ones are.
        """
        session = self.state.session
        enable_inner_message_recording(session)
        recover(self.state)
        self._skip_logged_events()
        started = session[TurnStarted].latest()
        if started is None:
            raise ConversationNotFound("this session has no conversation to resume; run a task first")
        if started.agent != self.agent:
            raise PromptMismatch(
                f"this session belongs to the agent {started.agent!r}, not to {self.agent!r}; "
                "resume it with that one"
            )
        self._turn_id, self._evaluation_id = started.turn_id, started.evaluation_id
        self._read_history()
        self._messages = list(get_inner_messages(session, self._evaluation_id))
        self._sequence = max((each.sequence for each in self._messages), default=-1) + 1
        self._turn = max((each.turn for each in self._messages), default=0)
        pending = get_pending_tool_calls(session, self._evaluation_id)
        with stamped(turn_id=self._turn_id):
            # The process may have died before the request was recorded; the turn's start has it.
            for role, text in (("system", self.instructions), ("user", started.task))[len(self._messages) :]:
                self._record(role, text)
            last = self._messages[-1]
            if last.role == "assistant" and not last.tool_calls:
                return self._end(TurnState.COMPLETED)
            return await self._to_its_end(pending)

    # .. the loop ..

    async def _to_its_end(self, pending: Sequence[ToolCallRecord]) -> TurnResult:
        try:
            if pending:
                await self._run_tools(
                    [ToolCall(p.call_id, p.name, p.arguments) for p in pending], resumed=True
                )
            for _ in range(self.max_iterations):
                answer = await self._ask()
                if isinstance(answer, TurnResult):
                    return answer
                if not answer.calls:
                    return self._end(TurnState.COMPLETED)
                await self._run_tools(answer.calls)
            return self._end(
                TurnState.FAILED,
                "iteration_cap",
                f"the turn asked the model {self.max_iterations} times and was not done",
                ("look at the timeline for a loop", "resume with a higher max_iterations"),
            )
        except _Halted as halt:
            return self._stopped_by_limits(halt)
        except CancelledByToken as stopped:
            return self._end(TurnState.INTERRUPTED, "aborted", str(stopped), ("resume the session",))
        except DeadlineExceededError as error:
            return self._end(
                TurnState.TIMED_OUT, "deadline", str(error), ("resume the session with more time",)
            )
        except HoldRequired as hold:
            return self._end(
                TurnState.HELD,
                "hold",
                str(hold),
                (f"answer the call {hold.call_id}", "resume the session"),
            )
        except PromptEvaluationError as error:
            if error.phase == "tool":
                return self._end(
                    TurnState.TIMED_OUT, "deadline", str(error), ("resume the session with more time",)
                )
            return self._end(
                TurnState.FAILED, "provider_error", str(error), ("resume the session to try again",)
            )
        except (KeyboardInterrupt, anyio.get_cancelled_exc_class()):
            self._end(
                TurnState.INTERRUPTED, "interrupted", "the turn was interrupted", ("resume the session",)
            )
            raise

    async def _ask(self) -> CollectedAnswer | TurnResult:
        """Call the model once, inside the containment, and record its answer."""
        replayed = self._replayer.input()
        request = ModelRequest(
            replayed.items, tuple(self.tools.values()), answers_so_far=self._answers_so_far
        )
        collector = Collector()

        async def call() -> CollectedAnswer:
            # Closed whatever happens here: an answer that nobody reads any more is not paid for.
            try:
                async with aclosing(self.provider.stream(request)) as events:
                    async for each in events:
                        collector.add(each)
                        self._show(each)
            finally:
                _report(collector.usage)
            return collector.answer()

        try:
            await self._in_time(call, request, replayed)
        except BaseException as error:
            if collector.usage != _NOTHING_USED:
                self._record_usage(collector.answer(), replayed, is_cut_off=True)
            if not isinstance(error, PromptEvaluationError | OSError):
                raise
            return self._provider_failed(collector.text, error)
        answer = collector.answer()
        self._record_usage(answer, replayed)
        # An answer that was cut off, filtered or refused is no answer: what was said is evidence.
        no_answer = error_of_stop(answer.stop, provider=self.provider.name, model=self.provider.model)
        if no_answer is not None:
            return self._provider_failed(answer.text, no_answer)
        self._turn += 1
        self._answers_so_far += 1
        self._record(
            "assistant",
            answer.text,
            tool_calls=tuple(ToolCallRecord(c.id, c.name, c.arguments_json) for c in answer.calls),
            parts=answer.parts,
        )
        return answer

    async def _in_time(
        self, call: Callable[[], Awaitable[CollectedAnswer]], request: ModelRequest, replayed: Replay
    ) -> None:
        """Make a model call inside the containment; the turn's token and its deadline cut it off."""
        seconds = None if self.deadline is None else max(self.deadline.remaining().total_seconds(), 0)
        outcome: CallOutcome[CollectedAnswer] | None = None
        with anyio.move_on_after(seconds) as scope:
            forget = self.cancellation.on_cancel(threadsafe(scope.cancel))
            try:
                if self.containment is None:
                    await call()
                else:
                    options = self._options(request, replayed)
                    outcome = await self.containment.acall_llm(call, options)
            finally:
                forget()
        if scope.cancelled_caught:
            self.cancellation.raise_if_cancelled()
            raise DeadlineExceededError("the deadline passed while the model was answering")
        if outcome is None:
            return
        if not outcome.ok and outcome.node.status != "error":
            raise self._halted(outcome)
        if outcome.error is not None:
            raise outcome.error

    def _options(self, request: ModelRequest, replayed: Replay) -> WrapOptions:
        """Say what is known of a model call before it is made: above all, what to reserve for it."""
        estimate = self.provider.estimate_usd(request)
        return WrapOptions(
            operation_name=self.provider.name,
            model=self.provider.model,
            # A provider that knows the price itself, nothing included, needs no price table.
            cost_estimate_hint=estimate or 0.0,
            is_free=estimate == 0,
            input_tokens=-(-replayed.size_bytes // 3) + self._tokens_of_tools(),
        )

    def _tokens_of_tools(self) -> int:
        """Estimate what the tools' descriptions add to every request."""
        if self._tool_tokens is None:
            described = [
                (each.name, each.description, each.parameters_schema) for each in self.tools.values()
            ]
            self._tool_tokens = estimate_tokens(described) if described else 0
        return self._tool_tokens

    def _halted(self, outcome: CallOutcome[Any]) -> _Halted:
        assert self.containment is not None
        kind = outcome.stop_reason or self.containment.stop_reason or "halted"
        return _Halted(str(kind), outcome.detail)

    def _show(self, seen: ModelEvent) -> None:
        """Let whoever watches see it. What goes wrong on a screen is no failure of the turn."""
        if self.watch is not None:
            try:
                self.watch(seen)
            except Exception:
                _logger.exception("whoever watches the turn failed; the turn goes on unwatched")
                self.watch = None

    async def _run_tools(self, calls: Sequence[ToolCall], *, resumed: bool = False) -> None:
        runner = ToolRunner(
            self.state, self.tools, self.agent, adapter=self.provider.name, permissions=self.permissions
        )
        context = ToolContext(
            self.state, deadline=self.deadline, cancellation=self.cancellation, is_resume=resumed
        )
        around = None if self.containment is None else self._contained
        await runner.aexecute_all(calls, context=context, record=self._recorder, around=around)
        for sequence in sorted(self._results):
            self._keep(self._results.pop(sequence))

    async def _contained(
        self, call: ToolCall, execute: Callable[[], Awaitable[ToolResult[Any]]]
    ) -> ToolResult[Any]:
        """Let the containment allow a tool call first. A refusal ends the turn."""
        assert self.containment is not None
        options = WrapOptions(
            operation_name=call.name, fingerprint=call.arguments_json, cost_of=_costs_nothing
        )
        outcome = await self.containment.acall_tool(execute, options)
        if outcome.value is not None:
            return outcome.value
        if outcome.error is not None and not isinstance(outcome.error, CancelledByToken):
            raise outcome.error
        if outcome.error is not None and self.cancellation.is_cancelled:
            raise outcome.error
        raise self._halted(outcome)

    def _recorder(self, call: ToolCall) -> Callable[[ToolResult[Any]], Sequence[object]]:
        """Make the tool's message part of the append that ends the call."""
        sequence = self._sequence
        self._sequence += 1

        def record(result: ToolResult[Any]) -> Sequence[object]:
            # Asked again if the commit fails: the same place, another text.
            message = self._message(
                "tool", result.render(), sequence, tool_call_id=call.id, tool_name=call.name
            )
            self._results[sequence] = message
            return (message,)

        return record

    # .. recording ..

    def _message(self, role: Any, content: str, sequence: int, **fields: Any) -> InnerMessage:
        return InnerMessage(
            role=role,
            content=content,
            evaluation_id=self._evaluation_id,
            sequence=sequence,
            turn=self._turn,
            prompt_ns="agents",
            prompt_key=self.agent,
            created_at=self.state.clock.now(),
            **fields,
        )

    def _record(self, role: Any, content: str, **fields: Any) -> None:
        message = self._message(role, content, self._sequence, **fields)
        self._sequence += 1
        self.state.session.dispatch(message)
        self._keep(message)

    def _keep(self, message: InnerMessage) -> None:
        self._messages.append(message)
        self._replayer.add(self.state.session.head, message)

    def _read_history(self) -> None:
        """Fold what the session's log says already; from here on messages are added one by one."""
        self._replayer = Replayer(self.provider.model, self.provider.name)
        self._answers_so_far = 0
        for envelope, value in self.state.session.events():
            self._replayer.add(envelope.seq, value, envelope.type)
            self._answers_so_far += isinstance(value, InnerMessage) and value.role == "assistant"
        self._breaks_seen = len(self._replayer.input().breaks)

    def _close_orphans(self) -> None:
        """Answer for good the calls that an earlier turn left open: this turn does not go on with them."""
        messages = [
            each
            for each in self.state.session[InnerMessage].all()
            if each.role == "assistant" and each.tool_calls
        ]
        for call_id in self._replayer.waiting_calls:
            owner = next(m for m in reversed(messages) if any(c.call_id == call_id for c in m.tool_calls))
            closed = InnerMessage(
                role="tool",
                content=ORPHAN_TEXT,
                evaluation_id=owner.evaluation_id,
                sequence=1
                + max(m.sequence for m in get_inner_messages(self.state.session, owner.evaluation_id)),
                tool_call_id=call_id,
                tool_name=next(c.name for c in owner.tool_calls if c.call_id == call_id),
                turn=owner.turn,
                prompt_ns=owner.prompt_ns,
                prompt_key=owner.prompt_key,
                created_at=self.state.clock.now(),
            )
            self.state.session.dispatch(closed)
            self._replayer.add(self.state.session.head, closed)

    def _record_usage(self, answer: CollectedAnswer, replayed: Replay, *, is_cut_off: bool = False) -> None:
        """Keep what the call used, and whether its input extended the one before: a broken cache shows."""
        extends = len(replayed.breaks) == self._breaks_seen
        self._breaks_seen = len(replayed.breaks)
        self.state.session.dispatch(
            ProviderUsage(
                provider=self.provider.name,
                model=self.provider.model,
                call_index=self._answers_so_far + 1,
                usage=answer.usage,
                cost_usd=answer.cost_usd,
                stop_reason="cut_off" if is_cut_off else answer.stop,
                input_items=len(replayed.items),
                prefix_hash=replayed.prefix_hash(),
                extends_previous=extends,
                output_truncated=answer.stop == "length",
                notes=answer.notes,
            )
        )

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

    def _end(
        self, state: TurnState, kind: str | None = None, details: str = "", next_actions: tuple[str, ...] = ()
    ) -> TurnResult:
        self._log_safety_events()
        self.state.session.dispatch(TurnEnded(self._turn_id, state, kind, details, next_actions))
        last = self._messages[-1] if self._messages else None
        text = last.content if last is not None and last.role == "assistant" else ""
        return TurnResult(state, text if state is TurnState.COMPLETED else "", kind, details, next_actions)

    def _provider_failed(self, said: str, error: Exception) -> TurnResult:
        advice = ("resume the session to try again",)
        kind, details = "provider_error", f"{type(error).__name__}: {error}"
        # A failure that has used up the run's retries is the run's ending; until then it is the call's.
        is_last = self.containment is not None and self.containment.stop_reason == kind
        if isinstance(error, ModelCallError) and not is_last:
            kind = error.kind
        if not said:
            return self._end(TurnState.FAILED, kind, details, advice)
        self.state.session.dispatch(PartialText(self._turn_id, said))
        return self._end(TurnState.PARTIAL_FAILED, kind, details, advice)

    def _stopped_by_limits(self, halt: _Halted) -> TurnResult:
        assert self.containment is not None
        snapshot = self.containment.get_snapshot()
        state = _LIMIT_ENDINGS.get(halt.kind, TurnState.FAILED)
        spent = f"{snapshot.step_count} steps, ${snapshot.cost_usd_accumulated:.4f}"
        why = f": {halt.detail}" if halt.detail else ""
        return self._end(
            state,
            halt.kind,
            f"the run's limits stopped it after {spent}{why}",
            ("resume with higher limits",),
        )


class _Halted(Exception):
    """The containment refused or stopped a call."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        self.detail = detail
        super().__init__(kind)


def _report(reported: UsageReported) -> None:
    """Tell the containment what a model call has used so far: it counts, also if the answer is cut off.

    What nobody reports costs what was reserved.
    """
    call, usage = current_call(), reported.usage
    if call is None:
        return
    try:
        if reported.cost_usd is not None:
            call.report(cost_usd=reported.cost_usd)
        elif usage.total is not None:
            into, out = usage.input_tokens or 0, usage.output_tokens or 0
            cached = min(usage.cached_tokens or 0, into)
            call.report(
                usage=CallUsage(
                    input_tokens=into,
                    output_tokens=out,
                    cached_input_tokens=cached,
                    cache_write_tokens=min(reported.cache_write_tokens, into - cached),
                    reasoning_tokens=min(usage.reasoning_tokens or 0, out),
                )
            )
    except UsageError:
        _logger.exception("what the provider says that its call used cannot be counted")


def _costs_nothing(result: object) -> float:
    return 0.0
