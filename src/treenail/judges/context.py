"""The limits of a nested evaluation: what it may see, use and spend, and how deep it may nest.

A nested evaluation is a model call that judges a run from inside it. It reads the run through a view that
refuses every change, works in its own session, and gets these of the run's resources:

    clock            inherited
    filesystem       a read-only view
    budget tracker   shared, or one of its own
    everything else  not inherited (HTTP clients are made fresh), unless it is named in
                     `resource_overrides`; it must not be something that the run itself changes

Depth travels in the containment: the chain of a nested evaluation carries its depth and the lowest depth
limit set on the way, and an evaluation nested further, even by a subagent, finds both there. A run without
containment gets a chain for that purpose. The session of the evaluation carries both as tags, which its child
sessions inherit, so that a process that opens one of them later knows its depth.

`Judges` passes the run's limits to a judge's nested evaluations in a context variable (`JudgeScope`), so that
a judge that builds a `NestedExecutionContext` by hand is contained as well. The judge itself is handed
nothing that leads to the run: a containment and a token of its own, a tracker that keeps what is recorded in
it, and an adapter that carries the scope along (`JudgeAdapter`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, cast
from uuid import UUID

import anyio.lowlevel

from treenail.clock import Clock, SystemClock, new_id, new_span_id
from treenail.containment import (
    UNLIMITED,
    CancellationToken,
    ExecutionConfig,
    ExecutionContext,
    Limits,
    integer,
    number,
)
from treenail.errors import NestedEvaluationError, UsageError
from treenail.judges.events import NestedEvaluated
from treenail.prompt import OutputT, Prompt, RenderedPrompt
from treenail.providers import ProviderAdapter
from treenail.state import (
    FAMILY,
    Binding,
    Budget,
    BudgetTracker,
    Deadline,
    ExecutionState,
    ResourceContext,
    RunContext,
    Session,
    SessionProtocol,
    SessionView,
    TokenUsage,
    Transaction,
    is_snapshotable,
)
from treenail.tools import ToolInvoked
from treenail.workspace import Filesystem

FailureMode = Literal["open", "closed"]
"""What a judge's failure means: the run continues as if the judge were silent, or it is held back."""

MAX_NESTED_DURATION: Final = timedelta(seconds=30)
"""How long a nested evaluation may take by default."""

_DEPTH_TAG: Final = f"{FAMILY}nesting_depth"
_CEILING_TAG: Final = f"{FAMILY}max_nesting_depth"


@dataclass(frozen=True, slots=True)
class NestedExecutionConfig:
    """What judges may use, and what their failures mean."""

    max_nested_duration: timedelta = MAX_NESTED_DURATION
    """How long a nested evaluation may take, and a judge that has no `time_limit`."""
    default_nested_budget: Budget | None = field(default_factory=lambda: Budget(max_total_tokens=1000))
    """The budget of an evaluation that has none and does not share the run's; None for no ceiling."""
    allow_nested_tools: bool = False
    """Whether a judge's prompt may have tools."""
    max_nesting_depth: int = 1
    """How deep evaluations may nest; subagents in between do not reset the count."""
    share_budget: bool | None = None
    """Whether judges draw on the run's tokens. None: completion checkers do, feedback providers do not."""
    on_feedback_failure: FailureMode = "open"
    on_completion_failure: FailureMode = "open"
    max_completion_checks: int = 3
    """How often one evaluation may be refused; the last refusal ends the turn."""
    adapter: ProviderAdapter | None = None
    """The adapter for judges, instead of the run's own: a cheaper model, another provider."""

    def __post_init__(self) -> None:
        owner = "NestedExecutionConfig"
        number(owner, "max_nested_duration", self.max_nested_duration.total_seconds())
        integer(owner, "max_nesting_depth", self.max_nesting_depth, zero_ok=True)
        integer(owner, "max_completion_checks", self.max_completion_checks)
        for name in ("on_feedback_failure", "on_completion_failure"):
            if getattr(self, name) not in ("open", "closed"):
                raise UsageError(f'{owner}.{name} must be "open" or "closed", not {getattr(self, name)!r}')


