"""The durable truth: one append-only log per session.

The stores are imported by path, so that this door pulls in no driver:
`treenail.log.memory.MemoryLog`, `treenail.log.sqlite.SqliteLog`.
"""

from treenail.log.base import DEFAULT_LEASE_SECONDS, Damage, Lease, Log, LogReport, StoredSnapshot
from treenail.log.event import (
    GENESIS,
    Channel,
    Draft,
    Envelope,
    SessionInfo,
    SlicePolicy,
    chain_checksum,
    to_microseconds,
)
from treenail.log.lease import this_process_owner

__all__ = [
    "DEFAULT_LEASE_SECONDS",
    "GENESIS",
    "Channel",
    "Damage",
    "Draft",
    "Envelope",
    "Lease",
    "Log",
    "LogReport",
    "SessionInfo",
    "SlicePolicy",
    "StoredSnapshot",
    "chain_checksum",
    "this_process_owner",
    "to_microseconds",
]
