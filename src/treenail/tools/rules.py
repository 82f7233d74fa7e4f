"""Rules about single calls: what may run without asking, what must be asked, what is refused.

A rule is the name of a tool, or the name and a pattern: `run_command: pytest *`, `edit_file: src/**`. In a
name, `*` is any text. A pattern is about the tool's command or about its paths:

- A command is taken apart (`shell_syntax`). It is allowed if every program in it is allowed and every file
  that it is redirected to. A `*` at the end of a pattern is any further words; inside a word it is any text
  without `..` as a segment. A pattern of several commands (`cd src && pytest *`) is a rule for each of them.
- A path is allowed if both the path as it is written and the path behind its links match.

What cannot be read for certain is never allowed by a rule. `deny` comes first, then `ask`, then `allow`.

`deny` and `ask` are read the other way round: they are about a call that may be what they say. Variables
before a command, the program's directory, wrappers, and words before, between and after those of the rule
change nothing; a rule for `run_command` is about every tool with a command. If a command may run what it
does not show, it is unclear: a denial refuses it where nobody is asked, and `ask` asks.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from treenail.errors import PathEscapeError, UsageError
from treenail.tools.shell_syntax import (
    ANYTHING,
    SimpleCommand,
    Word,
    base_name,
    names,
    simple_commands,
    written_commands,
)
from treenail.workspace import Filesystem, normalize

Verdict = Literal["allow", "ask", "deny", "unclear"]
"""What the rules say about a call; `unclear` if a `deny` might be about it and it cannot be read."""

Arguments = str | Mapping[str, Any]
Resolve = Callable[[str], str | None]
"""Returns the path behind the links of a path in the workspace, or None if that is not known."""

COMMAND_FIELD = "command"
COMMAND_TOOL = "run_command"
"""The tool whose `ask` and `deny` rules are about every call with a command."""
PATH_FIELDS = ("path", "target", "source", "destination", "file", "file_path", "old_path", "new_path")
"""The arguments that are paths; a call has to match with all that it has."""
_NAME = re.compile(r"[A-Za-z0-9_.*/-]+")

_WIDE = names(
    "pytest py.test tox nox ruff black isort flake8 mypy pyright pylint eslint prettier tsc jest vitest "
    "mocha rspec rubocop phpunit gofmt golangci-lint rustfmt clang-format shellcheck ctest ls cat head tail "
    "wc grep rg pwd stat file which echo diff tree du true false cd"
)
"""Programs that `rule_for` suggests with any arguments: they are run often, and stay in the sandbox."""

_SUBCOMMANDS: Mapping[str, frozenset[str]] = {
    "git": names("status diff log show blame add commit rev-parse ls-files"),
    "cargo": names("build check test clippy fmt doc bench"),
    "go": names("build test vet fmt doc list"),
    "npm": names("test ls run"),
    "pnpm": names("test ls run"),
    "yarn": names("test run"),
    "dotnet": names("build test format"),
    "uv": names("run sync lock tree"),
    "poetry": names("run check show"),
}
"""Programs that it suggests with one of their commands and any arguments."""

_RUN = frozenset(("npm", "pnpm", "yarn"))
_RUN_PROGRAM = frozenset(("uv", "poetry"))


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, as it was written, and what was read of it."""

    text: str
    tool: re.Pattern[str]
    commands: tuple[SimpleCommand, ...] = ()
    path: re.Pattern[str] | None = None
    prefix: str = ""
    """The directory that every path of the pattern is in."""
    is_any: bool = False
    """Whether it is about every call of the tool."""
    is_star: bool = False
    """Whether it is about every call that can be read for certain."""
    sought: tuple[tuple[Word, ...], ...] = ()
    """The words that a command has if it may be what the rule denies or asks about."""


