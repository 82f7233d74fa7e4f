"""SqliteLog: the conformance suite."""

from pathlib import Path

from holdfast.clock import Clock
from holdfast.log import Log
from holdfast.log.sqlite import SqliteLog
from holdfast.testing.log import LogConformance


class TestConformance(LogConformance):
    def make_log(self, directory: Path, clock: Clock) -> Log:
        return SqliteLog(directory / "log.db", clock=clock, heartbeat=False, synchronous="NORMAL")
