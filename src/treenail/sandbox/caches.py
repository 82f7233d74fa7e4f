"""The private caches of a workspace's commands.

Go, cargo, uv, pip and npm keep what they downloaded or built below the home directory, which commands cannot
write to. Their variables lead to a directory of the workspace's own instead: what a command leaves there is
seen by later commands of the same workspace, and by nobody else.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_CACHES = (
    ("GOCACHE", "go-build", ".cache/go-build"),
    ("GOMODCACHE", "go-mod", "go/pkg/mod"),
    ("CARGO_HOME", "cargo", ".cargo"),
    ("UV_CACHE_DIR", "uv", ".cache/uv"),
    ("PIP_CACHE_DIR", "pip", ".cache/pip"),
    ("npm_config_cache", "npm", ".npm"),
)
"""The variable that moves each cache, its name here, and where it is by default in the home directory."""


def cache_directory(workspace: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the directory of a workspace's private caches, which may not exist yet.

    The workspace is a path without links.
    """
    base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or str(Path.home()), ".cache")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(workspace)) or "root"
    digest = hashlib.sha256(os.fsencode(workspace)).hexdigest()[:12]
    return os.path.join(base, "treenail", "commands", f"{name}-{digest}")


def redirected(cache: str, writable: Sequence[Path], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that lead to private caches; a cache that commands may write to stays in place."""
    home = environ.get("HOME") or str(Path.home())
    return {
        variable: f"{cache}/{name}"
        for variable, name, default in _CACHES
        if not any(
            Path(environ.get(variable) or f"{home}/{default}").is_relative_to(each) for each in writable
        )
    }
