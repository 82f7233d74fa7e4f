"""The loop: ask the model, record its answer, run its tools, until it is done.

Every message is durable before the next step. A tool's message is logged in the same
append as the tool's effects, so that a conversation never claims what did not happen
and never forgets what did.

A turn is over when the model stops asking for tools, its answer fits the prompt's output
type, and no judge sends it back. Everything else that ends a turn has a place in
`treenail.turns.states`. How the model is asked stands in `model_calls.py`, the path of a tool
call in `tool_calls.py`, and what a screen is shown in `display.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import anyio

from treenail.clock import new_id
from treenail.containment import CancellationToken, ExecutionContext, SafetyEvent, threadsafe
from treenail.conversation import (
    CompactionSettings,
    ImagePart,
    InnerMessage,
    ProviderUsage,
    ToolCallRecord,
    get_pending_tool_calls,
)
from treenail.errors import (
    IllegalEndingError,
    LogError,
    ModelCallError,
    OutputParseError,
    PromptEvaluationError,
)
from treenail.judges import CompletionChecked, Feedback, JudgedRun, Judges, placed
from treenail.prompt import (
    Prompt,
    PromptExecuted,
    PromptRendered,
    PromptResponse,
    SectionPath,
    SectionVisibility,
    expand,
    parse_output,
    register_visibility,
)
from treenail.providers import Provider, ProviderAdapter, takes_output_schema, tool_tokens
from treenail.state import BudgetTracker, Deadline, ExecutionState, RunContext, stamped
from treenail.tools import (
    Heartbeat,
    Hook,
    PermissionMode,
    Permissions,
    Tool,
    ToolCall,
    ToolContext,
    ToolRunner,
    filesystem_of,
    recover,
    run_batch,
    turn_end_tool,
)
from treenail.turns.derivation import turn_state
from treenail.turns.display import TurnDisplay, Watch
from treenail.turns.endings import close_crashed_turn, end_turn
from treenail.turns.follow_ups import Inbox
from treenail.turns.frame import TurnFrame
from treenail.turns.ledger import newly_set
from treenail.turns.model_calls import ModelCaller, NoAnswer
from treenail.turns.openings import Opening, switched
from treenail.turns.record import TurnRecord
from treenail.turns.results import ResultRest, read_result
from treenail.turns.retries import RetryPolicy
from treenail.turns.signals import noted_signals
from treenail.turns.states import Ending, TurnEnded, TurnResumed, TurnState, ending_for
from treenail.turns.tool_calls import TurnCall, run_call
from treenail.turns.traces import TurnSpan, turn_span
from treenail.turns.vendor import Seat, seated
from treenail.workspace import writer_for_turn

_logger = logging.getLogger("treenail.turns")

DEFAULT_MAX_ITERATIONS = 100
"""How often a turn asks the model at most, unless it is told otherwise."""

MAX_REPAIRS = 2
"""How often an answer that does not fit the output type goes back to the model, until the turn ends."""

_DOWN = ("transient", "connection", "rate_limit", "quota_exhausted")
"""The kinds of failures that are the provider's, and that another one may not have."""

_REPAIR = "<invalid-answer>"
"""How the message begins that sends an answer back."""


@dataclass(slots=True)
class TurnResult:
    """How a turn ended, as the log tells it."""

    state: TurnState
    text: str
    error_kind: str | None = None
    details: str = ""
    next_actions: tuple[str, ...] = ()
    output: Any = None
    """The answer as the prompt's output type; the text itself for a prompt without one."""
    error: Exception | None = None
    """The exception that ended the turn, if there was one."""


