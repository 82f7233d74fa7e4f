"""The quickest way to run an agent: instructions, tools, and the run that comes of a task.

Everything here is put together from other rooms: a session on a log, a workspace, a turn.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Required, TypedDict, TypeVar, Unpack, cast
from uuid import UUID, uuid5
from weakref import WeakValueDictionary

from treenail.agent.context import Instructions, instructions_for
from treenail.agent.handle import Begun, RunHandle, RunStream
from treenail.agent.run import Run
from treenail.agent.stored import (
    RunStore,
    close_state,
    close_workspace,
    end_other_writers,
    open_state,
    workspace_of,
)
from treenail.containment import CancellationToken, ExecutionConfig, ExecutionContext, Limits
from treenail.conversation import CompactionSettings, ImagePart, enable_inner_message_recording
from treenail.errors import SessionNotFoundError, UsageError
from treenail.log import PostgresUrl, open_log, place_of, store_named
from treenail.prompt import (
    MarkdownSection,
    OutputT,
    Prompt,
    Section,
    changes_text,
    newest_project_of,
    project_changes,
    project_of,
    project_text,
    read_project,
)
from treenail.providers import Provider, check_takes_images, provider_named
from treenail.sandbox import Sandbox
from treenail.state import Session
from treenail.tools import (
    DepsT,
    Hook,
    PermissionMode,
    Permissions,
    ProcessEnded,
    ProcessTable,
    Tool,
    ToolPolicy,
    check_is_list,
    filesystem_of,
    hooked,
    listed,
    lost_processes,
    lost_text,
    run_blocking,
)
from treenail.turns import (
    DEFAULT_RETRY,
    Inbox,
    InnerLoop,
    ModelAdapter,
    Opening,
    RetryPolicy,
    ToolSource,
    TurnResult,
    TurnStarted,
    Watch,
    ceilings_of,
    contain,
    first_section,
    is_down,
)
from treenail.workspace import Filesystem

if TYPE_CHECKING:
    from typing_extensions import TypeForm

Ceilings = Limits | ExecutionConfig | Callable[[Session], ExecutionContext]
"""A run's ceilings: numbers, or a function that makes the containment of its session.

Use a function for a shield, circuit breakers, a loop policy or other prices:
`limits=lambda session: contain(session, Limits(...), pipeline=..., loops=...)`.
"""

Extension = Callable[[InnerLoop], AbstractAsyncContextManager[object]]
"""Makes a context manager around a loop: entered before its turn runs, left when the turn has ended."""


class RunOptions(TypedDict, Generic[DepsT], total=False):
    """Options of `Agent.run`, `arun`, `resume` and `aresume`."""

    provider: Required[Provider | str]
    """Who makes the model calls: a provider, or a model as text, such as `"anthropic/claude-sonnet-5-5"`. It
    may differ from the provider that the run began with."""
    fallback: Sequence[Provider | str]
    """Who answers if the provider is down: each is tried in turn, and continues the run. The switch and what
    each costs are in the log."""
    deps: DepsT
    """Objects of your own that tools find as `context.deps`. They are never stored: a resume passes them
    again."""
    workspace: str | Path | Filesystem | None
    """The directory to work in; without one, files live in memory. A stored run remembers its directory."""
    limits: Ceilings | None
    """The run's ceilings. Unless given, a stored run keeps those that it had; `Limits()` lifts them all."""
    permissions: Permissions | None
    """Which tools may run, and which wait for a person."""
    watch: Watch | None
    """Is told what happens while it happens, for display."""
    cancellation: CancellationToken | None
    """Cancels the run from another thread or task."""
    take_over: bool
    """Kill the process that writes this run or its files now, and wait for its end, before anything else."""
    inbox: Inbox | None
    """Is asked before each request to the model what a person has said meanwhile."""
    model_settings: Mapping[str, str] | None
    """How you name the provider's model, if another one answers than before: `resume` does not need it, but a
    program that makes providers by name finds it in the log (`model_settings_of`)."""
    sandbox: Sandbox | None
    """How commands are confined, if `workspace` is a path; a filesystem has a sandbox of its own."""
    checkouts: str | Path | None
    """Where this machine keeps its copies of workspaces that travel; else in the user's state directory."""


