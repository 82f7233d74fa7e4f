"""Telemetry: spans, metrics and structured logs. Without an exporter they cost next to nothing."""

from treenail.telemetry.base import (
    Attribute,
    OpenSpan,
    Span,
    Telemetry,
    begin,
    bind,
    here,
    is_on,
    record,
    span,
    under,
    use,
)
from treenail.telemetry.logs import JsonFormatter

__all__ = [
    "Attribute",
    "JsonFormatter",
    "OpenSpan",
    "Span",
    "Telemetry",
    "begin",
    "bind",
    "here",
    "is_on",
    "record",
    "span",
    "under",
    "use",
]
