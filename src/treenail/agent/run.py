"""A run that has ended or waits, as its log shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, cast
from uuid import UUID

from treenail.agent.stored import RunStore, close_state
from treenail.conversation import branch_summary, get_inner_messages
from treenail.errors import RunNotCompletedError
from treenail.prompt import OutputT
from treenail.state import ExecutionState
from treenail.tools import boundaries, diff_calls, fork_at
from treenail.turns import TurnResult, TurnState, pasteable
from treenail.workspace import WorkspaceDiff


@dataclass(frozen=True, slots=True)
class RunToolCall:
    """One tool call of a run."""

    call_id: str
    name: str
    success: bool
    _state: ExecutionState = field(repr=False)

    def diff(self) -> WorkspaceDiff:
        """Return what the call changed in the files."""
        return diff_calls(self._state, self.call_id)


@dataclass(slots=True)
class Run(Generic[OutputT]):
    """A run that has ended or waits, as its log shows it."""

    result: TurnResult
    execution_state: ExecutionState
    store: RunStore | None = None
    is_typed: bool = False
    """Whether the agent declares an output type."""

    def __repr__(self) -> str:
        # Event loops put the result of a task into its repr: do not render everything that a run holds.
        return f"Run({self.id}, {self.state.value})"

    @property
    def id(self) -> UUID:
        """The id of the run's session."""
        return self.execution_state.session.session_id

    @property
    def state(self) -> TurnState:
        """How the run ended."""
        return self.result.state

    @property
    def text(self) -> str:
        """The text of the agent's answer; empty unless the run is completed."""
        return self.result.text

    @property
    def output(self) -> OutputT:
        """The agent's answer as its output type, or as text if it has none.

        A run that is not completed has none: asking for it raises `RunNotCompletedError`.
        """
        if self.state is not TurnState.COMPLETED:
            kind = f" ({self.result.error_kind})" if self.result.error_kind else ""
            raise RunNotCompletedError(
                f"the run {self.id} is {self.state.value}{kind}, so it has no output: "
                f"{self.result.details or 'it did not come to its end'}",
                next_actions=self.next_actions,
            )
        return cast(OutputT, self.result.output)

    @property
    def next_actions(self) -> tuple[str, ...]:
        """What a person can do next; commands name the store, so that they can be pasted."""
        return pasteable(self.result.next_actions, self.execution_state.session.log)

    @property
    def tool_calls(self) -> tuple[RunToolCall, ...]:
        """The run's tool calls, in order."""
        session = self.execution_state.session
        return tuple(
            RunToolCall(each.call_id, each.tool_name, each.success, self.execution_state)
            for each in boundaries(session)
        )

    @property
    def messages(self) -> tuple[Any, ...]:
        """The conversation."""
        return get_inner_messages(self.execution_state.session)

    def fork(self, *, before: RunToolCall, workspace: str | Path | None = None) -> ExecutionState:
        """Start over from before a call, in a new session with its own workspace.

        A summary tells the model of the new session what was tried in this one.
        """
        place = None if workspace is None else Path(workspace)
        return fork_at(
            self.execution_state, before.call_id, side="before", workspace=place, tell=branch_summary
        )

    def close(self) -> None:
        """Release the session's lease and the workspace's handles."""
        close_state(self.execution_state, self.store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
