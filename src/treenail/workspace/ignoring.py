"""Which paths a search leaves out: `.gitignore`, `.treenailignore`, and names that begin with a dot.

Theory of operation
-------------------
The rules are ripgrep's, which are git's with few differences. From the weakest to the strongest:

    the user's global excludes (`core.excludesFile`)
    `.git/info/exclude`
    `.gitignore`, of the directory and of those above it, the deeper one first
    `.treenailignore`, likewise

Within a file the last pattern that matches decides, and `!` takes a path in again. Git's files count only in
a repository, and not beyond its root; above the workspace they are looked for up to that root. What is below
a directory that is left out is not looked at, so it cannot be taken in again. Where a search begins is never
left out itself. A name that begins with a dot is left out unless a pattern takes it in.

Patterns are matched segment by segment, by sets of positions, so that none of them is slow: they come with
the project, and may be hostile. A character class never matches a slash, as in git. `.git/info/exclude` of a
linked worktree, which lies elsewhere, is not read.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from treenail.workspace.base import FileEntry, Filesystem
from treenail.workspace.paths import ROOT, encode, join, parent, split

IGNORE_FILE = ".treenailignore"
"""The name of Treenail's own ignore file."""

MAX_FILE_BYTES = 100_000
"""How much of an ignore file is read."""

MAX_PATTERNS = 1_000
"""How many patterns of an ignore file count: it comes with the project, and each path is held against all."""

_GIT_FILE = ".gitignore"
_EXCLUDE = ".git/info/exclude"
_MAX_PATTERN_CHARS = 1_000
_MAX_ALTERNATIVES = 64

_BLANKS = " \t\r\v\f"

_EXCLUDES_FILE = re.compile(rb'^\s*excludesfile\s*=\s*"?\s*(\S+?)\s*"?\s*$', re.IGNORECASE | re.MULTILINE)

_Segment = Callable[[str], object] | None
"""Matches one name; None is `**`."""


class _Invalid(ValueError):
    """A pattern that means nothing; ripgrep skips its line, too."""


# --- one pattern -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rule:
    """One line of an ignore file."""

    takes_in: bool
    """Whether it begins with `!`."""
    directories_only: bool
    alternatives: tuple[tuple[_Segment, ...], ...]
    name: str | None
    """A regular expression for the name alone, if the pattern is about nothing else."""

    def matches(self, parts: Sequence[str]) -> bool:
        return any(_fits(segments, parts) for segments in self.alternatives)


def _fits(segments: Sequence[_Segment], parts: Sequence[str]) -> bool:
    """Say whether a path matches as a whole."""
    last = len(segments)
    at = _beyond(segments, {0})
    for name in parts:
        after: set[int] = set()
        for done in at:
            if done == last:
                continue
            segment = segments[done]
            if segment is None:
                after.add(done)
                if done == last - 1:
                    after.add(last)
            elif segment(name):
                after.add(done + 1)
        at = _beyond(segments, after)
        if not at:
            return False
    return last in at


def _beyond(segments: Sequence[_Segment], at: set[int]) -> set[int]:
    """Add the positions after each `**` that stands for no directory."""
    found = set(at)
    for done in at:
        place = done
        while place < len(segments) - 1 and segments[place] is None:
            place += 1
            found.add(place)
    return found


def _rule(line: str) -> _Rule | None:
    """Read a line of an ignore file; None for a comment, a blank line, and one that means nothing."""
    if line.startswith("#"):
        return None
    if not line.endswith("\\ "):
        line = line.rstrip(_BLANKS)
    if not line or len(line) > _MAX_PATTERN_CHARS:
        return None
    takes_in = is_anchored = False
    if line.startswith(("\\!", "\\#")):
        line = line[1:]
    else:
        takes_in = line.startswith("!")
        line = line[takes_in:]
        is_anchored = line.startswith("/")
        line = line[is_anchored:]
    directories_only = line.endswith("/")
    if directories_only:
        line = line[:-1].removesuffix("\\")
    has_slash = "/" in line
    everywhere = not is_anchored and not has_slash
    if everywhere and line != "**":
        line = f"**/{line}"
    if line.endswith("/**"):
        line += "/*"
    try:
        expanded = _expanded(_tokens(line))
        alternatives = tuple(_segments(each) for each in expanded)
    except _Invalid:
        return None
    name = None
    if everywhere and all(len(each) == 2 and each[0] is None for each in alternatives):
        name = "|".join(_regex(_split(each)[-1]) for each in expanded)
    return _Rule(takes_in, directories_only, alternatives, name)


