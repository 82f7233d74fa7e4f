"""Six public servers, each used in a run: three from npm, three from PyPI. Nobody here wrote them."""

from __future__ import annotations

import functools
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tests.mcp_client.mcp_kit import calls, node, outcomes, results, run

from treenail import TurnState
from treenail.mcp import McpServer, McpServerPinned
from treenail.providers.scripted import Answer
from treenail.tools import ToolStarted


def python(module: str) -> list[str]:
    return [sys.executable, "-m", module]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    place = tmp_path / "workspace"
    place.mkdir()
    (place / "a.txt").write_text("one\n")
    return place


def test_filesystem_writes_are_kept_or_undone_with_their_call(workspace: Path) -> None:
    server = McpServer(
        "files", command=[*node("server-filesystem"), str(workspace)], effects="workspace", trust=True
    )
    path = str(workspace / "a.txt")
    two_edits = [{"oldText": "two", "newText": "three"}, {"oldText": "none such", "newText": "x"}]
    script = calls(
        ("files__write_file", {"path": path, "content": "two\n"}),
        ("files__edit_file", {"path": path, "edits": two_edits}),
        ("files__read_text_file", {"path": path}),
        ("files__write_file", {"path": "/etc/treenail", "content": "no"}),
        ("files__create_directory", {"path": str(workspace / "new" / "deeper")}),
    )
    with run(server, script, workspace=workspace) as ended:
        assert outcomes(ended) == ["ok", "failed", "ok", "failed", "ok"]
        assert results(ended)[2] == "two\n"
        assert "-one\n+two" in ended.tool_calls[0].diff().text
        assert [each.effects for each in ended.execution_state.session[ToolStarted].all()] == [
            "workspace"
        ] * 4
        (pin,) = ended.execution_state.session[McpServerPinned].all()
        assert pin.confinement == "bubblewrap, no network"
    assert (workspace / "a.txt").read_text() == "two\n"
    assert (workspace / "new" / "deeper").is_dir()


def test_memory_keeps_its_graph_where_it_may_write(workspace: Path, tmp_path: Path) -> None:
    kept = tmp_path / "memory"
    kept.mkdir()
    server = McpServer(
        "memory",
        command=node("server-memory"),
        env={"MEMORY_FILE_PATH": str(kept / "graph.jsonl")},
        allow_write=[kept],
        trust=True,
    )
    entity = {"name": "kelp", "entityType": "plant", "observations": ["grows half a metre a day"]}
    script = calls(("memory__create_entities", {"entities": [entity]}), ("memory__read_graph", {}))
    with run(server, script, workspace=workspace) as ended:
        assert outcomes(ended) == ["ok", "ok"]
        assert "half a metre" in results(ended)[1]
    assert "kelp" in (kept / "graph.jsonl").read_text()


def test_git_commits_in_the_workspace(workspace: Path) -> None:
    git = functools.partial(subprocess.run, cwd=workspace, check=True, capture_output=True, text=True)
    git(["git", "init", "-q"])
    git(["git", "config", "user.name", "Tester"])
    git(["git", "config", "user.email", "tester@example.com"])
    server = McpServer("git", command=python("mcp_server_git"), effects="workspace", trust=True)
    repo = {"repo_path": str(workspace)}
    script = calls(
        ("git__git_status", repo),
        ("git__git_add", {**repo, "files": ["a.txt"]}),
        ("git__git_commit", {**repo, "message": "By a run"}),
        ("git__git_checkout", {**repo, "branch_name": "none-such"}),
    )
    with run(server, script, workspace=workspace) as ended:
        assert outcomes(ended) == ["ok", "ok", "ok", "failed"]
        assert "a.txt" in results(ended)[0]
    assert git(["git", "log", "--format=%s"]).stdout == "By a run\n"


def test_fetch_reads_a_page_only_with_the_network(workspace: Path) -> None:
    """Without a grant the sandbox refuses, and the model is told that a person can allow it."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(workspace))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{pages.server_port}/a.txt"
        command = [*python("mcp_server_fetch"), "--allow-private-ips", "--ignore-robots-txt"]
        script = calls(("fetch__fetch", {"url": url}))
        granted = McpServer("fetch", command=command, allow_network=True, ask=False)
        with run(granted, script, workspace=workspace) as ended:
            assert outcomes(ended) == ["ok"]
            assert "one" in results(ended)[0]
        with run(replace(granted, allow_network=False), script, workspace=workspace) as ended:
            assert outcomes(ended) == ["failed"]
        pages.shutdown()


def test_time_converts_between_zones(workspace: Path) -> None:
    server = McpServer("time", command=[*python("mcp_server_time"), "--local-timezone", "UTC"], trust=True)
    given = {"source_timezone": "Europe/Berlin", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    with run(server, calls(("time__convert_time", given)), workspace=workspace) as ended:
        assert outcomes(ended) == ["ok"]
        assert json.loads(results(ended)[0])["target"]["timezone"] == "Asia/Tokyo"


def test_everything_is_used_and_killed_in_the_middle_of_a_call(workspace: Path) -> None:
    """The call's outcome is unknown, the run continues, and the next call finds a new process."""
    server = McpServer("every", command=node("server-everything"), ask=False)
    script = [
        Answer(calls=[("every__echo", {"message": "hello"})]),
        Answer(calls=[("every__get-sum", {"a": 2, "b": 3})]),
        Answer(calls=[("every__get-tiny-image", {})]),
        Answer(calls=[("every__trigger-long-running-operation", {"duration": 600, "steps": 600})]),
        Answer(calls=[("every__echo", {"message": "again"})]),
        "Done.",
    ]

    def watch(seen: object) -> None:
        # Its first sign of progress: the call is under way.
        if type(seen).__name__ == "ToolProgressed":
            for pid in processes("server-everything"):
                os.kill(pid, signal.SIGKILL)

    with run(server, script, workspace=workspace, watch=watch) as ended:
        assert ended.state is TurnState.COMPLETED
        assert outcomes(ended) == ["ok", "ok", "ok", "unknown", "ok"]
        told = [each for each in ended.messages if each.role == "tool"]
        assert [each.media_type for each in told[2].parts] == ["image/png"]
        assert "ended by SIGKILL" in told[3].content
        assert told[4].content == "Echo: again"
    assert not processes("server-everything")


def processes(word: str) -> list[int]:
    """The processes of this test that run a program: descendants of this process."""
    parents: dict[int, int] = {}
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if word.encode() in (place / "cmdline").read_bytes():
                found.append(int(place.name))
        except (OSError, ValueError):
            continue

    def is_ours(pid: int) -> bool:
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    return [each for each in found if is_ours(each)]
