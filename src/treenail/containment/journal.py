"""A journal in a file, for those who use the containment without a log of their own."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from treenail.codec import Codec, TypeRegistry, parse_json
from treenail.containment.ledger import (
    ChainStopped,
    LedgerEvent,
    Reserved,
    RetryTaken,
    Settled,
    UsedTime,
)
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
    `ExecutionContext.resume`. One process writes it at a time. The time that its runs have used is beside it,
    in a file whose name ends with `.time` and that is replaced as a whole.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        # A line that was cut off by a crash was never acknowledged; the next one must not be glued to it.
        data = self.path.read_bytes()
        if not data.endswith(b"\n"):
            os.ftruncate(self._file, data.rfind(b"\n") + 1)
        self._times = {used.root: used for used in _read_times(self.path)}

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

    def note_time(self, used: UsedTime) -> None:
        """Keep the time that a run has used, in place of what was known of that run before."""
        with self._lock:
            if self._file < 0:
                return
            self._times[used.root] = used
            data = {
                each.root: {"running": dict(each.running), "ended": dict(each.ended)}
                for each in self._times.values()
            }
            place = _times_of(self.path)
            new = place.with_name(place.name + ".new")
            new.write_text(json.dumps(data), encoding="utf-8")
            os.replace(new, place)

    def noted_times(self) -> list[UsedTime]:
        """Return the time that each run had used when it was last noted."""
        with self._lock:
            return list(self._times.values())

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


def _times_of(path: Path) -> Path:
    return path.with_name(path.name + ".time")


def _read_times(path: Path) -> list[UsedTime]:
    place = _times_of(path)
    try:
        data = parse_json(place.read_text(encoding="utf-8"))
        found = [UsedTime(root, each["running"], each["ended"]) for root, each in data.items()]
        for used in found:
            for ran_ms in (*used.running.values(), *used.ended.values()):
                number("UsedTime", "running and ended", ran_ms, zero_ok=True)
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError, TreenailError) as error:
        raise LogDamagedError(
            f"{place} is damaged: {error}; how long its runs have been running is not known, so nothing was "
            f"resumed. Remove it to count only the time that {path.name} knows of, then resume again",
            last_good_seq=0,
        ) from error
    return found


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
