"""Children spend their run's money: in parallel, over kills, and whichever log their ledger is in."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest
from tests.turns.family_child import CHILDREN, PRICE, ROOT

from treenail import Limits
from treenail.containment import Reserved, Settled
from treenail.log.sqlite import SqliteLog
from treenail.state import Session
from treenail.turns import contain
from treenail.turns.ledger import ledger_of

PROCESS = Path(__file__).with_name("family_child.py")


def process(directory: Path, die_at: int, kept: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROCESS), str(directory), str(die_at), kept]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


def calls(directory: Path) -> int:
    return len((directory / "tally.txt").read_text().splitlines())


def test_eight_children_stop_at_one_dollar_over_three_kills(tmp_path: Path) -> None:
    """Killed with calls of several children under way, three times: 33 calls of $0.03 are made in all."""
    for die_at in (6, 5, 7):
        assert process(tmp_path, die_at, "root").returncode == -signal.SIGKILL
    with SqliteLog(tmp_path / "runs.db") as log, Session.open(log, ROOT) as root:
        events = ledger_of(root)
        settled = {event.reservation_id for event in events if isinstance(event, Settled)}
        open_calls = [event for event in events if isinstance(event, Reserved)]
        cut_off = [event for event in open_calls if event.reservation_id not in settled]
        # Several were under way at each kill, and the root alone knows of them, at their reservations.
        assert len(cut_off) > 3
        known = contain(root, Limits(max_cost_usd=1.0)).get_snapshot()
        assert known.cost_usd_accumulated == pytest.approx(calls(tmp_path) * PRICE)
        assert known.step_count >= calls(tmp_path)
        assert {event.lineage[0] for event in events} == {str(ROOT)}
    last = process(tmp_path, 0, "root")
    assert last.stdout.split() == ["budget_exceeded", str(CHILDREN)], last.stderr
    assert calls(tmp_path) == int(1.0 / PRICE) == 33


def test_children_that_keep_their_own_ledgers_are_known_to_their_parent(tmp_path: Path) -> None:
    """Each writes to its own log, with its root's id: the parent that takes them in knows what is spent."""
    assert process(tmp_path, 6, "own").returncode == -signal.SIGKILL
    with SqliteLog(tmp_path / "runs.db") as log:
        children = [Session.open(log, UUID(int=number)) for number in range(2, 2 + CHILDREN)]
        with Session.open(log, ROOT) as root:
            also = [event for each in children for event in ledger_of(each)]
            assert ledger_of(root) == []
            known = contain(root, Limits(max_cost_usd=1.0), also=[*also, *also]).get_snapshot()
            assert known.cost_usd_accumulated == pytest.approx(calls(tmp_path) * PRICE)
            assert known.step_count >= calls(tmp_path)
        for each in children:
            each.close()
    last = process(tmp_path, 0, "own")
    assert last.stdout.split()[0] == "budget_exceeded", last.stderr
    assert calls(tmp_path) * PRICE <= 1.0
