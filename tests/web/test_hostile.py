"""Text of models, tools and files is text on the page, whatever it holds; and everybody can use the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from tests.web.inspecting import Server, Visitor, in_thread, serving
from tests.web.recorded import Recorded, said

from treenail import Agent
from treenail.tools import FILE_TOOLS

EVIL = (
    '<img src=x onerror="document.title=1"><script>document.title="owned"</script>'
    "\"'&lt;\u202e${alert(1)}{{7*7}}</div></pre>"
)
NPM = Path(__file__).parents[2] / ".venv/npm/node_modules"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A run in which every text that somebody else writes is markup."""
    made = Recorded(tmp_path_factory.mktemp("hostile"))
    agent = Agent(EVIL, EVIL, tools=FILE_TOOLS)
    path = "<b onclick=1>x\"'.py"
    script = [
        said(EVIL, ("write_file", {"path": path, "content": f"{EVIL}\n" * 3}), (EVIL, {"path": EVIL})),
        said(EVIL, ("read_file", {"path": path})),
        said(EVIL),
    ]
    in_thread(lambda: made.run("hostile", EVIL, script, agent=agent))
    return made


@pytest.fixture(scope="module")
def serving_it(hostile: Recorded) -> Iterator[Server]:
    with serving(hostile.store) as made:
        yield made


def test_nothing_of_others_becomes_markup_in_any_view(
    browser: Browser, serving_it: Server, hostile: Recorded
) -> None:
    """Every row and every view is opened: there is no element that our own page did not make."""
    with browser.new_context(viewport={"width": 1400, "height": 900}) as context:
        visitor = Visitor(context, serving_it).enter()
        page = visitor.page
        expect(page.locator(".run-row b").first).to_contain_text("<img src=x")
        page = visitor.open(hostile.runs["hostile"])
        rows = page.locator(".waterfall .line a")
        expect(rows.first).to_be_visible()
        for index in range(rows.count()):
            rows.nth(index).click()
            expect(page.locator(".panel-body")).to_be_visible()
            expect(page.locator(".panel .loading")).to_have_count(0)
            page.locator(".raw summary").click()
            expect(page.locator(".raw pre")).to_be_visible()
            assert page.locator("img, iframe, object, embed, b[onclick], #app script").count() == 0
        expect(page.locator(".panel")).to_be_visible()
        visitor.open(hostile.runs["hostile"], "changes")
        expect(page.locator(".file-diff .path").first).to_contain_text("<b onclick=1>")
        assert page.locator("img, iframe, b[onclick], #app script").count() == 0
        assert "owned" not in page.title() or "<script>" in page.title()
        assert visitor.errors == []
        assert visitor.strangers == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_keeps_the_rules_of_accessibility(
    browser: Browser, server: Server, recorded: Recorded, scheme: str
) -> None:
    """axe-core finds nothing in the list, in a run and in the details of a call."""
    axe = (NPM / "axe-core/axe.min.js").read_text()
    # The page's own policy lets no foreign script in, this one included.
    with browser.new_context(
        viewport={"width": 1280, "height": 900}, color_scheme=scheme, bypass_csp=True, reduced_motion="reduce"
    ) as context:  # type: ignore[arg-type]  # the names of schemes
        visitor = Visitor(context, server).enter()
        page = visitor.page
        expect(page.locator(".run-row a").first).to_be_visible()
        page.evaluate(axe)
        found = {"list": violations(page)}
        visitor.open(recorded.runs["completed"])
        visitor.row("edit_file").first.click()
        expect(page.locator(".file-diff").first).to_be_visible()
        found["call"] = violations(page)
        visitor.open(recorded.runs["completed"], "changes")
        expect(page.locator(".file-diff").first).to_be_visible()
        found["changes"] = violations(page)
        assert found == {"list": [], "call": [], "changes": []}


def violations(page: object) -> list[str]:
    found = page.evaluate("axe.run().then(r => r.violations)")  # type: ignore[attr-defined]
    return [f"{each['id']}: {node['html'][:160]}" for each in found for node in each["nodes"][:3]]


def test_a_narrow_and_a_wide_screen_show_everything_in_reach(
    browser: Browser, server: Server, recorded: Recorded
) -> None:
    """From 360 pixels to 4k, nothing makes the page itself scroll sideways."""
    for width, height in ((360, 740), (768, 1024), (3840, 2160)):
        with browser.new_context(viewport={"width": width, "height": height}) as context:
            visitor = Visitor(context, server).enter()
            page = visitor.page
            expect(page.locator(".run-row a").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            visitor.open(recorded.runs["completed"])
            visitor.row("edit_file").first.click()
            expect(page.locator(".file-diff").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
