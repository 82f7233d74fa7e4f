"""A damaged store: what can be read is shown, nothing passes for the whole, and the way out is named."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest
from tests.cli.conftest import Command

from treenail import Agent, tool
from treenail.log.sqlite import SqliteLog
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import AttentionNeeded, Session


@tool(effects="workspace")
def note(text: str, *, context) -> str:
    """Write a note."""
    context.filesystem.write("notes.txt", text + "\n", mode="append")
    return "noted"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a run that is complete: three calls and an answer."""
    place = tmp_path_factory.mktemp("whole")
    workspace = place / "work"
    workspace.mkdir()
    answers = [Answer("", [("note", {"text": each})]) for each in ("one", "two", "three")]
    agent = Agent("tester", tools=(note,))
    provider = ScriptedProvider([*answers, Answer("all noted")])
    with agent.run("take notes", provider=provider, workspace=workspace, store=place / "runs.db") as run:
        assert run.state.value == "completed"
    return place / "runs.db"


def flip(store: Path, table: str, column: str, where: str) -> None:
    """Change one byte of a stored value, as a failing disk would: no checksum is told."""
    connection = sqlite3.connect(store, isolation_level=None)
    row, value = connection.execute(f"SELECT rowid, CAST({column} AS BLOB) FROM {table} {where}").fetchone()
    damaged = bytes([value[0] ^ 1]) + value[1:]
    kind = connection.execute(f"SELECT typeof({column}) FROM {table} WHERE rowid = ?", (row,)).fetchone()[0]
    connection.execute(
        f"UPDATE {table} SET {column} = CAST(? AS {kind}) WHERE rowid = ?", (sqlite3.Binary(damaged), row)
    )
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def rows(store: Path) -> list[tuple[object, ...]]:
    """Everything that a run consists of, damaged or not."""
    connection = sqlite3.connect(store)
    found = [row for table in ("sessions", "events") for row in connection.execute(f"SELECT * FROM {table}")]
    connection.close()
    return found


DAMAGES: dict[str, Callable[[Path], None]] = {
    "an event in the middle": lambda store: flip(store, "events", "payload", "ORDER BY seq LIMIT 1 OFFSET 6"),
    "the newest event": lambda store: flip(store, "events", "payload", "ORDER BY seq DESC LIMIT 1"),
    "the first event": lambda store: flip(store, "events", "checksum", "ORDER BY seq LIMIT 1"),
    "what is known about the run": lambda store: flip(store, "sessions", "checksum", ""),
    "who may write it": lambda store: flip(store, "leases", "checksum", ""),
}


@pytest.fixture(params=DAMAGES)
def damaged(request: pytest.FixtureRequest, whole: Path, tmp_path: Path) -> Path:
    store = tmp_path / "runs.db"
    shutil.copyfile(whole, store)
    shutil.copytree(f"{whole}.files", f"{store}.files")
    DAMAGES[request.param](store)
    return store


def test_no_command_takes_a_part_for_the_whole(
    damaged: Path, treenail: Command, tmp_path: Path, whole: Path
) -> None:
    """Whatever is damaged: none of them says that all is well, and each one names the way out."""
    before = rows(damaged)
    store = ("--store", str(damaged))
    (tmp_path / "unasked.json").write_text('["nobody asks for this"]')
    for each in (
        ("list",),
        ("list", "--json"),
        ("show",),
        ("show", "--json"),
        ("diff",),
        ("replay",),
        ("hold", "list"),
        ("workflow", "status"),
        ("diagnose",),
        ("rollback",),
        ("fork", str(tmp_path / "fork")),
        ("hold", "answer", "--yes"),
        ("resume", "--model", "scripted:unasked.json"),
    ):
        said = treenail(*each, *store)
        assert said.code == 1, (each, said.out, said.err)
        assert "treenail salvage" in said.out + said.err, (each, said.out, said.err)
        assert "SqliteLog" not in said.err
        assert "Traceback" not in said.err
        assert "completed" not in said.out.partition("\n")[0], each
    assert rows(damaged) == before
    assert treenail("show", "--store", str(whole)).code == 0


