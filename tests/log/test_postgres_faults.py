"""A server that restarts, dies, fails over or refuses: a clear error, or a retry that doubles nothing.

Everything is real: the server and its processes, and a network in between that loses what it is told to lose.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from uuid import UUID, uuid4

import psycopg
import pytest
from tests.log.proxy import Fault, Proxy
from tests.postgres import NOBODY, Server, Shared, free_port

from treenail.containment.pots import SharedPot
from treenail.errors import LeaseHeldError, LogBusyError, LogError, StaleWriterError, UsageError
from treenail.log import Draft, Lease, PostgresUrl, this_process_owner
from treenail.log.postgres import PostgresLog
from treenail.log.postgres.failures import Failure, meaning

BIRTH = datetime(2026, 1, 1, tzinfo=UTC)
Faulty = Callable[[], AbstractContextManager[None]]
"""In its block, one message to the server or one of its answers is lost."""
Work = Callable[[PostgresLog, Faulty], None]


def new_session(log: PostgresLog) -> Lease:
    session_id = uuid4()
    log.create(session_id, created_at=BIRTH)
    return log.acquire(session_id, owner=this_process_owner())


def drafts(*payloads: bytes) -> list[Draft]:
    return [Draft("test.Event", each, 1) for each in payloads]


def payloads(log: PostgresLog, session_id: UUID) -> list[bytes]:
    assert log.check(session_id).ok
    return [each.payload for each in log.read(session_id)]


def through(proxy: Proxy, url: str, **options: object) -> PostgresLog:
    """Open the store of a URL through a proxy."""
    return PostgresLog(re.sub(r":\d+/", f":{proxy.port}/", url), heartbeat=False, **options)  # type: ignore[arg-type]


class Panicked(psycopg.errors.DiskFull):
    """What a server says whose disk is full while it writes a commit: its last words, then it restarts."""

    class diag:  # type: ignore[assignment]
        severity_nonlocalized = "PANIC"


def test_a_server_that_panics_may_have_written_what_it_was_told() -> None:
    """A disk that is full for one statement is a refusal; for the whole server nobody knows."""
    assert meaning(Panicked("could not write to file")) is Failure.LOST
    assert meaning(psycopg.errors.DiskFull("could not extend file")) is Failure.REFUSED


# --- answers that are lost ------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["lose the answer", "lose the question", "deliver late"])
def test_an_append_whose_answer_was_lost_is_there_once(postgres: Shared, fault: Fault) -> None:
    """Done or not when the connection broke: in the end it is there, once, and the next one follows it."""
    with Proxy(postgres.server.port) as proxy, through(proxy, postgres.url()) as log:
        lease = new_session(log)
        log.append(lease, drafts(b"one"), expected_seq=0)
        proxy.arm(fault)
        log.append(lease, drafts(b"two", b"three"), expected_seq=1)
        assert proxy.faults == 1
        log.append(lease, drafts(b"four"), expected_seq=3)
        if fault == "deliver late":
            # What the old connection still had on its way reaches the server now, and is refused.
            assert b"SELECT 0" in proxy.deliver_late()
        assert payloads(log, lease.session_id) == [b"one", b"two", b"three", b"four"]


def test_an_append_that_was_lost_before_a_take_over_is_refused(postgres: Shared) -> None:
    """It was not there when another writer took over, so it never will be: neither by us nor late."""
    url = postgres.url()
    with Proxy(postgres.server.port) as proxy, PostgresLog(url, heartbeat=False) as other:
        log = through(proxy, url, retry_s=0.0)
        lease = new_session(log)
        log.append(lease, drafts(b"one"), expected_seq=0)
        proxy.arm("deliver late")
        with pytest.raises(LogError, match="wholly or not at all"):
            log.append(lease, drafts(b"late"), expected_seq=1)
        other.release(lease)
        newer = other.acquire(lease.session_id, owner="the next one")
        assert b"SELECT 0" in proxy.deliver_late()
        other.append(newer, drafts(b"two"), expected_seq=1)
        with pytest.raises(StaleWriterError, match="taken over"):
            log.append(lease, drafts(b"late"), expected_seq=1)
        assert payloads(other, lease.session_id) == [b"one", b"two"]
        log.close()


def _create(log: PostgresLog, faulty: Faulty) -> None:
    session_id = uuid4()
    with faulty():
        log.create(session_id, created_at=BIRTH, tags={"a": "b"})
    with pytest.raises(UsageError, match="exists already"):
        log.create(session_id, created_at=BIRTH, tags={"a": "b"})


def _acquire(log: PostgresLog, faulty: Faulty) -> None:
    session_id = uuid4()
    log.create(session_id, created_at=BIRTH)
    with faulty():
        lease = log.acquire(session_id, owner="me")
    assert lease.epoch == 1
    with pytest.raises(LeaseHeldError):
        log.acquire(session_id, owner="me")
    log.append(lease, drafts(b"mine"), expected_seq=0)


def _write(log: PostgresLog, faulty: Faulty) -> None:
    lease = new_session(log)
    with faulty():
        log.append(lease, drafts(b"1", b"2", b"3"), expected_seq=0)
        log.renew(lease)
        log.put_note(lease, b"note")
        log.put_snapshot(lease, 3, b"state")
    assert payloads(log, lease.session_id) == [b"1", b"2", b"3"]
    assert log.note(lease.session_id) is not None


def _prune(log: PostgresLog, faulty: Faulty) -> None:
    lease = new_session(log)
    log.append(lease, drafts(b"1", b"2", b"3"), expected_seq=0)
    log.put_snapshot(lease, 3, b"state")
    with faulty():
        assert log.prune(lease, upto=2) == 2
    assert payloads(log, lease.session_id) == [b"3"]


def _erase(log: PostgresLog, faulty: Faulty) -> None:
    lease = new_session(log)
    with faulty():
        log.release(lease)
        log.erase(lease.session_id)
    assert list(log.sessions()) == []


def _spend(log: PostgresLog, faulty: Faulty) -> None:
    pot = SharedPot(log, uuid4().hex)
    with faulty():
        reservation = pot.reserve(1.0, 1.5)
        assert reservation is not None
        refused = pot.reserve(1.0, 1.5)
        pot.commit(reservation, 0.75)
        total = pot.add(0.25)
    assert (refused, total, pot.get(), pot.get_reserved()) == (None, 1.0, 1.0, 0.0)


@pytest.mark.parametrize("fault", ["lose the answer", "lose the question"])
@pytest.mark.parametrize("work", [_create, _acquire, _write, _prune, _erase, _spend])
def test_nothing_is_done_twice_or_forgotten(postgres: Shared, fault: Fault, work: Work) -> None:
    """Sessions, leases, events, notes, snapshots, prunes, erasures and money, at each of their statements."""
    done = 0
    while True:
        with (
            Proxy(postgres.server.port) as proxy,
            through(proxy, postgres.url(), answer_timeout_s=3.0) as log,
        ):
            work(log, partial(_faulty, proxy, fault, done))
            if not proxy.faults:
                break
        done += 1
    assert done, "no statement was seen"


@contextmanager
def _faulty(proxy: Proxy, fault: Fault, after: int) -> Iterator[None]:
    proxy.arm(fault, after=after)
    yield
    proxy.arm(None)


def test_a_server_that_falls_silent_is_not_waited_for_without_end(postgres: Shared) -> None:
    """The answer does not come in time: the append is looked for through another connection."""
    with Proxy(postgres.server.port) as proxy, through(proxy, postgres.url(), answer_timeout_s=0.5) as log:
        lease = new_session(log)
        proxy.arm("hang")
        log.append(lease, drafts(b"one"), expected_seq=0)
        assert payloads(log, lease.session_id) == [b"one"]


def test_a_renewal_is_not_waited_for_longer_than_its_lease_lasts(postgres: Shared) -> None:
    """The answer does not come: another connection is asked while the lease still holds."""
    with Proxy(postgres.server.port) as proxy, through(proxy, postgres.url()) as log:
        session_id = uuid4()
        log.create(session_id, created_at=BIRTH)
        lease = log.acquire(session_id, owner="one", ttl_s=9)
        proxy.arm("hang")
        began = time.monotonic()
        renewed = log.renew(lease)
        assert proxy.faults == 1
        assert time.monotonic() - began < 9, "the usual patience is 30 s"
        assert renewed.expires_at > lease.expires_at


def test_a_reset_beside_reservations_leaves_a_pot_that_adds_up(postgres: Shared) -> None:
    """What is reserved while a pot is reset is forgotten by it, or comes after it."""
    with PostgresLog(postgres.url(), heartbeat=False) as log:
        stop = threading.Event()
        failures: list[BaseException] = []

        def spend() -> None:
            try:
                while not stop.is_set():
                    reservation = log.pots.reserve("team", 10, 1_000_000)
                    assert reservation is not None
                    with suppress(UsageError):  # The pot was reset.
                        log.pots.settle("team", reservation, 3)
            except BaseException as error:  # noqa: BLE001  # handed to the test's own thread
                failures.append(error)

        spenders = [threading.Thread(target=spend) for _ in range(3)]
        for each in spenders:
            each.start()
        for _ in range(40):
            log.pots.reset("team")
        stop.set()
        for each in spenders:
            each.join()
        assert failures == []
        assert log.pots.sums("team")[1] == 0


# --- servers that end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["restarted", "killed"])
def test_a_server_that_comes_back_is_waited_for(own_server: Server, number: int) -> None:
    """Writers in the middle of their appends lose nothing, double nothing, and continue."""
    with PostgresLog(own_server.url(), heartbeat=False, retry_s=120) as log:
        leases = [new_session(log) for _ in range(3)]
        stop = threading.Event()
        counts = [0, 0, 0]
        failures: list[BaseException] = []

        def write(place: int) -> None:
            try:
                while not stop.is_set():
                    log.append(leases[place], drafts(b"%d" % counts[place]), expected_seq=counts[place])
                    counts[place] += 1
            except BaseException as error:  # noqa: BLE001  # handed to the test's own thread
                failures.append(error)

        writers = [threading.Thread(target=write, args=(place,)) for place in range(3)]
        for each in writers:
            each.start()
        while min(counts) < 20 and not failures:
            time.sleep(0.01)
        own_server.stop(number)
        own_server.start()
        after = list(counts)
        while any(now < before + 20 for now, before in zip(counts, after, strict=True)) and not failures:
            time.sleep(0.01)
        stop.set()
        for each in writers:
            each.join()
        assert failures == []
        for lease, count in zip(leases, counts, strict=True):
            assert payloads(log, lease.session_id) == [b"%d" % number for number in range(count)]


def test_a_server_that_is_gone_is_named_and_nothing_hangs(own_server: Server) -> None:
    """While it is away, calls fail after `retry_s`; a new log fails at once. Then the session goes on."""
    url = own_server.url()
    with PostgresLog(url, heartbeat=False, retry_s=0.2) as log:
        lease = new_session(log)
        log.append(lease, drafts(b"one"), expected_seq=0)
        own_server.stop()
        with pytest.raises(LogError, match=f"127.0.0.1:{own_server.port}"):
            log.append(lease, drafts(b"two"), expected_seq=1)
        with pytest.raises(LogError, match=r"no connection to .*check that the server runs"):
            PostgresLog(url)
        own_server.start()
        log.append(lease, drafts(b"two"), expected_seq=1)
        assert payloads(log, lease.session_id) == [b"one", b"two"]


def test_a_read_only_server_is_read_and_not_written(own_server: Server) -> None:
    """After a failover the old primary may be a standby: it can be read, and the error names the way out."""
    with PostgresLog(own_server.url(), heartbeat=False) as log:
        lease = new_session(log)
        log.append(lease, drafts(b"one"), expected_seq=0)
        own_server.stop()
        own_server.start(default_transaction_read_only="on")
        with pytest.raises(LogError, match=r"read-only.*target_session_attrs"):
            log.append(lease, drafts(b"two"), expected_seq=1)
        assert payloads(log, lease.session_id) == [b"one"]
    with PostgresLog(own_server.url(), heartbeat=False) as reader:
        assert payloads(reader, lease.session_id) == [b"one"]
        with pytest.raises(LogError, match=r"no connection to .*read-only"):
            PostgresLog(f"{own_server.url()}?target_session_attrs=read-write", retry_s=0.1)


def test_connections_that_run_out_are_waited_for(own_server: Server) -> None:
    """First until one is free, and not for ever: then the error says what to do."""
    own_server.stop()
    own_server.start(max_connections="6", superuser_reserved_connections="0")
    url = own_server.url()
    with PostgresLog(url, heartbeat=False) as log:
        lease = new_session(log)
        others: list[psycopg.Connection] = []
        with suppress(psycopg.OperationalError):
            while len(others) < 10:
                others.append(psycopg.connect(url))
        assert len(others) < 10
        with pytest.raises(LogBusyError, match="no connection left"):
            PostgresLog(url, retry_s=0.2)
        log.append(lease, drafts(b"mine is still mine"), expected_seq=0)
        timer = threading.Timer(0.3, others.pop().close)
        timer.start()
        with PostgresLog(url, heartbeat=False, retry_s=60) as second:
            assert payloads(second, lease.session_id) == [b"mine is still mine"]
        timer.join()
        for each in others:
            each.close()


def test_a_pool_is_bounded(postgres: Shared) -> None:
    """Many threads share few connections, and all of them get their turn."""
    url = f"{postgres.url()}&application_name=bounded-{os.getpid()}"
    with PostgresLog(url, heartbeat=False, max_connections=2) as log:
        leases = [new_session(log) for _ in range(6)]

        def write(lease: Lease) -> None:
            for seq in range(10):
                log.append(lease, drafts(b"x"), expected_seq=seq)

        threads = [threading.Thread(target=write, args=(each,)) for each in leases]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert [log.info(each.session_id).head for each in leases] == [10] * 6
        mine = f"application_name = 'bounded-{os.getpid()}'"
        found = postgres.execute(f"SELECT count(*) FROM pg_stat_activity WHERE {mine}")
        assert found in ([(1,)], [(2,)])


def test_a_statement_that_takes_too_long_is_cancelled_and_changes_nothing(postgres: Shared) -> None:
    """`statement_timeout` of the role is respected, and the error names it."""
    url = postgres.url()
    with (
        PostgresLog(url, heartbeat=False) as log,
        PostgresLog(f"{url}&options=-cstatement_timeout%3D200", heartbeat=False) as hurried,
    ):
        lease = new_session(log)
        schema = PostgresUrl.parse(url).schema
        with psycopg.connect(postgres.server.url(postgres.database)) as blocker:
            blocker.execute(f"LOCK TABLE {schema}.events IN ACCESS EXCLUSIVE MODE".encode())
            with pytest.raises(LogBusyError, match=r"statement_timeout.*nothing was written"):
                hurried.append(lease, drafts(b"x"), expected_seq=0)
        hurried.append(lease, drafts(b"y"), expected_seq=0)
        assert payloads(log, lease.session_id) == [b"y"]


# --- PgBouncer ------------------------------------------------------------------------------------------


def _pgbouncer() -> tuple[Path, dict[str, str]]:
    unpacked = Path(sys.prefix) / "pgbouncer"
    libraries = [str(each.parent) for each in unpacked.rglob("libcares.so.2")]
    program = unpacked / "usr/sbin/pgbouncer"
    found = shutil.which("pgbouncer")
    assert program.exists() or found, "run `make test`, which brings pgbouncer along"
    return (program, {"LD_LIBRARY_PATH": ":".join(libraries)}) if program.exists() else (Path(str(found)), {})


@contextmanager
def pgbouncer(server: Server, directory: Path) -> Iterator[int]:
    """Run PgBouncer in transaction mode, with two connections to the server for everybody; yield its port."""
    program, environment = _pgbouncer()
    port = free_port()
    directory.mkdir()
    if os.geteuid() == 0:
        os.chown(directory, NOBODY, NOBODY)
        (directory / "lib").mkdir()
        shutil.copy(program, directory / "pgbouncer")
        for each in environment.get("LD_LIBRARY_PATH", "").split(":"):
            for library in Path(each).glob("lib*.so*") if each else ():
                shutil.copy(library, directory / "lib" / library.name)
        program, environment = directory / "pgbouncer", {"LD_LIBRARY_PATH": str(directory / "lib")}
    settings = directory / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\n* = host=127.0.0.1 port={server.port}\n[pgbouncer]\nlisten_addr=127.0.0.1\n"
        f"listen_port={port}\nunix_socket_dir=\nauth_type=any\npool_mode=transaction\ndefault_pool_size=2\n"
        "server_check_query=\nignore_startup_parameters=extra_float_digits\n"
        f"[databases]\npostgres = host=127.0.0.1 port={server.port} user=postgres dbname=postgres\n"
    )
    settings.chmod(0o644)
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    process = subprocess.Popen(
        [program, settings], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **user
    )  # type: ignore[call-overload]
    try:
        while True:
            try:
                psycopg.connect(f"postgresql://postgres@127.0.0.1:{port}/postgres").close()
                break
            except psycopg.OperationalError:
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.communicate()


def test_everything_works_behind_pgbouncer_in_transaction_mode(own_server: Server) -> None:
    """Many writers share two server connections, and none meets another's prepared statements."""
    directory = own_server.kit.top / f"bouncer-{own_server.name}"
    with pgbouncer(own_server, directory) as port:
        url = f"postgresql://postgres@127.0.0.1:{port}/postgres?schema=behind"
        logs = [PostgresLog(url, heartbeat=False) for _ in range(4)]
        leases = [new_session(each) for each in logs]
        failures: list[BaseException] = []

        def write(log: PostgresLog, lease: Lease) -> None:
            try:
                for seq in range(25):
                    log.append(lease, drafts(b"%d" % seq), expected_seq=seq)
                    log.put_note(lease, b"%d" % seq)
                    log.renew(lease)
                log.put_snapshot(lease, 25, b"state")
                log.prune(lease, upto=5)
            except BaseException as error:  # noqa: BLE001  # handed to the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=write, args=each) for each in zip(logs, leases, strict=True)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert failures == []
        for log, lease in zip(logs, leases, strict=True):
            assert payloads(log, lease.session_id) == [b"%d" % seq for seq in range(5, 25)]
        with logs[0].watcher(leases[1].session_id) as watcher:
            assert watcher.wait(after=0, timeout_s=1) == 25
            assert not watcher.listens, "LISTEN does not pass a pooler in transaction mode"
        for log in logs:
            log.close()
    shutil.rmtree(directory)


