"""A transaction around each tool call of a loop that is not ours.

Theory of operation
-------------------
Another framework asks the model, chooses the tool and keeps the messages. Where it calls the tool, an adapter
hands the call over, and what happens to it then is what happens to a call of our own loop:

    contain      let the ceilings allow the call, or refuse it
    transact     note the start; scan the files; commit, or put everything back (`treenail.tools.runner`)
    handler      the framework's own function, with its own arguments

The call comes back as the framework would have had it: the same value, or the same exception. So a framework
that turns exceptions into texts for the model must do it outside of this, or say which text is a failure
(`is_error`).

Two logs are not one transaction. Ours decides about files and state: when a run is opened, a call that its
process did not live to end is undone, before the framework can make it again. The framework's own store
decides about messages. A call that ours has kept and theirs has lost is made again; its function is told so
(`current_context().is_resume`).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast
from uuid import UUID, uuid5

from pydantic_core import to_json

from treenail.agent import RunStore, close_state, open_state
from treenail.containment import CancellationToken, ExecutionContext, Limits
from treenail.errors import OutcomeUnknownError, SessionNotFoundError, ToolCommitError, ToolError, UsageError
from treenail.log import Log, open_log
from treenail.state import ExecutionState, Session
from treenail.tools import (
    Effects,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    ToolRunner,
    ToolStarted,
    enclosing_calls,
    last_end,
    recover,
    run_blocking,
    run_handler,
    tool_name,
)
from treenail.turns import LoopAttached, ceilings_of, contain, contained, newly_set

T = TypeVar("T")

_RUNS = UUID("0c7d9b0e-6d0b-4b3f-8a52-0d6d1a3e5f17")
"""The namespace of the ids that are made from the names of runs."""


class Transactions:
    """Makes a transaction of each tool call of another loop, in one workspace, with a log and ceilings.

    `workspace` is the directory that the tools change. `store` is where the log is kept, as for `Agent.run`.
    `run` is what the other program calls the run, a thread id for instance: opening the same one again
    continues it. Opening undoes what a killed process left half done, so open it before the framework
    resumes. Only one process at a time has a run open.

    `effects` says by name what a tool changes, if not the workspace: `"none"` for one that only reads, which
    then runs beside others and costs no scan; `"external"` for one that acts outside, where nothing can be
    undone; None for one that makes calls of its own (an agent as a tool), which is left alone. An external
    call that was cut off is not made again, unless its name is in `idempotent`. `limits` are the run's
    ceilings; unless given, it keeps those that it had.
    """

    def __init__(
        self,
        workspace: str | Path,
        *,
        store: RunStore,
        run: str | UUID,
        effects: Mapping[str, Effects | None] | None = None,
        idempotent: Collection[str] = (),
        limits: Limits | None = None,
    ) -> None:
        if limits is not None and not isinstance(limits, Limits):
            raise UsageError(f"limits must be Limits(max_steps=..., timeout=...), not {limits!r}")
        self._store = store
        self._effects = dict(effects or {})
        self._idempotent = frozenset(idempotent)
        place = Path(workspace).resolve()
        log = open_log(store)
        try:
            session = _open_session(log, run)
            try:
                _check_belongs(session, str(run), place)
                self.state: ExecutionState = open_state(session, place, store)[0]
            except BaseException:
                session.close()
                raise
        except BaseException:
            if log is not store:
                log.close()
            raise
        try:
            self._begin(str(run), str(place), limits)
        except BaseException:
            close_state(self.state, store)
            raise

    def _begin(self, run: str, workspace: str, limits: Limits | None) -> None:
        """Undo what was cut off, and put the run under its ceilings."""
        session = self.state.session
        self.recovered = recover(self.state)
        """What a killed process had left half done, and how it was settled."""
        limits = limits if limits is not None else ceilings_of(session)
        self._containment: ExecutionContext | None = None if limits is None else contain(session, limits)
        is_new = not session[LoopAttached].view()
        attached = (LoopAttached(run, workspace),) if is_new else ()
        session.dispatch_all((*attached, *newly_set(session, self._containment)))
        self._runner = ToolRunner(self.state, {})
        self._cancellation = CancellationToken()
        self._context = ToolContext(self.state, cancellation=self._cancellation)
        self._begun = {each.call_id for each in session[ToolStarted].all()}

    @property
    def id(self) -> UUID:
        """The id of the run in the store, by which `treenail show` finds it."""
        return self.state.session.session_id

    def close(self) -> None:
        """Give the run and the workspace back, so that another process can open it."""
        if self._containment is not None:
            self._containment.close()
        close_state(self.state, self._store)

    def __enter__(self) -> Transactions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # .. one call ..

    def run(
        self, call: ToolCall, body: Callable[[], T], *, is_error: Callable[[T], bool] = lambda value: False
    ) -> T:
        """Run a function as the body of a call, blocking; on a thread of its own. See `arun`."""
        if self.is_left_alone(call.name):
            return body()
        outcome: _Outcome[T] = _Outcome(is_error)
        make = partial(self._make, call, outcome, lambda arguments: outcome.of(body))
        return run_blocking(make, face="Transactions.run", instead="Transactions.arun")

    async def arun(
        self,
        call: ToolCall,
        body: Callable[[], Awaitable[T]],
        *,
        is_error: Callable[[T], bool] = lambda value: False,
    ) -> T:
        """Run a coroutine function as the body of a call; return what it returns, raise what it raises.

        What it changed in files and state is kept if it returns. It is undone if it raises, if it is
        cancelled, and if what it returns is a failure by `is_error`. Calls that change something run one at a
        time.

        Raises `CallRefused` if a ceiling forbids the call; `ToolCommitError` if it ran and could not be kept,
        because somebody else changed a file that it wrote, say; `OutcomeUnknownError` if it acts outside and
        was cut off before, so that it was not made again; `WorkspaceBusyError` while another process writes.
        """
        if self.is_left_alone(call.name):
            return await body()
        outcome: _Outcome[T] = _Outcome(is_error)

        async def handler(arguments: object) -> ToolResult[Any]:
            return await outcome.aof(body)

        return await self._make(call, outcome, handler)

    def is_left_alone(self, name: str) -> bool:
        """Say whether calls of a tool pass through, because it makes calls of its own."""
        return self._effects.get(name, "workspace") is None

    async def _make(self, call: ToolCall, outcome: _Outcome[T], handler: Callable[[Any], Any]) -> T:
        _refuse_inside(call, self.state.session)
        call = replace(call, arguments=_as_json(call.arguments))
        is_repeated = call.id in self._begun
        self._begun.add(call.id)
        tool = self._tool(call.name, handler)
        if is_repeated and tool.effects == "external" and not tool.idempotent:
            self._refuse_unknown(call, tool)
        transact = partial(
            self._runner.transaction,
            call,
            run_handler,
            context=replace(self._context, is_resume=True) if is_repeated else self._context,
            tool=tool,
        )
        if self._containment is None:
            return outcome.settled(await transact())
        return outcome.settled(await contained(call, transact, self._containment, self._cancellation))

    def _tool(self, name: str, handler: Callable[[Any], Any]) -> Tool[Any, Any]:
        effects = cast(Effects, self._effects.get(name, "workspace"))
        return Tool(
            name=tool_name(name),
            description="A tool of another framework.",
            handler=handler,
            effects=effects,
            files=None if effects == "none" else "any",
            idempotent=name in self._idempotent,
            params_type=dict[str, Any],
        )

    def _refuse_unknown(self, call: ToolCall, tool: Tool[Any, Any]) -> None:
        """Raise `OutcomeUnknownError` if a call comes again that may have acted outside; once."""
        end = last_end(self.state.session, call.id)
        if end is not None and end.outcome == "unknown":
            self._runner.plan(call, tool=tool).refuse(self._runner.environment, "failed", end.result.message)
            raise OutcomeUnknownError(end.result.message)


@dataclass(slots=True)
class _Outcome(Generic[T]):
    """What the framework's function came to, which the framework is given as it is."""

    is_error: Callable[[T], bool]
    values: tuple[T, ...] = ()
    """What it returned; nothing if it has not."""
    error: BaseException | None = None

    def of(self, body: Callable[[], T]) -> ToolResult[Any]:
        try:
            return self._returned(body())
        except BaseException as error:
            self.error = error
            raise

    async def aof(self, body: Callable[[], Awaitable[T]]) -> ToolResult[Any]:
        try:
            return self._returned(await body())
        except BaseException as error:
            self.error = error
            raise

    def _returned(self, value: T) -> ToolResult[Any]:
        self.values = (value,)
        return ToolResult(_shown(value) or "OK", success=not self.is_error(value))

    def settled(self, result: ToolResult[Any]) -> T:
        """Return what the function returned, or raise what it raised or why the call does not stand."""
        if self.error is not None:
            raise self.error
        if not self.values:
            raise ToolError(result.message)
        (value,) = self.values
        if not result.success and not self.is_error(value):
            raise ToolCommitError(result.message)
        return value


