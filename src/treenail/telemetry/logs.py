"""Structured log lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime

bound_fields: ContextVar[Mapping[str, str]] = ContextVar("treenail_bound_fields", default={})  # noqa: B039  # only ever replaced
"""The fields of every line written here: session, turn, trace."""

_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {
    "message",
    "asctime",
    "taskName",
}


class JsonFormatter(logging.Formatter):
    """Writes each record as one JSON object: time, level, logger, message, bound and extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        data: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **bound_fields.get(),
        }
        data.update({name: value for name, value in vars(record).items() if name not in _STANDARD})
        if record.exc_info and record.exc_info[0] is not None:
            data["error"] = record.exc_info[0].__name__
            data["traceback"] = self.formatException(record.exc_info)
        return json.dumps(data, ensure_ascii=False, default=str)
