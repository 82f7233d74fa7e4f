"""Prices at the command line: known out of the box, shown with their date, fetched anew, and missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from treenail.containment import CallUsage, default_prices
from treenail.containment.pricing import PackagedPrices
from treenail.testing.wire import WireServer

WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""

DATA = [
    {
        "id": "kelpworks",
        "model_match": {"starts_with": "kelp"},
        "models": [
            {
                "id": "kelp-1",
                "match": {
                    "or": [{"equals": "kelp-1"}, {"and": [{"starts_with": "kelp"}, {"contains": "one"}]}]
                },
                "context_window": 1000,
                "prices": [
                    {"prices": {"input_mtok": 1, "output_mtok": 2}},
                    {
                        "constraint": {"start_date": "2026-01-01"},
                        "prices": {
                            "input_mtok": {"base": 3, "tiers": [{"start": 200, "price": 6}]},
                            "output_mtok": 4,
                        },
                    },
                    {
                        "constraint": {"start_date": "2199-01-01"},
                        "prices": {"input_mtok": 9, "output_mtok": 9},
                    },
                ],
            }
        ],
    },
    {"id": "nameless", "models": []},
]


def treenail(
    *arguments: str, home: Path, without: tuple[str, ...] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a home of its own, as if some packages were not installed."""
    home.mkdir(exist_ok=True)
    (home / "sitecustomize.py").write_text(WITHOUT.format(names=set(without)))
    kept = {name: value for name, value in os.environ.items() if not name.endswith(("_KEY", "_TOKEN"))}
    own = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "PYTHONPATH": str(home)}
    return subprocess.run(
        [sys.executable, "-m", "treenail", *arguments],
        cwd=home,
        env={**kept, **own, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@contextmanager
def served(body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/data.json"
        server.shutdown()
        thread.join()


def test_a_key_and_the_extra_are_enough_for_the_readmes_first_command(tmp_path: Path) -> None:
    """With nothing else installed, and under its ceiling: the model's price and bound are known."""
    with WireServer(["The test passes."]) as server:
        ran = treenail(
            "run",
            "make the failing test pass",
            "--check",
            "true",
            "--max-cost",
            "0.50",
            home=tmp_path / "home",
            without=("genai_prices", "openai", "litellm", "claude_agent_sdk"),
            ANTHROPIC_API_KEY="sk-ant-test-0123456789",
            ANTHROPIC_BASE_URL=server.url,
        )
    assert ran.returncode == 0, ran.stderr
    assert "The test passes." in ran.stdout
    (request,) = server.requests
    assert request.body["model"] == "claude-sonnet-5-5"
    assert (request.allowed_output or 0) * 15 / 1e6 < 0.50


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    """By the run that needs it, and by the doctor."""
    for command in (("run", "hi"), ("doctor",)):
        said = treenail(
            *command, home=tmp_path / "home", without=("anthropic",), ANTHROPIC_API_KEY="sk-ant-1"
        )
        assert said.returncode in (1, 2)
        assert "the extra 'anthropic' is not installed" in said.stdout + said.stderr
        assert "pip install '.[anthropic]'" in said.stdout + said.stderr


def test_a_model_without_a_price_is_told_of_before_a_run_is_made(tmp_path: Path) -> None:
    """The doctor says so, and so does the run; with --unknown-price it begins."""
    home = tmp_path / "home"
    with WireServer(["Done."]) as server:
        env = {"TREENAIL_MODEL": "nobody-knows-me", "TREENAIL_BASE_URL": server.openai_url}
        doctor = treenail("doctor", home=home, **env)
        assert doctor.returncode == 1
        assert "NO  model's price    not known: under a ceiling in USD" in doctor.stdout
        assert "treenail prices fetch; or use --unknown-price warn" in doctor.stdout
        refused = treenail("run", "hi", home=home, **env)
        assert refused.returncode == 2
        assert "use --unknown-price warn" in refused.stderr and refused.stderr.count("\n") == 1
        assert server.requests == ()
        ran = treenail("run", "hi", "--unknown-price", "warn", home=home, **env)
    assert ran.returncode == 0, ran.stderr
    assert "Done." in ran.stdout


def test_an_answers_bound_can_be_set(tmp_path: Path) -> None:
    """For one run, like every other setting."""
    with WireServer(["Done."]) as server:
        env = {"TREENAIL_MODEL": "m", "TREENAIL_BASE_URL": server.openai_url}
        ran = treenail(
            "run", "hi", "--max-output", "1234", "--unknown-price", "warn", home=tmp_path / "home", **env
        )
    assert ran.returncode == 0, ran.stderr
    assert server.requests[0].allowed_output == 1234


def test_a_newer_table_is_fetched_and_used(tmp_path: Path) -> None:
    """From then on, by every process; tiers, dates and clauses are understood."""
    home = tmp_path / "home"
    with served(json.dumps(DATA).encode()) as url:
        fetched = treenail("prices", "fetch", "--from", url, home=home)
        assert fetched.returncode == 0, fetched.stderr
        assert "the prices of 1 models" in fetched.stdout
        shown = treenail("prices", "show", "kelp-number-one", "--json", home=home)
        assert json.loads(shown.stdout)["price"]["output_per_mtok"] == 4
        assert json.loads(shown.stdout)["source"] == url
        doctor = treenail("doctor", home=home)
    assert f"({url})" in doctor.stdout
    table = PackagedPrices(home / "state" / "treenail" / "prices.json")
    assert table.cost_usd("kelp-1", CallUsage(100, 0)) == pytest.approx(3e-4)
    assert table.cost_usd("kelp-1", CallUsage(300, 0)) == pytest.approx(18e-4)
    assert treenail("prices", "show", "gpt-4o", home=home).returncode == 1


NAN = b'[{"id": "x", "model_match": {"equals": "m"}, "models": [{"id": "m", "match": {"equals": "m"}, '
NAN += b'"prices": {"input_mtok": NaN, "output_mtok": -1}}]}]'
BAD = (NAN, b"", b"{}", b"[]", b"[1]", b'[{"id": "x", "model_match": {"regex": "("}}]', b"[" * 9999)


@pytest.mark.parametrize("body", BAD)
def test_what_is_not_price_data_changes_nothing(
    body: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, treenail: Any
) -> None:
    """The table that was there is still used, and the error says what to do."""
    file = tmp_path / "data.json"
    file.write_bytes(body)
    said = treenail("prices", "fetch", "--from", str(file))
    assert said.code == 2
    assert str(file) in said.err
    assert list((tmp_path / "state").glob("**/*prices*")) == []


def test_prices_are_not_taken_from_a_line_that_others_can_write_to(treenail: Any) -> None:
    """They decide what a run may cost."""
    said = treenail("prices", "fetch", "--from", "http://prices.example/data.json")
    assert (said.code, "use https" in said.err) == (2, True)


def test_a_spoiled_table_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The package's own takes its place, and a warning names the file."""
    file = tmp_path / "prices.json"
    file.write_text('{"date": "2199-01-01"')
    monkeypatch.setenv("TREENAIL_PRICES", str(file))
    default_prices.cache_clear()
    try:
        assert default_prices().price("gpt-4o") is not None
        assert str(file) in caplog.text
        file.write_text('{"date": "1999-01-01", "source": "old", "vendors": []}')
        default_prices.cache_clear()
        assert default_prices().source != "old"
    finally:
        default_prices.cache_clear()
