"""The check of the installation: is everything here that a run needs?"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import click

import treenail
from treenail.containment import default_prices
from treenail.errors import ToolError, TreenailError
from treenail.history import damage_text, opened_log
from treenail.log import PostgresUrl, Store
from treenail.presenters.cli import models, settings, stores
from treenail.presenters.cli.options import json_option
from treenail.presenters.cli.output import print_json
from treenail.providers import install_command
from treenail.sandbox import probe
from treenail.tools import run_in_workspace
from treenail.workspace.host import HostFilesystem

PYTHONS = ("3.11", "3.12", "3.13")
_SDKS = (
    ("openai", "openai", "OPENAI_API_KEY"),
    ("anthropic", "anthropic", "ANTHROPIC_API_KEY"),
    ("litellm", "litellm", None),
    ("claude-agent-sdk", "claude-agent", None),
)
"""Each SDK, the extra that brings it, and the variable with its key."""

_OLD_DAYS = 180
"""After so many days a price table is called old."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was checked."""

    what: str
    good: bool
    text: str
    next_action: str = ""


def examine(directory: Path) -> Iterator[Check]:
    """Check what a run in this directory needs. Nothing is sent anywhere."""
    version = platform.python_version()
    yield Check("treenail", True, f"{treenail.__version__} on Python {version}")
    tested = f"{sys.version_info.major}.{sys.version_info.minor}" in PYTHONS
    yield Check("python", tested, version, "" if tested else f"use Python {PYTHONS[0]} to {PYTHONS[-1]}")
    recent = sqlite3.sqlite_version_info >= (3, 35)
    advice = "" if recent else "use a Python that comes with SQLite 3.35 or newer"
    yield Check("sqlite", recent, sqlite3.sqlite_version, advice)
    try:
        found = settings.load({}, os.environ, directory)
    except TreenailError as error:
        yield Check("settings", False, str(error), "fix the settings")
        return
    waiting = ", ".join(found.unapproved)
    text = str(found.file or "no treenail.toml; defaults apply") + (
        f" (not approved: {waiting})" if waiting else ""
    )
    advice = "read it, then: treenail config approve" if waiting else ""
    yield Check("settings", not waiting, text, advice)
    yield _store(stores.store_for(directory, found.text("store"), os.environ))
    writable = os.access(directory, os.W_OK)
    advice = "" if writable else "the agent can only read here; use --read-only"
    yield Check("workspace", writable, f"{directory} {'can' if writable else 'cannot'} be written", advice)
    yield _confined(found)
    yield _layered(found)
    yield from _providers()
    yield from _model(found)
    prices = default_prices()
    is_old = (date.today() - date.fromisoformat(prices.date)).days > _OLD_DAYS
    yield Check(
        "prices",
        True,
        f"of {prices.date} ({prices.source})",
        "they may have changed since: treenail prices fetch" if is_old else "",
    )


def _layered(found: settings.Settings) -> Check:
    """Try how the changes of commands would be told from a person's."""
    reason = "the sandbox is off" if found["sandbox"] == "off" else _why_no_layer()
    if reason is None:
        return Check("layers", True, "commands work on a layer, which is applied when they succeed")
    return Check("layers", True, f"commands work on the files themselves, between two scans: {reason}")


def _why_no_layer() -> str | None:
    """Try a command on a layer, in a temporary workspace; return why that is not possible, or None."""
    with TemporaryDirectory(prefix="treenail-probe-") as name:
        root = Path(name, "workspace")
        root.mkdir()
        with HostFilesystem(root, store=Path(name, "store")) as workspace:
            call = workspace.begin("probe")
            try:
                run = partial(run_in_workspace, workspace, ["/bin/sh", "-c", ":"], sandbox=workspace.sandbox)
                ran = anyio.run(run)
                return None if ran.way == "layer" else ran.because
            except (OSError, ToolError) as error:
                return str(error)
            finally:
                call.rollback()


def _store(store: Store) -> Check:
    """Check the store without creating or changing it."""
    if isinstance(store, PostgresUrl):
        return _database(store)
    if store.is_file():
        try:
            with opened_log(store) as log:
                damage = "; ".join(each.message for each in getattr(log, "damage", ()))
                runs = len(log.sessions())
        except TreenailError as error:
            damage, runs = damage_text(str(error)), 0
        if damage:
            return Check("store", False, damage, f"treenail diagnose --store {store}")
        readable = os.access(store, os.W_OK) and os.access(store.parent, os.W_OK)
        return Check(
            "store",
            readable,
            f"{store} ({runs} sessions{'' if readable else ', cannot be written'})",
            "" if readable else "name another file with --store or TREENAIL_STORE",
        )
    above = next(each for each in (store, *store.parents) if each.exists())
    good = above.is_dir() and os.access(above, os.W_OK)
    advice = "" if good else f"{above} cannot be written; name another file with --store or TREENAIL_STORE"
    return Check("store", good, f"{store} ({'not created yet' if good else 'cannot be created'})", advice)


def _database(store: PostgresUrl) -> Check:
    try:
        with opened_log(store) as log:
            return Check("store", True, f"{store} ({len(log.sessions())} sessions)", "")
    except TreenailError as error:
        return Check("store", False, str(error), "check --store or TREENAIL_STORE; see docs/scale.md")


def _confined(found: settings.Settings) -> Check:
    """Try the sandbox that commands would run in."""
    if found["sandbox"] == "off":
        return Check("sandbox", True, f"off ({found.chosen['sandbox'].source}): commands are not confined")
    tried = probe()
    return Check("sandbox", tried.confines, tried.text, tried.advice)


def _model(found: settings.Settings) -> Iterator[Check]:
    """Make the provider that a run would use, without calling it, and look for its price."""
    try:
        made = models.provider_for(found, os.environ)
    except TreenailError as error:
        yield Check("model", False, "no model is available", str(error))
        return
    yield Check("model", True, f"{made.model} ({made.name})")
    if models.has_price(made):
        yield Check("model's price", True, "known")
        return
    good = found["unknown_price"] != "halt"
    said = "not known" if good else "not known: under a ceiling in USD the model is not called"
    advice = "treenail prices fetch; or use --unknown-price warn to leave its cost uncounted"
    yield Check("model's price", good, said, advice)


def _providers() -> Iterator[Check]:
    for package, extra, key in _SDKS:
        try:
            text = f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            yield Check(package, True, "not installed", f"in a checkout: {install_command(extra)}")
            continue
        if key is not None:
            text += f", {key} is {'set' if os.environ.get(key) else 'not set'}"
        yield Check(package, True, text)


@click.command
@json_option
def doctor(as_json: bool) -> int:
    """Check that everything a run needs is here.

    Exits 1 if something is missing.

    Example: treenail doctor
    """
    found = list(examine(Path.cwd()))
    if as_json:
        print_json([asdict(each) for each in found])
    else:
        for each in found:
            print(f"{'ok ' if each.good else 'NO '} {each.what:<16} {each.text}")
            if each.next_action:
                print(f"    {'':<16} {each.next_action}")
    return 0 if all(each.good for each in found) else 1
