"""InMemoryFilesystem: the conformance suite, and what it promises beyond it."""

import dataclasses
import errno
import gc
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.clock import FixedClock
from treenail.errors import SnapshotMismatchError, UsageError, WorkspaceError
from treenail.testing.filesystem import FilesystemConformance, LinkConformance, tree
from treenail.workspace import Filesystem, InMemoryFilesystem

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)


class SteppingClock(FixedClock):
    """A clock that is one second later each time it is asked."""

    def __init__(self) -> None:
        super().__init__(NOON)

    def now(self) -> datetime:
        object.__setattr__(self, "time", self.time + timedelta(seconds=1))
        return self.time


class TestConformance(FilesystemConformance):
    def make_filesystem(self, directory: Path) -> Filesystem:
        return InMemoryFilesystem()


class TestLinks(LinkConformance):
    def make_filesystem(self, directory: Path) -> Filesystem:
        return InMemoryFilesystem()

    def make_link(self, filesystem: Filesystem, path: str, target: str) -> None:
        assert isinstance(filesystem, InMemoryFilesystem)
        filesystem.symlink(path, target)


class TestConstruction:
    def test_it_can_begin_with_files(self):
        """Files given to the constructor are there, text as UTF-8, with their directories."""
        fs = InMemoryFilesystem({"a/b.txt": "żółw", "./c//d.bin": b"\xff"})
        assert fs.read("a/b.txt").content == "żółw"
        assert fs.read_bytes("c/d.bin").content == b"\xff"
        assert fs.stat("a").is_directory

    @pytest.mark.parametrize(
        "files", [{"a": "1", "a/b": "2"}, {"a/b": "2", "a": "1"}, {"a": "1", "./a": "2"}]
    )
    def test_contradicting_files_are_refused(self, files):
        """A path that would be a file and a directory, or two files, is an error."""
        with pytest.raises(OSError, match="a"):
            InMemoryFilesystem(files)

    def test_the_root_is_not_a_file(self):
        """The root cannot be given content."""
        with pytest.raises(ValueError, match="root"):
            InMemoryFilesystem({".": "x"})

    def test_built_at_once_or_file_by_file_is_the_same(self):
        """The constructor and single writes give equal trees with equal references."""
        files = {"a/b.txt": "1", "a/c/d.txt": "2", "e.txt": "3"}
        at_once, one_by_one = InMemoryFilesystem(files), InMemoryFilesystem()
        for path, content in reversed(files.items()):
            one_by_one.write(path, content)
        assert tree(at_once) == tree(one_by_one)
        assert at_once.snapshot().commit_ref == one_by_one.snapshot().commit_ref

    @pytest.mark.parametrize("limit", ["max_total_bytes", "max_entries", "max_snapshots"])
    def test_limits_must_be_positive(self, limit):
        """A limit of nothing makes no sense."""
        with pytest.raises(UsageError, match=limit):
            InMemoryFilesystem(**{limit: 0})


class TestTimes:
    def test_times_come_from_the_clock(self):
        """Writing stamps a file; reading, changing bits and moving do not."""
        fs = InMemoryFilesystem(clock=SteppingClock())
        fs.write("a.txt", "x")
        written = fs.stat("a.txt").modified_at
        assert written is not None
        assert written > NOON
        fs.read("a.txt")
        fs.chmod("a.txt", 0o600)
        fs.move("a.txt", "b.txt")
        assert fs.stat("b.txt").modified_at == written
        fs.write("b.txt", "y")
        later = fs.stat("b.txt").modified_at
        assert later is not None
        assert later > written

    def test_a_directory_is_stamped_when_its_names_change(self):
        """Adding and removing entries stamps their directory; rewriting an entry, or one below, does not."""
        fs = InMemoryFilesystem(clock=SteppingClock())
        fs.write("dir/sub/a.txt", "x")
        stamp = fs.stat("dir").modified_at
        fs.write("dir/sub/a.txt", "y")
        fs.write("dir/sub/b.txt", "y")
        assert fs.stat("dir").modified_at == stamp
        fs.write("dir/new.txt", "z")
        added = fs.stat("dir").modified_at
        assert added != stamp
        fs.delete("dir/new.txt")
        assert fs.stat("dir").modified_at != added

    def test_restore_brings_times_back(self):
        """A restored file is as old as it was."""
        fs = InMemoryFilesystem(clock=SteppingClock())
        fs.write("a.txt", "x")
        stamp, snapshot = fs.stat("a.txt").modified_at, fs.snapshot()
        fs.write("a.txt", "y")
        fs.restore(snapshot)
        assert fs.stat("a.txt").modified_at == stamp


