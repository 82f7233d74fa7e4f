"""The vendor's loop in turns of ours: its real CLI against a local server."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from treenail import Agent, Limits, Run, TurnState, tool
from treenail.containment import (
    CancellationToken,
    DegradePlan,
    EgressBoundaryHook,
    ExecutionContext,
    Price,
    ShieldPipeline,
    StaticPrices,
)
from treenail.conversation import (
    HistoryCompacted,
    InnerMessage,
    ProviderUsage,
    enable_inner_message_recording,
)
from treenail.errors import (
    CancelledByToken,
    DeadlineExceededError,
    ModelCallError,
    ThrottleError,
    UsageError,
)
from treenail.judges import FeedbackProviderConfig, FeedbackTrigger, FileOutputChecker, StaticFeedback
from treenail.prompt import MarkdownSection, Prompt, PromptTemplate, SectionVisibility
from treenail.providers import Provider, ProviderAdapter, TextDelta, VendorLoop, VendorSession
from treenail.providers.claude_agent import NAME, ClaudeAgent
from treenail.providers.claude_agent.process import Cli
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import Deadline, ExecutionState, ResourceRegistry, Session, TokenUsage
from treenail.testing.claude_wire import ClaudeWireServer, claude_environment
from treenail.testing.wire import Broken, Fault, Step, WireRequest
from treenail.tools import PermissionMode, Permissions, ToolInvoked, ToolStarted, answer_hold
from treenail.turns import InnerLoop, ModelAdapter, TurnResult, contain
from treenail.turns.vendor import vendor_session_of
from treenail.workspace import Filesystem
from treenail.workspace.host import HostFilesystem

Script = Sequence[Step] | Callable[[WireRequest], Step]


@dataclass
class Bench:
    server: ClaudeWireServer
    home: Path
    root: Path

    def agent(self, *native: str, **options: Any) -> ClaudeAgent:
        return ClaudeAgent(
            "claude-sonnet-4-5",
            native=native,
            base_url=self.server.url,
            api_key="sk-ant-very-secret-1",
            env=claude_environment(self.home),
            **options,
        )

    def sent(self) -> str:
        """The newest request's conversation, as text."""
        return json.dumps(self.server.requests[-1].body["messages"], ensure_ascii=False)

    def files(self) -> dict[str, str]:
        return {
            path.relative_to(self.root).as_posix(): path.read_text()
            for path in sorted(self.root.rglob("*"))
            if path.is_file()
        }


@contextmanager
def bench(where: Path, script: Script) -> Iterator[Bench]:
    home, root = where / "home", where / "files"
    home.mkdir(exist_ok=True)
    root.mkdir(exist_ok=True)
    with ClaudeWireServer(script) as server:
        yield Bench(server, home, root)
        assert [each.violations for each in server.requests if each.violations] == []


@tool
def write(path: str, text: str, *, context: Any) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return f"wrote {path}"


@tool
def spoil(path: str, *, context: Any) -> str:
    """Write a file and fail."""
    context.filesystem.write(path, "spoiled")
    raise RuntimeError("the pen broke")


@tool(effects="none")
def count(word: str) -> int:
    """Count letters."""
    return len(word)


WRITER = Agent("writer", instructions="You write.", tools=(write, spoil, count))


def results(run: Run) -> list[str]:
    return [each.content for each in run.messages if each.role == "tool"]


