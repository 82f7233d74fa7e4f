"""What fills a model's context: the parts of the next request, with their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treenail.conversation import BYTES_PER_TOKEN, Replayer, known_window
from treenail.prompt import ProjectRead, newest_project_of
from treenail.providers import tool_tokens
from treenail.state import Session
from treenail.tools import Tool

_ROLES = {
    "user": "requests, files and notes",
    "assistant": "the model's answers and calls",
    "tool": "results of tools",
}


@dataclass(frozen=True, slots=True)
class ContextUse:
    """How full a context is, and with what."""

    parts: tuple[tuple[str, int], ...]
    """What is in it, each with an estimate of its tokens."""
    tokens: int
    """All of it: what the provider counted last, and an estimate of what was added since."""
    window: int | None
    """How many tokens fit; None if the model is not known."""

    @property
    def ratio(self) -> float | None:
        """Which part of the context is used."""
        return None if self.window is None else self.tokens / self.window


def context_of(
    session: Session | None,
    *,
    model: str,
    instructions: str,
    tools: Sequence[Tool[Any, Any]],
    project: ProjectRead | None = None,
) -> ContextUse:
    """Measure what the model would be sent next; without a session, what every request begins with.

    `project` is what is read of the project now; a run that has begun knows what it read then.
    """
    beside = tool_tokens(tools)
    replayer = Replayer(model)
    if session is not None:
        replayer.catch_up(session)
        project = newest_project_of(session) or project
    replayed = replayer.input()
    sizes: dict[str, int] = {}
    for each in replayed.items:
        sizes[each.role] = sizes.get(each.role, 0) + _tokens(len(each.canonical()))
    files = () if project is None else project.files
    told = [(each.path, _tokens(len(each.text.encode()))) for each in files]
    of_files = sum(tokens for _, tokens in told)
    system = sizes.get("system", 0) or _tokens(len(instructions.encode())) + of_files
    parts = [("instructions", max(system - of_files, 0)), *told, ("descriptions of tools", beside)]
    parts += [(name, sizes[role]) for role, name in _ROLES.items() if role in sizes]
    total = replayed.token_estimate(beside) if sizes else system + beside
    return ContextUse(tuple(parts), total, known_window(model))


def _tokens(size: int) -> int:
    return -(-size // BYTES_PER_TOKEN)
