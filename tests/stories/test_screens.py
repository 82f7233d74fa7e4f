"""The pictures of screens in the docs and in the README are what the command shows."""

from __future__ import annotations

import re
from pathlib import Path

from tests.stories.screens import FOLDER, recorded


def words(svg: str) -> str:
    """The texts of a picture with their places and colours, without its frame."""
    return re.sub(r"\s+", " ", svg)


def test_the_pictures_in_the_docs_are_what_a_terminal_shows_now(tmp_path: Path) -> None:
    """If this is red because the screen became better: `make screens`, and look at them."""
    for name, svg in recorded(tmp_path).items():
        assert words(svg) == words((FOLDER / name).read_text("utf-8")), f"{name} is not what is shown"
