"""The filter of system calls for commands, as a program for the kernel.

A list of what is refused, not of what is allowed: commands are compilers, test suites and whatever a project
needs. Refused is what could change the sandbox itself or reach beyond it: mounts, new user namespaces,
tracing, the kernel's keyrings, BPF, io_uring (whose operations no filter sees), typing into a terminal, and
set-uid bits: a program in the workspace that gives its caller the user's rights would outlive the sandbox.
`clone3` and `openat2` are reported as missing, because what they are asked cannot be inspected; programs then
use `clone` and `openat`.
"""

from __future__ import annotations

import errno
import functools
import platform
import struct
from collections.abc import Sequence

_LOAD, _EQUAL, _AND_SET, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCH, _FIRST, _SECOND, _THIRD, _FOURTH = 0, 4, 16, 24, 32, 40
"""Where the kernel puts the call's number, its architecture and its arguments."""

_NEW_USER = 0x10000000
_NEW_ANY = 0x7E020080
"""The flags of `unshare` and `clone` that make a user namespace, and those that make any namespace."""
_SET_UID = 0o4000
_CREATES = 0o20000100
"""O_CREAT and O_TMPFILE: without them the mode of `open` means nothing."""
_MODES = {
    "chmod": _SECOND, "fchmod": _SECOND, "fchmodat": _THIRD, "fchmodat2": _THIRD,
    "creat": _SECOND, "mknod": _SECOND, "mknodat": _THIRD,
}  # fmt: skip
_OPENS = {"open": (_SECOND, _THIRD), "openat": (_THIRD, _FOURTH)}
"""Where system calls have a mode; those that open a file, their flags and a mode."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which put text into a terminal as if a person had typed it."""

# From 403 on, the numbers of new system calls are the same everywhere.
_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438,
    "mount_setattr": 442, "quotactl_fd": 443, "open_tree_attr": 467,
}  # fmt: skip
_MACHINES = {
    "x86_64": (0xC000003E, {
        "ioctl": 16, "socket": 41, "clone": 56, "unshare": 272, "chmod": 90, "fchmod": 91, "fchmodat": 268,
        "fchmodat2": 452, "creat": 85, "mknod": 133, "mknodat": 259, "open": 2, "openat": 257,
    }, {
        "ptrace": 101, "syslog": 103, "vhangup": 153, "pivot_root": 155, "adjtimex": 159, "chroot": 161,
        "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168,
        "reboot": 169, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl":
        179, "clock_settime": 227, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
        "perf_event_open": 298, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
        "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    }),
    "aarch64": (0xC00000B7, {
        "ioctl": 29, "socket": 198, "clone": 220, "unshare": 97, "fchmod": 52, "fchmodat": 53,
        "fchmodat2": 452, "mknodat": 33, "openat": 56,
    }, {
        "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "vhangup": 58, "quotactl": 60, "acct":
        89, "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog":
        116, "ptrace": 117, "reboot": 142, "settimeofday": 170, "adjtimex": 171, "add_key": 217,
        "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "perf_event_open": 241,
        "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "bpf": 280, "userfaultfd": 282,
        "kexec_file_load": 294,
    }),
}  # fmt: skip
_NOT_INSPECTABLE = (435, 437)
"""`clone3` and `openat2`."""
_X32 = 0x40000000
"""The other calling convention of x86_64, whose numbers are these ones and up; nobody uses it."""


def refused_calls(machine: str | None = None) -> dict[str, int]:
    """Return the numbers of the system calls that are refused whatever their arguments are, by name."""
    return {**_EVERYWHERE, **_MACHINES[machine or platform.machine()][2]}


@functools.cache
def program(machine: str | None = None, *, sockets: bool = True) -> bytes | None:
    """Return the filter for a machine, this one by default; None if its system calls are not known here.

    Without `sockets` none can be made: the network is unreachable, and so are programs that listen by path.
    """
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    arch, inspected, _ = known
    allow, refuse, missing = _ALLOW, _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    lines = [_step(_LOAD, _ARCH), *_return_unless(_EQUAL, arch, missing), _step(_LOAD, _NUMBER)]
    lines += _return_if(_AT_LEAST, _X32, missing)
    for number in _NOT_INSPECTABLE:
        lines += _return_if(_EQUAL, number, missing)
    for number in sorted(refused_calls(machine).values()):
        lines += _return_if(_EQUAL, number, refuse)
    if not sockets:
        lines += _return_if(_EQUAL, inspected["socket"], _ERRNO | errno.ENETUNREACH)
    # An inspected call ends with its own verdict, so that the number does not have to be loaded again.
    lines += _inspect(inspected["unshare"], _FIRST, _AND_SET, (_NEW_ANY,))
    lines += _inspect(inspected["clone"], _FIRST, _AND_SET, (_NEW_USER,))
    lines += _inspect(inspected["ioctl"], _SECOND, _EQUAL, _TERMINAL_INPUT)
    for name, mode in _MODES.items():
        if name in inspected:
            lines += _inspect(inspected[name], mode, _AND_SET, (_SET_UID,))
    for name, (flags, mode) in _OPENS.items():
        if name in inspected:
            creates = [_step(_LOAD, flags), *_return_unless(_AND_SET, _CREATES, allow)]
            lines += _inspect(inspected[name], mode, _AND_SET, (_SET_UID,), first=creates)
    lines.append(_step(_RETURN, allow))
    return b"".join(lines)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _return_if(test: int, value: int, verdict: int) -> list[bytes]:
    return [_step(test, value, 0, 1), _step(_RETURN, verdict)]


def _return_unless(test: int, value: int, verdict: int) -> list[bytes]:
    return [_step(test, value, 1, 0), _step(_RETURN, verdict)]


def _inspect(
    number: int, argument: int, test: int, values: tuple[int, ...], first: Sequence[bytes] = ()
) -> list[bytes]:
    """Refuse a call if the lower half of an argument matches; the kernel ignores the upper half too."""
    body = [*first, _step(_LOAD, argument)]
    for value in values:
        body += _return_if(test, value, _ERRNO | errno.EPERM)
    body.append(_step(_RETURN, _ALLOW))
    return [_step(_EQUAL, number, 0, len(body)), *body]