@dataclass(slots=True)
class InnerLoop:
    """One turn of an agent on one session."""

    state: ExecutionState
    provider: Provider
    prompt: Prompt[Any]
    agent: str = ""
    """The agent's name in the log; the prompt's name if it is left out."""
    containment: ExecutionContext | None = None
    permissions: Permissions = field(default_factory=Permissions)
    deadline: Deadline | None = None
    budget_tracker: BudgetTracker | None = None
    max_iterations: int = DEFAULT_MAX_ITERATIONS
    retry: RetryPolicy | None = None
    """How failed model calls are retried; None for not at all."""
    watch: Watch | None = None
    cancellation: CancellationToken = field(default_factory=CancellationToken)
    workspace: str | None = None
    run_context: RunContext | None = None
    heartbeat: Heartbeat | None = None
    compaction: CompactionSettings = field(default_factory=CompactionSettings)
    """When the conversation is sent to the model as a summary, and how that is written."""
    inbox: Inbox | None = None
    """What a person says while the turn is under way."""
    fallback: list[Provider] = field(default_factory=list)
    """Who answers, one after the other, if the provider is down; the caller resumes with the next."""
    idle_timeout_s: float | None = None
    """How long a model's stream may send nothing."""
    deps: Any = None
    """The caller's own objects, which tools are given; they are never stored."""
    task: str | None = None
    """What the turn will be asked, for sources and extensions; None if it resumes."""
    model_settings: Mapping[str, str] | None = None
    """How the caller names the provider's model, if that has changed; it is kept in the log."""
    turn_end: Sequence[Hook] = ()
    """Commands that must exit 0 before the turn ends; each is a call of its own."""
    opening: Opening = field(default_factory=Opening)
    """What is logged and told before the first request."""
    adapter: ProviderAdapter | None = None
    """The adapter that evaluates for the judges, unless their configuration names another."""
    _frame: TurnFrame = field(init=False, repr=False)
    _model: ModelCaller = field(init=False, repr=False)
    _judges: Judges = field(init=False, repr=False)
    _safety_events_logged: int = 0
    _hook_failures: int = 0
    _refused_by: str = ""

    def __post_init__(self) -> None:
        self.agent = self.agent or self.prompt.name
        if self.budget_tracker is None:
            self.budget_tracker = self.state.resources.get(BudgetTracker, None)

    # .. the two ways in ..

    async def run(self, task: str = "", images: Sequence[ImagePart] = ()) -> TurnResult:
        """Take up a task, with pictures: a new turn. Without a task the prompt speaks alone."""
        with self._traced() as traced:
            record = self._prepare(traced)
            close_crashed_turn(self.state.session)
            record.new_turn()
            with stamped(turn_id=record.turn_id):
                session = self.state.session
                beside = (
                    *switched(session, self.provider, self.model_settings),
                    self._as_rendered(),
                    *newly_set(session, self.containment),
                    *self._opening_events(),
                )
                record.begin(self.agent, self._frame.rendered.text, task, self.workspace, beside, images)
                self._judges = self._make_judges(task, refusals_after=0)
                return await self._to_its_end((), traced)

    async def resume(self) -> TurnResult:
        """Resume the newest turn after a crash, an interrupt or an answered hold.

        What a crash cut off is rolled back first; finished tools are not run again, pending ones are.
        A turn that is completed already is not touched.
        """
        session = self.state.session
        with self._traced() as traced:
            record = self._prepare(traced)
            started = record.resume(self.agent, self._frame.rendered.text, self.workspace)
            if turn_state(session) is TurnState.COMPLETED:
                text = self._answer_text()
                traced.ended(TurnState.COMPLETED.value, None)
                return TurnResult(TurnState.COMPLETED, text, output=parse_output(text, self._frame.rendered))
            pending = get_pending_tool_calls(session, record.evaluation_id)
            close_crashed_turn(session)
            with stamped(turn_id=record.turn_id):
                resumed = TurnResumed(record.turn_id, self.provider.name, self.provider.model)
                switch = switched(session, self.provider, self.model_settings)
                session.dispatch_all((*switch, resumed, *newly_set(session, self.containment)))
                self._judges = self._make_judges(started.task, refusals_after=self._ended_as("incomplete"))
                return await self._to_its_end(pending, traced)

    def _traced(self) -> Any:
        provider = self.provider
        session_id = self.state.session.session_id
        return turn_span(self.agent, session_id, provider.name, provider.model, self.run_context)

    def _prepare(self, traced: TurnSpan) -> TurnRecord:
        session, provider, prompt = self.state.session, self.provider, self.prompt
        self.run_context = traced.run_context
        record = TurnRecord(session, provider.name, provider.model, prompt.ns, prompt.key)
        self._frame = TurnFrame(
            self.state,
            record,
            TurnDisplay(self.watch, session, record, self.state.clock.monotonic(), self.containment),
            self.containment,
            self.deadline,
            self.cancellation,
            Seat(provider),
        )
        self._model = ModelCaller(self._frame, provider, self.compaction, self.retry, self.idle_timeout_s)
        register_visibility(session)
        recover(self.state)
        self._skip_logged_events()
        self._render()
        return record

    def _render(self, opened: Mapping[str | SectionPath, SectionVisibility] | None = None) -> None:
        """Make the prompt's text and tools as the session wants them now, with some sections opened."""
        frame = self._frame
        rendered = self.prompt.render(self.state.session, visibility=opened, deadline=self.deadline)
        rendered = replace(rendered, tools=self._as_before(rendered.tools))
        if self.state.session[ResultRest].view():
            rendered = replace(rendered, tools=(*rendered.tools, read_result))
        schema = None if rendered.structured_output is None else rendered.structured_output.schema
        follows = takes_output_schema(self.provider, schema)
        frame.rendered = rendered if follows else rendered.with_output_format()
        frame.output_schema = schema if follows else None
        frame.tool_tokens = tool_tokens(rendered.tools)
        frame.runner = ToolRunner(
            self.state,
            self._registry(),
            self.agent,
            adapter=self.provider.name,
            policies=rendered.policies,
            permissions=self.permissions,
        )
        frame.context = ToolContext(
            self.state,
            deadline=self.deadline,
            budget_tracker=self.budget_tracker,
            cancellation=self.cancellation,
            run_context=self.run_context,
            prompt=self.prompt,
            rendered_prompt=frame.rendered,
            adapter=self.provider.name,
            heartbeat=self.heartbeat,
            output=None if self.watch is None else frame.display.call_output,
            deps=self.deps,
        )

    def _as_before(self, tools: tuple[Tool[Any, Any], ...]) -> tuple[Tool[Any, Any], ...]:
        """Return tools in the order that the log has, new ones last: what was sent stays a prefix."""
        before = [
            each.tools
            for each in self.state.session[PromptRendered].all()
            if (each.prompt_ns, each.prompt_key) == (self.prompt.ns, self.prompt.key)
        ]
        places = {name: place for place, name in enumerate(before[-1] if before else ())}
        return tuple(sorted(tools, key=lambda tool: places.get(tool.name, len(places))))

    def _registry(self) -> Mapping[str, Tool[Any, Any]]:
        """Return the tools that can be run: the prompt's, and the native ones of a vendor's loop."""
        return {**self._frame.rendered.tool_registry, **self._frame.seat.native_tools}

    def _as_rendered(self) -> PromptRendered:
        session = self.state.session
        return PromptRendered.of(
            self.prompt,
            self._frame.rendered,
            adapter=self.provider.name,
            session_id=session.session_id,
            created_at=session.clock.now(),
            run_context=self.run_context,
        )

    # .. the loop ..

    async def _to_its_end(self, pending: Sequence[ToolCallRecord], traced: TurnSpan) -> TurnResult:
        self._frame.display.plan()
        with noted_signals() as noted, writer_for_turn(filesystem_of(self.state)):
            try:
                result = await self._seated(pending)
            except (
                KeyboardInterrupt,
                SystemExit,
                BaseExceptionGroup,
                anyio.get_cancelled_exc_class(),
            ) as stopped:
                if isinstance(stopped, Exception):
                    result = self._ended_by(stopped)
                else:
                    # A person or the program wants to stop, so it is raised; a provider with tasks of its
                    # own wraps it in a group.
                    interrupt = _leaf(stopped, KeyboardInterrupt) or stopped
                    # It may come just after the turn's ending was logged, which stands.
                    with suppress(IllegalEndingError):
                        self._end(self._ending(interrupt, stop_reason=noted.reason))
                    if interrupt is not stopped:
                        raise interrupt from None
                    raise
            except LogError:
                raise  # The log cannot record an ending either.
            except Exception as error:  # noqa: BLE001  # every stop has an ending, also an unforeseen one
                result = self._ended_by(error)
        traced.ended(result.state.value, result.error_kind)
        return result

    async def _seated(self, pending: Sequence[ToolCallRecord]) -> TurnResult:
        """Run the loop with the provider in its seat: a provider with a loop of its own is held there."""
        ended: TurnResult | None = None
        frame = self._frame
        try:
            async with seated(
                self.provider, self.state, deadline=self.deadline, cancellation=self.cancellation
            ) as frame.seat:
                frame.runner.tool_registry = self._registry()
                # The turn's token cuts off whatever is awaited, model calls and tools alike.
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

    async def _loop(self, pending: Sequence[ToolCallRecord]) -> TurnResult:
        if pending:
            await self._run_tools([ToolCall(p.call_id, p.name, p.arguments) for p in pending], resumed=True)
        last = self._frame.record.last
        if last is not None and last.role == "assistant" and not last.tool_calls and not self._is_paused():
            ended = await self._finish(self._answer_text())
            if ended is not None:
                return ended
        self._tell_notices()
        for _ in range(self.max_iterations):
            self._check_budget()
            self._take_follow_ups()
            answer = await self._model.ask()
            if isinstance(answer, NoAnswer):
                return self._ended_by_model(answer.error, answer.said)
            if answer.calls:
                await self._run_tools(answer.calls)
                continue
            if answer.stop == "paused":
                continue  # The provider wants to be asked to continue what it has begun.
            ended = await self._finish(self._answer_text())
            if ended is not None:
                return ended
        asked = f"the turn asked the model {self.max_iterations} times and was not done"
        return self._end(self._ending("iteration_cap", details=asked))

    def _opening_events(self) -> tuple[object, ...]:
        """Take the events to log before the first request; those that belong to a notice wait for it."""
        if self.opening.notices:
            return ()
        events, self.opening.events = tuple(self.opening.events), []
        return events

    def _tell_notices(self) -> None:
        """Tell the model what it cannot know, in one append with the events that say so."""
        opening, self.opening = self.opening, Opening()
        record = self._frame.record
        said = [record.message("user", each, record.reserve()) for each in opening.notices]
        if opening.events or said:
            self.state.session.dispatch_all((*opening.events, *said))
            record.messages.extend(said)
        for each in opening.changes:
            self._frame.display.feedback("project", each, "caution")

    def _take_follow_ups(self) -> None:
        """Record what a person has said meanwhile: the next request shows it to the model."""
        said = () if self.inbox is None else self.inbox()
        if said:
            self._frame.record.add_follow_ups(said)

    def _is_paused(self) -> bool:
        """Say whether the newest answer is one that the provider has paused."""
        usage = self.state.session[ProviderUsage].latest()
        return usage is not None and usage.stop_reason == "paused"

    def _answer_text(self) -> str:
        """Return the newest answer: what the model said before it was paused belongs to it."""
        said: list[str] = []
        for each in reversed(self._frame.record.messages):
            if each.role != "assistant" or each.tool_calls:
                break
            said.append(each.content)
        return "".join(reversed(said))

    async def _finish(self, text: str) -> TurnResult | None:
        """End the turn with this answer; None if the answer has to go back to the model."""
        frame, judges = self._frame, self._judges
        try:
            output = parse_output(text, frame.rendered)
        except OutputParseError as error:
            return self._send_back(error)
        if self.turn_end and not await self._end_hooks_pass():
            return (
                self._end(self._ending("incomplete", details=self._refused_by)) if self._refused_by else None
            )
        if not judges.has_completion:
            return self._completed(text, output)
        said: list[InnerMessage] = []
        typed = None if frame.rendered.structured_output is None else output
        self._count_use()
        frame.display.status("judging")
        refused = await judges.before_stop(text, typed, "stop", self._as_messages(said))
        if judges.exhausted:
            return self._end(self._ending("incomplete", details=judges.last_reason))
        if refused is None:
            return self._completed(text, output)
        frame.record.messages.extend(said)
        checked = self.state.session[CompletionChecked].latest()
        if checked is not None:
            frame.display.feedback(checked.checker, checked.feedback, "caution")
        return None

    async def _end_hooks_pass(self) -> bool:
        """Run the hooks at the turn's end. One that fails is undone, and what it says goes to the model.

        A hook that has failed too often ends the turn; `_refused_by` is what it said.
        """
        record = self._frame.record
        for hook in self.turn_end:
            tool = turn_end_tool(hook)
            if self.permissions.mode_for(tool) is PermissionMode.READ_ONLY:
                continue
            runner = ToolRunner(self.state, {tool.name: tool}, self.agent, adapter=self.provider.name)
            call = ToolCall(f"hook_{new_id().hex[:12]}", tool.name)
            result = await runner.aexecute(call, context=self._frame.context)
            if not result.success:
                self._hook_failures += 1
                self._refused_by = result.message if self._hook_failures > MAX_REPAIRS else ""
                record.add("user", f"<hook-failed>\n{result.message}\n</hook-failed>")
                return False
        return True

    def _send_back(self, error: OutputParseError) -> TurnResult | None:
        """Tell the model what is wrong with its answer, a few times at most."""
        record = self._frame.record
        sent_back = sum(
            each.evaluation_id == record.evaluation_id
            and each.role == "user"
            and each.content.startswith(_REPAIR)
            and at > self._ended_as("output_parse")
            for each, at in placed(self.state.session, InnerMessage)
        )
        if sent_back >= MAX_REPAIRS:
            return self._ended_by(error)
        record.add("user", f"{_REPAIR}\n{error}\n</invalid-answer>")
        return None

    # .. tools ..

    async def _run_tools(self, requests: Sequence[ToolCall], *, resumed: bool = False) -> None:
        """Run the calls of one answer, then open the sections they asked for and hear the judges."""
        frame = self._frame
        frame.display.status("running_tools")
        calls = [TurnCall(each, frame, frame.record.reserve(), resumed) for each in requests]
        await run_batch(calls, run_call, is_free=lambda call: frame.runner.is_free(call.request))
        frame.record.messages += [each.message for each in calls if each.message is not None]
        for each in calls:
            if each.expansion is not None:
                self._open_sections(each)
        if [each for each in calls if each.rest is not None]:
            self._offer_the_rest()
        if self._judges.has_feedback:
            await self._hear_feedback()

    def _offer_the_rest(self) -> None:
        """Offer the tool that reads on in a long result, from the next request on."""
        frame = self._frame
        if read_result in frame.rendered.tools:
            return
        frame.rendered = replace(frame.rendered, tools=(*frame.rendered.tools, read_result))
        frame.tool_tokens = tool_tokens(frame.rendered.tools)
        frame.runner.tool_registry = self._registry()

    def _open_sections(self, call: TurnCall) -> None:
        """Open the sections that a call asked for: in one append with the new text and the call's result."""
        record, required = self._frame.record, call.expansion
        assert required is not None
        done = sum(each.role == "system" for each in record.messages) - 1
        overrides = expand(required, expansions=done, prompt_name=self.prompt.name)
        self._render({each.path: each.visibility for each in overrides})
        text = f"Open now: {', '.join(required.section_keys)}."
        answer = record.message(
            "tool", text, call.place, tool_call_id=call.request.id, tool_name=call.request.name
        )
        system = record.message("system", self._frame.rendered.text, record.reserve())
        self.state.session.dispatch_all((*overrides, answer, system, self._as_rendered()))
        record.messages.extend((answer, system))

    # .. judges ..

    def _make_judges(self, task: str, *, refusals_after: int) -> Judges:
        run = JudgedRun(
            prompt=self.prompt,
            session=self.state.session,
            adapter=self.adapter,
            containment=self.containment,
            deadline=self.deadline,
            budget_tracker=self.budget_tracker,
            run_context=self.run_context,
            filesystem=filesystem_of(self.state),
            cancellation=self.cancellation,
            task=task,
            given_evaluation_id=self._frame.record.evaluation_id,
        )
        return Judges(run, refusals_after=refusals_after)

    async def _hear_feedback(self) -> None:
        """Ask the judges: their feedback follows the results, so that what was sent stays a prefix."""
        said: list[InnerMessage] = []
        self._count_use()
        self._frame.display.status("judging")
        heard = len(self.state.session[Feedback].view())
        await self._judges.after_tools(self._as_messages(said))
        self._frame.record.messages.extend(said)
        for each in self.state.session[Feedback].view()[heard:]:
            self._frame.display.feedback(each.provider_name, each.summary, each.severity)

    def _as_messages(self, said: list[InnerMessage]) -> Callable[[str], Sequence[object]]:
        """Make what a judge says a message of the conversation, in one append with its judgement."""
        record = self._frame.record

        def made(text: str) -> Sequence[object]:
            said.append(record.message("user", text, record.reserve()))
            return tuple(said)

        return made

    # .. budget and incidents ..

    def _check_budget(self) -> None:
        if self.budget_tracker is not None:
            self._count_use()
            self.budget_tracker.check()

    def _count_use(self) -> None:
        """Tell the tracker what the evaluation has used so far."""
        record = self._frame.record
        if self.budget_tracker is not None:
            self.budget_tracker.record_cumulative(record.evaluation_id, record.usage, record.cost_usd)

    def _skip_logged_events(self) -> None:
        """Leave out the incidents that an earlier turn under the same containment has logged already."""
        if self.containment is not None:
            logged = self.state.session[SafetyEvent].all()
            known = self.containment.get_snapshot().events
            self._safety_events_logged = sum(each in logged for each in known)

    def _log_safety_events(self) -> None:
        """Keep the containment's incidents as history, each once."""
        if self.containment is None:
            return
        events = self.containment.get_snapshot().events
        for each in events[self._safety_events_logged :]:
            self.state.session.dispatch(each)
        self._safety_events_logged = len(events)

    # .. endings ..

    def _completed(self, text: str, output: Any) -> TurnResult:
        """Record the answer as the evaluation's outcome. Its records go to their slices."""
        session, frame = self.state.session, self._frame
        response: PromptResponse[Any] = PromptResponse(
            self.prompt.name, text, output if frame.rendered.structured_output is not None else None
        )
        executed = PromptExecuted.of(
            response,
            adapter=self.provider.name,
            session_id=session.session_id,
            created_at=session.clock.now(),
            usage=frame.record.usage,
            run_context=self.run_context,
        )
        self._count_use()
        self._log_safety_events()
        ended = TurnEnded(frame.record.turn_id, TurnState.COMPLETED)
        session.dispatch_all((*response.typed_outputs(), executed, ended))
        frame.display.ending(ended)
        return TurnResult(TurnState.COMPLETED, text, output=output)

    def _ended_as(self, kind: str) -> int:
        """Return where the turn last ended for that reason; after a resume it may try as often again."""
        mine = self._frame.record.turn_id
        endings = placed(self.state.session, TurnEnded)
        return max((at for each, at in endings if (each.turn_id, each.error_kind) == (mine, kind)), default=0)

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
        ended = end_turn(self.state.session, self._frame.record.turn_id, ending)
        self._frame.display.ending(ended)
        return TurnResult(ended.state, "", ended.error_kind, ended.details, ended.next_actions, error=error)

    def _ended_by(self, error: Exception, said: str = "") -> TurnResult:
        """End the turn with an error, and say which kind of ending it is."""
        ending = self._ending(error, said=said)
        if ending.error_kind == "bug":
            _logger.exception("the turn failed", exc_info=error)
        return self._end(ending, error)

    def _ended_by_model(self, error: Exception, said: str) -> TurnResult:
        if isinstance(error, PromptEvaluationError):
            return self._ended_by(error, said)
        details = f"{type(error).__name__}: {error}"
        return self._end(self._ending("provider_error", details=details, said=said), error)


def is_down(result: TurnResult) -> bool:
    """Say whether a turn ended because its provider could not be reached, or could not serve it."""
    error = result.error
    return isinstance(error, ModelCallError) and error.kind in _DOWN and error.stop_reason is None


def _leaf(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    """Return an exception of that kind: this one, or one of those in the group that it is."""
    if isinstance(error, BaseExceptionGroup):
        found = (_leaf(each, kind) for each in error.exceptions)
        return next((each for each in found if each is not None), None)
    return error if isinstance(error, kind) else None
