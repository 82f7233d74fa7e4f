"""The Postgres log passes the conformance suite; its clock, its schema, its secrets, its watchers."""

from __future__ import annotations

import logging
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from uuid import UUID, uuid4

import psycopg
import pytest
from tests.forks import ProcessKilled, ended, fork, in_child
from tests.log.proxy import Proxy
from tests.postgres import Server, Shared

from treenail.clock import Clock
from treenail.errors import (
    LeaseHeldError,
    LogDamagedError,
    LogError,
    LogVersionError,
    StaleWriterError,
    UsageError,
)
from treenail.log import Draft, Lease, Log, PostgresUrl, this_process_owner, watch
from treenail.log.postgres import PostgresLog
from treenail.log.postgres.migrations import MIGRATIONS
from treenail.log.sqlite import SqliteLog
from treenail.testing.log import LogConformance

BIRTH = datetime(2026, 1, 1, tzinfo=UTC)
ROOT = Path(__file__).parents[2]


class TestConformance(LogConformance):
    histories = 7

    @pytest.fixture(autouse=True)
    def _server(self, postgres: Shared) -> None:
        self.postgres = postgres

    def make_log(self, directory: Path, clock: Clock) -> Log:
        return PostgresLog(self.postgres.url(directory), clock=clock, heartbeat=False)


def new_session(log: Log) -> Lease:
    session_id = uuid4()
    log.create(session_id, created_at=BIRTH)
    return log.acquire(session_id, owner=this_process_owner())


@pytest.fixture
def log(postgres: Shared, tmp_path: Path) -> Iterator[PostgresLog]:
    with PostgresLog(postgres.url(tmp_path), heartbeat=False) as log:
        yield log


# --- one writer -----------------------------------------------------------------------------------------


def test_a_lease_expires_by_the_clock_of_the_database(log: PostgresLog) -> None:
    """Whatever time it is here: the server says when a lease begins, and whether it is over."""
    session_id = uuid4()
    log.create(session_id, created_at=BIRTH)
    (before,) = _fetch(log, "SELECT clock_timestamp()")
    lease = log.acquire(session_id, owner="on another machine", ttl_s=0.5)
    assert 0.5 <= (lease.expires_at - before).total_seconds() < 60
    with pytest.raises(LeaseHeldError):
        log.acquire(session_id, owner="impatient")
    _fetch(log, "SELECT pg_sleep(0.6)")
    assert log.acquire(session_id, owner="patient").epoch == lease.epoch + 1


def _fetch(log: PostgresLog, query: str) -> tuple[object, ...] | list[object]:
    with psycopg.connect(log.url.conninfo(), autocommit=True) as connection:
        found = connection.execute(query.encode()).fetchone()
    return list(found or ())


def test_a_lease_may_be_used_through_several_objects(postgres: Shared, log: PostgresLog) -> None:
    """Each append continues what is in the database, whoever wrote it; a released lease writes nothing."""
    with PostgresLog(log.url, heartbeat=False) as second:
        lease = new_session(log)
        logs = (log, second)
        for turn in range(6):
            logs[turn % 2].append(lease, [Draft("event", b"%d" % turn, 0)], expected_seq=turn)
        assert [each.payload for each in log.read(lease.session_id)] == [b"%d" % turn for turn in range(6)]
        assert log.check(lease.session_id).ok


def test_a_killed_writer_of_this_machine_is_replaced_at_once(log: PostgresLog) -> None:
    """Nobody waits for a lease whose process is known to have ended."""
    session_id = uuid4()
    log.create(session_id, created_at=BIRTH)

    def die() -> None:
        with PostgresLog(log.url) as mine:
            mine.acquire(session_id, owner=this_process_owner(), ttl_s=600)
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ProcessKilled):
        in_child(die)
    assert log.acquire(session_id, owner="the next one").epoch == 2


def test_a_stopped_writer_that_was_replaced_changes_nothing_when_it_continues(log: PostgresLog) -> None:
    """Its heartbeat was stopped with it, so the lease expired by the server's clock; then it is refused."""
    session_id = uuid4()
    log.create(session_id, created_at=BIRTH)

    def write() -> None:
        with PostgresLog(log.url, heartbeat=True) as mine:
            # A name that says nothing about a process, as from another machine.
            lease = mine.acquire(session_id, owner="elsewhere", ttl_s=0.5)
            mine.append(lease, [Draft("event", b"before", 0)], expected_seq=0)
            os.kill(os.getpid(), signal.SIGSTOP)
            with pytest.raises(StaleWriterError, match="taken over"):
                mine.append(lease, [Draft("event", b"after", 0)], expected_seq=1)
            with pytest.raises(StaleWriterError):
                mine.put_note(lease, b"after")
            mine.release(lease)

    child = fork(write)
    try:
        assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
        while True:
            try:
                lease = log.acquire(session_id, owner="the next one", ttl_s=600)
                break
            except LeaseHeldError:
                time.sleep(0.02)
        log.append(lease, [Draft("event", b"next", 0)], expected_seq=1)
    finally:
        os.kill(child, signal.SIGCONT)
    assert ended(child) == 0
    assert [each.payload for each in log.read(session_id)] == [b"before", b"next"]
    assert (log.info(session_id).owner, log.note(session_id)) == ("the next one", None)


