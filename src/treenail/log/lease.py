"""The owner of a lease, whether it still lives, and the heartbeat.

Theory of operation
-------------------
A lease names its owner with a string. `this_process_owner()` makes one that
says which process it is: the machine since its last boot, the process
namespace, the process id and the moment when that process began. With these a
reader on the same machine can tell a dead process from a live one at once, even
when the process id has been reused. From anywhere else (another machine, another
container, a string of the caller's own) the answer is "cannot tell", and only the
lease's expiry counts.

A wrong answer does no harm: a writer that was taken over by mistake is fenced off
by its epoch.

`LeaseKeeper` renews leases in a daemon thread while their holder lives. It runs
on real time: a heartbeat is a message to other processes, which do not share a
test's clock.
"""

from __future__ import annotations

import atexit
import functools
import os
import secrets
import select
import signal
import socket
import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID
from weakref import WeakMethod, WeakSet

from treenail.errors import LogError, StaleWriterError
from treenail.log.base import Lease
from treenail.printable import printable_line

_MARK = "treenail"
_PROC = Path("/proc")
_MAX_COMMAND_CHARS = 80


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None


def _machine() -> str:
    """Name this machine since its last boot."""
    boot = _read(_PROC / "sys/kernel/random/boot_id")
    return boot or f"{socket.gethostname()}-{uuid.getnode():x}"


def _namespace() -> str:
    """Name the namespace in which process ids mean something: containers each have their own."""
    try:
        return str(os.stat(_PROC / "self/ns/pid").st_ino)
    except OSError:
        return "0"


