"""Which types stored data may name."""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, TypeVar

from treenail.errors import UnknownTypeError, UsageError

T = TypeVar("T")


class TypeRegistry:
    """Types by their stable names: `module:qualname`, unless a type is registered with another."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._by_name: dict[str, type] = {}
        self._names: dict[type, str] = {}
        self._given: set[str] = set()

    def register(self, cls: type[T], *, name: str | None = None, aliases: Iterable[str] = ()) -> type[T]:
        """Make a type loadable under a stable name; aliases are read but not written.

        Registering the same type again changes nothing. A derived name belongs to the newest type
        that bears it (a reloaded module); a given name or alias belongs to one type only.
        """
        given = (*((name,) if name else ()), *aliases)
        with self._lock:
            known = self._names.get(cls)
            if known is not None and not given:
                return cls
            chosen = name or known or _derived_name(cls)
            for each in (chosen, *given):
                holder = self._by_name.get(each, cls)
                is_reloaded = _derived_name(holder) == _derived_name(cls)
                if holder is not cls and not is_reloaded and (each in self._given or each in given):
                    raise UsageError(
                        f"the type name {each!r} already belongs to {_derived_name(holder)}; "
                        f"register {_derived_name(cls)} under another"
                    )
            for each in (chosen, *given):
                self._by_name[each] = cls
            self._names[cls] = chosen
            self._given.update(given)
        return cls

    def name_of(self, cls: type) -> str:
        """Return the stable name of a type, registering it if it is new."""
        if cls not in self._names:
            self.register(cls)
        return self._names[cls]

    def resolve(self, name: str) -> type:
        """Return the type of that name. Raises `UnknownTypeError`; never imports anything."""
        cls = self._by_name.get(name)
        if cls is None:
            raise UnknownTypeError(name)
        return cls

    def knows(self, name: str) -> bool:
        """Say whether a stored type name can be resolved here."""
        return name in self._by_name

    def types(self) -> tuple[type, ...]:
        """Return every registered type, oldest first."""
        with self._lock:
            return tuple(self._names)


def _derived_name(cls: type) -> str:
    generic = getattr(cls, "__pydantic_generic_metadata__", None)
    if generic and generic["origin"] and generic["args"]:
        # The class that pydantic makes for Box[Item] names Item without its module.
        inner = ", ".join(
            _derived_name(each) if isinstance(each, type) else repr(each) for each in generic["args"]
        )
        return f"{_derived_name(generic['origin'])}[{inner}]"
    return f"{cls.__module__}:{cls.__qualname__}"


# --- kinds of classes ------------------------------------------------------------------------------


def is_model(kind: type) -> bool:
    """Say whether a class is a pydantic model, without importing pydantic for it."""
    # Pydantic's dataclasses have the fields and the validator too, but are not models.
    return hasattr(kind, "__pydantic_root_model__") and hasattr(kind, "__pydantic_fields__")


def is_record(cls: object) -> bool:
    """Say whether a class has declared fields: a dataclass or a pydantic model."""
    return (
        isinstance(cls, type)
        and (dataclasses.is_dataclass(cls) or is_model(cls))
        and not issubclass(cls, Enum)
    )


def reader_of(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads these attributes of an object, all at once."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def is_named_tuple(cls: type) -> bool:
    """Say whether a class is a named tuple."""
    names = getattr(cls, "_fields", None)
    return issubclass(cls, tuple) and type(names) is tuple and all(type(each) is str for each in names)


type_registry = TypeRegistry()
"""The registry that sessions use unless they are given another."""


def register_type(cls: type[T], *, name: str | None = None, aliases: Iterable[str] = ()) -> type[T]:
    """Make a type loadable from stored data, under its own or a given stable name."""
    return type_registry.register(cls, name=name, aliases=aliases)
