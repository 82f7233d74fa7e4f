"""The log in one SQLite file."""

from treenail.log.sqlite.log import SqliteLog

__all__ = ["SqliteLog"]
