"""The harness itself: it sees every operation, kills where it says, and leaves what a crash leaves."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from killing import END, Disk, Moment, Watch, killed, moments, sample


def _two_files(directory: Path) -> Callable[[Watch], None]:
    """Write one file in this thread and one in another, and read something that changes nothing."""

    def write(name: str) -> None:
        descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(descriptor, b"0123456789")
        os.close(descriptor)

    def work(watch: Watch) -> None:
        with watch():
            os.listdir(directory)
            write("one")
            thread = threading.Thread(target=write, args=("two",))
            thread.start()
            thread.join()

    return work


def _contents(directory: Path) -> dict[str, bytes]:
    found = {each.name: each.read_bytes() for each in directory.iterdir()}
    for each in directory.iterdir():
        each.unlink()
    return found


def test_every_state_of_the_disk_is_left_once(tmp_path: Path) -> None:
    """One kill per disk, threads included; reading makes no new one, and a write is also cut in two."""
    disk = Disk([tmp_path])
    found, passed = moments(_two_files(tmp_path), disk)
    whole = {"one": b"0123456789", "two": b"0123456789"}
    assert _contents(tmp_path) == whole
    left = []
    for moment in found:
        assert killed(_two_files(tmp_path), moment, disk)
        left.append(_contents(tmp_path))
    assert left == [
        {},
        {"one": b""},
        {"one": b"01234"},
        {"one": b"0123456789"},
        {"one": b"0123456789", "two": b""},
        {"one": b"0123456789", "two": b"01234"},
        whole,
        whole,
    ]
    assert passed > len(found)
    assert found[-1] == END


def test_sql_statements_are_moments_of_their_own(tmp_path: Path) -> None:
    """What a transaction has done is there after its COMMIT and not before."""
    path = tmp_path / "some.db"
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE numbers (number INTEGER)")
    made.close()

    def work(watch: Watch) -> None:
        connection = sqlite3.connect(path, isolation_level=None)
        with watch():
            connection.execute("BEGIN")
            connection.execute("INSERT INTO numbers VALUES (1)")
            connection.execute("COMMIT")

    disk = Disk([tmp_path], unread=[str(path)])
    found, _ = moments(work, disk)
    statements = [each for each in found if each.function == "sqlite3.Connection.execute"]
    rows = []
    for moment in statements:
        assert killed(work, moment, disk)
        connection = sqlite3.connect(path)
        rows.append(connection.execute("SELECT count(*) FROM numbers").fetchone()[0])
        connection.close()
    assert [each.when for each in statements] == ["before", "after", "after", "after"]
    # The run that was written down lived, and has left its row already.
    assert rows == [1, 1, 1, 2]


def test_a_moment_that_never_comes_kills_nobody(tmp_path: Path) -> None:
    """The process then ends by itself, and the caller is told."""
    never = Moment("before", "posix.rename", f"{__file__}:1", 1)
    assert not killed(_two_files(tmp_path), never, Disk([tmp_path]))


def test_a_sample_has_every_place() -> None:
    """The first and the last time at each place in the code are in it, in order, and the same each time."""
    found = [Moment("after", "posix.write", f"file:{number % 3}", number) for number in range(100)]
    chosen = sample(found, 20)
    assert len(chosen) == 20
    assert {found[0], found[1], found[2], found[97], found[98], found[99]} <= set(chosen)
    assert chosen == sorted(chosen, key=lambda each: each.occurrence) == sample(found, 20)
    assert sample(found, 100) == found
