"""Every exception that Treenail raises, as one tree.

An exception says whose fault it is: the caller's (`UsageError`), the data's or
the other side's (the named families), or a bug in us (anything that is not a
`TreenailError`). Its text says what happened, to what, and what to do next.

```
TreenailError
├── UsageError                        the caller asked for something impossible (also a ValueError)
│   ├── IllegalEndingError            a turn cannot end like that; nothing changed
│   └── IllegalMoveError              a table of states does not have that move; nothing was changed
├── CodecError
│   ├── EncodeError                   a value cannot be stored; names the path to the field
│   ├── DecodeError                   stored data does not fit its type; names the path
│   └── UnknownTypeError              a stored type name is not registered here
├── LogError
│   ├── StaleWriterError              the writer's lease was taken over, or its view of the log is old
│   ├── LeaseHeldError                another process or object is writing this session
│   ├── SessionNotFoundError          no such session in this log
│   ├── LogDamagedError               checksums or structure say that stored events are damaged
│   ├── LogVersionError               the file was written by a newer Treenail
│   └── LogBusyError                  the store stayed locked for longer than the time limit
├── ExecutionStateError               (also a RuntimeError)
│   ├── SnapshotMismatchError         a snapshot names what the present state does not have
│   ├── RestoreFailedError            a participant could not go back; the session needs attention
│   └── SnapshotRestoreError          a stored or serialised snapshot cannot be read
├── ReadOnlyError                     a read-only view was asked to change something
├── ResourceError
│   ├── UnboundResourceError          nothing is bound for that type
│   ├── DuplicateBindingError         two bindings for one type
│   ├── CircularDependencyError       providers that need each other; carries the cycle
│   ├── ResourceLifecycleError        asked for outside its lifetime: not open yet, closed, or no tool call
│   └── ProviderError                 a resource's provider failed; carries the cause
├── WorkspaceError
│   ├── PathEscapeError               a path would leave the workspace (also a PermissionError)
│   ├── WorkspaceConflictError        another program changed a file that was to be restored
│   ├── WorkspaceBusyError            another process writes to the workspace; says which, and since when
│   ├── StaleWorkspaceError           another process has become the writer; nothing more is written or undone
│   ├── WorkspaceElsewhereError       the run's files are on another machine; nothing was changed
│   ├── DepotError                    a file that travels is missing from its depot, or damaged there
│   └── ObjectStoreError              the private object store is missing something or is damaged
├── ToolError
│   ├── ToolValidationError           arguments do not fit the tool's parameters
│   ├── ToolDefinitionError           a tool cannot be built from that function
│   ├── ToolCommitError               the call ran, but could not be committed; it was rolled back
│   ├── SandboxError                  a command could not be confined, so it was not run
│   ├── McpError                      an MCP server could not be used; says which one, and why
│   ├── OutcomeUnknownError           the call acted outside, and nobody knows whether it took effect
│   └── HoldRequired                  the call waits for a person
├── PromptError                       a prompt is wrong in itself (also a ValueError)
│   ├── PromptValidationError         found when it was built or bound; names section and placeholder
│   └── PromptRenderError             found when it was rendered; names section and placeholder
├── PromptEvaluationError             an evaluation failed; carries prompt name and phase
│   ├── ConversationNotFound          nothing to resume (also a ValueError)
│   ├── ModelCallError                one call of a model failed; carries kind, retryable and partial text
│   │   └── ThrottleError             the provider said "slow down"
│   ├── NestedEvaluationError         a judge's evaluation failed; carries kind and cause
│   ├── OutputParseError              the model's answer does not fit the output type (also a ValueError)
│   └── PromptMismatch                the session belongs to another prompt (also a ValueError)
├── EngineError                       the engine that wakes workers refused or cannot be reached
├── VisibilityExpansionRequired       a section must be opened before the call can continue
├── RunNotCompletedError              the output of a run was asked for that did not come to its end
├── DeadlineExceededError             the deadline has passed
├── BudgetExceededError               the tokens or the money are spent
├── CallRefused                       containment refused a call; carries decision and reason
└── CancelledByToken                  a cancellation token was set while work was under way
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from datetime import timedelta


class TreenailError(Exception):
    """The root of every exception that Treenail raises on purpose."""


class UsageError(TreenailError, ValueError):
    """The caller asked for something impossible; nothing was changed."""


class IllegalEndingError(UsageError):
    """A turn cannot end like that: the table of endings or the log says no. Nothing was changed."""


class IllegalMoveError(UsageError):
    """A table of states does not have that move. Nothing was changed and nothing was recorded."""


# --- codec -----------------------------------------------------------------------------------------


class CodecError(TreenailError):
    """A value could not be turned into stored form, or back.

    `path` leads to the offending field, from the outside in: `Plan.steps[2].due`.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        self.path = path
        self.reason = message
        super().__init__(f"{path}: {message}" if path else message)