def test_an_interrupted_append_is_there_or_not_and_the_log_goes_on(postgres: Shared) -> None:
    """Ctrl-C while the server is busy with it: the statement is cancelled, and the connection is good."""
    url = postgres.url()
    with PostgresLog(url, heartbeat=False) as log:
        lease = new_session(log)
        log.append(lease, drafts(b"one"), expected_seq=0)
        schema = PostgresUrl.parse(url).schema
        with psycopg.connect(postgres.server.url(postgres.database)) as blocker:
            blocker.execute(f"LOCK TABLE {schema}.events IN ACCESS EXCLUSIVE MODE".encode())
            waiting = threading.Thread(target=_interrupt_when_waiting, args=(postgres, schema))
            waiting.start()
            with pytest.raises(KeyboardInterrupt):
                log.append(lease, drafts(b"two"), expected_seq=1)
            waiting.join()
        head = log.info(lease.session_id).head
        log.append(lease, drafts(b"next"), expected_seq=head)
        assert payloads(log, lease.session_id) in ([b"one", b"next"], [b"one", b"two", b"next"])


def _interrupt_when_waiting(postgres: Shared, schema: str) -> None:
    """Send this process a Ctrl-C once the server says that an append waits for a lock."""
    waits = f"wait_event_type = 'Lock' AND query LIKE '%{schema}%'"
    query = f"SELECT count(*) FROM pg_stat_activity WHERE {waits}"
    while postgres.execute(query) == [(0,)]:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)
