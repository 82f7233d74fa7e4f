"""A journal in a file, for those who use the containment without a log of their own."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from treenail.codec import Codec, TypeRegistry, parse_json
from treenail.containment.ledger import ChainStopped, LedgerEvent, Reserved, RetryTaken, Settled
from treenail.containment.limits import number
from treenail.errors import LogDamagedError, TreenailError, UsageError

_TYPES: dict[str, type[LedgerEvent]] = {
    "reserved": Reserved,
    "settled": Settled,
    "retry_taken": RetryTaken,
    "chain_stopped": ChainStopped,
}
_NAMES = {event_type: name for name, event_type in _TYPES.items()}
_codec = Codec(TypeRegistry())


def event_to_json(event: LedgerEvent) -> str:
    """Return the event as one line of JSON."""
    return json.dumps({"type": _NAMES[type(event)], **_codec.record_to_data(event)}, separators=(",", ":"))


def event_from_json(line: str) -> LedgerEvent:
    """Return the event that `event_to_json` wrote; `UsageError` if the line is not one."""
    try:
        fields = parse_json(line)
        event = _codec.record_from_data(_TYPES[fields.pop("type")], fields)
        _check(event)
        return event
    except (ValueError, KeyError, TypeError, AttributeError, TreenailError) as error:
        raise UsageError(f"not a ledger event: {line[:80]!r} ({error})") from error


def _check(event: LedgerEvent) -> None:
    """Refuse an event that would give money or time back, or that cannot be counted."""
    ids = (*event.lineage, getattr(event, "reservation_id", ""))
    if not event.lineage or not all(isinstance(each, str) for each in ids):
        raise UsageError("it must name its chains, and its reservation if it has one, by their ids")
    if event.elapsed_above_ms and len(event.elapsed_above_ms) != len(event.lineage) - 1:
        raise UsageError("elapsed_above_ms does not fit lineage")
    for amount in (getattr(event, "cost_usd", 0.0), event.elapsed_ms, *event.elapsed_above_ms):
        number(type(event).__name__, "cost_usd and elapsed_ms", amount, zero_ok=True)


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
