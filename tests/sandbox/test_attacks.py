"""The sandbox attacked from inside, as root and as an ordinary user: nothing gets out, and nothing gets in.

The attacks that a plain process could do are tried without a sandbox first, so that each is known to be one.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from treenail.sandbox.seccomp import refused_calls

NOBODY = 65534
USERS = {"root": 0, "an ordinary user": NOBODY} if os.geteuid() == 0 else {"an ordinary user": os.geteuid()}
SECRETS = [".ssh/id_ed25519", ".aws/credentials", ".config/gh/hosts.yml", ".netrc", ".mozilla/cookies.sqlite"]


class Attacker:
    """A process that runs commands as a user, in a workspace beside a directory that is not its business."""

    def __init__(self, user: int, base: Path, before: tuple[str, ...] = (), *words: str) -> None:
        self.user, self.base = user, base
        self.workspace, self.outside, self.home = base / "workspace", base / "outside", base / "home"
        for each in (self.workspace, self.outside, self.home):
            each.mkdir()
        (self.outside / "victim").write_text("untouched")
        for name in SECRETS:
            (self.home / name).parent.mkdir(parents=True, exist_ok=True)
            (self.home / name).write_text("hush")
        for each in (base, *base.rglob("*")):
            os.chown(each, user, user)
        script = Path(__file__).with_name("attacker.py")
        self.process = subprocess.Popen(
            [*before, sys.executable, str(script), str(user), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        assert self.process.stdout is not None and self.process.stdin is not None
        self.answers, self.orders = self.process.stdout, self.process.stdin
        assert self.answers.readline() == "ready\n"

    def run(self, command: str, **options: Any) -> Any:
        order = {"mode": "require", "network": False, "write": [], "hidden": [], "layer": [], "env": {}}
        order |= {"home": str(self.home), "workspace": str(self.workspace), "command": command, **options}
        order["env"] = {"OUT": str(self.outside), **order["env"]}
        self.orders.write(json.dumps(order) + "\n")
        self.orders.flush()
        return SimpleNamespace(**json.loads(self.answers.readline()))

    def picture(self) -> dict[str, Any]:
        """Return what is outside of the workspace: names, modes, owners, times, contents."""
        found = {}
        for each in sorted([self.outside, *self.outside.rglob("*")]):
            status = each.lstat()
            content = each.read_bytes() if each.is_file() else b""
            found[str(each)] = (status.st_mode, status.st_uid, status.st_mtime_ns, content)
        return found

    def close(self) -> None:
        self.orders.close()
        self.answers.close()
        self.process.wait()


@pytest.fixture(scope="module", params=sorted(USERS))
def attacker(request: pytest.FixtureRequest) -> Iterator[Attacker]:
    # Not below /tmp, which a command does not see at all.
    base = Path(
        tempfile.mkdtemp(prefix="treenail-attack-", dir="/var/lib" if os.geteuid() == 0 else Path.home())
    )
    base.chmod(0o755)
    made = Attacker(USERS[request.param], base)
    yield made
    made.close()
    shutil.rmtree(base)


WRITES = {
    "by path": "echo x > $OUT/victim",
    "a new file": "echo x > $OUT/new",
    "through a link": "ln -sfn $OUT link; echo x > link/victim",
    "through a hard link": "ln $OUT/victim hard && echo x > hard",
    "a rename": "mv $OUT/victim stolen",
    "a removal": "rm -f $OUT/victim",
    "a mode": "chmod 777 $OUT/victim",
    "a time": "touch $OUT/victim",
    "a directory": "mkdir $OUT/made",
    "by /proc/self/root": "echo x > /proc/self/root$OUT/victim",
    "by the shell's directory": "cd $OUT && echo x > /proc/$$/cwd/victim",
}
ESCAPES = {
    "the first process's root": "echo x > /proc/1/root$OUT/victim",
    "a remount": "mount -o remount,rw,bind / ; mount -o remount,rw / ; echo x > $OUT/victim",
    "a bind mount": "mkdir -p here; mount --bind $OUT here && echo x > here/victim",
    "a mount of its own": "mkdir -p here; unshare --mount mount --bind $OUT here && echo x > here/victim",
    "a user namespace": "unshare -Urm sh -c 'mount -o remount,rw,bind /; echo x > $OUT/victim'",
    "another namespace": "nsenter --target 1 --mount sh -c 'echo x > $OUT/victim'",
    "an unmount": "umount -l / ; umount -l $PWD ; umount /proc; echo x > $OUT/victim",
    "a new root": "mkdir -p r; chroot / sh -c 'echo x > $OUT/victim'; pivot_root . r; echo x > $OUT/victim",
    "a device": "mknod disk b 254 0 && echo x > disk",
    "a control group": "mkdir /sys/fs/cgroup/evil && echo x > $OUT/victim",
}


@pytest.mark.parametrize("way", sorted(WRITES))
def test_nothing_is_written_outside(attacker: Attacker, way: str) -> None:
    """What a plain process can change, a confined one cannot, on a layer or not."""
    before = attacker.picture()
    attacker.run(WRITES[way], mode="off")
    assert attacker.picture() != before, "this is an attack"
    shutil.rmtree(attacker.outside)
    attacker.outside.mkdir()
    (attacker.outside / "victim").write_text("untouched")
    for each in (attacker.outside, attacker.outside / "victim"):
        os.chown(each, attacker.user, attacker.user)
    before = attacker.picture()
    for layer in ([], layer_of(attacker)):
        said = attacker.run(WRITES[way], layer=layer)
        assert said.exit_code != 0, said
        assert attacker.picture() == before


def layer_of(attacker: Attacker) -> list[str]:
    """Make a layer over the workspace."""
    place = attacker.base / f"layer-{uuid4().hex}"
    made = [attacker.workspace, place / "upper", place / "work"]
    for each in made[1:]:
        each.mkdir(parents=True)
        os.chown(each, attacker.user, attacker.user)
    return [str(each) for each in made]


@pytest.mark.parametrize("way", sorted(ESCAPES))
def test_the_walls_hold(attacker: Attacker, way: str) -> None:
    """Mounts, namespaces and devices are refused, on a layer or not."""
    before, host = attacker.picture(), Path("/proc/self/mountinfo").read_text()
    for layer in ([], layer_of(attacker)):
        said = attacker.run(ESCAPES[way], layer=layer)
        assert said.exit_code != 0, said
        assert attacker.picture() == before
    assert Path("/proc/self/mountinfo").read_text() == host


def test_no_privileges_are_gained(attacker: Attacker) -> None:
    """A set-uid program runs as its caller; root has the capabilities to write files, and no others."""
    program = attacker.workspace / "who"
    shutil.copy(shutil.which("id") or "/usr/bin/id", program)
    if os.geteuid() == 0:
        os.chown(program, 0, 0)
        program.chmod(0o4755)
        if attacker.user:
            assert attacker.run("./who -u", mode="off").stdout == "0\n", "this is an attack"
    said = attacker.run("./who -u; grep -E 'Cap(Eff|Prm)|NoNewPrivs|Seccomp:' /proc/self/status")
    program.unlink()
    capabilities = "000000000000001b" if attacker.user == 0 else "0000000000000000"
    status = f"CapPrm: {capabilities} CapEff: {capabilities} NoNewPrivs: 1 Seccomp: 2"
    assert said.stdout.split() == [str(attacker.user), *status.split()]


def test_dangerous_system_calls_are_refused(attacker: Attacker) -> None:
    """Each by itself; and the flags that make a user namespace or type into a terminal."""
    numbers = refused_calls()
    tried = "".join(
        f'$! = 0; syscall({number}, 0, 0, 0, 0, 0, 0); print "{name} ", $!+0, "\\n";'
        for name, number in numbers.items()
    )
    said = attacker.run(f"perl -e '{tried}'")
    answers = dict(line.split() for line in said.stdout.splitlines())
    assert answers == dict.fromkeys(numbers, "1"), "EPERM"
    assert {"mount", "ptrace", "bpf", "keyctl", "userfaultfd", "open_by_handle_at", "io_uring_setup"} <= set(
        numbers
    )
    typing = 'my $b = "x"; ioctl(STDOUT, 0x5412, $b); print STDERR $!+0'
    assert attacker.run(f"perl -e '{typing}'").stderr == "1"


def test_no_set_uid_program_is_left(attacker: Attacker) -> None:
    """It would give every user of the machine the rights of whoever runs the agent; other bits are free."""
    old = "90,$p,04755 91,3,06755 85,$c,04755 2,$o,0101,04755 133,$n,0104755,0 "
    new = "268,-100,$p,04755 257,-100,$o,0101,04755 259,-100,$n,0104755,0 "
    calls = {"x86_64": old + new, "aarch64": "52,3,06755 53,-100,$p,04755 56,-100,$o,0101,04755 "}
    mine = f"{calls[platform.machine()]} 452,-100,$p,04755,0 437,-100,$o,$h,24"
    tried = "".join(f'$! = 0; syscall({each}); print $!+0, " ";' for each in mine.split())
    paths = 'my ($p, $c, $o, $n) = ("p", "c", "o", "n"); my $h = pack("QQQ", 0101, 04755, 0); open(P, ">p");'
    free = 'chmod(02755, "p") or die; sysopen(F, "free", 0101, 0644) or die; sysopen(F, "p", 0, 04755) or die'
    said = attacker.run(f"perl -e '{paths} {tried} {free}' 3<. && find . -perm /4000")
    assert said.exit_code == 0, said.stderr
    assert said.stdout.split() == ["1"] * (len(mine.split()) - 1) + ["38"], "EPERM, and ENOSYS for openat2"


def test_other_processes_are_out_of_reach(attacker: Attacker) -> None:
    """They cannot be seen, signalled or traced."""
    with subprocess.Popen(["sleep", "1000"], user=attacker.user if os.geteuid() == 0 else None) as victim:
        try:
            probe = f"kill -0 {victim.pid}; ls -d /proc/{victim.pid}"
            assert attacker.run(probe, mode="off").exit_code == 0, "this is an attack"
            said = attacker.run(f"kill -9 {victim.pid}; {probe}; echo /proc/[0-9]*")
            assert said.exit_code == 0 and len(said.stdout.split()) <= 4, said
            assert victim.poll() is None
        finally:
            victim.kill()


def test_no_daemon_is_left(attacker: Attacker) -> None:
    """Not even one that left its session, its parent and its name."""
    held = attacker.workspace / "held"
    os.mkfifo(held)
    os.chown(held, attacker.user, attacker.user)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    daemon = (
        "fork and exit; POSIX::setsid(); fork and exit; $0 = q(init); open(H, q(>), q(held)); kill STOP => $$"
    )
    try:
        said = attacker.run(f"perl -MPOSIX -e '{daemon}'; exec 3> held; echo done")
        assert said.stdout == "done\n"
        os.set_blocking(reader, True)
        assert os.read(reader, 1) == b"", "all who held it have ended"
    finally:
        os.close(reader)
        held.unlink()


CONNECT = "perl -MIO::Socket::UNIX -MSocket -e '{}'"


def test_sockets_of_other_programs_are_out_of_reach(attacker: Attacker) -> None:
    """By path and by abstract name, also in the workspace; commands can still talk to each other."""
    name = f"treenail-{uuid4().hex}"
    (attacker.base / "way").symlink_to(attacker.outside)
    places: dict[str, str] = {
        "outside": str(attacker.outside / "socket"),
        "by a link": str(attacker.base / "way" / "socket"),
        "workspace": str(attacker.workspace / "socket"),
        "abstract": f"\0{name}",
    }
    for kind, place in places.items():
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(place)
            server.listen()
            server.setblocking(False)
            if kind != "abstract":
                os.chmod(place, 0o777)
            shown = place.replace("\0", "\\0")
            attack = f'socket(S, AF_UNIX, SOCK_STREAM, 0); connect(S, pack_sockaddr_un("{shown}")) or die'
            command = CONNECT.format(attack)
            assert attacker.run(command, mode="off").exit_code == 0, "this is an attack"
            server.accept()[0].close()
            for layer in ([], layer_of(attacker)):
                assert attacker.run(command, layer=layer).exit_code != 0, kind
                with pytest.raises(BlockingIOError):
                    server.accept()
        if kind != "abstract":
            os.unlink(place)
    (attacker.base / "way").unlink()
    own = (
        'socket(L, AF_UNIX, SOCK_STREAM, 0); bind(L, pack_sockaddr_un("/tmp/own")); listen(L, 1);'
        'socket(S, AF_UNIX, SOCK_STREAM, 0); connect(S, pack_sockaddr_un("/tmp/own")) or die'
    )
    assert attacker.run(CONNECT.format(own)).exit_code == 0


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_there_is_no_network(attacker: Attacker, family: int, address: str) -> None:
    """No connection, no datagram (so no DNS), over IPv4 or IPv6; with the grant there is."""
    with (
        socket.socket(family, socket.SOCK_STREAM) as server,
        socket.socket(family, socket.SOCK_DGRAM) as mailbox,
    ):
        for each in (server, mailbox):
            each.bind((address, 0))
            each.setblocking(False)
        server.listen()
        udp, tcp = (
            f'IO::Socket::IP->new(PeerHost=>"{address}", PeerPort=>{each.getsockname()[1]}, Proto=>"{kind}")'
            for each, kind in ((mailbox, "udp"), (server, "tcp"))
        )
        command = f"perl -MIO::Socket::IP -e 'my $u = {udp}; $u->send(\"x\") if $u; {tcp}'; true"
        said = attacker.run(command)
        assert (said.exit_code, said.confinement) == (0, "bubblewrap, no network")
        for each in (server.accept, lambda: mailbox.recv(1)):
            with pytest.raises(BlockingIOError):
                each()
        assert attacker.run("cat /proc/net/dev | grep -v -e lo: -e '|'").stdout == ""
        said = attacker.run(command, network=True)
        assert (said.exit_code, said.confinement) == (0, "bubblewrap, network")
        server.accept()[0].close()
        assert mailbox.recv(1) == b"x"


def test_secrets_are_not_seen(attacker: Attacker) -> None:
    """Neither files nor variables, nor the run's own store; not even in a directory that was granted."""
    store = attacker.base / "runs.db"
    store.write_text("hush")
    store.chmod(0o644)
    look = f"cd ~; cat {' '.join(SECRETS)} {store}; cat /proc/*/environ | tr '\\0' '\\n'; env"
    env = {"OTHER": "seen"}
    assert "hush" in attacker.run(look, mode="off", env=env).stdout, "this is an attack"
    for grants in ([], [str(attacker.home)]):
        said = attacker.run(look, env=env, hidden=[str(store)], write=grants)
        assert "hush" not in said.stdout and "OTHER=seen" in said.stdout
    assert attacker.run("cat ~/.ssh/id_ed25519", write=[str(attacker.home / ".ssh")]).stdout == "hush"


