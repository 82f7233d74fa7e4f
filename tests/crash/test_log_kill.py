"""A writer killed at random moments: what it was told is kept is kept, and nothing is half there."""

import os
import random
import select
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest
from tests.stores import open_store, store_in

from treenail.log import this_process_owner

ROOT = Path(__file__).parents[2]
SESSION = UUID(int=7)

# Each event's payload says which append of which life it belongs to, its place in it and how many there are.
WRITER = """
import os, random, sys
from uuid import UUID
from treenail.log import Draft
from treenail.log.lease import this_process_owner
from tests.stores import open_store

path, life, synchronous = sys.argv[1], int(sys.argv[2]), sys.argv[3]
chance = random.Random(life)
log = open_store(path, synchronous=synchronous)
session_id = UUID(int=7)
lease = log.acquire(session_id, owner=this_process_owner())
head = log.info(session_id).head
os.write(1, b"ready\\n")
step = 0
while True:
    count = chance.choice([1, 2, 3, 10])
    size = chance.choice([0, 100, 5000])
    batch = [
        Draft("test.Step", b"%d %d %d %d " % (life, step, place, count) + b"x" * size, 1)
        for place in range(count)
    ]
    log.append(lease, batch, expected_seq=head)
    head += count
    os.write(1, b"%d\\n" % head)
    if step % 7 == 6:
        log.put_snapshot(lease, head, b"state %d" % head)
    step += 1
"""


def acknowledged(process: "subprocess.Popen[bytes]", moment: random.Random) -> int:
    """Let the writer run for some of its own steps, kill it, and return the last number that it wrote."""
    assert process.stdout is not None
    output = process.stdout.fileno()
    text = b""
    wanted = moment.randrange(1, 25)
    while text.count(b"\n") < wanted:
        ready, _, _ = select.select([output], [], [], 30)
        assert ready, "the writer does not write"
        part = os.read(output, 65536)
        assert part, process.stderr and process.stderr.read()
        text += part
    # Spin for less than an append takes, so that the kill lands at any point of one.
    for _ in range(moment.randrange(20_000)):
        pass
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate()
    lines = (text + rest).split(b"\n")[:-1]
    return int(lines[-1]) if lines[-1] != b"ready" else 0


@pytest.mark.parametrize(
    ("store", "synchronous", "lives"),
    [("sqlite", "FULL", 12), ("sqlite", "NORMAL", 12), ("postgres", "FULL", 6)],
)
def test_every_acknowledged_event_survives_and_no_batch_is_half_there(
    store: str, synchronous: str, lives: int, tmp_path: Path
) -> None:
    """Dozens of kills at random moments; after each, the next writer takes over at once."""
    path = store_in(store, tmp_path)
    with open_store(path) as log:
        log.create(SESSION, created_at=datetime(2026, 1, 1, tzinfo=UTC))
    moment = random.Random(synchronous)
    previous: list[bytes] = []
    for life in range(lives):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, path, str(life), synchronous],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        known = acknowledged(process, moment)
        with open_store(path, heartbeat=False) as log:
            # An append that was on its way when its writer died is refused from here on.
            log.release(log.acquire(SESSION, owner=this_process_owner()))
            events = list(log.read(SESSION))
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
            assert len(events) >= known
            steps = [event.payload.split(b" ")[:4] for event in events]
            # What was there before this life has not changed, and each append is there once and whole.
            assert [event.payload for event in events[: len(previous)]] == previous
            place = len(previous)
            expected_step = 0
            while place < len(events):
                count = int(steps[place][3])
                batch = [
                    [b"%d" % life, b"%d" % expected_step, b"%d" % n, b"%d" % count] for n in range(count)
                ]
                assert steps[place : place + count] == batch
                place += count
                expected_step += 1
            previous = [event.payload for event in events]
            assert log.check(SESSION).ok
            snapshot = log.latest_snapshot(SESSION)
            assert snapshot is None or snapshot.payload == b"state %d" % snapshot.seq
    assert len(previous) > 2 * lives
