"""A shell command, taken apart for certain or not at all.

Theory of operation
-------------------
A rule that lets `pytest *` run must not let anything else run, so what is asked here is not "what does this
command mean" but "can it mean only this". The part of the shell's grammar that is read is small and the same
in every shell: words of plain or quoted characters, joined by `;`, `&`, `&&`, `||`, `|` and newlines, with
redirections to and from files. Anything else (expansions, substitutions, here-documents, groups, functions,
reserved words, comments, braces, control characters) is `None`: a person has to look at it.

Programs that only run another command (`sh -c`, `env`, `xargs`, `timeout` ...) are replaced by that command.
Builtins that evaluate their arguments, and programs that run some of them, are marked as `whole`: a pattern
does not cover them, only a rule that spells them out. So are options by which a program runs or writes what
its caller names (`rg --pre`, `git log --output`, `go test -exec`).

A rule that refuses `rm *` asks the other question: can it mean this? `is_hidden` marks the commands of which
that cannot be told, and `runs_its_words` those that may run any of their words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

MAX_COMMAND_CHARS = 20_000
"""A longer command is not taken apart."""

_MAX_NESTING = 4


def names(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./,:=+@%")
"""The characters that mean themselves everywhere in a word."""

_EXPANDED = frozenset("*?[]~")
"""The characters that the shell may expand to names of files."""

_HEAD = re.compile(r"[A-Za-z0-9_./+-][A-Za-z0-9_./+@:-]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\+?=")

_RESERVED = names("if then else elif fi case esac for select while until do done in function coproc ! [[ { }")

_EVALUATES = names(
    ". alias bind builtin caller command compgen complete declare disown enable eval exec export fc getopts "
    "hash history let local logout mapfile printf read readarray readonly set shift shopt source test times "
    "trap type typeset ulimit umask unalias unset wait "
    "sudo doas su runuser pkexec chroot unshare nsenter parallel watch strace ltrace gdb script flock "
    "setarch busybox toybox systemd-run at batch crontab zsh ksh mksh ash fish csh tcsh setsid stdbuf ionice "
    "taskset chrt fakeroot sg bwrap firejail prlimit expect unbuffer entr tmux screen ssh"
)
"""Commands that evaluate their arguments or change what later commands mean, and that run other commands."""

_SHOWS = names("printf test export type umask ulimit unset wait shift times")
"""Those of them that run nothing, unless a word has an expansion that they evaluate."""

_RUNS_WORDS = names(
    "find docker podman kubectl uv uvx poetry pipx pdm hatch npx npm pnpm yarn bunx bun make python perl "
    "ruby node php awk gawk mawk lua tclsh xargs env nohup time timeout nice valgrind perf rlwrap"
)
"""Other programs that may run what their words say."""

_ACTS = names("-exec -execdir -ok -okdir -delete -fprint -fprint0 -fprintf -fls -files0-from")
"""What `find` does beyond finding."""

_RUNNING_OPTIONS = names(
    "pre hostname-bin upload-pack receive-pack exec exec-path config-env ext-diff open-files-in-pager "
    "toolexec vettool ldflags gcflags asmflags gccgoflags overlay modfile config config-file rcfile "
    "init-hook plugin load-plugins rulesdir require bootstrap script script-shell node-options prefix cwd "
    "directory manifest-path python-executable test-command build-and-test override override-ini"
)
_WRITING_OPTIONS = names(
    "output output-file outfile out out-dir outdir outputdir output-log target-dir artifact-dir "
    "artifacts-path basetemp junitxml junit-xml log-file log-junit report-log cache-dir cache-location "
    "coverprofile cpuprofile memprofile blockprofile mutexprofile trace declarationdir tsbuildinfofile"
)
"""Long options by which a program that else only looks or builds runs or writes what its caller names."""

_SHORT_OPTIONS = {
    "tree": "oR",
    "go": "oC",
    "eslint": "ocf",
    "ruff": "o",
    "rspec": "ro",
    "rubocop": "ro",
    "ctest": "SO",
    "file": "C",
    "dotnet": "op",
    "pytest": "o",
    "npm": "C",
    "pnpm": "C",
}
"""Their short options that do."""

_SHELLS = frozenset(("sh", "bash", "dash"))
_PREFIXES = frozenset(("nohup", "time"))
_WRAPPERS = _PREFIXES | names("env timeout nice xargs")
_DURATION = re.compile(r"\d+(\.\d+)?[smhd]?")


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command."""

    text: str
    pattern: str
    """The word as a regular expression in which a `*` outside of quotes is any text; for a rule."""
    is_expanded: bool = False
    """Whether the shell may make other words of it."""
    assigned: str = ""
    """The variable that it sets if it stands before the command."""

    @property
    def is_star(self) -> bool:
        """Whether it is a lone `*`, which stands for any further words at the end of a rule."""
        return self.pattern == ".*"


