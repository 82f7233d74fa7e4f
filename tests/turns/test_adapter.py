"""Evaluating a prompt: one call, a typed answer, everything in the session."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import anyio
import pytest

from treenail import Agent, Budget, Deadline, ExecutionState, Limits, ResourceRegistry, Session, tool
from treenail.containment import CancellationToken
from treenail.conversation import InnerMessage, enable_inner_message_recording, get_inner_messages
from treenail.errors import (
    BudgetExceededError,
    CallRefused,
    CancelledByToken,
    ConversationNotFound,
    DeadlineExceededError,
    ModelCallError,
    OutputParseError,
    PromptEvaluationError,
    PromptMismatch,
    UsageError,
)
from treenail.prompt import MarkdownSection, Prompt, PromptExecuted, PromptRendered, SectionVisibility
from treenail.providers import ModelEvent, ModelRequest, ProviderAdapter, TextDelta
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import BudgetTracker, Snapshot, TokenUsage
from treenail.testing import FakeClock
from treenail.tools import ToolContext, ToolInvoked
from treenail.turns import ModelAdapter, RetryPolicy, TurnEnded, TurnState, turn_state
from treenail.workspace import Filesystem, InMemoryFilesystem


@dataclass(frozen=True)
class Review:
    verdict: str
    points: tuple[str, ...] = ()


@dataclass(frozen=True)
class Topic:
    name: str


REVIEW = Prompt[Review](ns="tests", key="review", sections=[MarkdownSection("Task", template="Review it.")])
GOOD = '{"verdict": "fine", "points": ["short"]}'


def test_a_model_adapter_is_a_provider_adapter() -> None:
    assert isinstance(ModelAdapter(ScriptedProvider([])), ProviderAdapter)


def test_the_answer_is_a_value_of_the_prompts_type_and_goes_to_its_slice() -> None:
    session = Session()
    response = ModelAdapter(ScriptedProvider([GOOD])).evaluate(REVIEW, session=session)
    assert response.output == Review("fine", ("short",))
    assert response.text == GOOD
    assert session[Review].latest() == response.output
    executed = session[PromptExecuted].latest()
    assert executed is not None
    assert executed.usage == TokenUsage(input_tokens=100, output_tokens=20)
    assert turn_state(session) is TurnState.COMPLETED


def test_a_prompt_alone_numbers_its_messages_as_the_conversation_runs() -> None:
    """System 0, the first answer 1, its two results 2 and 3, the last answer 4; turns count answers."""

    @tool(effects="none")
    def look(place: str) -> str:
        """Look somewhere."""
        return f"nothing at {place}"

    prompt = Prompt(ns="t", key="k", sections=[MarkdownSection("Task", template="Look.", tools=[look])])
    script = ScriptedProvider([Answer("", [("look", {"place": "a"}), ("look", {"place": "b"})]), "done"])
    session = Session()
    assert ModelAdapter(script).evaluate(prompt, session=session).text == "done"
    messages = get_inner_messages(session)
    assert [(each.role, each.sequence, each.turn) for each in messages] == [
        ("system", 0, 0),
        ("assistant", 1, 1),
        ("tool", 2, 1),
        ("tool", 3, 1),
        ("assistant", 4, 2),
    ]
    assert {(each.prompt_ns, each.prompt_key) for each in messages} == {("t", "k")}


def test_evaluating_inside_an_event_loop_is_the_same() -> None:
    async def main() -> Review | None:
        return (await ModelAdapter(ScriptedProvider([GOOD])).aevaluate(REVIEW, session=Session())).output

    assert anyio.run(main) == Review("fine", ("short",))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_blocking_faces_refuse_to_block_an_event_loop(backend: str, tmp_path: Path) -> None:
    """Before anything is begun: the error names the face to use, the session and the store stay untouched."""
    session, store = Session(), tmp_path / "runs.db"
    agent, provider = Agent("a"), ScriptedProvider([GOOD])

    async def main() -> None:
        with pytest.raises(UsageError, match="aevaluate"):
            ModelAdapter(provider).evaluate(REVIEW, session=session)
        with pytest.raises(UsageError, match="arun"):
            agent.run("go", provider=provider, store=store)
        with pytest.raises(UsageError, match="aresume"):
            agent.resume(store, uuid4(), provider=provider)

    anyio.run(main, backend=backend)
    assert list(session.events()) == []
    assert not store.exists()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_turn_runs_under_either_event_loop(backend: str, tmp_path: Path) -> None:
    """Tools in threads and in the loop, limits, a durable store, and a resume."""

    @tool
    def write(path: str, *, context: ToolContext) -> str:
        """Write a file."""
        context.filesystem.write(path, "x")
        return "written"

    @tool(effects="none")
    async def wait() -> str:
        """Wait a moment."""
        await anyio.lowlevel.checkpoint()
        return "waited"

    agent = Agent("a", tools=(write, wait))
    script = [
        Answer("", [("wait", {}), ("write", {"path": "a.txt"})]),
        Answer("", error=RuntimeError("boom")),
    ]
    store, root = tmp_path / "runs.db", tmp_path / "files"
    root.mkdir()

    async def main() -> tuple[TurnState, TurnState, str]:
        limits = Limits(max_steps=20, timeout=60.0)
        given = {"store": store, "workspace": root, "limits": limits}
        with await agent.arun("go", provider=ScriptedProvider(script), **given) as first:
            pass
        ended = ScriptedProvider([script[0], "done"])
        with await agent.aresume(store, first.id, provider=ended, workspace=root, limits=limits) as second:
            return first.state, second.state, second.output

    assert anyio.run(main, backend=backend) == (TurnState.FAILED, TurnState.COMPLETED, "done")
    assert (root / "a.txt").read_text() == "x"


class _Hanging(ScriptedProvider):
    """Says one line and then nothing more."""

    was_closed = False

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        try:
            yield TextDelta("one\n")
            await anyio.sleep_forever()
        finally:
            self.was_closed = True


def test_a_deadline_cuts_an_answer_off_under_trio() -> None:
    async def main() -> None:
        hanging = _Hanging(())
        # On a clock that stands still, so that its time is that of the model call.
        deadline = Deadline.after(timedelta(seconds=0.2), clock=FakeClock())
        with pytest.raises(DeadlineExceededError):
            await ModelAdapter(hanging).aevaluate(REVIEW, session=Session(), deadline=deadline)
        assert hanging.was_closed

    anyio.run(main, backend="trio")


def test_a_request_is_the_persons_message() -> None:
    seen: list[list[str]] = []

    def look(request):
        seen.append([each.role for each in request.items])
        return "ok"

    prompt = Prompt(ns="t", key="k", sections=[MarkdownSection("Task", template="Answer.")])
    session = Session()
    ModelAdapter(ScriptedProvider([look])).evaluate(prompt, session=session, request="Why?")
    ModelAdapter(ScriptedProvider([look])).evaluate(prompt, session=Session())
    assert seen == [["system", "user"], ["system", "user"]], "a model is always asked something"
    assert [each.content for each in session[InnerMessage].all() if each.role == "user"] == ["Why?"]


def test_an_answer_that_does_not_fit_goes_back_and_may_be_put_right() -> None:
    told: list[str] = []

    def second(request):
        told.append(request.items[-1].text)
        return GOOD

    session = Session()
    script = ScriptedProvider(['{"verdict": 3}', second])
    assert ModelAdapter(script).evaluate(REVIEW, session=session).output == Review("fine", ("short",))
    assert "verdict" in told[0]
    assert turn_state(session) is TurnState.COMPLETED


def test_an_answer_that_never_fits_ends_the_turn_and_is_raised() -> None:
    session = Session()
    with pytest.raises(OutputParseError, match="verdict"):
        ModelAdapter(ScriptedProvider(["{}"], repeat=True)).evaluate(REVIEW, session=session)
    ended = session[TurnEnded].latest()
    assert ended is not None
    assert (ended.state, ended.error_kind) == (TurnState.PARTIAL_FAILED, "output_parse")
    assert sum(each.role == "assistant" for each in session[InnerMessage].all()) == 3
    assert session[Review].latest() is None


def test_who_resumes_a_turn_whose_answer_never_fitted_lets_the_model_try_again() -> None:
    """As often as the first time, and no oftener."""
    session = Session()
    with pytest.raises(OutputParseError):
        ModelAdapter(ScriptedProvider(["{}"], repeat=True)).evaluate(REVIEW, session=session)
    with pytest.raises(OutputParseError):
        ModelAdapter(ScriptedProvider(["{}"], repeat=True)).evaluate(REVIEW, session=session, resume=True)
    # The answer that was there goes back, and then one of two new ones.
    assert sum(each.role == "assistant" for each in session[InnerMessage].all()) == 3 + 2
    script = ScriptedProvider(["?", "?", "?", "?", "?", GOOD])
    answer = ModelAdapter(script).evaluate(REVIEW, session=session, resume=True)
    assert answer.output == Review("fine", ("short",))


def test_a_provider_without_schemas_is_told_the_schema_in_words() -> None:
    seen: list[object] = []

    def look(request):
        seen.append((request.output_schema, "JSON schema" in request.items[0].text))
        return GOOD

    class Native(ScriptedProvider):
        takes_output_schema = True

    ModelAdapter(ScriptedProvider([look])).evaluate(REVIEW, session=Session())
    ModelAdapter(Native([look])).evaluate(REVIEW, session=Session())
    assert seen[0] == (None, True)
    assert seen[1][0]["properties"].keys() == {"verdict", "points"}
    assert seen[1][1] is False


def sections() -> Prompt[str]:
    @tool(effects="none")
    def measure(what: str) -> str:
        """Measure something."""
        return f"{what}: 3"

    hidden = MarkdownSection(
        "Tools",
        key="tools",
        template="All about measuring.",
        summary="Measuring.",
        visibility=SectionVisibility.SUMMARY,
        tools=[measure],
    )
    return Prompt(ns="t", key="k", sections=[MarkdownSection("Task", template="Do it."), hidden])


def test_a_section_that_the_model_opens_brings_its_tools_within_the_same_evaluation() -> None:
    offered: list[list[str]] = []

    def then(request):
        offered.append([each.name for each in request.tools])
        return Answer("", [("measure", {"what": "it"})])

    opening = Answer("", [("open_sections", {"section_keys": ["tools"], "reason": "to measure"})])
    session = Session()
    response = ModelAdapter(ScriptedProvider([opening, then, "3"])).evaluate(sections(), session=session)
    assert response.text == "3"
    assert offered == [["measure"]]
    told = [each.content for each in session[InnerMessage].all() if each.role == "tool"]
    assert told == ["Open now: tools.", "it: 3"]
    assert len(session[PromptRendered].all()) == 2
    assert [each.success for each in session[ToolInvoked].all()] == [False, True]


def test_a_model_that_opens_sections_for_ever_is_stopped() -> None:
    """The eleventh expansion of one evaluation is one too many."""
    names = [f"s{number}" for number in range(12)]

    @tool(effects="none")
    def noop() -> str:
        """Do nothing."""
        return ""

    closed = [
        MarkdownSection(
            name,
            key=name,
            template="x",
            summary="y",
            visibility=SectionVisibility.SUMMARY,
            children=[MarkdownSection("Inner", key="inner", template="x")],
            tools=[] if number else [noop],
        )
        for number, name in enumerate(names)
    ]
    with_tools = [
        MarkdownSection(
            each.title,
            key=each.key,
            template="x",
            summary="y",
            visibility=SectionVisibility.SUMMARY,
            tools=[tool(effects="none", name=f"tool_{each.key}")(_named(each.key))],
        )
        for each in closed
    ]
    prompt = Prompt(ns="t", key="k", sections=with_tools)
    script = [Answer("", [("open_sections", {"section_keys": [name], "reason": "r"})]) for name in names]
    session = Session()
    with pytest.raises(PromptEvaluationError, match="limit is 10"):
        ModelAdapter(ScriptedProvider([*script, "done"])).evaluate(prompt, session=session)
    assert turn_state(session) is TurnState.FAILED


def _named(key: str):
    def act() -> str:
        return key

    act.__doc__ = f"Act on {key}."
    act.__name__ = f"tool_{key}"
    return act


def test_the_prompts_resources_live_as_long_as_the_evaluation() -> None:
    class Probe:
        closed = False

        def close(self) -> None:
            self.closed = True

    made: list[Probe] = []

    from treenail.state import Binding

    @tool(effects="none")
    def ask(*, context) -> str:
        """Ask the probe."""
        return f"closed: {context.resources.get(Probe).closed}"

    def provide(_: object) -> Probe:
        made.append(Probe())
        return made[-1]

    prompt = Prompt(
        ns="t",
        key="k",
        sections=[MarkdownSection("Task", template="Ask.", tools=[ask])],
        resources=ResourceRegistry.of(Binding(Probe, provide)),
    )
    session = Session()
    ModelAdapter(ScriptedProvider([Answer("", [("ask", {})]), "done"])).evaluate(prompt, session=session)
    assert [each.content for each in session[InnerMessage].all() if each.role == "tool"] == ["closed: False"]
    assert [each.closed for each in made] == [True]


def test_a_state_brings_its_workspace() -> None:
    @tool(effects="workspace")
    def write(*, context) -> str:
        """Write a file."""
        context.filesystem.write("a.txt", "x")
        return "ok"

    filesystem = InMemoryFilesystem()
    state = ExecutionState(Session(), ResourceRegistry.build({Filesystem: filesystem}))
    prompt = Prompt(ns="t", key="k", sections=[MarkdownSection("Task", template="Write.", tools=[write])])
    ModelAdapter(ScriptedProvider([Answer("", [("write", {})]), "done"])).evaluate(prompt, state=state)
    assert filesystem.read("a.txt").content == "x"


@pytest.mark.parametrize("given", ["both", "neither"])
def test_a_session_or_a_state_must_be_given(given: str) -> None:
    session = Session()
    parts = {"session": session, "state": ExecutionState(session)} if given == "both" else {}
    with pytest.raises(UsageError, match="one of the two"):
        ModelAdapter(ScriptedProvider(["x"])).evaluate(REVIEW, **parts)


def test_nothing_to_resume_and_another_prompt_are_told_apart() -> None:
    adapter = ModelAdapter(ScriptedProvider([GOOD]))
    with pytest.raises(ConversationNotFound):
        adapter.evaluate(REVIEW, session=Session(), resume=True)
    session = Session()
    adapter.evaluate(REVIEW, session=session)
    other = Prompt(ns="tests", key="other", sections=[MarkdownSection("Task", template="x")])
    with pytest.raises(PromptMismatch, match="tests:review"):
        adapter.evaluate(other, session=session, resume=True)


def test_resuming_what_is_complete_returns_its_answer_and_changes_nothing() -> None:
    session = Session()
    adapter = ModelAdapter(ScriptedProvider([GOOD]))
    adapter.evaluate(REVIEW, session=session)
    head = session.head
    assert adapter.evaluate(REVIEW, session=session, resume=True).output == Review("fine", ("short",))
    assert session.head == head


def test_a_conversation_from_a_snapshot_is_resumed_at_its_pending_call(tmp_path: Path) -> None:
    """The snapshot alone is enough: the finished tool is not run again, the pending one is."""
    ran: list[str] = []

    @tool(effects="workspace")
    def first() -> str:
        """First."""
        ran.append("first")
        return "1"

    @tool(effects="workspace")
    def second(*, context) -> str:
        """Second."""
        ran.append(f"second, resumed: {context.is_resume}")
        return "2"

    prompt = Prompt(
        ns="t", key="k", sections=[MarkdownSection("Task", template="Go.", tools=[first, second])]
    )
    script = ScriptedProvider([Answer("", [("first", {}), ("second", {})]), "done"])
    session = Session()
    kept: list[str] = []
    session.observe(InnerMessage, lambda old, new: kept.append(session.snapshot().to_json()))
    ModelAdapter(script).evaluate(prompt, session=session)
    ran.clear()

    def results(text: str) -> int:
        return text.count('"tool_name": "first"') + text.count('"tool_name":"first"')

    cut = next(each for each in kept if results(each))
    again = Session()
    enable_inner_message_recording(again)
    again.mutate().rollback(Snapshot.from_json(cut))
    assert ModelAdapter(script).evaluate(prompt, session=again, resume=True).text == "done"
    assert ran == ["second, resumed: True"]
    assert turn_state(again) is TurnState.COMPLETED


def test_the_budget_stops_before_the_call_that_would_go_on_spending() -> None:
    @tool(effects="none")
    def again() -> str:
        """Again."""
        return "again"

    prompt = Prompt(ns="t", key="k", sections=[MarkdownSection("Task", template="Go.", tools=[again])])
    session = Session()
    tracker = BudgetTracker(Budget(max_total_tokens=300))
    endless = ScriptedProvider([Answer("", [("again", {})])], repeat=True)
    with pytest.raises(BudgetExceededError):
        ModelAdapter(endless).evaluate(prompt, session=session, budget_tracker=tracker)
    assert tracker.consumed.total == 360, "three calls of 120 tokens: the third passed the ceiling"
    ended = session[TurnEnded].latest()
    assert ended is not None
    assert (ended.state, ended.error_kind) == (TurnState.FAILED, "budget_exceeded")


def test_the_limits_of_an_adapter_hold() -> None:
    @tool(effects="none")
    def again() -> str:
        """Again."""
        return "again"

    prompt = Prompt(ns="t", key="k", sections=[MarkdownSection("Task", template="Go.", tools=[again])])
    endless = ScriptedProvider([Answer("", [("again", {})])], repeat=True)
    with pytest.raises(CallRefused) as refused:
        ModelAdapter(endless, limits=Limits(max_steps=5)).evaluate(prompt, session=Session())
    assert refused.value.stop_reason == "step_limit_exceeded"


def test_a_passed_deadline_and_a_set_token_end_an_evaluation_in_their_own_ways() -> None:
    adapter = ModelAdapter(ScriptedProvider([GOOD]))
    late, stopped = Session(), Session()
    with pytest.raises(DeadlineExceededError):
        adapter.evaluate(REVIEW, session=late, deadline=Deadline.after(timedelta(seconds=-1)))
    token = CancellationToken()
    token.cancel(detail="enough")
    with pytest.raises(CancelledByToken):
        adapter.evaluate(REVIEW, session=stopped, cancellation=token)
    assert (turn_state(late), turn_state(stopped)) == (TurnState.TIMED_OUT, TurnState.INTERRUPTED)


def test_a_failure_for_the_moment_is_tried_again_and_none_means_never() -> None:
    calls: list[int] = []

    def flaky(request):
        calls.append(1)
        return Answer(error=ModelCallError("busy", retryable=True)) if len(calls) < 2 else GOOD

    class Flaky(ScriptedProvider):
        def estimate_usd(self, request):
            return 0.0

    quick = RetryPolicy(attempts=3, base_s=0.0)
    assert ModelAdapter(Flaky([flaky]), retry=quick).evaluate(REVIEW, session=Session()).output is not None
    assert len(calls) == 2
    calls.clear()
    with pytest.raises(ModelCallError, match="busy"):
        ModelAdapter(Flaky([flaky]), retry=None).evaluate(REVIEW, session=Session())
    assert len(calls) == 1


def test_an_error_that_nobody_foresaw_is_an_ending_and_is_raised() -> None:
    class Broken(ScriptedProvider):
        async def stream(self, request):
            raise ZeroDivisionError("oops")
            yield

    session = Session()
    with pytest.raises(ZeroDivisionError):
        ModelAdapter(Broken(["x"])).evaluate(REVIEW, session=session)
    ended = session[TurnEnded].latest()
    assert ended is not None
    assert (ended.state, ended.error_kind) == (TurnState.FAILED, "bug")
    assert "oops" in ended.details
