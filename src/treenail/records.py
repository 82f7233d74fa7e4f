"""Dataclasses that cost little: to define, and to make.

**To define.** `@dataclasses.dataclass` writes the source of up to six methods and compiles each on
the spot. That is nine tenths of its time, it is spent while modules are imported, and most of what
it writes is never called: a command that lists runs compares no two messages. The `dataclass` of
this module leaves the methods *unwritten*. What stands in the class is a descriptor; whoever first
asks for the method, be it the interpreter that makes an object or `inspect`, has it written, and
from then on it stands there itself. So nothing differs but the time of writing: neither a
signature, nor a value, nor the speed of a call.

**To make.** The `__init__` of a frozen dataclass sets each field through `object.__setattr__`,
because the class itself refuses: for a record of ten fields that is more than half of the time it
takes to make one. A turn makes dozens of records for each tool call. `quick` has another
`__init__` written. A *twin* of the class, with the same slots and nothing else, does allow its
fields to be set. The new object is made the twin's for as long as its fields are set, and then its
own class's for good. Nobody else has the object before that, so nobody sees it change; afterwards
it is as frozen as any other.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, FrozenInstanceError, fields
from functools import partial
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

__all__ = ["dataclass", "is_model", "quick"]

T = TypeVar("T")

_set_class: Any = object.__dict__["__class__"].__set__
"""Sets an object's class, also where that class refuses to have anything set."""


class _LeftOut:
    """Stands for an argument whose default is made anew each time."""

    def __repr__(self) -> str:
        return "<factory>"


_LEFT_OUT = _LeftOut()


if TYPE_CHECKING:
    # What it makes is what a type checker knows: only the time at which methods are written differs.
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, **options):
        """Make a class a dataclass, as `dataclasses.dataclass` does, but write its methods when first used.

        It takes the same options. What is rare is left to the standard library: a class below
        another dataclass, one without a docstring, one with an `InitVar`, and any option but
        `frozen`, `slots`, `kw_only` and `eq`.
        """
        if cls is None:
            return partial(dataclass, **options)
        if (
            options.keys() - {"frozen", "slots", "kw_only", "eq"}
            or any(hasattr(base, "__dataclass_fields__") for base in cls.__bases__)
            or not cls.__doc__
            or any("InitVar" in str(each) for each in cls.__annotations__.values())
        ):
            return dataclasses.dataclass(**options)(cls)
        return _defined(cls, **options)


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
    described.__init__ = _Unwritten(cls, "__init__", partial(_quick_init, usual=cls.__dict__["__init__"]))
    return cls


def is_model(kind: type) -> bool:
    """Say whether a class is a pydantic model, without importing pydantic for it."""
    # Pydantic's dataclasses have the fields and the validator too, but are not models.
    return hasattr(kind, "__pydantic_root_model__") and hasattr(kind, "__pydantic_fields__")


class _Unwritten:
    """Stands in a class for a method, until somebody asks for it."""

    __slots__ = ("_cls", "_name", "_write", "_written")

    def __init__(self, cls: type, name: str, write: Callable[[Any], Any]) -> None:
        self._cls = cls
        self._name = name
        self._write = write
        self._written: Any = None

    def __get__(self, one: object, cls: type | None = None) -> Any:
        # Kept here as well: where `quick` has its own, this one is asked for every object of a subclass.
        written = self._written = self._written or self._write(self._cls)
        if self._cls.__dict__[self._name] is self:  # not if another thread was first, or `quick` has its own
            setattr(self._cls, self._name, written)
        return written.__get__(one, cls)


def _defined(cls: type, *, frozen: bool = False, eq: bool = True, **shape: bool) -> type:
    """Have the standard library find the fields and make the slots, and add the methods."""
    own = cls.__dict__
    refused = own.keys() & {"__setattr__", "__delattr__"} if frozen else ()
    if refused:
        raise TypeError(
            f"{cls.__qualname__} is frozen and cannot have its own {' or '.join(sorted(refused))}"
        )
    has_own_hash = own.get("__hash__") is not None or ("__hash__" in own and "__eq__" not in own)
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, **shape)(cls)
    described = made.__dataclass_params__
    described.init, described.repr, described.eq, described.frozen = True, True, eq, frozen
    unwritten = {name: write for name, write in _WRITERS.items() if name not in own}
    if not eq:
        unwritten.pop("__eq__", None)
    if eq and not has_own_hash:
        if frozen:
            unwritten["__hash__"] = _hash
        else:
            made.__hash__ = None
    for name, write in unwritten.items():
        setattr(made, name, _Unwritten(made, name, write))
    if frozen:
        _freeze(made)
        if shape.get("slots"):
            # Without these a copy would have its fields set one by one, which is refused.
            made.__getstate__ = own.get("__getstate__", _state)
            made.__setstate__ = own.get("__setstate__", _set_state)
    return cast(type, made)


def _freeze(cls: Any) -> None:
    names = frozenset(each.name for each in fields(cls))

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    cls.__setattr__ = __setattr__
    cls.__delattr__ = __delattr__