ANYTHING = Word("*", ".*", True)
"""Words that cannot be known, such as those that `xargs` adds."""


@dataclass(frozen=True, slots=True)
class SimpleCommand:
    """One program with its arguments, and the files that are opened for it."""

    words: tuple[Word, ...]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    is_whole: bool = False
    """Whether only a rule that spells all of it out covers it."""
    is_moved: bool = False
    """Whether a command before it may have changed the directory."""
    is_hidden: bool = False
    """Whether it may run what its words do not show."""

    @property
    def head(self) -> str:
        """The program's name; empty if there are only redirections."""
        return self.words[0].text if self.words else ""

    @property
    def runs_its_words(self) -> bool:
        """Whether it may run a command that is among its words."""
        program = next((base_name(each.text) for each in self.words if not each.assigned), "")
        program = re.sub(r"[0-9.]+$", "", program)
        return self.is_hidden or program in _RUNS_WORDS | _SHELLS | _EVALUATES - _SHOWS


def base_name(program: str) -> str:
    """Return the name of a program without its directory."""
    return program.rpartition("/")[2]


class _Uncertain(Exception):
    """The text is not in the part of the grammar that is read."""


def simple_commands(text: str) -> tuple[SimpleCommand, ...] | None:
    """Return every command that a text runs, or None if that is not certain."""
    if len(text) > MAX_COMMAND_CHARS:
        return None
    try:
        return tuple(_commands(text, 0))
    except _Uncertain:
        return None


def written_commands(text: str) -> tuple[SimpleCommand, ...]:
    """Return the commands of a text as they are written, wrappers and all; none if it cannot be read."""
    try:
        return tuple(_parsed(text)) if len(text) <= MAX_COMMAND_CHARS else ()
    except _Uncertain:
        return ()


def _commands(text: str, depth: int) -> Iterator[SimpleCommand]:
    moved = False
    for each in _parsed(text):
        for inner in _inner(each, depth):
            yield replace(inner, is_moved=moved)
            moved = moved or inner.head in ("cd", "pushd", "popd") or inner.is_whole


# --- what is run in the end ------------------------------------------------------------------------


def _inner(command: SimpleCommand, depth: int) -> Iterator[SimpleCommand]:
    """Yield what a command really runs, with its redirections."""
    if depth > _MAX_NESTING:
        raise _Uncertain
    words = command.words
    at = next((n for n, each in enumerate(words) if not each.assigned), len(words))
    if any(each.is_expanded for each in words[: at + 1]):
        raise _Uncertain
    if at == len(words):
        yield SimpleCommand(words, command.reads, command.writes, bool(words), is_hidden=bool(words))
        return
    if words[at].text in _RESERVED or not _HEAD.fullmatch(words[at].text):
        raise _Uncertain
    head = re.sub(r"^/(usr/)?bin/", "", words[at].text)
    rest = words[at + 1 :]
    if head in _SHELLS:
        if not at and len(rest) > 1 and rest[0].text in ("-c", "-ec", "-ce", "-euc"):
            if any(each.is_expanded for each in rest[:2]):
                raise _Uncertain
            yield from (_with(command, each) for each in _commands(rest[1].text, depth + 1))
            return
        if not rest or rest[0].text.startswith(("-", "+")) or rest[0].is_expanded:
            raise _Uncertain
    wrapped = _wrapped(head, rest)
    if wrapped is not None:
        yield from _inner(_like(command, (*words[:at], *wrapped)), depth + 1)
        return
    is_whole = (
        head in _EVALUATES
        or (head == "find" and any(each.text in _ACTS or each is ANYTHING for each in rest))
        or _has_option(head, rest, _RUNNING_OPTIONS | _WRITING_OPTIONS)
    )
    yield SimpleCommand(
        words, command.reads, command.writes, is_whole, is_hidden=_is_hidden(head, rest, is_whole)
    )


