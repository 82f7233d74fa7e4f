"""What searches leave out, held against ripgrep itself, which `make test` installs."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treenail.workspace import InMemoryFilesystem, VisibleTree
from treenail.workspace.host import HostFilesystem
from treenail.workspace.ignoring import IgnorePatterns

RG = Path(sys.executable).with_name("rg")
OWN_FILES = {".gitignore", ".treenailignore", ".ignore"}

NAMES = st.sampled_from(["a", "b", "ab", "a.o", "b.txt", "build", "x y", ".env", "c[1]", "é"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
WORDS = """a b ab * ? ** *.o a* *b* build [ab] [!a] b.t?t .env {a,b} \\a .* [ c\\[1\\] [a-c]* *.{o,txt} **b"""
PIECES = st.sampled_from([*WORDS.split(), "x y"])
PATTERNS = st.tuples(
    st.sampled_from(["", "", "", "!", "\\!", "#"]),
    st.sampled_from(["", "", "/"]),
    st.lists(PIECES, min_size=1, max_size=3).map("/".join),
    st.sampled_from(["", "", "/", "/**", " ", "\\ ", "\\"]),
).map("".join)
FILES = st.lists(PATTERNS, min_size=1, max_size=5).map("\n".join)


def seen_by_rg(root: Path, home: Path, *options: str, at: str = ".") -> set[str]:
    environ = {"HOME": str(home), "PATH": os.environ["PATH"]}
    command = [RG, "--no-config", "--threads=1", "--files", "--null", *options, *([] if at == "." else [at])]
    ran = subprocess.run(command, cwd=root, env=environ, capture_output=True, check=False)
    assert ran.returncode in (0, 1, 2), ran.stderr  # 2: a pattern that it skips
    return {os.fsdecode(each) for each in ran.stdout.split(b"\0") if each}


def seen_by_us(root: Path, home: Path, at: str = ".", **options: bool) -> set[str]:
    with HostFilesystem(root) as filesystem:
        return walked(VisibleTree(filesystem, environ={"HOME": str(home)}, **options), at)


def walked(tree: VisibleTree, at: str = ".") -> set[str]:
    found: set[str] = set()
    pending = [at]
    while pending:
        for each in tree.list(pending.pop()):
            if each.is_directory:
                pending.append(each.path)
            else:
                found.add(each.path)
    return found


def without_own(paths: set[str]) -> set[str]:
    return {each for each in paths if each.rpartition("/")[2] not in OWN_FILES}


def write(root: Path, files: dict[str, str]) -> None:
    for path, content in files.items():
        place = root / path
        if any(each.is_file() for each in place.parents) or place.is_dir():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
        if place.name == ".treenailignore":
            place.with_name(".ignore").write_text(content)


class TestAgainstRipgrep:
    @settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        paths=st.lists(PATHS, min_size=1, max_size=12),
        ignoring=st.dictionaries(
            st.sampled_from(
                [".gitignore", ".treenailignore", "a/.gitignore", "b/.treenailignore", "a/b/.gitignore"]
            ),
            FILES,
            min_size=1,
            max_size=3,
        ),
        excluded=FILES,
        everywhere=FILES,
        repository=st.sampled_from([".git/x", "a/.git/x", ""]),
    )
    def test_what_is_left_out_is_what_ripgrep_leaves_out(
        self, tmp_path_factory, paths, ignoring, excluded, everywhere, repository
    ):
        """Nested files, negation, `**`, directories only, braces, classes, excludes, a nested repository."""
        base = tmp_path_factory.mktemp("tree")
        root, home = base / "root", base / "home"
        write(home, {".config/git/ignore": everywhere})
        write(root, dict.fromkeys(paths, "") | ignoring)
        if repository:
            write(
                root,
                {repository: "", ".git/info/exclude": excluded} if repository[0] == "." else {repository: ""},
            )
        assert without_own(seen_by_us(root, home)) == without_own(seen_by_rg(root, home))
        everything = seen_by_rg(root, home, "--hidden", "--no-ignore")
        assert without_own(seen_by_us(root, home, include_ignored=True, include_hidden=True)) == without_own(
            everything
        )

    def test_a_workspace_inside_a_repository_heeds_the_files_above_it(self, tmp_path):
        """Up to the repository's root, by paths relative to where each file is."""
        files = {
            "repo/.git/HEAD": "",
            "repo/.gitignore": "*.log\n/work/sub/tmp/\n",
            "repo/work/.gitignore": "!keep.log\n",
            **dict.fromkeys(
                [
                    "repo/work/sub/a.log",
                    "repo/work/sub/keep.log",
                    "repo/work/sub/tmp/x",
                    "repo/work/sub/b.py",
                ],
                "",
            ),
        }
        write(tmp_path, files)
        root = tmp_path / "repo/work/sub"
        assert seen_by_us(root, tmp_path) == seen_by_rg(root, tmp_path) == {"keep.log", "b.py"}

    def test_the_users_excludes_are_those_that_git_is_configured_with(self, tmp_path):
        write(tmp_path, {"home/.gitconfig": "[core]\n  excludesFile = ~/mine\n", "home/mine": "*.swp\n"})
        write(tmp_path, {"root/.git/HEAD": "", "root/a.swp": "", "root/a.py": ""})
        root, home = tmp_path / "root", tmp_path / "home"
        assert seen_by_us(root, home) == seen_by_rg(root, home) == {"a.py"}

    def test_a_search_that_begins_in_an_ignored_directory_sees_it(self, tmp_path):
        write(tmp_path, {".git/HEAD": "", ".gitignore": "build/\n*.o\n", "build/a.o": "", "build/b.c": ""})
        assert seen_by_us(tmp_path, tmp_path, at="build") == {"build/b.c"}
        assert seen_by_rg(tmp_path, tmp_path, at="build") == {"build/b.c"}


def test_git_files_do_not_count_outside_of_a_repository():
    """As in ripgrep; `.treenailignore` counts everywhere, in any kind of workspace."""
    filesystem = InMemoryFilesystem()
    for path, content in {".gitignore": "a", ".treenailignore": "b\n", "a": "", "b": "", "c": ""}.items():
        filesystem.write(path, content)
    assert walked(VisibleTree(filesystem)) == {"a", "c"}


@pytest.mark.parametrize("pattern", ["*a" * 300 + "b", "**/a/" * 200 + "b", "{a,b}" * 60, "[" * 900])
def test_no_pattern_is_slow(pattern):
    """A project's ignore file may be hostile; matching it against a long path is quick all the same."""
    patterns = IgnorePatterns(pattern.encode())
    began = time.process_time()
    patterns.decides(["a" * 250] * 60, is_directory=False)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("pattern", ["**/a{}*/b*/**/c", "/x{}/y", "a{}*b?c"])
def test_a_hostile_ignore_file_costs_little(tmp_path: Path, pattern: str) -> None:
    """It comes with the project: of a megabyte of patterns, a part counts."""
    (tmp_path / ".git").mkdir()
    lines = ["first", *(pattern.format(number) for number in range(100_000))]
    (tmp_path / ".gitignore").write_text("\n".join(lines)[:1_000_000])
    for name in ("first", *(f"f{number}" for number in range(200))):
        (tmp_path / name).touch()
    began = time.process_time()
    with HostFilesystem(tmp_path, read_only=True) as filesystem:
        listed = [each.name for each in VisibleTree(filesystem).list(".")]
    assert "first" not in listed and len(listed) == 200
    assert time.process_time() - began < 10
