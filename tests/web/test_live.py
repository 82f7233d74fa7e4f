"""The page follows a log that another process writes, and finds its way back after the inspector has died."""

from __future__ import annotations

import signal
from pathlib import Path
from uuid import UUID

import pytest
from playwright.sync_api import Browser, expect
from tests.forks import in_child
from tests.stores import STORES, store_in
from tests.web.inspecting import Server, Visitor, in_thread, serving

from treenail import Agent, tool
from treenail.providers.scripted import Answer, ScriptedProvider


@tool(effects="none")
def look(n: int) -> str:
    """Look."""
    return f"seen {n}"


AGENT = Agent("looker", "You look.", tools=(look,))


def turn(store: str, task: str, run_id: UUID | None = None) -> UUID:
    """Run a turn in a process of its own."""

    def work() -> UUID:
        calls = [Answer("", [("look", {"n": n})]) for n in (1, 2)]
        model = ScriptedProvider([calls[0], "Seen.", calls[1], "Again."])
        with AGENT.run(task, provider=model, store=store, run_id=run_id) as run:
            return run.id

    return in_thread(lambda: in_child(work))


@pytest.mark.parametrize("kind", STORES)
def test_what_another_process_logs_shows_at_once(browser: Browser, tmp_path: Path, kind: str) -> None:
    store = store_in(kind, tmp_path)
    run = turn(store, "Look once")
    with serving(store) as server, browser.new_context() as context:
        visitor = Visitor(context, server).enter()
        page = visitor.open(run)
        expect(visitor.row("Turn 1").first).to_be_visible()
        expect(page.get_by_role("status").first).to_have_text("live")
        turn(store, "Look twice", run)
        expect(visitor.row("Turn 2").first).to_be_visible()
        expect(visitor.row("Again.").first).to_be_visible()
        expect(visitor.row("n: ")).to_have_count(2)
        assert visitor.errors == []


def test_a_reconnect_misses_nothing_and_repeats_nothing(browser: Browser, tmp_path: Path) -> None:
    """The inspector is killed, the run goes on, and another inspector takes the place of the first."""
    store = store_in("sqlite", tmp_path)
    run = turn(store, "Look once")
    token = tmp_path / "token"
    token.write_text("a-token-that-outlives-its-inspector")
    token.chmod(0o600)
    first = Server(store, ("--token-file", str(token))).start()
    port = first.url.rstrip("/").rpartition(":")[2]
    first.token = token.read_text()
    with browser.new_context() as context:
        visitor = Visitor(context, first).enter()
        page = visitor.open(run)
        expect(visitor.row("Turn 1").first).to_be_visible()
        expect(page.get_by_role("status").first).to_have_text("live")
        first.stop(signal.SIGKILL)
        expect(page.get_by_role("status").first).to_contain_text("trying again")
        turn(store, "Look twice", run)
        with serving(store, "--token-file", str(token), "--port", port):
            expect(visitor.row("Again.").first).to_be_visible()
            expect(page.get_by_role("status").first).to_have_text("live")
            expect(visitor.row("n: ")).to_have_count(2)
            expect(visitor.row("Turn 2")).to_have_count(1)
