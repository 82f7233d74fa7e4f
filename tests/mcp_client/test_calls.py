"""A call of a server's tool is a transaction: effects, crashes, time, cancellation, and what comes back."""

from __future__ import annotations

import http.server
import json
import math
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest
from tests.mcp_client.mcp_kit import calls, fake, outcomes, results, run

from treenail import Agent, Limits, TurnState
from treenail.containment import CancellationToken, StopReason
from treenail.log import MemoryLog
from treenail.log.sqlite import SqliteLog
from treenail.mcp import McpServer, McpServerPinned, McpToolsChanged
from treenail.mcp.connection import ServerCall
from treenail.mcp.questions import ServerQuestion
from treenail.mcp.stdio import Output, Place, process
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.sandbox import Sandbox
from treenail.tools import (
    Approval,
    PermissionMode,
    PermissionRequest,
    Permissions,
    ToolCall,
    ToolHeld,
    ToolStarted,
    answer_hold,
    pending_holds,
)
from treenail.turns import ToolProgressed


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    place = tmp_path / "notes"
    place.mkdir()
    return place


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    place = tmp_path / "workspace"
    place.mkdir()
    (place / "kept.txt").write_text("as it was")
    return place


def noting(notes: Path, mode: str = "good", **options: Any) -> Any:
    return fake(mode, env={"NOTES": str(notes)}, allow_write=[notes], **options)


def seen(notes: Path) -> list[Any]:
    """The calls that the server has seen: their names and the ids in `_meta`."""
    return [json.loads(line) for line in (notes / "calls").read_text().splitlines()]


def when_there(place: Path, then: Any) -> threading.Thread:
    """Do something as soon as a file is there."""

    def look() -> None:
        until = time.monotonic() + 120
        while not place.exists() and time.monotonic() < until:
            time.sleep(0.01)
        then()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    return thread


# --- effects -------------------------------------------------------------------------------------------


def test_hints_of_an_untrusted_server_loosen_nothing(notes: Path) -> None:
    """A tool that says it only reads is external all the same, and its call is not repeated."""
    with run(noting(notes), calls(("fake__look", {}), ("fake__die_reading", {}))) as ended:
        starts = ended.execution_state.session[ToolStarted].all()
        assert [each.effects for each in starts] == ["external", "external"]
        assert not any(each.idempotent for each in starts)
        assert outcomes(ended) == ["ok", "unknown"]


def test_a_trusted_server_may_say_that_a_tool_only_reads(notes: Path) -> None:
    """Such a call logs no start, runs beside others, and is repeated if the server dies in it."""
    script = [
        Answer(calls=[("fake__look", {"n": 1}), ("fake__look", {"n": 2})]),
        *calls(("fake__die_reading", {})),
    ]
    with run(noting(notes, trust=True), script) as ended:
        assert not ended.execution_state.session[ToolStarted].all()
        assert outcomes(ended) == ["ok", "ok", "ok"]
        assert results(ended)[2] == "the second time"


def test_a_tool_asks_unless_a_trusted_server_says_that_it_destroys_nothing(notes: Path) -> None:
    """A missing hint means that it destroys; the operator's word comes before all of them."""
    for trusted, tool, state in (
        (True, "destroy", TurnState.HELD),
        (True, "echo", TurnState.HELD),
        (False, "keep", TurnState.HELD),
        (True, "keep", TurnState.COMPLETED),
    ):
        with run(noting(notes, ask=None, trust=trusted), calls((f"fake__{tool}", {}))) as ended:
            assert ended.state is state, tool
    for allowed in (False, None):
        permissions = Permissions(tools={} if allowed is False else {"fake__destroy": PermissionMode.AUTO})
        server = noting(notes, ask=allowed)
        with run(server, calls(("fake__destroy", {})), permissions=permissions) as ended:
            assert ended.state is TurnState.COMPLETED
    with run(noting(notes, ask=True, trust=True), calls(("fake__keep", {}))) as ended:
        assert ended.state is TurnState.HELD


# --- the workspace -------------------------------------------------------------------------------------


