"""The private object store: what it writes git can read, and what git writes it can read."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treenail.errors import ObjectStoreError
from treenail.workspace import objects
from treenail.workspace.objects import (
    EMPTY_TREE,
    LARGE_BYTES,
    MODE_EXECUTABLE,
    MODE_FILE,
    MODE_LINK,
    MODE_TREE,
    ObjectStore,
    TreeEntry,
    decode_tree,
    encode_tree,
)
from treenail.workspace.packs import ObjectKind, hash_object, write_pack
from treenail.workspace.trees import patch_tree


def git(store: ObjectStore, *arguments: str, stdin: bytes | None = None) -> bytes:
    environment = {**os.environ, "GIT_DIR": str(store.path), "GIT_CONFIG_NOSYSTEM": "1"}
    result = subprocess.run(
        ["git", *arguments], env=environment, input=stdin, capture_output=True, check=False
    )
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    made = ObjectStore(tmp_path / "store")
    made.create()
    return made


def commit_of(store: ObjectStore, files: dict[bytes, bytes]) -> bytes:
    tree = store.write_tree(
        {name: TreeEntry(MODE_FILE, store.write("blob", data)) for name, data in files.items()}
    )
    commit = store.write_commit(tree, (), "a commit", timestamp=1_700_000_000)
    store.flush()
    store.write_ref("refs/heads/main", commit.hex())
    return commit


class TestWriting:
    @pytest.mark.parametrize("compress", [False, True])
    def test_content_of_every_length_is_packed_as_git_does(self, store: ObjectStore, compress: bool) -> None:
        """At each length where a pack spells sizes or blocks in another way, and on both sides of it."""
        edges = (1, 16, 2_048, 65_536, 262_144, 300_000)
        contents = [os.urandom(size + step) for size in edges for step in (-1, 0, 1)]
        ids = [hash_object("blob", content) for content in contents]
        blobs: dict[bytes, tuple[ObjectKind, bytes]] = {
            oid: ("blob", content) for oid, content in zip(ids, contents, strict=True)
        }
        write_pack(str(store.path / "objects/pack"), blobs, durable=False, compress=compress)
        git(store, "fsck", "--full", "--strict", "--no-dangling")
        for oid, content in zip(ids, contents, strict=True):
            assert git(store, "cat-file", "blob", oid.hex()) == content
            assert store.read(oid) == ("blob", content)

    def test_ids_are_those_that_git_gives(self, store: ObjectStore) -> None:
        """A blob's id is what `git hash-object` says."""
        for data in (b"", b"text\n", bytes(range(256)) * 300):
            expected = git(store, "hash-object", "--stdin", stdin=data).decode().strip()
            assert hash_object("blob", data).hex() == expected

    def test_git_reads_what_was_written(self, store: ObjectStore) -> None:
        """After a flush, git finds every object, and has nothing to complain about."""
        data = b"line\r\n" * 20_000
        commit = commit_of(store, {b"a.txt": data, b"odd \xff name": b"x"})
        assert git(store, "cat-file", "blob", hash_object("blob", data).hex()) == data
        assert git(store, "rev-parse", "main").decode().strip() == commit.hex()
        assert git(store, "fsck", "--full", "--strict") == b""

    def test_trees_are_sorted_as_git_sorts(self, store: ObjectStore) -> None:
        """A directory sorts as if its name ended in a slash; git accepts the order."""
        blob = store.write("blob", b"x")
        inner = store.write_tree({b"f": TreeEntry(MODE_EXECUTABLE, blob)})
        names = {
            b"a.txt": TreeEntry(MODE_FILE, blob),
            b"a": TreeEntry(MODE_TREE, inner),
            b"a0": TreeEntry(MODE_LINK, blob),
        }
        tree = store.write_tree(names)
        store.write_ref("refs/heads/main", store.write_commit(tree, (), "m", timestamp=0).hex())
        store.flush()
        assert git(store, "fsck", "--full", "--strict") == b""
        assert git(store, "ls-tree", "--name-only", tree.hex()).split() == [b"a.txt", b"a", b"a0"]

    def test_nothing_is_on_disk_before_the_flush(self, store: ObjectStore) -> None:
        """Small objects wait in memory, and all of them become one pack."""
        oids = [store.write("blob", b"%d" % number) for number in range(10)]
        packs = store.path / "objects/pack"
        assert list(packs.iterdir()) == []
        assert store.read_blob(oids[3]) == b"3"
        store.flush()
        assert sorted(path.suffix for path in packs.iterdir()) == [".idx", ".pack"]
        assert [ObjectStore(store.path).read_blob(oid) for oid in oids] == [
            b"%d" % number for number in range(10)
        ]

    def test_large_content_is_streamed(self, store: ObjectStore, tmp_path: Path) -> None:
        """A large file goes in and comes out in parts, none of them large."""
        data = os.urandom(5 * 1024 * 1024 + 7)
        (tmp_path / "large").write_bytes(data)
        descriptor = os.open(tmp_path / "large", os.O_RDONLY)
        oid = store.write_descriptor(descriptor, len(data))
        os.close(descriptor)
        assert oid == hash_object("blob", data)
        parts = list(store.stream_blob(oid, len(data)))
        assert b"".join(parts) == data
        assert max(map(len, parts)) <= 2 * objects.CHUNK_BYTES
        assert git(store, "cat-file", "-s", oid.hex()).decode().strip() == str(len(data))

    @pytest.mark.parametrize("claimed", [3, 5, objects.LARGE_BYTES])
    def test_a_file_that_is_being_written_is_noticed(
        self, store: ObjectStore, tmp_path: Path, claimed: int
    ) -> None:
        """Content that is not as long as it was said to be is not stored."""
        (tmp_path / "file").write_bytes(b"four")
        descriptor = os.open(tmp_path / "file", os.O_RDONLY)
        assert store.write_descriptor(descriptor, claimed) is None
        os.close(descriptor)
        assert list((store.path / "objects/pack").iterdir()) == []
        assert [path.name for path in (store.path / "objects").iterdir() if path.name.startswith("tmp")] == []


