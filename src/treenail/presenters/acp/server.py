"""`treenail acp`: an agent of the Agent Client Protocol, over the input and the output.

It shows and steers runs, and decides nothing: a session is a run of the project's store, under the same id,
so that `treenail resume`, `show`, `diff` and `undo` know it, and an editor can load what was begun elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import acp
from acp import RequestError, schema
from acp.core import AgentSideConnection

import treenail
from treenail.clock import new_id
from treenail.errors import UsageError
from treenail.mcp import McpServer
from treenail.presenters.acp import listing, servers, wire
from treenail.presenters.acp.buffers import Buffers
from treenail.presenters.acp.prompts import task_of
from treenail.presenters.acp.runs import EditorRuns, store_of
from treenail.presenters.acp.session import EditorSession, beside, request_error
from treenail.presenters.acp.stdio import StdioTransport, claim
from treenail.presenters.cli import models
from treenail.presenters.cli.setup import RunSetup
from treenail.providers import install_command
from treenail.tools import PermissionMode

_logger = logging.getLogger("treenail.acp")

_PATIENCE_S = 30.0
"""How long the end of the process waits for turns to record their endings."""

_BUFFER_S = 5.0
"""How long an editor may take to say what is in a buffer."""

_AUTH = schema.AuthMethodAgent(
    id="environment",
    name="API key in the environment",
    description=models.NO_PROVIDER,
)

_MODES = {"ask": PermissionMode.ASK, "auto": PermissionMode.AUTO, "read-only": PermissionMode.READ_ONLY}
_NAMES = {mode: name for name, mode in _MODES.items()}


class TreenailAgent:
    """The agent's side of the protocol."""

    def __init__(self, flags: Mapping[str, object | None]) -> None:
        self._flags = dict(flags)
        self._sessions: dict[str, EditorSession] = {}
        self._editor: Any = None
        self._reads_buffers = False
        self._loop = asyncio.get_running_loop()
        self._greetings: set[asyncio.Task[None]] = set()
        self._prompts: set[asyncio.Task[Any]] = set()

    def on_connect(self, conn: Any) -> None:
        """Keep the connection to the editor."""
        self._editor = conn

    # .. the protocol ..

    async def initialize(
        self,
        protocol_version: int,
        client_capabilities: schema.ClientCapabilities | None = None,
        client_info: schema.Implementation | None = None,
        **_: Any,
    ) -> schema.InitializeResponse:
        """Agree on a version and say what this agent can do."""
        files = None if client_capabilities is None else client_capabilities.fs
        self._reads_buffers = bool(files is not None and files.read_text_file)
        return schema.InitializeResponse(
            protocol_version=acp.PROTOCOL_VERSION,
            agent_info=schema.Implementation(name="treenail", title="Treenail", version=treenail.__version__),
            agent_capabilities=schema.AgentCapabilities(
                load_session=True,
                prompt_capabilities=schema.PromptCapabilities(image=True, audio=False, embedded_context=True),
                mcp_capabilities=schema.McpCapabilities(http=servers.is_available(), sse=False),
                session_capabilities=schema.SessionCapabilities(list=schema.SessionListCapabilities()),
            ),
            auth_methods=[_AUTH],
        )

    async def authenticate(self, method_id: str, **_: Any) -> schema.AuthenticateResponse:
        """Look again for a key: it comes from the environment of this process."""
        await beside(partial(RunSetup, self._flags))
        return schema.AuthenticateResponse()

    async def new_session(self, cwd: str, mcp_servers: Any = None, **_: Any) -> schema.NewSessionResponse:
        """Begin a session, and its run."""
        session = self._make(cwd, new_id(), mcp_servers)
        await beside(session.runs.begin)
        self._sessions[session.session_id] = session
        self._greet(session)
        return schema.NewSessionResponse(
            session_id=session.session_id, modes=self._modes(session), config_options=self._options(session)
        )

    async def load_session(
        self, cwd: str, session_id: str, mcp_servers: Any = None, **_: Any
    ) -> schema.LoadSessionResponse:
        """Open a run of the project: its whole history is shown before this answers."""
        known = self._sessions.get(session_id)
        if known is not None:
            await known.stop("cancelled", "the editor loaded the session again")
        session = self._make(cwd, _run_id(session_id), mcp_servers)
        await beside(session.runs.open)
        self._sessions[session.session_id] = session
        await session.load()
        self._greet(session)
        return schema.LoadSessionResponse(modes=self._modes(session), config_options=self._options(session))

    async def list_sessions(
        self, cwd: str | None = None, cursor: str | None = None, **_: Any
    ) -> schema.ListSessionsResponse:
        """List the runs of a project, the newest first."""
        directory = Path.cwd() if cwd is None else _directory(cwd)
        store = await beside(partial(store_of, directory, self._flags))
        found, following = await beside(partial(listing.page, store, directory, cursor, cwd is not None))
        return schema.ListSessionsResponse(sessions=found, next_cursor=following)

    async def prompt(self, session_id: str, prompt: list[Any], **_: Any) -> schema.PromptResponse:
        """Work on a prompt until its turn has ended."""
        session = self._known(session_id)
        try:
            text, images = task_of(prompt, session.runs.root)
        except UsageError as error:
            raise request_error(error) from error
        working = asyncio.current_task()
        assert working is not None
        self._prompts.add(working)
        working.add_done_callback(self._prompts.discard)
        return await session.prompt(text, images)

    async def cancel(self, session_id: str, **_: Any) -> None:
        """Stop what a session does."""
        if session_id in self._sessions:
            self._sessions[session_id].cancel()

    async def set_session_mode(
        self, session_id: str, mode_id: str, **_: Any
    ) -> schema.SetSessionModeResponse:
        """Choose how tools with effects are run. It holds from the next call on, also in this turn."""
        session = self._known(session_id)
        await self._set_mode(session, mode_id)
        await self._editor.session_update(
            session_id,
            schema.ConfigOptionUpdate(
                session_update="config_option_update", config_options=self._options(session)
            ),
        )
        return schema.SetSessionModeResponse()

    async def set_config_option(
        self, config_id: str, session_id: str, value: str | bool, **_: Any
    ) -> schema.SetSessionConfigOptionResponse:
        """Choose the mode, or the model of the next turn."""
        session = self._known(session_id)
        if config_id == "mode":
            await self._set_mode(session, str(value))
            await self._editor.session_update(
                session_id,
                schema.CurrentModeUpdate(
                    session_update="current_mode_update", current_mode_id=_NAMES[session.runs.mode]
                ),
            )
        elif config_id == "model":
            await beside(partial(session.runs.choose_model, str(value)))
        else:
            raise RequestError(-32602, f"there is no option {config_id!r}; there are mode and model")
        return schema.SetSessionConfigOptionResponse(config_options=self._options(session))

    # .. the end ..

    async def stop(self, reason: str, detail: str) -> None:
        """Stop every turn, and wait until its ending is in the log."""
        await asyncio.gather(*(each.stop(reason, detail) for each in self._sessions.values()))
        if self._prompts:
            # They are answered, too, if anybody still listens.
            await asyncio.wait(self._prompts)

    # .. parts ..

    def _make(self, cwd: str, run_id: UUID, mcp_servers: Any) -> EditorSession:
        runs = EditorRuns(_directory(cwd), run_id, dict(self._flags), self._servers(mcp_servers))
        session = EditorSession(str(run_id), runs, self._editor)
        if self._reads_buffers:
            runs.buffers = self._buffers(session)
        return session

    def _servers(self, named: Any) -> tuple[McpServer, ...]:
        if named and not servers.is_available():
            # Editors name all servers that they know, whether or not anybody needs them here.
            _logger.warning("MCP servers are not used: install the extra with %s", install_command("mcp"))
            return ()
        try:
            return servers.servers_of(named)
        except UsageError as error:
            raise request_error(error) from error

    def _buffers(self, session: EditorSession) -> Buffers:
        """Return the function with which a turn's thread reads the editor's buffers."""

        async def read(path: str) -> str | None:
            asked = self._editor.read_text_file(session_id=session.session_id, path=path)
            return str((await asyncio.wait_for(asked, _BUFFER_S)).content)

        def buffer(path: str) -> str | None:
            place = str(session.runs.root / path)
            try:
                return asyncio.run_coroutine_threadsafe(read(place), self._loop).result(2 * _BUFFER_S)
            except (RequestError, ConnectionError, TimeoutError, ValueError) as error:
                _logger.info("the editor does not say what is in %s: %s", path, error)
                return None

        return buffer

    def _greet(self, session: EditorSession) -> None:
        """Say what can be typed, and ask what is open, after the editor has got the session."""

        async def greet() -> None:
            try:
                await session.greet()
            except (RequestError, ConnectionError) as error:
                _logger.warning("the editor could not be told about the session: %s", error)

        task = asyncio.create_task(greet())
        self._greetings.add(task)
        task.add_done_callback(self._greetings.discard)

    def _known(self, session_id: str) -> EditorSession:
        if session_id not in self._sessions:
            raise RequestError(-32602, f"there is no session {session_id!r} here; load it first")
        return self._sessions[session_id]

    async def _set_mode(self, session: EditorSession, name: str) -> None:
        mode = _MODES.get(name.replace("_", "-"))
        if mode is None:
            raise RequestError(-32602, f"there is no mode {name!r}; there are {', '.join(_MODES)}")
        await session.choose_mode(mode)

    def _modes(self, session: EditorSession) -> schema.SessionModeState:
        return wire.modes(_NAMES[session.runs.mode])

    def _options(self, session: EditorSession) -> list[Any]:
        return wire.config_options(_NAMES[session.runs.mode], session.runs.model, session.runs.models())