def test_a_damaged_store_is_not_to_be_resumed(damaged: Path, treenail: Command) -> None:
    """Diagnostics offer what can be done with it: copy what is whole, and look at the copy."""
    said = treenail("diagnose", "--json", "--store", str(damaged))
    report = said.data
    assert isinstance(report, dict)
    assert (said.code, report["status"]) == (1, "blocked")
    named = [*report["next_actions"], *(a for c in report["checks"] for a in c["details"]["next_actions"])]
    assert f"treenail salvage whole.db --store {damaged}" in named
    refusing = ("treenail resume", "treenail hold", "treenail diff", "treenail replay", "treenail rollback")
    assert [each for each in named if each.startswith(refusing)] == []
    continuation = next(each for each in report["checks"] if each["id"] == "continuation")
    assert continuation["details"]["classification"] == "damaged"


def test_what_the_diagnosis_offers_works(damaged: Path, treenail: Command) -> None:
    """The commands can be pasted one after the other: afterwards there is a run that can go on."""
    assert treenail("diagnose", "--store", str(damaged)).code == 1
    copied = treenail("salvage", "whole.db", "--store", str(damaged))
    assert copied.code == 0
    assert treenail("diagnose", "--store", "whole.db").err == ""
    listed = treenail("list", "--json", "--store", "whole.db")
    assert listed.code == 0
    assert [each["state"] for each in listed.data] != ["damaged"]  # type: ignore[attr-defined]  # JSON: a list of runs


def damage_in_the_middle(whole: Path, tmp_path: Path) -> Path:
    store = tmp_path / "middle.db"
    shutil.copyfile(whole, store)
    DAMAGES["an event in the middle"](store)
    return store


def test_what_can_be_read_is_shown(whole: Path, tmp_path: Path, treenail: Command) -> None:
    """Everything before the damage, the damage in its place, and what to do; to machines as well."""
    store = damage_in_the_middle(whole, tmp_path)
    good = treenail("show", "--json", "--store", str(whole)).data
    said = treenail("show", "--json", "--store", str(store))
    data = said.data
    assert isinstance(good, dict)
    assert isinstance(data, dict)
    assert data["state"] == "damaged"
    assert data["task"] == "take notes"
    shown, all_of_it = ([each["title"] for each in run["turns"][0]["items"]] for run in (data, good))
    assert 0 < len(shown) < len(all_of_it)
    assert shown == all_of_it[: len(shown)]
    assert "is damaged or missing" in data["damage"]
    assert data["next_actions"] == [f"treenail salvage whole.db --store {store}"]
    assert good["damage"] is None
    shown = treenail("show", "--store", str(store))
    assert "started: take notes" in shown.out
    assert "the log is damaged from here on: event" in shown.out
    assert f"`treenail salvage whole.db --store {store}`" in shown.err


def test_a_damaged_child_is_told_with_its_parent(whole: Path, tmp_path: Path, treenail: Command) -> None:
    store = tmp_path / "family.db"
    shutil.copyfile(whole, store)
    with SqliteLog(store) as log:
        parent = log.sessions()[0].session_id
        with Session.open(log, parent, read_only=True) as above, Session(log=log, parent=above) as child:
            child.dispatch(AttentionNeeded("x", ("y",), ()))
            child_id = child.session_id
    assert treenail("show", "--store", str(store)).code == 0
    flip(store, "events", "payload", f"WHERE session_key = {key_of(store, child_id)}")
    said = treenail("show", "--json", "--store", str(store))
    data = said.data
    assert isinstance(data, dict)
    assert (said.code, data["state"], data["children"][0]["state"]) == (1, "completed", "damaged")
    assert treenail("show", "--store", str(store)).code == 1
    assert treenail("list", "--store", str(store)).code == 0, "the child was not asked for"
    assert treenail("list", "--all", "--store", str(store)).code == 1


def key_of(store: Path, session_id: UUID) -> int:
    connection = sqlite3.connect(store)
    (key,) = connection.execute(
        "SELECT key FROM sessions WHERE session_id = ?", (session_id.bytes,)
    ).fetchone()
    connection.close()
    return int(key)


def test_the_past_before_the_damage_can_be_replayed(whole: Path, tmp_path: Path, treenail: Command) -> None:
    store = damage_in_the_middle(whole, tmp_path)
    assert (
        treenail("replay", "--at", "4", "--store", str(store)).out
        == treenail("replay", "--at", "4", "--store", str(whole)).out
    )
    assert treenail("replay", "--at", "20", "--store", str(store)).code == 1