class EncodeError(CodecError):
    """A value cannot be stored. It was refused before anything changed."""


class DecodeError(CodecError):
    """Stored data does not fit the type it claims to be."""


class UnknownTypeError(CodecError):
    """A stored type name is not registered in this process. Loading never imports it."""

    def __init__(self, type_name: str, *, path: str = "") -> None:
        self.type_name = type_name
        super().__init__(
            f"the type {type_name!r} is not registered here; import the module that defines it "
            f"and register it (use it as session[T], or treenail.register_type) before loading",
            path=path,
        )


# --- log -------------------------------------------------------------------------------------------


class LogError(TreenailError):
    """The durable log refused or failed."""


class StaleWriterError(LogError):
    """An append was fenced off: the lease was taken over, or the expected sequence is old."""


class LeaseHeldError(LogError):
    """Another live process or object is writing this session.

    `owner` is its owner string, and `holder` says who that is: the process, its command and since when, or
    that it is this very program.
    """

    def __init__(self, message: str, *, owner: str | None = None, holder: str = "") -> None:
        self.owner = owner
        self.holder = holder or owner or "another writer"
        super().__init__(message)


class SessionNotFoundError(LogError):
    """There is no such session in this log."""


class LogDamagedError(LogError):
    """Stored events are damaged. Everything before `last_good_seq` is readable; nothing was deleted."""

    def __init__(self, message: str, *, last_good_seq: int = 0) -> None:
        self.last_good_seq = last_good_seq
        super().__init__(message)


class LogVersionError(LogError):
    """The file was written by a newer Treenail; it was left untouched."""


class LogBusyError(LogError):
    """The store stayed locked by others for longer than the configured wait."""


# --- state -----------------------------------------------------------------------------------------


class ExecutionStateError(TreenailError, RuntimeError):
    """Base class for errors of sessions, snapshots and restores."""


class SnapshotMismatchError(ExecutionStateError):
    """A snapshot does not match the structure of the present state; nothing was changed."""


class RestoreFailedError(ExecutionStateError):
    """A participant could not be restored.

    `failed` names the participants that could not go back. `undone` says whether the others
    were put back to where they were before the restore began; if it is false, the session
    needs attention.
    """

    def __init__(self, message: str, *, failed: Sequence[str] = (), undone: bool = True) -> None:
        self.failed = tuple(failed)
        self.undone = undone
        super().__init__(message)


class SnapshotRestoreError(ExecutionStateError):
    """A serialised or stored snapshot cannot be read; the present state was not changed."""


class ReadOnlyError(TreenailError, TypeError):
    """A read-only view was asked to change something."""


# --- resources -------------------------------------------------------------------------------------


class ResourceError(TreenailError):
    """A resource could not be resolved."""


class UnboundResourceError(ResourceError, LookupError):
    """Nothing is bound for that type."""


class DuplicateBindingError(ResourceError):
    """Two bindings for one type."""


class CircularDependencyError(ResourceError):
    """Providers that need each other. `cycle` lists the types in order."""

    def __init__(self, cycle: Sequence[type[object]]) -> None:
        self.cycle = tuple(cycle)
        super().__init__("resources need each other: " + " -> ".join(t.__qualname__ for t in self.cycle))


class ResourceLifecycleError(ResourceError, RuntimeError):
    """A resource was asked for outside of its life: not opened yet, closed already, or no tool call."""


class ProviderError(ResourceError):
    """A resource's provider failed; the cause is chained."""


# --- workspace -------------------------------------------------------------------------------------


class WorkspaceError(TreenailError):
    """A workspace operation failed for a reason that is not an ordinary OSError."""


