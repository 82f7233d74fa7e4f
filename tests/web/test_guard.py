"""Who may speak with the inspector, without a browser: every request has to pass the same checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.web.inspecting import Server
from tests.web.recorded import Recorded


def test_nothing_is_read_without_the_token(server: Server, recorded: Recorded) -> None:
    """Other users of the machine reach the port, and see the empty page alone."""
    run = recorded.runs["completed"]
    for path in ("/api/about", "/api/runs", f"/api/runs/{run}", f"/api/runs/{run}/rows", "/api/stream"):
        assert server.ask(path)[0] == 401
    assert server.ask("/api/login", {"token": "x" * 43})[0] == 401
    assert server.ask("/api/login", {"token": None})[0] == 401
    assert server.ask("/api/about", cookie=f"{server.login().partition('=')[0]}=x")[0] == 401
    assert server.ask("/")[0] == 200
    assert server.ask("/api/about", cookie=server.login())[0] == 200


def test_the_cookie_is_for_this_server_and_for_no_script(server: Server) -> None:
    _, _, headers = server.ask("/api/login", {"token": server.token})
    cookie = headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert server.token not in headers["set-cookie"]


def test_another_name_for_this_address_is_refused(server: Server) -> None:
    """A page that points its own name here (DNS rebinding) gets nothing, with a cookie or without."""
    cookie = server.login()
    port = server.url.rstrip("/").rpartition(":")[2]
    assert server.ask("/api/about", cookie=cookie, host=f"localhost:{port}")[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1"):
        assert server.ask("/", host=host)[0] == 421
        assert server.ask("/api/about", cookie=cookie, host=host)[0] == 421


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_another_sites_page_is_refused(server: Server, origin: str) -> None:
    cookie = server.login()
    assert server.ask("/api/about", cookie=cookie, origin=origin)[0] == 403
    assert server.ask("/api/login", {"token": server.token}, origin=origin)[0] == 403


def test_a_request_from_elsewhere_is_known_by_what_the_browser_says(server: Server) -> None:
    cookie = server.login()
    assert server.ask("/api/about", cookie=cookie, sec_fetch_site="same-origin")[0] == 200
    for site in ("cross-site", "same-site"):
        assert server.ask("/api/about", cookie=cookie, sec_fetch_site=site)[0] == 403


def test_every_answer_forbids_scripts_frames_and_guesses(server: Server) -> None:
    for path in ("/", "/page/app.js", "/api/about", "/nowhere"):
        headers = {name.lower(): value for name, value in server.ask(path)[2].items()}
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "name", ["../server.py", "vendor/../../guard.py", "%2e%2e/server.py", "..%2fserver.py", "/etc/passwd"]
)
def test_no_path_leads_out_of_the_page(server: Server, name: str) -> None:
    status, answer, _ = server.ask(f"/page/{name}")
    assert status == 404, answer


def test_bad_requests_are_one_clear_error(server: Server, recorded: Recorded) -> None:
    cookie, run = server.login(), recorded.runs["completed"]
    unknown = "00000000-0000-0000-0000-000000000000"
    for path, status in (
        (f"/api/runs/{unknown}", 404),
        (f"/api/runs/{run}/rows?first=x", 400),
        (f"/api/runs/{run}/rows?first=-1", 400),
        (f"/api/runs/{run}/rows/99999", 409),
        (f"/api/runs/{run}/events/99999", 409),
        (f"/api/runs/{run}/diff?call=1", 409),
        ("/api/runs?parent=x", 400),
        ("/api/nothing", 404),
    ):
        got, answer, _ = server.ask(path, cookie=cookie)
        assert (got, bool(answer["error"])) == (status, True), path


def test_beyond_this_machine_it_needs_a_token_of_yours(recorded: Recorded, tmp_path: Path) -> None:
    """It refuses, and says what to do: a token file, and TLS in front."""
    command = [sys.executable, "-m", "treenail", "view", "--no-open", "--store", str(recorded.store)]

    def started(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *options], capture_output=True, text=True, timeout=60, check=False)

    ended = started("--host", "0.0.0.0")
    assert ended.returncode == 2
    assert "--token-file" in ended.stderr
    assert "TLS" in ended.stderr
    token = tmp_path / "token"
    token.write_text("x" * 32)
    token.chmod(0o644)
    ended = started("--token-file", str(token))
    assert ended.returncode == 2
    assert "chmod 600" in ended.stderr
