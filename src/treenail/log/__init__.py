"""The durable truth: one append-only log per session.

The stores are imported by path, so that this door pulls in no driver:
`treenail.log.memory.MemoryLog`, `treenail.log.sqlite.SqliteLog`.
"""

from treenail.log.base import Damage, Lease, Log, LogReport, StoredSnapshot
from treenail.log.event import Channel, Draft, Envelope, SessionInfo, SlicePolicy

__all__ = [
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
]
