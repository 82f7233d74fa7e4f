"""Tokens of servers on this machine, read from a file."""

from __future__ import annotations

from pathlib import Path

from treenail.errors import UsageError


def read_token(file: Path) -> str:
    """Read the token. Raises `UsageError` if others may read the file too, or if it is too short."""
    if file.stat().st_mode & 0o077:
        raise UsageError(f"{file} can be read by other users; make it yours alone: chmod 600 {file}")
    token = file.read_text("utf-8").strip()
    if len(token) < 16:
        raise UsageError(f"{file} holds {len(token)} characters; a token needs at least 16")
    return token
