"""Where runs are stored, as people name it: a SQLite file by its path, a Postgres database by its URL.

Only names are handled here: no driver is imported, and nothing is opened or created.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from treenail.errors import UsageError

SCHEMES = ("postgresql://", "postgres://")
DEFAULT_SCHEMA = "treenail"
_SECRET = ("password", "sslpassword", "passfile", "sslkey")
"""Parameters that no message shows."""
_HOSTS = re.compile(r"(([\w.-]*|\[[0-9a-fA-F:.%]+\]|%2F[\w.%-]*)(:\d*)?(,|$))*")
_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")


@dataclass(frozen=True, slots=True)
class PostgresUrl:
    """A database, and the schema in it that holds the runs of one deployment.

    `str()` leaves out passwords: it is what messages, records and commands show.
    """

    user: str = ""
    password: str = field(default="", repr=False)
    hosts: str = ""
    """Host and port as in the URL; several, separated by commas, are tried in order."""
    database: str = ""
    schema: str = DEFAULT_SCHEMA
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Parameters of libpq, such as `sslmode`."""

    @classmethod
    def parse(cls, text: str) -> PostgresUrl:
        """Read a URL. Raises `UsageError`, which never quotes it: it may contain a password."""
        scheme = next((each for each in SCHEMES if text.startswith(each)), None)
        if scheme is None:
            raise UsageError("the store's URL must begin with postgresql://")
        try:
            parts = urlsplit(text)
            query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            raise UsageError(
                "the store's URL cannot be read; it looks like postgresql://USER@HOST:PORT/DATABASE?schema=NAME"
            ) from None
        login, _, hosts = parts.netloc.rpartition("@")
        is_plain = all(each.isprintable() and each not in " #" for each in text)
        # A password with one of @ / ? in it would end up in another part, and be shown.
        if not is_plain or "@" in login + parts.path + parts.query or not _HOSTS.fullmatch(hosts):
            raise UsageError(
                "the store's URL contains a character that must be percent-encoded, perhaps in the password "
                "(@ is %40, # is %23, / is %2F, ? is %3F)"
            )
        user, _, password = login.partition(":")
        options = dict(query)
        if "password" in options:
            raise UsageError("a password in the store's URL stands before the host; PGPASSWORD is better")
        schema = options.pop("schema", DEFAULT_SCHEMA)
        if not _SCHEMA_NAME.fullmatch(schema) or schema.startswith("pg_"):
            raise UsageError(
                f"the schema in the store's URL must be lower-case letters, digits and _ (at most 63), "
                f"not {schema!r}"
            )
        # Shown in messages and used as the name of a directory: one spelling for one deployment.
        return cls(
            unquote(user),
            unquote(password),
            hosts,
            unquote(parts.path.lstrip("/")),
            schema,
            tuple(sorted(options.items())),
        )

    def __str__(self) -> str:
        shown = {key: value for key, value in self.options if key not in _SECRET}
        if self.schema != DEFAULT_SCHEMA:
            shown["schema"] = self.schema
        login = f"{quote(self.user)}@" if self.user else ""
        query = f"?{urlencode(shown, safe='/:,', quote_via=quote)}" if shown else ""
        return f"postgresql://{login}{self.hosts}/{quote(self.database)}{query}"

    def conninfo(self) -> str:
        """Return the URL for libpq, with the password."""
        login = quote(self.user, safe="")
        if self.password:
            login += f":{quote(self.password, safe='')}"
        query = f"?{urlencode(self.options, quote_via=quote)}" if self.options else ""
        at = "@" if login else ""
        return f"postgresql://{login}{at}{self.hosts}/{quote(self.database, safe='')}{query}"

    def redacted(self, text: str) -> str:
        """Return a message without the passwords of this URL."""
        for secret in (self.password, *(value for key, value in self.options if key in _SECRET)):
            if secret:
                text = text.replace(secret, "***").replace(quote(secret, safe=""), "***")
        return text


Store = Path | PostgresUrl
"""Where runs are stored."""


def is_postgres(store: object) -> bool:
    """Return whether this names a Postgres database."""
    return isinstance(store, PostgresUrl) or (isinstance(store, str) and store.startswith(SCHEMES))


def store_named(store: str | Path | PostgresUrl) -> Store:
    """Return the store that a path or a URL names. Raises `UsageError` for a URL that cannot be read."""
    if isinstance(store, PostgresUrl):
        return store
    if isinstance(store, str) and store.startswith(SCHEMES):
        return PostgresUrl.parse(store)
    if re.match(r"postgres(ql)?:/", str(store)):  # A Path has lost a slash, and may have lost its meaning.
        raise UsageError("a Postgres store is named by a string, not by a Path: store='postgresql://...'")
    return Path(store)


def place_of(log: object) -> Store | None:
    """Return where a log keeps its runs; None for one in memory, or of the caller's own."""
    url = getattr(log, "url", None)
    if isinstance(url, PostgresUrl):
        return url
    path = getattr(log, "path", None)
    return Path(path) if isinstance(path, (str, os.PathLike)) else None


def state_directory(environ: Mapping[str, str]) -> Path:
    """Return where this user's runs are kept on this machine."""
    base = environ.get("XDG_STATE_HOME") or ""
    return Path(base or Path(environ.get("HOME") or Path.home(), ".local", "state")) / "treenail"


def files_of(store: Store) -> Path:
    """Return the directory on this machine that keeps the files of a store's runs.

    It lies beside a SQLite file. For databases it is one directory in the user's state directory: runs have
    ids of their own, and a database may be named by several URLs.
    """
    if isinstance(store, Path):
        return store.with_name(store.name + ".files")
    return state_directory(os.environ) / "postgres.files"