def test_run_is_empty_and_tmp_is_private(attacker: Attacker) -> None:
    """What others have there is not seen; what a command leaves there is gone."""
    with tempfile.NamedTemporaryFile() as theirs:
        os.chmod(theirs.name, 0o666)
        name = f"treenail-{uuid4().hex}"
        said = attacker.run(f"ls -A /run; ls {theirs.name} ; echo x > /tmp/{name} && cat /tmp/{name}")
        assert said.stdout == "x\n"
    assert not Path("/tmp", name).exists()
    assert attacker.run(f"cat /tmp/{name}").exit_code != 0


def test_the_kernels_settings_stay(attacker: Attacker) -> None:
    """Root could name a program there that the kernel runs outside."""
    said = attacker.run(
        "for f in /proc/sys/kernel/core_pattern /proc/sys/kernel/hostname; do cat $f > $f && echo WROTE; done"
    )
    assert "WROTE" not in said.stdout


def test_a_grant_opens_one_directory(attacker: Attacker) -> None:
    """And nothing beside it."""
    granted = attacker.base / "granted"
    granted.mkdir()
    os.chown(granted, attacker.user, attacker.user)
    before = attacker.picture()
    said = attacker.run(f"echo x > {granted}/made; echo x > $OUT/victim", write=[str(granted)])
    assert (granted / "made").read_text() == "x\n"
    assert attacker.picture() == before
    assert said.confinement == f"bubblewrap, no network, may write {granted}"


