"""What a person does on the page is done to the run: it is in the log with who did it, and in the files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from tests.web.inspecting import Server, Visitor, in_thread, serving
from tests.web.recorded import FILES, Recorded, edit, said

from treenail.history import list_holds, opened_run
from treenail.log import store_named
from treenail.tools import ForkMade, HoldAnswered, RolledBack


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    made = Recorded(tmp_path_factory.mktemp("acting"))
    in_thread(made.held)
    script = [said("", edit("shop/tax.py", "0.19", "0.07")), said("The tax is lower.")]
    for name in ("undo", "fork"):
        in_thread(lambda name=name: made.run(name, f"Lower the tax to {name}", script))
    return made


@pytest.fixture(scope="module")
def acting(mine: Recorded) -> Iterator[Server]:
    with serving(mine.store) as made:
        yield made


@pytest.fixture
def person(browser: Browser, acting: Server) -> Iterator[Visitor]:
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        made = Visitor(context, acting).enter()
        yield made
        assert made.errors == []
        assert made.strangers == []


def logged(mine: Recorded, name: str, kind: type) -> list[object]:
    with opened_run(store_named(mine.store), mine.runs[name]) as session:
        return [value for _, value in session.events() if isinstance(value, kind)]


def test_a_hold_is_answered_on_the_page(person: Visitor, mine: Recorded) -> None:
    page = person.open(mine.runs["held"])
    person.row("write_file held").click()
    page.get_by_label("A note for the model").fill("only this file")
    page.get_by_role("button", name="Let it run").click()
    expect(page.get_by_text("Answered. Continue the run")).to_be_visible()
    (answered,) = logged(mine, "held", HoldAnswered)
    assert isinstance(answered, HoldAnswered)
    assert (answered.approved, answered.note) == (True, "only this file")
    assert answered.answered_by.endswith("in the inspector")
    assert list_holds(store_named(mine.store), mine.runs["held"]) == ()


def test_a_run_is_undone_and_redone_on_the_page(person: Visitor, mine: Recorded) -> None:
    page = person.open(mine.runs["undo"])
    tax = mine.directory / "undo" / "shop/tax.py"
    assert "0.07" in tax.read_text()
    page.get_by_role("button", name="Undo its changes").click()
    expect(person.row("edit_file").first).to_have_attribute("data-tone", "undone")
    assert tax.read_text() == FILES["shop/tax.py"]
    page.get_by_role("button", name="Redo").click()
    expect(person.row("edit_file").first).to_have_attribute("data-tone", "good")
    assert "0.07" in tax.read_text()
    done = logged(mine, "undo", RolledBack)
    assert [each.action for each in done if isinstance(each, RolledBack)] == ["undo", "redo"]
    assert all(each.by.endswith("in the inspector") for each in done if isinstance(each, RolledBack))


def test_a_run_is_forked_on_the_page_with_its_files(person: Visitor, mine: Recorded, tmp_path: Path) -> None:
    page = person.open(mine.runs["fork"])
    person.row("edit_file").first.click()
    page.get_by_label("The fork's directory").fill(str(tmp_path / "try-2"))
    page.get_by_role("button", name="Fork before this call").click()
    page.get_by_role("link", name="run ").last.wait_for()
    expect(page.get_by_text("Made run")).to_be_visible()
    assert (tmp_path / "try-2/shop/tax.py").read_text() == FILES["shop/tax.py"]
    (made,) = logged(mine, "fork", ForkMade)
    assert isinstance(made, ForkMade)
    assert made.by.endswith("in the inspector")


def test_what_cannot_be_done_is_said_and_changes_nothing(acting: Server, mine: Recorded) -> None:
    cookie, run = acting.login(), mine.runs["fork"]
    occupied = mine.directory / "undo"
    for name, data in (
        ("redo", {}),
        ("answer", {"approved": True}),
        ("answer", {"approved": "yes"}),
        ("fork", {"into": ""}),
        ("fork", {"into": str(occupied)}),
        ("rollback", {"call": "nobody"}),
        ("rollback", {"call": 7}),
    ):
        status, answer, _ = acting.ask(f"/api/runs/{run}/{name}", data, cookie=cookie)
        assert (status, bool(answer["error"])) == (409, True), (name, answer)
    assert logged(mine, "fork", RolledBack) == []


def test_a_read_only_inspector_changes_nothing(server: Server, recorded: Recorded) -> None:
    status, answer, _ = server.ask(f"/api/runs/{recorded.runs['completed']}/undo", {}, cookie=server.login())
    assert status == 403
    assert "--read-only" in answer["error"]
