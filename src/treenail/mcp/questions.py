"""What a server asks a person in the middle of a call: the fields of a form, or to open an address.

A form of one field is answered in words, one of several by a JSON object. What was answered is checked
against the form before the server gets it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it has no stubs
import mcp_types as wire
from referencing import Registry
from referencing.exceptions import Unresolvable

from treenail.mcp.listing import without_patterns
from treenail.printable import printable_line
from treenail.tools import chosen

MAX_FORM_CHARS = 20_000
"""How long a form may be, as JSON."""

_MAX_MESSAGE = 1_000
_DONE = "I have done it"
_YES_NO = ("yes", "no")


@dataclass(frozen=True, slots=True)
class ServerQuestion:
    """One question. Raises `ValueError` where it or an answer to it cannot be used."""

    server: str
    message: str
    form: Mapping[str, Any] | None = None
    """The JSON schema of the answer; None if the person is to open an address."""
    url: str = ""

    @classmethod
    def of(cls, server: str, params: wire.ElicitRequestParams) -> ServerQuestion:
        """Read a server's request."""
        if isinstance(params, wire.ElicitRequestURLParams):
            return cls(server, params.message, url=params.url)
        return cls(server, params.message, _checked(params.requested_schema))

    @property
    def key(self) -> str:
        """What holds of this question are found by; `ToolHeld` reads its beginning."""
        asked = self.url if self.form is None else json.dumps(self.form, sort_keys=True)
        digest = hashlib.sha256(f"{self.message}\0{asked}".encode()).hexdigest()[:16]
        return f"mcp:{'address' if self.form is None else 'form'}:{digest}"

    @property
    def text(self) -> str:
        """The question in words."""
        asked = f"the server {self.server} asks: {printable_line(self.message[:_MAX_MESSAGE])}"
        if self.form is None:
            return f"{asked} (open {printable_line(self.url[:_MAX_MESSAGE])})"
        if not self._fields:
            return asked
        return f"{asked} ({self._wanted()})"

    @property
    def is_in_words(self) -> bool:
        """Whether a yes needs more than that: the fields of a form."""
        return bool(self._fields)

    @property
    def options(self) -> tuple[str, ...]:
        """The answers to choose from; none if the person has to write one."""
        if not self._fields:
            return (_DONE,) if self.form is None else _YES_NO[:1]
        return tuple(shown for shown, _ in _choices(self._only)) if self._only else ()

    def answer(self, words: str) -> wire.ElicitResult:
        """Accept, with what a person has written."""
        words = words.strip()
        if not self._fields and words and chosen(words, self.options) not in self.options:
            raise ValueError(f"choose {self.options[0]!r}, or decline")
        if self.form is None:
            return wire.ElicitResult(action="accept")
        content = {name: each["default"] for name, each in self._fields.items() if "default" in each}
        content |= self._written(words) if self._fields else {}
        checks = jsonschema.Draft202012Validator(without_patterns(dict(self.form)), registry=Registry())
        try:
            for error in checks.iter_errors(content):
                where = ".".join(map(str, error.path)) or "the answer"
                raise ValueError(f"{where}: {error.message[:200]}")
        except (Unresolvable, RecursionError):
            pass  # A form that cannot be followed: the server checks by itself.
        return wire.ElicitResult(action="accept", content=content)

    @property
    def _fields(self) -> Mapping[str, Mapping[str, Any]]:
        return {} if self.form is None else self.form.get("properties", {})

    @property
    def _only(self) -> Mapping[str, Any] | None:
        return next(iter(self._fields.values())) if len(self._fields) == 1 else None

    def _wanted(self) -> str:
        assert self.form is not None
        needed = self.form.get("required", ())
        shape = {
            name: f"{each.get('type', 'text')}{'' if name in needed else ', optional'}"
            for name, each in self._fields.items()
        }
        if self._only is None:
            return f"answer with one JSON object: {json.dumps(shape, ensure_ascii=False)}"
        return ": ".join(next(iter(shape.items())))

    def _written(self, words: str) -> dict[str, Any]:
        try:
            given = json.loads(words or "{}")
        except (ValueError, RecursionError):
            given = None
        if isinstance(given, dict):
            return given
        if self._only is None:
            raise ValueError("it is not a JSON object")
        return {next(iter(self._fields)): _value(self._only, words)}


def _checked(form: Any) -> Mapping[str, Any]:
    """Return a form that can be asked. Raises `ValueError`."""
    fields = form.get("properties", {})
    if not isinstance(fields, dict) or not all(isinstance(each, dict) for each in fields.values()):
        raise ValueError("the form's fields are not described by objects")
    if len(json.dumps(form)) > MAX_FORM_CHARS:
        raise ValueError(f"the form has more than {MAX_FORM_CHARS:,} characters")
    try:
        jsonschema.Draft202012Validator.check_schema(form)
    except (jsonschema.SchemaError, RecursionError) as error:
        raise ValueError(f"the form is not a JSON schema: {str(error)[:200]}") from None
    return {"type": "object", **form}


def _choices(field: Mapping[str, Any]) -> Sequence[tuple[str, Any]]:
    """Return what can be chosen for a field: as it is shown, and as the server wants it."""
    if field.get("type") == "boolean":
        return [(shown, shown == "yes") for shown in _YES_NO]
    named = field.get("oneOf")
    if isinstance(named, list) and all(isinstance(each, dict) and "const" in each for each in named):
        return [(str(each.get("title", each["const"])), each["const"]) for each in named]
    listed = field.get("enum")
    return [(str(each), each) for each in listed] if isinstance(listed, list) else ()


def _value(field: Mapping[str, Any], words: str) -> Any:
    """Turn words into the value of a field."""
    choices = _choices(field)
    said = chosen(words, [shown for shown, _ in choices])
    for shown, value in choices:
        if said.lower() == shown.lower():
            return value
    if field.get("type") in ("integer", "number", "array", "boolean"):
        try:
            return json.loads(words)
        except ValueError:
            pass  # The form says what is wrong with it.
    return words
