"""Which values can never change in place, and a mapping that is one of them.

A value that can never change may be handed to every reader. Any other is kept encoded and decoded anew
for each of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from treenail.codec.registry import is_model, is_named_tuple, is_record, reader_of
from treenail.codec.scalars import NATIVE, SCALARS

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A dict that refuses to be changed.

    It equals the dict with the same items; `dict(frozen)` makes one that can be changed. A frozen
    dataclass whose mappings are such, and hold nothing that can change, can be shared by all readers.
    """

    __slots__ = ()

    def __new__(cls, given: Mapping[K, V] | Iterable[tuple[K, V]] = (), /, **named: V) -> Self:
        """Make a mapping like a dict of the same arguments."""
        made = dict.__new__(cls)
        dict.update(made, given, **named)
        return made

    if not TYPE_CHECKING:
        # A dict's own __init__ fills it, and would fill it again.
        __init__ = object.__init__

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a FrozenDict cannot be changed; change a copy of it, which dict() makes")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type, tuple[dict[K, V]]]:
        return type(self), (dict(self),)

    def __repr__(self) -> str:
        return f"FrozenDict({dict(self)!r})"


_NOTHING = ()
_LEAVES = frozenset((*NATIVE, *(each.kind for each in SCALARS.values())))


def is_immutable(value: object) -> bool:
    """Say whether a storable value, and everything in it, can never change in place."""
    kind: Any = type(value)
    if kind in _LEAVES:
        return True
    parts_of = _parts_of(kind)
    if parts_of is None:
        return False
    for each in parts_of(value):
        if type(each) not in _LEAVES and each is not _NOTHING and not is_immutable(each):
            return False
    return True


@functools.lru_cache(maxsize=1024)
def _parts_of(kind: Any) -> Callable[[Any], Iterable[object]] | None:
    """Return a function to the parts of a value that cannot itself change; None for a kind that can."""
    if issubclass(kind, (Enum, type, PurePath)):
        return lambda value: ()
    if kind is tuple or kind is frozenset or is_named_tuple(kind):
        return iter
    if kind is FrozenDict:
        return lambda value: (*value, *value.values())
    if not is_record(kind) or not _is_frozen(kind):
        return None
    if is_model(kind):
        return lambda value: vars(value).values()
    return reader_of([each.name for each in dataclasses.fields(kind)])


def _is_frozen(cls: Any) -> bool:
    """Say whether the fields of a record cannot be assigned, and it has nothing beside them that can."""
    if is_model(cls):
        config = cls.model_config
        return (
            bool(config.get("frozen")) and config.get("extra") != "allow" and not cls.__private_attributes__
        )
    # Only what the decorator made: a plain subclass of a frozen dataclass has attributes of its own.
    return "__dataclass_params__" in vars(cls) and bool(cls.__dataclass_params__.frozen)
