"""A delegating object, whose attributes a protocol's `isinstance` does not see from Python 3.12 on."""

from __future__ import annotations

from typing import Any


class PassesOn:
    """Delegates every attribute to another object, at the time of access."""

    def __init__(self, behind: object) -> None:
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)
