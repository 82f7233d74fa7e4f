"""Commands run for real: what comes back, and that nothing of them survives.

Commands that must not end by themselves block on a FIFO that nobody writes to; that they have come so
far they tell through another FIFO. Nothing here waits for time to pass.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from uuid import uuid4

import anyio
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.clock import SystemClock
from treenail.containment import CancellationToken, wait_finished
from treenail.errors import ToolError, UsageError
from treenail.sandbox import Sandbox
from treenail.testing.clock import FakeClock
from treenail.tools import command_environment, run_command_async
from treenail.tools.process import _Output, default_shell, run_command


class Yard:
    """A directory with two FIFOs, and a mark by which the processes started in it are found."""

    def __init__(self, directory: Path, sandbox: Sandbox | None = None) -> None:
        self.directory = directory
        self.sandbox = sandbox
        self.mark = f"YARD={uuid4()}"
        os.mkfifo(directory / "ready")
        os.mkfifo(directory / "never")

    @property
    def env(self) -> dict[str, str]:
        name, _, value = self.mark.partition("=")
        return command_environment(extra={name: value})

    def run(self, command, **how):
        return run_command(command, cwd=self.directory, env=self.env, sandbox=self.sandbox, **how)

    def wait_ready(self) -> None:
        """Return when a process has opened the FIFO `ready` for writing and closed it again."""
        (self.directory / "ready").read_bytes()

    def processes(self) -> list[int]:
        """Return the processes that carry the mark; one that has ended has no environment."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def survivors(self) -> list[str]:
        """Return the command lines of the processes that carry the mark."""
        found = []
        for pid in self.processes():
            with suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_text())
        return found


@pytest.fixture(params=["a supervisor", "a sandbox"])
def yard(request, tmp_path):
    yard = Yard(tmp_path, Sandbox("require") if request.param == "a sandbox" else None)
    yield yard
    assert yard.survivors() == []