@dataclass(frozen=True)
class Agent(Generic[DepsT, OutputT]):
    """Instructions and tools under a name.

    `run` works on a task and returns when the turn has ended, one way or another; `resume` continues a
    run after a crash, an interrupt or an answered question, in this process or another. `arun` and `aresume`
    do the same inside an event loop. `output_type` makes the answer a value of that type: whatever pydantic
    can describe, such as a model, a dataclass, `list[int]` or `Invoice | Refusal`.
    """

    name: str
    instructions: Instructions[DepsT] = "You are a helpful agent."
    """What the agent is and does: a text, or a function that makes it once for each run (`AgentContext`)."""
    tools: Collection[Tool[Any, Any] | Callable[..., Any] | ToolSource] = ()
    """What the model may call. A list keeps its order; a set or a mapping is sorted by name.

    A source, such as `McpServer` or a `toolset(...)`, brings its tools along while the agent runs, behind all
    others.
    """
    max_iterations: int = 100
    output_type: TypeForm[OutputT] = field(default=cast("TypeForm[OutputT]", str))
    policies: Sequence[ToolPolicy] = ()
    """Policies that apply to all tools."""
    feedback: Sequence[Any] = ()
    """Judges that comment on the work in progress: `FeedbackProviderConfig`s."""
    completion: Any = None
    """Decides whether the agent may stop: a `TaskCompletionChecker`."""
    nested: Any = None
    """The ceilings of the judges: a `NestedExecutionConfig`."""
    retry: RetryPolicy | None = DEFAULT_RETRY
    """How failed model calls are retried; None for no retries."""
    idle_timeout_s: float | None = None
    """How long a model's stream may send nothing before the call has failed; None for the SDK's own limit."""
    compaction: CompactionSettings = field(default_factory=CompactionSettings)
    """When and how a conversation that grows too long is summarised."""
    reads_project: bool = False
    """Whether the prompt says where the agent works (directory, system, date, git) and has `AGENTS.md`."""
    hooks: Sequence[Hook] = ()
    """Commands before and after calls of its own tools and at the end of a turn, in their transactions."""
    extensions: Sequence[Extension] = ()
    """Additions that last as long as each run, such as `with_subagents(...)`."""
    deps_type: type[DepsT] | None = None
    """The type of `deps`, which every run is then checked to have."""

    def __class_getitem__(cls, types: Any) -> Any:
        """Bind both types: `Agent[Deps, Report]("name")` is an agent with that output."""
        deps, output = types if isinstance(types, tuple) else (types, str)
        if Any in (deps, output) or isinstance(deps, TypeVar) or isinstance(output, TypeVar):
            return super().__class_getitem__((deps, output))  # type: ignore[misc]  # of typing.Generic
        return partial(cls, deps_type=deps, output_type=output)

    def __post_init__(self) -> None:
        check_is_list(self.tools)
        if not isinstance(self.instructions, str) and not callable(self.instructions):
            raise UsageError(
                f"instructions must be text, or a function that returns it, not {self.instructions!r}"
            )

    @property
    def description(self) -> str:
        """What the agent says about itself: its instructions, or the docstring of what makes them."""
        given = self.instructions
        return given if isinstance(given, str) else inspect.getdoc(given) or ""

    @property
    def own_tools(self) -> tuple[Tool[Any, Any], ...]:
        """The tools that the agent has without its sources."""
        if not self.sources:
            return listed(cast("Collection[Tool[Any, Any]]", self.tools))
        given = self.tools.values() if isinstance(self.tools, Mapping) else self.tools
        return listed([each for each in given if not isinstance(each, ToolSource)])

    @property
    def sources(self) -> tuple[ToolSource, ...]:
        """What brings tools along while the agent runs."""
        given = self.tools.values() if isinstance(self.tools, Mapping) else self.tools
        return tuple(each for each in given if isinstance(each, ToolSource))

    def tool_registry(self) -> dict[str, Tool[Any, Any]]:
        """Return the agent's tools by name. Raises `UsageError` if two share one."""
        registry: dict[str, Tool[Any, Any]] = {}
        for made in self.own_tools:
            if made.name in registry:
                raise UsageError(f"the agent {self.name!r} has two tools named {made.name!r}; rename one")
            registry[made.name] = hooked(made, self.hooks)
        return registry

    @functools.cached_property
    def prompt(self) -> Prompt[Any]:
        """The agent as a prompt: one section with its instructions and its tools.

        Instructions that a function makes are put in for each run (`equipped`).
        """
        return self._prompt_with(self.instructions if isinstance(self.instructions, str) else "")

    def _prompt_with(self, instructions: str, project: str = "") -> Prompt[Any]:
        """Return the agent as a prompt, with a section about the project that it works in."""
        kind: Any = Prompt
        if self.output_type not in (None, str):
            kind = kind[self.output_type]
        made: Prompt[Any] = kind(
            ns="agents",
            key=re.sub(r"[^a-z0-9._-]+", "-", self.name.lower()).strip("-._")[:64] or "agent",
            name=self.name,
            sections=[
                # An agent has no placeholders: a dollar sign in its instructions is literal.
                MarkdownSection(
                    "Instructions",
                    template=instructions.replace("$", "$$"),
                    tools=tuple(self.tool_registry().values()),
                ),
                *([MarkdownSection("Project", template=project.replace("$", "$$"))] if project else ()),
            ],
            policies=tuple(self.policies),
            feedback_providers=tuple(self.feedback),
            task_completion_checker=self.completion,
            nested_execution_config=self.nested,
        )
        return made

    def run(
        self,
        task: str,
        *,
        store: RunStore | None = None,
        run_id: UUID | str | None = None,
        tags: Mapping[str, str] | None = None,
        images: Sequence[ImagePart] = (),
        new_id: UUID | None = None,
        key: UUID | str | None = None,
        **options: Unpack[RunOptions[DepsT]],
    ) -> Run[OutputT]:
        """Work on a task until the turn ends. Not for use inside an event loop.

        Without a `store` the run lives in memory; with a path it is durable. With `run_id` the task continues
        an earlier run, which the model remembers. `tags` are stored with a new run; `new_id` is its id, which
        no run of the store may have. `key` names the work: the same key and task are the same run, which is
        begun once, resumed if it was cut off, and read from the log if it is completed. `images` are shown to
        the model with the task; a model that is known to take none is refused.
        """
        return run_blocking(
            lambda: self.arun(
                task, store=store, run_id=run_id, tags=tags, images=images, new_id=new_id, key=key, **options
            ),
            face="Agent.run",
            instead="arun",
        )

    async def arun(
        self,
        task: str,
        *,
        store: RunStore | None = None,
        run_id: UUID | str | None = None,
        tags: Mapping[str, str] | None = None,
        images: Sequence[ImagePart] = (),
        new_id: UUID | None = None,
        key: UUID | str | None = None,
        **options: Unpack[RunOptions[DepsT]],
    ) -> Run[OutputT]:
        """Work on a task until the turn ends, inside an event loop. See `run`."""
        loop, run = self._begun(task, store, run_id, tags, images, new_id, key, options)
        return await self._run_of(loop, store, run)

    def start(
        self,
        task: str,
        *,
        store: RunStore | None = None,
        run_id: UUID | str | None = None,
        tags: Mapping[str, str] | None = None,
        images: Sequence[ImagePart] = (),
        key: UUID | str | None = None,
        **options: Unpack[RunOptions[DepsT]],
    ) -> RunHandle[OutputT]:
        """Start a run in a thread of its own, and return a handle: its id, events, answers and result.

        It takes what `run` takes. With a `key` whose run is under way in this process, that run's handle is
        returned. A program that ends takes its runs along, as a crash would; the key resumes them.
        """
        with _STARTING:
            if key is not None:
                found = _UNDER_WAY.get((_place(store), id_of(key)))
                if found is not None and found.is_under_way:
                    with closing(Session.open(found.log, found.id, read_only=True)) as session:
                        _check_task(session, task, key)
                    return found
            handle = self._handle(task, store, run_id, tags, images, key, options).start_in_thread()
            _UNDER_WAY[_place(store), handle.id] = handle
            return handle

    def stream(
        self,
        task: str,
        *,
        store: RunStore | None = None,
        run_id: UUID | str | None = None,
        tags: Mapping[str, str] | None = None,
        images: Sequence[ImagePart] = (),
        key: UUID | str | None = None,
        **options: Unpack[RunOptions[DepsT]],
    ) -> RunStream[OutputT]:
        """Run a task for the length of a block, and give its events: `async with agent.stream(...) as run`.

        It takes what `run` takes. Inside an event loop the turn is a task of that loop; with a plain `with`
        it has a thread. Leaving the block early interrupts the run.
        """
        return RunStream(self._handle(task, store, run_id, tags, images, key, options))

    def _handle(
        self,
        task: str,
        store: RunStore | None,
        run_id: UUID | str | None,
        tags: Mapping[str, str] | None,
        images: Sequence[ImagePart],
        key: UUID | str | None,
        options: RunOptions[DepsT],
    ) -> RunHandle[OutputT]:
        log = open_log(store, must_exist=run_id is not None)
        token = options.get("cancellation") or CancellationToken()
        options["cancellation"] = token

        def begin() -> Begun:
            begun = self._begun(task, log, run_id, tags, images, None, key, options)
            if options.get("workspace") is None and begun[0].workspace is None:
                # Files in memory outlive a hold.
                options["workspace"] = filesystem_of(begun[0].state)
            return begun

        def resume(known: UUID) -> Begun:
            loop = self._loop(log, known, **options)
            return loop, loop.resume

        return RunHandle(
            log,
            begin=begin,
            resume=resume,
            drive=lambda loop, run: self._run_of(loop, log, run),
            cancellation=token,
            owns_log=isinstance(store, (str, Path, PostgresUrl)),
        )

    def _begun(
        self,
        task: str,
        store: RunStore | None,
        run_id: UUID | str | None,
        tags: Mapping[str, str] | None,
        images: Sequence[ImagePart],
        new_id: UUID | None,
        key: UUID | str | None,
        options: RunOptions[DepsT],
    ) -> Begun:
        """Open the loop of a task, and say how its turn is run: the run of a known key is resumed."""
        options["provider"] = provider = _provider(options.get("provider"))
        if not isinstance(task, str):
            raise UsageError(f"the task must be text, not {task!r}")
        if images:
            check_takes_images(provider)
        if key is not None:
            if run_id is not None or new_id is not None:
                raise UsageError("a key names a run of its own; leave run_id and new_id out")
            if store is None:
                raise UsageError("a key needs a store that remembers it; pass store=...")
            new_id = id_of(key)
            known = _known(store, new_id, task, key)
            if known == "begun":
                loop = self._loop(store, new_id, **options)
                return loop, loop.resume
            if known == "empty":
                run_id, new_id = new_id, None
        loop = self._loop(store, run_id, tags, new_id, **options)
        loop.task = task
        return loop, partial(loop.run, task, images)

    def resume(
        self, store: RunStore, run_id: UUID | str, **options: Unpack[RunOptions[DepsT]]
    ) -> Run[OutputT]:
        """Resume a run. Not for use inside an event loop.

        Finished tools are not run again; another provider may take over.
        """
        return run_blocking(
            lambda: self.aresume(store, run_id, **options), face="Agent.resume", instead="aresume"
        )

    async def aresume(
        self, store: RunStore, run_id: UUID | str, **options: Unpack[RunOptions[DepsT]]
    ) -> Run[OutputT]:
        """Resume a run, inside an event loop. See `resume`."""
        loop = self._loop(store, run_id, **options)
        return await self._run_of(loop, store, loop.resume)

    async def arun_in(
        self, session: Session, task: str | None, **options: Unpack[RunOptions[DepsT]]
    ) -> TurnResult:
        """Run one turn in a session that the caller has opened for writing; None resumes the newest turn.

        The session stays open, whatever happens. What is not in the options is not looked up in the log: a
        workspace that is left out is one in memory.
        """
        _check_given(options)
        self._check_deps(options.get("deps"))
        enable_inner_message_recording(session)
        loop = self._loop_in(session, session.log, **options)
        loop.task = task
        try:
            return await self._drive(loop, loop.resume if task is None else partial(loop.run, task))
        finally:
            close_workspace(loop.state)

    def _loop(
        self,
        store: RunStore | None,
        run_id: UUID | str | None,
        tags: Mapping[str, str] | None = None,
        new_id: UUID | None = None,
        **options: Unpack[RunOptions[DepsT]],
    ) -> InnerLoop:
        """Open or make the session, and make a loop on it."""
        _check_given(options)
        self._check_deps(options.get("deps"))
        known = _run_id(run_id)
        log = open_log(store, must_exist=run_id is not None)
        if options.get("take_over"):
            end_other_writers(log, known, options.get("workspace"))
        if known is None:
            session = Session(session_id=new_id, log=log, tags={**(tags or {}), "agent": self.name})
        else:
            session = Session.open(log, known)
            enable_inner_message_recording(session)
            if options.get("workspace") is None:
                options["workspace"] = workspace_of(session)
            if options.get("limits") is None:
                options["limits"] = ceilings_of(session)
        try:
            return self._loop_in(session, store, **options)
        except BaseException:
            session.close()
            if isinstance(store, (str, Path, PostgresUrl)):
                log.close()
            raise

    def _loop_in(
        self,
        session: Session,
        store: RunStore | None,
        *,
        provider: Provider | str,
        workspace: str | Path | Filesystem | None = None,
        limits: Ceilings | None = None,
        permissions: Permissions | None = None,
        watch: Watch | None = None,
        cancellation: CancellationToken | None = None,
        take_over: bool = False,
        sandbox: Sandbox | None = None,
        checkouts: str | Path | None = None,
        inbox: Inbox | None = None,
        model_settings: Mapping[str, str] | None = None,
        fallback: Sequence[Provider | str] = (),
        deps: DepsT | None = None,
    ) -> InnerLoop:
        """Open the workspace of a session, and make a loop on both."""
        provider = _provider(provider)
        state, root = open_state(session, workspace, store, sandbox=sandbox, checkouts=checkouts)
        opening, project = Opening(), ""
        given = self.instructions if isinstance(self.instructions, str) else ""
        if self.reads_project and root is not None:
            project = _read_project(session, Path(root), opening)
        return InnerLoop(
            state=state,
            provider=provider,
            prompt=self._prompt_with(given, project) if project else self.prompt,
            opening=opening,
            turn_end=tuple(each for each in self.hooks if each.when == "turn_end"),
            agent=self.name,
            containment=_contained(session, limits),
            permissions=permissions or Permissions(),
            max_iterations=self.max_iterations,
            retry=self.retry,
            compaction=self.compaction,
            watch=watch,
            cancellation=cancellation or CancellationToken(),
            workspace=root,
            inbox=inbox,
            model_settings=model_settings,
            deps=deps,
            fallback=[_provider(each) for each in fallback],
            idle_timeout_s=self.idle_timeout_s,
            adapter=ModelAdapter(provider, retry=self.retry),
        )

    def _check_deps(self, deps: object) -> None:
        wanted = self.deps_type
        if wanted is None or wanted is type(None):
            return
        try:
            fits = isinstance(deps, wanted)
        except TypeError:
            fits = deps is not None  # A protocol or a generic, which only a type checker can compare.
        if not fits:
            raise UsageError(
                f"the agent {self.name!r} works with deps of the type {getattr(wanted, '__name__', wanted)}, "
                f"not {type(deps).__name__}; pass deps=..., also on a resume: they are never stored"
            )

    @asynccontextmanager
    async def equipped(self, loop: InnerLoop) -> AsyncIterator[None]:
        """Give a loop of this agent what depends on the run: instructions of a function, tools of sources."""
        async with AsyncExitStack() as stack:
            if not isinstance(self.instructions, str):
                text = await instructions_for(self.instructions, loop)
                stack.enter_context(first_section(loop, template=text.replace("$", "$$")))
            for source in self.sources:
                known = loop.prompt.template.sections
                await stack.enter_async_context(source.attached(loop))
                self._hook_new_tools(loop, known)
            yield

    async def _run_of(
        self,
        loop: InnerLoop,
        store: RunStore | None,
        run: Callable[[], Awaitable[TurnResult]],
    ) -> Run[OutputT]:
        """Drive the turn, and return its run.

        If the turn raises, the caller gets no run to close, so everything is closed here.
        """
        try:
            result = await self._drive(loop, run)
            return Run(result, loop.state, store, loop.prompt.template.structured_output is not None)
        except BaseException:
            close_state(loop.state, store)
            raise

    async def _drive(self, loop: InnerLoop, run: Callable[[], Awaitable[TurnResult]]) -> TurnResult:
        """Drive the turn, and disarm its limits: a run that has ended must not time out afterwards."""
        async with AsyncExitStack() as extended:
            if loop.containment is not None:
                extended.callback(loop.containment.close)
            await extended.enter_async_context(self.equipped(loop))
            for each in self.extensions:
                await extended.enter_async_context(each(loop))
            result = await run()
            while loop.fallback and is_down(result):
                loop.provider = loop.fallback.pop(0)
                loop.adapter = ModelAdapter(loop.provider, retry=self.retry)
                result = await loop.resume()
            return result

    def _hook_new_tools(self, loop: InnerLoop, known: Sequence[Section[Any]]) -> None:
        """Put the hooks around the tools that a source has brought along; the source takes all of it away."""
        if not self.hooks:
            return
        template = loop.prompt.template
        sections = [
            each
            if each in known
            else replace(
                each,
                tools=tuple(
                    hooked(tool, self.hooks) if isinstance(tool, Tool) else tool for tool in each.tools
                ),
            )
            for each in template.sections
        ]
        loop.prompt = type(loop.prompt)(replace(template, sections=tuple(sections)))