def test_what_a_workspace_server_writes_is_kept_or_undone_with_its_call(workspace: Path, notes: Path) -> None:
    script = calls(
        ("fake__write", {"path": "kept.txt", "content": "new"}),
        ("fake__write", {"path": "kept.txt", "content": "wrong", "fail": True}),
        ("fake__write_and_die", {}),
    )
    with run(noting(notes, effects="workspace"), script, workspace=workspace) as ended:
        assert outcomes(ended) == ["ok", "failed", "failed"]
        assert "ended by SIGKILL" in results(ended)[2] or "exit code 9" in results(ended)[2]
        assert "what it had changed in the workspace was undone" in results(ended)[2]
        assert "+new" in ended.tool_calls[0].diff().text
    assert {each.name: each.read_text() for each in workspace.iterdir()} == {"kept.txt": "new"}


def test_a_workspace_server_is_ended_before_a_call_that_was_cut_off_is_undone(
    workspace: Path, notes: Path
) -> None:
    """It cannot write anything after the undo: its process is gone by then."""
    server = noting(notes, effects="workspace", timeout=1)
    with run(server, calls(("fake__write_and_wait", {}), ("fake__echo", {})), workspace=workspace) as ended:
        assert outcomes(ended) == ["failed", "ok"]
        assert "did not answer within 1 s" in results(ended)[0]
    assert [each.name for each in workspace.iterdir()] == ["kept.txt"]


def test_a_kill_of_our_process_ends_the_server_and_the_next_process_undoes_the_call(
    workspace: Path, notes: Path, tmp_path: Path
) -> None:
    store = tmp_path / "runs.db"
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.mcp_client.killed_child", str(workspace), str(notes), str(store)],
        cwd=Path(__file__).parents[2],
    )
    try:
        when_there(notes / "waiting", child.kill).join()
    finally:
        child.kill()
        child.wait()
    agent = Agent("tester", tools=[noting(notes, effects="workspace")])
    provider = ScriptedProvider(calls(("fake__write_and_wait", {})))
    with SqliteLog(store) as log:
        (run_id,) = (each.session_id for each in log.sessions())
    with agent.resume(store, run_id, provider=provider) as ended:
        assert ended.state is TurnState.COMPLETED
        assert outcomes(ended) == ["interrupted", "ok"]
        assert results(ended) == ["the second time"]
    assert [each.name for each in workspace.iterdir()] == ["kept.txt"]


def test_a_server_that_is_not_declared_cannot_write_to_the_workspace(workspace: Path, notes: Path) -> None:
    with run(noting(notes), calls(("fake__write", {})), workspace=workspace) as ended:
        # The fake does not catch the error, so it dies of it.
        assert "Read-only file system" in results(ended)[0]
    assert [each.name for each in workspace.iterdir()] == ["kept.txt"]


def test_the_environment_of_a_server_holds_what_is_named(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "not-for-servers")
    monkeypatch.setenv("NAMED", "yes")
    server = noting(notes, trust=True, pass_env=["NAMED"])
    with run(server, calls(("fake__environment", {}))) as ended:
        found = json.loads(results(ended)[0])
    assert found["NAMED"] == "yes"
    caches = {"GOCACHE", "GOMODCACHE", "CARGO_HOME", "UV_CACHE_DIR", "PIP_CACHE_DIR", "npm_config_cache"}
    basics = {"PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PWD"}
    assert set(found) - caches - basics == {"NAMED", "NOTES"}


# --- crashes, time, progress ---------------------------------------------------------------------------