def _is_hidden(head: str, rest: tuple[Word, ...], is_whole: bool) -> bool:
    """Say whether a command may run what its words do not show."""
    if head in _SHOWS:
        return any(set("$`[") & set(each.text) for each in rest)
    is_elsewhere = head.startswith(("/", "../")) and base_name(head) in _EVALUATES | _SHELLS | _WRAPPERS
    acts = is_whole and (head in _EVALUATES or head == "find")
    return acts or is_elsewhere or _has_option(head, rest, _RUNNING_OPTIONS, shorts=False)


def _has_option(head: str, rest: tuple[Word, ...], known: frozenset[str], *, shorts: bool = True) -> bool:
    """Say whether one of the options is there, also one that is cut short, as git and others take it."""
    if head == "git" and any(each.text == "-c" and "=" in value.text for each, value in pairwise(rest)):
        return True
    programs = {head, *(each.text for each in rest[:2])}  # `uv run pytest`, `python -m pytest`
    letters = "".join(_SHORT_OPTIONS.get(each, "") for each in programs) if shorts else ""
    for each in rest:
        dashes, name = re.match(r"(-*)([^=:]*)", each.text, re.DOTALL).groups()  # type: ignore[union-attr]
        is_one_word = head in ("go", "dotnet") and len(name) > 1
        name = name.lower()
        if dashes == "--" and len(name) > 2 and any(option.startswith(name) for option in known):
            return True
        if dashes == "-" and (name in known or (not is_one_word and set(letters) & set(each.text[1:]))):
            return True
    return False


def _wrapped(head: str, rest: tuple[Word, ...]) -> tuple[Word, ...] | None:
    """Return the command that a wrapper runs, None if this is not a wrapper."""
    if head == "env":
        if not rest:
            return None
        return _certain(rest)
    if head in _PREFIXES:
        return _certain(rest)
    if head == "timeout":
        while rest and rest[0].text in ("-k", "-s") and len(rest) > 2:
            rest = _certain(rest[1:])[1:]
        if not rest or not _DURATION.fullmatch(rest[0].text):
            raise _Uncertain
        return _certain(rest[1:])
    if head == "nice":
        if rest and rest[0].text == "-n" and len(rest) > 2 and re.fullmatch(r"-?\d+", rest[1].text):
            rest = rest[2:]
        return _certain(rest)
    if head == "xargs":
        while rest and rest[0].text in ("-0", "-r", "-n", "-P", "-L"):
            takes_number = rest[0].text in ("-n", "-P", "-L")
            if takes_number and not (len(rest) > 1 and rest[1].text.isdigit()):
                raise _Uncertain
            rest = rest[2 if takes_number else 1 :]
        return (*_certain(rest), ANYTHING)
    return None


def _certain(rest: tuple[Word, ...]) -> tuple[Word, ...]:
    """Return words that begin with a command's name; raise if they do not for certain."""
    if not rest or rest[0].is_expanded or rest[0].text.startswith("-"):
        raise _Uncertain
    return rest


def _like(command: SimpleCommand, words: tuple[Word, ...]) -> SimpleCommand:
    return SimpleCommand(words, command.reads, command.writes)


def _with(outer: SimpleCommand, inner: SimpleCommand) -> SimpleCommand:
    """Give an inner command the redirections of the one that runs it."""
    reads, writes = (*outer.reads, *inner.reads), (*outer.writes, *inner.writes)
    return replace(inner, reads=reads, writes=writes)


# --- the grammar -----------------------------------------------------------------------------------

_JOINS = ("&&", "||", "|&", ";", "|", "&", "\n")
_TO_FILE = (">>", ">|", ">")


