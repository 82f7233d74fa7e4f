"""What the tests of workspaces on disk share."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.forks import in_child

T = TypeVar("T")

Tree = dict[bytes, tuple[object, ...]]


def look_at(root: Path, *, times: bool = False) -> Tree:
    """Return everything below a directory by raw name: type, permission bits, content or target."""
    found: Tree = {}
    pending = [os.fsencode(root)]
    while pending:
        directory = pending.pop()
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            status = os.lstat(path)
            key = os.path.relpath(path, os.fsencode(root))
            if stat.S_ISLNK(status.st_mode):
                found[key] = ("link", os.readlink(path))
            elif stat.S_ISDIR(status.st_mode):
                found[key] = ("directory", stat.S_IMODE(status.st_mode))
                pending.append(path)
            elif stat.S_ISREG(status.st_mode):
                content = Path(os.fsdecode(path)).read_bytes()
                found[key] = ("file", stat.S_IMODE(status.st_mode), content)
                if times:
                    found[key] += (status.st_mtime_ns,)
            else:
                found[key] = ("special", stat.S_IFMT(status.st_mode))
    return found


def git(store: Path | None, *arguments: str) -> str:
    """Run git on a private store and return what it prints."""
    environment = {**os.environ, "GIT_DIR": str(store), "GIT_CONFIG_NOSYSTEM": "1", "GIT_PAGER": "cat"}
    result = subprocess.run(["git", *arguments], env=environment, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode("utf-8", "replace")


def as_nobody(work: Callable[[], T]) -> T:
    """Do something in a child process without privileges, where permission bits matter."""

    def without_privileges() -> T:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        return work()

    return in_child(without_privileges)
