"""What the tests of workspaces on disk share."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

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
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # The child runs nothing but the given function.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            answer: tuple[bool, object] = (True, work())
        except BaseException:  # noqa: BLE001  # whatever it is, the parent is told
            answer = (False, traceback.format_exc())
        with open(writing, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        succeeded, value = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    assert succeeded, value
    return value  # type: ignore[no-any-return]  # what the child answered with
