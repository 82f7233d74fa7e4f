"""What a person's message carries: files that it names with `@path`, and pictures.

`@path` at the beginning of a word names a file below the working directory, `@"a path"` one with spaces, and
`\\@` is an at sign. A text file is put below the message, behind its path; a picture goes along as one; of a
directory the names are listed. Nothing outside the directory is read, not by `..` and not by a link.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from treenail.conversation import ImagePart
from treenail.errors import UsageError
from treenail.printable import printable_line
from treenail.workspace import VisibleTree
from treenail.workspace.host import HostFilesystem

MAX_TEXT_BYTES = 200_000
"""How large a text file may be that is put into a message, and all of them together."""

MAX_IMAGE_BYTES = 5_000_000
"""How large a picture may be: vendors refuse larger ones."""

MAX_IMAGES = 20
MAX_LISTED = 200

_NAMED = re.compile(r'(?<![^\s("\'\[{,;])@(?:"([^"\n]+)"|([^\s"\'`()\[\]{}<>,;@\\][^\s"\'`()\[\]{}<>,;]*))')
"""An at sign that begins a word, with a path in quotes or up to the next blank."""

_ESCAPED = re.compile(r"\\@")
_NAMED_OR_ESCAPED = re.compile(rf"{_NAMED.pattern}|{_ESCAPED.pattern}")
_TO_ESCAPE = re.compile(r"""(?<![^\s("'\[{,;])@|\\@""")
"""An at sign that names a file, or that would lose a backslash."""
_BEGINS = re.compile(r"\s*(?=!|/[^\s/]*(?:\s|$)|\\+[!/])")
"""The space before a line that would run something or lose a backslash."""
_ESCAPED_BEGIN = re.compile(r"^(\s*)\\(?=\\*[!/])")
_TAIL = ".,;:!?"
"""What ends a sentence and not a path."""


@dataclass(frozen=True, slots=True)
class Message:
    """What is sent: the text with the files in it, and the pictures."""

    text: str
    images: tuple[ImagePart, ...] = ()


def named_paths(typed: str) -> list[str]:
    """Return the paths that a text names with `@`, each once."""
    return list(dict.fromkeys(quoted or bare for quoted, bare in _NAMED.findall(typed)))


def compose(
    pieces: Sequence[tuple[str, bool]], directory: Path, *, images: Sequence[ImagePart] = ()
) -> Message:
    """Read the files that a message names. Raises `UsageError` if one cannot be read: nothing is sent.

    `pieces` are the parts of the message, and whether each was pasted: what was pasted names nothing.
    """
    parts: list[str] = []
    pictures = list(images)
    room = MAX_TEXT_BYTES
    for name in dict.fromkeys(
        each for text, is_pasted in pieces if not is_pasted for each in named_paths(text)
    ):
        shown, place = _found(name, directory)
        if place.is_dir():
            parts.append(f"{shown}/ contains:\n{_listed(place, shown)}")
            continue
        data = _read(place, shown)
        kind = image_type(data)
        if kind is not None:
            pictures.append(ImagePart(kind, data))
            parts.append(f"{shown} is picture {len(pictures)} of this message.")
            continue
        room -= len(data)
        if room < 0:
            raise UsageError(
                f"@{shown} is too long: a message takes {MAX_TEXT_BYTES // 1000} KB of files; nothing was "
                "sent. Name it without the @, and the agent reads the parts that it needs"
            )
        parts.append(f"{shown}:\n{fenced(_text(data, shown))}")
    if len(pictures) > MAX_IMAGES:
        raise UsageError(f"a message takes {MAX_IMAGES} images, not {len(pictures)}; nothing was sent")
    said = "".join(
        text if is_pasted else _ESCAPED.sub("@", text if number else _ESCAPED_BEGIN.sub(r"\1", text))
        for number, (text, is_pasted) in enumerate(pieces)
    ).strip()
    return Message("\n\n".join([said, *parts]), tuple(pictures))


def read_image(path: Path) -> ImagePart:
    """Read a picture that a person names with `--image`, wherever it is. Raises `UsageError`."""
    if not path.is_file():
        raise UsageError(f"there is no image {path}; check the path")
    data = _read(path, str(path))
    kind = image_type(data)
    if kind is None:
        raise UsageError(f"{path} is not an image that models take; use PNG, JPEG, GIF or WebP")
    return ImagePart(kind, data)


def image_type(data: bytes) -> str | None:
    """Return the type of a picture by its first bytes; None if it is not one that models take."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def with_escapes(pasted: str, directory: Path | None, *, is_first: bool) -> str:
    """Return a pasted text in which an at sign names a file only if there is one: code is full of them.

    Without a directory it names none. At the beginning of a line (`is_first`) it runs nothing, either.
    """

    def escaped(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        try:
            if directory is not None and name:
                _found(name, directory)
                return found[0]
        except UsageError:
            pass
        return _TO_ESCAPE.sub(r"\\\g<0>", found[0])

    text = _NAMED_OR_ESCAPED.sub(escaped, pasted)
    begin = _BEGINS.match(text) if is_first else None
    return text if begin is None else f"{begin[0]}\\{text[begin.end() :]}"


def at_path(path: str) -> str:
    """Write a path as a message names it."""
    return f'@"{path}"' if _NAMED.fullmatch(f"@{path}") is None or path[-1] in _TAIL else f"@{path}"


def _found(name: str, directory: Path) -> tuple[str, Path]:
    """Return a file's name and place; a full stop behind it belongs to the sentence."""
    root = directory.resolve()
    for each in dict.fromkeys((name, name.rstrip(_TAIL))):
        try:
            place = (root / Path(each).expanduser()).resolve()
            is_there = bool(each) and place.exists()
        except (OSError, ValueError, RuntimeError):
            continue  # A name that is too long, a loop of links: no file.
        if not is_there:
            continue
        if not place.is_relative_to(root):
            raise UsageError(
                f"@{printable_line(each)} is outside {root}; nothing was sent. Copy it here, or say \\@ for "
                "a plain at sign"
            )
        return place.relative_to(root).as_posix(), place
    raise UsageError(
        f"there is no file {printable_line(name)} in {root}; nothing was sent. Mend the path, or say "
        f"\\@{printable_line(name)} for plain text"
    )


def _read(place: Path, shown: str) -> bytes:
    try:
        if not place.is_file():
            raise UsageError(f"@{shown} is not a file; nothing was sent")
        with place.open("rb") as file:
            head = file.read(16)
            most = MAX_TEXT_BYTES if image_type(head) is None else MAX_IMAGE_BYTES
            data = head + file.read(most + 1)
    except OSError as error:
        raise UsageError(f"{shown} cannot be read ({error.strerror}); nothing was sent") from error
    if len(data) > most:
        what = "an image" if most == MAX_IMAGE_BYTES else "a file in a message"
        raise UsageError(
            f"{shown} is too large: {what} may have {most // 1000:,} KB; nothing was sent. Name it without "
            "the @, and the agent reads the parts that it needs"
        )
    return data


def _text(data: bytes, shown: str) -> str:
    try:
        if b"\0" in data:
            raise ValueError
        return data.decode()
    except ValueError:
        raise UsageError(
            f"@{shown} is neither text nor an image that models take; nothing was sent"
        ) from None


def fenced(text: str) -> str:
    """Put a text between fences that it does not have itself: a file does not speak for the person."""
    longest = max((len(each) for each in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}\n{text.removesuffix(chr(10))}\n{fence}"


def _listed(place: Path, shown: str) -> str:
    try:
        names = sorted(f"{each.name}/" if each.is_dir() else each.name for each in place.iterdir())
    except OSError as error:
        raise UsageError(f"@{shown} cannot be listed ({error.strerror}); nothing was sent") from error
    more = [f"... and {len(names) - MAX_LISTED} more"] if len(names) > MAX_LISTED else []
    return "\n".join([*map(printable_line, names[:MAX_LISTED]), *more]) or "(nothing)"


def all_images(paths: Iterable[str]) -> tuple[ImagePart, ...]:
    """Read the pictures of `--image` flags."""
    return tuple(read_image(expanded(each)) for each in paths)


def expanded(path: str) -> Path:
    """Return a path that a person typed, with their home for `~`. Raises `UsageError`."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{printable_line(path)}: there is no such user; write the path in full") from error


def project_paths(directory: Path, most: int) -> list[str]:
    """Return the files of a project, nearest first, without what its ignore files leave out."""
    found: list[str] = []
    with HostFilesystem(directory, read_only=True) as filesystem:
        tree, level = VisibleTree(filesystem), ["."]
        while level and len(found) < most:
            deeper: list[str] = []
            for place in level:
                with suppress(OSError):  # It is gone, or may not be read.
                    for each in tree.list(place):
                        (deeper if each.is_directory else found).append(each.path)
                if len(found) >= most:
                    break
            level = deeper
    return found[:most]
