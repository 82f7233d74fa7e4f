"""The process that becomes a command confined by Landlock.

This file is run as a script by `treenail.sandbox.landlock`, isolated, and imports nothing from Treenail. Its
first argument says in JSON what to allow; the others are the command. It gives up its own rights and then
executes the command, which cannot get them back, and neither can any process that the command starts.

Landlock allows trees and cannot except a part of one. So everything that has nothing hidden in it is allowed
for reading, piece by piece; what is made beside such pieces later is not.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import stat
import sys
from collections.abc import Iterator

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System calls, with the same numbers everywhere."""
PR_SET_SECCOMP, PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 22, 23, 24, 38
MIN_ABI = 6
"""From here on (Linux 6.12) signals and abstract sockets can be kept in as well."""
EVERYTHING = (1 << 16) - 1
READ_DIR = 1 << 3
READ = 1 | 1 << 2
"""Executing and reading a file."""
OF_A_FILE = READ | 1 << 1 | 1 << 14 | 1 << 15
"""What a rule for a file may allow: also writing, truncating and device control."""
KEPT_CAPABILITIES = {0, 1, 3, 4}
"""CHOWN, DAC_OVERRIDE, FOWNER and FSETID: what root needs to write other owners' files."""


class Ruleset(ctypes.Structure):
    """`struct landlock_ruleset_attr`."""

    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class PathRule(ctypes.Structure):
    """`struct landlock_path_beneath_attr`."""

    _pack_ = 1
    _fields_ = [("access", ctypes.c_uint64), ("fd", ctypes.c_int32)]


class Filter(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_char_p)]


def abi() -> int:
    """Return the version of Landlock here; 0 if there is none."""
    return max(0, int(ctypes.CDLL(None).syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)))


def check(result: int) -> int:
    """Return what a system call returned. Raises `OSError` if it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def restrict(write: list[str], read: list[str], hidden: list[str], network: bool, program: bytes) -> None:
    """Give up every right of this process but those that are named."""
    libc = ctypes.CDLL(None, use_errno=True)
    # The filter of system calls refuses sockets. Signals, and abstract sockets without the network, go here.
    rules = Ruleset(EVERYTHING, 0, 2 if network else 3)
    ruleset = check(libc.syscall(CREATE_RULESET, ctypes.byref(rules), ctypes.sizeof(rules), 0))

    def allow(path: str, access: int) -> None:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return  # it has gone, or may not be seen anyway
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            access &= OF_A_FILE
        check(libc.syscall(ADD_RULE, ruleset, 1, ctypes.byref(PathRule(access, place)), 0))
        os.close(place)

    allow("/", READ_DIR)
    for path in (*readable("/", hidden), *read):
        allow(path, READ)
    for path in write:
        allow(path, EVERYTHING)
    for name in ("null", "zero", "full", "random", "urandom"):
        allow(f"/dev/{name}", OF_A_FILE)
    if os.geteuid() == 0:
        with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
            last = int(file.read())
        for each in set(range(last + 1)) - KEPT_CAPABILITIES:
            if check(libc.prctl(PR_CAPBSET_READ, each, 0, 0, 0)):
                check(libc.prctl(PR_CAPBSET_DROP, each, 0, 0, 0))
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    check(libc.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)
    check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(Filter(len(program) // 8, program)), 0, 0))


def readable(place: str, hidden: list[str]) -> Iterator[str]:
    """Yield the largest trees in a place that have nothing hidden in them."""
    inside = [each for each in hidden if each == place or each.startswith(place.rstrip("/") + "/")]
    if not inside:
        yield place
    elif place not in inside:
        try:
            names = os.listdir(place)
        except OSError:
            return
        for name in names:
            below = os.path.join(place, name)
            if not os.path.islink(below):
                yield from readable(below, inside)


def main() -> None:
    """Become the command."""
    order = json.loads(sys.argv[1])
    argv = sys.argv[2:]
    try:
        restrict(**order | {"program": base64.b64decode(order["program"])})
    except OSError as error:
        sys.stderr.write(f"treenail: the command was not run, because Landlock refused: {error}\n")
        sys.exit(125)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