def stream_file(store: ObjectStore, name: str) -> bytes:
    """Store a file that is beside the store, as a workspace does."""
    path = store.path.parent / name
    with path.open("rb") as file:
        oid = store.write_descriptor(file.fileno(), path.stat().st_size)
    assert oid is not None
    return oid


class TestRoom:
    """A disk that is full gets back what was begun."""

    @pytest.mark.parametrize(
        ("limit", "write"),
        [
            pytest.param(
                100_000, lambda store: [store.write("blob", b"%d" % n) for n in range(5000)], id="index"
            ),
            pytest.param(50_000, lambda store: store.write("blob", bytes(40_000) + b"1" * 20_000), id="pack"),
            pytest.param(100_000, lambda store: stream_file(store, "large"), id="large object"),
            pytest.param(20, lambda store: store.write_ref("refs/heads/new", "1" * 40), id="ref"),
        ],
    )
    def test_what_could_not_be_written_whole_is_removed(
        self, store: ObjectStore, limit: int, write: Callable[[ObjectStore], object]
    ) -> None:
        """However often it is tried, nothing is left of it; it is written when there is room again."""

        def attempt() -> None:
            write(store)
            store.flush()

        (store.path.parent / "large").write_bytes(bytes(LARGE_BYTES))
        before = sorted(path.name for path in store.path.rglob("*") if path.is_file())
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            for _ in range(2):
                with pytest.raises(OSError, match="too large"):
                    attempt()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert sorted(path.name for path in store.path.rglob("*") if path.is_file()) == before
        attempt()
        assert len([path for path in store.path.rglob("*") if path.is_file()]) > len(before)


