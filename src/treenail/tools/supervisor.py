"""The process between Treenail and a command: it sees to it that nothing of the command survives.

This file is run as a script by `treenail.tools.process`, isolated, and imports nothing of Treenail.

Theory of operation
-------------------
A command can leave its process group, its session and its parent: a daemon does all three. It cannot
leave this process, which makes itself a *subreaper*: whatever loses its parent becomes our child. So "no
children are left" means that nothing that the command started is left, and that is when we end.

The command is to be stopped when the control pipe is closed, which also happens when Treenail itself is
killed, or when our parent is no longer the process that started us. Then, and also when the command has
ended and left something running, every descendant is stopped first (so that none can start another while
we count them) and then killed.

What to run comes on the control pipe, or stands on our own command line before the last two words: then
the command has our outputs and our environment, and we end as it did. Our input is passed on to it, except
for an end that comes because Treenail died: a program that reads on to its end would do something about it,
and it is to do nothing any more.

What happens is reported on the status pipe, one line each: `failed ERRNO` (not started), `stopped` (before
its own end), `leftover COUNT`, `survived PID ...`, `exited CODE`. The end of the pipe is our end.

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
"""How long the end of the input is held back, to see whether it is the end of everything."""
PARENT_CHECK_S = 1.0
"""How often to look whether Treenail is still there, in case somebody else holds its end of the pipe."""


def prctl(option: int, value: int) -> bool:
    """Set an attribute of this process; False where that cannot be done."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.prctl(option, value, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def receive(control: int, status: int) -> dict[str, object]:
    """Read what to run: a line of JSON. If the pipe is closed before it has come, nothing is run."""
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
    """List everything below this process, as the kernel knows it; zombies are left out."""
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
        # The name in parentheses may hold anything; the state and the parent come after the last one.
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
    """Send a signal to a process that may have ended, or may not be ours to signal."""
    try:
        os.kill(pid, number)
    except OSError:
        pass


def kill_all(group: int | None) -> None:
    """Kill every descendant: stop them all first, until no new ones turn up. Then the group, if given."""
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
            pass  # nobody is left in it


class Reaper:
    """Collects children that have ended, and remembers how the command itself did."""

    def __init__(self, command: int) -> None:
        self.command = command
        self.exit_code: int | None = None

    def collect(self) -> bool:
        """Take in everything that has ended by now; say whether nothing is left."""
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
    """Pass our input on to the command until it ends or the command does."""
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
        # If we are killed, at least the command itself ends with us.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # Python ignores some signals, and we ignored others: the command starts with none ignored.
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
    # Whoever wants the command stopped closes the pipe; a signal to us would only let the command escape.
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
            pass  # nobody is left to listen; the work goes on

    if given:
        source, sink = os.pipe()
        own: dict[str, object] = {"argv": given, "env": dict(os.environ), "cwd": os.getcwd()}
        reaper = Reaper(start(own, status, source))
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
    # A group whose processes have all been collected may be somebody else's by now, so it is killed only
    # where descendants cannot be found.
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
