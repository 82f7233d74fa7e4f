"""Every depot passes the conformance suite."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.postgres import Shared

from treenail.errors import DepotError, UsageError
from treenail.log.postgres import PostgresLog
from treenail.testing.depot import DepotConformance, MemoryDepot
from treenail.workspace import Depot, begin_with_directory, check_out, depot_of


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


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """A bucket on a server of its own process, which others wrote."""
    environ = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                deadline = time.monotonic() + 300
                while True:
                    try:
                        socket.create_connection(("127.0.0.1", port)).close()
                        break
                    except OSError:
                        assert server.poll() is None and time.monotonic() < deadline
                        time.sleep(0.05)
                import boto3  # Loaded slowly, and by these tests alone.

                boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket="bucket")
                yield f"s3://bucket/runs?endpoint=http://127.0.0.1:{port}"
            finally:
                server.terminate()


class TestBucket(TestPostgres):
    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: str) -> None:
        self.bucket = bucket

    def make_depot(self) -> Depot:
        return depot_of(self.log, self.bucket)  # type: ignore[attr-defined]

    def test_files_travel_through_a_bucket(self, depot: Depot, tmp_path: Path) -> None:
        """A run's beginning, and a call's changes, on another machine; nothing is left when it is erased."""
        (tmp_path / "project").mkdir()
        (tmp_path / "project" / "a").write_text("1")
        (tmp_path / "project" / "large").write_bytes(bytes(1_300_000))
        run_id = uuid4()
        boundary = begin_with_directory(depot, run_id, tmp_path / "project").snapshot
        with check_out(depot, run_id, boundary, tmp_path / "one") as files:
            held = files.begin("call")
            files.write("a", "2")
            boundary = held.prepare()
            held.finish()
        with check_out(depot, run_id, boundary, tmp_path / "two") as files:
            assert files.read("a").content == "2"
            assert files.stat("large").size_bytes == 1_300_000
        depot.release(run_id)
        with pytest.raises(DepotError, match="is missing from s3://"):
            check_out(depot, run_id, boundary, tmp_path / "three")

    def test_a_bucket_that_is_not_there_is_one_clear_error(self, bucket: str) -> None:
        away = depot_of(self.log, bucket.replace("s3://bucket/", "s3://another-one/"))  # type: ignore[attr-defined]
        with pytest.raises(DepotError, match="could not write the object"):
            away.put(uuid4(), {bytes(20): b"x"})
        for url in ("s3://", "s3://key:secret@bucket", "s3://b?password=x", "http://b"):
            with pytest.raises(UsageError, match="credentials come from"):
                depot_of(self.log, url)  # type: ignore[attr-defined]
