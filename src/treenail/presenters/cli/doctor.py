"""Is everything here that a run needs? Each finding says what to do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import treenail
from treenail.containment import default_prices
from treenail.errors import TreenailError
from treenail.presenters.cli import models, places, settings, stored
from treenail.presenters.cli.looking import print_json

PYTHONS = ("3.11", "3.12", "3.13")
_SDKS = (
    ("openai", "OPENAI_API_KEY"),
    ("anthropic", "ANTHROPIC_API_KEY"),
    ("litellm", None),
    ("claude-agent-sdk", None),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    good: bool
    text: str
    next_action: str = ""


def examine(directory: Path) -> Iterator[Finding]:
    """Look at what a run in this directory would need. Nothing is sent anywhere."""
    version = platform.python_version()
    yield Finding("treenail", True, f"{treenail.__version__} on Python {version}")
    tested = f"{sys.version_info.major}.{sys.version_info.minor}" in PYTHONS
    yield Finding("python", tested, version, "" if tested else f"use Python {PYTHONS[0]} to {PYTHONS[-1]}")
    yield Finding("sqlite", sqlite3.sqlite_version_info >= (3, 35), sqlite3.sqlite_version, "")
    yield _git()
    try:
        found = settings.load({}, os.environ, directory)
    except TreenailError as error:
        yield Finding("settings", False, str(error), "mend the settings")
        return
    yield Finding("settings", True, str(found.file or "no treenail.toml; defaults apply"))
    yield _store(places.store_for(directory, found.text("store"), os.environ))
    writable = os.access(directory, os.W_OK)
    advice = "" if writable else "the agent can only read here; use --read-only"
    yield Finding("workspace", writable, f"{directory} {'can' if writable else 'cannot'} be written", advice)
    yield from _providers()
    yield _model(found)
    prices = default_prices()
    yield Finding("prices", True, f"of {prices.date} ({prices.source})")


def _git() -> Finding:
    path = shutil.which("git")
    if path is None:
        return Finding("git", True, "not installed; it is only needed to look at the private store by hand")
    said = subprocess.run([path, "--version"], check=False, capture_output=True, text=True, timeout=10)
    return Finding("git", True, said.stdout.strip())


def _store(store: Path) -> Finding:
    """Look at the store without making or changing anything."""
    if store.is_file():
        try:
            with stored.opened_log(store) as log:
                damage = "; ".join(each.message for each in log.damage)
                runs = len(log.sessions())
        except TreenailError as error:
            damage, runs = str(error).partition("; nothing was changed")[0], 0
        if damage:
            return Finding("store", False, damage, f"treenail diagnose --store {store}")
        readable = os.access(store, os.W_OK) and os.access(store.parent, os.W_OK)
        return Finding(
            "store",
            readable,
            f"{store} ({runs} sessions{'' if readable else ', cannot be written'})",
            "" if readable else "name another place with --store or TREENAIL_STORE",
        )
    above = next(each for each in (store, *store.parents) if each.exists())
    good = above.is_dir() and os.access(above, os.W_OK)
    advice = "" if good else f"{above} cannot be written; name another place with --store or TREENAIL_STORE"
    return Finding("store", good, f"{store} ({'not made yet' if good else 'cannot be made'})", advice)


def _model(found: settings.Settings) -> Finding:
    """Make the provider that a run would ask, and ask it nothing."""
    try:
        made = models.provider_for(found, os.environ)
    except TreenailError as error:
        return Finding("model", False, "no model can be asked", str(error))
    return Finding("model", True, f"{made.model} ({made.name})")


def _providers() -> Iterator[Finding]:
    for package, key in _SDKS:
        try:
            text = f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, True, "not installed", f"pip install {package}")
            continue
        if key is not None:
            text += f", {key} is {'set' if os.environ.get(key) else 'not set'}"
        yield Finding(package, True, text)


def doctor(directory: Path, *, as_json: bool) -> int:
    """Print what was found. Returns 0 if a run can be begun, else 1."""
    found = list(examine(directory))
    if as_json:
        print_json([asdict(each) for each in found])
    else:
        for each in found:
            print(f"{'ok ' if each.good else 'NO '} {each.what:<16} {each.text}")
            if each.next_action:
                print(f"    {'':<16} {each.next_action}")
    return 0 if all(each.good for each in found) else 1
