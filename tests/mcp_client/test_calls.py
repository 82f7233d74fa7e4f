"""A call of a server's tool is a transaction: effects, crashes, time, cancellation, and what comes back."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.mcp_client.mcp_kit import calls, fake, outcomes, results, run

from treenail import Agent, Limits, TurnState
from treenail.containment import CancellationToken, StopReason
from treenail.log import MemoryLog
from treenail.log.sqlite import SqliteLog
from treenail.mcp import McpServer, McpServerPinned, McpToolsChanged
from treenail.mcp.stdio import Output, Place, process
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.sandbox import Sandbox
from treenail.tools import PermissionMode, Permissions, ToolCall, ToolStarted, answer_hold, pending_holds
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


def noting(notes: Path, **options: Any) -> Any:
    return fake(env={"NOTES": str(notes)}, allow_write=[notes], **options)


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


def test_a_tool_that_destroys_asks_by_default(notes: Path) -> None:
    with run(noting(notes), calls(("fake__destroy", {}))) as ended:
        assert ended.state is TurnState.HELD
    for allowed in ({"ask": False}, {}):
        permissions = Permissions(tools={} if allowed else {"fake__destroy": PermissionMode.AUTO})
        with run(noting(notes, **allowed), calls(("fake__destroy", {})), permissions=permissions) as ended:
            assert ended.state is TurnState.COMPLETED
    with run(noting(notes, ask=True), calls(("fake__echo", {}))) as ended:
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

    def answer(self, status: int, kind: str = "application/json", body: bytes = b"") -> None:
        self.send_response(status)
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
            server = McpServer("far", url=f"http://127.0.0.1:{listening.server_port}/mcp", trust=True)
            with run(server, calls(("far__pay", {}), ("far__put", {}))) as ended:
                assert outcomes(ended) == ["unknown", "failed"]
                assert results(ended)[0].startswith("The outcome of far__pay is unknown")
                assert "may be called again" in results(ended)[1]
        finally:
            listening.shutdown()
    assert effects == ["pay", "put", "put"]


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
        assert held.reason.startswith(
            "the server fake asks: Which colour? (say yes with a note that has its fields:"
        )
        answer_hold(session, held.call_id, approved=True, note='{"colour": 5}')
    with agent.resume(log, run_id, provider=provider) as ended:
        assert ended.state is TurnState.HELD  # The answer does not fit, so it is asked again.
        session = ended.execution_state.session
        (held,) = pending_holds(session)
        assert "The answer did not fit: colour: 5 is not of type 'string'" in held.reason
        answer_hold(session, held.call_id, approved=True, note='{"colour": "red"}')
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
    server = McpServer("modern", command=[sys.executable, str(Path(__file__).with_name("modern_server.py"))])
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
        assert "Pay there. (open https://example.com/pay, and say yes when you are done)" in held.reason
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


def test_somebody_who_is_there_can_answer_at_once(notes: Path) -> None:
    server = noting(notes, answerer=lambda question: {"colour": question.message})
    with run(server, calls(("fake__ask", {}))) as ended:
        assert json.loads(results(ended)[0])["content"] == {"colour": "Which colour?"}


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