class InThread:
    """Runs a function on another thread and hands its result, or its error, to whoever joins."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.result: object = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,))
        self._thread.start()

    def _run(self, function):
        try:
            self.result = function()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever joins
            self.error = error

    def join(self):
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self.result


STUBBORN = {
    "a child": "cat never & echo > ready; wait",
    "a grandchild": "sh -c 'cat never & wait' & echo > ready; wait",
    "deaf to signals": "trap '' TERM INT HUP QUIT; echo > ready; while :; do cat never; done",
    "another session": "setsid cat never & echo > ready; wait",
    "a daemon": (
        "perl -e 'use POSIX; fork and exit; POSIX::setsid(); fork and exit;"
        " open(R, q(>), q(ready)); close(R); open(N, q(<), q(never));'; cat never"
    ),
    "orphans": "( (cat never &) & ) ; ( setsid sh -c 'cat never' & ) ; echo > ready; cat never",
    "stopped": "sh -c 'echo > ready; kill -STOP $$; cat never'; wait",
    "many": "for i in 1 2 3 4 5 6 7 8 9; do (cat never & cat never & cat never) & done; echo > ready; wait",
    "restarting": "sh -c 'while :; do cat /dev/null; done' & echo > ready; wait",
    "exec": "echo > ready; exec cat never",
}
"""Commands that do not end by themselves, by what makes them hard to end."""


class TestResults:
    def test_a_command_is_run(self, yard):
        """Its output, its errors and its exit code come back."""
        result = yard.run("echo out; echo err >&2; exit 3")
        assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
        assert (result.truncated, result.timed_out, result.cancelled) == (False, False, False)
        assert result.leftover_processes == 0
        assert result.elapsed > timedelta(0)

    def test_text_goes_to_the_shell_and_a_list_does_not(self, yard):
        """A list is a program and its arguments, letter for letter."""
        assert yard.run("echo $((1 + 1)) | cat").stdout == "2\n"
        assert yard.run(["echo", "$((1 + 1))", "| cat", "a  b"]).stdout == "$((1 + 1)) | cat a  b\n"

    def test_it_runs_where_it_is_told(self, yard):
        """In the directory, which may have an odd name."""
        odd = yard.directory / "odd 'name' żółw"
        odd.mkdir()
        assert run_command("pwd -P", cwd=odd).stdout == f"{odd.resolve()}\n"

    def test_a_signal_is_a_negative_code(self, yard):
        """As in the standard library; in a sandbox it is what a shell says."""
        code = -signal.SIGTERM if yard.sandbox is None else 128 + signal.SIGTERM
        assert yard.run("kill -TERM $$").exit_code == code

    def test_there_is_no_input(self, yard):
        """Whoever asks a question gets the end of the input, at once."""
        result = yard.run("read line || echo nobody; cat; tty")
        assert result.stdout == "nobody\nnot a tty\n"

    def test_there_is_no_terminal(self, yard):
        """A program that insists on asking a person fails instead of waiting."""
        assert yard.run("echo x > /dev/tty").exit_code != 0

    def test_odd_bytes_are_replaced(self, yard):
        """Output that is not UTF-8 is still text."""
        assert yard.run(r"printf 'a\377b'").stdout == "a\ufffdb"

    def test_signals_are_not_ignored_in_the_command(self, yard):
        """A pipeline whose reader leaves early ends quietly, as in a terminal."""
        result = yard.run(["/bin/bash", "-c", "set -o pipefail; yes | head -n 1"])
        assert result.stdout == "y\n"
        assert result.exit_code == 128 + signal.SIGPIPE
        assert result.stderr == ""

    def test_a_missing_program_is_an_error(self, yard):
        """It names the program."""
        with pytest.raises(FileNotFoundError, match="no-such-program"):
            yard.run(["no-such-program"])

    def test_a_program_that_may_not_run_is_an_error(self, yard):
        """It is a PermissionError."""
        (yard.directory / "data.txt").write_text("x")
        with pytest.raises(PermissionError, match=r"data\.txt"):
            yard.run(["./data.txt"])

    def test_a_missing_directory_is_an_error(self, tmp_path):
        """It names the directory."""
        with pytest.raises(NotADirectoryError, match="missing"):
            run_command("true", cwd=tmp_path / "missing")

    @pytest.mark.parametrize(
        ("command", "how"),
        [
            ([], {}),
            ([""], {}),
            ("a\0b", {}),
            ("true", {"timeout_s": 0}),
            ("true", {"timeout_s": -1}),
            ("true", {"timeout_s": float("nan")}),
            ("true", {"max_output_bytes": 1}),
        ],
    )
    def test_senseless_arguments_are_refused(self, tmp_path, command, how):
        """Before anything is started."""
        with pytest.raises(UsageError):
            run_command(command, cwd=tmp_path, **how)

    def test_no_descriptor_stays_open(self, tmp_path):
        """Not after a success, not after a failure; in a process where nobody else opens or closes any."""
        code = (
            "import os, sys; from treenail.tools.process import run_command as run\n"
            "numbers = lambda: sorted(os.listdir('/proc/self/fd'))\n"
            "run('true', cwd=sys.argv[1]); before = numbers(); run('echo x; exit 1', cwd=sys.argv[1])\n"
            "try: run(['no-such-program'], cwd=sys.argv[1])\n"
            "except FileNotFoundError: print(numbers() == before)"
        )
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True)
        assert done.stdout == b"True\n"

    def test_the_command_inherits_no_descriptors(self, yard):
        """It has its three streams and nothing of ours or of the supervisor."""
        result = yard.run(["ls", "/proc/self/fd"])
        # The fourth is the directory that ls itself reads.
        assert result.stdout.split() == ["0", "1", "2", "3"]


class TestEndings:
    @pytest.mark.parametrize("kind", sorted(STUBBORN))
    def test_a_timeout_ends_everything(self, yard, kind):
        """When the time is over, whatever the command started has ended before the call returns."""
        clock = FakeClock()
        running = InThread(lambda: yard.run(STUBBORN[kind], timeout_s=30, clock=clock))
        yard.wait_ready()
        clock.advance(29)
        clock.advance(2)
        result = running.join()
        assert yard.survivors() == []
        assert (result.timed_out, result.cancelled, result.exit_code) == (True, False, None)
        assert result.elapsed == timedelta(seconds=31)

    @pytest.mark.parametrize("kind", sorted(STUBBORN))
    def test_a_cancellation_ends_everything(self, yard, kind):
        """The same for a token that is cancelled from another thread."""
        token = CancellationToken()
        running = InThread(lambda: yard.run(STUBBORN[kind], cancellation=token, timeout_s=None))
        yard.wait_ready()
        token.cancel()
        result = running.join()
        assert yard.survivors() == []
        assert (result.timed_out, result.cancelled, result.exit_code) == (False, True, None)

    def test_an_exception_ends_everything(self, yard):
        """An interrupt of the waiting thread goes on only when the command is gone."""

        class Interrupt(BaseException):
            pass

        def interrupt(number, frame):
            raise Interrupt

        def when_ready():
            yard.wait_ready()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

        before = signal.signal(signal.SIGUSR1, interrupt)
        try:
            InThread(when_ready)
            with pytest.raises(Interrupt):
                yard.run(STUBBORN["orphans"])
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert yard.survivors() == []

    def test_our_own_death_ends_everything(self, yard):
        """After kill -9 of the process that runs it, the command and what it started end as well."""
        # The command and its daemon hold this FIFO open for writing; its end is theirs.
        os.mkfifo(yard.directory / "held")
        script = (
            "import sys; from treenail.sandbox import Sandbox\n"
            "from treenail.tools.process import run_command\n"
            "run_command(sys.argv[1], cwd='.', timeout_s=None, sandbox=Sandbox(sys.argv[2]))"
        )
        mode = "off" if yard.sandbox is None else "require"
        command = "exec 3> held; (setsid cat never &); echo > ready; cat never"
        runner = subprocess.Popen(
            [sys.executable, "-c", script, command, mode], cwd=yard.directory, env=yard.env
        )
        with open(yard.directory / "held", "rb") as held:
            yard.wait_ready()
            runner.kill()
            runner.wait()
            assert held.read() == b"", "read to the end, which comes when the last holder has ended"

    def test_what_stays_in_the_background_is_ended(self, yard):
        """A command that leaves processes behind returns its own result, and says how many there were."""
        result = yard.run("cat never & setsid cat never & echo started")
        assert yard.survivors() == []
        assert (result.exit_code, result.stdout, result.leftover_processes) == (0, "started\n", 2)

    def test_a_command_that_kills_its_supervisor_is_an_error(self, tmp_path):
        """Whatever it left is found and killed, and the call fails."""
        yard = Yard(tmp_path)
        with pytest.raises(ToolError, match=r"kill -9 \$PPID"):
            yard.run("(setsid cat never &) ; kill -9 $PPID; cat never")
        assert yard.survivors() == []

    def test_a_command_cannot_end_its_sandbox(self, tmp_path):
        """No signal from inside reaches the process that holds it."""
        yard = Yard(tmp_path, Sandbox("require"))
        result = yard.run("kill -9 $PPID; kill -9 1; kill -SEGV 1; echo still here")
        assert (result.exit_code, result.stdout) == (0, "still here\n")
        assert yard.run("kill -9 -1; exit 3").exit_code == 3

    def test_a_command_whose_sandbox_is_killed_is_not_run_again(self, tmp_path):
        """It had begun, so that it is an error and not a sandbox that could not start."""
        yard = Yard(tmp_path, Sandbox("require"))
        running = InThread(lambda: yard.run("echo >> runs; echo > ready; cat never"))
        yard.wait_ready()
        for pid in yard.processes():
            with suppress(ProcessLookupError):  # the first one takes the others with it
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(ToolError, match="killed from outside"):
            running.join()
        assert (tmp_path / "runs").read_text() == "\n"

    def test_signals_to_the_supervisor_do_not_free_the_command(self, yard):
        """It goes on watching; only the control pipe ends it."""
        result = yard.run("kill -TERM $PPID; kill -HUP $PPID; kill -INT $PPID; cat never & echo still here")
        assert (result.stdout, result.leftover_processes) == ("still here\n", 1)

    def test_a_token_that_is_cancelled_already_stops_it_at_once(self, yard):
        """The command does nothing."""
        token = CancellationToken()
        token.cancel()
        result = yard.run("echo > trace; cat never", cancellation=token)
        assert result.cancelled
        assert not (yard.directory / "trace").exists()

    def test_a_token_can_be_used_again(self, yard):
        """Each command leaves the token as it found it."""
        token = CancellationToken()
        for number in range(3):
            assert yard.run(f"echo {number}", cancellation=token).stdout == f"{number}\n"
        assert not token.is_cancelled

    def test_output_before_the_end_is_kept(self, yard):
        """What the command wrote before it was stopped can be read."""
        token = CancellationToken()
        running = InThread(lambda: yard.run("echo before; echo > ready; cat never", cancellation=token))
        yard.wait_ready()
        token.cancel()
        assert running.join().stdout == "before\n"

    def test_without_a_timeout_it_waits(self, yard):
        """No timer is set, however far the clock goes."""
        clock = FakeClock()
        running = InThread(
            lambda: yard.run("echo > ready; cat never; echo done", timeout_s=None, clock=clock)
        )
        yard.wait_ready()
        clock.advance(10_000_000)
        (yard.directory / "never").write_bytes(b"now\n")
        result = running.join()
        assert (result.stdout, result.timed_out) == ("now\ndone\n", False)


class TestOutput:
    def test_a_flood_on_both_streams_does_not_block(self, yard):
        """Megabytes on each are read as they come; the beginning and the end are kept."""
        command = (
            "echo first; echo FIRST >&2; head -c 20000000 /dev/zero | tr '\\0' x & "
            "head -c 20000000 /dev/zero | tr '\\0' y >&2; wait; echo; echo last; echo LAST >&2"
        )
        result = yard.run(command, max_output_bytes=1_000)
        assert result.truncated
        assert result.exit_code == 0
        assert result.stdout.startswith("first\nx")
        assert result.stdout.endswith("x\nlast\n")
        assert result.stderr.startswith("FIRST\ny")
        assert result.stderr.endswith("yLAST\n")
        assert len(result.stdout) < 1_100
        assert "[... 19999012 bytes left out ...]" in result.stdout

    def test_what_fits_is_whole(self, yard):
        """Up to the limit nothing is left out, and nothing is added."""
        result = yard.run("printf 0123456789", max_output_bytes=10)
        assert (result.stdout, result.truncated) == ("0123456789", False)
        result = yard.run("printf 0123456789x", max_output_bytes=10)
        assert result.truncated
        assert result.stdout == "01234\n[... 1 bytes left out ...]\n6789x"

    @given(
        text=st.text(alphabet="aé€😀", max_size=60),
        limit=st.integers(min_value=2, max_value=60),
        pieces=st.integers(min_value=1, max_value=7),
    )
    def test_the_ends_are_those_of_the_stream(self, text, limit, pieces):
        """However it arrives: a prefix, a suffix, what is left out counted, no character cut in two."""
        data = text.encode()
        output = _Output(limit)
        for start in range(0, len(data), pieces):
            output.add(data[start : start + pieces])
        shown = output.text()
        if len(data) <= limit:
            assert shown == text
            assert not output.is_truncated
            return
        head, _, rest = shown.partition("\n[... ")
        count, _, tail = rest.partition(" bytes left out ...]\n")
        assert text.startswith(head)
        assert text.endswith(tail)
        assert "\ufffd" not in shown
        assert len(head.encode()) + int(count) + len(tail.encode()) == len(data)
        assert len(head.encode()) + len(tail.encode()) <= limit
        assert output.is_truncated


class TestEnvironment:
    @pytest.mark.parametrize(
        "name",
        [
            "OPENAI_API_KEY", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "DB_PASSWORD",
            "PGPASSWORD", "MYSQL_PASSWD", "CLIENT_SECRET", "GOOGLE_APPLICATION_CREDENTIALS", "TOKEN",
            "SECRET", "my_api_key", "SENTRY_DSN", "SSH_PRIVATE_KEY_FILE", "NPM_TOKEN_READ", "SECRET_SAUCE",
            "GPG_PASSPHRASE", "APIKEY",
        ],
    )  # fmt: skip
    def test_secrets_are_dropped(self, name):
        """By their names, in upper or lower case; unless they are allowed by name."""
        assert name not in command_environment({name: "hush"})
        assert command_environment({name: "hush"}, allow=[name])[name] == "hush"

    @pytest.mark.parametrize(
        "name",
        ["PATH", "HOME", "PWD", "OLDPWD", "LANG", "KEYBOARD", "MONKEY", "TOKENIZERS_PARALLELISM", "EDITOR"],
    )
    def test_the_rest_is_kept(self, name):
        """What programs need to work, and names that only look like secrets."""
        assert command_environment({name: "value"})[name] == "value"

    def test_urls_with_passwords_are_dropped(self):
        """Whatever the variable is called; a URL without one stays."""
        base = {
            "DATABASE_URL": "postgres://user:hush@host/db",
            "HTTPS_PROXY": "http://user:hush@proxy:3128",
            "HTTP_PROXY": "http://proxy:3128",
        }
        kept = command_environment(base)
        assert "DATABASE_URL" not in kept
        assert "HTTPS_PROXY" not in kept
        assert kept["HTTP_PROXY"] == "http://proxy:3128"

    def test_pagers_and_prompts_are_off(self):
        """Nothing waits for a person, unless the caller insists."""
        kept = command_environment({"PAGER": "less"})
        assert (kept["PAGER"], kept["GIT_PAGER"], kept["GIT_TERMINAL_PROMPT"]) == ("cat", "cat", "0")
        assert command_environment({}, extra={"PAGER": "less", "X_TOKEN": "given"}) == {
            "PAGER": "less",
            "GIT_PAGER": "cat",
            "GIT_TERMINAL_PROMPT": "0",
            "TERM": "dumb",
            "X_TOKEN": "given",
        }

    def test_a_command_sees_no_secrets_by_default(self, tmp_path, monkeypatch):
        """Neither its own environment nor its parent's holds them."""
        monkeypatch.setenv("HUSH_TOKEN", "do-not-tell")
        monkeypatch.setenv("PLAIN", "tell")
        result = run_command("env; tr '\\0' '\\n' < /proc/$PPID/environ", cwd=tmp_path)
        assert "PLAIN=tell" in result.stdout
        assert "do-not-tell" not in result.stdout

    def test_the_environment_is_exactly_the_one_given(self, tmp_path):
        """Odd values come through, and nothing is added but the marker."""
        env = {"PATH": os.environ["PATH"], "ODD": "a\nb 'c' żółw \udcff"}
        result = run_command(["env", "-0"], cwd=tmp_path, env=env)
        names = {line.partition("=")[0] for line in result.stdout.split("\0") if line}
        assert names == {"PATH", "ODD", "TREENAIL_COMMAND"}
        assert "ODD=a\nb 'c' żółw \ufffd\0" in result.stdout

    def test_the_shell_is_there(self):
        """Commands given as text have something to run them."""
        assert os.access(default_shell(), os.X_OK)