class PathEscapeError(WorkspaceError, PermissionError):
    """A path would leave the workspace: by `..`, an absolute path, a link or a race."""


class WorkspaceConflictError(WorkspaceError):
    """Somebody else changed paths that were to be restored; their content was left alone."""

    def __init__(self, message: str, *, paths: Sequence[str] = ()) -> None:
        self.paths = tuple(paths)
        super().__init__(message)


class WorkspaceBusyError(WorkspaceError):
    """Another living process writes to the workspace, so this one may not. Nothing was changed."""

    def __init__(self, message: str, *, owner: str = "", since: str = "") -> None:
        self.owner = owner
        self.since = since
        super().__init__(message)


class StaleWorkspaceError(WorkspaceError):
    """Another process has become the writer of the workspace: this one changes and undoes nothing more."""


class WorkspaceElsewhereError(WorkspaceError):
    """The run's log can be opened here, but its files are on another machine. Nothing was changed."""


class DepotError(WorkspaceError):
    """A depot lacks an object that a run needs, holds a damaged one, or cannot be reached."""


class ObjectStoreError(WorkspaceError):
    """The private object store lacks an object, or holds a damaged one."""


# --- tools -----------------------------------------------------------------------------------------


class ToolError(TreenailError):
    """Something is wrong with a tool or with a call of it."""


class ToolValidationError(ToolError, ValueError):
    """A call's arguments do not fit the tool's parameters. The text is written for the model."""


class ToolDefinitionError(ToolError, TypeError):
    """A tool cannot be built from that function or description."""


class ToolCommitError(ToolError):
    """The handler succeeded, but the call could not be committed, so it was rolled back."""


class SandboxError(ToolError):
    """A command could not be confined, so it was not run."""


class McpError(ToolError):
    """An MCP server could not be used: it did not start, did not answer, or answered nonsense."""


class OutcomeUnknownError(ToolError):
    """The call acted outside and was cut off there: nobody knows whether it took effect."""


class HoldRequired(ToolError):
    """The call waits for a person. The hold is durable; answering it resumes that call alone."""

    def __init__(self, call_id: str, tool_name: str, *, reason: str = "", is_question: bool = False) -> None:
        self.call_id = call_id
        self.tool_name = tool_name
        self.reason = reason
        self.is_question = is_question
        super().__init__(
            f"{tool_name} (call {call_id}) waits for a person" + (f": {reason}" if reason else "")
        )


# --- prompts ---------------------------------------------------------------------------------------


class PromptError(TreenailError, ValueError):
    """A prompt is wrong in itself. `section_path` and `placeholder` say where, if it has a place."""

    def __init__(
        self, message: str, *, section_path: Sequence[str] = (), placeholder: str | None = None
    ) -> None:
        self.section_path = tuple(section_path)
        self.placeholder = placeholder
        where = f"section {'.'.join(self.section_path)!r}: " if self.section_path else ""
        super().__init__(where + message)


class PromptValidationError(PromptError):
    """A prompt cannot be built, or cannot take what was bound to it; nothing was changed."""


class PromptRenderError(PromptError):
    """A prompt cannot be rendered with what is bound to it."""


# --- evaluation ------------------------------------------------------------------------------------

Phase = Literal["request", "response", "tool", "budget"]


class PromptEvaluationError(TreenailError):
    """An evaluation failed. `phase` says where: request, response, tool or budget."""

    def __init__(
        self,
        message: str,
        *,
        prompt_name: str = "",
        phase: Phase = "request",
        provider_payload: Mapping[str, object] | None = None,
    ) -> None:
        self.message = message
        self.prompt_name = prompt_name
        self.phase = phase
        self.provider_payload = provider_payload
        super().__init__(message)


class ConversationNotFound(PromptEvaluationError, ValueError):
    """There is no conversation to resume in this session."""