def _state(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in fields(self)]


def _set_state(self: Any, state: Iterable[Any]) -> None:
    for each, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, each.name, value)


# .. the methods ..


def _init(cls: Any) -> Any:
    if cls.__dataclass_params__.frozen:
        body = [f"_record_set(self, {name!r}, {value})" for name, value in _values(cls).items()]
    else:
        body = [f"self.{name} = {value}" for name, value in _values(cls).items()]
    return _compiled_init(cls, body, {"_record_set": object.__setattr__})


def _quick_init(cls: Any, usual: Any) -> Any:
    shape = {each: cls.__dict__[each] for each in ("__slots__", "__orig_bases__") if each in cls.__dict__}
    twin = type(cls.__name__, cls.__bases__, shape)
    values = _values(cls)
    passed = ", ".join(f"{each.name}={values[each.name]}" for each in fields(cls) if each.init)
    body = [
        "if self.__class__ is not _record_class:",
        f"    return _record_usual.__get__(self)({passed})",
        "_record_set_class(self, _record_twin)",
        *(f"self.{name} = {value}" for name, value in values.items()),
        "self.__class__ = _record_class",
    ]
    names = {
        "_record_class": cls,
        "_record_usual": usual,
        "_record_set_class": _set_class,
        "_record_twin": twin,
    }
    return _compiled_init(cls, body, names)


def _repr(cls: Any) -> Any:
    shown = ", ".join(f"{each.name}={{self.{each.name}!r}}" for each in fields(cls) if each.repr)
    body = [f'return f"{{self.__class__.__qualname__}}({shown})"']
    return recursive_repr()(_compiled(cls, "__repr__", "self", body))


def _eq(cls: Any) -> Any:
    compared = [each.name for each in fields(cls) if each.compare]
    body = [
        "if other.__class__ is self.__class__:",
        f"    return {_tuple('self', compared)} == {_tuple('other', compared)}",
        "return NotImplemented",
    ]
    return _compiled(cls, "__eq__", "self, other", body)


def _hash(cls: Any) -> Any:
    hashed = [each.name for each in fields(cls) if (each.compare if each.hash is None else each.hash)]
    return _compiled(cls, "__hash__", "self", [f"return hash({_tuple('self', hashed)})"])


_WRITERS: Mapping[str, Callable[[Any], Any]] = {"__init__": _init, "__repr__": _repr, "__eq__": _eq}


def _tuple(one: str, names: Iterable[str]) -> str:
    return f"({''.join(f'{one}.{name}, ' for name in names)})"


def _values(cls: Any) -> dict[str, str]:
    """Say what an `__init__` sets each field to. A field that it does not set is not in it."""
    values: dict[str, str] = {}
    for each in fields(cls):
        name, default = each.name, f"_record_default_{each.name}"
        if each.default_factory is not MISSING:
            values[name] = (
                f"{default}() if {name} is _record_left_out else {name}" if each.init else f"{default}()"
            )
        elif each.init:
            values[name] = name
        elif each.default is not MISSING and "__slots__" in cls.__dict__:
            values[name] = default  # Without slots it is an attribute of the class.
    return values


def _compiled_init(cls: Any, body: list[str], names: dict[str, Any]) -> Any:
    """Compile an `__init__` that takes the fields, does what is told, and ends with `__post_init__`."""
    names["_record_left_out"] = _LEFT_OUT
    parameters: list[str] = []
    annotations: dict[str, Any] = {}
    for each in sorted(fields(cls), key=lambda each: bool(each.kw_only)):
        default = f"_record_default_{each.name}"
        parameter = each.name
        if each.default is not MISSING:
            names[default] = each.default
            parameter += f"={default}"
        elif each.default_factory is not MISSING:
            names[default] = each.default_factory
            parameter += "=_record_left_out"
        if each.init:
            if each.kw_only and "*" not in parameters:
                parameters.append("*")
            parameters.append(parameter)
            annotations[each.name] = each.type
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    if clashing := {"self", *names} & annotations.keys():
        raise TypeError(f"a field of {cls.__qualname__} cannot be called {' or '.join(sorted(clashing))}")
    made = _compiled(cls, "__init__", ", ".join(["self", *parameters]), body or ["pass"], names)
    made.__annotations__ = {**annotations, "return": None}
    return made


def _compiled(
    cls: type, name: str, parameters: str, body: Iterable[str], names: Mapping[str, Any] | None = None
) -> Any:
    """Compile a method as if it stood in the class's module, with some names that only it knows."""
    names = names or {}
    lines = "".join(f"        {line}\n" for line in body)
    source = f"def write({', '.join(names)}):\n    def {name}({parameters}):\n{lines}    return {name}\n"
    found: dict[str, Any] = {}
    # The class's own field names, and nothing from outside.
    exec(source, getattr(sys.modules.get(cls.__module__), "__dict__", {}), found)
    made = found["write"](**names)
    made.__qualname__ = f"{cls.__qualname__}.{name}"
    return made
