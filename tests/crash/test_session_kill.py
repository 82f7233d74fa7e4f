"""A process that is killed while it changes a session leaves whole batches behind, and nothing else.

A victim works on a session in a store and says what it is about to do and what is done. It is
killed with SIGKILL at some moment. The session is then opened again: it must be what all finished deeds
make it, or that and the one deed that was under way, whole.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest

from treenail.log import MemoryLog
from treenail.state import Session, core

sys.path.insert(0, str(Path(__file__).parents[1] / "state"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from state_kit import SLICES, Add, Box, Note, Peeked, Said, equip
from tests.stores import open_store, store_in

Deed = list[Any]
SNAPSHOT_EVERY = 7
ROUNDS = 5


def events_of(numbers: list[int]) -> list[object]:
    kinds = (Add, lambda number: Note(str(number)), lambda number: Said(str(number)), Peeked)
    return [Box([number]) if number % 5 == 4 else kinds[number % 5](number) for number in numbers]


class Doer:
    """Does deeds. Each is one append to the log, or a prune."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def do(self, deed: Deed) -> None:
        kind, numbers = deed
        session = self.session
        # History is logged at once, also inside a call; leave it out, so that a call is one append.
        staged = [each for each in events_of(numbers) if not isinstance(each, Said)]
        if kind == "dispatch":
            session.dispatch_all(events_of(numbers))
        elif kind == "commit":
            begun = session.begin()
            with begun.active():
                for each in staged:
                    session.dispatch(each)
            begun.commit(Said("committed"), Note("committed"))
        elif kind == "roll back":
            begun = session.begin()
            with begun.active():
                for each in staged:
                    session.dispatch(each)
            begun.rollback(Said("rolled back"))
        elif kind == "seed":
            session[Note].seed([Note(str(number)) for number in numbers])
        elif kind == "restore":
            before = session.snapshot(include_all=True)
            twin = session.clone()
            twin.dispatch_all(events_of(numbers))
            assert before.slices != twin.snapshot(include_all=True).slices
            session.rollback(twin.snapshot(), reason="restore")
        else:
            session.prune(upto=session.head // 2)


def random_deed(random: Random) -> Deed:
    kind = random.choice(["dispatch", "commit", "roll back", "seed", "restore", "prune"])
    return [kind, [random.randrange(100) for _ in range(random.randint(1, 6))]]


def victim(path: str, session_id: str, seed: str) -> None:
    """What the process that is killed does."""
    core.SNAPSHOT_EVERY = SNAPSHOT_EVERY  # type: ignore[misc]  # so that stored snapshots are written too
    random = Random(int(seed))
    with open_store(path, synchronous="NORMAL") as log:
        doer = Doer(equip(Session.open(log, UUID(session_id))))
        while True:
            deed = random_deed(random)
            print(json.dumps(deed), flush=True)
            doer.do(deed)
            print("done", flush=True)


def content(session: Session) -> dict[str, list[Any]]:
    return {kind.__name__: list(session[kind].all()) for kind in SLICES}


def killed_after(
    path: str, session_id: UUID, lines: int, spins: int, seed: int
) -> tuple[list[Deed], Deed | None]:
    """Run a victim, kill it some time after it said that many lines. Returns the deeds, and one under way."""
    command = [sys.executable, __file__, path, str(session_id), str(seed)]
    # A session and a group of its own: only this process is killed.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(lines)]
        for _ in range(spins):
            pass
        os.kill(process.pid, signal.SIGKILL)
        said.extend(process.stdout.readlines())
    assert process.returncode == -signal.SIGKILL, "the victim ended by itself: " + "".join(said)
    whole = [line.strip() for line in said if line.endswith("\n")]
    done = [json.loads(line) for line, after in pairwise(whole) if after == "done"]
    under_way = json.loads(whole[-1]) if whole[-1] != "done" else None
    return done, under_way


@pytest.mark.parametrize(("store", "seed"), [("sqlite", 1), ("sqlite", 2), ("postgres", 3)])
def test_a_killed_process_leaves_finished_deeds_and_perhaps_the_last_one_whole(
    tmp_path: Path, store: str, seed: int
) -> None:
    random = Random(seed)
    path = store_in(store, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "SNAPSHOT_EVERY", SNAPSHOT_EVERY)
        with open_store(path) as log, equip(Session(log=log)) as session:
            session.dispatch(Add(0))
        twin = Doer(equip(Session(log=MemoryLog(heartbeat=False))))
        twin.do(["dispatch", [0]])
        deeds = 0
        for turn in range(ROUNDS):
            done, under_way = killed_after(
                path,
                session.session_id,
                lines=random.randint(1, 40),
                spins=random.randint(0, 60_000),
                seed=seed * 1000 + turn,
            )
            for deed in done:
                twin.do(deed)
            deeds += len(done)
            with open_store(path) as log:
                again = equip(Session.open(log, session.session_id))
                assert log.check(session.session_id).ok
                found = content(again)
                allowed = [content(twin.session)]
                if under_way is not None:
                    twin.do(under_way)
                    allowed.append(content(twin.session))
                assert found in allowed, (turn, under_way)
                assert again.report.ok
                if found != allowed[-1]:
                    # The deed never happened: do it now, so that both go on from the same place.
                    Doer(again).do(under_way)
                    assert content(again) == allowed[-1]
                again.close()
        assert deeds > 0


if __name__ == "__main__":
    victim(*sys.argv[1:])
