"""Reading a session without being able to change it.

A view holds a function that reads a slice, and nothing that leads to the session.
Slices never change, and items that could change in place are handed out as copies
(see `slices`), so that whatever a reader does with what it got, the session stays
as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar
from uuid import UUID

from holdfast.errors import ReadOnlyError
from holdfast.state.slices import Slice

T = TypeVar("T")


class SliceReader(Generic[T]):
    """Read access to one slice: what `view[T]` returns."""

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], Slice[T]]) -> None:
        self._read = read

    def all(self) -> tuple[T, ...]:
        """Return every item, in order."""
        return self._read().all()

    def latest(self) -> T | None:
        """Return the last item, or None."""
        return self._read().latest()

    def where(self, predicate: Callable[[T], bool]) -> tuple[T, ...]:
        """Return the items for which the predicate holds."""
        return self._read().where(predicate)

    def view(self) -> Slice[T]:
        """Return the slice as it is now; it will not change."""
        return self._read()

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Iterator[T]:
        return iter(self._read())

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name in ("seed", "append", "clear", "register", "dispatch"):
            raise ReadOnlyError(f"this view of a session is read-only: {name} is refused")
        raise AttributeError(name)


class SessionView:
    """A session that can be read and not changed.

    It holds a function that reads a slice, and nothing that leads to the session.
    """

    __slots__ = ("_read", "session_id", "tags")

    def __init__(
        self,
        read: Callable[[type], Slice[Any]],
        *,
        session_id: UUID | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._read = read
        self.session_id = session_id
        self.tags = MappingProxyType(dict(tags or {}))

    def __getitem__(self, slice_type: type[T]) -> SliceReader[T]:
        read = self._read
        return SliceReader(lambda: read(slice_type))

    def select_all(self, slice_type: type[T]) -> tuple[T, ...]:
        """Return every item of a slice."""
        return self[slice_type].all()

    def query(self, slice_type: type[T]) -> SliceReader[T]:
        """Return read access to a slice; the older spelling of `view[T]`."""
        return self[slice_type]

    def read_only_view(self) -> SessionView:
        """Return itself: it is read-only already."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name in _CHANGING:
            raise ReadOnlyError(f"this view of a session is read-only: {name} is refused")
        raise AttributeError(name)


_CHANGING = frozenset(
    {
        "broadcast",
        "clear",
        "clone",
        "dispatch",
        "dispatch_all",
        "drop_caches",
        "install",
        "mutate",
        "begin",
        "prune",
        "restore",
        "rollback",
        "reset",
        "seed",
    }
)


class SessionProtocol(Protocol):
    """What readers need of a session: a `Session` and a `SessionView` both have it."""

    def __getitem__(self, slice_type: type[T]) -> SliceReader[T]:
        """Return access to a slice."""
        ...

    def select_all(self, slice_type: type[T]) -> tuple[T, ...]:
        """Return every item of a slice."""
        ...
