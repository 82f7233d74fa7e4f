"""What others wrote is in the package as it came from them, with its licence."""

from __future__ import annotations

import hashlib
from pathlib import Path

VENDOR = Path(__file__).resolve().parents[2] / "src/treenail/presenters/web/page/vendor"


def test_every_vendored_file_has_the_hash_that_its_source_says() -> None:
    lines = (VENDOR / "SOURCES.txt").read_text("utf-8").splitlines()
    said = {each.split()[1]: each.split()[0] for each in lines if "  npm " in each}
    found = {
        each.name: hashlib.sha256(each.read_bytes()).hexdigest()
        for each in VENDOR.iterdir()
        if each.suffix in (".js", ".woff2")
    }
    assert found == said


def test_every_vendored_licence_is_there() -> None:
    assert {each.name for each in VENDOR.glob("LICENSE-*.txt")} == {
        "LICENSE-htm.txt",
        "LICENSE-inter.txt",
        "LICENSE-jetbrains-mono.txt",
        "LICENSE-preact.txt",
    }
