"""The protocol: one thread and event loop per server, with the official SDK's client in it.

Theory of operation
-------------------
The SDK's task groups must be left in the task that entered them, and a run's event loop ends with the run.
So each server has a thread with a loop of its own, and in it one task that enters the client, waits, and
leaves it. That thread also starts the server's process, which the kernel ends with the thread.

A `Life` is one such thread. When the server is gone its life is over, and `Connection.life()` begins another
one, a few times at most. Everything else comes to the loop as a coroutine and goes back as a future.

While a call is under way the server may ask for something: an answer of a person, an answer of the model.
Such a request goes to the call's `ask`, which runs in the run's own loop (`tools.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import anyio
import mcp_types as wire
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import FileUrl, ValidationError

import treenail
from treenail.errors import McpError, TreenailError
from treenail.mcp.listing import pinned
from treenail.mcp.oauth import http_client, login_problem
from treenail.mcp.pins import McpServerPinned, PinnedTool, fingerprint
from treenail.mcp.server import McpServer
from treenail.mcp.stdio import MAX_MESSAGE_BYTES, Output, Place, process
from treenail.printable import printable_line

_logger = logging.getLogger("treenail.mcp")

T = TypeVar("T")

# The SDK reports failures to loggers that nobody has configured, which would write to the terminal. What
# matters comes back as an error.
for _name in ("mcp", "client"):
    logging.getLogger(_name).addHandler(logging.NullHandler())

MAX_STARTS = 5
"""How often a server is started before one of its calls works."""
_LEAVE_S = 2.0
"""How long a server at an address may take to say goodbye."""
_MAX_PAGES = 100
_MAX_INSTRUCTIONS = 4_000
_SHOWN = 2_000

Ask = Callable[[Any], "Future[Any]"]
"""Passes a server's request on to the run that the call belongs to, and returns its answer."""


@dataclass(slots=True, eq=False)
class ServerCall:
    """A call under way: where its progress is told, and who answers the server's requests meanwhile."""

    name: str
    arguments: dict[str, Any]
    meta: Mapping[str, str]
    ask: Ask
    progressed: Callable[[float, float | None, str | None], None]
    limit: anyio.CancelScope | None = None
    """Ends the call when nothing has come for too long."""
    asking: int = 0
    """How many requests of the server are open: meanwhile it waits for us, and not we for it."""

    def allow(self, seconds: float) -> None:
        """Give the server so much time from now on."""
        if self.limit is not None:
            self.limit.deadline = math.inf if self.asking else anyio.current_time() + seconds


