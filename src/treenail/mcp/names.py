"""The names that models see for the tools of servers.

A model sees `git__git_status`: the server's name, two underscores, and the tool's own name. So two servers
may have tools of one name. What models do not take (capitals, dots, slashes, a name that is too long) is
replaced, and a hash of the tool's real name is added, so that two tools never share a name. The run's log has
both names.
"""

from __future__ import annotations

import hashlib
import re

MAX_SERVER_NAME = 24
"""How long the name of a server may be."""

_MAX = 64
_SERVER = re.compile(r"[a-z0-9]+(?:[_-][a-z0-9]+)*")
_OTHER = re.compile(r"[^a-z0-9_-]")


def is_server_name(name: str) -> bool:
    """Say whether a server may have this name. Two underscores in a row would end it in a tool's name."""
    return len(name) <= MAX_SERVER_NAME and _SERVER.fullmatch(name) is not None


def shown_name(server: str, tool: str) -> str:
    """Return the name that models see for a server's tool; always the same for the same two."""
    plain = _OTHER.sub("_", tool.lower())
    whole = f"{server}__{plain}"
    if plain == tool and len(whole) <= _MAX:
        return whole
    digest = hashlib.sha256(tool.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{whole[: _MAX - 9]}_{digest}"