def commands_below(root: Path) -> list[str]:
    """What still runs for a workspace."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            cwd = os.readlink(entry / "cwd")
        except OSError:
            continue
        if cwd == str(root) or f" {root} " in line:
            found.append(line)
    return found


# --- a whole turn --------------------------------------------------------------------------------------


def test_a_turn_with_parallel_calls_failures_and_thoughts(tmp_path: Path) -> None:
    """Answers, thoughts, calls, results, usage: in the log as ever; a failed call leaves no trace."""
    usage = TokenUsage(input_tokens=1000, output_tokens=200, cached_tokens=600, reasoning_tokens=50)
    script = [
        Answer(
            "Counting.", [("count", {"word": "kelp"}), ("count", {"word": "abc"})], usage, thoughts=["Hm."]
        ),
        Answer("", [("write", {"path": "a.txt", "text": "x"}), ("spoil", {"path": "a.txt"})]),
        "All done.",
    ]
    with bench(tmp_path, script) as b:
        run = WRITER.run("Write", provider=b.agent(), workspace=b.root)
        # The thought went back as it was: the server would have refused a changed one.
        assert "Hm." in b.sent()
    assert (run.state, run.output) == (TurnState.COMPLETED, "All done."), run.result.details
    assert b.files() == {"a.txt": "x"}
    assert results(run) == ["4", "3", "wrote a.txt", "spoil failed: RuntimeError: the pen broke"]
    assert [(each.name, each.success) for each in run.tool_calls] == [
        ("count", True),
        ("count", True),
        ("write", True),
        ("spoil", False),
    ]
    session = run.execution_state.session
    first = session[ProviderUsage].all()[0]
    assert (first.provider, first.usage) == (NAME, usage)
    assert first.cost_usd is not None
    assert first.cost_usd > 0
    assert len(session[ProviderUsage].all()) == 3
    (begun,) = session[VendorSession].all()
    assert begun.provider == NAME
    assert not commands_below(b.root)


def test_what_the_model_says_is_seen_while_it_says_it(tmp_path: Path) -> None:
    """Pieces of text reach whoever watches before the answer is whole."""
    seen: list[str] = []
    held: list[bool] = []

    def watch(event: Any) -> None:
        if isinstance(event, TextDelta):
            seen.append(event.text)
            if event.text == "one\n":
                held.append(True)
                server[0].release()

    server: list[ClaudeWireServer] = []
    with bench(tmp_path, [Broken(Answer("one\ntwo\n"), "hang", after=1)]) as b:
        server.append(b.server)
        run = WRITER.run("Say", provider=b.agent(), workspace=b.root, watch=watch)
    assert run.output == "one\ntwo\n"
    assert (seen, held) == (["one\n", "two\n"], [True])


# --- native tools --------------------------------------------------------------------------------------


def test_native_tools_run_in_the_transaction(tmp_path: Path) -> None:
    """One that succeeds is kept, with a boundary of its own; one that fails leaves nothing."""
    root = tmp_path / "files"
    script = [
        Answer(
            "",
            [
                ("Bash", {"command": "echo hi > b.txt; echo said"}),
                ("write", {"path": "c.txt", "text": "c"}),
                ("Bash", {"command": "echo no > b.txt; mkdir d; touch d/e; exit 3"}),
                ("Write", {"file_path": str(root / "w.txt"), "content": "w"}),
            ],
        ),
        Answer(
            "",
            [
                ("Write", {"file_path": str(tmp_path / "outside.txt"), "content": "w"}),
                ("Bash", {"command": "echo late > late.txt", "run_in_background": True}),
                ("Write", {"content": 5}),
            ],
        ),
        "Done.",
    ]
    with bench(tmp_path, script) as b:
        run = WRITER.run("Work", provider=b.agent("Bash", "Write"), workspace=root, store=tmp_path / "r.db")
        with run:
            assert (run.state, run.output) == (TurnState.COMPLETED, "Done."), run.result.details
            assert b.files() == {"b.txt": "hi\n", "c.txt": "c", "w.txt": "w"}
            assert not (root / "d").exists()
            assert not (tmp_path / "outside.txt").exists()
            assert [each.success for each in run.tool_calls] == [True, True, False, True, False, False, False]
            assert results(run)[0] == "said"
            # The model knows what became of the failed one.
            assert "rolled back" in b.sent()
            assert "outside the workspace" in b.sent()
            session = run.execution_state.session
            starts = [each for each in session[ToolStarted].all() if each.tool_name == "bash"]
            assert [each.foreign for each in starts] == [True, True, True]
            assert [each.path for each in run.tool_calls[0].diff().changes] == ["b.txt"]


def test_what_a_command_leaves_running_ends_with_its_call(tmp_path: Path) -> None:
    """Nothing works on the tree when the call is kept, or when the next one begins."""

    @tool(effects="none")
    def running() -> list[str]:
        """List what still runs."""
        return [each for each in commands_below(tmp_path / "files") if "late.txt" in each]

    command = "(while :; do echo x >> late.txt; sleep 0.02; done) > /dev/null 2>&1 & echo begun"
    script = [Answer("", [("Bash", {"command": command}), ("running", {})]), "Done."]
    with bench(tmp_path, script) as b:
        agent = Agent("looker", tools=[running])
        run = agent.run("Work", provider=b.agent("Bash"), workspace=b.root)
    assert results(run) == ["begun", "[]"]
    assert [each.success for each in run.tool_calls] == [True, True]


def test_what_the_permissions_forbid_is_denied_to_native_tools(tmp_path: Path) -> None:
    """Through the hook before the tool, and recorded as any other refusal."""
    script = [Answer("", [("Bash", {"command": "echo hi > b.txt"}), ("count", {"word": "kelp"})]), "Pity."]
    with bench(tmp_path, script) as b:
        run = WRITER.run(
            "Work",
            provider=b.agent("Bash"),
            workspace=b.root,
            permissions=Permissions(PermissionMode.READ_ONLY),
        )
        assert "This run is read-only" in b.sent()
    assert run.output == "Pity."
    assert b.files() == {}
    assert [each.outcome for each in run.execution_state.session[ToolInvoked].all()] == ["denied", "ok"]


def test_a_call_that_waits_for_a_person_is_run_once_it_is_answered(tmp_path: Path) -> None:
    """The CLI does not wait with it: the run is held, and goes on from the answer."""
    script = [Answer("", [("write", {"path": "a.txt", "text": "x"})]), "Done."]
    asking = Permissions(PermissionMode.ASK)
    with bench(tmp_path, script) as b:
        store = tmp_path / "r.db"
        run = WRITER.run("Work", provider=b.agent(), workspace=b.root, store=store, permissions=asking)
        with run:
            assert run.state is TurnState.HELD
            assert b.files() == {}
            assert commands_below(b.root) == []
            answer_hold(run.execution_state.session, "call_1_1", approved=True)
        with WRITER.resume(store, run.id, provider=b.agent(), permissions=asking) as run:
            assert (run.state, run.output) == (TurnState.COMPLETED, "Done.")
        assert "wrote a.txt" in b.sent()
    assert b.files() == {"a.txt": "x"}


def test_native_tools_need_a_workspace_on_disk(tmp_path: Path) -> None:
    """The turn ends before anything was asked, and says what to do."""
    with bench(tmp_path, ["never"]) as b:
        run = WRITER.run("Work", provider=b.agent("Bash"))
        assert b.server.requests == ()
    assert run.state is TurnState.FAILED
    assert "not on disk" in run.result.details


def test_only_tools_that_can_be_held_in_a_transaction_are_taken() -> None:
    """A native tool that starts work of its own is refused when the provider is made."""
    with pytest.raises(UsageError, match="Task: no native tools"):
        ClaudeAgent("a-model", native=["Bash", "Task"])


# --- stops ---------------------------------------------------------------------------------------------


def test_a_cancellation_kills_a_native_tool_with_all_it_started(tmp_path: Path) -> None:
    """Nothing of it runs on when its files are put back, and the call was interrupted."""
    pipe = tmp_path / "begun"
    os.mkfifo(pipe)
    forever = "while :; do echo x >> late.txt; sleep 0.02; done"
    command = f"echo half > half.txt; ({forever}) & echo on > {pipe}; {forever}"
    token = CancellationToken()

    def stop_when_begun() -> None:
        with pipe.open("rb") as begun:
            begun.readline()
        token.cancel(detail="enough")

    with bench(tmp_path, [Answer("", [("Bash", {"command": command})])]) as b:
        filesystem = HostFilesystem(b.root)
        state = ExecutionState(Session(), ResourceRegistry.build({Filesystem: filesystem}))
        prompt: Prompt[Any] = Prompt(PromptTemplate(ns="t", key="t", sections=[]))
        stopper = threading.Thread(target=stop_when_begun)
        stopper.start()
        with pytest.raises(CancelledByToken, match="enough"):
            ModelAdapter(b.agent("Bash")).evaluate(prompt, state=state, request="Work", cancellation=token)
        stopper.join()
        assert commands_below(b.root) == []
        assert b.files() == {}
        (end,) = state.session[ToolInvoked].all()
        assert end.outcome == "interrupted"
        filesystem.close()


def test_a_deadline_ends_a_model_call(tmp_path: Path) -> None:
    """A model that does not go on is not waited for, and the CLI is gone."""
    with bench(tmp_path, [Broken(Answer("one\ntwo\n"), "hang", after=1)]) as b:
        filesystem = HostFilesystem(b.root)
        state = ExecutionState(Session(), ResourceRegistry.build({Filesystem: filesystem}))
        prompt: Prompt[Any] = Prompt(PromptTemplate(ns="t", key="t", sections=[]))
        deadline = Deadline(datetime.now(UTC) + timedelta(seconds=2))
        with pytest.raises(DeadlineExceededError):
            ModelAdapter(b.agent()).evaluate(prompt, state=state, request="Work", deadline=deadline)
        assert commands_below(b.root) == []
        filesystem.close()


def test_a_cancellation_hangs_up_on_the_model(tmp_path: Path) -> None:
    """The server sees it while the answer is under way, and the evaluation ends as cancelled."""
    token = CancellationToken()

    def watch(event: Any) -> None:
        if isinstance(event, TextDelta):
            token.cancel(detail="enough")

    with bench(tmp_path, [Broken(Answer("one\ntwo\n"), "hang", after=1)]) as b:
        session = Session()
        adapter = ModelAdapter(b.agent(), watch=watch)
        prompt: Prompt[Any] = Prompt(PromptTemplate(ns="t", key="t", sections=[]))
        with pytest.raises(Exception, match="enough"):
            adapter.evaluate(prompt, session=session, request="Work", cancellation=token)
        assert b.server.requests[0].wait_closed()


def test_a_ceiling_stops_the_loop_before_its_next_model_call(tmp_path: Path) -> None:
    """The vendor's loop waits for leave behind its tools: a call that is not allowed is not made."""
    script = [Answer("", [("write", {"path": f"{n}.txt", "text": "x"})]) for n in range(9)]
    with bench(tmp_path, script) as b:
        run = WRITER.run("Write", provider=b.agent(), workspace=b.root, limits=Limits(max_steps=4))
        assert len(b.server.requests) == 2
    assert run.state is TurnState.FAILED
    assert run.result.error_kind == "step_limit_exceeded"
    assert b.files() == {"0.txt": "x", "1.txt": "x"}