@lru_cache(maxsize=1024)
def parse_rule(text: str, kind: Literal["allow", "ask", "deny"] = "allow") -> Rule:
    """Read a rule. Raises `UsageError` that says what is wrong with it."""
    name, colon, pattern = text.partition(":")
    name, pattern = name.strip(), pattern.strip()
    if not _NAME.fullmatch(name) or (colon and not pattern):
        raise UsageError(
            f"{text!r} is not a rule; write TOOL or TOOL: PATTERN, such as 'run_command: pytest *' or "
            "'edit_file: src/**'"
        )
    tool = re.compile(re.escape(name).replace(r"\*", ".*"), re.DOTALL)
    if pattern in ("", "*", "**"):
        return Rule(text, tool, path=re.compile(".*", re.DOTALL), is_any=not pattern, is_star=bool(pattern))
    commands = simple_commands(pattern) or ()
    sought = () if kind == "allow" else _sought((*commands, *written_commands(pattern)))
    if any(each.is_whole and any(word.is_star for word in each.words) for each in commands):
        commands = ()
    if name == COMMAND_TOOL and not commands and not sought:
        raise UsageError(
            f"{text!r} is a rule for commands that are unclear; write plain commands, name what "
            "a wrapper such as sh, env or xargs runs, and spell out what evaluates its arguments"
        )
    return Rule(text, tool, commands, _path_pattern(pattern), _literal_prefix(pattern), sought=sought)


