"""The docs tell the truth about what can be checked: links, tests, dependencies, rooms, names."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from treenail.presenters.cli.doctor import PYTHONS

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "treenail"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
FENCED = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1\s*$", re.MULTILINE | re.DOTALL)


@cache
def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return FENCED.sub("", page.read_text("utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors that a page's headings make."""
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    }


def section(page: Path, heading: str) -> str:
    """Return what stands below a heading, up to the next one of the same level."""
    _, found, rest = prose(page).partition(f"\n{heading}\n")
    assert found, f"{page.name} has no {heading!r}"
    level = heading.split(maxsplit=1)[0]
    return re.split(rf"^{level} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def first_column(text: str) -> list[str]:
    """Return the names in backticks in the first column of every table row."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken: list[str] = []
    for match in LINK.finditer(prose(page)):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        destination = (page.parent / target).resolve() if target else page
        if not destination.exists() or (anchor and anchor not in anchors(destination)):
            broken.append(match["target"])
    assert broken == []


# --- guarantees ----------------------------------------------------------------------------------------


@cache
def names_in(path: Path) -> frozenset[str]:
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    )


def promises() -> Iterator[str]:
    text, _, _ = prose(ROOT / "docs" / "guarantees.md").partition("\n## Not guaranteed\n")
    for item in re.split(r"^- ", text, flags=re.MULTILINE)[1:]:
        yield re.split(r"^\s*$|^#", item, maxsplit=1, flags=re.MULTILINE)[0]


NAMED_TEST = re.compile(r"\[`(\w+)`\]\(\.\./([^)#]+)\)")


def test_every_guarantee_names_a_test() -> None:
    bare = [promise.strip() for promise in promises() if not NAMED_TEST.search(promise)]
    assert bare == []
    assert len(list(promises())) > 5


def test_every_test_that_a_guarantee_names_exists() -> None:
    named = NAMED_TEST.findall(prose(ROOT / "docs" / "guarantees.md"))
    missing = [
        f"{path} has no {name}"
        for name, path in named
        if not (ROOT / path).exists() or name not in names_in(ROOT / path)
    ]
    assert missing == []


def test_what_is_not_guaranteed_is_said_as_well() -> None:
    assert section(ROOT / "docs" / "guarantees.md", "## Not guaranteed").count("\n- ") > 2


# --- dependencies --------------------------------------------------------------------------------------


def requirement_name(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ;]", requirement, maxsplit=1)[0]


def test_every_dependency_is_justified_where_it_belongs() -> None:
    """The page and pyproject.toml name the same packages, in the same groups."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = project["optional-dependencies"]
    page = ROOT / "docs" / "dependencies.md"

    def names(requirements: list[str]) -> list[str]:
        return sorted(requirement_name(requirement) for requirement in requirements)

    assert sorted(first_column(section(page, "## Always installed"))) == names(project["dependencies"])
    assert sorted(first_column(section(page, "## Development"))) == names(groups["dev"])
    npm = (ROOT / "npm.txt").read_text("utf-8").split()
    assert sorted(first_column(section(page, "## From npm"))) == sorted(
        name.rpartition("@")[0] for name in npm
    )
    extras = {
        (requirement_name(requirement), extra)
        for extra, requirements in groups.items()
        if extra != "dev"
        for requirement in requirements
    }
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", section(page, "## Extras"), re.MULTILINE)
    assert set(rows) == extras


def test_every_word_about_python_versions_is_the_same() -> None:
    """What can be installed is what is said, what the doctor wants, and what the code is checked for."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    allowed = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", settings["project"]["requires-python"])
    assert allowed
    versions = [f"3.{minor}" for minor in range(int(allowed[1]), int(allowed[2]))]
    label = "Programming Language :: Python :: "
    classifiers = [each for each in settings["project"]["classifiers"] if each.startswith(label)]
    assert classifiers == [label + each for each in versions]
    assert list(PYTHONS) == versions
    said = f"they need Python {', '.join(versions[:-1])} or {versions[-1]},"
    assert said in (ROOT / "README.md").read_text("utf-8")
    tools = settings["tool"]
    assert tools["mypy"]["python_version"] == versions[0]
    assert tools["ruff"]["target-version"] == "py" + versions[0].replace(".", "")


# --- architecture --------------------------------------------------------------------------------------


def test_the_architecture_page_shows_the_contract_as_it_is() -> None:
    """The table of rooms has the contract's layers, in its order."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    (contract,) = [each for each in config["tool"]["importlinter"]["contracts"] if each["type"] == "layers"]
    layers = [name.strip() for layer in contract["layers"] for name in layer.split("|")]
    assert first_column(section(ROOT / "docs" / "architecture.md", "## Rooms")) == layers


# --- the glossary --------------------------------------------------------------------------------------


def test_the_glossary_explains_each_word_once_in_alphabetical_order() -> None:
    """A reader can learn it: about seventy words, each a noun or verb that the docs and the code use."""
    words = re.findall(
        r"^- \*\*([^*]+)\*\*: ", (ROOT / "docs" / "glossary.md").read_text("utf-8"), re.MULTILINE
    )
    assert 40 <= len(words) <= 75
    assert words == sorted(set(words), key=str.lower)
