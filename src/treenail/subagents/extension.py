"""Give a loop subagents for the length of its run: the tools, and the supervision behind them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

from treenail.agent import Agent
from treenail.prompt.sections import MarkdownSection
from treenail.prompt.template import Prompt
from treenail.providers.base import Provider
from treenail.subagents.limits import SubagentLimits
from treenail.subagents.runner import ChildRunner, LoopRunner
from treenail.subagents.supervision import Subagents
from treenail.subagents.tools import subagent_tools
from treenail.tools.tool import Tool
from treenail.turns.turn import InnerLoop

GUIDE = (
    "You can hand parts of the work to subagents. They do not see this conversation, so a task must say "
    "everything. Start those that do not depend on each other together, and wait for them before you rely on "
    "what they do; what is still at work when you give your answer is cancelled."
)
"""What a model is told about its subagents, besides what the tools say."""

Extension = Callable[[InnerLoop], AbstractAsyncContextManager[object]]
"""Is entered with a loop before its turn runs, and left when the turn has ended."""


def with_subagents(
    agents: Sequence[Agent] | Mapping[str, Agent],
    *,
    limits: SubagentLimits | None = None,
    provider: Provider | Callable[[Agent], Provider] | None = None,
    runner: ChildRunner | None = None,
) -> Extension:
    """Let a loop's model use these agents as subagents.

    They use the loop's own provider unless another is given, and work inside its containment and
    permissions. When the turn has ended, whatever is still at work is cancelled, with evidence.
    """

    @asynccontextmanager
    async def extend(loop: InnerLoop) -> AsyncIterator[Subagents]:
        chosen = runner or LoopRunner(provider if provider is not None else loop.provider)
        async with Subagents(
            loop.state,
            agents,
            runner=chosen,
            limits=limits,
            containment=loop.containment,
            permissions=loop.permissions,
        ) as subagents:
            before = loop.prompt
            loop.prompt = _extended(before, subagent_tools(subagents))
            try:
                yield subagents
            finally:
                loop.prompt = before

    return extend


def _extended(prompt: Prompt[Any], tools: Sequence[Tool[Any, Any]]) -> Prompt[Any]:
    """Return a prompt with one section more, which holds the tools."""
    section: MarkdownSection[Any] = MarkdownSection("Subagents", template=GUIDE, tools=tuple(tools))
    template = prompt.template
    return type(prompt)(replace(template, sections=(*template.sections, section)))