AnyAgent = Agent[Any, Any]
"""An agent whatever its types are."""


_KEYS = UUID("6f3d2c1e-5b57-4a36-9a8b-7d3f0a4f6b10")
"""The namespace of the ids that are made from keys."""

_STARTING = threading.Lock()
_UNDER_WAY: WeakValueDictionary[tuple[str, UUID], RunHandle[Any]] = WeakValueDictionary()


def id_of(key: UUID | str) -> UUID:
    """Return the id of the run that a key names: itself if it is an id, else one that is made from it."""
    if isinstance(key, UUID):
        return key
    if not key.strip():
        raise UsageError("the key is empty; name the work with a text of your choice, or leave it out")
    try:
        return UUID(key)
    except ValueError:
        return uuid5(_KEYS, key)


def _place(store: RunStore | None) -> str:
    """Return a text that is the same for all names of a store."""
    place = store_named(store) if isinstance(store, (str, Path, PostgresUrl)) else place_of(store)
    if isinstance(place, Path):
        return str(place.resolve())
    return f"in memory {id(store)}" if place is None else str(place)


def _known(store: RunStore, run_id: UUID, task: str, key: UUID | str) -> str:
    """Say how the run of a key stands: `begun`, `empty` if it has no turn yet, or `new`."""
    log = open_log(store)
    try:
        with closing(Session.open(log, run_id, read_only=True)) as session:
            return "begun" if _check_task(session, task, key) else "empty"
    except SessionNotFoundError:
        return "new"
    finally:
        if isinstance(store, (str, Path, PostgresUrl)):
            log.close()


