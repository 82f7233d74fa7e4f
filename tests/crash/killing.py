"""Kill a process at every moment at which that can make a difference.

Theory of operation
-------------------
The process that is to die is a fork of this one: quick, and everything is imported already. While it works,
a profiling hook sees each call of a C function, in every thread. Files, databases and processes can be
reached only through C functions, so the hook sees each operation on them, whoever wrote the code and
whenever; no operation is listed here. What is listed (`COMPUTING`) are the modules that only compute.

A `Moment` is a place in that sequence: before or after the n-th call of a function from a line of code.
Counting per line, and not over all, keeps moments apart from whatever an event loop does in between.

First the work is done once by a process that lives, and its moments are written down, together with whether
anything on disk has changed since the moment before. Two kills that leave the same bytes on disk are the
same crash, because all that a later process can see of a dead one is its files. So one of them is done, and
the others are not: the moment right before a call is, if nothing changed, the moment after the call before
it. Each SQL statement counts as a change: SQLite's files are not looked at, because closing a file that
SQLite has open would drop its locks. What is sent to a Postgres server is a change as well; there a Python
function is hooked, `STATEMENT`, because the driver's C functions are not reported.

A kill may also come while bytes are being written. So wherever a call made one file longer, there is a
third moment, `within`: the file is cut in the middle of what was added.
"""

from __future__ import annotations

import functools
import os
import signal
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any, Literal

from tests.forks import ProcessKilled, fork, in_child

COMPUTING = frozenset(
    {
        "_abc", "_asyncio", "_bisect", "_blake2", "_codecs", "_collections", "_contextvars", "_ctypes",
        "_datetime", "_functools", "_hashlib", "_heapq", "_json", "_operator", "_queue", "_random", "_sha1",
        "_signal", "_socket", "_sre", "_stat", "_string", "_struct", "_thread", "_tracemalloc", "_uuid",
        "_warnings", "_weakref", "asyncio", "binascii", "builtins", "collections", "datetime", "errno",
        "functools", "gc", "itertools", "marshal", "math", "pydantic_core._pydantic_core", "re", "select",
        "socket", "sys", "time", "types", "unicodedata", "uuid", "weakref", "zlib",
    }
)  # fmt: skip
"""Modules whose C functions change nothing that outlives the process. All others count."""

UNSEEN = frozenset({"sqlite3"})
"""Modules whose files are not looked at: each of their calls is taken for a change, unless it only reads."""

READING = ("fetchone", "fetchmany", "fetchall")
"""What of those modules only reads."""

STATEMENT = "psycopg.Connection.wait"
"""Where a request has been sent to a Postgres server, or is about to be, and its answer is waited for."""

SETTLED_NS = 100_000_000
"""A file whose last change is older than this when it is read cannot change without its times moving."""


EVERY_MOMENT = "TREENAIL_EVERY_MOMENT" in os.environ
"""Set it to kill at every moment, where otherwise a sample of them has to do."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a process is killed."""

    when: Literal["before", "within", "after"]
    function: str
    site: str
    occurrence: int

    def __str__(self) -> str:
        return (
            f"{self.when} call {self.occurrence} of {self.function} at {'/'.join(self.site.split('/')[-2:])}"
        )


END = Moment("after", "the work", "its end:0", 1)
"""The work is done, and the process ends without closing anything."""

Watch = Callable[..., AbstractContextManager[None]]
"""What the work is handed: everything inside `with watch():` is where it may be killed."""

Entry = tuple[int, int, int, int, bytes]
"""Inode, mode, size, time of the last write, and content (or what a link points to)."""


