"""Reducers: how they are registered and called, and how a slice takes what they return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from treenail.codec import Codec
from treenail.state.slices import (
    EMPTY,
    Append,
    Clear,
    Entry,
    Extend,
    Kept,
    Replace,
    Slice,
    entries_of,
    opened,
    sealed,
)


@dataclass(frozen=True, slots=True)
class Registration:
    """A reducer that listens to an event type on behalf of a slice."""

    slice_type: type
    reducer: Callable[..., Any]
    takes_context: bool


class Made(NamedTuple):
    """Applies what a reducer returned to its slice."""

    codec: Codec
    slice_type: type
    given: object
    """The event, as the reducer got it."""
    payload: bytes
    seq: int
    immutable: bool

    def of(self, before: Slice[Any], outcome: object) -> Slice[Any]:
        """Return what the slice becomes."""
        if isinstance(outcome, Append):
            return before.append(*self._entry(outcome.item))
        if isinstance(outcome, Extend):
            after = before
            for item in outcome.items:
                after = after.append(*self._entry(item))
            return after
        if isinstance(outcome, Clear):
            if outcome.predicate is None:
                return EMPTY
            predicate = outcome.predicate
            left = [entry for entry in entries_of(before) if not predicate(opened(entry[0]))]
            return Slice.of(left) if len(left) != len(before) else before
        if outcome is before:
            return before
        if isinstance(outcome, (Slice, tuple, list)):
            return Slice.of(self._replacing(before, outcome))
        if isinstance(outcome, Replace):
            return Slice.of(self._replacing(before, outcome.items))
        raise TypeError(
            f"a reducer of {self.slice_type.__qualname__} returned {type(outcome).__qualname__}; "
            "return Append, Extend, Replace, Clear, or the new items as a tuple"
        )

    def _replacing(self, before: Slice[Any], items: Iterable[Any]) -> list[Entry]:
        """Keep the origins of the items that were there already."""
        same: dict[int, Entry] = {}
        equal: dict[tuple[type, bytes], Entry] = {}
        for entry in entries_of(before):
            kept = entry[0]
            if type(kept) is Kept:
                equal[kept.cls, kept.payload] = entry
            else:
                same[id(kept)] = entry
        made = []
        for item in items:
            entry = same.get(id(item)) or self._entry(item)
            if type(entry[0]) is Kept:
                entry = equal.get((entry[0].cls, entry[0].payload), entry)
            made.append(entry)
        return made

    def _entry(self, item: Any) -> Entry:
        if not isinstance(item, self.slice_type):
            raise TypeError(
                f"a {type(item).__qualname__} cannot stand in the slice of {self.slice_type.__qualname__}"
            )
        if item is self.given and self.immutable:
            return item, self.seq
        payload = self.codec.encode(item)
        # A reducer may have changed the event that it was given: then the item is its own making.
        is_event = item is self.given and payload == self.payload
        return sealed(self.codec, item, payload), self.seq if is_event else -self.seq


class DeclaredReducer:
    """A method marked with `@reducer`, as a reducer of its slice."""

    def __init__(
        self, slice_type: type, method: Callable[..., Any], initial: Callable[[], Any] | None
    ) -> None:
        self.slice_type = slice_type
        self.method = method
        self.initial = initial
        self._takes_context = takes_context(method)
        self.__qualname__ = getattr(method, "__qualname__", None) or repr(method)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DeclaredReducer)
            and other.method is self.method
            and other.slice_type is self.slice_type
        )

    def __hash__(self) -> int:
        return hash((self.slice_type, self.method))

    def __call__(self, slice_: Slice[Any], event: Any, *, context: Any) -> Any:
        """Let the method make a new value of the latest one, or of the initial one."""
        current = slice_.latest()
        if current is None:
            if self.initial is None:
                return slice_
            current = self.initial()
        arguments = {"context": context} if self._takes_context else {}
        made = self.method(current, event, **arguments)
        return Replace((made,)) if isinstance(made, self.slice_type) else made


def reducer_name(reducer: Callable[..., Any]) -> str:
    """Return the name by which a stored state knows a reducer: its module and qualified name."""
    name = getattr(reducer, "__qualname__", None) or type(reducer).__qualname__
    return f"{getattr(reducer, '__module__', None) or type(reducer).__module__}:{name}"


def takes_context(function: Callable[..., Any]) -> bool:
    """Say whether a reducer takes the context."""
    if isinstance(function, DeclaredReducer):
        return True
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(each.name == "context" or each.kind is each.VAR_KEYWORD for each in parameters)