def test_money_is_counted_and_has_a_ceiling(tmp_path: Path) -> None:
    """What a call really cost is spent; the next one is not made when it might cost too much."""
    dear = TokenUsage(input_tokens=400_000, output_tokens=10_000)
    script = [Answer("", [("count", {"word": "kelp"})], dear), Answer("never")]
    with bench(tmp_path, script) as b:
        run = WRITER.run("Write", provider=b.agent(), workspace=b.root, limits=Limits(max_cost_usd=1.0))
        assert len(b.server.requests) == 1
    assert run.state is TurnState.FAILED
    (used,) = run.execution_state.session[ProviderUsage].all()
    assert used.cost_usd is not None
    assert used.cost_usd > 1.0


def test_usage_and_cost_are_the_vendors_numbers_by_the_table(tmp_path: Path) -> None:
    """Cached, written and thought tokens are counted apart, as on every other provider."""
    usage = TokenUsage(input_tokens=1000, output_tokens=100, cached_tokens=600, reasoning_tokens=40)
    prices = StaticPrices(
        {"claude-sonnet-4-5": Price(2.0, 10.0, cached_input_per_mtok=0.5, cache_write_per_mtok=4.0)}
    )
    with bench(tmp_path, [Answer("hi", usage=usage, cache_write_tokens=300)]) as b:
        run = WRITER.run("Write", provider=b.agent(prices=prices), workspace=b.root)
    (used,) = run.execution_state.session[ProviderUsage].all()
    assert used.usage == usage
    # 100 plain at 2, 600 cached at 0.5, 300 written at 4, 100 out at 10, per million.
    assert used.cost_usd == pytest.approx((100 * 2 + 600 * 0.5 + 300 * 4 + 100 * 10) / 1e6)


