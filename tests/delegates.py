"""An object that has what another one has, which `isinstance` does not see from Python 3.12 on."""

from __future__ import annotations

from typing import Any


class PassesOn:
    """Has whatever another object has, and finds it when it is asked."""

    def __init__(self, behind: object) -> None:
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)
