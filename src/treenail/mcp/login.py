"""A login by a person at a terminal: they open an address, and the browser comes back to this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

from treenail.errors import McpError
from treenail.mcp.oauth import REDIRECT
from treenail.mcp.server import Login

_PATIENCE_S = 300.0
_MAX_LINE = 16_000

_PAGE = b"You are logged in. You can close this page and go back to the terminal."


def at_a_terminal(show: Callable[[str], None]) -> Login:
    """Return a login that shows a person the address, and waits for the browser to come back."""

    async def log_in(url: str) -> str:
        came: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        expected = urlsplit(REDIRECT)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = (await reader.readline())[:_MAX_LINE].decode("latin-1").split()
            found = urlsplit(line[1]) if len(line) > 1 and line[0] == "GET" else urlsplit("")
            is_it = found.path == expected.path and bool(found.query)
            status, page = (b"200 OK", _PAGE) if is_it else (b"404 Not Found", b"Nothing is here.")
            head = (
                b"HTTP/1.1 %b\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
            )
            writer.write(head % (status, len(page)) + page)
            await writer.drain()
            writer.close()
            if is_it and not came.done():
                came.set_result(f"{REDIRECT}?{found.query}")

        try:
            listening = await asyncio.start_server(answer, expected.hostname, expected.port)
        except OSError as error:
            raise McpError(f"a login needs the port {expected.port} of this machine: {error}") from error
        async with listening:
            show(url)
            return await asyncio.wait_for(came, _PATIENCE_S)

    return log_in