def contained(
    session: Session, provider: ClaudeAgent, root: Path, shield: ShieldPipeline, limits: Limits
) -> tuple[TurnResult, ExecutionContext]:
    """Run a turn under a shield."""
    context = contain(session, limits, pipeline=shield)
    with HostFilesystem(root) as files:
        state = ExecutionState(session, ResourceRegistry.build({Filesystem: files}))
        loop = InnerLoop(state, provider, WRITER.prompt, containment=context)
        return anyio.run(loop.run, "Work"), context


@pytest.mark.parametrize("allowed", [True, False])
def test_the_shield_decides_whether_the_vendors_loop_may_call_out(tmp_path: Path, allowed: bool) -> None:
    """A host that is not allowed is not called: no request arrives, and nothing is spent."""
    shield = ShieldPipeline(egress=EgressBoundaryHook(["127.0.0.1" if allowed else "api.example.com"]))
    with bench(tmp_path, ["done"]) as b:
        result, context = contained(Session(), b.agent(), b.root, shield, Limits(max_cost_usd=9.0))
        arrived = len(b.server.requests)
    if allowed:
        assert (result.state, arrived) == (TurnState.COMPLETED, 1)
        return
    assert (result.state, result.error_kind, arrived) == (TurnState.FAILED, "halted", 0)
    assert "not an allowed host" in result.details
    assert context.get_snapshot().cost_usd_accumulated == 0.0


