"""The process between Treenail and a command; it ensures that no process of the command survives.

This file is run as a script by `treenail.tools.process`, isolated, and imports nothing from Treenail.

Theory of operation
-------------------
A process can leave its process group, its session and its parent: a daemon does all three. It cannot leave
this supervisor, which is a *subreaper*: a descendant that loses its parent becomes a child of the
supervisor. So when the supervisor has no children, every process of the command has ended, and then the
supervisor ends.

The supervisor stops the command when the control pipe is closed, which also happens when Treenail is
killed, or when its parent is no longer the process that started it. Then, and also when the command has
ended and left processes running, it first sends SIGSTOP to every descendant (so that none can start
another meanwhile) and then kills them all.

The control pipe says what to run, or the supervisor's own command line does, before its last two words. In
the second case the command gets the supervisor's outputs and environment, and the supervisor exits with
its exit code. The supervisor passes its input on to the command, except for an end of input because
Treenail died: a program that reads to the end would act on it, and it must not act any more.

The supervisor reports on the status pipe, one line each: `failed ERRNO` (not started), `started PID` (in the
second case), `stopped` (before its own end), `leftover COUNT`, `survived PID ...`, `exited CODE`. The pipe
ends when the supervisor ends.

Where there are no subreapers (only Linux has them) the command's process group is killed instead.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GIVE_UP_AFTER_S = 10.0
END_OF_INPUT_S = 0.1
"""How long the end of the input is held back, to see whether Treenail died."""
PARENT_CHECK_S = 1.0
"""How often to check that Treenail is alive, in case another process holds its end of the pipe."""


def prctl(option: int, value: int) -> bool:
    """Set an attribute of this process; return False if the system cannot."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.prctl(option, value, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def receive(control: int, status: int) -> dict[str, object]:
    """Read what to run, a line of JSON. Exit if the pipe is closed before the line is complete."""
    data = b""
    while not data.endswith(b"\n"):
        chunk = os.read(control, 65_536)
        if not chunk:
            os.write(status, b"stopped\n")
            sys.exit(0)
        data += chunk
    spec: dict[str, object] = json.loads(data)
    return spec


def descendants() -> list[int]:
    """List all descendants of this process, without zombies."""
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # it has ended meanwhile
        # The name in parentheses may contain anything; state and parent follow the last parenthesis.
        state, parent = stat[stat.rindex(b")") + 2 :].split()[:2]
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def send(pid: int, number: int) -> None:
    """Send a signal; ignore a process that has ended or that this one may not signal."""
    try:
        os.kill(pid, number)
    except OSError:
        pass


def kill_all(group: int | None) -> None:
    """Kill every descendant: stop them until no new ones appear, then kill all, and the group if given."""
    stopped: set[int] = set()
    for _ in range(100):
        found = [pid for pid in descendants() if pid not in stopped]
        if not found:
            break
        for pid in found:
            send(pid, signal.SIGSTOP)
        stopped.update(found)
    for pid in stopped:
        send(pid, signal.SIGKILL)
    if group is not None:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            pass  # it is empty


class Reaper:
    """Collects ended children, and remembers the exit code of the command."""

    def __init__(self, command: int) -> None:
        self.command = command
        self.exit_code: int | None = None

    def collect(self) -> bool:
        """Collect all children that have ended; return whether none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.command:
                self.exit_code = os.waitstatus_to_exitcode(status)


def feed(control: int, sink: int) -> None:
    """Pass the supervisor's input on to the command until either of them ends."""
    try:
        while data := os.read(0, 65_536):
            while data:
                data = data[os.write(sink, data) :]
    except OSError:
        pass  # the command has ended
    if not select.select([control], [], [], END_OF_INPUT_S)[0]:
        os.close(sink)


def start(spec: dict[str, object], status: int, source: int | None = None) -> int:
    """Start the command in a session of its own; report and exit if that fails."""
    argv, env, cwd = spec["argv"], spec["env"], spec["cwd"]
    assert isinstance(argv, list)
    assert isinstance(env, dict)
    assert isinstance(cwd, str)
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        if source is not None:
            os.dup2(source, 0)
        # If the supervisor is killed, at least the command itself ends with it.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # Python and the supervisor ignore some signals; the command must not.
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(cwd)
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(status, f"failed {error.errno}\n".encode())
    os._exit(127)


def main() -> int:
    """Run one command to its end."""
    control, status = int(sys.argv[1]), int(sys.argv[2])
    for descriptor in (control, status):
        os.set_inheritable(descriptor, False)
    # Closing the pipe stops the command; a signal that ends the supervisor would let the command escape.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    given = sys.argv[3:-2]
    parent = os.getppid()
    is_subreaper = prctl(PR_SET_CHILD_SUBREAPER, 1)

    def report(line: str) -> None:
        try:
            os.write(status, f"{line}\n".encode())
        except OSError:
            pass  # Treenail has died; finish without it

    if given:
        source, sink = os.pipe()
        own: dict[str, object] = {"argv": given, "env": dict(os.environ), "cwd": os.getcwd()}
        reaper = Reaper(start(own, status, source))
        report(f"started {reaper.command}")
        os.close(source)
        threading.Thread(target=feed, args=(control, sink), daemon=True).start()
    else:
        reaper = Reaper(start(receive(control, status), status))
    while True:
        reaper.collect()
        if reaper.exit_code is not None:
            break
        ready, _, _ = select.select([control, wake_read], [], [], PARENT_CHECK_S)
        if wake_read in ready:
            os.read(wake_read, 4_096)
        if control in ready or os.getppid() != parent:
            report("stopped")
            break

    if reaper.exit_code is not None and (leftover := len(descendants())):
        report(f"leftover {leftover}")
    give_up_at = time.monotonic() + GIVE_UP_AFTER_S
    # The id of a group whose processes were all collected may be reused, so the group is killed only where
    # descendants cannot be found.
    group = None if is_subreaper else reaper.command
    while not reaper.collect():
        if time.monotonic() > give_up_at:
            report("survived " + " ".join(map(str, descendants())))
            break
        kill_all(group)
        if select.select([wake_read], [], [], 0.05)[0]:
            os.read(wake_read, 4_096)
    if reaper.exit_code is not None:
        report(f"exited {reaper.exit_code}")
    if not given:
        return 0
    return 1 if reaper.exit_code is None or reaper.exit_code < 0 else reaper.exit_code


if __name__ == "__main__":
    sys.exit(main())