@dataclass(frozen=True, slots=True)
class NestedExecutionContext:
    """What a nested evaluation may see and use of the run that it judges.

    `parent_session` always becomes a read-only view. A mutable resource among `resource_overrides` (a
    writable filesystem, a session, anything that can be rolled back) is refused with `UsageError`.
    """

    parent_session: SessionProtocol
    """The run that is judged, read-only."""
    parent_run_context: RunContext | None = None
    """The run's ids, for the trace."""
    deadline: Deadline | None = None
    """When it must end; see `derive_nested_deadline`. The configuration may make it earlier."""
    budget: Budget | None = None
    """A budget of its own. None: the run's tracker, if there is one; else the configuration's default."""
    resource_overrides: Mapping[type, Any] = field(default_factory=dict)
    """Resources for the judge's prompt besides the inherited ones: instances or bindings by type."""
    filesystem: Filesystem | None = None
    """The run's workspace; it becomes a read-only view."""
    containment: ExecutionContext | None = None
    """The run's limits: the evaluation is a child of them."""
    cancellation: CancellationToken | None = None
    """Stops the evaluation when the run is stopped."""
    config: NestedExecutionConfig | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "parent_session", as_view(self.parent_session))
        if self.filesystem is not None:
            put(self, "filesystem", self.filesystem.read_only_view())
        for resource_type, value in self.resource_overrides.items():
            refuse_mutable(resource_type, value)
        put(self, "resource_overrides", MappingProxyType(dict(self.resource_overrides)))


class PromptView:
    """The run's prompt as its judges see it: names and text, without its tools, resources and judges."""

    __slots__ = ("_render", "key", "name", "ns", "output_type")

    def __init__(self, prompt: Prompt[Any]) -> None:
        self.ns, self.key, self.name = prompt.ns, prompt.key, prompt.name
        self.output_type = prompt.output_type
        # Behind a function, so that no attribute of the view is the prompt.
        self._render: Callable[[SessionProtocol | None], RenderedPrompt[Any]] = lambda session: prompt.render(
            session
        )

    def render(self, session: SessionProtocol | None = None) -> RenderedPrompt[Any]:
        """Return what the model is given, without the tools themselves."""
        return replace(self._render(session), tools=(), policies={})

    def __repr__(self) -> str:
        return f"<view of the prompt {self.ns}:{self.key}>"