def test_parent_and_child_of_a_fork_use_connections_of_their_own(log: PostgresLog) -> None:
    """The child can go on with the object that it was born with, and the parent notices nothing."""
    lease = new_session(log)
    log.append(lease, [Draft("event", b"parent", 0)], expected_seq=0)

    def work() -> list[bytes]:
        other = new_session(log)
        log.append(other, [Draft("event", b"child", 0)], expected_seq=0)
        return [each.payload for each in log.read(other.session_id)]

    assert in_child(work) == [b"child"]
    log.append(lease, [Draft("event", b"parent again", 0)], expected_seq=1)
    assert log.info(lease.session_id).head == 2


# --- the schema -----------------------------------------------------------------------------------------


def test_ten_processes_open_a_new_schema_at_the_same_moment(postgres: Shared) -> None:
    """One migrates, the others wait for it, and all succeed."""
    url = postgres.url()
    read, write = os.pipe()

    def start() -> None:
        os.close(write)
        os.read(read, 1)  # Until the last one is there.
        with PostgresLog(url, heartbeat=False) as log:
            assert list(log.sessions()) == []

    children = [fork(start) for _ in range(10)]
    os.close(read)
    os.close(write)
    assert [ended(each) for each in children] == [0] * 10
    schema = PostgresUrl.parse(url).schema
    assert postgres.execute(f"SELECT version FROM {schema}.migrations") == [(each,) for each in MIGRATIONS]


def test_a_schema_of_a_newer_version_or_another_application_is_left_alone(postgres: Shared) -> None:
    newer, foreign, absent = postgres.url(), postgres.url(), postgres.url()
    PostgresLog(newer).close()
    schema = PostgresUrl.parse(newer).schema
    postgres.execute(f"INSERT INTO {schema}.migrations VALUES (99)")
    with pytest.raises(LogVersionError, match="99"):
        PostgresLog(newer)
    schema = PostgresUrl.parse(foreign).schema
    postgres.execute(f"CREATE SCHEMA {schema} CREATE TABLE customers (name text)")
    with pytest.raises(LogError, match="another application"):
        PostgresLog(foreign)
    assert postgres.execute(f"SELECT count(*) FROM pg_tables WHERE schemaname = '{schema}'") == [(1,)]
    with pytest.raises(LogError, match="there are no runs"):
        PostgresLog(absent, create=False)
    schema = PostgresUrl.parse(absent).schema
    assert postgres.execute(f"SELECT to_regnamespace('{schema}')::text") == [(None,)]


def test_deployments_in_one_database_do_not_see_each_other(postgres: Shared) -> None:
    with PostgresLog(postgres.url()) as one, PostgresLog(postgres.url()) as other:
        lease = new_session(one)
        assert list(other.sessions()) == []
        other.create(lease.session_id, created_at=BIRTH)
        assert other.info(lease.session_id).owner is None


PRIVILEGES = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


def test_the_role_of_the_documentation_has_what_it_takes_and_no_more(own_server: Server) -> None:
    """What docs/scale.md grants is enough for a worker, and does not let it change the schema."""
    script = PRIVILEGES.split("```sql\n")[1].split("```")[0]
    PostgresLog(own_server.url(schema="treenail")).close()
    for statement in script.split(";"):
        if statement.strip():
            own_server.execute(statement)
    url = own_server.url(schema="treenail").replace("postgres@", "treenail_worker@")
    with PostgresLog(url, heartbeat=False) as log:
        lease = new_session(log)
        log.append(lease, [Draft("event", b"1", 0), Draft("event", b"2", 0)], expected_seq=0)
        log.put_note(lease, b"note")
        log.put_snapshot(lease, 2, b"state")
        assert log.prune(lease, upto=1) == 1
        reservation = log.pots.reserve("team", 5, 10)
        assert reservation is not None
        log.pots.settle("team", reservation, 3)
        log.pots.reset("team")
        with log.watcher(lease.session_id) as watcher:
            assert watcher.wait(0, 1) == 2 and watcher.listens
        log.release(lease)
        log.erase(lease.session_id)
        for forbidden in (
            "DROP TABLE treenail.events",
            "CREATE TABLE treenail.more ()",
            "CREATE TABLE public.x ()",
        ):
            with (
                pytest.raises(psycopg.errors.InsufficientPrivilege),
                psycopg.connect(log.url.conninfo()) as raw,
            ):
                raw.execute(forbidden.encode())


