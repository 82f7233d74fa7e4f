"""The codec: values to JSON and back."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from treenail.codec.annotations import AnnotationCoder
from treenail.codec.base import Coder, Decode, Encode, Json, name_of
from treenail.codec.records import Record, generic_of
from treenail.codec.registry import TypeRegistry, is_record, type_registry
from treenail.codec.text import TOO_DEEP, parse_json, print_json
from treenail.codec.values import ValueCoder
from treenail.errors import CodecError, DecodeError, EncodeError, UnknownTypeError, UsageError

T = TypeVar("T")


class Codec:
    """Encodes and decodes values whose types stand in one registry."""

    def __init__(self, registry: TypeRegistry) -> None:
        self.registry = registry
        self._records: dict[Any, Record] = {}
        self._values = ValueCoder(registry, self.record)
        self._annotations = AnnotationCoder(registry, self._values, self._record_coder)

    # .. records: the type's name travels beside the payload ..

    def encode(self, value: object) -> bytes:
        """Encode a dataclass or pydantic model. Raises `EncodeError` with the path to the field."""
        cls = type(value)
        record = self._records.get(cls)
        if record is None:
            if not is_record(cls):
                raise EncodeError(
                    f"{cls.__qualname__} is not a dataclass or a pydantic model; wrap the value in one",
                    path=cls.__qualname__,
                )
            record = self.record(cls)
        return _encode(record.encode_fields, value)

    def decode(self, cls: type[T], payload: bytes | str) -> T:
        """Decode what `encode` made of a value of that very class. Raises `DecodeError`."""
        return self.record_from_data(cls, parse_json(payload))

    def record_to_data(self, value: object) -> Json:
        """Turn a record into the plain JSON object of its fields, without its name."""
        return parse_json(self.encode(value))

    def record_from_data(self, cls: type[T], data: Json) -> T:
        """Turn such an object back into a record of that class. Raises `DecodeError`."""
        if cls not in self._records and not is_record(generic_of(cls)[0]):
            raise DecodeError("it is not a dataclass or a pydantic model", path=name_of(cls))
        return cast(T, _decode(self.record(cls).decode_fields, data, name_of(cls)))

    # .. any values: the stored form names their types ..

    def to_data(self, value: object) -> Json:
        """Turn any supported value into JSON data that names its types."""
        return parse_json(_encode(self._values.encode, value))

    def from_data(self, data: Json, *, root: str = "value") -> object:
        """Turn such data back into the value it stands for. Raises `DecodeError`."""
        return _decode(self._values.decode, data, root)

    # .. coders ..

    def record(self, cls: Any) -> Record:
        """Return the coder of a dataclass or model, or of a generic one with its parameters."""
        found = self._records.get(cls)
        if found is None:
            origin, parameters = generic_of(cls)
            if not is_record(origin):
                raise UsageError(f"{name_of(cls)} is not a dataclass or a pydantic model")
            self.registry.name_of(origin)
            found = self._records.setdefault(cls, Record(self._values, self._annotations, origin, parameters))
        return found

    def _record_coder(self, annotation: Any, plain: type) -> Coder:
        try:
            record = self.record(annotation)
        except TypeError:  # Parameters that cannot be hashed; without them its fields go by value.
            record = self.record(plain)
        return Coder(record.encode, record.decode)


def _encode(encode: Encode, value: object) -> bytes:
    try:
        return print_json(encode(value))
    except CodecError as error:
        raise EncodeError(error.reason, path=name_of(type(value)) + error.path) from None
    except RecursionError:
        raise EncodeError(TOO_DEEP, path=name_of(type(value))) from None


def _decode(decode: Decode, data: Json, root: str) -> object:
    try:
        return decode(data)
    except UnknownTypeError as error:
        raise UnknownTypeError(error.type_name, path=root + error.path) from None
    except CodecError as error:
        raise DecodeError(error.reason, path=root + error.path) from None
    except RecursionError:
        raise DecodeError("nested too deeply", path=root) from None


codec = Codec(type_registry)
"""The codec on the shared registry."""
