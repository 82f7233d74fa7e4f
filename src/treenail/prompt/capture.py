"""Classes that remember what they were subscripted with.

`typing` tells an object its type argument only after its constructor has run, and a
frozen object never. A prompt has to know its output type, and a section its parameters,
while they are being built: that is when mistakes are found. So `Class[Argument]` is here
a subclass of `Class` that holds the argument, the same one each time it is written. It
works as a type, as a base class, with `isinstance` and in unions, and a subclass inherits
what was captured.
"""

from __future__ import annotations

import types
import typing
from typing import Any, ClassVar, TypeVar

_made: dict[tuple[type, Any], type] = {}


class Captures:
    """A base for generic classes with one type parameter: `Class[Argument]` keeps `Argument`."""

    captured: ClassVar[Any] = None
    """What the class was subscripted with; None if it was not."""

    def __class_getitem__(cls, item: Any) -> Any:
        """Return the subclass for this argument; for a type variable, what `typing` returns."""
        alias = super().__class_getitem__(item)  # type: ignore[misc]  # typing.Generic provides and checks it
        argument = item[0] if isinstance(item, tuple) else item
        if isinstance(argument, TypeVar):
            return alias
        found = _made.get((cls, argument))
        if found is None:
            label = f"{cls.__qualname__}[{name_of(argument)}]"

            def fill(namespace: dict[str, Any]) -> None:
                namespace.update(
                    __module__=cls.__module__, __qualname__=label, __doc__=cls.__doc__, captured=argument
                )

            made = types.new_class(label, (cls,), {}, fill)
            # Two threads may get here at once; the first one's class is everybody's.
            found = _made.setdefault((cls, argument), made)
        return found


def name_of(kind: Any) -> str:
    """Return the name of a type as a person would write it."""
    origin = typing.get_origin(kind)
    if origin is not None:
        return f"{name_of(origin)}[{', '.join(map(name_of, typing.get_args(kind)))}]"
    name = getattr(kind, "__qualname__", None) or repr(kind)
    return str(name).rpartition("<locals>.")[2]