_SLASH, _STAR, _OPEN, _COMMA, _CLOSE = "slash", "star", "open", "comma", "close"


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    regex: str = ""


def _tokens(pattern: str) -> list[_Token]:
    """Cut a pattern into tokens. Raises `_Invalid`."""
    found: list[_Token] = []
    place = depth = 0
    classes = True
    while place < len(pattern):
        char = pattern[place]
        place += 1
        if char == "*":
            found.append(_Token(_STAR))
        elif char == "?":
            found.append(_Token("one", "."))
        elif char == "/":
            found.append(_Token(_SLASH))
        elif char == "{":
            depth += 1
            found.append(_Token(_OPEN))
        elif char == "}":
            depth -= 1
            if depth < 0:
                raise _Invalid
            found.append(_Token(_CLOSE))
        elif char == "," and depth:
            found.append(_Token(_COMMA))
        elif char == "\\":
            if place == len(pattern):
                raise _Invalid
            literal = pattern[place]
            found.append(_Token(_SLASH) if literal == "/" else _Token("one", re.escape(literal)))
            place += 1
        elif char == "[" and classes:
            end = _class_end(pattern, place)
            if end is None:
                classes = False  # Without its end, this bracket and the later ones are literal.
                found.append(_Token("one", r"\["))
            else:
                found.append(_Token("one", _class(pattern[place:end])))
                place = end + 1
        else:
            found.append(_Token("one", re.escape(char)))
    if depth:
        raise _Invalid
    return found


def _class_end(pattern: str, place: int) -> int | None:
    """Return where a character class ends; a bracket right at its beginning belongs to it."""
    if pattern[place : place + 1] in ("!", "^"):
        place += 1
    end = pattern.find("]", place + 1)
    return None if end == -1 else end


def _class(content: str) -> str:
    """Translate what is between the brackets of a character class. Raises `_Invalid`."""
    negated = content[:1] in ("!", "^")
    chars = content[negated:]
    ranges: list[str] = []
    place = 0
    while place < len(chars):
        first = chars[place]
        if chars[place + 1 : place + 2] == "-" and place + 2 < len(chars):
            last = chars[place + 2]
            if last < first:
                raise _Invalid
            ranges.append(f"{re.escape(first)}-{re.escape(last)}")
            place += 3
        else:
            ranges.append(re.escape(first))
            place += 1
    return f"[{'^' * negated}{''.join(ranges)}]"


def _expanded(tokens: Sequence[_Token]) -> list[list[_Token]]:
    """Return the patterns without braces that a pattern stands for. Raises `_Invalid` if there are many."""
    done: list[list[_Token]] = []
    pending = [list(tokens)]
    while pending:
        each = pending.pop()
        close = next((n for n, token in enumerate(each) if token.kind == _CLOSE), None)
        if close is None:
            done.append(each)
        else:
            start = max(n for n in range(close) if each[n].kind == _OPEN)
            choices: list[list[_Token]] = [[]]
            for token in each[start + 1 : close]:
                if token.kind == _COMMA:
                    choices.append([])
                else:
                    choices[-1].append(token)
            # An empty choice means nothing, unless all of them are.
            chosen = [choice for choice in choices if choice] or [[]]
            pending += [[*each[:start], *choice, *each[close + 1 :]] for choice in chosen]
        if len(pending) + len(done) > _MAX_ALTERNATIVES:
            raise _Invalid
    return done


def _split(tokens: Sequence[_Token]) -> list[list[_Token]]:
    parts: list[list[_Token]] = [[]]
    for token in tokens:
        if token.kind == _SLASH:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _segments(tokens: Sequence[_Token]) -> tuple[_Segment, ...]:
    """Compile a pattern without braces."""
    found: list[_Segment] = []
    for part in _split(tokens):
        if [each.kind for each in part] == [_STAR, _STAR]:
            if not found or found[-1] is not None:
                found.append(None)
        elif not part and found == [None]:
            continue  # `**/` and nothing more is everything.
        else:
            found.append(re.compile(_regex(part), re.DOTALL).fullmatch)
    return tuple(found)


