"""What a person can set of a model, and how each provider calls it.

An option that a provider does not have is refused before a call is made: a model that ignores it would be
worse, and so would a vendor's error in the middle of a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treenail.errors import UsageError
from treenail.presenters.cli.settings import Settings

_EFFORTS = ("low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class _Known:
    """The options of a provider."""

    names: Mapping[str, str]
    """How its constructor calls each setting."""
    efforts: tuple[str, ...] = ()
    """The efforts that its interface has; empty if it takes any."""
    max_temperature: float = 2.0


_KNOWN = {
    "openai": _Known(
        {"temperature": "temperature", "effort": "reasoning_effort", "option": "extra"},
        ("none", "minimal", *_EFFORTS),
    ),
    "anthropic": _Known(
        {"temperature": "temperature", "effort": "effort", "option": "extra"}, _EFFORTS, max_temperature=1.0
    ),
    "litellm": _Known({"temperature": "temperature", "effort": "reasoning_effort", "option": "extra"}),
    "claude-agent": _Known({"effort": "effort"}, _EFFORTS),
    "scripted": _Known({}),
}

_ELSEWHERE = ("api_base", "base_url", "api_key", "custom_llm_provider", "extra_headers", "headers", "client")
"""Fields that would lead a request, and with it the user's key, elsewhere."""

_OWN = ("model", "messages", "input", "system", "stream", "tools")
"""Fields that Treenail makes itself."""

MODEL_SETTINGS = ("model", "base_url", "api", "temperature", "effort", "option", "max_output")
"""The settings that say which model answers, and how."""


def model_options(kind: str, settings: Settings) -> dict[str, Any]:
    """Return the arguments of a provider's constructor for what is set. Raises `UsageError`."""
    known = _KNOWN[kind]
    found: dict[str, Any] = {}
    for name in ("temperature", "effort", "option"):
        if settings[name] is None:
            continue
        if name not in known.names:
            has = ", ".join(f"--{each}" for each in known.names) or "none of these options"
            raise UsageError(
                f"--{name} ({settings.chosen[name].source}) means nothing to the provider {kind}, which has "
                f"{has}; leave it out, or choose another model"
            )
        found[known.names[name]] = settings[name]
    temperature, effort = settings.number("temperature"), settings.text("effort")
    if temperature is not None and temperature > known.max_temperature:
        raise UsageError(
            f"--temperature is at most {known.max_temperature:g} for {kind}, not {temperature:g}"
        )
    is_own_server = settings.text("base_url") is not None
    if effort is not None and known.efforts and not is_own_server and effort not in known.efforts:
        raise UsageError(f"--effort is one of {', '.join(known.efforts)} for {kind}, not {effort!r}")
    if "extra" in found:
        found["extra"] = dict(_field(each) for each in settings.lines("option"))
    return found


def _field(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE; a value that is not JSON is text."""
    name, _, value = text.partition("=")
    name = name.strip()
    if name in _ELSEWHERE:
        raise UsageError(f"--option cannot set {name}, which says where a request goes; use --base-url URL")
    if name in _OWN:
        raise UsageError(f"--option cannot set {name}, which Treenail makes itself")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
