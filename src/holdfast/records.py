"""Frozen dataclasses that are made quickly.

The `__init__` that `@dataclass(frozen=True)` writes sets each field through
`object.__setattr__`, because the class itself refuses: for a record of ten fields that is more
than half of the time it takes to make one. A turn makes dozens of records for each tool call.

`quick` writes another `__init__`. A *twin* of the class, with the same slots and nothing else,
does allow its fields to be set. The new object is made the twin's for as long as its fields are
set, and then its own class's for good. Nobody else has the object before that, so nobody sees it
change; afterwards it is as frozen as any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")

_set_class: Any = object.__dict__["__class__"].__set__
"""Sets an object's class, also where that class refuses to have anything set."""

_LEFT_OUT: Any = object()
"""Stands for an argument whose default is made anew each time."""


def quick(cls: type[T]) -> type[T]:
    """Give a dataclass with `frozen=True, slots=True` an `__init__` about as fast as an unfrozen one's.

    It takes the same arguments and ends with `__post_init__`, if there is one. An object of a
    subclass is made in the usual way, unless the subclass is decorated itself.
    """
    described = cast(Any, cls)
    if (
        not described.__dataclass_params__.frozen
        or "__slots__" not in cls.__dict__
        or cls.__bases__ not in ((object,), (Generic,))
    ):
        raise TypeError(
            f"{cls.__qualname__} must be a dataclass with frozen=True, slots=True and no base but Generic"
        )
    own: Mapping[str, Field[Any]] = {each.name: each for each in fields(described)}  # no class variables
    shape = {each: cls.__dict__[each] for each in ("__slots__", "__orig_bases__") if each in cls.__dict__}
    twin = type(cls.__name__, cls.__bases__, shape)
    names: dict[str, Any] = {
        "__builtins__": {},
        "_set_class": _set_class,
        "_left_out": _LEFT_OUT,
        "_class": cls,
        "_twin": twin,
        "_usual": cls.__init__,
    }
    parameters: list[str] = []
    named: list[str] = []
    passed: list[str] = []
    body: list[str] = []
    for name, each in own.items():
        value = name if each.init else f"_default_{name}"
        if each.default is not MISSING:
            names[f"_default_{name}"] = each.default
        elif each.default_factory is not MISSING:
            names[f"_make_{name}"] = each.default_factory
            names[f"_default_{name}"] = _LEFT_OUT
            value = f"_make_{name}() if {name} is _left_out else {name}" if each.init else f"_make_{name}()"
        elif not each.init:
            continue  # Left to `__post_init__`.
        body.append(f"    self.{name} = {value}")
        if not each.init:
            continue
        parameter = f"{name}=_default_{name}" if f"_default_{name}" in names else name
        (named if each.kw_only else parameters).append(parameter)
        passed.append(f"{name}={name}")
    if named:
        parameters += ["*", *named]
    lines = [
        f"def __init__(self, {', '.join(parameters)}):",
        "    if self.__class__ is not _class:",
        f"        return _usual(self, {', '.join(passed)})",
        "    _set_class(self, _twin)",
        *body,
        "    self.__class__ = _class",
    ]
    if hasattr(cls, "__post_init__"):
        lines.append("    self.__post_init__()")
    exec("\n".join(lines), names)  # the class's own field names, nothing from outside
    made = names["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__annotations__ = cls.__init__.__annotations__
    cls.__init__ = made  # type: ignore[method-assign]  # the whole point
    return cls
