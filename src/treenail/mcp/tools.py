"""One call of a server's tool: from the run's event loop to the server and back.

A call that a person or a deadline cuts off is cancelled at the server. If the server works in the workspace
its process is ended as well, before anything is undone: what it still wrote would escape the undo.

A server that dies in a call, or does not answer, is started again at the next call. The call itself runs
again if that does no harm; else its outcome is unknown, and the model is told so.

A server may ask a person something in the middle of a call. Somebody who is there, the run's approver,
answers while the call waits. Otherwise it is cancelled, rolled back and held; when the answer is there, it is
made again from its beginning, and the question is answered from the log. What the call did outside before it
asked may then happen twice: the question says so, and the answer is the person's leave.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import jsonschema  # type: ignore[import-untyped]  # it has no stubs
import mcp_types as wire
from mcp import MCPError
from mcp.shared.exceptions import UrlElicitationRequiredError
from referencing import Registry
from referencing.exceptions import Unresolvable

from treenail.containment import threadsafe, wait_finished, workers
from treenail.errors import HoldRequired, McpError, OutcomeUnknownError, ToolValidationError
from treenail.mcp.connection import Connection, Life, ServerCall, explained, without_secrets
from treenail.mcp.effects import effects_of
from treenail.mcp.listing import without_patterns
from treenail.mcp.pins import McpServerPinned, McpToolsChanged, PinnedTool, compared
from treenail.mcp.questions import ServerQuestion
from treenail.mcp.results import result_of
from treenail.mcp.sampling import Sampler
from treenail.mcp.server import McpServer
from treenail.sandbox import refusals
from treenail.tools import (
    ASK_PERSON,
    Approval,
    Approver,
    HoldAnswered,
    PermissionRequest,
    ReadyTool,
    ToolContext,
    ToolHeld,
    ToolInvoked,
    ToolResult,
    answer_of,
    hold_of,
    unknown_outcome,
)

_logger = logging.getLogger("treenail.mcp")

_MAX_DESCRIPTION = 1_024
_SHOWN_ERRORS = 5
_MAX_REQUESTS = 20
"""How often a server may ask for something in one call."""
_MAX_TRIES = 3
"""How often a person is asked again after an answer that does not fit."""
_TWICE = "Your answer makes the call again from its beginning: what it did before it asked may happen twice."
_PATIENCE_S = 5.0
"""How long a dying server is waited for, so that its last words are known."""


@dataclass(frozen=True)
class McpTool(ReadyTool):  # type: ignore[type-arg]  # subscripting a tool binds its types
    """A server's tool. Its parameters are described by the server's own schema."""

    pin: PinnedTool = field(kw_only=True)

    @functools.cached_property
    def parameters_schema(self) -> Mapping[str, Any]:
        """The server's schema. A description that is too long for the tool continues here."""
        schema = {"type": "object", "properties": {}, **self.pin.parameters()}
        schema.pop("$schema", None)
        if len(self.pin.description) > _MAX_DESCRIPTION:
            schema["description"] = self.pin.description
        return schema

    @functools.cached_property
    def _validator(self) -> Any:
        # An empty registry: a schema of a server must not make us fetch anything.
        return jsonschema.Draft202012Validator(without_patterns(self.pin.parameters()), registry=Registry())

    def parse(self, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
        """Check a call's arguments against the server's schema."""
        data = _object(self.name, arguments)
        try:
            errors = sorted(self._validator.iter_errors(data), key=lambda each: list(map(str, each.path)))
        except (Unresolvable, RecursionError, jsonschema.exceptions.UnknownType):
            return data  # A schema that cannot be followed: the server checks by itself.
        if errors:
            said = [
                f"- {'.'.join(map(str, each.path)) or 'arguments'}: {each.message[:200]}"
                for each in errors[:_SHOWN_ERRORS]
            ]
            raise ToolValidationError(
                f"The arguments of {self.name} do not fit. Correct these and call it again:\n"
                + "\n".join(said)
            )
        return data


def _object(name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    try:
        data = json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else dict(arguments)
    except (ValueError, RecursionError) as error:
        raise ToolValidationError(f"The arguments of {name} are not JSON ({error})") from None
    if not isinstance(data, dict):
        raise ToolValidationError(f"The arguments of {name} must be one JSON object. Send {{...}}.")
    return data


def _short(text: str) -> str:
    if len(text) <= _MAX_DESCRIPTION:
        return text
    end = " ... (the whole text is in the description of the parameters)"
    return text[: _MAX_DESCRIPTION - len(end)] + end


Progress = Callable[[str, float, float | None, str], None]
"""Shows the progress of a call: its id, how much is done, of how much, and a message."""


@dataclass(slots=True, eq=False)
class ServerTools:
    """The tools of one server in one run."""

    connection: Connection
    pin: McpServerPinned
    sampler: Sampler | None = None
    progress: Progress | None = None
    approver: Approver | None = None
    """The person who is there to be asked."""
    change: McpToolsChanged | None = None
    """How the server's list differs from the pinned one."""
    told: set[str] = field(default_factory=set)
    """The changes that were logged and told, by their hashes."""

    @property
    def server(self) -> McpServer:
        """What the operator says about the server."""
        return self.connection.server

    def tools(self) -> list[McpTool]:
        """Make the tools that the model is offered."""
        made: list[McpTool] = []
        for each in self.pin.tools:
            effects, idempotent, asks = effects_of(self.server, each)
            made.append(
                McpTool(
                    name=each.shown_as,
                    description=_short(each.description),
                    handler=self._handler(each, effects),
                    effects=effects,
                    files="any" if effects == "workspace" else None if effects == "none" else "context",
                    idempotent=idempotent,
                    asks=asks,
                    params_type=dict,
                    pin=each,
                )
            )
        return made

    def _handler(self, pin: PinnedTool, effects: str) -> Callable[..., Any]:
        async def handle(params: dict[str, Any], *, context: ToolContext) -> ToolResult[Any]:
            return await _Call(self, pin, params, context, effects).run()

        return handle

    async def look_again(self, life: Life) -> None:
        """Compare the server's list with the pinned one: it has said that it is another."""
        future = life.listed()
        await wait_finished(future)
        if future.exception() is None:
            self.change = compared(self.pin, future.result())

    def untold(self) -> McpToolsChanged | None:
        """Return a change that was not told yet."""
        change = self.change
        return None if change is None or change.fingerprint in self.told else change


@dataclass(slots=True, eq=False)
class _Call:
    """One call under way."""

    tools: ServerTools
    pin: PinnedTool
    params: dict[str, Any]
    context: ToolContext
    effects: str
    held: HoldRequired | None = None
    """The question that a person has to answer first."""

    @property
    def server(self) -> McpServer:
        return self.tools.server

    async def run(self) -> ToolResult[Any]:
        """Make the call. What goes wrong with the server is a failed result, not the end of the run."""
        for attempt in (1, 2):
            life = await self._life()
            try:
                answer = await self._answer(life)
            except _Lost as lost:
                if attempt == 1 and (lost.did_nothing or (self._may_repeat() and not lost.is_late)):
                    continue
                raise self._lost(lost) from lost
            self.tools.connection.starts = 0  # It works, so it may die a few times more.
            return self._with_notes(result_of(self.pin.shown_as, answer))
        raise AssertionError("the second attempt returns or raises")

    def _may_repeat(self) -> bool:
        """Say whether a call may run again after the server was lost in the middle of it."""
        return self.effects != "workspace" and effects_of(self.server, self.pin).idempotent

    async def _life(self) -> Life:
        """Return the connected server. Raises `McpError` if it cannot be had."""
        life = self.tools.connection.life()
        await wait_finished(life.ready)
        fresh = life.ready.result()
        if life.list_changed:
            await self.tools.look_again(life)
        elif self.tools.change is None:
            self.tools.change = compared(self.tools.pin, fresh.tools)
        change = self.tools.change
        if change is not None and self.pin.name in (*change.changed, *change.removed):
            raise McpError(
                f"{self.pin.shown_as} was not called: the server {self.server.name} changed or removed it "
                "since this run began, and a run keeps the tools it began with. A new run can use it."
            )
        return life

    async def _answer(self, life: Life) -> wire.CallToolResult:
        """Call the tool and wait, answering what the server asks meanwhile."""
        asked, requests = anyio.create_memory_object_stream[tuple[Any, Future[Any]]](math.inf)

        def ask(params: Any) -> Future[Any]:
            reply: Future[Any] = Future()
            post(params, reply)
            return reply

        post = _posted(lambda params, reply: asked.send_nowait((params, reply)))
        meta = {
            "treenail/call_id": str(self.context.call_id),
            "treenail/run_id": str(self.context.session.session_id),
        }
        call = ServerCall(self.pin.name, self.params, meta, ask, _posted(self._progressed))
        future = life.call(call)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._serve, requests, future)
                try:
                    await wait_finished(future)
                finally:
                    tasks.cancel_scope.cancel()
        except BaseException:
            future.cancel()
            if self.effects == "workspace":
                await self._end_server()
            raise
        finally:
            asked.close()
            requests.close()
        if self.held is not None:
            raise self.held
        return await self._outcome(life, future)

    async def _outcome(self, life: Life, future: Future[wire.CallToolResult]) -> wire.CallToolResult:
        try:
            return future.result()
        except UrlElicitationRequiredError as error:
            answers = [await self._answer_to(each) for each in error.elicitations]
            if self.held is not None:
                raise self.held from error
            if all(isinstance(each, wire.ElicitResult) and each.action == "accept" for each in answers):
                raise _Lost(McpError(error.message), did_nothing=True) from error
            raise McpError(f"{self.pin.shown_as} was not run: the person declined what it needs") from error
        except MCPError as error:
            if life.is_forgotten:
                problem = McpError(
                    f"the MCP server {self.server.name} does not know this connection any more"
                )
                raise _Lost(problem, did_nothing=True) from error
            if not (life.is_over or self._is_made_here(error)):
                # The server has answered: it refuses, and did nothing.
                text = without_secrets(self.server, f"{self.pin.shown_as} failed: {error.message[:2_000]}")
                return wire.CallToolResult(content=[wire.TextContent(text=text)], is_error=True)
            await self._await_end(life)
            raise _Lost(explained(self.server, error, life.output, self.server.timeout)) from error
        except RuntimeError as error:
            # The SDK's word for an answer that does not fit the tool's own description of it.
            text = f"{self.pin.shown_as} has run, but its answer does not fit its own description: {error}"
            return wire.CallToolResult(content=[wire.TextContent(text=text[:2_000])], is_error=True)
        except (CancelledError, TimeoutError, Exception) as error:
            is_late = isinstance(error, TimeoutError)
            if is_late and self.effects == "workspace":
                await self._end_server()
            elif not is_late:
                await self._await_end(life)
            problem = explained(self.server, error, life.output, self.server.timeout)
            raise _Lost(problem, is_late=is_late) from error

    def _is_made_here(self, error: MCPError) -> bool:
        """Say whether an error may be the transport's: then nobody knows what the server has done.

        Behind an address a gateway may answer in a server's place. The SDK makes these errors of that.
        """
        if error.code in (wire.CONNECTION_CLOSED, wire.REQUEST_TIMEOUT):
            return True
        return bool(self.server.url) and error.code in (
            wire.INTERNAL_ERROR,
            wire.INVALID_REQUEST,
            wire.PARSE_ERROR,
        )

    async def _await_end(self, life: Life) -> None:
        """Wait a moment for a server that dies, so that its last words and exit code are known."""
        if self.server.command:
            with anyio.move_on_after(_PATIENCE_S):
                await wait_finished(life.close())

    async def _end_server(self) -> None:
        """End the server's process and wait until it is gone."""
        with anyio.CancelScope(shield=True):
            closed = self.tools.connection.close()
            if closed is not None:
                await wait_finished(closed)

    def _lost(self, lost: _Lost) -> Exception:
        """Return the error of a call whose answer never came."""
        name = self.pin.shown_as
        if self.effects == "workspace":
            return McpError(f"{name} failed: {lost.problem}; what it had changed in the workspace was undone")
        if self._may_repeat():
            return McpError(f"{name} failed: {lost.problem}. It may be called again.")
        if lost.did_nothing:
            return McpError(f"{name} was not run: {lost.problem}")
        return OutcomeUnknownError(unknown_outcome(name, str(lost.problem)))

    def _with_notes(self, result: ToolResult[Any]) -> ToolResult[Any]:
        """Add what the model has to know besides: a changed list, a refusal of the sandbox."""
        notes = []
        change = self.tools.untold()
        if change is not None:
            self.tools.told.add(change.fingerprint)
            self.context.session.dispatch(change)
            notes.append(f"[mcp] {change.told()}")
        if not result.success and self.server.command:
            notes += self._refused(result.message)
        if not notes:
            return result
        text = "\n".join((result.render(), *notes))
        if result.value is not None:
            result.value.text = text
            return ToolResult.ok(result.value, message=text)
        return ToolResult(text, success=result.success)

    def _refused(self, text: str) -> list[str]:
        place = self.tools.connection.place
        kinds = refusals(place.confinement(self.server), text, "", 1)
        allow = {"network": "allow_network = true", "write": "allow_write, or effects = 'workspace'"}
        return [
            f"[sandbox] The server {self.server.name} was refused this ({kind}); do not try again. A person "
            f"can allow it for this server: {allow[kind]}."
            for kind in kinds
            if kind in allow
        ]

    def _progressed(self, done: float, total: float | None, message: str | None) -> None:
        if self.context.heartbeat is not None:
            self.context.heartbeat.beat()
        if self.tools.progress is not None:
            self.tools.progress(str(self.context.call_id), done, total, message or "")

    # .. what a server asks in a call ..

    async def _serve(self, requests: Any, future: Future[Any]) -> None:
        left = _MAX_REQUESTS
        async for params, reply in requests:
            left -= 1
            answer: Any
            if left < 0:
                answer = wire.ErrorData(code=wire.INVALID_REQUEST, message="too many requests in one call")
            elif isinstance(params, wire.CreateMessageRequestParams):
                assert self.tools.sampler is not None
                answer = await self.tools.sampler.answer(params, self.context)
            else:
                answer = await self._answer_to(params)
            if answer is None:
                # Nobody answers now, so the call is cancelled. It is made again when a person has answered.
                future.cancel()
                return
            reply.set_result(answer)

    async def _answer_to(self, params: wire.ElicitRequestParams) -> wire.ElicitResult | wire.ErrorData | None:
        """Return a person's answer to a server's question. If there is none, hold the call."""
        try:
            question = ServerQuestion.of(self.server.name, params)
        except ValueError as error:
            return wire.ErrorData(code=wire.INVALID_PARAMS, message=str(error))
        session = self.context.session
        held = hold_of(session, str(self.context.call_id), attempt_id=question.key)
        if held is not None and self._is_over(held):
            held = None
        answer = None if held is None else answer_of(session, held)
        problem = ""
        for _ in range(_MAX_TRIES):
            answer = answer or await self._asked_now(question, problem, held)
            if answer is None:
                break
            if not answer.approved:
                return wire.ElicitResult(action="decline")
            try:
                return question.answer(answer.note)
            except ValueError as error:
                problem, held, answer = f" The answer did not fit: {error}.", None, None
        if held is None:
            held = self._hold(question, problem)
            session.dispatch(held)
        self.held = HoldRequired(
            held.call_id, held.tool_name, reason=held.reason, is_question=held.is_question
        )
        return None

    async def _asked_now(
        self, question: ServerQuestion, problem: str, held: ToolHeld | None
    ) -> HoldAnswered | None:
        """Ask somebody who is here, and log the answer; None if nobody is."""
        if self.tools.approver is None:
            return None
        asked = {"question": question.text + problem, "options": question.options}
        text = json.dumps(asked, ensure_ascii=False)
        request = PermissionRequest(str(self.context.call_id), ASK_PERSON, text, "none", context=self.context)
        asking = workers.start(partial(self.tools.approver, request))
        await wait_finished(asking)
        try:
            said = asking.result()
        except Exception as error:  # neither yes nor no: the call waits
            _logger.warning("the approver failed on a question of %s", self.server.name, exc_info=error)
            return None
        said = Approval(said) if isinstance(said, bool) else said
        if said is None or (said.approved and not said.note.strip()):
            return None  # A yes without words is not an answer.
        asks = held or self._hold(question, problem)
        answer = HoldAnswered(asks.call_id, said.approved, said.note, "person", asks.hold_id)
        self.context.session.dispatch_all([answer] if held is not None else [asks, answer])
        return answer

    def _hold(self, question: ServerQuestion, problem: str) -> ToolHeld:
        is_harmless = self.effects == "workspace" or self._may_repeat()
        return ToolHeld(
            str(self.context.call_id),
            self.pin.shown_as,
            json.dumps(self.params, ensure_ascii=False),
            f"{question.text}{problem}{'' if is_harmless else f' {_TWICE}'}",
            self.context.state.clock.now(),
            question.key,
            is_question=question.is_in_words,
        )

    def _is_over(self, held: ToolHeld) -> bool:
        """Say whether a hold belongs to an earlier call: some providers use an id again."""
        ends = (each for each in self.context.session[ToolInvoked].all() if each.call_id == held.call_id)
        return any(each.outcome != "interrupted" and each.created_at >= held.created_at for each in ends)


class _Lost(Exception):
    """The server's answer never came."""

    def __init__(self, problem: McpError, *, is_late: bool = False, did_nothing: bool = False) -> None:
        super().__init__(str(problem))
        self.problem, self.is_late, self.did_nothing = problem, is_late, did_nothing


def _posted(callback: Callable[..., object]) -> Callable[..., None]:
    """Return a function that any thread may call to run `callback` in the event loop that runs now."""
    waiting: list[tuple[Any, ...]] = []

    def deliver() -> None:
        while waiting:
            callback(*waiting.pop(0))

    wake = threadsafe(deliver)

    def post(*arguments: Any) -> None:
        waiting.append(arguments)
        wake()

    return post
