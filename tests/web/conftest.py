"""One browser per module, and the recorded runs with one inspector for all tests of a process.

Playwright keeps an event loop running in the thread that uses it, in which no agent can run meanwhile. So the
browser lives as long as a module's tests, and what runs agents does so in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser
from tests.web.inspecting import Server, Visitor, chromium, in_thread, serving
from tests.web.recorded import Recorded


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Runs of every ending, to be read only: a test that acts records its own."""
    place = tmp_path_factory.mktemp("recorded")
    return in_thread(lambda: Recorded(place).all())


@pytest.fixture(scope="session")
def server(recorded: Recorded) -> Iterator[Server]:
    with serving(recorded.store, "--read-only") as made:
        yield made


@pytest.fixture
def visitor(browser: Browser, server: Server) -> Iterator[Visitor]:
    """A page on the recorded runs; it must end without an error and without a request to elsewhere."""
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        made = Visitor(context, server).enter()
        yield made
        assert made.errors == []
        assert made.strangers == []