class TestReferences:
    def test_equal_trees_have_equal_references(self):
        """The reference depends on names, types, bits and content, and on nothing else."""
        clock = SteppingClock()
        fs = InMemoryFilesystem({"a.txt": "x", "dir/b.txt": "y"}, clock=clock)
        reference = fs.snapshot().commit_ref

        def after(*changes) -> str:
            for change in changes:
                change()
            return fs.snapshot().commit_ref

        assert after(lambda: fs.write("a.txt", "x")) == reference, "same content, later time"
        different = [
            after(lambda: fs.write("a.txt", "z")),
            after(lambda: fs.write("a.txt", "x"), lambda: fs.chmod("a.txt", 0o755)),
            after(lambda: fs.chmod("a.txt", 0o644), lambda: fs.mkdir("empty")),
            after(lambda: fs.delete("empty"), lambda: fs.symlink("link", "a.txt")),
            after(lambda: fs.delete("link"), lambda: fs.move("a.txt", "renamed.txt")),
            after(lambda: fs.move("renamed.txt", "a.txt"), lambda: fs.chmod("dir", 0o700)),
            after(lambda: fs.chmod("dir", 0o755), lambda: fs.chmod(".", 0o700)),
        ]
        assert len({reference, *different}) == len(different) + 1
        assert after(lambda: fs.chmod(".", 0o755)) == reference

    @given(
        first=st.dictionaries(st.sampled_from("abcd"), st.binary(max_size=3)),
        second=st.dictionaries(st.sampled_from("abcd"), st.binary(max_size=3)),
    )
    def test_references_are_equal_exactly_when_trees_are(self, first, second):
        """Whatever way led to a tree, its reference tells it apart from every other."""
        fs = InMemoryFilesystem(first)
        for name in first.keys() - second.keys():
            fs.delete(name)
        for name, content in second.items():
            fs.write_bytes(name, content)
        fresh = InMemoryFilesystem(second)
        assert fs.snapshot().commit_ref == fresh.snapshot().commit_ref
        other = InMemoryFilesystem(first)
        assert (other.snapshot().commit_ref == fresh.snapshot().commit_ref) == (first == second)


class TestSnapshots:
    def test_a_snapshot_covers_everything(self):
        """In memory every snapshot is a whole one, and promises that nothing is missing."""
        snapshot = InMemoryFilesystem({"a": "x"}).snapshot()
        assert snapshot.scanned
        assert snapshot.uncovered == ()
        assert snapshot.git_dir is None

    def test_a_snapshot_of_another_filesystem_is_refused(self):
        """Even if the trees are equal: the text says that it is not held, and nothing changes."""
        one, other = InMemoryFilesystem({"a": "x"}), InMemoryFilesystem({"a": "x"})
        with pytest.raises(SnapshotMismatchError, match="does not hold"):
            one.restore(other.snapshot())
        assert one.read("a").content == "x"

    def test_old_snapshots_are_forgotten(self):
        """Only so many are held; an older one is refused, and the newer ones still work."""
        fs = InMemoryFilesystem(max_snapshots=2)
        snapshots = []
        for number in range(3):
            fs.write("a", str(number))
            snapshots.append(fs.snapshot())
        with pytest.raises(SnapshotMismatchError, match="last 2"):
            fs.restore(snapshots[0])
        fs.restore(snapshots[1])
        assert fs.read("a").content == "1"

    def test_a_call_can_be_rolled_back_however_many_snapshots_it_takes(self):
        """An open call keeps its own way back."""
        fs = InMemoryFilesystem({"a": "before"}, max_snapshots=1)
        call = fs.begin("call-1")
        fs.write("a", "during")
        for _ in range(5):
            fs.snapshot()
        call.rollback()
        assert fs.read("a").content == "before"

    def test_snapshots_cost_nothing(self):
        """A thousand snapshots of a large tree, with a change between each, share what did not change."""
        content = b"x" * 1_000_000
        fs = InMemoryFilesystem({f"big/{n}.bin": content + bytes([n]) for n in range(20)})
        started = time.thread_time()  # Work, not waiting for others to do theirs.
        snapshots = []
        for number in range(1_000):
            fs.write("small.txt", str(number))
            snapshots.append(fs.snapshot())
        for snapshot in snapshots:
            fs.restore(snapshot)
        elapsed = time.thread_time() - started
        # Copying or hashing the 20 MB once per snapshot would take 20 s or more.
        assert elapsed < 5
        assert fs.read("small.txt").content == "999"

    def test_reading_is_shared_not_copied(self):
        """The same bytes are held once, however many boundaries have them."""
        fs = InMemoryFilesystem()
        content = bytes(5_000_000)
        before = sys.getrefcount(content)
        fs.write_bytes("a.bin", content)
        for _ in range(100):
            fs.snapshot()
        assert sys.getrefcount(content) - before <= 2


