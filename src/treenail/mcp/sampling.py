"""A server's questions to the model: off by default; else contained and priced like any model call."""

from __future__ import annotations

from dataclasses import dataclass, field

import mcp_types as wire

from treenail.errors import TreenailError
from treenail.judges import NestedEvaluator, NestedExecutionConfig, NestedExecutionContext
from treenail.mcp.results import messages_as_text
from treenail.mcp.server import McpServer
from treenail.prompt import MarkdownSection, Prompt
from treenail.state import Budget
from treenail.tools import ToolContext
from treenail.turns import InnerLoop

_MAX_CHARS = 100_000


@dataclass(slots=True, eq=False)
class Sampler:
    """Asks the run's model for a server, in an isolated child session, within the run's limits."""

    server: McpServer
    loop: InnerLoop
    config: NestedExecutionConfig = field(default_factory=NestedExecutionConfig)

    async def answer(
        self, params: wire.CreateMessageRequestParams, context: ToolContext
    ) -> wire.CreateMessageResult | wire.ErrorData:
        """Return what the model says, or why it was not asked."""
        try:
            text = messages_as_text(params.messages)
            if len(text) + len(params.system_prompt or "") > _MAX_CHARS:
                raise ValueError(f"the request has more than {_MAX_CHARS:,} characters")
            said = await self._ask(params, text, context)
        except (TreenailError, ValueError) as error:
            return wire.ErrorData(code=wire.INVALID_REQUEST, message=f"the model was not asked: {error}")
        return wire.CreateMessageResult(
            role="assistant",
            content=wire.TextContent(text=said),
            model=self.loop.provider.model,
            stop_reason="endTurn",
        )

    async def _ask(self, params: wire.CreateMessageRequestParams, text: str, context: ToolContext) -> str:
        adapter = self.loop.adapter
        if adapter is None:
            raise ValueError("this run has no model to ask")
        system = params.system_prompt or "Answer the request."
        prompt: Prompt[str] = Prompt(
            ns="mcp",
            key=f"sampling-{self.server.name}",
            name=f"mcp-{self.server.name}",
            sections=[
                MarkdownSection("Instructions", template=system.replace("$", "$$")),
                MarkdownSection("Request", template=text.replace("$", "$$")),
            ],
        )
        nested = NestedExecutionContext(
            parent_session=self.loop.state.session,
            parent_run_context=context.run_context,
            deadline=context.deadline,
            budget=Budget(max_output_tokens=max(min(params.max_tokens, self.server.max_sampling_tokens), 1)),
            containment=self.loop.containment,
            cancellation=context.cancellation,
            config=self.config,
        )
        found = await NestedEvaluator(adapter, prompt=prompt, context=nested).aevaluate()
        if found.error is not None:
            raise ValueError(str(found.error))
        return str(found.output)
