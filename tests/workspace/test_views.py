"""The read-only view, beyond what the conformance suite says of it."""

import copy
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from treenail.errors import ReadOnlyError, TreenailError
from treenail.workspace import Filesystem, InMemoryFilesystem
from treenail.workspace.views import ReadOnlyFilesystem

READING = {
    "root", "read_only", "host_root", "read", "read_bytes", "exists", "stat", "list", "glob", "grep",
    "open_read", "open_text", "diff", "unfinished", "read_only_view",
}  # fmt: skip


class OnDisk(InMemoryFilesystem):
    """A filesystem that says that a process can work in a directory."""

    @property
    def host_root(self) -> Path | None:
        return Path("/somewhere")


def protocol_members() -> Iterator[str]:
    for name in vars(Filesystem):
        if not name.startswith("_"):
            yield name


@pytest.mark.parametrize("name", sorted(set(protocol_members()) - READING))
def test_whatever_is_not_reading_is_refused(name):
    """An operation of the protocol is known to read, or raises ReadOnlyError: a new one fails here."""
    fs = InMemoryFilesystem({"a": "x"})
    before = fs.snapshot()
    view = fs.read_only_view()
    operation = getattr(view, name)
    needed = [
        before if parameter.name == "snapshot" else "a"
        for parameter in inspect.signature(operation).parameters.values()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    named = {
        parameter.name: True
        for parameter in inspect.signature(operation).parameters.values()
        if parameter.default is inspect.Parameter.empty and parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    with pytest.raises(ReadOnlyError, match="read-only view"):
        operation(*needed, **named)
    assert fs.snapshot().commit_ref == before.commit_ref


def test_it_has_every_operation_of_the_protocol_with_the_same_parameters():
    """The view can stand wherever a filesystem can."""
    for name in protocol_members():
        promised, given = getattr(Filesystem, name), getattr(ReadOnlyFilesystem, name)
        if not isinstance(promised, property):
            assert inspect.signature(given) == inspect.signature(promised), name
    assert isinstance(InMemoryFilesystem().read_only_view(), Filesystem)


def test_nothing_writable_hangs_off_the_view():
    """No attribute of the view, private ones included, is the filesystem or belongs to it."""
    fs = InMemoryFilesystem({"a": "x"})
    view = fs.read_only_view()
    for name in dir(view):
        value = getattr(view, name)
        assert value is not fs, name
        assert getattr(value, "__self__", None) is not fs, name
    with pytest.raises(AttributeError):
        view.symlink
    with pytest.raises(AttributeError):
        view.extra = fs


def test_no_process_is_let_into_the_directory():
    """The filesystem may be on disk; its view does not say where a process could write."""
    assert OnDisk().host_root == Path("/somewhere")
    assert OnDisk().read_only_view().host_root is None


def test_a_view_of_a_view_is_itself():
    """Asking again changes nothing."""
    view = InMemoryFilesystem().read_only_view()
    assert view.read_only_view() is view


def test_a_copy_of_a_view_is_a_view():
    """Copying does not open a way around it."""
    fs = InMemoryFilesystem({"a": "x"})
    duplicate = copy.copy(fs.read_only_view())
    assert duplicate.read("a").content == "x"
    with pytest.raises(ReadOnlyError):
        duplicate.write("a", "y")


def test_streams_from_a_view_do_not_write():
    """What it opens is for reading."""
    fs = InMemoryFilesystem({"a": "x"})
    with fs.read_only_view().open_read("a") as stream:
        assert not stream.writable()
        assert stream.read() == b"x"
    with fs.read_only_view().open_text("a") as text:
        assert text.read() == "x"


def test_the_error_belongs_to_the_tree_of_errors():
    """It is ours, and says what was asked for and what to do."""
    with pytest.raises(TreenailError, match=r"cannot write 'notes/x\.txt'.*use the workspace itself"):
        InMemoryFilesystem().read_only_view().write("notes/x.txt", "y")


def test_it_says_what_it_is():
    """Its representation names the view and what is behind it."""
    assert "read-only view of <InMemoryFilesystem" in repr(InMemoryFilesystem().read_only_view())
