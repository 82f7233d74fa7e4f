"""Streamable HTTP on this machine only: it asks for a token, and checks the Host and Origin headers."""

from __future__ import annotations

import hmac
import socket
from typing import Any

import uvicorn
from mcp.server import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from treenail.errors import UsageError

PATH = "/mcp"
_HOST = "127.0.0.1"


class _Guarded:
    """Refuses each request that does not carry the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._wanted = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] != "http" or hmac.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
            return
        refused = JSONResponse(
            {"error": "this server asks for its token: Authorization: Bearer TOKEN"},
            status_code=401,
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refused(scope, receive, send)


def listening(port: int) -> socket.socket:
    """Return a socket that listens on this machine only; port 0 takes a free one."""
    try:
        return socket.create_server((_HOST, port))
    except OSError as error:
        raise UsageError(
            f"port {port} cannot be used: {error.strerror}; choose another one with --port"
        ) from error


def serve(server: MCPServer[Any], listener: socket.socket, token: str | None) -> None:
    """Serve until a signal ends it. Only a test may leave the token out."""
    port = listener.getsockname()[1]
    hosts = [f"{name}:{port}" for name in (_HOST, "localhost")]
    security = TransportSecuritySettings(
        allowed_hosts=hosts, allowed_origins=[f"http://{each}" for each in hosts]
    )
    app: ASGIApp = server.streamable_http_app(
        streamable_http_path=PATH, transport_security=security, host=_HOST
    )
    if token is not None:
        app = _Guarded(app, token)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    uvicorn.Server(config).run(sockets=[listener])