@dataclass(slots=True)
class Rules:
    """The rules in force. `add` takes effect at once, also for subagents, which share them."""

    allow: Sequence[str] = ()
    ask: Sequence[str] = ()
    deny: Sequence[str] = ()
    root: Path | None = None
    """The workspace's directory, for callers that have no filesystem at hand."""
    _known: dict[str, tuple[Rule, ...]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        kinds: tuple[Literal["allow", "ask", "deny"], ...] = ("allow", "ask", "deny")
        for kind in kinds:
            given = getattr(self, kind)
            if isinstance(given, str) or not all(isinstance(each, str) for each in given):
                raise UsageError(
                    f"{kind} must be a list of rules such as 'run_command: pytest *', not {given!r}"
                )
            self._known[kind] = tuple(parse_rule(each, kind) for each in given)

    @property
    def is_empty(self) -> bool:
        """Whether there is no rule at all."""
        return not any(self._known.values())

    @property
    def narrows(self) -> bool:
        """Whether there is a rule that asks or denies."""
        return bool(self._known["ask"] or self._known["deny"])

    def add(self, rule: str) -> None:
        """Allow what a rule says from now on. Raises `UsageError`."""
        parsed = parse_rule(rule)
        if rule not in self.allow:
            self.allow = (*self.allow, rule)
            self._known["allow"] = (*self._known["allow"], parsed)

    def allows(self, tool: str, arguments: Arguments) -> bool:
        """Whether a call may run without asking."""
        return self.verdict(tool, arguments)[0] == "allow"

    def verdict(
        self, tool: str, arguments: Arguments, filesystem: Filesystem | None = None
    ) -> tuple[Verdict | None, str]:
        """Return what the rules say about a call and the rule that says it; None if none does."""
        has_command = self.narrows and COMMAND_FIELD in (_fields(arguments) or ())
        about = {
            kind: [
                each
                for each in known
                if each.tool.fullmatch(tool)
                or (has_command and kind != "allow" and each.tool.fullmatch(COMMAND_TOOL))
            ]
            for kind, known in self._known.items()
        }
        if not any(about.values()):
            return None, ""
        call = _Call(
            arguments, _resolver(self.root if filesystem is None else filesystem.host_root, filesystem)
        )
        for rule in about["deny"]:
            if rule.is_any or call.touches(rule):
                return "deny", rule.text
        may_hide = call.is_unclear or any(each.is_hidden for each in call.commands)
        if may_hide and about["deny"]:
            return "unclear", about["deny"][0].text
        for rule in about["ask"]:
            if rule.is_any or call.touches(rule) or may_hide:
                return "ask", rule.text
        if any(each.is_any for each in about["allow"]) or call.is_covered(
            about["allow"], self._known["allow"]
        ):
            return "allow", "; ".join(each.text for each in about["allow"])
        return None, ""

    def rule_for(self, tool: str, arguments: Arguments) -> str:
        """Return the rule that "always" would write for a call; empty if none can be written for certain."""
        return rule_for(tool, arguments, self.root)


def rule_for(tool: str, arguments: Arguments, root: Path | None = None) -> str:
    """Return a rule that covers a call and little else; empty if none can be written for certain."""
    if not _NAME.fullmatch(tool) or "*" in tool:
        return ""
    call = _Call(arguments, _resolver(root, None))
    if call.command is not None:
        each = [] if call.is_unclear else [_suggested(part) for part in call.commands]
        suggested = " ; ".join(dict.fromkeys(each)) if all(each) else ""
    elif not call.is_read:
        return ""
    elif not call.paths:
        return tool
    elif len(set(call.paths)) == 1:
        folder = posixpath.dirname(posixpath.normpath(call.paths[0]))
        suggested = f"{folder}/**" if folder and not _is_pattern(folder) else call.paths[0]
    else:
        suggested = ""
    rule = f"{tool}: {suggested}"
    try:
        covers = bool(suggested) and Rules((rule,), root=root).allows(tool, arguments)
    except UsageError:
        covers = False
    return rule if covers else ""


class _Call:
    """What a call's arguments say."""

    def __init__(self, arguments: Arguments, resolve: Resolve) -> None:
        known = _fields(arguments)
        self.fields = known or {}
        self._resolve = resolve
        command = self.fields.get(COMMAND_FIELD)
        self.command = command if isinstance(command, str) else None
        self.commands = () if self.command is None else simple_commands(self.command) or ()
        given = [self.fields[name] for name in PATH_FIELDS if name in self.fields]
        texts = [*given, *([command] if COMMAND_FIELD in self.fields else [])]
        self.is_read = known is not None and all(isinstance(each, str) for each in texts)
        self.paths = [] if self.command is not None else [each for each in given if isinstance(each, str)]
        directory = self.fields.get("directory", ".")
        self._directory = directory if isinstance(directory, str) else "\0"
        if self.command is not None:
            self.is_unclear = not self.commands
        else:
            self.is_unclear = (
                not self.paths or len(self.paths) < len(given) or None in map(self._places, self.paths)
            )

    def is_covered(self, rules: Sequence[Rule], every: Sequence[Rule]) -> bool:
        """Whether rules allow all of the call; `every` are the rules of other tools as well."""
        if self.is_unclear:
            return False
        if self.command is None:
            return all(self._is_path_allowed(each, rules) for each in self.paths)
        words = [each for rule in rules for each in rule.commands]
        any_command = any(each.is_star for each in rules)
        named = [each for each in every if each.tool.fullmatch("write_file")]
        return all(
            (
                not each.words
                or (any_command and not each.is_whole)
                or any(self._matches(each, known) for known in words)
            )
            and all(self._may_write(path, each, words, named) for path in each.writes)
            and all(self._is_inside(path, each) for path in each.reads)
            for each in self.commands
        )

    def touches(self, rule: Rule) -> bool:
        """Whether a part of the call may be what a rule is about."""
        if self.command is not None:
            return rule.is_star or any(
                _may_be(each, known)
                for each in (*self.commands, *written_commands(self.command))
                for known in rule.sought
            )
        return any(
            rule.path is not None
            and (rule.path.fullmatch(place) or place == "." or (rule.prefix + "/").startswith(place + "/"))
            for path in self.paths
            for place in self._places(path) or ()
        )

    def _places(self, path: str) -> tuple[str, str] | None:
        """Return a path in the workspace as it is written and behind its links; None if it is not clear."""
        try:
            plain = normalize(path)
        except (PathEscapeError, ValueError, OSError):
            return None
        real = self._resolve(plain)
        return None if real is None else (plain, real)

    def _is_path_allowed(self, path: str, rules: Iterable[Rule]) -> bool:
        places = self._places(path)
        return places is not None and all(
            any(rule.path is not None and rule.path.fullmatch(each) for rule in rules) for each in places
        )

    def _here(self, path: str, command: SimpleCommand) -> str | None:
        """Return a path that a command names, relative to the workspace's root."""
        if path.startswith("/") or command.is_moved:
            return None
        return posixpath.join(self._directory, path)

    def _is_inside(self, path: str, command: SimpleCommand) -> bool:
        here = self._here(path, command)
        return path == "/dev/null" or (here is not None and self._places(here) is not None)

    def _may_write(
        self, path: str, command: SimpleCommand, known: Sequence[SimpleCommand], named: Sequence[Rule]
    ) -> bool:
        if path == "/dev/null":
            return True
        here = self._here(path, command)
        places = None if here is None else self._places(here)
        if places is None:
            return False
        spelled = {normalize(each) for rule in known for each in rule.writes if not each.startswith("/")}
        return all(
            each in spelled or any(rule.is_any or (rule.path and rule.path.fullmatch(each)) for rule in named)
            for each in places
        )

    def _matches(self, command: SimpleCommand, rule: SimpleCommand) -> bool:
        given, known = list(command.words), list(rule.words)
        takes_more = bool(known) and known[-1].is_star
        if command.is_whole and any(each.pattern != re.escape(each.text) for each in known):
            return False
        if takes_more:
            known.pop()
        if len(given) < len(known) or (len(given) > len(known) and not takes_more):
            return False
        at = next((n for n, each in enumerate(given) if not each.assigned), 0)
        return all(
            self._is_same_program(word, other, command) if n == at else _fits(word, other)
            for n, (word, other) in enumerate(zip(given, known, strict=False))
        )

    def _is_same_program(self, word: Word, known: Word, command: SimpleCommand) -> bool:
        """Whether a program is the one of a rule. A relative path is one from the workspace's root."""
        if "/" not in word.text or word.text.startswith("/"):
            return word.text == known.text
        here = self._here(word.text, command)
        return (
            here is not None
            and "/" in known.text
            and posixpath.normpath(here) == posixpath.normpath(known.text)
        )


def _fits(word: Word, known: Word) -> bool:
    if word.text == known.text and word.is_expanded == known.is_expanded:
        return True
    if ".." in word.text.split("/") or not re.fullmatch(known.pattern, word.text, re.DOTALL):
        return False
    return known.pattern != re.escape(known.text) or not word.is_expanded


# --- what a command may be -------------------------------------------------------------------------

_BETWEEN_WORDS = re.compile(r"[^A-Za-z0-9_./+@:=*?-]+")


def _sought(commands: Iterable[SimpleCommand]) -> tuple[tuple[Word, ...], ...]:
    """Return the words by which the commands of a denial are known, without variables and the last `*`."""
    found = []
    for each in commands:
        words = each.words[:-1] if each.words and each.words[-1].is_star else each.words
        found.append(_without_variables(words) or words)
    return tuple(dict.fromkeys(each for each in found if each))


def _without_variables(words: tuple[Word, ...]) -> tuple[Word, ...]:
    at = next((n for n, each in enumerate(words) if not each.assigned), len(words))
    return words[at:]


def _may_be(command: SimpleCommand, sought: tuple[Word, ...]) -> bool:
    """Say whether a command may run what is sought: its words in their order, whatever is around them."""
    words = command.words if sought[0].assigned else _without_variables(command.words)
    if not words:
        return False
    if command.runs_its_words or sought[0].assigned:
        inside = [Word(part, "") for each in words for part in _BETWEEN_WORDS.split(each.text) if part]
        return any(_has(given, sought) for given in (list(words), inside))
    return _is_program(words[0], sought[0]) and _has(words[1:], sought[1:], programs=False)


def _has(given: Sequence[Word], sought: Sequence[Word], *, programs: bool = True) -> bool:
    """Say whether words are there in their order; the first one may be a program."""
    at = 0
    for n, known in enumerate(sought):
        while at < len(given) and not (
            _may_fit(given[at], known) or (programs and n == 0 and _is_program(given[at], known))
        ):
            at += 1
        at += 1
    return at <= len(given)


def _is_program(word: Word, known: Word) -> bool:
    """Say whether a program has the name of a rule's, in whatever directory."""
    if known.is_expanded and "/" in known.text:
        return re.fullmatch(known.pattern, word.text, re.DOTALL) is not None
    return re.fullmatch(base_name(known.pattern), base_name(word.text), re.DOTALL) is not None


def _may_fit(word: Word, known: Word) -> bool:
    """Say whether a word may be the one of a rule when the shell has expanded it."""
    plain = posixpath.normpath(word.text) if word.text else ""
    if any(re.fullmatch(known.pattern, each, re.DOTALL) for each in (word.text, plain)):
        return True
    if not word.is_expanded:
        return False
    if known.pattern == re.escape(known.text):
        return fnmatchcase(known.text, word.text)
    ours, theirs = (re.split(r"[*?\[~]", each.text)[0] for each in (word, known))
    return ours.startswith(theirs) or theirs.startswith(ours)


def _fields(arguments: Arguments) -> Mapping[str, Any] | None:
    if not isinstance(arguments, str):
        return arguments
    try:
        data = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _resolver(root: Path | None, filesystem: Filesystem | None) -> Resolve:
    """Return how links are followed: on the disk, or not at all where there is none."""

    def on_disk(path: str) -> str | None:
        top = os.path.realpath(str(root))
        place = os.path.join(top, path)
        try:
            found = os.path.realpath(place, strict=True)
        except FileNotFoundError:
            found = os.path.realpath(place)  # It is to be made.
        except OSError:
            return None
        real = os.path.relpath(found, top)
        return None if real == ".." or real.startswith("../") else real

    def without_links(path: str) -> str | None:
        if filesystem is None:
            return path
        segments = path.split("/")
        for count in range(1, len(segments) + 1):
            try:
                if filesystem.stat("/".join(segments[:count])).is_link:
                    return None
            except (OSError, ValueError, PathEscapeError):
                return path  # There is nothing, so there is no link below it.
        return path

    return without_links if root is None else on_disk


# --- patterns of paths -----------------------------------------------------------------------------


def _path_pattern(pattern: str) -> re.Pattern[str] | None:
    """Return a pattern of paths: `*` and `?` within a name, `**` over directories; None if it is not one."""
    if "\n" in pattern or pattern.startswith("/") or ".." in pattern.split("/"):
        return None
    parts = re.split(r"(/\*\*/|^\*\*/|/\*\*$|\*\*|\*|\?)", pattern.removeprefix("./"))
    meaning = {"/**/": "/(?:.*/)?", "**/": "(?:.*/)?", "/**": "/.+", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(meaning.get(each) or re.escape(each) for each in parts), re.DOTALL)


def _is_pattern(path: str) -> bool:
    return any(each in path for each in "*?")


def _literal_prefix(pattern: str) -> str:
    """Return the directories that a pattern of paths names before its first wildcard."""
    return "/".join(_until(pattern.removeprefix("./").split("/"), _is_pattern))


def _until(parts: Iterable[str], stop: Callable[[str], bool]) -> Iterator[str]:
    for each in parts:
        if stop(each):
            return
        yield each


# --- suggestions -----------------------------------------------------------------------------------


def _suggested(command: SimpleCommand) -> str:
    """Return a pattern for one command: with any arguments for a program that is run often; or nothing."""
    texts = [each.text for each in command.words]
    redirected = "".join(f" > {shlex.quote(each)}" for each in command.writes if each != "/dev/null")
    count = _kept_words(texts)
    if count is None and ANYTHING in command.words:
        return ""
    if count is None or command.is_whole or any(each.is_expanded for each in command.words[:count]):
        return " ".join(map(_spelled, command.words)) + redirected
    return " ".join([*map(_spelled, command.words[:count]), "*"]) + redirected


def _spelled(word: Word) -> str:
    return word.text if word.is_expanded else shlex.quote(word.text)


def _kept_words(texts: Sequence[str]) -> int | None:
    """Return how many words name what a command does; None if only all of them do."""
    if not texts:
        return None
    head, second, third = [*texts, "", ""][:3]
    if head in _WIDE:
        return 1
    if re.fullmatch(r"python[0-9.]*", head) and second == "-m" and third in _WIDE:
        return 3
    if second not in _SUBCOMMANDS.get(head, ()):
        return None
    if second == "run" and head in _RUN:
        return 3 if third and not third.startswith("-") else None
    if second == "run" and head in _RUN_PROGRAM:
        return 3 if third in _WIDE else None
    return 2
