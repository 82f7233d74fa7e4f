"""Models by name, `VENDOR/MODEL`: each becomes a provider, and its SDK is imported only then."""

from __future__ import annotations

import importlib
from typing import Any

from treenail.errors import UsageError
from treenail.providers.base import Provider

PROVIDERS = {
    "openai": "treenail.providers.openai:OpenAI",
    "anthropic": "treenail.providers.anthropic:Anthropic",
    "litellm": "treenail.providers.litellm:LiteLLM",
    "claude-agent": "treenail.providers.claude_agent:ClaudeAgent",
}
"""Each provider by the name that models, and the extra with its SDK, have it under: where it is."""


def provider_named(text: str, **options: Any) -> Provider:
    """Make the provider of a model such as `anthropic/claude-sonnet-5-5`. Raises `UsageError`."""
    kind, slash, model = text.partition("/")
    if not slash or not kind or not model:
        raise UsageError(
            f"{text!r} does not say whose model it is; write VENDOR/MODEL, such as 'openai/gpt-6.1-terra' or "
            f"'anthropic/claude-sonnet-5-5' (vendors: {', '.join(PROVIDERS)}), or pass a provider such as "
            "OpenAI('gpt-6.1-terra')"
        )
    if kind not in PROVIDERS:
        raise UsageError(unknown_vendor(text))
    made: Provider = provider_class(kind)(model, **options)
    return made


def unknown_vendor(text: str) -> str:
    """Say what to do about a model of a vendor that has no provider of its own."""
    return (
        f"there is no provider {text.partition('/')[0]!r} for the model {text!r}; other vendors are reached "
        f"through LiteLLM: 'litellm/{text}' (in a checkout of Treenail: {install_command('litellm')})"
    )


def provider_class(kind: str) -> Any:
    """Import a provider with its SDK. Raises `UsageError` with the command that installs it."""
    module, _, name = PROVIDERS[kind].partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise UsageError(
            f"the extra {kind!r} is not installed (there is no {error.name or error}); in a checkout of "
            f"Treenail, install it with `{install_command(kind)}`"
        ) from error


def install_command(extra: str) -> str:
    """Return the command that installs Treenail with an extra; it is not published, so in a checkout."""
    return f"pip install '.[{extra}]'"
