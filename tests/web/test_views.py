"""Each view of the inspector, in a real browser, on recorded runs."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect
from tests.web.inspecting import Visitor
from tests.web.recorded import Recorded

STATES = {
    "completed": "completed",
    "failed": "failed · authentication",
    "cut_off": "partial failed · connection",
    "held": "held · hold",
    "over_budget": "failed · budget exceeded",
    "interrupted": "interrupted · aborted",
    "timed_out": "timed out · timeout",
    "retried": "completed",
    "crashed": "unfinished",
    "undone": "completed",
    "forked": "unfinished",
    "subagents": "completed",
    "workflow": "partial",
    "compacted": "completed",
}


def test_the_list_shows_every_run_and_those_that_need_a_person_first(
    visitor: Visitor, recorded: Recorded
) -> None:
    page = visitor.page
    rows = page.locator(".run-row a")
    expect(rows).to_have_count(len(recorded.runs))
    expect(rows.first).to_contain_text("Say in the README that the shop counts")
    expect(rows.first).to_contain_text("1 call waiting for you")


def test_the_list_is_filtered_searched_and_sorted(visitor: Visitor) -> None:
    page = visitor.page
    rows = page.locator(".run-row a")
    page.get_by_role("button", name="Needs you").click()
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="All", exact=True).click()
    page.keyboard.press("/")
    page.keyboard.type("busy")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("Ask a server that is busy")
    page.get_by_label("Search runs").fill("")
    page.get_by_role("button", name="Cost").click()
    expect(rows.first).to_contain_text("Think it over")


@pytest.mark.parametrize("name", STATES)
def test_a_run_of_each_ending_is_shown_as_what_it_is(visitor: Visitor, recorded: Recorded, name: str) -> None:
    """The state is derived, and what was not kept is not shown as good."""
    page = visitor.open(recorded.runs[name])
    expect(page.locator(".run-title .state")).to_have_text(STATES[name])
    expect(page.locator(".waterfall .line a").first).to_be_visible()


def test_a_call_shows_its_arguments_its_result_and_its_diff(visitor: Visitor, recorded: Recorded) -> None:
    page = visitor.open(recorded.runs["completed"])
    visitor.row("edit_file").first.click()
    panel = page.get_by_label("Details", exact=True)
    expect(panel.get_by_label("Arguments")).to_contain_text('"path": "shop/cart.py"')
    expect(panel.get_by_label("Result")).to_contain_text("Replaced once in shop/cart.py")
    changes = panel.get_by_label("Changes in shop/cart.py")
    expect(changes.locator("tr.minus .src")).to_have_text(re.compile("return sum.price for name"))
    expect(changes.locator("tr.plus .src")).to_have_count(4)
    page.get_by_role("button", name="Side by side").click()
    expect(changes.locator("td.plus.src")).to_have_count(4)
    expect(changes.locator("td.minus.src")).to_have_count(1)


def test_a_failed_and_an_undone_call_are_visibly_so(visitor: Visitor, recorded: Recorded) -> None:
    visitor.open(recorded.runs["completed"])
    failed = visitor.row("move_money")
    expect(failed).to_have_attribute("data-tone", "bad")
    visitor.open(recorded.runs["undone"])
    undone = visitor.row("edit_file").first
    expect(undone).to_have_attribute("data-tone", "undone")
    undone.click()
    expect(visitor.page.locator(".undone-note")).to_contain_text("Undone by ada")


def test_a_crash_a_retry_and_a_compaction_are_drawn_as_what_they_are(
    visitor: Visitor, recorded: Recorded
) -> None:
    """What a dead process left open is not shown as if it still ran."""
    visitor.open(recorded.runs["crashed"])
    expect(visitor.row("die")).to_have_attribute("data-tone", "warn")
    expect(visitor.row("die")).to_contain_text("left open")
    visitor.open(recorded.runs["retried"])
    expect(visitor.row("retried")).to_have_count(2)
    visitor.open(recorded.runs["compacted"])
    visitor.page.get_by_role("list", name="What happened").press("End")
    expect(visitor.row("Compacted").first).to_be_visible()


def test_the_keyboard_walks_through_a_run(visitor: Visitor, recorded: Recorded) -> None:
    """j and k move, Enter opens, Escape closes and then leads back to the list."""
    page = visitor.page
    expect(page.locator(".run-row a").first).to_be_visible()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator(".waterfall .line a").first).to_be_visible()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    expect(page.locator(".waterfall a[aria-current]")).to_contain_text("Turn 1")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Details", exact=True)).to_be_visible()
    page.keyboard.press("j")
    expect(page.get_by_label("Details", exact=True).locator("h2")).not_to_have_text("Turn 1")
    page.keyboard.press("Escape")
    expect(page.get_by_label("Details", exact=True)).to_have_count(0)
    page.keyboard.press("Escape")
    expect(page.locator("main.runs")).to_be_visible()


def test_each_event_has_a_link(visitor: Visitor, recorded: Recorded) -> None:
    """The link of a row leads back to it, with or without the row's place."""
    page = visitor.open(recorded.runs["completed"])
    link = visitor.row("edit_file").first.get_attribute("href")
    assert link is not None
    for each in (link, link.rpartition("/")[0]):
        page.goto("about:blank")
        page.goto(f"{visitor.server.url}{each}")
        expect(page.get_by_label("Details", exact=True).locator("h2")).to_have_text("edit_file")
