"""Slices: typed, ordered, immutable sequences, and the operations that make a new one of an old.

Theory of operation
-------------------
A slice is a persistent vector: a trie of nodes with 32 children, whose last,
incomplete leaf (the tail) is kept apart. Appending copies the tail, and every
32nd time the path to it, so its cost does not grow with the slice; an older
version of the slice stays as it was. Taking a snapshot of a slice is therefore
keeping a reference to it.

Each entry remembers its **origin**: `seq` if the item *is* the event with that
sequence number, `-seq` if that event's reducer made it, 0 if it has no place in
the log yet. Stored snapshots use it to refer to events instead of copying them.

An item that can change in place is kept as its encoded form (`Kept`) and decoded
anew for each reader, so that no reader can change the session's state, and each
sees exactly what reading the log again would give.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar, overload

from treenail.codec import Codec, is_immutable
from treenail.errors import UsageError

T = TypeVar("T")
S = TypeVar("S")

_BITS = 5
_WIDTH = 1 << _BITS
_MASK = _WIDTH - 1


class Kept:
    """An item that could change in place, in a form that cannot."""

    __slots__ = ("cls", "codec", "payload")

    def __init__(self, codec: Codec, cls: type, payload: bytes) -> None:
        self.codec = codec
        self.cls = cls
        self.payload = payload

    def value(self) -> Any:
        """Make the item anew."""
        return self.codec.decode(self.cls, self.payload)


def sealed(codec: Codec, item: Any, payload: bytes) -> Any:
    """Return what a slice keeps of an item that encoded to `payload`."""
    return item if is_immutable(item) else Kept(codec, type(item), payload)


def opened(kept: Any) -> Any:
    """Return the item that a slice keeps: itself, or made anew."""
    return kept.value() if type(kept) is Kept else kept


Entry = tuple[Any, int]
"""What a slice keeps of an item, and the item's origin."""