def test_where_a_clouds_calls_go_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is no address to judge, and a shield that has to allow one lets nothing leave."""
    monkeypatch.delenv("ANTHROPIC_BASE_URL", raising=False)
    assert ClaudeAgent("m").endpoint == "https://api.anthropic.com"
    assert ClaudeAgent("m", base_url="http://gateway").endpoint == "http://gateway"
    assert ClaudeAgent("m", env={"CLAUDE_CODE_USE_BEDROCK": "1"}).endpoint == ""


def test_the_vendors_loop_makes_a_call_with_less_when_the_shield_wants_that(tmp_path: Path) -> None:
    """The second call goes to the smaller model with a shorter answer, is priced as that, and is noted."""

    class Smaller:
        calls = 0

        def before_llm_call(self, ctx: object) -> DegradePlan | None:
            self.calls += 1
            return DegradePlan(model="claude-haiku-4-5", max_output_tokens=512) if self.calls == 2 else None

    usage = TokenUsage(input_tokens=10_000, output_tokens=20)
    script = [
        Answer("", [("count", {"word": "kelp"})], usage),
        Answer("", [("count", {"word": "wrack"})], usage),
        Answer("done", usage=usage),
    ]
    session = Session()
    with bench(tmp_path, script) as b:
        shield = ShieldPipeline(Smaller())
        result, _ = contained(session, b.agent(), b.root, shield, Limits(max_cost_usd=100.0))
        bodies = [each.body for each in b.server.requests]
    assert result.state is TurnState.COMPLETED, result.details
    models = ["claude-sonnet-4-5", "claude-haiku-4-5", "claude-sonnet-4-5"]
    assert [each["model"] for each in bodies] == models
    assert bodies[1]["max_tokens"] == 512
    usages = session[ProviderUsage].all()
    assert [each.model for each in usages] == models
    dear, cheap, again = (each.cost_usd for each in usages)
    assert dear is not None
    assert cheap is not None
    assert cheap < dear == again
    assert usages[1].notes == (
        "degraded: claude-haiku-4-5 was asked instead of claude-sonnet-4-5",
        "degraded: at most 512 tokens were asked for",
    )
    assert [each.notes for each in (usages[0], usages[2])] == [(), ()]


# --- failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault("throttled"), "throttled"),
        (Fault("context_too_long"), "context_too_long"),
        (Fault("unauthorized"), "authentication"),
        (Fault("drop"), "connection"),
        (Broken(Answer("", [("count", {"word": "a"})]), "ended", after=1), "connection"),
    ],
    ids=["throttled", "context", "key", "drop", "cut"],
)
def test_failures_of_the_model_have_the_one_classification(tmp_path: Path, fault: Step, kind: str) -> None:
    """The CLI's own words are read; no tool of an answer that was cut is run; no secret is told."""
    with bench(tmp_path, [fault]) as b:
        agent = b.agent()

        async def call() -> None:
            loop = ModelAdapter(agent, retry=None)
            session = Session()
            try:
                prompt: Prompt[Any] = Prompt(PromptTemplate(ns="t", key="t", sections=[]))
                await loop.aevaluate(prompt, session=session, request="Go")
            finally:
                assert session[ToolInvoked].all() == ()

        with pytest.raises(ModelCallError) as raised:
            anyio.run(call)
        assert len(b.server.requests) == 1
    error = raised.value
    if isinstance(error, ThrottleError):
        assert kind == "throttled"
        assert error.retryable
    else:
        assert error.kind == kind
    assert "very-secret" not in str(error)


