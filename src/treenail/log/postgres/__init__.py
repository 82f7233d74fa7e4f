"""The log in a Postgres database."""

from treenail.log.postgres.log import PostgresLog

__all__ = ["PostgresLog"]
