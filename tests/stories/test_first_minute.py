"""The first minute: what is missing or wrong is one line, before a run is made."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from tests.stories.terminal import Terminal, clean_environment

from treenail.containment import default_prices
from treenail.errors import UsageError
from treenail.presenters.cli.models import DEFAULTS
from treenail.presenters.cli.preflight import check_settings, problem_of, retired

SECRET = "sk-test-0123456789abcdef"


class _Models(BaseHTTPRequestHandler):
    """A vendor that knows its keys and its models, and has no other interface."""

    def do_GET(self) -> None:
        key = self.headers.get("x-api-key") or (self.headers.get("authorization") or "").removeprefix(
            "Bearer "
        )
        names = ("gpt-5", "gpt-5-mini", "claude-sonnet-4-5", "llama3:latest", "\x1b]0;owned\x07")
        if not self.path.startswith("/v1/"):
            self._say(404, {})
        elif key != SECRET:
            self._say(401, {"error": {"message": f"Incorrect API key provided: {key}"}})
        elif self.path == "/v1/models":
            self._say(200, {"data": [{"id": each} for each in names]})
        else:
            found = self.path.removeprefix("/v1/models/") in names
            self._say(200 if found else 404, {"error": {"code": "model_not_found"}})

    def _say(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture(scope="module")
def vendor() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Models)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@contextmanager
def dead_port() -> Iterator[str]:
    """Yield an address at which nobody can listen: the port is taken, and not listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def refused(tmp_path: Path, *words: str, **environ: str) -> str:
    """Run a command that cannot begin; return the one line that it says, and check that it left nothing."""
    project = tmp_path / "project"
    project.mkdir(exist_ok=True)
    process = Popen(
        [sys.executable, "-m", "treenail", "run", "hi", *words],
        cwd=project,
        env={**clean_environment(project), **environ},
        stdout=PIPE,
        stderr=PIPE,
        text=True,
    )
    said = process.communicate(timeout=300)
    assert process.returncode == 2, said
    assert said[0] == "" and said[1].count("\n") == 1, said
    assert SECRET not in said[1] and "\x1b" not in said[1]
    assert not list(tmp_path.rglob("runs.db")), "a run that cannot begin is not in the store"
    return said[1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "set OPENAI_API_KEY or ANTHROPIC_API_KEY"),
        (("--model", "gemini/x"), "litellm/gemini/x"),
        (("--model", "m", "--base-url", "localhost:8701"), "write --base-url http://localhost:8701"),
    ],
)
def test_what_the_settings_tell_is_said_without_asking_anybody(
    tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    before = os.times()
    assert told in refused(tmp_path, *words)
    after = os.times()
    spent_s = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent_s < 3


def test_a_key_that_is_missing_is_named() -> None:
    for kind, model, variable in (
        ("anthropic", "claude-sonnet-4-5", "ANTHROPIC_API_KEY"),
        ("openai", "gpt-5", "OPENAI_API_KEY"),
        ("litellm", "gemini/x", "GEMINI_API_KEY"),
    ):
        with pytest.raises(UsageError, match=f"{kind}/{model} needs a key: set {variable}"):
            check_settings(kind, model, None, {})
        check_settings(kind, model, None, {variable: "k"})
        check_settings(kind, model, "https://127.0.0.1:1", {})
    check_settings("anthropic", "x", None, {"ANTHROPIC_AUTH_TOKEN": "t"})
    for url in ("ftp://x", "http://", "http://x:y", "//x", "x"):
        with pytest.raises(UsageError, match="--base-url http://"):
            check_settings("openai", "m", url, {})


def test_a_server_that_is_not_there_is_said_before_a_run_is_made(tmp_path: Path) -> None:
    with dead_port() as place:
        words = ("--model", "m", "--base-url", f"http://{place}/v1")
        assert f"nothing answers at {place}" in refused(tmp_path, *words)
        assert f"nothing answers at {place}" in problem_of("litellm", "x/y", f"http://{place}", {})
    assert "host 'x.invalid' is not known" in problem_of("openai", "m", "http://x.invalid/v1", {})


def test_a_wrong_key_is_said_before_a_run_is_made(tmp_path: Path, vendor: str) -> None:
    said = refused(tmp_path, ANTHROPIC_API_KEY="sk-wrong", ANTHROPIC_BASE_URL=vendor)
    assert "does not accept the key in ANTHROPIC_API_KEY [401]" in said and "sk-wrong" not in said
    keys = {"OPENAI_API_KEY": "sk-wrong", "OPENAI_BASE_URL": f"{vendor}/v1"}
    assert "the key in OPENAI_API_KEY [401]" in problem_of("openai", "gpt-5", None, keys)
    assert "wants a key [401]; set OPENAI_API_KEY" in problem_of("openai", "m", f"{vendor}/v1", {})


def test_a_wrong_model_is_said_before_a_run_is_made(tmp_path: Path, vendor: str) -> None:
    keys = {"OPENAI_API_KEY": SECRET, "ANTHROPIC_API_KEY": SECRET}
    own = f"{vendor}/v1"
    said = refused(tmp_path, "--model", "gpt-5-minni", "--base-url", own, **keys)
    assert "has no model 'gpt-5-minni'; did you mean 'gpt-5-mini'" in said
    assert "it has 'gpt-5', " in problem_of("openai", "zzz", own, keys)
    said = refused(tmp_path, "--model", "openai/gpt-4o-mini", **keys, OPENAI_BASE_URL=own)
    assert "has no model 'gpt-4o-mini': it was announced to be gone by 14 January 2027; use another" in said
    assert f"below /v1; write --base-url {vendor}/v1" in problem_of("openai", "gpt-5", vendor, keys)
    assert "has no model 'x'" in problem_of("anthropic", "x", vendor, keys)
    for kind, model, url in (
        ("openai", "gpt-5", own),
        ("openai", "llama3", own),
        ("anthropic", "gpt-5", vendor),
    ):
        assert problem_of(kind, model, url, keys) == ""
    # Who knows better gets further: here to the price, which nobody knows.
    said = refused(tmp_path, "--model", "zzz", "--base-url", own, "--trust-model", "--max-steps", "1", **keys)
    assert "no price is known" in said


def test_the_first_sign_of_life_comes_before_anything_slow_is_imported(tmp_path: Path) -> None:
    """In a terminal, a line is there although the agent's modules cannot even be imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name in ('treenail.agent', 'treenail.turns', 'anthropic', 'openai', 'rich'):\n"
        "            sys.stderr.write(f'importing {name}\\n'); raise SystemExit(9)\n"
        "sys.meta_path.insert(0, Slow())\n"
    )
    with Terminal("run", "hi", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}) as terminal:
        assert terminal.end() == 9
    life, _, rest = terminal.text.partition("\n")
    assert life.startswith("treenail 0.") and rest.startswith("importing ")


def test_the_default_models_have_prices_and_are_not_about_to_be_retired() -> None:
    for _, named in DEFAULTS:
        name = named.partition("/")[2]
        assert default_prices().price(name) is not None
        assert retired(name) == ""