def _began(pid: int) -> str | None:
    """Return when a process began, in the kernel's ticks; None if it has ended, "?" if that is unknown."""
    if not (_PROC / "self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:
            return "?"
        return "?"
    stat = _read(_PROC / str(pid) / "stat")
    if stat is None:
        return None
    # The command's name stands in parentheses and may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    # A zombie has ended; its parent has not waited for it yet.
    return None if fields[0] in "ZX" else fields[19]


@functools.lru_cache(maxsize=1)
def _process(pid: int) -> str:
    """Name this process; the name holds until it ends or forks."""
    return "/".join((_MARK, _machine(), _namespace(), str(pid), _began(pid) or "?"))


def this_process_owner() -> str:
    """Make an owner string for a lease; no two calls return the same one."""
    return f"{_process(os.getpid())}/{secrets.token_hex(4)}"


def owner_of(pid: int) -> str:
    """Make the owner string of a process of this machine; an empty one if it has ended."""
    began = _began(pid)
    return "" if began is None else "/".join((_MARK, _machine(), _namespace(), str(pid), began, "0"))


def owner_is_alive(owner: str) -> bool | None:
    """Return whether the process that made this owner string still runs; None if that is unknown."""
    parts = owner.split("/")
    if len(parts) != 6 or parts[0] != _MARK or not parts[3].isdecimal():
        return None
    _, machine, namespace, pid, began, _ = parts
    if machine != _machine() or namespace != _namespace():
        return None
    now = _began(int(pid))
    if now is None:
        return False
    return None if "?" in (now, began) else now == began


def owner_process(owner: str) -> int | None:
    """Return the number of the process that made this owner string, if numbers mean the same here."""
    parts = owner.split("/")
    if len(parts) != 6 or parts[:3] != [_MARK, _machine(), _namespace()] or not parts[3].isdecimal():
        return None
    return int(parts[3])


def owner_text(owner: str) -> str:
    """Say to a person who made this owner string: which process, with what command, and since when."""
    pid = owner_process(owner)
    if pid is None:
        return owner
    if pid == os.getpid():
        return "this very program (another session or run in it, which has not been closed)"
    words = (_read(_PROC / str(pid) / "cmdline") or "").rstrip("\0").split("\0")
    command = printable_line(" ".join(words))
    if len(command) > _MAX_COMMAND_CHARS:
        command = command[: _MAX_COMMAND_CHARS - 1] + "…"
    began = _began_at(pid)
    about = [f"`{command}`"] if command else []
    if began is not None:
        about.append(f"running since {began:%Y-%m-%d %H:%M:%S} UTC")
    return f"process {pid} ({', '.join(about)})" if about else f"process {pid}"


def _began_at(pid: int) -> datetime | None:
    """Return when a process began, as far as the kernel tells."""
    ticks = _began(pid)
    boot = next(
        (each for each in (_read(_PROC / "stat") or "").splitlines() if each.startswith("btime ")), None
    )
    if ticks is None or not ticks.isdecimal() or boot is None:
        return None
    return datetime.fromtimestamp(int(boot.split()[1]) + int(ticks) / os.sysconf("SC_CLK_TCK"), UTC)


def end_owner(owner: str, *, timeout_s: float = 20) -> bool:
    """Kill the process that made this owner string, and wait for its end. Says whether it is gone for sure.

    False if it cannot be seen from here or does not end. Raises `OSError` if this process may not end it.
    """
    pid = owner_process(owner)
    if pid is None or owner_is_alive(owner) is not True or pid == os.getpid():
        return pid is not None and owner_is_alive(owner) is False
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        # The descriptor stands for one process: if that is the owner, no other one can be hit.
        if owner_is_alive(owner):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            ended = select.poll()
            ended.register(descriptor, select.POLLIN)
            ended.poll(1000 * timeout_s)
    finally:
        os.close(descriptor)
    return owner_is_alive(owner) is False


class LeaseKeeper:
    """Renews the leases that it holds, from a daemon thread that starts with the first of them.

    A lease that turns out to be taken over is remembered as lost, so that its holder can be
    refused without asking the store. The thread never keeps the process alive, and ends with
    `close()` or when the store that it serves is gone.
    """

    def __init__(self, renew: Callable[[Lease], Lease], *, beat: bool = True) -> None:
        # Weak, or the heartbeat would keep alive a store that nothing else refers to.
        self._renew = WeakMethod(renew)
        self._beat = beat
        self._change = threading.Condition()
        self._held: dict[tuple[UUID, int], Lease] = {}
        self._lost: set[tuple[UUID, int]] = set()
        self._thread: threading.Thread | None = None
        self._closed = False
        _KEEPERS.add(self)

    def hold(self, lease: Lease) -> None:
        """Keep this lease alive from now on."""
        with self._change:
            self._closed = False
            self._held[lease.session_id, lease.epoch] = lease
            # A session that was erased and created again counts its epochs from the start.
            self._lost.discard((lease.session_id, lease.epoch))
            if self._beat and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="treenail-lease-keeper", daemon=True)
                self._thread.start()
            self._change.notify_all()

    def drop(self, lease: Lease) -> None:
        """Stop renewing this lease; it was released."""
        with self._change:
            self._held.pop((lease.session_id, lease.epoch), None)

    def lose(self, lease: Lease) -> None:
        """Remember that this lease was taken over."""
        with self._change:
            # Only what was held here can be lost here, so the memory is bounded by the leases taken.
            if self._held.pop((lease.session_id, lease.epoch), None) is not None:
                self._lost.add((lease.session_id, lease.epoch))

    def is_lost(self, lease: Lease) -> bool:
        """Return whether this lease is known to have been taken over."""
        return (lease.session_id, lease.epoch) in self._lost

    def held(self) -> tuple[Lease, ...]:
        """List the leases that are being kept."""
        with self._change:
            return tuple(self._held.values())

    def close(self) -> None:
        """Stop renewing. The leases are not released: that is the store's part."""
        with self._change:
            self._closed = True
            thread, self._thread = self._thread, None
            self._held.clear()
            self._change.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2.0)

    def forget(self) -> None:
        """Hold nothing any more, whatever state a fork has copied."""
        self._change = threading.Condition()
        self._held.clear()
        self._thread = None

    def beat(self) -> None:
        """Renew every held lease once. A failure other than a take-over is tried again next time."""
        for lease in self.held():
            renew = self._renew()
            if renew is None:
                return
            try:
                renewed = renew(lease)
            except StaleWriterError:
                self.lose(lease)
            except LogError:
                continue
            else:
                with self._change:
                    if (lease.session_id, lease.epoch) in self._held:
                        self._held[lease.session_id, lease.epoch] = renewed
            del renew

    def _is_over(self) -> bool:
        return self._closed or self._thread is not threading.current_thread()

    def _run(self) -> None:
        while True:
            with self._change:
                if self._is_over():
                    return
                shortest = min((lease.ttl_s for lease in self._held.values()), default=None)
                self._change.wait(None if shortest is None else shortest / 3)
                if self._is_over():
                    return
            if self._renew() is None:
                return
            self.beat()


_KEEPERS: WeakSet[LeaseKeeper] = WeakSet()


def _forget_in_child() -> None:
    _process.cache_clear()  # In a process namespace of its own the child may have its parent's number.
    # The leases belong to the parent, whose thread was not copied; a lock may have been held.
    for keeper in list(_KEEPERS):
        keeper.forget()


os.register_at_fork(after_in_child=_forget_in_child)


@atexit.register
def _stop_keepers() -> None:
    # A thread that is inside the store while the interpreter is taken down would be cut off there.
    for keeper in list(_KEEPERS):
        keeper.close()
