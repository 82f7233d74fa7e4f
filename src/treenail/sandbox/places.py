"""The places that a command may write to, those that it sees empty, and its environment."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from treenail.errors import SandboxError
from treenail.sandbox.caches import cache_directory, redirected
from treenail.sandbox.policy import WITHOUT, Grants
from treenail.sandbox.secrets import SOCKET_VARIABLES

TEMPORARY = ("TMPDIR", "TEMP", "TMP")
"""The variables that name a directory for temporary files."""


def is_in(place: str, places: Collection[str]) -> bool:
    """Say whether a path is one of these, or lies below one of them."""
    return place in places or any(each in places for each in above(place))


def running_python(empty: Collection[str]) -> set[str]:
    """Return where this very Python and what it imports lie, if that is in a directory that is emptied.

    Else a checkout in `/tmp` could not run its own interpreter.
    """
    begins = tuple(f"{each}/" for each in empty)
    return {each for each in (sys.prefix, sys.base_prefix, *sys.path) if each.startswith(begins)}


@functools.cache
def emptied() -> frozenset[str]:
    """Return the directories that are empty to a command."""
    places = ("/run", "/var/run", "/tmp", "/var/tmp")
    return frozenset(os.path.realpath(each) for each in places if os.path.isdir(each))


def above(place: str) -> Iterator[str]:
    """Yield the directories above a path, innermost first."""
    while place := place.rpartition("/")[0]:
        yield place


def writable_places(workspace: tuple[str, str], grants: Grants, cache: str | None) -> set[str]:
    """Return the places that a command may write to. A workspace is given as it was named, and without links.

    A command may replace what it can write to by links that lead elsewhere, which the next one must not
    follow. So a grant below another one, or in the workspace, is left out.
    """
    named, root = workspace
    if root == "/":
        raise SandboxError(
            f"commands cannot be confined: their workspace is the whole system; choose another, or {WITHOUT}"
        )
    covered, found = [named, root], {root}
    for each in sorted(grants.write, key=lambda each: len(each.parts)):
        if named != root and Path(named).is_relative_to(each):
            raise SandboxError(
                f"the command was not run: the way to the workspace {named} leads through a link in {each}, "
                "which commands may write to; remove the link"
            )
        if not any(each.is_relative_to(other) for other in covered):
            real = os.path.realpath(each)
            covered += [str(each), real]
            found.add(real)
    return found if cache is None else {*found, os.path.realpath(cache)}


def live_directories(root: str, grants: Grants, live: bool) -> set[str]:
    """Return the directories in a workspace that a live process may write to while others see it.

    A command may have put a link in the place of one, which would lead the process elsewhere.
    """
    found: set[str] = set()
    for name in grants.live if live else ():
        place = os.path.join(root, name)
        above = os.path.dirname(place)
        if os.path.realpath(above) == above and not os.path.lexists(place):
            os.makedirs(place)
        if os.path.realpath(place) != place or not os.path.isdir(place):
            raise SandboxError(
                f"the process was not run: {name} in the workspace is not a directory, or a link leads to it"
            )
        found.add(place)
    return found


def private_cache(workspace: tuple[str, str], grants: Grants) -> str | None:
    """Make the directory of the workspace's private caches; None if there is no place for it."""
    cache = cache_directory(workspace[1])
    writable = [*workspace, *map(str, grants.write)]
    if any(f"{cache}/".startswith(f"{each}/") for each in writable):
        return None  # A command could put a link in its place.
    try:
        os.makedirs(cache, mode=0o700, exist_ok=True)
    except OSError:
        return None
    return cache


def confined_environment(
    cache: str | None, temporary: str, grants: Grants, given: Mapping[str, str]
) -> dict[str, str]:
    """Return a command's environment: private caches, and no way to sockets that were not granted."""
    granted = [str(each) for each in grants.write]
    env = {
        name: value
        for name, value in given.items()
        if name not in TEMPORARY and (name not in SOCKET_VARIABLES or any(each in value for each in granted))
    }
    return env | redirected(cache or f"{temporary}/caches", grants.write, given)
