"""The durable truth: one append-only log per session.

The stores are imported by path, so that this door pulls in no driver:
`holdfast.log.memory.MemoryLog`, `holdfast.log.sqlite.SqliteLog`.
"""

from holdfast.log.base import Finding, Lease, Log, LogReport, StoredSnapshot
from holdfast.log.event import Channel, Draft, Envelope, SessionInfo, SlicePolicy

__all__ = [
    "Channel",
    "Draft",
    "Envelope",
    "Finding",
    "Lease",
    "Log",
    "LogReport",
    "SessionInfo",
    "SlicePolicy",
    "StoredSnapshot",
]
