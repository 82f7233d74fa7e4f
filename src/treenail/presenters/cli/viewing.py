"""`treenail view`: the runs of a project in the browser."""

from __future__ import annotations

import html
import importlib
import ipaddress
import os
import secrets
import socket
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from treenail.errors import UsageError
from treenail.history import find_run
from treenail.presenters.cli.options import complete_run, json_option, store_named, store_option
from treenail.presenters.cli.output import json_text
from treenail.presenters.tokens import read_token
from treenail.providers import install_command


@click.command
@click.argument("run", required=False, shell_complete=complete_run)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port; by default a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--name",
    "names",
    multiple=True,
    help="A name by which browsers reach it, beside its address; may repeat.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, exists=True),
    help="A file with the token; by default a new one at each start.",
)
@click.option("--read-only", is_flag=True, help="Show everything, and refuse whatever acts.")
@click.option("--no-open", is_flag=True, help="Print the address, and open no browser.")
@store_option
@json_option
def view(
    run: str | None,
    port: int,
    host: str,
    names: tuple[str, ...],
    token_file: Path | None,
    read_only: bool,
    no_open: bool,
    store: str | None,
    as_json: bool,
) -> None:
    """Look at runs in the browser, live.

    The page shows what happened, what it cost, what it changed and what the model saw; it answers held calls,
    undoes and forks. It is served on this machine alone, for whoever has the address with the token. RUN
    opens one run: its id, the beginning of it, or @last.

    Example: treenail view @last
    """
    web = _server()
    place = store_named(store)
    run_id = None if run is None else find_run(place, run)
    if not _is_loopback(host) and token_file is None:
        raise UsageError(
            f"{host} can be reached from other machines; name a --token-file, and put TLS in front of it: "
            "the page and the token cross the network as they are"
        )
    token = secrets.token_urlsafe(32) if token_file is None else read_token(token_file)
    listener = _listening(host, port)
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    known = [f"{shown}:{port}", *names, *(f"{name}:{port}" for name in names)]
    if _is_loopback(host):
        known.append(f"localhost:{port}")
    inspector = importlib.import_module("treenail.presenters.web.inspector").Inspector(place)
    app = web.application(inspector, token=token, hosts=known, read_only=read_only)
    address = f"http://{shown}:{port}/"
    shown_address = f"{address}#token={token}" if token_file is None else address
    print(json_text({"url": address, "address": shown_address}) if as_json else shown_address, flush=True)
    with _opened(f"{address}#token={token}" + ("" if run_id is None else f"&run={run_id}"), no_open):
        web.serve(app, listener)


def _server() -> Any:
    try:
        return importlib.import_module("treenail.presenters.web.server")
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise UsageError(
            "the extra 'web' is not installed; in a checkout of Treenail, install it with "
            f"`{install_command('web')}`"
        ) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(
            f"{host} port {port} cannot be used: {error.strerror}; choose another one with --host and --port"
        ) from error


@contextmanager
def _opened(address: str, no_open: bool) -> Iterator[None]:
    """Open a browser, if there is one and a person to look at it.

    Everybody can read the command line of a browser, so the address with the token is in a file of the
    person's own that leads there.
    """
    has_screen = sys.platform == "darwin" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    if no_open or not has_screen or not sys.stdout.isatty():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="treenail-view-") as directory:
        page = Path(directory) / "open.html"
        leads = html.escape(address)
        page.touch(0o600)
        page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0;url={leads}">', "utf-8")
        webbrowser.open(page.as_uri())
        yield