class TestForks:
    def test_a_fork_goes_its_own_way(self):
        """It begins at the boundary; after that neither sees what the other writes."""
        fs = InMemoryFilesystem({"a": "1"})
        snapshot = fs.snapshot()
        fs.write("a", "2")
        fork = fs.fork(snapshot)
        assert fork.read("a").content == "1"
        fork.write("b", "fork")
        fs.write("c", "origin")
        assert sorted(tree(fork)) == ["a", "b"]
        assert sorted(tree(fs)) == ["a", "c"]

    def test_a_fork_knows_where_it_began(self):
        """It can show what it changed since, and go back."""
        fs = InMemoryFilesystem({"a": "1"})
        snapshot = fs.snapshot()
        fork = fs.fork(snapshot)
        fork.write("a", "2")
        assert [change.path for change in fork.diff(snapshot).changes] == ["a"]
        fork.restore(snapshot)
        assert fork.read("a").content == "1"

    def test_a_fork_needs_a_boundary_that_is_held(self):
        """A snapshot from elsewhere is refused."""
        with pytest.raises(SnapshotMismatchError):
            InMemoryFilesystem().fork(InMemoryFilesystem().snapshot())

    def test_a_fork_has_no_open_call(self):
        """A call that holds the original does not hold the fork."""
        fs = InMemoryFilesystem({"a": "1"})
        call = fs.begin("call-1")
        fs.write("a", "2")
        fork = fs.fork(call.base)
        assert fork.unfinished() == []
        call.rollback()
        assert fork.read("a").content == "1"


class TestLimits:
    def test_bytes_are_bounded(self):
        """A write that does not fit is ENOSPC and changes nothing; freeing space helps."""
        fs = InMemoryFilesystem({"a": b"x" * 6}, max_total_bytes=10)
        with pytest.raises(OSError, match="at most 10") as caught:
            fs.write("b", "12345")
        assert caught.value.errno == errno.ENOSPC
        assert sorted(tree(fs)) == ["a"]
        with pytest.raises(OSError, match="at most 10"):
            fs.write("a", "12345", mode="append")
        fs.write("a", "1")
        fs.write("b", "123456789")
        assert fs.stat("b").size_bytes == 9

    def test_moving_and_deleting_count(self):
        """What is replaced or deleted makes room."""
        fs = InMemoryFilesystem({"a": b"x" * 5, "dir/b": b"y" * 5}, max_total_bytes=10)
        fs.move("a", "dir/b", overwrite=True)
        fs.write("c", "12345")
        fs.delete("dir", recursive=True)
        fs.write("d", "12345")
        assert sorted(tree(fs)) == ["c", "d"]

    def test_entries_are_bounded(self):
        """So many files, directories and links, and no more."""
        fs = InMemoryFilesystem(max_entries=3)
        fs.write("dir/a", "x")
        fs.symlink("link", "dir")
        for operation in (
            lambda: fs.write("b", ""),
            lambda: fs.mkdir("b"),
            lambda: fs.symlink("b", "a"),
        ):
            with pytest.raises(OSError, match="at most 3") as caught:
                operation()
            assert caught.value.errno == errno.ENOSPC
        fs.write("dir/a", "still writable")
        assert fs.read("dir/a").content == "still writable"

    def test_a_stream_is_bounded_while_it_is_written(self):
        """It fails when what is written reaches the tree, and leaves no trace."""
        fs = InMemoryFilesystem(max_total_bytes=10)
        stream = fs.open_write("a")
        stream.write(b"12345678901")
        with pytest.raises(OSError, match="10"):
            stream.flush()
        with pytest.raises(OSError, match="10"):
            stream.close()
        assert not fs.exists("a")

    def test_the_tree_does_not_grow_deeper_than_paths_reach(self):
        """Neither links nor moves nor new directories can build what no path could name."""
        fs = InMemoryFilesystem({"a/b/c/d/e/f": "five levels below a"})
        fs.mkdir("/".join("d" * 60))
        fs.symlink("short", "/".join("d" * 60))
        for operation in (
            lambda: fs.write("short/1/2/3/4/5", "x"),
            lambda: fs.mkdir("short/1/2/3/4/5"),
            lambda: fs.symlink("short/1/2/3/4/5", "x"),
            lambda: fs.move("a", "short/a"),
        ):
            with pytest.raises(OSError, match=r"65|66") as caught:
                operation()
            assert caught.value.errno == errno.ENAMETOOLONG
        fs.move("a/b/c", "short/c")
        assert fs.read("short/c/d/e/f").content == "five levels below a"


