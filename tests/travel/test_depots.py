"""Every depot passes the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.postgres import Shared

from treenail.log.postgres import PostgresLog
from treenail.testing.depot import DepotConformance, MemoryDepot
from treenail.workspace import Depot


class TestMemory(DepotConformance):
    def make_depot(self) -> Depot:
        return MemoryDepot()


class TestPostgres(DepotConformance):
    @pytest.fixture(autouse=True, scope="class")
    @staticmethod
    def _log(request: pytest.FixtureRequest, postgres: Shared) -> Iterator[None]:
        with PostgresLog(postgres.url()) as log:
            request.cls.log = log
            yield

    def make_depot(self) -> Depot:
        depot: Depot = self.log.objects  # type: ignore[attr-defined]
        return depot