def _parsed(text: str) -> Iterator[SimpleCommand]:
    """Yield the commands as they are written. Raises `_Uncertain`."""
    if any((ord(each) < 32 and each not in "\t\n") or ord(each) == 127 for each in text):
        raise _Uncertain
    at, end = 0, len(text)
    words: list[Word] = []
    reads: list[str] = []
    writes: list[str] = []
    needs_more = False  # after &&, || and |
    seen = False
    while True:
        while at < end and text[at] in " \t":
            at += 1
        if at < end and text[at] not in "\n;&|<>":
            word, stop = _word(text, at)
            if word.text.isdigit() and text[at:stop].isdigit() and text[stop : stop + 1] in ("<", ">"):
                at = stop  # a descriptor's number
            else:
                words.append(word)
                at = stop
                continue
        if at < end and (text[at] in "<>" or text.startswith("&>", at)):
            at = _redirection(text, at, reads, writes)
            continue
        join = next((each for each in _JOINS if text.startswith(each, at)), "") if at < end else ""
        if words or reads or writes:
            yield SimpleCommand(tuple(words), tuple(reads), tuple(writes))
            words, reads, writes = [], [], []
            seen, needs_more = True, join in ("&&", "||", "|&", "|")
        elif at == end:
            if needs_more or not seen:
                raise _Uncertain
        elif join != "\n":
            raise _Uncertain
        if at == end:
            if needs_more:
                raise _Uncertain
            return
        at += len(join)


def _redirection(text: str, at: int, reads: list[str], writes: list[str]) -> int:
    """Read a redirection, and return where it ends."""
    if text.startswith("&>", at):
        at += 3 if text.startswith("&>>", at) else 2
        files = writes
    elif text[at] == ">":
        copied = re.compile(r">&(\d|-)(?=[\s;&|]|$)").match(text, at)
        if copied is not None:
            return copied.end()
        at += len(next(each for each in _TO_FILE if text.startswith(each, at)))
        files = writes
    else:
        at += 1
        files = reads
    while at < len(text) and text[at] in " \t":
        at += 1
    if at == len(text) or text[at] in "\n;&|<>":
        raise _Uncertain
    word, at = _word(text, at)
    if word.is_expanded or not word.text:
        raise _Uncertain
    files.append(word.text)
    return at


def _word(text: str, at: int) -> tuple[Word, int]:
    """Read one word, and return it with where it ends."""
    chars: list[tuple[str, bool]] = []
    start = at
    while at < len(text):
        char = text[at]
        if char in " \t\n;&|<>":
            break
        if char == "'":
            stop = text.find("'", at + 1)
            if stop < 0:
                raise _Uncertain
            chars += ((each, True) for each in text[at + 1 : stop])
            at = stop + 1
        elif char == '"':
            at = _double_quoted(text, at + 1, chars)
        elif char == "\\":
            if at + 1 == len(text) or not text[at + 1].isascii() or text[at + 1] == "\n":
                raise _Uncertain
            chars.append((text[at + 1], True))
            at += 2
        elif char in _PLAIN or char in _EXPANDED:
            chars.append((char, False))
            at += 1
        else:
            raise _Uncertain
    if at == start:
        raise _Uncertain
    return _made(chars), at


def _double_quoted(text: str, at: int, chars: list[tuple[str, bool]]) -> int:
    while at < len(text):
        char = text[at]
        if char == '"':
            return at + 1
        if char in "$`" or text.startswith("\\\n", at):
            break
        if char == "\\" and text[at + 1 : at + 2] in ('"', "\\", "$", "`"):
            at += 1
            char = text[at]
        chars.append((char, True))
        at += 1
    raise _Uncertain


def _made(chars: Sequence[tuple[str, bool]]) -> Word:
    text = "".join(each for each, _ in chars)
    pattern = "".join(".*" if each == "*" and not is_quoted else re.escape(each) for each, is_quoted in chars)
    is_expanded = any(each in _EXPANDED and not is_quoted for each, is_quoted in chars)
    assigned = _ASSIGNMENT.match("".join("'" if is_quoted else each for each, is_quoted in chars))
    return Word(text, pattern, is_expanded, assigned[1] if assigned else "")