@dataclass(slots=True)
class Disk:
    """Everything below some directories, as a later process would find it."""

    directories: Sequence[Path]
    unread: Sequence[str] = ()
    """Beginnings of paths that are never opened."""
    _known: dict[str, tuple[tuple[int, int, int], bytes]] = field(default_factory=dict)

    def look(self) -> dict[str, Entry]:
        """Return what is there now."""
        found: dict[str, Entry] = {}
        for directory in self.directories:
            for path, status in _walk(os.fspath(directory)):
                content, size, written = b"", 0, 0
                if not stat.S_ISDIR(status.st_mode):
                    content, size, written = self._content(path, status), status.st_size, status.st_mtime_ns
                found[path] = (status.st_ino, status.st_mode, size, written, content)
        return found

    def _content(self, path: str, status: os.stat_result) -> bytes:
        if path.startswith(tuple(self.unread)):
            return b""
        if stat.S_ISLNK(status.st_mode):
            return os.fsencode(os.readlink(path))
        times = (status.st_ino, status.st_size, status.st_ctime_ns)
        known = self._known.get(path)
        if known is not None and known[0] == times:
            return known[1]
        now = time.time_ns()
        if status.st_size == 0:
            return b""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            content = os.read(descriptor, status.st_size)
        finally:
            os.close(descriptor)
        if now - status.st_ctime_ns > SETTLED_NS:
            self._known[path] = (times, content)
        return content


