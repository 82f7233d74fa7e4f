"""What the log keeps of prompts, and what an evaluation returns. All of it is history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Generic, cast
from uuid import UUID

from treenail.clock import new_id
from treenail.log import Channel, SlicePolicy
from treenail.prompt.output import OutputT
from treenail.prompt.render import PromptDescriptor, RenderedPrompt
from treenail.prompt.template import Prompt
from treenail.prompt.values import as_data, is_record
from treenail.state import RunContext, TokenUsage, event


# No slots: Python 3.11 cannot construct a frozen generic with slots through `PromptResponse[Out](...)`.
@dataclass(frozen=True)
class PromptResponse(Generic[OutputT]):
    """What an evaluation came to."""

    prompt_name: str
    text: str | None = None
    """What the model wrote."""
    output: OutputT | None = None
    """The answer as the prompt's output type."""

    def typed_outputs(self) -> tuple[object, ...]:
        """Return the output's records, to be dispatched into their slices; none for text."""
        if self.output is None:
            return ()
        items = self.output if isinstance(self.output, (list, tuple)) else (self.output,)
        return tuple(each for each in items if is_record(type(each)))


@event(name="treenail.PromptRendered", channel=Channel.AUDIT, policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class PromptRendered:
    """A prompt was made into text for a model."""

    prompt_ns: str
    prompt_key: str
    prompt_name: str | None
    adapter: str
    session_id: UUID | None
    render_inputs: Mapping[str, object]
    """What was bound to it, as JSON data."""
    rendered_prompt: str
    created_at: datetime
    descriptor: PromptDescriptor | None = None
    run_context: RunContext | None = None
    event_id: UUID = field(default_factory=new_id)
    tools: tuple[str, ...] = ()
    """The tools that the model is given, in the order in which every request has them."""

    @classmethod
    def of(
        cls,
        prompt: Prompt[Any],
        rendered: RenderedPrompt[Any],
        *,
        adapter: str,
        session_id: UUID | None,
        created_at: datetime,
        run_context: RunContext | None = None,
    ) -> PromptRendered:
        """Make the event of a rendering."""
        return cls(
            prompt_ns=prompt.ns,
            prompt_key=prompt.key,
            prompt_name=prompt.name,
            adapter=adapter,
            session_id=session_id,
            render_inputs=prompt.render_inputs,
            rendered_prompt=rendered.text,
            created_at=created_at,
            descriptor=rendered.descriptor,
            run_context=run_context,
            tools=tuple(tool.name for tool in rendered.tools),
        )


@event(name="treenail.PromptExecuted", channel=Channel.AUDIT, policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class PromptExecuted:
    """A prompt was evaluated. The output stands here as JSON data; its records stand in their own slices."""

    prompt_name: str
    adapter: str
    result: PromptResponse[object]
    session_id: UUID | None
    created_at: datetime
    usage: TokenUsage | None = None
    run_context: RunContext | None = None
    event_id: UUID = field(default_factory=new_id)

    @classmethod
    def of(
        cls,
        response: PromptResponse[Any],
        *,
        adapter: str,
        session_id: UUID | None,
        created_at: datetime,
        usage: TokenUsage | None = None,
        run_context: RunContext | None = None,
    ) -> PromptExecuted:
        """Make the event of an evaluation."""
        if response.output is not None:
            response = replace(response, output=as_data(response.output))
        return cls(
            prompt_name=response.prompt_name,
            adapter=adapter,
            result=cast("PromptResponse[object]", response),
            session_id=session_id,
            created_at=created_at,
            usage=usage,
            run_context=run_context,
        )
