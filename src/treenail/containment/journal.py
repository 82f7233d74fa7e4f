"""A journal in a file, for those who use the containment without a log of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from datetime import datetime
from pathlib import Path

from treenail.containment.ledger import ChainStopped, LedgerEvent, Reserved, RetryTaken, Settled
from treenail.containment.limits import number
from treenail.errors import LogDamagedError, UsageError

_TYPES: dict[str, type[LedgerEvent]] = {
    "reserved": Reserved,
    "settled": Settled,
    "retry_taken": RetryTaken,
    "chain_stopped": ChainStopped,
}
_NAMES = {event_type: name for name, event_type in _TYPES.items()}


def event_to_json(event: LedgerEvent) -> str:
    """Return the event as one line of JSON."""
    fields = {"type": _NAMES[type(event)], **dataclasses.asdict(event), "at": event.at.isoformat()}
    return json.dumps(fields, separators=(",", ":"))


def event_from_json(line: str) -> LedgerEvent:
    """Return the event that `event_to_json` wrote; `UsageError` if the line is not one."""
    try:
        fields = json.loads(line)
        event_type = _TYPES[fields.pop("type")]
        fields["at"] = datetime.fromisoformat(fields["at"])
        for name in ("lineage", "elapsed_above_ms"):
            if not isinstance(fields.get(name, []), list):
                raise UsageError(f"{name} is not a list")
            fields[name] = tuple(fields.get(name, ()))
        event = event_type(**fields)
        _check(event)
        return event
    except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise UsageError(f"not a ledger event: {line[:80]!r} ({error})") from error


def _check(event: LedgerEvent) -> None:
    """Refuse an event that would give money or time back, or that cannot be counted."""
    owner = type(event).__name__
    if not event.lineage:
        raise UsageError("lineage names no chain")
    if event.elapsed_above_ms and len(event.elapsed_above_ms) != len(event.lineage) - 1:
        raise UsageError("elapsed_above_ms does not fit lineage")
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if field.name in ("cost_usd", "elapsed_ms"):
            number(owner, field.name, value, zero_ok=True)
        elif field.name in ("lineage", "elapsed_above_ms"):
            for item in value:
                if field.name == "elapsed_above_ms":
                    number(owner, field.name, item, zero_ok=True)
                elif not isinstance(item, str):
                    raise UsageError(f"lineage must name chains by their ids, not {item!r}")
        elif field.name != "at" and not isinstance(value, str):
            raise UsageError(f"{owner}.{field.name} must be a text, not {value!r}")


class JsonlJournal:
    """A journal in a file, one line per event, on disk before the call returns.

    Pass the instance as `journal=`; after a restart, `read_journal(path)` gives the events to
    `ExecutionContext.resume`. One process writes it at a time.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        # A line that was cut off by a crash was never acknowledged; the next one must not be glued to it.
        data = self.path.read_bytes()
        if not data.endswith(b"\n"):
            os.ftruncate(self._file, data.rfind(b"\n") + 1)

    def __call__(self, event: LedgerEvent) -> None:
        """Write the event and wait until it is on disk."""
        line = (event_to_json(event) + "\n").encode()
        with self._lock:
            size = os.fstat(self._file).st_size
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._file, line[written:])
                os.fdatasync(self._file)
            except OSError:
                # Half a line (a full disk) must not be glued to the next one.
                os.ftruncate(self._file, size)
                raise

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def __enter__(self) -> JsonlJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journal(path: str | os.PathLike[str]) -> list[LedgerEvent]:
    """Return the events in a journal file; none if there is no file.

    A line cut off at the end is left out.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    events = []
    for place, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            events.append(event_from_json(line))
        except UsageError as error:
            raise LogDamagedError(
                f"line {place} of {path} is damaged: {error}; what was spent is not known, so nothing was "
                f"resumed. Repair or remove that line, then resume again",
                last_good_seq=place - 1,
            ) from error
    return events
