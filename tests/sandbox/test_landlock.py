"""Landlock, the fallback where there is no bubblewrap, attacked from inside: as root and as an ordinary user.

What it does not keep in is tested as well, so that the docs stay true.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sandbox.test_attacks import SECRETS, USERS, WRITES, Attacker

import treenail

HELD = "landlock (modes and times outside are open), no network"
LEFT_OPEN = {"a mode", "a time"}
ANOTHER_MACHINE = """
mount --bind /dev/null "$(command -v bwrap)" && mount -t tmpfs none /mnt && mkdir /mnt/python /mnt/treenail &&
mount --bind "$1" /mnt/python && mount --bind "$2" /mnt/treenail && shift 2 && exec "$@"
"""
"""Hides bubblewrap in a mount namespace, and shows everybody the interpreter and our scripts."""


@pytest.fixture(scope="module", params=sorted(USERS))
def attacker(request: pytest.FixtureRequest) -> Iterator[Attacker]:
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    base = Path(
        tempfile.mkdtemp(prefix="treenail-attack-", dir="/var/lib" if os.geteuid() == 0 else Path.home())
    )
    base.chmod(0o755)
    ours = str(Path(treenail.__file__).parent)
    before = ("unshare", *user, "--mount", "sh", "-c", ANOTHER_MACHINE, "sh", sys.base_prefix, ours)
    made = Attacker(USERS[request.param], base, before, "/mnt")
    yield made
    made.close()
    shutil.rmtree(base)


def test_it_is_the_second_choice_and_not_enough_where_a_sandbox_is_required(attacker: Attacker) -> None:
    """The log says what held; `require` refuses it and says why."""
    assert attacker.run("true", mode="auto").confinement == HELD
    assert "weaker than bubblewrap" in attacker.run("true").error


@pytest.mark.parametrize("way", sorted(WRITES))
def test_no_content_is_written_outside(attacker: Attacker, way: str) -> None:
    """Only modes and times are left open, and the log says so."""
    before = attacker.picture()
    said = attacker.run(WRITES[way], mode="auto")
    if way in LEFT_OPEN:
        assert attacker.picture() != before, "the docs say that this is open; is it closed now?"
        assert (attacker.outside / "victim").read_text() == "untouched"
    else:
        assert said.exit_code != 0, said
        assert attacker.picture() == before


def test_the_workspace_and_a_temporary_directory_can_be_written(attacker: Attacker) -> None:
    """The latter is gone after the command; `/tmp` itself is closed."""
    said = attacker.run(
        "mkdir d && echo x > d/made && mv d/made . && ln made other && echo t > $TMPDIR/t && echo $TMPDIR; "
        "echo x > /tmp/evil && echo WROTE; ls /tmp/* > /dev/null; cat $TMPDIR/t",
        mode="auto",
    )
    assert (attacker.workspace / "other").read_text() == "x\n"
    temporary, content = said.stdout.split()
    assert content == "t" and not Path(temporary).exists()
    assert said.refused == ["write"]


def test_secrets_and_other_processes_are_out_of_reach(attacker: Attacker) -> None:
    """No secret is read, nobody is signalled, and no capability is kept but those to write files."""
    store = attacker.base / "runs.db"
    store.write_text("hush")
    look = f"cd ~; cat {' '.join(SECRETS)} {store}; cat /proc/*/environ | tr '\\0' '\\n'; env"
    assert "hush" not in attacker.run(look, mode="auto", hidden=[str(store)]).stdout
    with subprocess.Popen(["sleep", "1000"], user=attacker.user if os.geteuid() == 0 else None) as victim:
        try:
            said = attacker.run(f"kill -9 {victim.pid}; kill -9 $PPID; echo still here", mode="auto")
            assert said.stdout == "still here\n"
            assert victim.poll() is None
        finally:
            victim.kill()
    said = attacker.run("grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status", mode="auto")
    capabilities = "000000000000001b" if attacker.user == 0 else "0000000000000000"
    assert said.stdout.split() == f"CapEff: {capabilities} NoNewPrivs: 1 Seccomp: 2".split()


def test_there_is_no_socket_without_the_network(attacker: Attacker) -> None:
    """Neither of the network nor of a program that listens by path; the grant opens both."""
    place = str(attacker.outside / "socket")
    with socket.socket(socket.AF_UNIX) as server, socket.socket() as other:
        server.bind(place)
        os.chmod(place, 0o777)
        other.bind(("127.0.0.1", 0))
        for each in (server, other):
            each.listen()
            each.setblocking(False)
        connect = (
            "perl -MSocket -e 'socket(S, AF_UNIX, SOCK_STREAM, 0);"
            f"connect(S, pack_sockaddr_un(q({place})));"
            f"socket(T, AF_INET, SOCK_STREAM, 0) or die qq($!); connect(T, pack_sockaddr_in("
            f"{other.getsockname()[1]}, INADDR_LOOPBACK)) or die qq($!)'"
        )
        said = attacker.run(connect, mode="auto")
        assert said.refused == ["network"]
        for each in (server, other):
            with pytest.raises(BlockingIOError):
                each.accept()
        assert attacker.run(connect, mode="auto", network=True).exit_code == 0
        for each in (server, other):
            each.accept()[0].close()
    os.unlink(place)


def test_what_it_cannot_hide_is_an_error(attacker: Attacker) -> None:
    """A secret in the workspace would be seen, so that no command runs."""
    (attacker.workspace / "runs.db").write_text("hush")
    said = attacker.run("touch ran", mode="auto", hidden=[str(attacker.workspace / "runs.db")])
    assert "cannot hide" in said.error
    assert not (attacker.workspace / "ran").exists()
