"""The commands about other people's MCP servers: mcp list, mcp test, mcp add."""

from __future__ import annotations

import os
import sys
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import click

import treenail.mcp
from treenail.errors import McpError, UsageError
from treenail.mcp import McpServer
from treenail.presenters.cli import settings
from treenail.presenters.cli.options import json_option
from treenail.presenters.cli.output import print_json, print_result
from treenail.presenters.cli.servers import server_of, server_table
from treenail.printable import printable, printable_line
from treenail.sandbox import Mode, Sandbox


@click.command("list")
@json_option
def list_servers(as_json: bool) -> None:
    """List the servers whose tools agents use here.

    They stand in settings files, as [mcp.NAME]. Those of a project count when its file is approved.

    Example: treenail mcp list
    """
    found = settings.load({}, os.environ, Path.cwd())
    rows = []
    for each in found.servers:
        server = server_of(each)
        state = "off" if server is None else "used" if each.approved else "not approved"
        rows.append(
            {
                "name": each.name,
                "state": state,
                "reached": "" if server is None else server.reached,
                "effects": "" if server is None else server.effects,
                "trusted": server is not None and server.trust,
                "source": each.source,
            }
        )
    width = max((len(str(row["name"])) for row in rows), default=0)
    lines = [
        f"{row['name']:<{width}}  {row['state']:<12}  {printable_line(str(row['reached']))}"
        f"{', trusted' if row['trusted'] else ''}{', workspace' if row['effects'] == 'workspace' else ''}"
        f"  ({row['source']})"
        for row in rows
    ]
    if any(row["state"] == "not approved" for row in rows):
        lines.append("approve a project's servers with: treenail config approve")
    nothing = "there are no MCP servers here; add one with: treenail mcp add NAME -- COMMAND"
    print_result(as_json, rows, "\n".join(lines) or nothing)


@click.command
@click.argument("name")
@json_option
def test(name: str, as_json: bool) -> int:
    """Start a server, log in if it asks for it, and show its tools.

    It is started as in a run: in the sandbox, in this directory. Exits 1 if it cannot be used.

    Example: treenail mcp test git
    """
    found = settings.load({}, os.environ, Path.cwd())
    server = _named(found, name)

    def show(url: str) -> None:
        print(
            f"{name} asks for a login. Open this address, and log in:\n{printable_line(url)}", file=sys.stderr
        )

    try:
        # By the door, which loads the SDK now.
        looked = treenail.mcp.inspected(
            replace(server, login=treenail.mcp.at_a_terminal(show)),
            Path.cwd(),
            Sandbox(cast(Mode, found["sandbox"])),
        )
    except ModuleNotFoundError as error:
        raise UsageError(f"`treenail mcp` needs the package {error.name}: pip install '.[mcp]'") from error
    except McpError as error:
        print_result(as_json, {"name": name, "works": False, "error": str(error)}, printable(str(error)))
        return 1
    pin = looked.pin
    tools = [
        {
            "name": each.name,
            "shown_as": each.shown_as,
            "effects": may.effects,
            "idempotent": may.idempotent,
            "asks": may.asks,
        }
        for each, may in looked.tools
    ]
    data = {
        "name": name,
        "works": True,
        "title": pin.title,
        "protocol": pin.protocol,
        "confinement": pin.confinement,
        "fingerprint": pin.fingerprint,
        "tools": tools,
        "refused": list(pin.refused),
    }
    if as_json:
        print_json(data)
        return 0
    print(
        printable_line(
            f"{name} works: {pin.title}, protocol {pin.protocol}, {pin.confinement or 'over HTTP'}"
        )
    )
    for each in tools:
        also = (", may run again" if each["idempotent"] and each["effects"] != "none" else "") + (
            ", asks" if each["asks"] else ""
        )
        print(printable_line(f"  {each['shown_as']}  {each['effects']}{also}"))
    for refused in pin.refused:
        print(printable_line(f"  left out: {refused}"))
    return 0


def _named(found: settings.Settings, name: str) -> McpServer:
    for each in found.servers:
        if each.name == name:
            if not each.approved:
                found.check_approved()
            server = server_of(replace(each, table={**each.table, "enabled": True}))
            assert server is not None
            return server
    known = ", ".join(each.name for each in found.servers) or "none"
    raise UsageError(
        f"there is no MCP server {name!r} in the settings (there are: {known}); add it: treenail mcp add"
    )


@click.command
@click.argument("name")
@click.argument("command", nargs=-1)
@click.option("--url", default="", help="The address of a server that is reached over HTTP.")
@click.option("--trust", is_flag=True, help="Believe the server's hints about its tools.")
@click.option("--workspace", is_flag=True, help="Its tools change files of the workspace and nothing else.")
@click.option("--allow-network", is_flag=True, help="Let its process use the network.")
@click.option(
    "--allow-write", multiple=True, metavar="DIR", help="A directory that its process may write to."
)
@click.option("--env", "pass_env", multiple=True, metavar="NAME", help="A variable of yours that it gets.")
@click.option("--header", multiple=True, metavar="NAME=VALUE", help="A header; ${VARIABLE} is yours.")
@json_option
def add(name: str, command: tuple[str, ...], url: str, as_json: bool, **options: Any) -> None:
    """Add a server to your settings.

    Write the program and its arguments behind --, or name an address with --url.

    Example: treenail mcp add git --trust --workspace -- mcp-server-git
    """
    headers = dict(each.partition("=")[::2] for each in options["header"])
    fields: dict[str, object] = {
        "command": list(command),
        "url": url,
        "trust": options["trust"],
        "effects": "workspace" if options["workspace"] else "",
        "allow_network": options["allow_network"],
        "allow_write": [str(Path(each).expanduser().resolve()) for each in options["allow_write"]],
        "pass_env": list(options["pass_env"]),
        "headers": headers,
    }
    file = settings.user_file(os.environ)
    text = file.read_text("utf-8") if file.is_file() else ""
    table = {key: value for key, value in fields.items() if value not in ("", [], {}, False)}
    server_of(settings.WrittenServer(name, table, str(file)))  # Raises if it is wrong.
    if name in tomllib.loads(text).get(settings.SERVERS, {}):
        raise UsageError(
            f"{file} has an MCP server {name!r} already; change it there, or choose another name"
        )
    _write(file, (text.rstrip("\n") + "\n\n" if text.strip() else "") + server_table(name, table))
    told = f"added {name} to {file}\ntry it with: treenail mcp test {name}"
    print_result(as_json, {"name": name, "file": str(file)}, told)


def _write(file: Path, text: str) -> None:
    """Write the user's settings, all or nothing. Raises `UsageError` if that would spoil them."""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file} cannot be changed here ({error}); add the server by hand") from error
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=".settings-")
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)
        os.fchmod(opened.fileno(), mode)
    os.replace(temporary, file)
