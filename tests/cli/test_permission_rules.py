"""Where rules are kept: in the user's settings for a directory, and never in the project."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from treenail.errors import UsageError
from treenail.presenters.cli.settings import forget, load, remember, rules_file, user_file

RULE = "run_command: pytest *"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    (place / ".git").mkdir(parents=True)
    (place / "src").mkdir()
    return place


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path / "config"), "HOME": str(tmp_path)}


def allowed(environ: dict[str, str], directory: Path) -> list[str]:
    return [each.text for each in load({}, environ, directory).rules if each.kind == "allow"]


def test_a_rule_is_remembered_outside_for_the_directory_where_it_was_made(
    project: Path, environ: dict[str, str]
) -> None:
    """Its paths begin there: said below, it allows nothing above, and the other way round."""
    below = project / "src"
    below.mkdir(exist_ok=True)
    file = remember("edit_file: lib/**", below, environ)
    assert not file.is_relative_to(project)
    assert (allowed(environ, below), allowed(environ, project)) == (["edit_file: lib/**"], [])
    remember(RULE, project, environ)
    assert (allowed(environ, below), allowed(environ, project)) == (["edit_file: lib/**"], [RULE])
    other = project.parent / "other"
    other.mkdir()
    assert allowed(environ, other) == []
    assert remember(RULE, project, environ) != file and allowed(environ, project) == [RULE]
    assert load({}, environ, project).rules_for(project).allows("run_command", {"command": "pytest -q"})


def test_what_else_is_in_the_file_stays(project: Path, environ: dict[str, str]) -> None:
    file = rules_file(environ, project)
    file.parent.mkdir(parents=True)
    file.write_text('# mine\ndeny = ["run_command: git push *"] # never\n')
    remember(RULE, project, environ)
    remember("run_command: echo \"a\\tb\" '\u00fc'", project, environ)
    forget(RULE, project, environ)
    assert "# mine" in file.read_text() and "# never" in file.read_text()
    assert allowed(environ, project) == ["run_command: echo \"a\\tb\" '\u00fc'"]
    file.write_text('allow = ["edit_file"]\n')
    with pytest.raises(UsageError, match="by hand"):
        remember(RULE, project, environ)
    assert file.read_text() == 'allow = ["edit_file"]\n'
    with pytest.raises(UsageError, match="treenail permissions"):
        forget(RULE, project, environ)


def test_rules_that_are_remembered_at_once_are_all_there(project: Path, environ: dict[str, str]) -> None:
    program = (
        "import sys; from pathlib import Path; from treenail.presenters.cli.settings import remember\n"
        "for each in sys.argv[2:]: remember(each, Path(sys.argv[1]))"
    )
    rules = [f"run_command: make target-{number}" for number in range(60)]
    commands = [[sys.executable, "-c", program, str(project), *rules[each::3]] for each in range(3)]
    writers = [subprocess.Popen(each, env=environ) for each in commands]
    assert [each.wait(300) for each in writers] == [0, 0, 0]
    assert sorted(allowed(environ, project)) == sorted(rules)


def test_a_project_may_narrow_and_not_allow(project: Path, environ: dict[str, str]) -> None:
    (project / "treenail.toml").write_text('deny = ["read_file: .env"]\nask = ["delete_file"]\n')
    rules = load({}, environ, project).rules_for(project)
    assert rules.verdict("read_file", {"path": ".env"})[0] == "deny"
    assert rules.verdict("delete_file", {"path": "x"})[0] == "ask"
    (project / "treenail.toml").write_text(f'allow = ["{RULE}"]\n')
    with pytest.raises(UsageError, match="may not allow itself"):
        load({}, environ, project)


def test_the_users_own_file_holds_for_every_project(project: Path, environ: dict[str, str]) -> None:
    user_file(environ).parent.mkdir(parents=True)
    user_file(environ).write_text(f'allow = ["{RULE}"]\n')
    remember("edit_file: src/**", project, environ)
    assert allowed(environ, project) == [RULE, "edit_file: src/**"]


def test_rules_that_an_agent_could_write_do_not_count(project: Path) -> None:
    inside = {"XDG_CONFIG_HOME": str(project / "config")}
    with pytest.raises(UsageError, match="agent could change it"):
        remember(RULE, project, inside)
    file = rules_file(inside, project)
    file.parent.mkdir(parents=True)
    file.write_text(f'allow = ["{RULE}"]\n')
    assert allowed(inside, project) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('allow = "x"', "list of rules"),
        ("deny = [3]", "list of rules"),
        ('allow = ["run command"]', "is not a rule"),
        ('ask = ["run_command: $X"]', "commands that are unclear"),
    ],
)
def test_a_bad_rule_names_its_file(project: Path, environ: dict[str, str], text: str, told: str) -> None:
    user_file(environ).parent.mkdir(parents=True)
    user_file(environ).write_text(text)
    with pytest.raises(UsageError, match=told) as error:
        load({}, environ, project)
    assert str(user_file(environ)) in str(error.value)


def test_a_run_that_asks_runs_what_is_allowed_and_holds_the_rest(
    project: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    """The same rules hold for `run`, and `permissions` and `config show` show them."""
    calls = [
        {"name": "run_command", "arguments": {"command": each}} for each in ("echo a > x.txt", "echo a; id")
    ]
    (tmp_path / "script.json").write_text(json.dumps([{"calls": [calls[0]]}, {"calls": [calls[1]]}, "done"]))

    def treenail(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "treenail", *words]
        return subprocess.run(
            command,
            cwd=project,
            env={**environ, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    added = treenail("permissions", "--allow", "run_command: echo * > x.txt", "--json")
    assert json.loads(added.stdout)["rules"] == [
        {"kind": "allow", "text": "run_command: echo * > x.txt", "source": str(rules_file(environ, project))}
    ]
    assert "run_command: echo * > x.txt" in treenail("config", "show").stdout
    run = treenail("run", "--ask", "--sandbox", "off", "--model", f"scripted:{tmp_path}/script.json", "go")
    assert run.returncode == 4, run.stderr
    assert (project / "x.txt").read_text() == "a\n"
    held = json.loads(treenail("hold", "list", "--json").stdout)
    assert [json.loads(each["arguments"])["command"] for each in held] == ["echo a; id"]
