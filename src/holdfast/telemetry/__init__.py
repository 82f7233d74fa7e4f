"""Telemetry: spans, metrics and structured logs for whoever asks for them; free for whoever does not."""

from holdfast.telemetry.base import Attribute, Span, Telemetry, bind, is_on, record, span, use
from holdfast.telemetry.logs import JsonFormatter

__all__ = [
    "Attribute",
    "JsonFormatter",
    "Span",
    "Telemetry",
    "bind",
    "is_on",
    "record",
    "span",
    "use",
]