def current_context() -> ToolContext:
    """Return the context of the tool call that the running code is part of: its id, its files, its outbox.

    `is_resume` says that a call with this id has begun before. Raises `UsageError` outside of a call.
    """
    inside = enclosing_calls()
    if not inside:
        raise UsageError(
            "no tool call of a Transactions runs here; current_context() is for the functions that it calls"
        )
    return inside[-1].context


def _open_session(log: Log, run: object) -> Session:
    if not isinstance(run, UUID) and not (isinstance(run, str) and run.strip()):
        raise UsageError(f"run must be the name of the run, such as a thread id, not {run!r}")
    known = run if isinstance(run, UUID) else uuid5(_RUNS, run)
    try:
        return Session.open(log, known)
    except SessionNotFoundError:
        return Session(session_id=known, log=log, tags={"agent": str(run)})


def _check_belongs(session: Session, run: str, workspace: Path) -> None:
    """Raise `UsageError` for a run of our own loop, and for one in another directory."""
    known = session[LoopAttached].latest()
    if known is None and session.head:
        raise UsageError(f"{run} is a run of a Treenail agent; give the other loop's run a name of its own")
    if known is not None and known.workspace != str(workspace):
        raise UsageError(
            f"the run {known.run!r} works in {known.workspace}, and not in {workspace}; give it that "
            "directory, or another name"
        )