def _check_task(session: Session, task: str, key: UUID | str) -> bool:
    """Say whether a run has begun; raise `UsageError` if it began with another task."""
    turns = session[TurnStarted].all()
    if turns and turns[0].task != task:
        raise UsageError(
            f"the key {str(key)!r} belongs to another task, {turns[0].task[:80]!r}; choose a new key"
        )
    return bool(turns)


def _provider(given: object) -> Provider:
    """Return a provider: as it was given, or the one of a model as text. Raises `UsageError`."""
    if isinstance(given, str):
        return provider_named(given)
    if isinstance(given, type) or not isinstance(getattr(given, "model", None), str):
        shown = given.__name__ if isinstance(given, type) else repr(given)
        raise UsageError(
            "provider must be a provider such as OpenAI('gpt-6.1-terra'), or a model as text such as "
            f"'openai/gpt-6.1-terra', not {shown}"
        )
    return cast(Provider, given)


def _check_given(options: RunOptions[Any]) -> None:
    """Raise `UsageError` for a provider, ceilings or permissions that are not of their types."""
    options["provider"] = _provider(options.get("provider"))
    limits: object = options.get("limits")
    permissions: object = options.get("permissions")
    if limits is not None and not isinstance(limits, Limits | ExecutionConfig) and not callable(limits):
        raise UsageError(
            f"limits must be Limits(max_cost_usd=..., max_steps=...), not {limits!r}; leave it out for none"
        )
    if permissions is not None and not isinstance(permissions, Permissions):
        known = {each.value: each.name for each in PermissionMode}
        mode = known.get(permissions, "ASK") if isinstance(permissions, str) else "ASK"
        raise UsageError(
            f"permissions must be Permissions(PermissionMode.{mode}), not {permissions!r}; both are in "
            "treenail.tools"
        )