def test_a_grant_that_a_command_replaces_by_a_link_is_not_followed(attacker: Attacker) -> None:
    """Neither in the workspace, nor in another grant; nor does the workspace itself move so."""
    granted = attacker.base / "shared" / "granted"
    (attacker.workspace / "granted").mkdir()
    granted.mkdir(parents=True)
    for each in (granted.parent, granted, attacker.workspace / "granted"):
        os.chown(each, attacker.user, attacker.user)
    before = attacker.picture()
    swap = "mv granted old; ln -s $OUT granted"
    for place in (attacker.workspace, granted.parent):
        write = [str(place / "granted"), str(granted.parent)]
        assert attacker.run(f"cd {place}; {swap}", write=write).exit_code == 0
        attacker.run(f"echo x > {place}/granted/victim; echo x > $OUT/victim", write=write)
        assert attacker.picture() == before
        (place / "granted").unlink()
    attacker.run(
        f"mv {attacker.workspace} {attacker.base}/old; ln -s $OUT {attacker.workspace}",
        write=[str(attacker.base)],
    )
    assert attacker.workspace.is_dir() and not attacker.workspace.is_symlink()


def test_what_a_command_wrote_does_not_become_its_sandbox(attacker: Attacker) -> None:
    """A program of the workspace that is first on the path is not the one that confines."""
    for name in ("bwrap", "unshare", "mount"):
        fake = attacker.workspace / "bin" / name
        fake.parent.mkdir(exist_ok=True)
        fake.write_text('#!/bin/sh\necho x > "$OUT/victim"\n')
        fake.chmod(0o755)
    env = {"PATH": f"{attacker.workspace}/bin:{os.environ['PATH']}"}
    before = attacker.picture()
    for layer in ([], layer_of(attacker)):
        said = attacker.run("echo fine; bwrap; true", layer=layer, env=env)
        assert said.stdout == "fine\n"
        assert attacker.picture() == before


