"""Text of others (a model, a file, a command, a server) made harmless for a terminal."""

from __future__ import annotations

import re

_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # what a terminal takes for a command
    "\u061c\u200b\u200e\u200f\u2028-\u202e"  # what hides or reorders text
    "\u2060-\u206f\ufeff\U000e0000-\U000e007f"
    "\ud800-\udfff]"  # bytes of a file's name that are not UTF-8
)


def printable(text: str) -> str:
    """Return a text that only prints: control and escape characters are shown, not sent.

    New lines and tabs stay. Characters that reorder or hide what stands beside them are shown as well: what a
    person reads is what is there.
    """
    if text.isprintable():
        return text
    return _HARMFUL.sub(_shown, text.replace("\r\n", "\n"))


def printable_line(text: str) -> str:
    """Return a text as one line that only prints, such as a name: new lines and tabs are shown, too."""
    if text.isprintable():
        return text
    return printable(text.replace("\r\n", "\\r\\n")).replace("\n", "\\n").replace("\t", "\\t")


def _shown(found: re.Match[str]) -> str:
    character = ord(found[0])
    if 0xDC80 <= character <= 0xDCFF:
        return f"\\x{character - 0xDC00:02x}"
    if character == 0x0D:
        return "\\r"
    if character < 0x100:
        return f"\\x{character:02x}"
    return f"\\u{character:04x}" if character < 0x10000 else f"\\U{character:08x}"