class Life:
    """One connected client, on a thread and event loop of its own."""

    def __init__(self, server: McpServer, place: Place) -> None:
        self.server = server
        self.place = place
        self.output = Output()
        self.is_over = False
        self.list_changed = False
        """Whether the server has said that its list of tools is another one."""
        self.is_forgotten = False
        """Whether a server at an address has forgotten this connection, as after a restart."""
        self.calls: list[ServerCall] = []
        self._client: Client | None = None
        self._is_closing = False
        self._whole: anyio.CancelScope | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leave: asyncio.Event | None = None
        self.ready: Future[McpServerPinned] = Future()
        self._thread = threading.Thread(target=self._run, name=f"treenail-mcp-{server.name}", daemon=True)
        self._thread.start()

    # .. the thread ..

    def _run(self) -> None:
        try:
            anyio.run(self._live, backend="asyncio")
        except BaseException as error:  # noqa: BLE001  # told to whoever waits; a thread has nobody to raise it to
            self._fail(error)
        finally:
            self.is_over = True
            self._fail(McpError("the connection was closed"))

    def _fail(self, error: BaseException) -> None:
        if not self.ready.done():
            self.ready.set_exception(self._explained(error))

    async def _live(self) -> None:
        self._loop, self._leave = asyncio.get_running_loop(), asyncio.Event()
        async with anyio.create_task_group() as tasks:
            self._whole = tasks.cancel_scope
            if self._is_closing:
                return
            tasks.start_soon(self._watch)
            try:
                with anyio.fail_after(self.server.start_timeout) as starting:
                    async with self._connected() as client:
                        listed = await self._listed(client)
                        self._client = client
                        starting.deadline = float("inf")
                        tasks.start_soon(self._subscribe, client)
                        if not self.ready.done():
                            self.ready.set_result(self._pin(client, listed))
                        await self._leave.wait()
                        starting.deadline = anyio.current_time() + _LEAVE_S
            finally:
                self.is_over = True
                tasks.cancel_scope.cancel()

    async def _watch(self) -> None:
        """Leave when the process says nothing more."""
        if self.server.command:
            await self.output.over.wait()
            self.is_over = True
            assert self._leave is not None
            self._leave.set()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        server = self.server
        options: dict[str, Any] = {
            "client_info": wire.Implementation(name="treenail", version=treenail.__version__),
            "message_handler": self._heard,
            "elicitation_callback": self._asked,
            "cache": None,
        }
        if server.sampling:
            options["sampling_callback"] = self._asked
        if server.command:
            options["list_roots_callback"] = self._roots
            async with Client(process(server, self.place, self.output), **options) as client:
                yield client
            return
        async with (
            http_client(server, self._forgotten) as http,
            Client(
                streamable_http_client(server.url, http_client=http, max_sse_event_size=MAX_MESSAGE_BYTES),
                **options,
            ) as client,
        ):
            yield client

    def _forgotten(self) -> None:
        self.is_forgotten = True

    # .. what the server says ..

    async def _subscribe(self, client: Client) -> None:
        """Hear of changes to the list of tools; servers of the newer protocol tell only those who ask."""
        tools = client.server_capabilities.tools
        if client.protocol_version not in MODERN_PROTOCOL_VERSIONS or tools is None or not tools.list_changed:
            return
        try:
            async with client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    self.list_changed = True
        except Exception as error:  # noqa: BLE001  # the list is compared at each start all the same
            _logger.info("changes of %s's tools are not heard of: %s", self.server.name, error)

    async def _heard(self, message: object) -> None:
        if isinstance(message, wire.ToolListChangedNotification):
            self.list_changed = True

    async def _roots(self, _: object) -> wire.ListRootsResult:
        return wire.ListRootsResult(
            roots=[wire.Root(uri=FileUrl(self.place.directory.as_uri()), name="workspace")]
        )

    async def _asked(self, _: object, params: Any) -> Any:
        """Pass a request of the server on to the oldest call under way."""
        if not self.calls:
            return wire.ErrorData(code=wire.INVALID_REQUEST, message="no call is under way")
        call = self.calls[0]
        call.asking += 1
        call.allow(self.server.timeout)
        try:
            return await asyncio.wrap_future(call.ask(params))
        finally:
            call.asking -= 1
            call.allow(self.server.timeout)

    async def _listed(self, client: Client) -> Sequence[wire.Tool]:
        if client.server_capabilities.tools is None:
            return ()
        found: list[wire.Tool] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise McpError(f"the MCP server {self.server.name} lists its tools on more than {_MAX_PAGES} pages")

    def _pin(self, client: Client, listed: Sequence[wire.Tool]) -> McpServerPinned:
        server = self.server
        wanted = [each for each in listed if not server.tools or each.name in server.tools]
        tools, refused = pinned(server.name, wanted)
        names = {each.name for each in listed}
        refused += tuple(f"{each}: the server has no such tool" for each in server.tools if each not in names)
        info = client.server_info
        return McpServerPinned(
            server=server.name,
            fingerprint=fingerprint(tools),
            tools=tools,
            refused=refused,
            title="" if info is None else f"{info.name} {info.version}"[:200],
            protocol=client.protocol_version,
            instructions=(client.instructions or "")[:_MAX_INSTRUCTIONS] if server.trust else "",
            reached=server.reached,
            confinement=self.place.confinement(server).described() if server.command else "",
        )

    # .. from other threads ..

    def submit(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> Future[T]:
        """Do something with the client, in its own loop."""
        assert self._loop is not None
        assert self._client is not None
        coroutine = work(self._client)
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:
            coroutine.close()
            raise self._explained(error) from error

    def call(self, call: ServerCall) -> Future[wire.CallToolResult]:
        """Call a tool."""
        return self.submit(lambda client: self._call(client, call))

    async def _call(self, client: Client, call: ServerCall) -> wire.CallToolResult:
        async def progressed(progress: float, total: float | None, message: str | None) -> None:
            call.allow(self.server.timeout)
            call.progressed(progress, total, message)

        self.calls.append(call)
        try:
            with anyio.fail_after(self.server.timeout) as call.limit:
                return await client.call_tool(
                    call.name,
                    call.arguments,
                    progress_callback=progressed,
                    meta=cast("wire.RequestParamsMeta", dict(call.meta)),
                )
        finally:
            self.calls.remove(call)

    def listed(self) -> Future[tuple[PinnedTool, ...]]:
        """Ask for the list of tools again."""

        async def again(client: Client) -> tuple[PinnedTool, ...]:
            self.list_changed = False
            with anyio.fail_after(self.server.timeout):
                return self._pin(client, await self._listed(client)).tools

        return self.submit(again)

    def close(self) -> Future[None]:
        """Leave the client and end the process. The future is done when both have happened."""
        done: Future[None] = Future()

        def stop() -> None:
            if self._client is None and self._whole is not None:
                self._whole.cancel()  # It is still starting.
            elif self._leave is not None:
                self._leave.set()

        def leave() -> None:
            self._is_closing = True
            with suppress(RuntimeError):
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(stop)
            self._thread.join()
            done.set_result(None)

        threading.Thread(target=leave, name="treenail-mcp-close", daemon=True).start()
        return done

    # .. errors ..

    def _explained(self, error: BaseException) -> McpError:
        """Return an error that says which server failed, and everything that is known about why."""
        return explained(self.server, error, self.output, self.server.start_timeout)


def explained(server: McpServer, error: BaseException, output: Output, seconds: float) -> McpError:
    """Return an error that says which server failed, and everything that is known about why."""
    found = _root(error)
    if isinstance(found, McpError):
        return found
    problem = login_problem(server, found)
    if problem is not None:
        return McpError(problem)
    if isinstance(found, TreenailError):
        return McpError(f"the MCP server {server.name} was not started: {found}")
    if isinstance(found, TimeoutError):
        what = f"did not answer within {seconds:g} s"
    elif isinstance(found, MCPError):
        what = f"failed: {found.message[:_SHOWN]}"
    elif isinstance(found, ValidationError):
        first = found.errors()[0]
        where = ".".join(map(str, first["loc"]))[:200]
        what = f"sent something that is not as the protocol says: {found.title}, {where}: {first['msg']}"
    else:
        what = f"could not be reached: {type(found).__name__}: {str(found)[:_SHOWN]}"
    more = output.described()
    text = f"the MCP server {server.name} {what}" + (f" ({more})" if more else "")
    return McpError(printable_line(without_secrets(server, text)))


def _root(error: BaseException) -> BaseException:
    """Return the error that a group of errors is about."""
    while isinstance(error, BaseExceptionGroup):
        kinds = [each for each in error.exceptions if not isinstance(each, asyncio.CancelledError)]
        error = (kinds or list(error.exceptions))[0]
    return error


def without_secrets(server: McpServer, text: str) -> str:
    """Return a text without the values that a server was given in confidence."""
    for secret in server.secrets():
        text = text.replace(secret, "***")
    return text


class Connection:
    """A server in one run: its present life, and the next one if it dies."""

    def __init__(self, server: McpServer, place: Place) -> None:
        self.server = server
        self.place = place
        self.starts = 0
        self.now: Life | None = None

    def life(self) -> Life:
        """Return the server's present life; begin another one if that is over. It may not be ready yet."""
        if self.now is not None and self.now.is_forgotten:
            self.now.close()
            self.now = None
        if self.now is None or self.now.is_over:
            if self.starts >= MAX_STARTS:
                raise McpError(
                    f"the MCP server {self.server.name} was started {self.starts} times in this run and did "
                    "not stay; it is not started again"
                )
            self.starts += 1
            self.now = Life(self.server, self.place)
        return self.now

    def close(self) -> Future[None] | None:
        """End the server, if it runs. The future is done when it has ended."""
        life, self.now = self.now, None
        return None if life is None else life.close()