@pytest.mark.parametrize("table", ["events", "snapshots", "notes"])
def test_no_damage_is_read_as_data(log: PostgresLog, table: str) -> None:
    """A changed byte in a row is noticed by the log's own checksums; what is before it can be read."""
    lease = new_session(log)
    for seq in range(3):
        log.append(lease, [Draft("event", b"payload %d" % seq, 0)], expected_seq=seq)
    log.put_snapshot(lease, 3, b"state")
    log.put_note(lease, b"note")
    with psycopg.connect(log.url.conninfo(), autocommit=True) as raw:
        raw.execute(
            f"UPDATE {log.url.schema}.{table} SET payload = set_byte(payload, length(payload) - 1, 7)"
            f"{' WHERE seq = 2' if table == 'events' else ''}".encode()
        )
    report = log.check(lease.session_id)
    assert not report.ok
    if table == "events":
        found = log.read(lease.session_id)
        assert next(found).payload == b"payload 0"
        with pytest.raises(LogDamagedError, match="event 2"):
            next(found)
    elif table == "snapshots":
        assert log.latest_snapshot(lease.session_id) is None
    else:
        assert log.note(lease.session_id) is None


# --- secrets and TLS ------------------------------------------------------------------------------------


def test_a_password_is_never_shown(own_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Not by the URL, an object, an error or a log line, whether the login is good, bad or misspelt."""
    secret = "s3cr3t/with@signs"
    own_server.execute(f"CREATE ROLE careful LOGIN SUPERUSER PASSWORD '{secret}'")
    rules = own_server.data / "pg_hba.conf"
    rules.write_text("host all careful 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n")
    own_server.execute("SELECT pg_reload_conf()")
    place = f"127.0.0.1:{own_server.port}/postgres"
    shown: list[str] = []
    with caplog.at_level(logging.DEBUG):
        with PostgresLog(f"postgresql://careful:s3cr3t%2Fwith%40signs@{place}?schema=mine") as log:
            new_session(log)
            shown += [repr(log), str(log.url), repr(log.url)]
            with pytest.raises(LogError) as info:
                log.info(uuid4())
            shown.append(str(info.value))
        for url in (
            f"postgresql://careful:wrong-{secret.replace('@', '%40').replace('/', '%2F')}@{place}",
            f"postgresql://careful:{secret}@{place}",
            f"postgresql://careful:{secret.replace('/', '')}@{place}",
            f"postgresql://careful:x@{place}?password={secret.replace('@', '%40')}-no",
            f"postgresql://careful:x@{place}?schema=No&sslpassword={secret}",
            f"postgresql://careful:s3cr3t?signs@{place}",
            f"postgresql://careful:s3cr3t#signs@{place}",
        ):
            with pytest.raises((LogError, UsageError)) as failed:
                PostgresLog(url, retry_s=0.1)
            error: BaseException | None = failed.value
            while error is not None:
                shown.append(str(error))
                error = error.__cause__
    shown += [each.getMessage() for each in caplog.records]
    assert f"postgresql://careful@{place}?schema=mine" in shown
    assert [each for each in shown if "s3cr3t" in each or "signs" in each] == []


def test_a_connection_is_encrypted_when_the_url_says_so(postgres: Shared, tmp_path: Path) -> None:
    """`sslmode=verify-full` accepts the server's certificate by its authority and name, and no other."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with Proxy(postgres.server.port, tls=context) as proxy:
        url = f"postgresql://postgres@localhost:{proxy.port}/{postgres.database}?schema=encrypted&sslmode=verify-full"
        with PostgresLog(f"{url}&sslrootcert={tmp_path}/cert.pem", heartbeat=False) as log:
            lease = new_session(log)
            log.append(lease, [Draft("event", b"over TLS", 0)], expected_seq=0)
        assert proxy.connections >= 1
        with pytest.raises(LogError, match="certificate"):
            PostgresLog(f"{url}&sslrootcert=/etc/ssl/certs/ca-certificates.crt", retry_s=0.1)
    with pytest.raises(LogError, match="SSL"):
        PostgresLog(f"{postgres.url()}&sslmode=require", retry_s=0.1)


# --- watching -------------------------------------------------------------------------------------------

WRITER = """
import sys, time
from uuid import UUID
from tests.stores import open_store
from treenail.log import Draft
log, session_id = open_store(sys.argv[1]), UUID(sys.argv[2])
lease = log.acquire(session_id, owner="writer")
for seq in range(int(sys.argv[3])):
    sys.stdin.readline()
    log.append(lease, [Draft("event", repr(time.monotonic()).encode(), 0)], expected_seq=seq)
log.close()
"""


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_whoever_watches_hears_of_an_event_within_a_tenth_of_a_second(
    store: str, postgres: Shared, tmp_path: Path
) -> None:
    """From another process; by LISTEN on Postgres, by asking elsewhere. Every event comes, once, in order."""
    count = 8
    where = postgres.url(tmp_path) if store == "postgres" else str(tmp_path / "log.db")
    log = PostgresLog(where) if store == "postgres" else SqliteLog(where)
    session_id = uuid4()
    with log:
        log.create(session_id, created_at=BIRTH)
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, where, str(session_id), str(count)],
            stdin=subprocess.PIPE, text=True, cwd=ROOT,
        ) as writer:  # fmt: skip
            assert writer.stdin is not None
            delays: list[float] = []
            writer.stdin.write("\n")
            writer.stdin.flush()
            for event in watch(log, session_id):
                delays.append(time.monotonic() - float(event.payload))
                assert event.seq == len(delays)
                if len(delays) == count:
                    break
                writer.stdin.write("\n")
                writer.stdin.flush()
        # Of a busy machine's worst moments nothing is said.
        assert median(delays) < 0.1
        assert [each.seq for each in watch(log, session_id, is_over=lambda: True)] == list(
            range(1, count + 1)
        )