def _regex(part: Sequence[_Token]) -> str:
    """Translate one segment; it matches without backtracking over stars."""
    if not part:
        return r"(?!)"  # There is no empty name.
    fixed = [""]
    for token in part:
        if token.kind == _STAR:
            fixed.append("")
        else:
            fixed[-1] += token.regex
    if len(fixed) == 1:
        return fixed[0]
    middle = "".join(f"(?>.*?{each})" for each in fixed[1:-1] if each)
    return f"{fixed[0]}{middle}.*{fixed[-1]}"


# --- one file --------------------------------------------------------------------------------------


class IgnorePatterns:
    """The patterns of one ignore file. `?` is one byte, so each byte is a character here."""

    def __init__(self, content: bytes) -> None:
        lines = content.removeprefix(codecs.BOM_UTF8).decode("latin-1").split("\n")
        rules: list[_Rule] = []
        count = 0
        for line in lines:
            rule = _rule(line.removesuffix("\r"))
            if rule is not None:
                count += len(rule.alternatives)
                if count > MAX_PATTERNS:
                    break
                rules.append(rule)
        self._rules = tuple(reversed(rules))
        names = [f"(?:{each.name})" for each in rules if each.name is not None]
        # Most patterns are about names. One look says whether any of them matches.
        self._any_name = re.compile("|".join(names) or r"(?!)", re.DOTALL).fullmatch

    def decides(self, parts: Sequence[str], *, is_directory: bool) -> bool | None:
        """Say whether a path, relative to the file's directory, is ignored; None if no pattern matches."""
        parts = [each if each.isascii() else encode(each).decode("latin-1") for each in parts]
        named = self._any_name(parts[-1]) is not None
        for rule in self._rules:
            if rule.directories_only and not is_directory:
                continue
            if (rule.name is None or named) and rule.matches(parts):
                return not rule.takes_in
        return None


# --- a tree ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Level:
    """What a directory says about everything below it."""

    parts: tuple[str, ...]
    """The directory, relative to the outermost one that is looked at."""
    own: IgnorePatterns | None = None
    git: IgnorePatterns | None = None
    exclude: IgnorePatterns | None = None
    is_repository: bool = False


@dataclass(frozen=True, slots=True)
class LeftOut:
    """How many entries a search did not look at."""

    ignored: int = 0
    hidden: int = 0


