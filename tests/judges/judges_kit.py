"""What the tests of judges share: an adapter that follows a script, and a run to be judged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from treenail.clock import Clock
from treenail.codec import FrozenDict
from treenail.containment import CancellationToken, ExecutionContext
from treenail.conversation import ProviderUsage
from treenail.prompt import MarkdownSection, Prompt, PromptResponse
from treenail.state import (
    Budget,
    BudgetTracker,
    Deadline,
    ExecutionState,
    RunContext,
    Session,
    TokenUsage,
    event,
)
from treenail.tools import ToolInvoked, ToolResult


@dataclass(frozen=True)
class Verdict:
    """What the judges of these tests answer."""

    good: bool
    why: str = ""


@event(name="tests.judges.Note")
@dataclass(frozen=True)
class Note:
    text: str


@dataclass
class Seen:
    """What an adapter was called with."""

    prompt: Prompt[Any]
    state: ExecutionState
    deadline: Deadline | None
    budget_tracker: BudgetTracker | None
    run_context: RunContext | None
    containment: ExecutionContext | None
    cancellation: CancellationToken | None
    used: int = 0

    @property
    def session(self) -> Session:
        return self.state.session

    def use(self, *, total: int, as_evaluation: str = "one") -> None:
        """Use so many tokens more, as an adapter does: the tracker is told the running sum."""
        self.session.dispatch(
            ProviderUsage("scripted", "m", 1, TokenUsage(input_tokens=total, output_tokens=0))
        )
        self.used += total
        if self.budget_tracker is not None:
            usage = TokenUsage(input_tokens=self.used, output_tokens=0)
            self.budget_tracker.record_cumulative(as_evaluation, usage)
            self.budget_tracker.check()


Step = Callable[[Seen], Awaitable[Any]]


@dataclass
class ScriptedAdapter:
    """A `ProviderAdapter` that answers with what a function says."""

    step: Step
    seen: list[Seen] = field(default_factory=list)
    name: str = "scripted"

    def evaluate(self, prompt: Prompt[Any], **given: Any) -> PromptResponse[Any]:
        raise AssertionError("judges evaluate in the event loop")

    async def aevaluate(
        self,
        prompt: Prompt[Any],
        *,
        session: Session | None = None,
        state: ExecutionState | None = None,
        request: str | None = None,
        resume: bool = False,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        budget_tracker: BudgetTracker | None = None,
        heartbeat: Any = None,
        run_context: RunContext | None = None,
        containment: ExecutionContext | None = None,
        cancellation: CancellationToken | None = None,
    ) -> PromptResponse[Any]:
        assert (session is None) != (state is None)
        working = state if state is not None else ExecutionState(session)  # type: ignore[arg-type]  # one is given
        seen = Seen(prompt, working, deadline, budget_tracker, run_context, containment, cancellation)
        self.seen.append(seen)
        output = await self.step(seen)
        return PromptResponse(prompt.name, str(output), output)


def answering(output: Any, *, total: int = 0) -> ScriptedAdapter:
    """An adapter that always answers this, and uses so many tokens each time."""

    async def step(seen: Seen) -> Any:
        if total:
            seen.use(total=total)
        return output

    return ScriptedAdapter(step)


def raising(error: BaseException) -> ScriptedAdapter:
    """An adapter that always fails."""

    async def step(seen: Seen) -> Any:
        raise error

    return ScriptedAdapter(step)


def judge_prompt(**more: Any) -> Prompt[Verdict]:
    return Prompt[Verdict](
        ns="tests", key="judge", sections=[MarkdownSection("Judge", template="Judge it.")], **more
    )


def work_prompt(**more: Any) -> Prompt[Any]:
    return Prompt(ns="tests", key="work", sections=[MarkdownSection("Work", template="Do it.")], **more)


def called(session: Session, count: int = 1, *, prompt: str = "work", name: str = "edit_file") -> None:
    """Let a run have made so many tool calls."""
    clock: Clock = session.clock
    for number in range(count):
        session.dispatch(
            ToolInvoked(
                prompt_name=prompt,
                adapter="scripted",
                name=name,
                params=FrozenDict({"path": f"file-{number}.py"}),
                result=ToolResult.ok(message=f"edited {number}"),
                session_id=session.session_id,
                created_at=clock.now(),
                call_id=f"call-{number}",
            )
        )


START = datetime(2026, 1, 1, tzinfo=UTC)