class TestCalls:
    def test_a_new_object_has_nothing_to_recover(self):
        """Nothing in memory survives a crash, so nothing is unfinished."""
        assert list(InMemoryFilesystem({"a": "x"}).unfinished()) == []

    def test_a_call_that_touches_nothing_ends_where_it_began(self):
        """Its boundary is its base, which can be gone back to however many snapshots the call took."""
        fs = InMemoryFilesystem({"a": "x"}, max_snapshots=2)
        call = fs.begin("call-1")
        for _ in range(5):
            fs.snapshot()
        boundary = call.prepare()
        assert boundary is call.base
        call.finish()
        fs.write("a", "y")
        fs.restore(boundary)
        assert fs.read("a").content == "x"

    def test_a_call_needs_an_id(self):
        """An empty id is refused."""
        with pytest.raises(UsageError, match="id"):
            InMemoryFilesystem().begin("")

    def test_recovering_a_call_that_is_not_open_is_refused(self):
        """The text names the call."""
        with pytest.raises(WorkspaceError, match="call-9"):
            InMemoryFilesystem().recover("call-9", committed=True)

    def test_a_finished_call_cannot_be_rolled_back(self):
        """It says so instead of pretending; finishing twice is harmless."""
        fs = InMemoryFilesystem()
        call = fs.begin("call-1")
        fs.write("a", "x")
        call.finish()
        call.finish()
        with pytest.raises(WorkspaceError, match="finished"):
            call.rollback()
        with pytest.raises(WorkspaceError, match="ended"):
            call.prepare()
        assert fs.exists("a")

    def test_a_rolled_back_call_cannot_be_finished(self):
        """Finishing what was undone would be a lie."""
        call = InMemoryFilesystem().begin("call-1")
        call.rollback()
        with pytest.raises(WorkspaceError, match="ended"):
            call.finish()

    def test_a_rollback_names_what_it_put_back(self):
        """Sorted, and only what really differed."""
        fs = InMemoryFilesystem({"a": "1", "b": "2", "dir/c": "3"})
        call = fs.begin("call-1")
        fs.write("b", "changed")
        fs.write("b", "2")
        fs.write("dir/c", "changed")
        fs.write("new/d", "4")
        assert call.rollback().restored == ("dir/c", "new", "new/d")


class TestStreams:
    def test_a_lost_stream_writes_nothing(self):
        """A stream that is never closed is discarded, with a warning that names the file."""
        fs = InMemoryFilesystem({"a": "old"})
        with pytest.warns(ResourceWarning, match="'a' was never closed"):
            self.lose_a_stream(fs)
        assert fs.read("a").content == "old"

    def lose_a_stream(self, fs: InMemoryFilesystem) -> None:
        fs.open_write("a").write(b"half")
        gc.collect()

    def test_a_stream_opened_outside_a_call_does_not_end_in_one(self):
        """Otherwise the call's rollback would undo what it did not do."""
        fs = InMemoryFilesystem({"a": "old"})
        stream = fs.open_write("a")
        call = fs.begin("call-1")
        with pytest.raises(WorkspaceError, match="'a'"):
            stream.close()
        call.rollback()
        assert fs.read("a").content == "old"

    def test_an_open_reader_keeps_its_content(self):
        """Whoever reads sees one version of the file to its end."""
        fs = InMemoryFilesystem({"a": "first"})
        with fs.open_read("a") as stream:
            assert stream.read(2) == b"fi"
            fs.write("a", "second")
            assert stream.read() == b"rst"


