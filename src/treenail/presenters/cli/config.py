"""The settings, as a command shows them."""

from __future__ import annotations

import os
from pathlib import Path

import click

from treenail.errors import UsageError
from treenail.presenters.cli import models, settings, stores
from treenail.presenters.cli.options import json_option
from treenail.presenters.cli.output import print_json


@click.command
@json_option
def show(as_json: bool) -> None:
    """Show every setting, its value, and its source.

    Example: treenail config show
    """
    directory, environ = Path.cwd(), os.environ
    found = settings.load({}, environ, directory)
    shown = {name: (each.value, each.source) for name, each in found.chosen.items()}
    if found["store"] is None:
        shown["store"] = (str(stores.store_for(directory, None, environ)), settings.DEFAULT)
    if found["model"] is None and found["base_url"] is None:
        for key, model in models.DEFAULTS:
            if environ.get(key):
                shown["model"] = (model, f"{settings.DEFAULT}, as {key} is set")
                break
    for name in found.unapproved:
        value, source = shown[name]
        shown[name] = (value, f"{source} ({found.file} is not approved)")
    if as_json:
        print_json({name: {"value": value, "source": source} for name, (value, source) in shown.items()})
        return
    width = max(len(str(value)) for value, _ in shown.values())
    for name, (value, source) in shown.items():
        print(f"{name:<14} {'-' if value is None else value!s:<{width}}  {source}")


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