def _run_id(given: UUID | str | None) -> UUID | None:
    if given is None or isinstance(given, UUID):
        return given
    try:
        return UUID(given)
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(
            f"run_id must be the whole id of a run, such as str(run.id), not {given!r}; `treenail list` "
            "shows the runs of a store"
        ) from error


def _read_project(session: Session, directory: Path, opening: Opening) -> str:
    """Return what the prompt says of the project: what the log has of it, so that a prompt stays as it was.

    What has changed since is put into the opening.
    """
    now = read_project(directory, session.clock.now())
    first, known = project_of(session), newest_project_of(session)
    if first is None or known is None:
        opening.events.append(now)
        return project_text(now)
    notice = changes_text(known, now)
    if notice:
        opening.events.append(now)
        opening.notices.append(notice)
        opening.changes += project_changes(known, now)
    return project_text(first)


def with_processes(table: ProcessTable) -> Extension:
    """Tell the model, when a turn begins, which of its background processes are gone.

    Use it together with `process_tools(table)`; closing the table ends the processes.
    """

    @asynccontextmanager
    async def told(loop: InnerLoop) -> AsyncIterator[None]:
        lost = lost_processes(loop.state.session, table)
        if lost:
            loop.opening.events += [ProcessEnded(each.process_id, "lost") for each in lost]
            loop.opening.notices.append(lost_text(lost))
            loop.opening.changes += [f"{each.process_id} ({each.command[:80]}) has ended" for each in lost]
        yield

    return told


def _contained(session: Session, limits: Ceilings | None) -> ExecutionContext | None:
    if limits is None:
        return None
    return contain(session, limits) if isinstance(limits, Limits | ExecutionConfig) else limits(session)