def test_a_watcher_outlives_the_connection_that_it_listens_on(own_server: Server) -> None:
    """It asks while nobody tells, and listens again."""
    with PostgresLog(own_server.url(), heartbeat=False, retry_s=60) as log:
        lease = new_session(log)
        heads: list[int] = []
        with log.watcher(lease.session_id) as watcher:
            assert watcher.wait(0, 0.05) == 0 and watcher.listens
            own_server.stop()
            own_server.start()
            thread = threading.Thread(target=lambda: heads.append(watcher.wait(0, 60)))
            thread.start()
            log.append(lease, [Draft("event", b"after the restart", 0)], expected_seq=0)
            thread.join()
            assert heads == [1]


def test_appends_notify_only_while_somebody_watches(log: PostgresLog) -> None:
    """Commits of notifying transactions wait for one another, so unwatched sessions do not notify."""
    lease = new_session(log)
    with psycopg.connect(log.url.conninfo(), autocommit=True) as raw:
        raw.execute(f"LISTEN treenail_{lease.session_id.hex}".encode())
        log.append(lease, [Draft("event", b"unwatched", 0)], expected_seq=0)
        with log.watcher(lease.session_id) as watcher:
            watcher.wait(0, 0)
            log.append(lease, [Draft("event", b"watched", 0)], expected_seq=1)
        log.append(lease, [Draft("event", b"unwatched again", 0)], expected_seq=2)
        assert [each.payload for each in raw.notifies(timeout=0.5)] == ["2"]


def test_a_url_says_where_and_which_schema() -> None:
    url = PostgresUrl.parse("postgres://me:pass%20word@one:1,two:2/db?sslmode=require&schema=team_a")
    assert (url.user, url.password, url.hosts, url.database) == ("me", "pass word", "one:1,two:2", "db")
    assert (url.schema, url.options) == ("team_a", (("sslmode", "require"),))
    assert str(url) == "postgresql://me@one:1,two:2/db?sslmode=require&schema=team_a"
    assert PostgresUrl.parse(str(url)) == PostgresUrl(**{**_fields(url), "password": ""})
    for bad in (
        "mysql://x",
        "postgresql://h/db?schema=Bad;drop",
        "postgresql://h/db?schema=pg_x",
        "postgresql://h/d b",
    ):
        with pytest.raises(UsageError):
            PostgresUrl.parse(bad)


def _fields(url: PostgresUrl) -> dict[str, object]:
    return {name: getattr(url, name) for name in PostgresUrl.__slots__}


def test_a_session_id_is_a_uuid_everywhere(log: PostgresLog) -> None:
    """What is read back compares equal to what was written, parents included."""
    parent, child = uuid4(), uuid4()
    log.create(parent, created_at=BIRTH)
    log.create(child, created_at=BIRTH, parent_id=parent)
    assert [type(each.session_id) for each in log.sessions()] == [UUID, UUID]
    assert [each.session_id for each in log.sessions(parent_id=parent)] == [child]