def test_what_fails_for_the_moment_is_tried_again(tmp_path: Path) -> None:
    """By our patience, not by the CLI's own; the conversation goes on where it was."""
    script: list[Step] = [
        Answer("", [("write", {"path": "a.txt", "text": "x"})]),
        Fault("server_error"),
        "There.",
    ]
    with bench(tmp_path, script) as b:
        session = Session()
        state = ExecutionState(
            session, ResourceRegistry.build({Filesystem: HostFilesystem(b.root)}), session.clock
        )
        prompt: Prompt[Any] = Prompt(
            PromptTemplate(
                ns="t", key="t", sections=[MarkdownSection("T", "Write.", key="t", tools=(write,))]
            )
        )
        response = ModelAdapter(b.agent()).evaluate(prompt, state=state, request="Go")
        assert len(b.server.requests) == 3
    assert response.text == "There."
    assert b.files() == {"a.txt": "x"}
    assert len(session[VendorSession].all()) == 1


# --- prompts -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ship:
    name: str
    masts: int


def test_a_structured_answer_is_asked_for_by_a_tool_and_repaired(tmp_path: Path) -> None:
    """An answer that does not fit goes back to the model with the reason; the next one is the output."""
    script = [
        Answer("", [("structured_output", {"name": "Kelp", "masts": "many"})]),
        Answer("", [("structured_output", {"name": "Kelp", "masts": 3})]),
    ]
    with bench(tmp_path, script) as b:
        session = Session()
        prompt = Prompt(
            PromptTemplate[Ship](
                ns="t", key="ship", sections=[MarkdownSection("Ship", "Name a ship.", key="ship")]
            )
        )
        adapter: ProviderAdapter = ModelAdapter(b.agent())
        response = adapter.evaluate(prompt, session=session)
        assert "masts" in b.sent()
        assert "invalid-answer" in b.sent()
    assert response.output == Ship("Kelp", 3)
    assert session[ToolInvoked].all() == ()
    assert [each.role for each in session[InnerMessage].all()][-3:] == ["assistant", "user", "assistant"]