class TestPacks:
    @pytest.mark.parametrize("by_git", [False, True])
    def test_an_index_that_was_cut_off_is_not_believed(self, store: ObjectStore, by_git: bool) -> None:
        """Whether the store or git wrote it, a damaged index is an error that names the file."""
        commit = commit_of(store, {b"a": b"content"})
        if by_git:
            git(store, "gc", "--quiet")
        (index,) = (store.path / "objects/pack").glob("*.idx")
        whole = index.read_bytes()
        index.chmod(0o600)
        for length in (0, 7, 100, 1_024, 1_060, len(whole) - 50):
            index.write_bytes(whole[:length])
            with pytest.raises(ObjectStoreError, match=index.name):
                ObjectStore(store.path).read(commit)


class TestReading:
    def test_another_process_finds_everything(self, store: ObjectStore) -> None:
        """A store that was opened before an object was packed finds it all the same."""
        other = ObjectStore(store.path)
        assert not other.contains(hash_object("blob", b"x"))
        oid = store.write("blob", b"x")
        store.flush()
        assert other.contains(oid)
        assert other.read_blob(oid) == b"x"

    def test_what_git_packed_is_read(self, store: ObjectStore) -> None:
        """After `git gc`, however thorough, every object and ref is still there: it makes no deltas here."""
        base = b"".join(b"line %d is here\n" % number for number in range(2_000))
        versions = [base + b"%d\n" % number for number in range(20)]
        parent: tuple[bytes, ...] = ()
        for data in versions:
            tree = store.write_tree({b"f": TreeEntry(MODE_FILE, store.write("blob", data))})
            parent = (store.write_commit(tree, parent, "m", timestamp=0),)
            store.flush()
        store.write_ref("refs/heads/main", parent[0].hex())
        git(store, "gc", "--quiet", "--aggressive", "--prune=now")
        deltas = git(store, "cat-file", "--batch-all-objects", "--batch-check=%(deltabase)").split()
        assert set(deltas) == {b"0" * 40}
        fresh = ObjectStore(store.path)
        for data in versions:
            assert fresh.read_blob(hash_object("blob", data)) == data
        assert fresh.read_ref("refs/heads/main") == parent[0].hex()

    def test_a_missing_object_is_named(self, store: ObjectStore) -> None:
        """Asking for what is not there is an error that names it."""
        with pytest.raises(ObjectStoreError, match="ab" * 20):
            store.read(bytes.fromhex("ab" * 20))

    def test_damage_is_never_returned(self, store: ObjectStore) -> None:
        """A flipped bit anywhere in a pack is an error, not wrong content."""
        data = b"content that matters " * 50
        oid = store.write("blob", data)
        store.flush()
        (pack,) = (store.path / "objects/pack").glob("*.pack")
        good = pack.read_bytes()
        pack.chmod(0o600)
        for position in range(12, len(good) - 20, 37):
            pack.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
            with pytest.raises(ObjectStoreError):
                ObjectStore(store.path).read_blob(oid)
        pack.write_bytes(good)
        assert ObjectStore(store.path).read_blob(oid) == data