class ModelCallError(PromptEvaluationError):
    """One call of a model failed.

    `kind` says how, the same for every provider: `transient`, `connection`, `context_too_long`,
    `content_filtered`, `truncated`, `refused`, `broken_off`, `authentication` or `bad_request` (a
    `ThrottleError` has kinds of its own). `retryable` says whether the same call may go well later.
    `partial` is what the model had said by then: evidence, not an answer. `stop_reason` says why the run's
    limits let no other attempt be made, if one was wanted.
    """

    stop_reason: str | None = None

    def __init__(
        self,
        message: str,
        *,
        prompt_name: str = "",
        phase: Phase = "request",
        kind: str = "transient",
        retryable: bool = False,
        retry_after: timedelta | None = None,
        status: int | None = None,
        partial: str = "",
        attempts: int = 1,
    ) -> None:
        self.kind = kind
        self.retryable = retryable
        self.retry_after = retry_after
        self.status = status
        self.partial = partial
        self.attempts = attempts
        super().__init__(message, prompt_name=prompt_name, phase=phase)


class ThrottleError(ModelCallError):
    """The provider asked us to slow down."""

    def __init__(
        self,
        message: str,
        *,
        prompt_name: str = "",
        phase: Phase = "request",
        kind: Literal["rate_limit", "quota_exhausted", "timeout", "unknown"] = "unknown",
        retry_after: timedelta | None = None,
        attempts: int = 1,
        retry_safe: bool = True,
        status: int | None = None,
        partial: str = "",
    ) -> None:
        self.retry_safe = retry_safe
        super().__init__(
            message,
            prompt_name=prompt_name,
            phase=phase,
            kind=kind,
            retryable=retry_safe and kind != "quota_exhausted",
            retry_after=retry_after,
            status=status,
            partial=partial,
            attempts=attempts,
        )


class NestedEvaluationError(PromptEvaluationError):
    """An evaluation inside a run failed. The run that it looks at was not harmed.

    `kind` says how: `throttled`, `output` (the answer does not fit), `evaluation`, `refused` (by the
    run's limits), `depth` (too many evaluations inside each other) or `crashed`. The cause is chained.
    """

    def __init__(self, message: str, *, prompt_name: str = "", kind: str = "evaluation") -> None:
        self.kind = kind
        super().__init__(message, prompt_name=prompt_name, phase="request")


class OutputParseError(PromptEvaluationError, ValueError):
    """The model's answer does not fit the output type. The text can be shown to the model as it is."""

    def __init__(
        self,
        message: str,
        dataclass_type: type | None = None,
        *,
        prompt_name: str = "",
        raw_text: str = "",
    ) -> None:
        self.dataclass_type = dataclass_type
        self.raw_text = raw_text
        super().__init__(message, prompt_name=prompt_name, phase="response")


class PromptMismatch(PromptEvaluationError, ValueError):
    """The conversation in this session belongs to another prompt."""


class EngineError(TreenailError):
    """The engine that wakes workers refused, is not installed or cannot be reached. No run is lost by it."""


class VisibilityExpansionRequired(TreenailError):
    """A summarised section must be opened before the call can continue. The loop renders again."""

    def __init__(
        self,
        message: str = "a summarised section must be opened first",
        *,
        requested_overrides: Mapping[tuple[str, ...], object] | None = None,
        reason: str = "",
        section_keys: Sequence[str] = (),
    ) -> None:
        self.requested_overrides = dict(requested_overrides or {})
        self.reason = reason
        self.section_keys = tuple(section_keys)
        super().__init__(message)


class RunNotCompletedError(TreenailError):
    """A run has no output: it did not come to its end. `next_actions` says what can be done about it."""

    def __init__(self, message: str, *, next_actions: Sequence[str] = ()) -> None:
        self.next_actions = tuple(next_actions)
        super().__init__("; ".join((message, *next_actions)))


class DeadlineExceededError(TreenailError):
    """The deadline has passed."""


class BudgetExceededError(TreenailError):
    """A budget is spent. `exceeded_dimension` says which one."""

    def __init__(
        self,
        message: str,
        *,
        budget: object = None,
        consumed: object = None,
        exceeded_dimension: str = "",
    ) -> None:
        self.budget = budget
        self.consumed = consumed
        self.exceeded_dimension = exceeded_dimension
        super().__init__(message)


class CancelledByToken(TreenailError):
    """A cancellation token was set while the work was under way."""


class CallRefused(TreenailError):
    """Containment refused or stopped a call. `stop_reason` says why, if it is known."""

    def __init__(self, message: str, *, decision: str = "HALT", stop_reason: str | None = None) -> None:
        self.decision = decision
        self.stop_reason = stop_reason
        super().__init__(message)
