"""Models by name: each becomes a provider, and its SDK is imported only then."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from treenail.conversation import ReplayItem
from treenail.errors import UsageError
from treenail.presenters.cli import preflight
from treenail.presenters.cli.model_options import model_options
from treenail.presenters.cli.settings import Settings
from treenail.providers import (
    PROVIDERS,
    ModelEvent,
    ModelRequest,
    Provider,
    bounds_output,
    provider_class,
    unknown_vendor,
)
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.tools import ToolCall

NO_PROVIDER = (
    "no model is configured: set OPENAI_API_KEY or ANTHROPIC_API_KEY, or name your own server with "
    "--base-url URL --model NAME. To see what Treenail does without any model, run `treenail demo`"
)

DEFAULTS = (
    ("ANTHROPIC_API_KEY", "anthropic/claude-sonnet-5-5"),
    ("OPENAI_API_KEY", "openai/gpt-6.1-terra"),
)
"""The model to use if none is named: the first one whose key is set."""


def provider_for(settings: Settings, environ: Mapping[str, str], *, asks: bool = False) -> Provider:
    """Make the provider that the settings name. Raises `UsageError` if that is impossible.

    With `asks`, the model's server is asked first whether a run can begin.
    """
    kind, model = _kind_and_model(settings, environ)
    options = model_options(kind, settings)
    if kind == "scripted":
        return scripted(Path(model))
    base_url = settings.text("base_url")
    preflight.check_settings(kind, model, base_url, environ)
    if not asks:
        return _made(kind, model, options, base_url, settings)
    inquiry = None if settings["trust_model"] else preflight.Inquiry(kind, model, base_url, environ)
    made = _made(kind, model, options, base_url, settings)
    if inquiry is not None:
        inquiry.check()
    if settings["max_cost"] is not None and settings["unknown_price"] == "halt" and not has_price(made):
        raise UsageError(
            f"no price is known for {model!r}, so --max-cost cannot be kept; use --unknown-price warn to "
            "leave its cost uncounted, or look for a newer table with `treenail prices fetch`"
        )
    return made


def has_price(provider: Provider) -> bool:
    """Whether the most that an answer of a model can cost is known."""
    request = ModelRequest((ReplayItem("user", "Hi"),))
    return bounds_output(provider) and provider.estimate_usd(request) is not None


def _made(
    kind: str, model: str, options: dict[str, Any], base_url: str | None, settings: Settings
) -> Provider:
    if base_url is not None and kind != "claude-agent":
        options["base_url"] = base_url
    if (most := settings.number("max_output")) is not None:
        options["max_output_tokens"] = int(most)
    if kind == "openai":
        options["api"] = settings.text("api") or ("responses" if base_url is None else "chat")
    try:
        made: Provider = provider_class(kind)(model, **options)
    except UsageError as error:
        # The library's advice names arguments; a person here has variables and flags.
        said = re.sub(r",? or pass api_key=", "", str(error)).replace("pass base_url=", "use --base-url URL")
        raise UsageError(said) from error
    return made


def _kind_and_model(settings: Settings, environ: Mapping[str, str]) -> tuple[str, str]:
    named, base_url = settings.text("model"), settings.text("base_url")
    if named is not None:
        kind, slash, model = named.partition("/")
        if slash and kind in (*PROVIDERS, "scripted"):
            if not model:
                raise UsageError(f"the model {named!r} has no name after its provider; write {kind}/NAME")
            return kind, model
        if named.startswith("scripted:"):
            return "scripted", named.removeprefix("scripted:")
        if base_url is None and named.startswith("claude"):
            return "anthropic", named
        if base_url is None and slash:
            raise UsageError(unknown_vendor(named) + ", or name a server that has it with --base-url URL")
        return "openai", named
    if base_url is not None:
        raise UsageError(f"the server {base_url} needs the name of a model; add --model NAME")
    for key, model in DEFAULTS:
        if environ.get(key):
            kind, _, name = model.partition("/")
            return kind, name
    raise UsageError(NO_PROVIDER)


def same_provider(named: str, remembered: Mapping[str, str]) -> bool:
    """Say whether a model's name leads to the provider, and the server, that a run has had."""
    kind, slash, _ = named.partition("/")
    before, had, _ = remembered.get("model", "").partition("/")
    if not (slash and kind in (*PROVIDERS, "scripted")) and not named.startswith("scripted:"):
        # A bare name is a model of the run's own server, if it has one.
        return "base_url" in remembered
    return bool(had) and kind == before


def known_names() -> list[str]:
    """Return the names of models that can be completed: the usual ones, with their providers."""
    return [
        *(name for _, name in DEFAULTS),
        "anthropic/claude-opus-5-5",
        "anthropic/claude-haiku-5-5",
        "openai/gpt-6.1-sol",
        "openai/gpt-6-luna",
    ]


class TaskScripts:
    """Answers each conversation from its own script: the one whose key its task begins with."""

    name = model = "scripted"

    def __init__(self, scripts: Mapping[str, list[Answer]]) -> None:
        # The longest key first: an empty one is for every other task.
        ordered = sorted(scripts.items(), key=lambda each: -len(each[0]))
        self._scripts = [(key, ScriptedProvider(answers)) for key, answers in ordered]

    def _script(self, request: ModelRequest) -> ScriptedProvider:
        task = next((each.text for each in request.items if each.role == "user"), "")
        return next((each for key, each in self._scripts if task.startswith(key)), ScriptedProvider([]))

    def estimate_usd(self, request: ModelRequest) -> float | None:
        """Return the cost of the next answer."""
        return self._script(request).estimate_usd(request)

    def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Yield the next answer of this conversation."""
        return self._script(request).stream(request)


def scripted(path: Path) -> Provider:
    """Make a model that reads from a file: a list of answers, or a list for each beginning of a task.

    An answer is a text, or an object with text, calls and cost_usd.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"the script {path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        return ScriptedProvider(_answers(data, str(path)))
    return TaskScripts({str(key): _answers(each, f"{path}, {key!r}") for key, each in data.items()})


def _answers(data: object, path: str) -> list[Answer]:
    if not isinstance(data, list):
        raise UsageError(f"the script {path} must be a list of answers")
    return [_answer(each, f"{path}, answer {number}") for number, each in enumerate(data, start=1)]


def _answer(data: object, place: str) -> Answer:
    if isinstance(data, str):
        return Answer(data)
    if not isinstance(data, dict) or not data.keys() <= {"text", "calls", "cost_usd"}:
        raise UsageError(f"{place} must be a text, or an object with text, calls and cost_usd")
    calls: list[tuple[str, Mapping[str, Any]] | ToolCall] = []
    for call in data.get("calls", ()):
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise UsageError(f"{place} has a call without a name")
        calls.append((call["name"], call.get("arguments") or {}))
    cost = data.get("cost_usd")
    return Answer(str(data.get("text", "")), calls, cost_usd=None if cost is None else float(cost))