def _walk(directory: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        listing = os.scandir(directory)
    except PermissionError:
        return  # An overlay's own.
    with listing:
        for entry in listing:
            status = entry.stat(follow_symlinks=False)
            yield entry.path, status
            if stat.S_ISDIR(status.st_mode):
                yield from _walk(entry.path)


def _grown(before: dict[str, Entry], after: dict[str, Entry]) -> tuple[str, int] | None:
    """Return the one file that has become longer, and where to cut it; None if there is not just one."""
    found = []
    for path, (inode, _, size, _, _) in after.items():
        old = before.get(path)
        if old is not None and old[0] == inode and size > old[2] + 1:
            found.append((path, (old[2] + size) // 2))
    return found[0] if len(found) == 1 else None


Hook = Callable[[FrameType, str, Any], None]


@contextmanager
def _hooked(hook: Hook, since: threading.Event | None) -> Iterator[None]:
    """Let a hook see what is called in the block, in this thread and in those it starts.

    With an event, only what is called once that is set: a thread cannot be hooked from another one.
    """

    def see(frame: FrameType, event: str, function: Any) -> None:
        if since is None or since.is_set():
            hook(frame, event, function)

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _module(function: Any) -> str:
    module = function.__module__
    if module is None:
        owner = function.__self__
        module = (owner if isinstance(owner, type) else type(owner)).__module__
    return str(module)


def _site(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@functools.cache
def _statement_code() -> CodeType | None:
    """Return the code of `STATEMENT`; None where the driver is not loaded."""
    driver = sys.modules.get("psycopg.connection")
    return None if driver is None else driver.Connection.wait.__code__


def _statement_site(frame: FrameType) -> str:
    """Return the line of the log that sends a statement."""
    found: FrameType | None = frame
    while found is not None and ("/psycopg/" in found.f_code.co_filename or _is_pool(found)):
        found = found.f_back
    return _site(found or frame)


def _is_pool(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith("log/postgres/database.py")


class _Recorder:
    """Writes down the moments that matter."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._seen: dict[str, Entry] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._returns: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self.passed = 0
        self.moments: list[Moment] = []

    @contextmanager
    def watching(self, since: threading.Event | None = None) -> Iterator[None]:
        self._seen = self._disk.look()
        with _hooked(self._see, since):
            yield
        self.moments.append(END)

    def _see(self, frame: FrameType, event: str, function: Any) -> None:
        if frame.f_code is _statement_code() and event in ("call", "return"):
            with self._lock:
                counts = self._calls if event == "call" else self._returns
                site = _statement_site(frame)
                counts[STATEMENT, site] += 1
                when: Literal["before", "after"] = "before" if event == "call" else "after"
                self._reach(Moment(when, STATEMENT, site, counts[STATEMENT, site]), unseen=True)
            return
        if event[1] != "_" or frame.f_code.co_filename == __file__:
            return
        module = _module(function)
        if module in COMPUTING:
            return
        name, site = f"{module}.{function.__qualname__}", _site(frame)
        with self._lock:
            counts = self._calls if event == "c_call" else self._returns
            counts[name, site] += 1
            moment = Moment("before" if event == "c_call" else "after", name, site, counts[name, site])
            self._reach(moment, module in UNSEEN and not name.endswith(READING))

    def _reach(self, moment: Moment, unseen: bool) -> None:
        self.passed += 1
        now = self._disk.look()
        if now != self._seen or not self.moments or (unseen and moment.when == "after"):
            if moment.when == "after" and not unseen and _grown(self._seen, now) is not None:
                self.moments.append(replace(moment, when="within"))
            self.moments.append(moment)
        self._seen = now


class _Killer:
    """Ends the process when a moment is reached, or stops it."""

    def __init__(self, moment: Moment, disk: Disk, number: int = signal.SIGKILL) -> None:
        self._number = number
        self._moment = moment
        self._disk = disk
        self._calls = self._returns = 0
        self._seen: dict[str, Entry] = {}
        self._name = moment.function.rpartition(".")[2]
        self._file, _, line = moment.site.rpartition(":")
        self._line = int(line)

    @contextmanager
    def watching(self, since: threading.Event | None = None) -> Iterator[None]:
        with _hooked(self._see, since):
            yield
        if self._moment == END:
            self._die()

    def _see(self, frame: FrameType, event: str, function: Any) -> None:
        if self._moment.function == STATEMENT:
            if frame.f_code is _statement_code() and event in ("call", "return"):
                self._see_statement(frame, event)
            return
        # Nearly every call is somebody else's: what is cheap to ask is asked first.
        if event[1] != "_" or frame.f_lineno != self._line or function.__name__ != self._name:
            return
        moment = self._moment
        if frame.f_code.co_filename != self._file:
            return
        if f"{_module(function)}.{function.__qualname__}" != moment.function:
            return
        if event == "c_call":
            self._calls += 1
            if self._calls == moment.occurrence:
                if moment.when == "before":
                    self._die()
                if moment.when == "within":
                    self._seen = self._disk.look()
            return
        self._returns += 1
        if self._returns == moment.occurrence and moment.when != "before":
            if moment.when == "within":
                grown = _grown(self._seen, self._disk.look())
                if grown is not None:
                    os.truncate(*grown)
            self._die()

    def _see_statement(self, frame: FrameType, event: str) -> None:
        if _statement_site(frame) != self._moment.site:
            return
        self._calls += event == "call"
        self._returns += event == "return"
        if (self._calls if event == "call" else self._returns) == self._moment.occurrence and (
            self._moment.when == ("before" if event == "call" else "after")
        ):
            self._die()

    def _die(self) -> None:
        # To this thread: one that is sent to the process may be taken by another thread a little later.
        signal.pthread_kill(threading.get_ident(), self._number)


def moments(work: Callable[[Watch], object], disk: Disk) -> tuple[list[Moment], int]:
    """Do the work in a process that lives.

    Returns the moments to kill it at, in order, and how many moments there were before those with the
    same disk were taken together.
    """

    def record() -> tuple[list[Moment], int]:
        recorder = _Recorder(disk)
        work(recorder.watching)
        return recorder.moments, recorder.passed

    return in_child(record)


def sample(found: Sequence[Moment], count: int, *, seed: int = 1) -> list[Moment]:
    """Choose moments, in order: of each place in the code the first and the last, and others by chance.

    There may be more than `count` if there are more places than that. `TREENAIL_EVERY_MOMENT=1` takes all.
    """
    if EVERY_MOMENT or len(found) <= count:
        return list(found)
    first: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], int] = {}
    for position, moment in enumerate(found):
        first.setdefault((moment.function, moment.site), position)
        last[moment.function, moment.site] = position
    chosen = {*first.values(), *last.values()}
    others = [position for position in range(len(found)) if position not in chosen]
    chosen.update(Random(seed).sample(others, max(0, min(len(others), count - len(chosen)))))
    return [found[position] for position in sorted(chosen)]


def killed(work: Callable[[Watch], object], moment: Moment, disk: Disk, *, orphans: bool = False) -> bool:
    """Do the work in a process that is killed at a moment. False if it ended before the moment came.

    With `orphans` it is also waited for what the process had started.
    """
    try:
        in_child(lambda: work(_Killer(moment, disk).watching), orphans=orphans)
    except ProcessKilled:
        return True
    return False


def stopped(work: Callable[[Watch], object], moment: Moment, disk: Disk) -> int | None:
    """Do the work in a process that is stopped at a moment, and return its number. None if it never came."""
    child = fork(lambda: work(_Killer(moment, disk, signal.SIGSTOP).watching))
    _, status = os.waitpid(child, os.WUNTRACED)
    return child if os.WIFSTOPPED(status) else None
