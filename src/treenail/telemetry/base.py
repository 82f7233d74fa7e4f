"""The telemetry seam: spans and measurements for an exporter, if one is configured.

Theory of operation
-------------------
The rooms above report what they do: `with telemetry.span("chat", ...)`, `telemetry.record(...)`. Until `use`
is called, both return at once and import nothing. `treenail.telemetry.otel` implements `Telemetry` on
OpenTelemetry. Telemetry is for people who watch a system: nothing in the runtime reads it, and an error in
an exporter never reaches a run.

A span is a child of the span that is current where it begins. Work that is requested in one place and runs
in another (a subagent, a workflow step) carries its place along: call `here` where it is requested and
`under` where it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from treenail.telemetry.logs import bound_fields

_logger = logging.getLogger("treenail.telemetry")

Attribute = str | int | float | bool | tuple[str, ...]
"""The value of a span's or a measurement's attribute."""


class Span(Protocol):
    """One traced piece of work."""

    @property
    def trace_id(self) -> str | None:
        """The id of its trace, as 32 hex digits; None without an exporter."""
        ...

    @property
    def span_id(self) -> str | None:
        """Its own id, as 16 hex digits; None without an exporter."""
        ...

    def set(self, name: str, value: Attribute | None) -> None:
        """Set an attribute; None sets nothing."""
        ...

    def fail(self, kind: str, message: str = "") -> None:
        """Mark the work as failed although it raised nothing."""
        ...


class OpenSpan(Span, Protocol):
    """A span that begins in one place and ends in another. See `begin`."""

    @property
    def place(self) -> object:
        """The place to pass to `under` for the parts of this work."""
        ...

    def end(self) -> None:
        """End the span. Ending it twice changes nothing."""
        ...


class Telemetry(Protocol):
    """An exporter of spans and measurements."""

    def span(self, name: str, attributes: Mapping[str, Attribute]) -> AbstractContextManager[Span]:
        """Open a span around a block. Spans that begin in the block are its children."""
        ...

    def begin(self, name: str, attributes: Mapping[str, Attribute]) -> OpenSpan:
        """Open a child of the current span, which stays current, until `end` is called on it."""
        ...

    def here(self) -> object:
        """Return the current place in the trace, for `under`."""
        ...

    def under(self, place: object) -> AbstractContextManager[object]:
        """Make spans that begin in the block children of that place."""
        ...

    def record(self, name: str, value: float, attributes: Mapping[str, Attribute]) -> None:
        """Record a measurement."""
        ...


class _NoSpan:
    """A no-op span."""

    trace_id = None
    span_id = None
    place = None

    def end(self) -> None:
        """Do nothing."""

    def set(self, name: str, value: Attribute | None) -> None:
        """Do nothing."""

    def fail(self, kind: str, message: str = "") -> None:
        """Do nothing."""

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *_: object) -> None:
        return None


NO_SPAN = _NoSpan()
"""A no-op span, used when no exporter is configured."""

_everywhere: list[Telemetry] = []


def use(telemetry: Telemetry | None) -> None:
    """Send the telemetry of this process to an exporter, instead of the one before; None turns it off."""
    _everywhere[:] = [] if telemetry is None else [telemetry]


def is_on() -> bool:
    """Say whether an exporter is configured."""
    return bool(_everywhere)


def span(name: str, **attributes: Attribute | None) -> AbstractContextManager[Span]:
    """Open a span around a block. A double underscore in an attribute's name stands for a dot."""
    if not _everywhere:
        return NO_SPAN
    return _guarded(_everywhere[0], name, _named(attributes))


def begin(name: str, **attributes: Attribute | None) -> OpenSpan:
    """Open a span that does not end where it begins: call `end` on the span that is returned.

    Begin its children inside `under(span.place)`.
    """
    if not _everywhere:
        return NO_SPAN
    try:
        return _Guard(_everywhere[0].begin(name, _named(attributes)))
    except Exception:
        _logger.exception("a span could not be begun")
        return NO_SPAN


def here() -> object:
    """Return the current place in the trace, for work that runs elsewhere; None without an exporter."""
    place: object = None
    if _everywhere:
        with _logging_errors("the place in the trace could not be found"):
            place = _everywhere[0].here()
    return place


def under(place: object) -> AbstractContextManager[object]:
    """Make the spans of a block children of a place that `here` returned, in any task."""
    if not _everywhere or place is None:
        return NO_SPAN
    return _placed(_everywhere[0], place)


def record(name: str, value: float, **attributes: Attribute | None) -> None:
    """Record a measurement, if an exporter is configured."""
    if _everywhere:
        with _logging_errors("a measurement could not be taken"):
            _everywhere[0].record(name, value, _named(attributes))


def _named(attributes: Mapping[str, Attribute | None]) -> dict[str, Attribute]:
    return {name.replace("__", "."): value for name, value in attributes.items() if value is not None}


@contextmanager
def _logging_errors(message: str) -> Iterator[None]:
    """Log what an exporter raises in the block, instead of raising it."""
    try:
        yield
    except Exception:
        _logger.exception(message)


class _Guard:
    """Logs the errors of an exporter's span instead of raising them."""

    def __init__(self, span: Any) -> None:
        self._span = span
        self.trace_id: str | None = span.trace_id
        self.span_id: str | None = span.span_id
        self.place: object = getattr(span, "place", None)

    def set(self, name: str, value: Attribute | None) -> None:
        """Set an attribute."""
        self._try(lambda span: span.set(name, value))

    def fail(self, kind: str, message: str = "") -> None:
        """Mark the work as failed."""
        self._try(lambda span: span.fail(kind, message))

    def end(self) -> None:
        """End the span."""
        self._try(lambda span: span.end())
        self._span = None

    def _try(self, what: Callable[[Any], object]) -> None:
        if self._span is not None:
            with _logging_errors("an exporter failed on a span"):
                what(self._span)


@contextmanager
def _placed(telemetry: Telemetry, place: object) -> Iterator[None]:
    try:
        context = telemetry.under(place)
        context.__enter__()
    except Exception:
        _logger.exception("the place in the trace could not be taken")
        yield
        return
    try:
        yield
    finally:
        with _logging_errors("the place in the trace could not be left"):
            context.__exit__(None, None, None)


@contextmanager
def _guarded(telemetry: Telemetry, name: str, attributes: Mapping[str, Attribute]) -> Iterator[Span]:
    """Log an exporter's errors, and let the errors of the work pass unchanged."""
    try:
        context = telemetry.span(name, attributes)
        begun = _Guard(context.__enter__())
    except Exception:
        _logger.exception("a span could not be begun")
        yield NO_SPAN
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
        except BaseException as ended:  # a span may raise the error that it was told
            if ended is not error:
                _logger.exception("a span could not be ended")


@contextmanager
def bind(**fields: str | None) -> Iterator[None]:
    """Add fields, such as the session's id, to every structured log line written in the block."""
    token = bound_fields.set(
        {**bound_fields.get(), **{name: value for name, value in fields.items() if value is not None}}
    )
    try:
        yield
    finally:
        bound_fields.reset(token)