class TestRetention:
    def test_small_packs_are_merged(self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """However many boundaries there are, there are few packs, and nothing is lost."""
        monkeypatch.setattr(objects, "MAX_SMALL_PACKS", 5)
        oids = []
        for number in range(40):
            oids.append(store.write("blob", b"content %d " % number * 50))
            store.flush()
        assert len(list((store.path / "objects/pack").glob("*.idx"))) < 10
        fresh = ObjectStore(store.path)
        assert all(fresh.read_blob(oid).startswith(b"content") for oid in oids)
        assert git(store, "fsck", "--full", "--no-dangling") == b""

    def test_a_reader_survives_a_merge(self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that knows the old packs finds the objects in the new one."""
        oids = [store.write("blob", b"first")]
        store.flush()
        other = ObjectStore(store.path)
        assert other.read_blob(oids[0]) == b"first"
        monkeypatch.setattr(objects, "MAX_SMALL_PACKS", 2)
        store.write("blob", b"second")
        store.flush()
        assert other.read_blob(oids[0]) == b"first"

    @pytest.mark.parametrize("gc", [False, True])
    def test_a_sweep_removes_what_nobody_needs(self, store: ObjectStore, gc: bool) -> None:
        """After a sweep the content is in no file of the store, and what is needed is there."""
        secret = os.urandom(3_000)
        large_secret = os.urandom(objects.LARGE_BYTES)
        (store.path.parent / "large").write_bytes(large_secret)
        kept = commit_of(store, {b"kept": b"kept content"})
        gone = store.write_tree(
            {
                b"secret": TreeEntry(MODE_FILE, store.write("blob", secret)),
                b"large": TreeEntry(MODE_FILE, stream_file(store, "large")),
                b"kept": TreeEntry(MODE_FILE, hash_object("blob", b"kept content")),
            }
        )
        branch = store.write_commit(gone, (kept,), "m", timestamp=0)
        store.flush()
        store.write_ref("refs/heads/gone", branch.hex())
        if gc:
            git(store, "gc", "--quiet")
        store.delete_ref("refs/heads/gone")
        assert store.sweep([kept]) >= 3
        files = [path.read_bytes() for path in store.path.rglob("*") if path.is_file()]
        assert not any(secret[:500] in content or large_secret[:500] in content for content in files)
        assert git(store, "fsck", "--full") == b""
        assert git(store, "show", "main:kept") == b"kept content"
        assert "refs/heads/gone" not in ObjectStore(store.path).refs()


NAMES = st.binary(min_size=1, max_size=4).filter(lambda name: b"/" not in name and b"\0" not in name)
ENTRIES = st.dictionaries(
    NAMES,
    st.builds(
        TreeEntry, st.sampled_from([MODE_FILE, MODE_TREE, MODE_LINK]), st.binary(min_size=20, max_size=20)
    ),
)


@given(ENTRIES)
def test_trees_come_back_as_they_were_written(entries: dict[bytes, TreeEntry]) -> None:
    """Encoding and decoding a tree loses nothing."""
    assert decode_tree(encode_tree(entries)) == entries


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "a/b", "a/b/c", "a/d", "e", "e/f"]), st.integers(0, 3)), max_size=12
    )
)
def test_patching_equals_building_anew(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    """A tree that is patched step by step is the tree of the files that are there at the end."""
    store = ObjectStore(tmp_path_factory.mktemp("store"))
    store.create()
    tree = store.write_tree({})
    files: dict[str, int] = {}
    directories: set[str] = set()
    for path, content in steps:
        parents = [path[:cut] for cut, char in enumerate(path) if char == "/"]
        if any(parent in files for parent in parents) or path in directories:
            continue
        directories.update(parents)
        files[path] = content
        blob = store.write("blob", b"%d" % content)
        tree = patch_tree(store, tree, [(path, TreeEntry(MODE_FILE, blob))])

    def build(prefix: str) -> bytes:
        names = {}
        for path, content in files.items():
            if path.startswith(prefix):
                name, _, rest = path[len(prefix) :].partition("/")
                entry = (
                    TreeEntry(MODE_TREE, build(f"{prefix}{name}/"))
                    if rest
                    else TreeEntry(MODE_FILE, store.write("blob", b"%d" % content))
                )
                names[name.encode()] = entry
        return store.write_tree(names)

    assert tree == build("")


def test_patching_nothing_writes_nothing(store: ObjectStore) -> None:
    """Edits that say what is already there give the same tree, and a removal of the unknown is no edit."""
    blob = store.write("blob", b"x")
    tree = patch_tree(store, EMPTY_TREE, [("a/b", TreeEntry(MODE_FILE, blob))])
    assert (
        patch_tree(store, tree, [("a/b", TreeEntry(MODE_FILE, blob)), ("a", TreeEntry(MODE_TREE, b""))])
        == tree
    )
    assert patch_tree(store, tree, [("z/y", None), ("a/c", None)]) == tree
    assert patch_tree(store, tree, [("a", None)]) == EMPTY_TREE