class TestAsync:
    def test_an_interrupt_is_raised_as_itself(self, yard):
        """Whoever catches `KeyboardInterrupt` gets it, and nothing survives."""

        def interrupt(frame, event, argument):
            # Where the task begins to wait for the command.
            if event == "call" and frame.f_code is waiting:
                sys.setprofile(None)
                raise KeyboardInterrupt

        waiting = wait_finished.__code__
        command = partial(run_command_async, "cat never", cwd=yard.directory, env=yard.env)
        sys.setprofile(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                anyio.run(command)
        finally:
            sys.setprofile(None)
        assert yard.survivors() == []

    def test_the_result_is_the_same(self, yard):
        """One core, two faces."""

        async def main():
            return await run_command_async("echo out; exit 4", cwd=yard.directory, env=yard.env)

        result = anyio.run(main)
        assert (result.exit_code, result.stdout) == (4, "out\n")

    def test_errors_come_through(self, yard):
        """As themselves, not wrapped in a group."""

        async def main():
            await run_command_async(["no-such-program"], cwd=yard.directory)

        with pytest.raises(FileNotFoundError, match="no-such-program"):
            anyio.run(main)

    @pytest.mark.parametrize("kind", ["another session", "a daemon", "orphans"])
    def test_a_cancelled_task_ends_everything(self, yard, kind):
        """The cancellation goes on when nothing of the command is left."""
        left: list[list[str]] = []

        async def main():
            async with anyio.create_task_group() as group:

                async def run():
                    try:
                        await run_command_async(
                            STUBBORN[kind], cwd=yard.directory, env=yard.env, timeout_s=None
                        )
                    finally:
                        left.append(yard.survivors())

                group.start_soon(run)
                await anyio.to_thread.run_sync(yard.wait_ready)
                group.cancel_scope.cancel()

        anyio.run(main)
        assert left == [[]]

    def test_a_token_works_as_well(self, yard):
        """Cancelled from a thread, it is a result, not an exception."""
        token = CancellationToken()

        def when_ready():
            yard.wait_ready()
            token.cancel()

        async def main():
            return await run_command_async(
                "echo > ready; cat never",
                cwd=yard.directory,
                env=yard.env,
                cancellation=token,
                timeout_s=None,
            )

        waiting = InThread(when_ready)
        result = anyio.run(main)
        waiting.join()
        assert result.cancelled

    def test_the_loop_goes_on_meanwhile(self, yard):
        """Other tasks run while the command does."""

        async def main():
            async with anyio.create_task_group() as group:
                results = []

                async def run():
                    results.append(await run_command_async("echo > ready; cat never", cwd=yard.directory))

                group.start_soon(run)
                await anyio.to_thread.run_sync(yard.wait_ready)
                await anyio.to_thread.run_sync((yard.directory / "never").write_bytes, b"go on")
            return results

        (result,) = anyio.run(main)
        assert result.stdout == "go on"


def test_the_clock_is_the_machines_own_by_default(tmp_path):
    """Elapsed time is real time unless a clock is given."""
    before = SystemClock().monotonic()
    result = run_command("true", cwd=tmp_path)
    after = SystemClock().monotonic()
    assert timedelta(0) < result.elapsed <= timedelta(seconds=after - before)