def test_caches_are_private_and_kept(attacker: Attacker) -> None:
    """Go, cargo, uv, pip and npm write to a directory of the workspace's own."""
    names = "GOCACHE GOMODCACHE CARGO_HOME UV_CACHE_DIR PIP_CACHE_DIR npm_config_cache"
    command = f"for n in {names}; do eval d=\\$$n; mkdir -p $d && echo $n > $d/made && echo $d; done"
    made = attacker.run(command).stdout.split()
    assert len(set(made)) == 6
    assert all(Path(each, "made").exists() for each in made)
    assert all(each.startswith(f"{attacker.home}/.cache/treenail/commands/workspace-") for each in made)
    again = attacker.run("cat $CARGO_HOME/made; touch ~/.cache/other")
    assert again.stdout == "CARGO_HOME\n" and again.exit_code != 0
    cargo = attacker.home / ".cargo"
    cargo.mkdir()
    os.chown(cargo, attacker.user, attacker.user)
    assert attacker.run("echo ${CARGO_HOME-unset}", write=[str(cargo)]).stdout == "unset\n"
    home = str(attacker.workspace)
    assert attacker.run("echo $CARGO_HOME", home=home).stdout == "/tmp/caches/cargo\n", "no link leads out"
    assert not (attacker.workspace / ".cache").exists()


def test_other_owners_files_in_a_workspace_can_be_written_by_root(attacker: Attacker) -> None:
    """Root works on files of every owner, as without a sandbox; nobody else does."""
    if os.geteuid() == 0:
        theirs = attacker.workspace / "theirs"
        theirs.write_text("theirs")
        theirs.chmod(0o600)
        os.chown(theirs, 12345, 12345)
        said = attacker.run("echo mine > theirs && chmod 640 theirs && chown 23456 theirs")
        assert (said.exit_code == 0) == (attacker.user == 0)
        status = theirs.stat()
        expected = (23456, 0o640) if attacker.user == 0 else (12345, 0o600)
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == expected
        theirs.unlink()
