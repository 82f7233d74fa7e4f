"""Servers that are reached over HTTP: logging in, where the tokens are, and that nobody else sees them."""

from __future__ import annotations

import http.server
import json
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

import pytest
from tests.mcp_client.mcp_kit import calls, failures, results, run

from treenail.log import MemoryLog
from treenail.mcp import McpServer, at_a_terminal

SECRETS = ("access-token-1", "access-token-2", "refresh-token-1", "refresh-token-2")


class Guarded(http.server.ThreadingHTTPServer):
    """An MCP server with one tool, and the authorization server in front of it."""

    good: str | None = None
    """The token that is accepted."""
    count = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Guarded

    def log_message(self, *arguments: Any) -> None: ...

    def reply(self, status: int, data: Any = None, **headers: str) -> None:
        body = b"" if data is None else json.dumps(data).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        url, place = self.server.url, urlsplit(self.path)
        if place.path.startswith("/.well-known/oauth-protected-resource"):
            self.reply(200, {"resource": f"{url}/mcp", "authorization_servers": [url]})
        elif place.path.startswith("/.well-known/oauth-authorization-server"):
            names = {"authorization": "authorize", "token": "token", "registration": "register"}
            points = {f"{name}_endpoint": f"{url}/{path}" for name, path in names.items()}
            methods = {"code_challenge_methods_supported": ["S256"], "response_types_supported": ["code"]}
            self.reply(200, {"issuer": url, **points, **methods})
        elif place.path == "/authorize":
            asked = parse_qs(place.query)
            self.reply(302, Location=f"{asked['redirect_uri'][0]}?code=once&state={asked['state'][0]}")
        else:
            self.reply(405)

    def do_DELETE(self) -> None:
        self.reply(200)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/register":
            self.reply(201, {**json.loads(body), "client_id": "registered"})
        elif self.path == "/token":
            self.server.count += 1
            number = self.server.count
            self.server.good = f"access-token-{number}"
            token = {"access_token": self.server.good, "token_type": "Bearer", "expires_in": 3600}
            self.reply(200, {**token, "refresh_token": f"refresh-token-{number}"})
        elif self.headers.get("Authorization") != f"Bearer {self.server.good}":
            where = f'Bearer resource_metadata="{self.server.url}/.well-known/oauth-protected-resource/mcp"'
            self.reply(401, WWW_Authenticate=where)
        else:
            self.reply(*self.answer(json.loads(body)))

    def answer(self, message: dict[str, Any]) -> tuple[int, Any]:
        results = {
            "initialize": {
                "protocolVersion": "2025-11-25",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "guarded", "version": "1"},
            },
            "tools/list": {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]},
            "tools/call": {"content": [{"type": "text", "text": "seen"}]},
        }
        if "id" not in message:
            return 202, None
        if message["method"] not in results:
            return 200, {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "no"}}
        return 200, {"jsonrpc": "2.0", "id": message["id"], "result": results[message["method"]]}


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    with Guarded(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(place))
    return place


def browsing(url: str) -> None:
    """A person who opens the address, logs in, and is sent back."""
    threading.Thread(target=lambda: urlopen(url, timeout=60).read(), daemon=True).start()


def test_a_login_is_kept_for_later_runs_and_renewed_and_nobody_sees_it(guarded: Guarded, state: Path) -> None:
    address = f"{guarded.url}/mcp"
    script = calls(("web__look", {}))
    web = McpServer("web", url=address, ask=False)
    with run(web, script) as ended:
        assert "asks for a login; log in with: treenail mcp test web" in failures(ended)[0]
    log = MemoryLog()
    with run(replace(web, login=at_a_terminal(browsing)), script, store=log) as ended:
        assert results(ended) == ["seen"]
        (file,) = (state / "treenail" / "mcp").iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert "access-token-1" in file.read_text()
        whole = repr([value for _, value in ended.execution_state.session.events()])
        assert not any(secret in whole for secret in SECRETS)
    with run(web, script) as ended:
        assert results(ended) == ["seen"]
        assert guarded.count == 1
    # Another server at this address may be another account: it is not logged in.
    with run(replace(web, name="other"), ["Done."]) as ended:
        assert "asks for a login; log in with: treenail mcp test other" in failures(ended)[0]
    # An hour later the token has expired. It is renewed without a person.
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({**stored, "expires_at": 1.0}))
    guarded.good = None
    with run(web, script) as ended:
        assert results(ended) == ["seen"]
        assert "refresh-token-2" in file.read_text()


def test_headers_name_variables_and_their_values_are_struck_out(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded.good = "access-token-1"
    monkeypatch.setenv("WEB_TOKEN", "access-token-1")
    headers = {"Authorization": "Bearer ${WEB_TOKEN}"}
    server = McpServer("web", url=f"{guarded.url}/mcp", headers=headers, ask=False)
    with run(server, calls(("web__look", {}))) as ended:
        assert results(ended) == ["seen"]
        whole = repr([value for _, value in ended.execution_state.session.events()])
        assert "access-token-1" not in whole
    assert "access-token-1" not in repr(server)
    guarded.good = "another"
    with run(server, ["Done."]) as ended:
        assert failures(ended)[0].startswith("the MCP server web ")
        assert "access-token-1" not in failures(ended)[0]
