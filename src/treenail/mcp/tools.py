"""One call of a server's tool: from the run's event loop to the server and back.

A call that a person or a deadline cuts off is cancelled at the server. If the server works in the workspace
its process is ended as well, before anything is undone: what it still wrote would escape the undo.

A server that dies in a call, or does not answer, is started again at the next call. The call itself runs
again if that does no harm; else its outcome is unknown, and the model is told so.

A server may ask a person something in the middle of a call. The call is then cancelled, rolled back and held;
when the answer is there, it is made again from its beginning, and the question is answered from the log.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
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
from treenail.mcp.pins import McpServerPinned, McpToolsChanged, PinnedTool, compared
from treenail.mcp.results import result_of
from treenail.mcp.sampling import Sampler
from treenail.mcp.server import McpServer, Question
from treenail.printable import printable_line
from treenail.sandbox import refusals
from treenail.tools import ReadyTool, ToolContext, ToolHeld, ToolInvoked, ToolResult, answer_of, hold_of

_logger = logging.getLogger("treenail.mcp")

_MAX_DESCRIPTION = 1_024
_SHOWN_ERRORS = 5
_NO_SESSION = "Session terminated"
"""The SDK's word for a server that does not know us any more, and so has done nothing."""
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
        return jsonschema.Draft202012Validator(_without_patterns(self.pin.parameters()), registry=Registry())

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