def test_a_section_that_is_opened_reaches_the_model(tmp_path: Path) -> None:
    """The vendor's conversation goes on with the new prompt, and no other call is repeated."""
    script = [
        Answer(
            "",
            [
                ("write", {"path": "a.txt", "text": "x"}),
                ("open_sections", {"section_keys": ["secret"], "reason": "I want to know."}),
            ],
        ),
        "Now I know.",
    ]
    section = MarkdownSection(
        "Secret",
        "The secret is kelp.",
        key="secret",
        summary="There is a secret.",
        tools=(count,),
        visibility=SectionVisibility.SUMMARY,
    )
    with bench(tmp_path, script) as b:
        session = Session()
        state = ExecutionState(
            session, ResourceRegistry.build({Filesystem: HostFilesystem(b.root)}), session.clock
        )
        tools = MarkdownSection("Tools", "Write.", key="tools", tools=(write,))
        prompt: Prompt[Any] = Prompt(PromptTemplate(ns="t", key="t", sections=[tools, section]))
        response = ModelAdapter(b.agent()).evaluate(prompt, state=state, request="Go")
        system = [json.dumps(each.body["system"]) for each in b.server.requests]
        assert ["The secret is kelp." in each for each in system] == [False, True]
        assert "Open now: secret" in b.sent()
    assert response.text == "Now I know."
    assert b.files() == {"a.txt": "x"}
    assert len(session[VendorSession].all()) == 1


def test_feedback_and_a_refused_ending_reach_the_model(tmp_path: Path) -> None:
    """Feedback comes with the results of the calls that it is about; work that is not done goes on."""
    script = [
        Answer("", [("count", {"word": "kelp"})]),
        "Done.",
        Answer("", [("write", {"path": "out.txt", "text": "x"})]),
        "Really done.",
    ]
    reminder = FeedbackProviderConfig(StaticFeedback("Mind the tide."), FeedbackTrigger(every_n_calls=1))
    with bench(tmp_path, script) as b:
        session = Session()
        filesystem = HostFilesystem(b.root)
        state = ExecutionState(session, ResourceRegistry.build({Filesystem: filesystem}), session.clock)
        prompt: Prompt[Any] = Prompt(
            PromptTemplate(
                ns="t",
                key="t",
                sections=[MarkdownSection("T", "Write.", key="t", tools=(write, count))],
                feedback_providers=[reminder],
                task_completion_checker=FileOutputChecker(["out.txt"]),
            )
        )
        response = ModelAdapter(b.agent()).evaluate(prompt, state=state, request="Go")
        said = [json.dumps(each.body["messages"]) for each in b.server.requests]
        assert ["Mind the tide." in each for each in said] == [False, True, True, True]
        assert ["out.txt" in each for each in said] == [False, False, True, True]
        filesystem.close()
    assert response.text == "Really done."
    assert len(session[VendorSession].all()) == 1


# --- conversations -------------------------------------------------------------------------------------


def test_another_provider_takes_over_and_hands_back(tmp_path: Path) -> None:
    """What the vendor was not there for is told to it, in a conversation of its own."""
    store = tmp_path / "r.db"
    with bench(tmp_path, ["One.", "Three."]) as b:
        run = WRITER.run("Say one", provider=b.agent(), workspace=b.root, store=store)
        run.close()
        run = WRITER.run("Say two", store=store, run_id=run.id, provider=ScriptedProvider(["", "Two."]))
        run.close()
        run = WRITER.run("Say three", store=store, run_id=run.id, provider=b.agent())
        with run:
            assert run.output == "Three."
            assert len(run.execution_state.session[VendorSession].all()) == 2
        assert all(text in b.sent() for text in ("Say one", "One.", "Say two", "Two.", "Say three"))


