"""The command that an editor starts."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from treenail.errors import UsageError
from treenail.presenters.cli.options import agent_options, flags_of
from treenail.providers import install_command


@click.command
@agent_options
def acp(**options: Any) -> None:
    """Work in an editor, by the Agent Client Protocol.

    An editor starts this and speaks with it over the input and the output; see docs/editors.md for its
    settings. The options hold for each session.

    Example: treenail acp --model anthropic/claude-sonnet-5-5 --ask
    """
    try:
        # The SDK is an extra, and takes a while to import.
        server = importlib.import_module("treenail.presenters.acp.server")
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "acp":
            raise
        raise UsageError(
            "the extra 'acp' is not installed; in a checkout of Treenail, install it with "
            f"`{install_command('acp')}`"
        ) from error
    if sys.stdin.isatty():
        print("treenail acp: waiting for an editor; see docs/editors.md for its settings", file=sys.stderr)
    server.main(flags_of(options))