# No slots: Python 3.11 cannot construct a frozen generic with slots through `...Result[Out](...)`.
@dataclass(frozen=True)
class NestedEvaluationResult(Generic[OutputT]):
    """The result of a nested evaluation."""

    success: bool
    output: OutputT | None = None
    """The answer, if there is one."""
    error: NestedEvaluationError | None = None
    """Why there is no answer."""
    usage: TokenUsage | None = None
    """The tokens that it used, also if it failed; None if they are unknown."""
    child_run_context: RunContext | None = None
    """Its ids; `session_id` is the session to look into."""
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True)
class JudgeContext:
    """What the contexts of all judges have: the run to look at, and a way to ask a model about it."""

    session: SessionProtocol
    """The run, read-only."""
    prompt: Prompt[Any] | PromptView | None = None
    deadline: Deadline | None = None
    """The run's deadline."""
    adapter: ProviderAdapter | None = None
    """Evaluates a prompt for the judge, inside the run's limits whatever else it is given."""
    run_context: RunContext | None = None
    _: KW_ONLY
    filesystem: Filesystem | None = None
    """The workspace, read-only."""
    budget_tracker: BudgetTracker | None = None
    """Shows the run's usage. What is recorded in it stays in it; nested evaluations are booked to the run."""
    containment: ExecutionContext | None = None
    """The judge's own: its ceilings are what the run has left. What is spent in it is not the run's."""
    cancellation: CancellationToken | None = None
    """The judge's own: cancelled when its time is over or the run is stopped."""
    config: NestedExecutionConfig = field(default_factory=NestedExecutionConfig)
    task: str = ""
    """What the agent was asked to do."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "session", as_view(self.session))
        if self.filesystem is not None:
            object.__setattr__(self, "filesystem", self.filesystem.read_only_view())

    def recent_tool_calls(self, n: int) -> tuple[ToolInvoked, ...]:
        """Return the last `n` tool calls of the prompt, oldest first."""
        return self.tool_calls()[-n:] if n > 0 else ()

    def tool_calls(self) -> tuple[ToolInvoked, ...]:
        """Return the finished tool calls of the prompt, or of the session if there is no prompt."""
        if self.prompt is None:
            return self.session[ToolInvoked].all()
        name = self.prompt.name
        return self.session[ToolInvoked].where(lambda each: each.prompt_name == name)

    def create_nested_context(
        self, *, budget: Budget | None = None, max_duration: timedelta = MAX_NESTED_DURATION
    ) -> NestedExecutionContext:
        """Return the context for asking a model: this run, a derived deadline, and this budget."""
        return NestedExecutionContext(
            parent_session=self.session,
            parent_run_context=self.run_context,
            deadline=derive_nested_deadline(self.deadline, max_duration),
            budget=budget,
            filesystem=self.filesystem,
            containment=self.containment,
            cancellation=self.cancellation,
            config=self.config,
        )


# --- time and trace ------------------------------------------------------------------------------------


def derive_nested_deadline(
    parent_deadline: Deadline | None,
    max_nested_duration: timedelta = MAX_NESTED_DURATION,
    *,
    clock: Clock | None = None,
) -> Deadline:
    """Return the deadline of a nested evaluation: after that long, but never after its parent's.

    It never raises, even if the parent has no time left.
    """
    clock = clock or (SystemClock() if parent_deadline is None else parent_deadline.clock)
    now = clock.now()
    try:
        own = Deadline(now + max_nested_duration, now, clock)
    except OverflowError:
        own = Deadline(datetime.max.replace(tzinfo=UTC), now, clock)
    return earliest(parent_deadline, own) or own


def derive_child_run_context(parent: RunContext | None, child_session_id: UUID) -> RunContext:
    """Return the ids of a nested run: a fresh run and span, in the parent's trace and request."""
    if parent is not None:
        return parent.child(child_session_id)
    return RunContext(session_id=child_session_id, worker_id="nested", span_id=new_span_id())


def earliest(*deadlines: Deadline | None) -> Deadline | None:
    """Return the earliest deadline; None if there is none."""
    return min((each for each in deadlines if each is not None), key=lambda each: each.at, default=None)


# --- what a judge may be given --------------------------------------------------------------------------

_NEVER = (Session, Transaction, ExecutionState, ExecutionContext, ResourceContext)


def as_view(session: SessionProtocol) -> SessionProtocol:
    """Return a session as a view that refuses every change."""
    view = getattr(session, "read_only_view", None)
    return session if view is None else cast("SessionProtocol", view())


def refuse_mutable(resource_type: type, value: object) -> None:
    """Raise `UsageError` if a judge could change the run through this resource."""
    name = getattr(resource_type, "__qualname__", repr(resource_type))
    if isinstance(value, Binding):
        # A binding with a provider makes a fresh object for the judge; a bound instance is shared.
        value = value.provided
    if value is None or isinstance(value, BudgetTracker | SessionView):
        return
    if isinstance(value, _NEVER):
        raise UsageError(
            f"a judge cannot be given a {type(value).__qualname__} (as {name}): it could change the run "
            f"through it. Put what the judge needs to know into its prompt, or pass session.read_only_view()"
        )
    if isinstance(value, Filesystem) and not value.read_only:
        raise UsageError(
            f"a judge cannot be given a writable filesystem (as {name}); pass filesystem.read_only_view()"
        )
    if is_snapshotable(value) and getattr(value, "read_only", False) is not True:
        raise UsageError(
            f"a judge cannot be given the run's own {type(value).__qualname__} (as {name}): it holds state "
            f"that the run rolls back. Pass a read-only view of it, or a fresh one: "
            f"Binding({name}, lambda _: ...)"
        )


# --- depth ---------------------------------------------------------------------------------------------