def test_a_server_that_dies_in_a_call_leaves_an_unknown_outcome(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not run again by itself; the model is told, without secrets; the next call has a new process."""
    monkeypatch.setenv("SECRET_TOKEN", "hush-hush-hush")
    server = noting(notes, pass_env=["SECRET_TOKEN"])
    with run(server, calls(("fake__die", {}), ("fake__echo", {}))) as ended:
        assert outcomes(ended) == ["unknown", "ok"]
        assert results(ended)[0].startswith("The outcome of fake__die is unknown: the MCP server fake failed")
        assert "something broke; the token is ***" in results(ended)[0]
    assert [name for name, _ in seen(notes)] == ["die", "echo"]
    assert (notes / "started").read_text().count("\n") == 2


class Gateway(http.server.BaseHTTPRequestHandler):
    """A server behind a gateway: each call takes effect, and its answer is replaced."""

    replaced: tuple[int, str, bytes]
    effects: list[Any]

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, kind: str = "application/json", body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer(405)

    do_DELETE = do_GET

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        info = {"name": "x", "version": "1"}
        hints = {"idempotentHint": True}
        known = {
            "initialize": {
                "protocolVersion": "2025-11-25",
                "capabilities": {"tools": {}},
                "serverInfo": info,
            },
            "tools/list": {
                "tools": [
                    {"name": "pay", "inputSchema": {"type": "object"}},
                    {"name": "put", "inputSchema": {"type": "object"}, "annotations": hints},
                ]
            },
        }
        if "id" not in message:
            self.answer(202)
        elif message["method"] == "tools/call":
            self.effects.append(message["params"]["name"])
            self.answer(*self.replaced)
        elif message["method"] in known:
            said = {"jsonrpc": "2.0", "id": message["id"], "result": known[message["method"]]}
            self.answer(200, body=json.dumps(said).encode())
        else:
            said = {
                "jsonrpc": "2.0",
                "id": message["id"],
                "error": {"code": -32601, "message": "no"},
            }
            self.answer(404, body=json.dumps(said).encode())


@pytest.mark.parametrize(
    "replaced",
    [(504, "text/html", b"<p>late"), (200, "text/html", b"<p>log in"), (200, "application/json", b'{"json')],
    ids=["an error of the gateway", "a page", "a cut answer"],
)
def test_a_call_whose_answer_a_gateway_replaced_has_an_unknown_outcome(
    replaced: tuple[int, str, bytes],
) -> None:
    """The server has acted: only a call that may run again does so."""
    effects: list[Any] = []
    handler = type("Handler", (Gateway,), {"replaced": replaced, "effects": effects})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        try:
            url = f"http://127.0.0.1:{listening.server_port}/mcp"
            server = McpServer("far", url=url, trust=True, ask=False)
            with run(server, calls(("far__pay", {}), ("far__put", {}))) as ended:
                assert outcomes(ended) == ["unknown", "failed"]
                assert results(ended)[0].startswith("The outcome of far__pay is unknown")
                assert "may be called again" in results(ended)[1]
        finally:
            listening.shutdown()
    assert effects == ["pay", "put", "put"]


class Forgetful(Gateway):
    """A server that is restarted: it answers a connection that it does not know with "not found"."""

    sessions: list[str]
    is_told: bool

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said: Any = {"jsonrpc": "2.0", "id": message.get("id")}
        given = self.headers.get("mcp-session-id")
        if message["method"] == "initialize":
            self.sessions.append(f"session-{len(self.effects)}")
            info = {"name": "x", "version": "1"}
            able = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
            self.answer(
                200,
                body=json.dumps({**said, "result": able}).encode(),
                **{"mcp-session-id": self.sessions[-1]},
            )
        elif given is None:
            self.answer(400)
        elif given not in self.sessions:
            unknown = {**said, "error": {"code": -32600, "message": "Session not found"}}
            self.answer(404, body=json.dumps(unknown).encode() if self.is_told else b"")
        elif "id" not in message:
            self.answer(202)
        elif message["method"] == "tools/list":
            listed = [{"name": "pay", "inputSchema": {"type": "object"}}]
            self.answer(200, body=json.dumps({**said, "result": {"tools": listed}}).encode())
        else:
            self.effects.append(given)
            if len(self.effects) == 1:
                self.sessions.clear()  # It is restarted.
            paid = {"content": [{"type": "text", "text": "paid"}]}
            self.answer(200, body=json.dumps({**said, "result": paid}).encode())


@pytest.mark.parametrize("is_told", [True, False])
def test_a_server_at_an_address_that_was_restarted_is_connected_to_again(is_told: bool) -> None:
    """It has not run the call that it answered with "not found", so the call is made again, once."""
    effects: list[Any] = []
    handler = type("Handler", (Forgetful,), {"sessions": [], "effects": effects, "is_told": is_told})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        try:
            server = McpServer("far", url=f"http://127.0.0.1:{listening.server_port}/mcp", ask=False)
            with run(server, calls(*[("far__pay", {})] * 3)) as ended:
                assert results(ended) == ["paid"] * 3
        finally:
            listening.shutdown()
    assert effects == ["session-0", "session-1", "session-1"]


def test_a_server_that_does_not_let_go_does_not_keep_a_run() -> None:
    """It answers neither our goodbye nor the request for its stream."""
    over = threading.Event()

    class Clinging(Forgetful):
        sessions: ClassVar = []
        effects: ClassVar = ["one"]
        is_told = True

        def do_DELETE(self) -> None:
            over.wait(120)

        do_GET = do_DELETE

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Clinging) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        began = time.monotonic()
        try:
            server = McpServer("far", url=f"http://127.0.0.1:{listening.server_port}/mcp", ask=False)
            with run(server, calls(("far__pay", {}))) as ended:
                assert results(ended) == ["paid"]
            assert time.monotonic() - began < 100
        finally:
            over.set()
            listening.shutdown()


def test_a_list_of_tools_that_changes_at_each_look_is_looked_at_once_for_a_call(notes: Path) -> None:
    with run(noting(notes, mode="restless"), calls(*[("fake__echo", {})] * 3)) as ended:
        assert outcomes(ended) == ["ok"] * 3
    assert (notes / "listed").read_text().count("\n") <= 4  # At the start, and before each call.


def test_a_path_in_a_servers_arguments_shows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there for the server to read below /tmp; what is hidden stays so, unless it is granted."""
    monkeypatch.setenv("HOME", str(tmp_path))
    secret = tmp_path / ".ssh" / "id_rsa"
    secret.parent.mkdir()
    secret.write_text("a private key\n")
    plain = tmp_path / "plain.txt"
    plain.write_text("plain words\n")
    (tmp_path / "work").mkdir()
    place = Place(tmp_path / "work", Sandbox())
    for allowed, first in ((), "plain words"), ((secret.parent,), "a private key"):
        server = McpServer("cat", command=["cat", str(secret), str(plain)], allow_read=allowed)
        assert _first_line_of(server, place) == first


def _first_line_of(server: McpServer, place: Place) -> str:
    output = Output()

    async def start() -> None:
        async with process(server, place, output):
            await output.over.wait()

    anyio.run(start)
    return output.garbage.decode()


def test_an_idempotent_call_of_a_trusted_server_runs_again_with_the_same_id(notes: Path) -> None:
    with run(noting(notes, trust=True), calls(("fake__die_once", {}))) as ended:
        assert results(ended) == ["the second time"]
        (first, second), call = seen(notes), ended.tool_calls[0]
    assert first == second == ["die_once", call.call_id]


def test_a_call_without_an_answer_ends_in_time_and_is_cancelled_at_the_server(notes: Path) -> None:
    with run(noting(notes, timeout=0.5), calls(("fake__wait", {}), ("fake__echo", {}))) as ended:
        assert outcomes(ended) == ["unknown", "ok"]
        assert "did not answer within 0.5 s" in results(ended)[0]
    assert (notes / "cancelled").exists()


def test_a_cancellation_of_the_run_reaches_the_server(notes: Path) -> None:
    token = CancellationToken()
    waiting = when_there(notes / "waiting", lambda: token.cancel(StopReason.ABORTED))
    with run(noting(notes), calls(("fake__wait", {})), cancellation=token) as ended:
        assert ended.state is TurnState.INTERRUPTED
    waiting.join()
    assert (notes / "cancelled").exists()


def test_progress_is_shown_while_a_call_runs(notes: Path) -> None:
    shown: list[object] = []
    with run(noting(notes), calls(("fake__step", {})), watch=shown.append):
        pass
    assert [(each.done, each.total, each.message) for each in shown if isinstance(each, ToolProgressed)] == [
        (1, 3, "step 1"),
        (2, 3, "step 2"),
        (3, 3, "step 3"),
    ]


# --- what comes back -----------------------------------------------------------------------------------


def test_pictures_links_files_and_structured_content(notes: Path) -> None:
    script = calls(("fake__picture", {}), ("fake__link", {}), ("fake__structured", {}))
    with run(noting(notes, trust=True), script) as ended:
        told = [each for each in ended.messages if each.role == "tool"]
        assert told[0].content == "a dot\n(1 picture)"
        assert [each.media_type for each in told[0].parts] == ["image/png"]
        assert told[1].content.splitlines() == [
            "[a](file:///a.txt) (text/plain)",
            "note://1:",
            "what the note says",
            "(blob://1: 3 bytes, x/y, which cannot be shown)",
            "(audio, audio/wav, which cannot be shown)",
        ]
        assert told[2].content == '{"depth": 7}'


def test_arguments_are_checked_against_the_servers_schema_before_it_is_asked(notes: Path) -> None:
    script = calls(("fake__strict", {}), ("fake__strict", {"n": "one"}), ("fake__strict", {"n": 1}))
    with run(noting(notes), script) as ended:
        assert outcomes(ended) == ["invalid", "invalid", "ok"]
        assert "'n' is a required property" in results(ended)[0]
        assert "n: 'one' is not of type 'integer'" in results(ended)[1]
    assert len(seen(notes)) == 1


# --- the list of tools ---------------------------------------------------------------------------------


def test_the_list_of_tools_is_pinned_and_a_change_is_told_and_not_taken(notes: Path) -> None:
    log = MemoryLog()
    agent = Agent("tester", tools=[noting(notes, trust=True)])
    script = calls(
        ("fake__change", {}), ("fake__look", {}), ("fake__echo", {}), ("fake__new_one", {}), ("fake__put", {})
    )
    provider = ScriptedProvider([*script, *calls(("fake__echo", {}))])
    with agent.run("go", provider=provider, store=log) as ended:
        session = ended.execution_state.session
        (pin,), (change,) = session[McpServerPinned].all(), session[McpToolsChanged].all()
        assert len(pin.fingerprint) == 64
        assert change.fingerprint != pin.fingerprint
        assert (change.added, change.removed) == (("new_one",), ("environment",))
        assert (change.changed, change.reworded) == (("echo",), ("look",))
        assert outcomes(ended) == ["ok", "ok", "failed", "invalid", "ok"]
        assert sum("[mcp] The server fake has changed its tools" in each for each in results(ended)) == 1
        assert "changed or removed it since this run began" in results(ended)[2]
        run_id = ended.id
    # The server is its old self again, and a resumed run still has one list.
    with agent.run("more", provider=provider, store=log, run_id=run_id) as again:
        assert results(again)[-1] == '["echo", {}]'
        assert len(again.execution_state.session[McpServerPinned].all()) == 1


# --- questions to a person, and to the model -----------------------------------------------------------


def test_a_question_of_a_server_holds_the_call_until_a_person_answers(notes: Path) -> None:
    """The hold outlives the process of the server; the answer resumes that call alone."""
    log = MemoryLog()
    agent = Agent("tester", tools=[noting(notes)])
    provider = ScriptedProvider(calls(("fake__echo", {}), ("fake__ask", {})))
    with agent.run("go", provider=provider, store=log) as ended:
        assert ended.state is TurnState.HELD
        session, run_id = ended.execution_state.session, ended.id
        (held,) = pending_holds(session)
        assert held.reason == (
            "the server fake asks: Which colour? (colour: string) Your answer makes the call again from its "
            "beginning: what it did before it asked may happen twice."
        )
        assert held.is_question
        answer_hold(session, held.call_id, approved=True, note='{"colour": 5}')
    with agent.resume(log, run_id, provider=provider) as ended:
        assert ended.state is TurnState.HELD  # The answer does not fit, so it is asked again.
        session = ended.execution_state.session
        (held,) = pending_holds(session)
        assert "The answer did not fit: colour: 5 is not of type 'string'" in held.reason
        answer_hold(session, held.call_id, approved=True, note="red")
    with agent.resume(log, run_id, provider=provider) as ended:
        assert ended.state is TurnState.COMPLETED
        assert json.loads(results(ended)[-1]) == {"action": "accept", "content": {"colour": "red"}}
    assert [name for name, _ in seen(notes)] == ["echo", "ask", "ask", "ask"]


def test_an_answer_counts_for_one_call_though_its_id_comes_again(notes: Path) -> None:
    log = MemoryLog()
    agent = Agent("tester", tools=[noting(notes)])
    again = Answer(calls=[ToolCall("same", "fake__ask", "{}")])
    provider = ScriptedProvider([again, again, "Done."])
    with agent.run("go", provider=provider, store=log) as ended:
        (held,) = pending_holds(ended.execution_state.session)
        answer_hold(ended.execution_state.session, held.call_id, approved=True, note='{"colour": "red"}')
        run_id = ended.id
    with agent.resume(log, run_id, provider=provider) as ended:
        assert "red" in results(ended)[0]
        assert ended.state is TurnState.HELD  # The second call asks again.


def test_a_server_of_the_newer_protocol_is_asked_again_with_the_answer_and_heard_when_it_changes() -> None:
    log = MemoryLog()
    command = [sys.executable, str(Path(__file__).with_name("modern_server.py"))]
    server = McpServer("modern", command=command, ask=False)
    agent = Agent("tester", tools=[server])
    script = calls(("modern__grow", {}), *[("modern__echo", {"a": 1})] * 5, ("modern__ask", {}))
    provider = ScriptedProvider(script)
    with agent.run("go", provider=provider, store=log) as ended:
        assert ended.state is TurnState.HELD
        session, run_id = ended.execution_state.session, ended.id
        assert [each.protocol for each in session[McpServerPinned].all()] == ["2026-07-28"]
        assert [each.added for each in session[McpToolsChanged].all()] == [("more",)]
        (held,) = pending_holds(session)
        answer_hold(session, held.call_id, approved=True, note='{"colour": "red"}')
    with agent.resume(log, run_id, provider=provider) as ended:
        assert ended.state is TurnState.COMPLETED
        assert results(ended)[-1] == "red"


def test_a_person_who_is_sent_to_an_address_says_when_they_are_done(notes: Path) -> None:
    log = MemoryLog()
    agent = Agent("tester", tools=[noting(notes)])
    provider = ScriptedProvider(calls(("fake__ask", {"url": True})))
    with agent.run("go", provider=provider, store=log) as ended:
        (held,) = pending_holds(ended.execution_state.session)
        assert "asks: Pay there. (open https://example.com/pay)" in held.reason
        assert not held.is_question
        answer_hold(ended.execution_state.session, held.call_id, approved=True)
        run_id = ended.id
    with agent.resume(log, run_id, provider=provider) as ended:
        assert json.loads(results(ended)[-1]) == {"action": "accept"}


def test_a_refused_question_is_declined(notes: Path) -> None:
    log = MemoryLog()
    agent = Agent("tester", tools=[noting(notes)])
    provider = ScriptedProvider(calls(("fake__ask", {})))
    with agent.run("go", provider=provider, store=log) as ended:
        (held,) = pending_holds(ended.execution_state.session)
        answer_hold(ended.execution_state.session, held.call_id, approved=False)
        run_id = ended.id
    with agent.resume(log, run_id, provider=provider) as ended:
        assert json.loads(results(ended)[-1])["action"] == "decline"


def test_somebody_who_is_there_answers_while_the_call_waits(notes: Path) -> None:
    """The call is made once; an answer that does not fit is asked for again."""
    asked: list[dict[str, Any]] = []
    words = iter(["{}", "red"])

    def person(request: PermissionRequest) -> Approval:
        asked.append(json.loads(request.arguments))
        return Approval(True, next(words))

    permissions = Permissions(approver=person)
    with run(noting(notes), calls(("fake__ask", {})), permissions=permissions) as ended:
        assert json.loads(results(ended)[0]) == {"action": "accept", "content": {"colour": "red"}}
        holds = ended.execution_state.session[ToolHeld].all()
        assert [each.tool_name for each in holds] == ["fake__ask"] * 2
        assert not pending_holds(ended.execution_state.session)
    assert "The answer did not fit: the answer: 'colour' is a required property" in asked[1]["question"]
    assert [name for name, _ in seen(notes)] == ["ask"]


def test_a_server_has_its_time_for_an_answer_while_nobody_keeps_it_waiting() -> None:
    async def main() -> list[bool]:
        call = ServerCall("ask", {}, {}, lambda params: Future(), lambda *progress: None)
        endless = []
        call.limit = anyio.CancelScope()
        for call.asking in (0, 1, 0):
            call.allow(60)
            endless.append(call.limit.deadline == math.inf)
        return endless

    assert anyio.run(main) == [False, True, False]


@pytest.mark.parametrize("said", [True, None, Approval(True), ValueError()])
def test_a_yes_without_words_is_not_an_answer_to_a_server(notes: Path, said: Any) -> None:
    def person(request: PermissionRequest) -> Any:
        if isinstance(said, Exception):
            raise said
        return said

    script = calls(("fake__ask", {"url": True}))
    with run(noting(notes), script, permissions=Permissions(approver=person)) as ended:
        assert ended.state is TurnState.HELD


def test_forms_that_cannot_be_asked_are_refused_and_too_many_questions_too(notes: Path) -> None:
    """The server is told, and its call continues."""
    forms: list[Any] = [{"properties": []}, {"properties": {"a": 1}}, {"properties": {"a": {"type": 7}}}]
    forms += [{"properties": {"a": {"description": "x" * 20_000}}}]
    with run(noting(notes), calls(*(("fake__ask", {"form": each}) for each in forms))) as ended:
        assert [json.loads(each)["code"] for each in results(ended)] == [-32602] * len(forms)
    permissions = Permissions(approver=lambda request: False)
    with run(noting(notes), calls(("fake__ask", {"times": 25})), permissions=permissions) as ended:
        assert ended.state is TurnState.COMPLETED
        assert "too many requests in one call" in results(ended)[0]
        assert len(ended.execution_state.session[ToolHeld].all()) == 20


FORMS = [
    # the form's fields, what is offered, what a person says, what the server gets
    ({"a": {"type": "string"}}, (), "No, 5.", {"a": "No, 5."}),
    ({"a": {"type": "integer"}}, (), "5", {"a": 5}),
    ({"a": {"type": "integer"}}, (), "five", "a: 'five' is not of type 'integer'"),
    ({"a": {"type": "boolean"}}, ("yes", "no"), "no", {"a": False}),
    ({"a": {"enum": ["x", "y"]}}, ("x", "y"), "2", {"a": "y"}),
    ({"a": {"oneOf": [{"const": 1, "title": "One"}]}}, ("One",), "one", {"a": 1}),
    ({"a": {"type": "array", "items": {"enum": ["x"]}}}, (), '["x"]', {"a": ["x"]}),
    ({"a": {"default": 1}, "b": {}}, (), '{"b": 2}', {"a": 1, "b": 2}),
    ({"a": {}, "b": {}}, (), "words", "it is not a JSON object"),
    ({}, ("yes",), "1", {}),
    ({}, ("yes",), "No!", "choose 'yes', or decline"),
    (None, ("I have done it",), "No!", "choose 'I have done it', or decline"),
    (None, ("I have done it",), "I have done it", None),
]


@pytest.mark.parametrize(("fields", "options", "words", "expected"), FORMS)
def test_how_words_answer_a_form(fields: Any, options: Any, words: str, expected: Any) -> None:
    form = None if fields is None else {"type": "object", "properties": fields}
    question = ServerQuestion("fake", "Which?", form, "" if form else "https://example.com")
    assert question.options == options
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            question.answer(words)
    else:
        assert question.answer(words).content == expected


def test_a_server_may_not_ask_the_model_unless_it_is_allowed(notes: Path) -> None:
    with run(noting(notes), calls(("fake__sample", {}))) as ended:
        assert "not supported" in results(ended)[0]


def test_what_a_server_asks_the_model_is_contained_and_paid_by_the_run(notes: Path) -> None:
    script = [Answer(calls=[("fake__sample", {})]), "Forty-two.", "Done."]
    server = noting(notes, sampling=True)
    with run(server, script, limits=Limits(max_steps=10)) as ended:
        assert ended.state is TurnState.COMPLETED
        assert json.loads(results(ended)[0])["content"]["text"] == "Forty-two."
    with run(server, script, limits=Limits(max_steps=2)) as ended:
        assert ended.state is not TurnState.COMPLETED
        assert ended.result.error_kind == "step_limit_exceeded"
