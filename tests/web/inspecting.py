"""A real inspector in a process of its own, and a real browser that looks at it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

T = TypeVar("T")

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PATIENCE_MS = 60_000
"""How long a page may take on a busy machine."""

expect.set_options(timeout=PATIENCE_MS)


@dataclass
class Server:
    """`treenail view` on a store."""

    store: str | Path
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    process: subprocess.Popen[str] | None = None
    url: str = ""
    token: str = ""

    def start(self) -> Server:
        command = [sys.executable, "-m", "treenail", "view", "--no-open", "--store", str(self.store)]
        self.process = subprocess.Popen(
            [*command, *self.options],
            stdout=subprocess.PIPE, text=True, env={**os.environ, **self.environment}, cwd=self.cwd,
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        self.url, _, self.token = line.partition("#token=")
        assert self.url.startswith("http://"), f"the inspector did not start: {line}"
        return self

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(60)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    # --- without a browser -----------------------------------------------------------------------------

    def ask(
        self, path: str, data: object | None = None, *, cookie: str = "", **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """Send a request; return status, JSON and headers. Data makes it a POST of the page's own."""
        body = None if data is None else json.dumps(data).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if data is not None:
            given.setdefault("origin", self.url.rstrip("/"))
        if cookie:
            given["cookie"] = cookie
        request = urllib.request.Request(self.url.rstrip("/") + path, data=body, headers=given)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, _read(response), dict(response.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _read(error), dict(error.headers)

    def login(self, token: str | None = None) -> str:
        """Return the cookie that the token is exchanged for."""
        status, _, headers = self.ask("/api/login", {"token": self.token if token is None else token})
        assert status == 200
        return headers["set-cookie"].partition(";")[0]


def _read(response: Any) -> Any:
    text = response.read()
    try:
        return json.loads(text)
    except ValueError:
        return text.decode("utf-8", "replace")


@contextmanager
def serving(store: str | Path, *options: str, **more: Any) -> Iterator[Server]:
    """Run an inspector for a block."""
    server = Server(store, options, **more).start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run a browser for a block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def in_thread(work: Callable[[], T]) -> T:
    """Do the work in a thread of its own, where no event loop is running."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


class Visitor:
    """A page in a browser; what must never happen there is noted."""

    def __init__(self, context: BrowserContext, server: Server) -> None:
        self.context, self.server = context, server
        self.page: Page = context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.errors: list[str] = []
        self.strangers: list[str] = []
        self.page.on("console", lambda said: said.type == "error" and self.errors.append(said.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._note)

    def _note(self, request: Any) -> None:
        if not request.url.startswith((self.server.url, "data:", "blob:")):
            self.strangers.append(request.url)

    def enter(self) -> Visitor:
        """Open the address with the token."""
        self.page.goto(f"{self.server.url}#token={self.server.token}")
        self.page.locator("header.top").wait_for()
        return self

    def open(self, run_id: object, view: str = "") -> Page:
        """Open a view of a run."""
        self.page.goto(f"{self.server.url}#/runs/{run_id}{f'/{view}' if view else ''}")
        self.page.locator("main.run h1").wait_for()
        return self.page

    def row(self, text: str | re.Pattern[str]) -> Any:
        """Return the rows of the waterfall that have a text."""
        return self.page.locator(".waterfall .line a", has_text=text)
