"""Views: they read a session and cannot change it.

A view holds functions that read, and nothing that leads to the session. Slices never
change, and items that could change in place are decoded anew for each reader
(see `slices`), so that nothing that a reader does with them changes the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, NoReturn, Protocol, TypeVar
from uuid import UUID

from treenail.clock import Clock
from treenail.errors import ReadOnlyError, UsageError
from treenail.state.events import as_read
from treenail.state.slices import Slice
from treenail.state.snapshot import Snapshot

T = TypeVar("T")

_CHANGES_SLICE = frozenset({"append", "clear", "dispatch", "register", "seed"})
_CHANGES_SESSION = frozenset(
    {
        "begin",
        "broadcast",
        "clone",
        "close",
        "dispatch",
        "dispatch_all",
        "drop_caches",
        "fork",
        "install",
        "mutate",
        "note",
        "observe",
        "prune",
        "reset",
        "restore",
        "rollback",
        "transaction",
    }
)


_NO_TAGS: Mapping[str, str] = MappingProxyType({})


class SliceReader(Generic[T]):
    """Read access to one slice: what `view[T]` returns."""

    __slots__ = ("_read", "_slice_type")

    def __init__(self, read: Callable[[], Slice[T]], slice_type: type[T]) -> None:
        self._read = read
        self._slice_type = slice_type

    def all(self) -> tuple[T, ...]:
        """Return every item, in order."""
        return as_read(self._slice_type, self._read().all())

    def latest(self) -> T | None:
        """Return the last item, or None."""
        return self._read().latest()

    def where(self, predicate: Callable[[T], bool]) -> tuple[T, ...]:
        """Return the items for which the predicate holds."""
        return tuple(item for item in self.all() if predicate(item))

    def view(self) -> Slice[T]:
        """Return the slice as it is stored now; it will not change."""
        return self._read()

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Iterator[T]:
        return iter(self.all())

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name in _CHANGES_SLICE:
            _refuse(name)
        raise AttributeError(f"a view of a slice has no {name!r}")


class SessionView:
    """A session that can be read and not changed."""

    __slots__ = ("_read", "_snapshot", "adopt", "clock", "session_id", "spawn", "tags")

    session_id: UUID | None
    tags: Mapping[str, str]
    clock: Clock | None

    def __init__(
        self,
        read: Callable[[type], Slice[Any]],
        *,
        session_id: UUID | None = None,
        tags: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        snapshot: Callable[..., Snapshot] | None = None,
        adopt: Callable[[Any], None] | None = None,
        spawn: Callable[..., Any] | None = None,
    ) -> None:
        put = object.__setattr__
        put(self, "_read", read)
        put(self, "_snapshot", snapshot)
        put(self, "adopt", adopt)
        put(self, "spawn", spawn)
        put(self, "session_id", session_id)
        put(self, "tags", MappingProxyType(dict(tags)) if tags else _NO_TAGS)
        put(self, "clock", clock)

    def __getitem__(self, slice_type: type[T]) -> SliceReader[T]:
        read = self._read
        return SliceReader(lambda: read(slice_type), slice_type)

    def select_all(self, slice_type: type[T]) -> tuple[T, ...]:
        """Return every item of a slice."""
        return self[slice_type].all()

    def query(self, slice_type: type[T]) -> SliceReader[T]:
        """Return read access to a slice; the older spelling of `view[T]`."""
        return self[slice_type]

    def snapshot(self, *, include_all: bool = False) -> Snapshot:
        """Capture what the session holds, as `Session.snapshot` does."""
        if self._snapshot is None:
            raise UsageError("a reducer's view has no snapshots; read the slices that it needs")
        taken: Snapshot = self._snapshot(include_all=include_all)
        return taken

    def read_only_view(self) -> SessionView:
        """Return itself: it is read-only already."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name in _CHANGES_SESSION:
            _refuse(name)
        raise AttributeError(f"a view of a session has no {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        _refuse(f"setting {name}")

    def __delattr__(self, name: str) -> None:
        _refuse(f"deleting {name}")


def _refuse(what: str) -> NoReturn:
    raise ReadOnlyError(f"this view of a session is read-only: {what} is refused; nothing was changed")


class SessionProtocol(Protocol):
    """What readers need of a session: a `Session` and a `SessionView` both have it."""

    def __getitem__(self, slice_type: type[T]) -> SliceReader[T]:
        """Return access to a slice."""
        ...

    def select_all(self, slice_type: type[T]) -> tuple[T, ...]:
        """Return every item of a slice."""
        ...