def nesting_of(
    containment: ExecutionContext | None, session: SessionProtocol | None = None
) -> tuple[int, int | None]:
    """Return the nesting depth of a chain or a session, and the lowest depth limit on the way."""
    carried: list[Mapping[str, str]] = [getattr(session, "tags", {})]
    context = containment
    while context is not None:
        carried.append(context.metadata.tags)
        context = context.parent
    depths = [int(tags[_DEPTH_TAG]) for tags in carried if tags.get(_DEPTH_TAG, "").isdecimal()]
    ceilings = [int(tags[_CEILING_TAG]) for tags in carried if tags.get(_CEILING_TAG, "").isdecimal()]
    return max(depths, default=0), min(ceilings, default=None)


def nesting_tags(depth: int, ceiling: int) -> dict[str, str]:
    """Return the tags that carry an evaluation's depth, for its chain and for its session."""
    return {_DEPTH_TAG: str(depth), _CEILING_TAG: str(ceiling)}


def nested_chain(
    parent: ExecutionContext | None,
    *limits: ExecutionConfig | Limits,
    depth: int,
    ceiling: int,
    clock: Clock,
) -> ExecutionContext:
    """Open the chain of a nested evaluation: below the run's, or a root if the run has none.

    With several limits it is a chain for each of them, one below the other.
    """
    chain = parent if parent is not None else ExecutionContext(UNLIMITED, clock=clock)
    tags = {**chain.metadata.tags, **nesting_tags(depth, ceiling)}
    for each in limits:
        metadata = replace(chain.metadata, chain_id=str(new_id()), tags=tags)
        # A failing judge must not use up the run's retries, nor stop the run's calls.
        chain = chain.spawn_child(each, metadata=metadata, onlooker=True)
    return chain


def is_below(chain: ExecutionContext, above: ExecutionContext) -> bool:
    """Say whether a chain is another one, or below it. Of a sealed one that is not known."""
    top, line = getattr(above, "chain", None), getattr(getattr(chain, "chain", None), "line", ())
    return any(each is top for each in line)


class SealedContext:
    """A chain as an adapter that a judge brings along gets it: it makes calls, and no attribute leads up."""

    __slots__ = ("_ask",)
    parent = None

    def __init__(self, context: ExecutionContext) -> None:
        self._ask: Callable[[str], Any] = lambda name: getattr(context, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "chain":
            raise AttributeError(f"a sealed containment has no {name!r}")
        found = self._ask(name)
        if not callable(found):
            return found
        if name == "spawn_child":
            return lambda *args, **options: SealedContext(found(*args, **options))
        # Not the method itself, which knows its object.
        return lambda *args, **options: found(*args, **options)


# --- the scope -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class JudgeScope:
    """What a run has passed to the judge that is being called."""

    judge: str = ""
    deadline: Deadline | None = None
    budget_tracker: BudgetTracker | None = None
    run_context: RunContext | None = None
    filesystem: Filesystem | None = None
    workspace: Filesystem | None = None
    """The run's workspace itself, so that a judge's resources can be checked for it."""
    containment: ExecutionContext | None = None
    """The chain below the run's that the judge's evaluations are made in. The judge is not handed it."""
    own: ExecutionContext | None = None
    """The containment that the judge is handed."""
    cancellation: CancellationToken | None = None
    config: NestedExecutionConfig | None = None
    loop: anyio.lowlevel.EventLoopToken | None = None
    """The run's event loop, in which a judge on a worker thread evaluates: connections belong to it."""
    depth: int = 0
    evaluations: list[NestedEvaluated] = field(default_factory=list)
    """The evaluations so far. The run writes them to its log; a judge cannot."""


_NO_SCOPE: Final = JudgeScope()
_scope: ContextVar[JudgeScope] = ContextVar("treenail_judge_scope", default=_NO_SCOPE)


def current_scope() -> JudgeScope:
    """Return the scope of the judge that is being called; an empty scope outside of a run."""
    return _scope.get()


@contextmanager
def scoped(scope: JudgeScope) -> Iterator[JudgeScope]:
    """Set the scope for nested evaluations in the block, and on the threads that it starts."""
    before = _scope.set(scope)
    try:
        yield scope
    finally:
        _scope.reset(before)


def inner_scope(scope: JudgeScope, **changed: Any) -> JudgeScope:
    """Return the scope of what happens inside a nested evaluation."""
    return replace(scope, evaluations=[], loop=None, **changed)
