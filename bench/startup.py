"""What a command costs before its work begins: CPU seconds of the whole process.

Each figure is the best of several rounds, with the bytecode of every module already written.
"""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.report import LIFE_COMMAND, LIST_COMMAND, RUN_COMMAND, Row, Size
from treenail import Agent
from treenail.providers.scripted import ScriptedProvider

CLIENT = "import anthropic; anthropic.AsyncAnthropic(api_key='a key', base_url='http://127.0.0.1:1')"


def rows(size: Size) -> Iterator[Row]:
    """Measure the lines; what stands in the column of ratios is seconds, too."""
    rounds = {Size.FULL: 7, Size.QUICK: 2, Size.LEAST: 1}[size]
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "runs.db")
        for number in range(10):
            Agent("greeter").run(f"Greet {number}", provider=ScriptedProvider(["Hi."]), store=store).close()
        listed = ["-m", "treenail", "list", "--store", store]
        if size is not Size.LEAST:
            run_cpu_s(listed, folder)  # writes the bytecode
        cpu_s = min(run_cpu_s(listed, folder) for _ in range(rounds))
        yield Row(LIST_COMMAND, cpu_s, None, cpu_s, 0.35, LIST_COMMAND)

        life_s = min(until_sign_of_life(folder) for _ in range(rounds))
        yield Row(LIFE_COMMAND, life_s, None, life_s, 0.3, LIFE_COMMAND)

        if size is not Size.LEAST:
            until_first_request(folder)
            run_cpu_s(["-c", CLIENT], folder)
        pairs = [(until_first_request(folder), run_cpu_s(["-c", CLIENT], folder)) for _ in range(rounds)]
        whole, sdk = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
        yield Row(RUN_COMMAND, whole, sdk, whole - sdk, 0.5, RUN_COMMAND)


def start(arguments: Sequence[str], folder: str, errors: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environ |= {"HOME": folder, "ANTHROPIC_API_KEY": "a key"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=errors,
    )


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    """Wait for a process and return the CPU time that it and its children have used."""
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime


def run_cpu_s(arguments: Sequence[str], folder: str) -> float:
    process = start(arguments, folder)
    used = cpu_s(process)
    assert process.returncode == 0, f"{arguments} exited with {process.returncode}"
    return used


def until_first_request(folder: str) -> float:
    """Start a run against a server of our own, which kills it when its first request has arrived."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        process = start(
            ["-m", "treenail", "run", "Hi", "--model", "anthropic/claude-sonnet-5-5", "--base-url", url],
            folder,
        )
        requests: list[bytes] = []

        def serve() -> None:
            # The run asks first whether the model is there, which is part of what it costs.
            while not (requests and requests[-1].startswith(b"POST")):
                connection, _ = server.accept()
                with connection:
                    requests.append(connection.recv(65_536))
                    if requests[-1].startswith(b"GET"):
                        connection.sendall(
                            b"HTTP/1.1 500 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                        )
            process.send_signal(signal.SIGKILL)

        thread = threading.Thread(target=serve)
        thread.start()
        used = cpu_s(process)
        server.close()
        thread.join()
    assert requests[-1].startswith(b"POST /v1/messages"), "the run sent no request"
    return used


def until_sign_of_life(folder: str) -> float:
    """Start a run in a terminal, which is killed when it has shown its first line."""
    master, slave = pty.openpty()
    process = start(["-m", "treenail", "run", "Hi"], folder, slave)
    os.close(slave)
    shown = os.read(master, 1024)
    process.send_signal(signal.SIGKILL)
    used = cpu_s(process)
    os.close(master)
    assert shown, "the run has shown nothing"
    return used