@dataclass(slots=True)
class VisibleTree:
    """A filesystem as a search sees it: without what is ignored, and without hidden names.

    `list` lists what is left of a directory, for `glob_tree` and `grep_tree`; `left_out` counts the rest.
    """

    filesystem: Filesystem
    include_ignored: bool = False
    include_hidden: bool = False
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    left_out: LeftOut = field(default_factory=LeftOut)
    _levels: dict[str, tuple[_Level, ...]] = field(default_factory=dict, repr=False)
    _global: IgnorePatterns | None = field(default=None, repr=False)
    _above: tuple[str, ...] = field(default=(), repr=False)
    """The directories between the repository's root and the workspace."""

    def list(self, path: str) -> Iterator[FileEntry]:
        """List a directory, by its normalised path, without what is left out."""
        entries = self.filesystem.list(path)
        if self.include_ignored and self.include_hidden:
            return iter(entries)
        return iter([each for each in entries if self._shows(each, self._levels_of(path, entries))])

    def _shows(self, entry: FileEntry, levels: Sequence[_Level]) -> bool:
        verdict = None
        if not self.include_ignored:
            parts = _below(self._above, entry.path)
            verdict = self._decides(levels, parts, is_directory=entry.is_directory)
        if verdict:
            self.left_out = LeftOut(self.left_out.ignored + 1, self.left_out.hidden)
            return False
        if verdict is None and not self.include_hidden and entry.name.startswith("."):
            if entry.name != ".git":
                self.left_out = LeftOut(self.left_out.ignored, self.left_out.hidden + 1)
            return False
        return True

    def _decides(
        self, levels: Sequence[_Level], parts: tuple[str, ...], *, is_directory: bool
    ) -> bool | None:
        """Ask the ignore files, the strongest kind first, and of each kind the deepest one first."""
        deepest_first = levels[::-1]
        inside = next((n for n, each in enumerate(deepest_first) if each.is_repository), None)
        of_git = () if inside is None else deepest_first[: inside + 1]
        for found, kind in ((deepest_first, "own"), (of_git, "git"), (of_git, "exclude")):
            for level in found:
                patterns: IgnorePatterns | None = getattr(level, kind)
                if patterns is not None:
                    said = patterns.decides(parts[len(level.parts) :], is_directory=is_directory)
                    if said is not None:
                        return said
        if inside is None or self._global is None:
            return None
        return self._global.decides(parts[len(self._above) :], is_directory=is_directory)

    def _levels_of(self, path: str, entries: Sequence[FileEntry] | None = None) -> tuple[_Level, ...]:
        """Return what a directory and those above it say, the outermost first."""
        known = self._levels.get(path)
        if known is None:
            if path == ROOT:
                above = self._levels_above()
            else:
                above = self._levels_of(parent(path))
            names = {each.name for each in (self.filesystem.list(path) if entries is None else entries)}
            known = (*above, self._level(path, names))
            self._levels[path] = known
        return known

    def _level(self, path: str, names: set[str]) -> _Level:
        is_repository = ".git" in names
        return _Level(
            _below(self._above, path),
            self._read(path, IGNORE_FILE) if IGNORE_FILE in names else None,
            self._read(path, _GIT_FILE) if _GIT_FILE in names else None,
            self._read(path, _EXCLUDE) if is_repository else None,
            is_repository,
        )

    def _read(self, path: str, name: str) -> IgnorePatterns | None:
        try:
            content = self.filesystem.read_bytes(join(path, name), limit=MAX_FILE_BYTES).content
        except (OSError, ValueError):
            return None  # It is a directory, leads outside, or has gone meanwhile.
        return IgnorePatterns(content)

    def _levels_above(self) -> tuple[_Level, ...]:
        """Read the ignore files between the workspace and the root of the repository that it lies in."""
        root = Path(self.filesystem.root)
        if not root.is_absolute() or root == Path(root.anchor) or not root.is_dir():
            return ()
        self._global = _read_from_disk(_global_excludes(self.environ))
        repository = next((each for each in (root, *root.parents) if (each / ".git").exists()), None)
        if repository is None or repository == root:
            return ()
        between = root.relative_to(repository).parts
        self._above = between
        places = [(between[:depth], repository.joinpath(*between[:depth])) for depth in range(len(between))]
        return tuple(
            _Level(
                parts,
                _read_from_disk(place / IGNORE_FILE),
                _read_from_disk(place / _GIT_FILE),
                None if parts else _read_from_disk(place / _EXCLUDE),
                is_repository=not parts,
            )
            for parts, place in places
        )


def _below(above: tuple[str, ...], path: str) -> tuple[str, ...]:
    """Return the segments of a path below other segments."""
    return (*above, *split(path))


def _read_from_disk(path: Path | None) -> IgnorePatterns | None:
    try:
        if path is None or not path.is_file():
            return None
        with path.open("rb") as file:
            return IgnorePatterns(file.read(MAX_FILE_BYTES))
    except OSError:
        return None


def _global_excludes(environ: Mapping[str, str]) -> Path | None:
    """Return the file of the user's global excludes: as git's configuration says, or git's default."""
    home = Path(environ.get("HOME") or Path.home())
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    named = environ.get("GIT_CONFIG_GLOBAL")
    files = [Path(named)] if named else [home / ".gitconfig", config / "git/config"]
    for each in (*files, Path(environ.get("GIT_CONFIG_SYSTEM") or "/etc/gitconfig")):
        try:
            said = _EXCLUDES_FILE.search(each.read_bytes()[:MAX_FILE_BYTES])
        except OSError:
            continue
        if said is not None:
            return Path(os.fsdecode(said[1]).replace("~", str(home)))
    return config / "git/ignore"
