"""The dispatchers pass the suite of the seam."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from tests.postgres import Shared

from treenail.engine import Dispatcher
from treenail.engine.absurd import AbsurdDispatcher, install
from treenail.log.postgres import PostgresLog
from treenail.testing.dispatcher import DispatcherConformance, InMemoryDispatcher


class TestInMemory(DispatcherConformance):
    @pytest.fixture
    def dispatcher(self) -> Dispatcher:
        return InMemoryDispatcher()


class TestAbsurd(DispatcherConformance):
    @pytest.fixture
    def log(self, postgres: Shared) -> Iterator[PostgresLog]:
        with PostgresLog(postgres.url(), heartbeat=False, max_connections=12) as log:
            yield log

    @pytest.fixture
    def queue(self, log: PostgresLog) -> str:
        name = f"q{uuid4().hex[:12]}"
        install(log, [name, f"{name}x"])
        return name

    @pytest.fixture
    def dispatcher(self, log: PostgresLog) -> Dispatcher:
        return AbsurdDispatcher(log)
