"""Servers that break the rules: each is a clear error, and the run continues."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tests.mcp_client.mcp_kit import calls, failures, fake, outcomes, results, run

from treenail import TurnState
from treenail.containment import CancellationToken, StopReason
from treenail.errors import McpError, UsageError
from treenail.mcp import McpServer, McpServerPinned


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    place = tmp_path / "notes"
    place.mkdir()
    return place


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("exit", "its process ended (exit code 4); its error output ended: 'the configuration is missing'"),
        ("silent", "did not answer within 0.5 s"),
        ("only-garbage", "it wrote 1 lines that are not messages, the first: 'Starting up ... \\x1b[31mred"),
        ("list", "sent something that is not as the protocol says: ListToolsResult, tools.0."),
    ],
)
def test_a_server_that_cannot_be_used_is_told_and_the_run_continues(mode: str, said: str) -> None:
    """The log and the model are told which server failed and why; the agent works without it."""
    waits = 0.5 if mode in ("silent", "only-garbage") else 60
    with run(fake(mode, start_timeout=waits), ["Done without it."]) as ended:
        assert ended.state is TurnState.COMPLETED
        assert len(failures(ended)) == 1
        assert failures(ended)[0].startswith("the MCP server fake ")
        assert said in failures(ended)[0]
        # What the server said does not stand where the operator's instructions do.
        assert "The tools of the server fake are not available in this run." in ended.messages[0].content
        assert "missing" not in ended.messages[0].content


def test_a_program_that_is_not_there() -> None:
    with run(McpServer("gone", command=["no-such-program-here"]), ["Done."]) as ended:
        assert ended.state is TurnState.COMPLETED
        assert "there is no program 'no-such-program-here'; install it" in failures(ended)[0]


def test_an_address_where_nobody_listens() -> None:
    with run(McpServer("gone", url="http://127.0.0.1:9/mcp"), ["Done."]) as ended:
        assert ended.state is TurnState.COMPLETED
        assert failures(ended)[0].startswith("the MCP server gone ")


def test_a_server_whose_grants_or_headers_are_wrong_is_not_started() -> None:
    wrong = [fake(name="write", allow_write=["/no/such/place"])]
    wrong += [McpServer("header", url="http://127.0.0.1:9/", headers={"Authorization": "Bearer ${NO_SUCH}"})]
    with run(wrong, ["Done."]) as ended:
        assert ended.state is TurnState.COMPLETED
        first, second = failures(ended)
        assert first.startswith(
            "the MCP server write was not started: commands cannot be allowed to write to"
        )
        assert "needs the variable NO_SUCH; set it" in second


def test_a_run_that_is_cancelled_while_a_server_starts_does_not_wait_for_it() -> None:
    token = CancellationToken()
    threading.Timer(0.5, lambda: token.cancel(StopReason.ABORTED)).start()
    began = time.monotonic()
    with run(fake("silent", start_timeout=120), ["Done."], cancellation=token) as ended:
        assert ended.state is TurnState.INTERRUPTED
    assert time.monotonic() - began < 100


def test_a_required_server_that_fails_stops_the_run() -> None:
    with pytest.raises(McpError, match="the configuration is missing"):
        run(fake("exit", required=True), ["Done."])


def test_garbage_between_messages_is_left_out() -> None:
    with run(fake("garbage"), calls(("fake__echo", {"a": 1}))) as ended:
        assert results(ended) == ['["echo", {"a": 1}]']


def test_a_tool_whose_schema_is_none_is_left_out_and_the_others_are_used() -> None:
    with run(fake("schema"), calls(("fake__echo", {}))) as ended:
        assert outcomes(ended) == ["ok"]
        (pin,) = ended.execution_state.session[McpServerPinned].all()
        assert [each.name for each in pin.tools] == ["echo"]
        assert pin.refused[0].startswith("broken: its schema is not a JSON schema: ")


def test_a_result_of_ten_megabytes_is_a_failed_call(notes: Path) -> None:
    server = fake(env={"NOTES": str(notes)}, allow_write=[notes])
    script = calls(("fake__huge", {}), ("fake__endless", {}), ("fake__echo", {}))
    with run(server, script) as ended:
        assert outcomes(ended) == ["failed", "unknown", "ok"]
        huge, endless, _ = results(ended)
        assert "its result has 10,000,000 characters, and at most 4,000,000 are taken" in huge
        assert "it sent a message of more than 16,000,000 bytes" in endless


def test_a_server_that_dies_again_and_again_is_given_up(notes: Path) -> None:
    server = fake(env={"NOTES": str(notes)}, allow_write=[notes])
    with run(server, calls(*[("fake__die", {})] * 6)) as ended:
        assert ended.state is TurnState.COMPLETED
        assert outcomes(ended) == ["unknown"] * 5 + ["failed"]
        assert "was started 5 times in this run and did not stay" in results(ended)[-1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": "Git", "command": ["x"]}, "is not a name"),
        ({"name": "a__b", "command": ["x"]}, "is not a name"),
        ({"name": "git"}, "needs a command or a url"),
        ({"name": "git", "command": ["x"], "url": "http://a/"}, "needs a command or a url"),
        ({"name": "git", "command": "git mcp"}, "must be a list of words"),
        ({"name": "git", "url": "ftp://a/"}, "is not an address"),
        ({"name": "git", "url": "http://a/", "effects": "workspace"}, "cannot be undone"),
        ({"name": "git", "command": ["x"], "timeout": 0}, "must be numbers of seconds above 0"),
    ],
)
def test_a_server_that_is_declared_wrongly_is_a_usage_error(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        McpServer(**wrong)  # type: ignore[arg-type]


def test_a_workspace_server_needs_a_directory() -> None:
    with pytest.raises(UsageError, match="this run has no directory"):
        run(fake(effects="workspace"), ["Done."])
