"""Transcripts of the Claude Agent SDK in a store of ours: the SDK's own suite, and what it does not ask."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest
from claude_agent_sdk.testing import run_session_store_conformance
from tests.forks import in_child
from tests.stores import STORES, store_in

from treenail.errors import LeaseHeldError
from treenail.integrations.claude_store import ClaudeSessionStore

KEY: Any = {"project_key": "project", "session_id": "session"}


@pytest.mark.parametrize("kind", STORES)
def test_every_contract_of_the_sdks_suite_holds(kind: str, tmp_path: Path) -> None:
    """All of them: no optional method is left out."""
    numbers = count()
    with ExitStack() as opened:

        def make() -> ClaudeSessionStore:
            place = tmp_path / str(next(numbers))
            place.mkdir()
            return opened.enter_context(ClaudeSessionStore(store_in(kind, place)))

        anyio.run(partial(run_session_store_conformance, make))
    assert next(numbers) > 10


def test_an_entry_that_is_sent_again_is_kept_once(tmp_path: Path) -> None:
    """Also by another process; those without an id are kept as often as they come."""
    first: Any = [{"type": "user", "uuid": "a"}, {"type": "title"}]
    with ClaudeSessionStore(tmp_path / "runs.db") as store:
        anyio.run(store.append, KEY, [first[0], *first])
    with ClaudeSessionStore(tmp_path / "runs.db") as store:
        anyio.run(store.append, KEY, [*first, {"type": "user", "uuid": "b"}])
        kept = anyio.run(store.load, KEY)
    assert kept == [*first, {"type": "title"}, {"type": "user", "uuid": "b"}]


def test_two_processes_do_not_mix_a_transcript(tmp_path: Path) -> None:
    with ClaudeSessionStore(tmp_path / "runs.db") as store:
        anyio.run(store.append, KEY, [{"type": "user"}])

        def second() -> str:
            with ClaudeSessionStore(tmp_path / "runs.db") as other:
                assert anyio.run(other.load, KEY) == [{"type": "user"}]
                try:
                    anyio.run(other.append, KEY, [{"type": "user"}])
                except LeaseHeldError:
                    return "refused"
            return "written"

        assert in_child(second) == "refused"