def test_an_earlier_conversation_is_used_again(tmp_path: Path) -> None:
    """The next task in a run is told alone: the vendor has the rest. If it is gone, it is told anew."""
    store = tmp_path / "r.db"
    with bench(tmp_path, ["One.", "Two.", "Three."]) as b:
        run = WRITER.run("Say one", provider=b.agent(), workspace=b.root, store=store)
        run.close()
        run = WRITER.run("Say two", store=store, run_id=run.id, provider=b.agent())
        with run:
            assert len(run.execution_state.session[VendorSession].all()) == 1
        assert "began elsewhere" not in b.sent()
        assert all(text in b.sent() for text in ("Say one", "One.", "Say two"))
        for each in (b.home / ".claude" / "projects").rglob("*.jsonl"):
            each.unlink()
        run = WRITER.run("Say three", store=store, run_id=run.id, provider=b.agent())
        with run:
            assert run.output == "Three."
            assert len(run.execution_state.session[VendorSession].all()) == 2
        assert "began elsewhere" in b.sent()
        assert all(text in b.sent() for text in ("Say one", "One.", "Say two", "Two.", "Say three"))


def test_which_conversation_of_the_vendor_still_fits() -> None:
    """The newest, unless somebody else has answered since or the history was summarised."""
    session = Session()
    enable_inner_message_recording(session)

    def used(provider: str) -> ProviderUsage:
        return ProviderUsage(provider, "m", 1, TokenUsage())

    assert vendor_session_of(session, NAME) is None
    session.dispatch(VendorSession(NAME, "a"))
    session.dispatch(used(NAME))
    assert vendor_session_of(session, NAME) == "a"
    assert vendor_session_of(session, "other") is None
    session.dispatch(used("other"))
    assert vendor_session_of(session, NAME) is None
    session.dispatch(VendorSession(NAME, "b"))
    assert vendor_session_of(session, NAME) == "b"
    session.dispatch(HistoryCompacted("summary", 1, 2, "deterministic", "manual"))
    assert vendor_session_of(session, NAME) is None


# --- as a plain provider -------------------------------------------------------------------------------


def test_it_is_a_provider_and_a_vendor_loop() -> None:
    """It fits both seams, and does not show its key."""
    agent = ClaudeAgent("a-model", api_key="sk-ant-very-secret-1")
    assert isinstance(agent, Provider)
    assert isinstance(agent, VendorLoop)
    assert "secret" not in repr(agent)


def test_the_launcher_drops_secrets_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of the vendor's sees the CLI's environment, so that must not hold what is not its own."""
    monkeypatch.setenv("SOME_TOKEN", "t0ken")
    monkeypatch.setenv("OTHER_TOKEN", "t0ken")
    cli = Cli(ClaudeAgent("a-model", allow_env=["OTHER_TOKEN"])._settings, tmp_path)
    script = cli.launcher.read_text()
    cli.forget()
    assert "unset SOME_TOKEN" in script.splitlines()
    assert "OTHER_TOKEN" not in script
    assert "t0ken" not in script


def test_a_cli_that_ends_at_once_is_not_waited_for(tmp_path: Path) -> None:
    """The SDK would wait for a minute; the error names the program and has its last words."""
    program = tmp_path / "claude"
    program.write_text("#!/bin/sh\necho wrong program >&2\n")
    program.chmod(0o755)
    agent = ClaudeAgent("a-model", cli_path=program, api_key="a-key")
    run = Agent("worker", retry=None).run("Hi", provider=agent)
    assert run.state is TurnState.FAILED
    said = str(run.result.error)
    assert "it ended without an answer wrong program" in said
    assert str(program) in said
