"""Values to JSON and back, and the registry of types that may come back.

Theory of operation
-------------------
A value is encoded along its declared types. Where it is exactly what the annotation
says, its plain JSON form is stored (`UUID` as text, `tuple[int, ...]` as an array, a
dataclass as an object). Where the annotation leaves a choice (`A | B`, `Any`, a base
class), or the value is something else than announced, the stored form names the type
itself: `{"$": "tuple", "v": [...]}`, `{"$": "obj", "t": "app.models:Step", "v": {...}}`.
So the round trip is the identity for everything that is accepted, and what is not
accepted is refused with the path to the offending field before anything has changed.

Decoding resolves type names through a `TypeRegistry` and through nothing else. It never
imports a module and never runs a constructor, a `__post_init__` or a validator: objects
are put together from their fields. A field that is missing takes its default (a default
factory is called); a field that the type no longer has is left out. Anything else that
does not fit is a `DecodeError` with its path.

A type's stable name is `module:qualname` unless it is registered with another. Types are
registered when they are used as a slice, dispatched, or named in a registered type's
fields, and explicitly with `register_type`.

What it is made of: `registry` (names), `scalars` (values without parts), `values` (coding
a value by what it is), `annotations` (coding it by what was announced), `records` (the
fields of dataclasses and models), `text` (JSON itself), `immutability` (what can be shared).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