def _without_patterns(schema: Any) -> Any:
    """Return a schema without regular expressions: a hostile one takes for ever. The server checks."""
    if isinstance(schema, dict):
        return {
            key: _without_patterns(each)
            for key, each in schema.items()
            if not (key == "pattern" and isinstance(each, str)) and key != "patternProperties"
        }
    return [_without_patterns(each) for each in schema] if isinstance(schema, list) else schema


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
        """Compare the server's list with the pinned one, if it has said that it is another."""
        if not life.list_changed:
            return
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
                if self._may_repeat() and attempt == 1 and not lost.is_late:
                    continue
                raise self._lost(lost) from lost
            result = result_of(self.pin.shown_as, answer)
            return self._with_notes(result)
        raise AssertionError("the second attempt returns or raises")

    def _may_repeat(self) -> bool:
        """Say whether a call may run again after the server was lost in the middle of it."""
        return self.effects != "workspace" and effects_of(self.server, self.pin).idempotent

    async def _life(self) -> Life:
        """Return the connected server. Raises `McpError` if it cannot be had."""
        change = self.tools.change
        if change is not None and self.pin.name in (*change.changed, *change.removed):
            raise McpError(
                f"{self.pin.shown_as} was not called: the server {self.server.name} changed or removed it "
                "since this run began, and a run keeps the tools it began with. A new run can use it."
            )
        life = self.tools.connection.life()
        await wait_finished(life.ready)
        fresh = life.ready.result()
        if life.list_changed:
            await self.tools.look_again(life)
        elif self.tools.change is None:
            self.tools.change = compared(self.tools.pin, fresh.tools)
        if self.tools.change is not change:
            return await self._life()
        return life

    async def _answer(self, life: Life) -> wire.CallToolResult:
        """Call the tool and wait, answering what the server asks meanwhile."""
        asked, requests = anyio.create_memory_object_stream[tuple[Any, Future[Any]]](100)

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
            for each in error.elicitations:
                self._answer_to(each)
            raise self.held or McpError(error.message) from error
        except MCPError as error:
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
        if not self.server.url or error.message == _NO_SESSION:
            return False
        return error.code in (wire.INTERNAL_ERROR, wire.INVALID_REQUEST, wire.PARSE_ERROR)

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
        return OutcomeUnknownError(
            f"The outcome of {name} is unknown: {lost.problem}. It was not run again. Find out whether it "
            "took effect before you repeat it."
        )

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
        async for params, reply in requests:
            if isinstance(params, wire.CreateMessageRequestParams):
                sampler = self.tools.sampler
                assert sampler is not None
                reply.set_result(await sampler.answer(params, self.context))
                continue
            answer = await self._answered_now(params) or self._answer_to(params)
            if answer is None:
                # Nobody answers now, so the call is cancelled. It is made again when a person has answered.
                future.cancel()
                return
            reply.set_result(answer)

    async def _answered_now(self, params: wire.ElicitRequestParams) -> wire.ElicitResult | None:
        """Return the answer of somebody who is here; None if nobody is."""
        answerer = self.server.answerer
        if answerer is None:
            return None
        form = params.requested_schema if isinstance(params, wire.ElicitRequestFormParams) else None
        url = params.url if isinstance(params, wire.ElicitRequestURLParams) else ""
        question = Question(
            server=self.server.name, tool=self.pin.shown_as, message=params.message, schema=form, url=url
        )
        asked = workers.start(partial(answerer, question))
        await wait_finished(asked)
        try:
            said = asked.result()
            if said is None or said is False:
                return None if said is None else wire.ElicitResult(action="decline")
            content = None if form is None else _form(form, {} if said is True else dict(said))
        except Exception as error:  # noqa: BLE001  # neither yes nor no: the call waits
            _logger.warning("the answer to %s's question cannot be used: %s", self.server.name, error)
            return None
        return wire.ElicitResult(action="accept", content=content)

    def _answer_to(self, params: wire.ElicitRequestParams) -> wire.ElicitResult | None:
        """Return a person's answer to a server's question. If there is none yet, hold the call."""
        form = params.requested_schema if isinstance(params, wire.ElicitRequestFormParams) else None
        asked = (
            params.url
            if isinstance(params, wire.ElicitRequestURLParams)
            else json.dumps(form, sort_keys=True)
        )
        digest = hashlib.sha256(f"{params.message}\0{asked}".encode()).hexdigest()[:16]
        key = f"mcp:{'address' if form is None else 'form'}:{digest}"  # `ToolHeld` reads it.
        session, call_id = self.context.session, str(self.context.call_id)
        held = hold_of(session, call_id, attempt_id=key)
        if held is not None and self._is_over(held):
            held = None
        answer = None if held is None else answer_of(session, held)
        problem = ""
        if answer is not None:
            if not answer.approved:
                return wire.ElicitResult(action="decline")
            if form is None:
                return wire.ElicitResult(action="accept")
            try:
                return wire.ElicitResult(action="accept", content=_form(form, _noted(answer.note)))
            except ValueError as error:
                problem = f" The answer did not fit: {error}."
        if held is None or answer is not None:
            reason = self._question(params) + problem
            arguments = json.dumps(self.params, ensure_ascii=False)
            now = self.context.state.clock.now()
            session.dispatch(ToolHeld(call_id, self.pin.shown_as, arguments, reason, now, key))
        else:
            reason = held.reason
        self.held = HoldRequired(call_id, self.pin.shown_as, reason=reason)
        return None

    def _is_over(self, held: ToolHeld) -> bool:
        """Say whether a hold belongs to an earlier call: some providers use an id again."""
        ends = (each for each in self.context.session[ToolInvoked].all() if each.call_id == held.call_id)
        return any(each.outcome != "interrupted" and each.created_at >= held.created_at for each in ends)

    def _question(self, params: wire.ElicitRequestParams) -> str:
        begun = f"the server {self.server.name} asks: {printable_line(params.message[:1_000])}"
        if isinstance(params, wire.ElicitRequestURLParams):
            url = printable_line(params.url[:1_000])
            return f"{begun} (open {url}, and say yes when you are done)"
        fields = params.requested_schema.get("properties", {})
        needed = params.requested_schema.get("required", ())
        shape = {
            name: f"{each.get('type', 'text')}{'' if name in needed else ', optional'}"
            for name, each in fields.items()
            if isinstance(each, dict)
        }
        return f"{begun} (say yes with a note that has its fields: {json.dumps(shape, ensure_ascii=False)})"


class _Lost(Exception):
    """The server's answer never came."""

    def __init__(self, problem: McpError, *, is_late: bool = False) -> None:
        super().__init__(str(problem))
        self.problem = problem
        self.is_late = is_late


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


def _noted(note: str) -> dict[str, Any]:
    """Return the fields that a person has written into the note of an answer. Raises `ValueError`."""
    if not note.strip():
        return {}
    try:
        given = json.loads(note)
    except ValueError:
        raise ValueError("it is not JSON") from None
    if not isinstance(given, dict):
        raise ValueError("it is not a JSON object")
    return given


def _form(schema: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer as the server wants it: what was given, over the defaults. Raises `ValueError`."""
    fields = schema.get("properties", {})
    fields = {name: each for name, each in fields.items() if isinstance(each, dict)}
    content = {name: each["default"] for name, each in fields.items() if "default" in each} | dict(given)
    checked = jsonschema.Draft202012Validator(_without_patterns(dict(schema)), registry=Registry())
    for error in checked.iter_errors(content):
        raise ValueError(f"{'.'.join(map(str, error.path)) or 'the object'}: {error.message[:200]}")
    return content
