"""The seam to whoever listens.

Theory of operation
-------------------
The rooms above say what they do: `with telemetry.span("chat", ...)`, `telemetry.record(...)`. As long as
nobody has called `use`, both return at once, and no package is imported for them. `holdfast.telemetry.otel`
is a `Telemetry` on OpenTelemetry. What is said here is for people who watch a system; nothing in the system
reads it, and nothing that goes wrong in it reaches a run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from holdfast.telemetry.logs import bound_fields

_logger = logging.getLogger("holdfast.telemetry")

Attribute = str | int | float | bool | tuple[str, ...]
"""What a span or a measurement can carry."""


class Span(Protocol):
    """A piece of work that is being watched."""

    @property
    def trace_id(self) -> str | None:
        """The trace that it belongs to, as 32 hex digits; None if nobody listens."""
        ...

    @property
    def span_id(self) -> str | None:
        """Its own id, as 16 hex digits; None if nobody listens."""
        ...

    def set(self, name: str, value: Attribute | None) -> None:
        """Say more about the work. None says nothing."""
        ...

    def fail(self, kind: str, message: str = "") -> None:
        """Say that the work went wrong, although nothing was raised."""
        ...


class Telemetry(Protocol):
    """Somebody who listens."""

    def span(self, name: str, attributes: Mapping[str, Attribute]) -> AbstractContextManager[Span]:
        """Watch a piece of work. Spans that are begun within it are its children."""
        ...

    def record(self, name: str, value: float, attributes: Mapping[str, Attribute]) -> None:
        """Take a measurement."""
        ...


class _NoSpan:
    """The span when nobody listens."""

    trace_id = None
    span_id = None

    def set(self, name: str, value: Attribute | None) -> None:
        """Say it to nobody."""

    def fail(self, kind: str, message: str = "") -> None:
        """Say it to nobody."""

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *_: object) -> None:
        return None


_NO_SPAN = _NoSpan()
_everywhere: list[Telemetry] = []


def use(telemetry: Telemetry | None) -> None:
    """Let somebody listen to everything in this process, in place of whoever did; None for nobody."""
    _everywhere[:] = [] if telemetry is None else [telemetry]


def is_on() -> bool:
    """Say whether anybody listens."""
    return bool(_everywhere)


def span(name: str, **attributes: Attribute | None) -> AbstractContextManager[Span]:
    """Watch a piece of work. A double underscore in an attribute's name stands for a dot."""
    if not _everywhere:
        return _NO_SPAN
    return _guarded(_everywhere[0], name, _named(attributes))


def record(name: str, value: float, **attributes: Attribute | None) -> None:
    """Take a measurement, if anybody listens."""
    if _everywhere:
        try:
            _everywhere[0].record(name, value, _named(attributes))
        except Exception:
            _logger.exception("a measurement could not be taken")


def _named(attributes: Mapping[str, Attribute | None]) -> dict[str, Attribute]:
    return {name.replace("__", "."): value for name, value in attributes.items() if value is not None}


@contextmanager
def _guarded(telemetry: Telemetry, name: str, attributes: Mapping[str, Attribute]) -> Iterator[Span]:
    """Keep what goes wrong in telemetry away from the work, and the work's own errors as they are."""
    try:
        context = telemetry.span(name, attributes)
        begun = context.__enter__()
    except Exception:
        _logger.exception("a span could not be begun")
        yield _NO_SPAN
        return
    error: BaseException | None = None
    try:
        yield begun
    except BaseException as raised:
        error = raised
        raise
    finally:
        try:
            context.__exit__(*((None, None, None) if error is None else (type(error), error, None)))
        except BaseException as ended:  # a span that raises again what it was told is right
            if ended is not error:
                _logger.exception("a span could not be ended")


@contextmanager
def bind(**fields: str | None) -> Iterator[None]:
    """Put fields on every structured log line that is written within, such as the session's id."""
    token = bound_fields.set(
        {**bound_fields.get(), **{name: value for name, value in fields.items() if value is not None}}
    )
    try:
        yield
    finally:
        bound_fields.reset(token)
