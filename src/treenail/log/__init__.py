"""The durable truth: one append-only log per session.

The stores are imported by path, so that this door pulls in no driver:
`treenail.log.memory.MemoryLog`, `treenail.log.sqlite.SqliteLog`, `treenail.log.postgres.PostgresLog`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