def _refuse_inside(call: ToolCall, session: Session) -> None:
    for outer in enclosing_calls():
        if outer.transaction.session == session:
            raise UsageError(
                f"{call.name} was called from inside the call of {outer.call.name}, which would undo or keep "
                f"both together; if {outer.call.name} only makes calls of its own, as an agent does, leave "
                f"it alone: Transactions(effects={{{outer.call.name!r}: None}})"
            )


def _as_json(arguments: str | Mapping[str, Any]) -> str:
    """Write arguments as a JSON object, for the log: what has no such form is written as its repr."""
    if isinstance(arguments, str):
        is_object = arguments.lstrip().startswith("{")
        return arguments if is_object else _as_json({"input": arguments} if arguments else {})
    try:
        return to_json(dict(arguments), fallback=repr, inf_nan_mode="constants").decode()
    except ValueError:
        return json.dumps({str(name): ascii(value) for name, value in arguments.items()})


def _shown(value: object) -> str:
    """Write what a function returned as text, for the log."""
    content = getattr(value, "content", value)
    try:
        return content if isinstance(content, str) else to_json(content, fallback=repr).decode()
    except Exception:  # noqa: BLE001  # a foreign value that cannot be written is no reason to fail its call
        return f"a value of the type {type(value).__qualname__}"
