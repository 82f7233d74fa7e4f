"""Dispatchers: they tell subscribers what happened. A failing subscriber changes nothing.

An event is in the log, as bytes, before it is published, so that no subscriber can change what is kept.
Subscribers share the object that was dispatched. To change a list or a dict in it, change a copy: later
subscribers, and the dispatcher's caller, would see the change.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")

_logger = logging.getLogger("treenail.state")


@dataclass(frozen=True, slots=True)
class HandlerFailure:
    """A reducer, an observer or a subscriber that raised; the event stands all the same."""

    handler: Callable[..., object]
    error: Exception


class DispatchResult(NamedTuple):
    """What became of one dispatched event."""

    event: object
    handlers_invoked: tuple[Callable[..., object], ...] = ()
    errors: tuple[HandlerFailure, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no handler failed."""
        return not self.errors

    @property
    def handled_count(self) -> int:
        """How many handlers ran without failing."""
        return len(self.handlers_invoked) - len(self.errors)

    def with_handler(self, handler: Callable[..., object], failure: HandlerFailure | None) -> DispatchResult:
        """Return the result with one more handler that ran, and its failure if it failed."""
        errors = self.errors if failure is None else (*self.errors, failure)
        return DispatchResult(self.event, (*self.handlers_invoked, handler), errors)

    def raise_if_errors(self) -> None:
        """Raise what the handlers raised, as one `ExceptionGroup`."""
        if self.errors:
            raise ExceptionGroup(
                f"{len(self.errors)} of {len(self.handlers_invoked)} handlers of "
                f"{type(self.event).__qualname__} failed; the event itself was recorded",
                [failure.error for failure in self.errors],
            )


class Dispatcher(Protocol):
    """Delivers events to the subscribers of their exact type."""

    def subscribe(self, event_type: type[T], handler: Callable[[T], object]) -> None:
        """Call the handler for each event of exactly that type."""
        ...

    def unsubscribe(self, event_type: type[T], handler: Callable[[T], object]) -> bool:
        """Stop calling the handler. Says whether it was subscribed."""
        ...

    def dispatch(self, event: object) -> DispatchResult:
        """Deliver an event, in order of subscription, each handler isolated from the others."""
        ...


class InProcessDispatcher:
    """Delivers synchronously, in this process, in order of subscription."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handlers: dict[type, list[Callable[[Any], object]]] = {}

    def subscribe(self, event_type: type[T], handler: Callable[[T], object]) -> None:
        """Call the handler for each event of exactly that type."""
        with self._lock:
            self._handlers.setdefault(event_type, []).append(handler)

    def unsubscribe(self, event_type: type[T], handler: Callable[[T], object]) -> bool:
        """Stop calling the handler. Says whether it was subscribed."""
        with self._lock:
            handlers = self._handlers.get(event_type, [])
            if handler not in handlers:
                return False
            handlers.remove(handler)
            return True

    def dispatch(self, event: object) -> DispatchResult:
        """Deliver an event; a handler that raises does not keep it from the others."""
        with self._lock:
            handlers = tuple(self._handlers.get(type(event), ()))
        errors = []
        for handler in handlers:
            failure = call_isolated(handler, event)
            if failure is not None:
                errors.append(failure)
        return DispatchResult(event, handlers, tuple(errors))

    def publish(self, event: object) -> DispatchResult:
        """Deliver an event; the older name of `dispatch`."""
        return self.dispatch(event)


InProcessEventBus = InProcessDispatcher
"""The older name of `InProcessDispatcher`."""


def call_isolated(handler: Callable[..., object], *arguments: object) -> HandlerFailure | None:
    """Call a handler; if it raises, log that and return it as a value."""
    try:
        handler(*arguments)
    except Exception as error:  # isolation from foreign code is the point
        name = getattr(handler, "__qualname__", repr(handler))
        _logger.warning("the handler %s raised %s: %s", name, type(error).__name__, error, exc_info=error)
        return HandlerFailure(handler, error)
    return None
