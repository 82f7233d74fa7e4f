"""Every Python snippet of the README and the docs runs, each on its own in an empty directory.

A block that cannot run is marked ```` ```python no-run ```` and says why in an HTML comment right above it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<info>[^`\n]*)$")
LANGUAGES = {"", "console", "json", "mermaid", "python", "python no-run", "sql", "text", "lua", "toml"}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    info: str
    code: str
    above: str
    """The nearest line above the fence that is not blank."""

    @property
    def label(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(text: str, page: str) -> list[Block]:
    """Find the fenced blocks of a page."""
    found: list[Block] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opened = FENCE.match(lines[number])
        if opened is None:
            number += 1
            continue
        start, indent, marks = number, len(opened["indent"]), opened["marks"]
        number += 1
        body: list[str] = []
        while number < len(lines) and lines[number].strip() != marks:
            body.append(lines[number][indent:])
            number += 1
        if number == len(lines):
            raise AssertionError(f"{page}:{start + 1}: the fenced block is never closed")
        above = next((line.strip() for line in reversed(lines[:start]) if line.strip()), "")
        found.append(Block(page, start + 1, opened["info"].strip(), "\n".join(body) + "\n", above))
        number += 1
    return found


ALL = [
    block
    for page in PAGES
    if page.exists()
    for block in blocks(page.read_text("utf-8"), page.relative_to(ROOT).as_posix())
]


@pytest.mark.parametrize("block", [b for b in ALL if b.info == "python"], ids=lambda block: block.label)
def test_the_snippet_runs(block: Block, tmp_path: Path) -> None:
    """A reader can paste it into a file of their own and run it, with warnings as errors."""
    script = tmp_path / "snippet.py"
    script.write_text(block.code, "utf-8")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=scratch,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, f"{block.label} failed:\n{ran.stderr}"


def test_every_block_says_what_it_is() -> None:
    """A misspelled language would silently take a snippet out of the tests."""
    unknown = [f"{block.label}: {block.info!r}" for block in ALL if block.info not in LANGUAGES]
    assert unknown == []


def test_a_block_that_is_not_run_says_why() -> None:
    silent = [
        block.label
        for block in ALL
        if block.info == "python no-run" and not re.fullmatch(r"<!--\s*\w+(\W+\w+){2,}\W*-->", block.above)
    ]
    assert silent == []


def test_blocks_are_found_wherever_they_stand() -> None:
    text = "\n".join(
        [
            "```python",
            "one = 1",
            "```",
            "- in a list",
            "",
            "  ````python",
            "  two = '''",
            "  ```python",
            "  '''",
            "  ````",
            "<!-- needs a key of one's own -->",
            "",
            "```python no-run",
            "three()",
            "```",
        ]
    )
    assert [(block.line, block.info, block.code) for block in blocks(text, "page")] == [
        (1, "python", "one = 1\n"),
        (6, "python", "two = '''\n```python\n'''\n"),
        (13, "python no-run", "three()\n"),
    ]
    assert blocks(text, "page")[2].above == "<!-- needs a key of one's own -->"
