"""The programs in `examples/` run, offline, each as its reader would run it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(each.stem for each in (ROOT / "examples").glob("*.py") if "def main" in each.read_text())


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_runs(program: str, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / f"{program}.py")],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


# --- the service ---------------------------------------------------------------------------------------


def post(url: str, body: object) -> dict[str, str]:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        found: dict[str, str] = json.load(answer)
        return found


def get(url: str) -> str:
    with urlopen(url, timeout=60) as answer:
        return answer.read().decode()


@contextmanager
def served(place: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run the service under uvicorn until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "examples.service:app",
        "--port",
        str(port),
        "--log-level",
        "error",
    ]
    environment = {**os.environ, "SERVICE_PLACE": str(place), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment) as server:
        try:
            url, until = f"http://127.0.0.1:{port}", time.monotonic() + 60
            while True:
                try:
                    get(f"{url}/openapi.json")
                    break
                except URLError:
                    assert server.poll() is None and time.monotonic() < until, "the service did not start"
            yield url, server
        finally:
            server.kill()


def test_fifty_runs_at_once_survive_kills_of_the_server(tmp_path: Path) -> None:
    """Each client repeats its request until it has its answer; each note is written once."""
    keys = [f"order-{number}" for number in range(50)]
    done: dict[str, str] = {}
    enough = threading.Event()

    def client(url: str, key: str) -> None:
        if key in done:
            return
        try:
            run_id = post(f"{url}/runs", {"key": key, "task": "Write two notes."})["id"]
            done[key] = json.loads(get(f"{url}/runs/{run_id}/result"))["output"]
        except OSError:
            pass  # The server was killed: the next round asks again.
        if len(done) >= 15:
            enough.set()

    for round_number in range(3):
        with served(tmp_path) as (url, server), ThreadPoolExecutor(50) as clients:
            asked = [clients.submit(client, url, key) for key in keys]
            if round_number == 0:
                assert enough.wait(120)
                os.kill(server.pid, signal.SIGKILL)
            for each in asked:
                each.result()
        if len(done) == len(keys):
            break
    assert done == dict.fromkeys(keys, "Done.")
    for key in keys:
        assert (tmp_path / "work" / key / "notes.txt").read_text() == "one\ntwo\n"


def test_a_client_streams_answers_and_comes_back_by_number(tmp_path: Path) -> None:
    with served(tmp_path) as (url, _):
        run_id = post(f"{url}/runs", {"key": "k", "task": "Write two notes.", "asks": True})["id"]
        for _ in range(2):
            events = [
                json.loads(each[6:])
                for each in get(f"{url}/runs/{run_id}/events").splitlines()
                if each[:5] == "data:"
            ]
            (held,) = [each for each in events if each["type"] == "ToolHeld"][-1:]
            post(f"{url}/runs/{run_id}/answer", {"call_id": held["data"]["call_id"], "approved": True})
        assert json.loads(get(f"{url}/runs/{run_id}/result")) == {"state": "completed", "output": "Done."}
        whole = get(f"{url}/runs/{run_id}/events")
        rest = get(f"{url}/runs/{run_id}/events?after=5")
    assert rest and whole.endswith(rest)
    assert (tmp_path / "work" / "k" / "notes.txt").read_text() == "one\ntwo\n"
