"""Prompts: typed sections with their tools, rendered for a model, and its answer read back as a type."""

from treenail.prompt.events import PromptExecuted, PromptRendered, PromptResponse
from treenail.prompt.output import StructuredOutput, output_json
from treenail.prompt.render import (
    PromptDescriptor,
    RenderedPrompt,
    RenderedSection,
    SectionDescriptor,
    ToolDescriptor,
    parse_output,
)
from treenail.prompt.sections import MarkdownSection, Section
from treenail.prompt.template import Prompt, PromptTemplate
from treenail.prompt.visibility import (
    MAX_EXPANSIONS,
    ClearAllVisibilityOverrides,
    ClearVisibilityOverride,
    SectionPath,
    SectionVisibility,
    SetVisibilityOverride,
    VisibilityOverrides,
    expand,
    register_visibility,
)

__all__ = [
    "MAX_EXPANSIONS",
    "ClearAllVisibilityOverrides",
    "ClearVisibilityOverride",
    "MarkdownSection",
    "Prompt",
    "PromptDescriptor",
    "PromptExecuted",
    "PromptRendered",
    "PromptResponse",
    "PromptTemplate",
    "RenderedPrompt",
    "RenderedSection",
    "Section",
    "SectionDescriptor",
    "SectionPath",
    "SectionVisibility",
    "SetVisibilityOverride",
    "StructuredOutput",
    "ToolDescriptor",
    "VisibilityOverrides",
    "expand",
    "output_json",
    "parse_output",
    "register_visibility",
]
