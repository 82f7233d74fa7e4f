"""The environment that the CLI runs in, and what can be read off it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

MOST_TOKENS = "CLAUDE_CODE_MAX_OUTPUT_TOKENS"
"""How long an answer may be at most."""

PATIENCE_S = 7 * 24 * 3600
"""How long the CLI waits for a tool or a hook of ours: they have their own deadlines."""

_BASE_URL = "ANTHROPIC_BASE_URL"
_CONFIG_DIR = "CLAUDE_CONFIG_DIR"
_ELSEWHERE = ("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_FOUNDRY", "CLAUDE_CODE_USE_VERTEX")
"""Each makes the CLI call a cloud whose address it finds by itself."""

_QUIET = {
    # Each of these would make calls that the turn does not know of.
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
    "CLAUDE_CODE_DISABLE_REFUSAL_FALLBACK": "1",
    "CLAUDE_CODE_DISABLE_REFUSAL_RETRY": "1",
    "CLAUDE_CODE_DISABLE_MODEL_ACCESS_FALLBACK": "1",
    "CLAUDE_CODE_MAX_RETRIES": "0",
    "DISABLE_AUTO_COMPACT": "1",
    "DISABLE_COMPACT": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    # Work that outlives its call cannot be part of a transaction.
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
    "CLAUDE_CODE_DISABLE_CRON": "1",
    "CLAUDE_CODE_DISABLE_MCP_TASKS": "1",
    "CLAUDE_CODE_DISABLE_MCP_TASK_BACKGROUND": "1",
    # What the model is told is the prompt's business.
    "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",
    "CLAUDE_CODE_DISABLE_BUNDLED_SKILLS": "1",
    "CLAUDE_CODE_DISABLE_CLAUDE_MDS": "1",
    "CLAUDE_CODE_DISABLE_GIT_INSTRUCTIONS": "1",
    "ENABLE_TOOL_SEARCH": "0",
    "MAX_MCP_OUTPUT_TOKENS": "1000000",
    # Our tools have their own deadlines.
    "MCP_TIMEOUT": "60000",
    "MCP_TOOL_TIMEOUT": str(PATIENCE_S * 1000),
}


def cli_environment(
    *,
    base_url: str | None,
    api_key: str | None,
    config_dir: str | Path | None,
    max_output_tokens: int | None,
    more: Mapping[str, str],
) -> dict[str, str]:
    """Return what is added to this process's environment for the CLI; `more` has the last word."""
    given = {
        _BASE_URL: base_url,
        "ANTHROPIC_API_KEY": api_key,
        _CONFIG_DIR: None if config_dir is None else str(Path(config_dir).absolute()),
        MOST_TOKENS: None if max_output_tokens is None else str(max_output_tokens),
    }
    return {**_QUIET, **{name: value for name, value in given.items() if value is not None}, **more}


def endpoint_in(added: Mapping[str, str]) -> str:
    """Say where the CLI's model calls go; nothing if that is not known."""
    if any(_value(added, name) for name in _ELSEWHERE):
        return ""
    return _value(added, _BASE_URL) or "https://api.anthropic.com"


def config_dir_in(added: Mapping[str, str]) -> Path:
    """Say where the CLI keeps its conversations."""
    config = _value(added, _CONFIG_DIR)
    return Path(config) if config else Path(_value(added, "HOME") or "~").expanduser() / ".claude"


def _value(added: Mapping[str, str], name: str) -> str | None:
    return added.get(name) or os.environ.get(name)