def _directory(cwd: str) -> Path:
    path = Path(cwd)
    if not path.is_absolute():
        raise RequestError(-32602, f"the working directory must be an absolute path, not {cwd!r}")
    return path


def _run_id(session_id: str) -> UUID:
    try:
        return UUID(session_id)
    except ValueError as error:
        raise RequestError(-32602, f"{session_id!r} is not the id of a session") from error


async def serve(flags: Mapping[str, object | None], reading: int, writing: int) -> None:
    """Serve an editor until it closes its end, or until this process is told to end."""
    agent = TreenailAgent(flags)
    transport = StdioTransport(reading, writing)
    connection = AgentSideConnection(cast(Any, agent), transport, listening=False)
    why = ("cancelled", "the editor closed the connection")
    listening = asyncio.create_task(connection.listen())
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(each, told.set)
    ending = asyncio.create_task(told.wait())
    await asyncio.wait((listening, ending), return_when=asyncio.FIRST_COMPLETED)
    if told.is_set():
        why = ("terminated", "the process was told to end")
    try:
        await asyncio.wait_for(agent.stop(*why), _PATIENCE_S)
        with suppress(ConnectionError):
            await asyncio.wait_for(transport.flush(), _BUFFER_S)
    except TimeoutError:
        _logger.error("a turn did not end within %g s; the next one to open its run recovers it", _PATIENCE_S)
    # Threads of turns and of the pipe may still be at work; nothing that they do matters any more.
    sys.stderr.flush()
    os._exit(0)


def main(flags: Mapping[str, object | None]) -> None:
    """Take input and output for the protocol, and serve."""
    asyncio.run(serve(flags, *claim()))
