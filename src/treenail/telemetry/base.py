"""The seam to whoever listens.

Theory of operation
-------------------
The rooms above say what they do: `with telemetry.span("chat", ...)`, `telemetry.record(...)`. As long as
nobody has called `use`, both return at once, and no package is imported for them. `treenail.telemetry.otel`
is a `Telemetry` on OpenTelemetry. What is said here is for people who watch a system; nothing in the system
reads it, and nothing that goes wrong in it reaches a run.

A span is the child of the span that is current where it is begun. What is asked for in one place and runs in
another (a subagent, a workflow's step) takes its place along: `here` where it is asked for, `under` where it
runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from treenail.telemetry.logs import bound_fields

_logger = logging.getLogger("treenail.telemetry")

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


class OpenSpan(Span, Protocol):
    """A piece of work that begins in one place and ends in another. See `begin`."""

    @property
    def place(self) -> object:
        """What `under` takes: where the work's own parts belong."""
        ...

    def end(self) -> None:
        """Say that the work is over. Saying so again changes nothing."""
        ...


class Telemetry(Protocol):
    """Somebody who listens."""

    def span(self, name: str, attributes: Mapping[str, Attribute]) -> AbstractContextManager[Span]:
        """Watch a piece of work. Spans that are begun within it are its children."""
        ...

    def begin(self, name: str, attributes: Mapping[str, Attribute]) -> OpenSpan:
        """Watch a piece of work until its `end`: a child of the current span, which stays the current one."""
        ...

    def here(self) -> object:
        """Return the current span, for `under`."""
        ...

    def under(self, place: object) -> AbstractContextManager[object]:
        """Make spans that are begun in the block the children of that place."""
        ...

    def record(self, name: str, value: float, attributes: Mapping[str, Attribute]) -> None:
        """Take a measurement."""
        ...


class _NoSpan:
    """The span when nobody listens."""

    trace_id = None
    span_id = None
    place = None

    def end(self) -> None:
        """End nothing."""

    def set(self, name: str, value: Attribute | None) -> None:
        """Say it to nobody."""

    def fail(self, kind: str, message: str = "") -> None:
        """Say it to nobody."""

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *_: object) -> None:
        return None


NO_SPAN = _NoSpan()
"""What whoever watches is given when nobody listens."""

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
        return NO_SPAN
    return _guarded(_everywhere[0], name, _named(attributes))


def begin(name: str, **attributes: Attribute | None) -> OpenSpan:
    """Watch a piece of work that does not end where it begins: call `end` on what is returned.

    What belongs to it is begun inside `under(span.place)`.
    """
    if not _everywhere:
        return NO_SPAN
    try:
        return _Guard(_everywhere[0].begin(name, _named(attributes)))
    except Exception:
        _logger.exception("a span could not be begun")
        return NO_SPAN


def here() -> object:
    """Return the present place in the trace, for work that is done elsewhere; None for nowhere."""
    if not _everywhere:
        return None
    try:
        return _everywhere[0].here()
    except Exception:
        _logger.exception("the place in the trace could not be found")
        return None


def under(place: object) -> AbstractContextManager[object]:
    """Put the spans that are begun in the block at a place that `here` returned, in whatever task."""
    if not _everywhere or place is None:
        return NO_SPAN
    return _placed(_everywhere[0], place)


def record(name: str, value: float, **attributes: Attribute | None) -> None:
    """Take a measurement, if anybody listens."""
    if _everywhere:
        try:
            _everywhere[0].record(name, value, _named(attributes))
        except Exception:
            _logger.exception("a measurement could not be taken")


def _named(attributes: Mapping[str, Attribute | None]) -> dict[str, Attribute]:
    return {name.replace("__", "."): value for name, value in attributes.items() if value is not None}


class _Guard:
    """Keeps what goes wrong in a span away from the work."""

    def __init__(self, span: Any) -> None:
        self._span = span
        self.trace_id: str | None = span.trace_id
        self.span_id: str | None = span.span_id
        self.place: object = getattr(span, "place", None)

    def set(self, name: str, value: Attribute | None) -> None:
        """Say more about the work."""
        self._try(lambda span: span.set(name, value))

    def fail(self, kind: str, message: str = "") -> None:
        """Say that the work went wrong."""
        self._try(lambda span: span.fail(kind, message))

    def end(self) -> None:
        """Say that the work is over."""
        self._try(lambda span: span.end())
        self._span = None

    def _try(self, what: Callable[[Any], object]) -> None:
        if self._span is not None:
            try:
                what(self._span)
            except Exception:
                _logger.exception("a span could not be told about its work")


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
        try:
            context.__exit__(None, None, None)
        except Exception:
            _logger.exception("the place in the trace could not be left")


@contextmanager
def _guarded(telemetry: Telemetry, name: str, attributes: Mapping[str, Attribute]) -> Iterator[Span]:
    """Keep what goes wrong in telemetry away from the work, and the work's own errors as they are."""
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
