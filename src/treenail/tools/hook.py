"""What a hook is: when it runs, which command, and for which calls. `hooks.py` runs them."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from treenail.errors import UsageError
from treenail.workspace import compile_glob

When = Literal["before", "after", "turn_end"]

WHENS: tuple[When, ...] = ("before", "after", "turn_end")


@dataclass(frozen=True, slots=True)
class Hook:
    """A command around tool calls, or at the end of a turn."""

    when: When
    command: str
    tools: tuple[str, ...] = ("*",)
    """The names of the tools that it belongs to, with `*` and `?`."""
    paths: tuple[str, ...] = ()
    """Globs, of which a path of the call, or of what is in its directory, must match one; empty for all."""
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.when not in WHENS:
            raise UsageError(f"a hook runs {', '.join(WHENS)}, not {self.when!r}")
        if not self.command.strip():
            raise UsageError("a hook needs a command")
        if not 0 < self.timeout_s <= 3_600:
            raise UsageError(f"a hook's timeout_s is {self.timeout_s}; it must be more than 0, at most 3600")
        for each in self.paths:
            compile_glob(each)

    def is_for(self, tool: str) -> bool:
        """Say whether the hook belongs to calls of a tool."""
        return self.when != "turn_end" and any(fnmatch.fnmatchcase(tool, each) for each in self.tools)

    def matches(self, paths: Sequence[str]) -> bool:
        """Say whether the hook belongs to a call with these paths."""
        return not self.paths or any(
            compile_glob(glob).matches(path) for glob in self.paths for path in paths
        )
