"""The settings, as a command shows them."""

from __future__ import annotations

import os
from pathlib import Path

import click

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
    if as_json:
        print_json({name: {"value": value, "source": source} for name, (value, source) in shown.items()})
        return
    width = max(len(str(value)) for value, _ in shown.values())
    for name, (value, source) in shown.items():
        print(f"{name:<14} {'-' if value is None else value!s:<{width}}  {source}")