class Slice(Sequence[T]):
    """One version of a slice. It never changes; `append` and its like return another one."""

    __slots__ = ("_all", "_count", "_index", "_root", "_shift", "_tail", "_volatile")

    _count: int
    _shift: int
    _root: tuple[Any, ...]
    _tail: tuple[Entry, ...]
    _all: tuple[T, ...] | None
    _index: dict[Callable[[T], object], tuple[dict[object, int], int]] | None
    _volatile: bool
    """Whether any item is `Kept`."""

    def __init__(self) -> None:
        self._count = 0
        self._shift = _BITS
        self._root = ()
        self._tail = ()
        self._all = None
        self._index = None
        self._volatile = False

    # .. reading ..

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        return iter(self.all())

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            if self._volatile:
                return tuple(self[position] for position in range(*index.indices(self._count)))
            return self.all()[index]
        item: T = opened(self._entry(index)[0])
        return item

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Slice):
            return self.all() == other.all()
        if isinstance(other, (tuple, list)):
            return self.all() == tuple(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # items may be unhashable

    def __add__(self, other: Iterable[T]) -> tuple[T, ...]:
        return self.all() + tuple(other)

    def __radd__(self, other: Iterable[T]) -> tuple[T, ...]:
        return tuple(other) + self.all()

    def __repr__(self) -> str:
        return f"Slice({list(self.all())!r})"

    def all(self) -> tuple[T, ...]:
        """Return every item, in order."""
        if self._volatile:
            return tuple([opened(kept) for kept, _ in entries_of(self)])
        if self._all is None:
            self._all = tuple([item for item, _ in entries_of(self)])
        return self._all

    def latest(self) -> T | None:
        """Return the last item, or None."""
        if not self._tail:
            return None
        kept: Any = self._tail[-1][0]
        item: T = kept.value() if type(kept) is Kept else kept
        return item

    def where(self, predicate: Callable[[T], bool]) -> tuple[T, ...]:
        """Return the items for which the predicate holds."""
        return tuple(item for item in self.all() if predicate(item))

    def find(self, key: Callable[[T], object], wanted: object) -> int | None:
        """Return the position of the last item with that key, or None; O(1) on a slice that only grows.

        Keys must be hashable. `key` must be one and the same function at each call.
        """
        index = self._index
        if index is None:
            index = self._index = {}
        known, upto = index.get(key, ({}, 0))
        if upto < self._count:
            for position in range(upto, self._count):
                known[key(opened(self._entry(position)[0]))] = position
            index[key] = (known, self._count)
        position = known.get(wanted, -1)
        if position < 0:
            return None
        # Versions that grew apart share the dictionary: believe it only where it is true here.
        if position < self._count and key(self[position]) == wanted:
            return position
        for other in range(self._count - 1, -1, -1):
            if key(self[other]) == wanted:
                return other
        return None

    def _entry(self, index: int) -> Entry:
        if index < 0:
            index += self._count
        if not 0 <= index < self._count:
            raise IndexError(f"position {index} of a slice with {self._count} items")
        tail_start = self._count - len(self._tail)
        if index >= tail_start:
            return self._tail[index - tail_start]
        node: Any = self._root
        for level in range(self._shift, 0, -_BITS):
            node = node[(index >> level) & _MASK]
        return node[index & _MASK]  # type: ignore[no-any-return]  # a leaf holds entries

    # .. making another one ..

    def append(self, item: T | Kept, origin: int = 0) -> Slice[T]:
        """Return a slice with one more item at its end."""
        new: Slice[T] = Slice.__new__(Slice)
        new._count = self._count + 1
        new._all = None
        new._index = dict(self._index) if self._index else None
        new._volatile = self._volatile or type(item) is Kept
        tail = self._tail
        if len(tail) < _WIDTH:
            new._root, new._shift = self._root, self._shift
            new._tail = tail + ((item, origin),)  # noqa: RUF005  # unpacking takes three times as long
            return new
        new._tail = ((item, origin),)
        if (self._count >> _BITS) > (1 << self._shift):
            new._root = (self._root, _new_path(self._shift, tail))
            new._shift = self._shift + _BITS
        else:
            new._root = _push(self._count - 1, self._shift, self._root, tail)
            new._shift = self._shift
        return new

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Slice[Any]:
        """Build a slice of what is kept of its items, with their origins."""
        everything = list(entries)
        count = len(everything)
        tail_length = count % _WIDTH or min(count, _WIDTH)
        nodes: list[tuple[Any, ...]] = [
            tuple(everything[start : start + _WIDTH]) for start in range(0, count - tail_length, _WIDTH)
        ]
        new: Slice[Any] = Slice.__new__(Slice)
        new._count = count
        new._tail = tuple(everything[count - tail_length :])
        new._all = None
        new._index = None
        new._volatile = any(type(kept) is Kept for kept, _ in everything)
        shift = _BITS
        while len(nodes) > _WIDTH:
            nodes = [tuple(nodes[start : start + _WIDTH]) for start in range(0, len(nodes), _WIDTH)]
            shift += _BITS
        new._root = tuple(nodes)
        new._shift = shift
        return new


def entries_of(slice_: Slice[Any]) -> Iterator[Entry]:
    """Iterate over what a slice keeps, with the origins: for folding and storing, not for reading."""
    entries: Iterable[Any] = slice_._root
    for _ in range(0, slice_._shift, _BITS):
        entries = chain.from_iterable(entries)
    return chain(entries, slice_._tail)


def entry_at(slice_: Slice[Any], index: int) -> Entry:
    """Return one entry of a slice with its origin, without walking the others."""
    return slice_._entry(index)


def _new_path(shift: int, leaf: tuple[Any, ...]) -> tuple[Any, ...]:
    return leaf if shift == 0 else (_new_path(shift - _BITS, leaf),)


def _push(index: int, shift: int, node: tuple[Any, ...], leaf: tuple[Any, ...]) -> tuple[Any, ...]:
    position = (index >> shift) & _MASK
    if shift == _BITS:
        return (*node, leaf)
    if position < len(node):
        child = _push(index, shift - _BITS, node[position], leaf)
        return (*node[:position], child)
    return (*node, _new_path(shift - _BITS, leaf))


EMPTY: Slice[Any] = Slice()
"""The slice without items."""


# --- operations ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Append(Generic[T]):
    """Add one item at the end."""

    item: T


@dataclass(frozen=True, slots=True)
class Extend(Generic[T]):
    """Add several items at the end."""

    items: tuple[T, ...]

    def __init__(self, items: Iterable[T]) -> None:
        object.__setattr__(self, "items", tuple(items))


@dataclass(frozen=True, slots=True)
class Replace(Generic[T]):
    """Put these items in place of all."""

    items: tuple[T, ...]

    def __init__(self, items: Iterable[T]) -> None:
        object.__setattr__(self, "items", tuple(items))


@dataclass(frozen=True, slots=True)
class Clear(Generic[T]):
    """Remove the items for which the predicate holds, or all."""

    predicate: Callable[[T], bool] | None = None


SliceOp = Append[T] | Extend[T] | Replace[T] | Clear[T]
"""What a reducer returns: how its slice changes."""


class ReducerContext(Protocol):
    """What a reducer may read besides its slice and its event."""

    @property
    def session(self) -> Any:
        """A read-only view of the session."""
        ...


class Reducer(Protocol):
    """A pure function: a slice and an event in, one operation (or the new items) out."""

    def __call__(self, slice_: Any, event: Any, /, *, context: Any) -> Any:
        """Say what the event does to the slice."""
        ...


def append_all(slice_: Slice[T], event: T, *, context: ReducerContext | None = None) -> Append[T]:
    """Keep every event."""
    return Append(event)


def replace_latest(slice_: Slice[T], event: T, *, context: ReducerContext | None = None) -> Replace[T]:
    """Keep only the newest event."""
    return Replace((event,))


def upsert_by(key: Callable[[T], object]) -> Callable[..., SliceOp[T]]:
    """Make a reducer that keeps one item per key, each in its first place. O(n) on a replacement."""

    def reduce(slice_: Slice[T], event: T, *, context: ReducerContext | None = None) -> SliceOp[T]:
        wanted = key(event)
        items = slice_.all()
        if all(key(item) != wanted for item in items):
            return Append(event)
        return Replace(event if key(item) == wanted else item for item in items)

    return reduce


def replace_latest_by(key: Callable[[T], object]) -> Callable[..., SliceOp[T]]:
    """Make a reducer that keeps one item per key, the newest last. O(n) on a replacement."""

    def reduce(slice_: Slice[T], event: T, *, context: ReducerContext | None = None) -> SliceOp[T]:
        wanted = key(event)
        items = slice_.all()
        if all(key(item) != wanted for item in items):
            return Append(event)
        return Replace((*(item for item in items if key(item) != wanted), event))

    return reduce


# --- declarative slices ----------------------------------------------------------------------------

_REDUCES = "__treenail_reduces__"


def reducer(*, on: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a method of a frozen dataclass as the reducer for an event type.

    The method receives the slice's latest value as `self`, and the event; it returns an operation,
    or the new value in place of the old.
    """

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        setattr(method, _REDUCES, on)
        return method

    return mark


def declared_reducers(cls: type) -> Mapping[type, Callable[..., Any]]:
    """Return the methods of a class that were marked with `reducer`, by event type."""
    return _declared(cls)


@functools.lru_cache
def _declared(cls: type) -> Mapping[type, Callable[..., Any]]:
    found: dict[type, Callable[..., Any]] = {}
    for name in dir(cls):
        method = getattr(cls, name, None)
        event_type = getattr(method, _REDUCES, None)
        if event_type is None or not callable(method):
            continue
        if event_type in found:
            raise UsageError(
                f"{cls.__qualname__} has two reducers for {event_type.__qualname__}: "
                f"{found[event_type].__name__} and {name}; keep one"
            )
        found[event_type] = method
    return found
