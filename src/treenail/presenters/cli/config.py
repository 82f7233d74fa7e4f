"""The settings, as a command shows them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click

from treenail.errors import UsageError
from treenail.presenters.cli import models, settings, stores
from treenail.presenters.cli.options import json_option
from treenail.presenters.cli.output import print_json
from treenail.presenters.cli.settings import WrittenRule
from treenail.printable import printable_line


@click.command
@json_option
def show(as_json: bool) -> None:
    """Show every setting, its value, and its source.

    Example: treenail config show
    """
    directory, environ = Path.cwd(), os.environ
    found = settings.load({}, environ, directory)
    shown = {name: (settings.shown_value(each.value), each.source) for name, each in found.chosen.items()}
    if found["store"] is None:
        shown["store"] = (str(stores.store_for(directory, None, environ)), settings.DEFAULT)
    if found["model"] is None and found["base_url"] is None:
        for key, model in models.DEFAULTS:
            if environ.get(key):
                shown["model"] = (model, f"{settings.DEFAULT}, as {key} is set")
                break
    for name in (each for each in found.waiting if each in shown):
        value, source = shown[name]
        shown[name] = (value, f"{source} ({found.file} is not approved)")
    if as_json:
        data: dict[str, object] = {
            name: {"value": value, "source": source} for name, (value, source) in shown.items()
        }
        servers = [asdict(replace(each, table=_without_values(each.table))) for each in found.servers]
        print_json(data | {"rules": [asdict(each) for each in found.rules], "mcp": servers})
        return
    width = max(len(str(value)) for value, _ in shown.values())
    for name, (value, source) in shown.items():
        print(f"{name:<14} {'-' if value is None else value!s:<{width}}  {source}")
    _print_rules(found.rules)
    for server in found.servers:
        state = "" if server.approved else " (not approved)"
        print(f"{'mcp':<14} {printable_line(server.name)}  {server.source}{state}")


def _without_values(table: Mapping[str, object]) -> dict[str, object]:
    """Return a server's table without what may be secret in it."""
    return {
        key: sorted(value) if key in ("env", "headers", "oauth") and isinstance(value, dict) else value
        for key, value in table.items()
    }


def _print_rules(rules: Sequence[WrittenRule]) -> None:
    width = max((len(each.text) for each in rules), default=0)
    for each in rules:
        print(f"{each.kind:<14} {each.text:<{width}}  {each.source}")


@click.command
@click.option("--allow", metavar="RULE", help="Allow what a rule says, in this directory.")
@click.option("--forget", metavar="RULE", help="Take a rule back that you allowed in this directory.")
@click.option(
    "--directory", "-C", type=click.Path(path_type=Path), help="In this directory, instead of here."
)
@json_option
def permissions(allow: str | None, forget: str | None, directory: Path | None, as_json: bool) -> None:
    """Show the rules about calls, and change what you allow.

    A rule is a tool and a pattern. Your own rules are kept outside of the project, where no agent can write.

    Example: treenail permissions --allow "run_command: pytest *"
    """
    place = (directory or Path.cwd()).resolve()
    if allow is not None:
        settings.remember(allow, place)
    if forget is not None:
        settings.forget(forget, place)
    found = settings.load({}, os.environ, place)
    if as_json:
        print_json({"mode": found["permissions"], "rules": [asdict(each) for each in found.rules]})
        return
    print(f"{'permissions':<14} {found['permissions']}")
    _print_rules(found.rules)
    if not found.rules:
        print('no rules yet; allow something with: treenail permissions --allow "run_command: pytest *"')


@click.command
@json_option
def approve(as_json: bool) -> int:
    """Let the project's settings file take effect as it is now.

    A file that runs something or allows more than your own settings has no effect until you have approved
    it. After each change it has to be approved again.

    Example: treenail config approve
    """
    found = settings.load({}, os.environ, Path.cwd())
    if found.file is None:
        raise UsageError("there is no treenail.toml here or above, so there is nothing to approve")
    if found.unapproved:
        settings.approve(found, os.environ)
    if settings.load({}, os.environ, Path.cwd()).unapproved:
        raise UsageError(
            f"{settings.user_directory(os.environ)} lies in this project, where an agent could change it, so "
            "what is approved there does not count; use flags, or set XDG_CONFIG_HOME to another directory"
        )
    if as_json:
        print_json({"file": str(found.file), "approved": list(found.unapproved)})
    else:
        print(f"approved {found.file}: {found.wanted}" if found.wanted else f"{found.file} needs no approval")
    return 0