class TestLinkRules:
    def test_absolute_targets_lead_out(self):
        """Also those that would be inside if the root were `/`."""
        fs = InMemoryFilesystem({"a": "x"})
        fs.symlink("link", "/a")
        with pytest.raises(PermissionError, match="out of the workspace"):
            fs.read("link")

    def test_writing_to_a_dangling_link_makes_its_target(self):
        """As the shell's `>` does."""
        fs = InMemoryFilesystem()
        fs.symlink("link", "dir/target")
        fs.write("link", "x")
        assert fs.read("dir/target").content == "x"
        assert fs.stat("link").is_link

    def test_mkdir_accepts_a_link_to_a_directory_only(self):
        """Where a directory is wanted, a link to one will do; a link to nothing is in the way."""
        fs = InMemoryFilesystem({"dir/a": "x"})
        fs.symlink("good", "dir")
        fs.symlink("bad", "nowhere")
        fs.mkdir("good")
        fs.mkdir("good/sub")
        assert fs.exists("dir/sub")
        with pytest.raises(FileExistsError):
            fs.mkdir("bad")

    @pytest.mark.parametrize("target", ["", "a\0b"])
    def test_a_target_must_be_a_path(self, target):
        """An empty target, or one with a NUL, is a ValueError."""
        with pytest.raises(ValueError, match="target"):
            InMemoryFilesystem().symlink("link", target)

    def test_a_link_does_not_replace_anything(self):
        """Something at the path is FileExistsError."""
        fs = InMemoryFilesystem({"a": "x"})
        with pytest.raises(FileExistsError):
            fs.symlink("a", "b")

    def test_a_path_leads_through_forty_links_at_most(self):
        """As on Linux: the fortieth is followed, one more is not."""
        fs = InMemoryFilesystem({"end": "x"})
        for number in range(41):
            fs.symlink(f"link{number}", "end" if number == 0 else f"link{number - 1}")
        assert fs.read("link39").content == "x"
        with pytest.raises(OSError, match="circle") as caught:
            fs.read("link40")
        assert caught.value.errno == errno.ELOOP

    def test_up_and_down_through_links(self):
        """`..` in a target is relative to where the link really is."""
        fs = InMemoryFilesystem({"x/y/file": "right", "file": "wrong"})
        fs.mkdir("x/y/z")
        fs.symlink("short", "x/y/z")
        fs.symlink("x/y/z/up", "../file")
        assert fs.read("short/up").content == "right"

    def test_a_missing_step_before_going_up_is_missing(self):
        """`missing/..` leads nowhere, as on disk, and nothing is made on the way."""
        fs = InMemoryFilesystem({"a": "x"})
        fs.symlink("link", "missing/../a")
        with pytest.raises(FileNotFoundError):
            fs.read("link")
        with pytest.raises(FileNotFoundError):
            fs.write("link", "y")
        assert not fs.exists("missing")


class TestThreads:
    def test_readers_see_one_tree(self):
        """While a writer swaps trees in which two files agree, no search ever sees them disagree."""
        fs = InMemoryFilesystem({"a": "0", "b": "0"})
        zeros = fs.snapshot()
        fs.write("a", "1")
        fs.write("b", "1")
        ones = fs.snapshot()
        stop = threading.Event()
        started = threading.Barrier(3)
        seen: set[tuple[str, ...]] = set()

        def read() -> None:
            started.wait()
            while not stop.is_set():
                seen.add(tuple(match.line_content for match in fs.grep("[01]")))

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        started.wait()
        while seen != {("0", "0"), ("1", "1")} or fs.snapshot().commit_ref == zeros.commit_ref:
            fs.restore(zeros)
            fs.restore(ones)
            if seen - {("0", "0"), ("1", "1")}:
                break
        stop.set()
        for reader in readers:
            reader.join()
        assert seen == {("0", "0"), ("1", "1")}

    def test_writers_take_turns(self):
        """No append is lost when several threads write one file and one directory."""
        fs = InMemoryFilesystem()
        start = threading.Barrier(4)

        def write(name: str) -> None:
            start.wait()
            for number in range(100):
                fs.write("log", f"{name}{number}\n", mode="append")
                fs.write(f"dir/{name}-{number}", "x")

        writers = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert fs.read("log").total_lines == 400
        assert len(fs.list("dir")) == 400


def test_the_snapshot_is_made_of_plain_values():
    """Text, an id and a time: nothing that a codec could not store."""
    snapshot = InMemoryFilesystem().snapshot(tag="t")
    kinds = {type(value).__name__ for value in dataclasses.asdict(snapshot).values()}
    assert kinds == {"UUID", "datetime", "str", "NoneType", "bool", "tuple"}
