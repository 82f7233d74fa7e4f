"""`treenail mcp serve`: the runs of a directory as tools for other programs."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import click

from treenail.errors import UsageError
from treenail.presenters.cli.options import agent_options, directory_option, flags_of
from treenail.presenters.tokens import read_token


@click.command
@click.option(
    "--http",
    is_flag=True,
    help="Serve streamable HTTP on this machine, instead of standard input and output.",
)
@click.option("--port", type=int, default=0, help="The port for --http; by default a free one.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, exists=True),
    help="The token for --http; by default a new one.",
)
@agent_options
@directory_option
def serve(http: bool, port: int, token_file: Path | None, directory: Path | None, **options: Any) -> int:
    """Serve the runs of this directory as tools for other programs.

    The model, the ceilings and the sandbox are those of the options and settings; a client can lower
    ceilings, and change nothing else. When the server stops, its runs are interrupted, and can be resumed.

    For Claude Code: claude mcp add treenail -- treenail mcp serve

    Example: treenail mcp serve --max-cost 0.50
    """
    if importlib.util.find_spec("mcp") is None:
        raise UsageError("`treenail mcp` needs an extra; in the checkout: pip install '.[mcp]'")
    from treenail.presenters.mcp.runs import Runs
    from treenail.presenters.mcp.server import server_for

    runs = Runs(flags_of(options), directory or Path.cwd())

    def stop(number: int, frame: FrameType | None) -> None:
        # The thread that reads the input cannot be woken, so the process ends here.
        runs.close()
        os._exit(128 + number)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)
    server = server_for(runs)
    try:
        if not http:
            server.run()
            return 0
        from treenail.presenters.mcp.http import PATH, listening
        from treenail.presenters.mcp.http import serve as serve_http

        token = secrets.token_urlsafe(32) if token_file is None else read_token(token_file)
        listener = listening(port)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}{PATH}"
        print(f"serving {url}", file=sys.stderr)
        if token_file is None:
            print(f"token: {token}", file=sys.stderr, flush=True)
        serve_http(server, listener, token)
        return 0
    finally:
        runs.close()
