"""MemoryLog: the conformance suite."""

from pathlib import Path

from holdfast.clock import Clock
from holdfast.log import Log
from holdfast.log.memory import MemoryLog
from holdfast.testing.log import LogConformance


class TestConformance(LogConformance):
    def make_log(self, directory: Path, clock: Clock) -> Log:
        return MemoryLog(clock=clock, heartbeat=False)

    def reopen(self, log: Log, directory: Path, clock: Clock) -> Log:
        log.close()
        return log
