"""What an agent is given by mistake is a UsageError that says what was expected; what can work, works."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from treenail import Agent, tool
from treenail.errors import UsageError
from treenail.log.memory import MemoryLog
from treenail.providers.anthropic import Anthropic
from treenail.providers.named import provider_named
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.testing.wire import WireServer


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


class Adder:
    """Adds what it was made with."""

    def __init__(self, a: int) -> None:
        self.a = a

    def __call__(self, b: int) -> str:
        return str(self.a + b)


async def add_later(a: int, b: int) -> str:
    """Add two numbers, later."""
    return str(a + b)


def run(tools: Any = (), **options: Any) -> Any:
    given = {"provider": ScriptedProvider(["Done."]), **options}
    return Agent("x", tools=tools).run("go", **given)


@pytest.mark.parametrize(
    ("slip", "told"),
    [
        (lambda: run(provider="gpt-5"), "'gpt-5' does not say whose model it is; write VENDOR/MODEL"),
        (lambda: run(provider="gemini/x"), "no provider 'gemini'.*'litellm/gemini/x'"),
        (lambda: run(provider=None), "provider must be a provider such as"),
        (lambda: run(provider=ScriptedProvider), "not ScriptedProvider"),
        (lambda: Agent("x").run("go"), "provider must be"),  # type: ignore[call-arg] # the slip itself
        (lambda: run(limits={}), r"limits must be Limits\(max_cost_usd=.*not \{\}"),
        (lambda: run(limits=0.5), r"limits must be Limits\("),
        (lambda: run(permissions="ask"), r"permissions must be Permissions\(PermissionMode.ASK\), not 'ask'"),
        (lambda: run(permissions="read_only"), r"PermissionMode.READ_ONLY\), not 'read_only'"),
        (lambda: run(tools=add), "tools must be a list"),
        (lambda: run(tools=tool(add)), "tools must be a list"),
        (lambda: run(tools="add"), "tools must be a list"),
        (lambda: run(tools=None), "tools must be a list"),
        (lambda: run(tools=["add"]), "'add' is not a tool; pass a function"),
        (lambda: run(store=MemoryLog(), run_id="xyz"), "run_id must be the whole id of a run.*not 'xyz'"),
        (lambda: run(store=MemoryLog(), run_id=3), "run_id must be"),
        (lambda: Agent("x").resume(MemoryLog(), "", provider=ScriptedProvider([])), "run_id must be"),
        (lambda: Agent("x").run(3, provider=ScriptedProvider([])), "the task must be text"),  # type: ignore[arg-type] # the slip
    ],
)  # fmt: skip
def test_a_slip_says_what_was_expected(slip: Callable[[], object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        slip()


@pytest.mark.parametrize(
    "given",
    [
        functools.partial(add, 1),
        functools.partial(add, a=1),
        functools.partial(functools.partial(add), 1),
        functools.partial(add_later, 1),
    ],
)
def test_a_partial_is_a_tool_without_what_was_given(given: Callable[..., Any]) -> None:
    (made,) = Agent("x", tools=[given]).own_tools
    assert made.name in ("add", "add_later") and made.description.startswith("Add two numbers")
    assert list(made.parameters_schema["properties"]) == ["b"]
    script = ScriptedProvider([Answer(calls=[(made.name, {"b": 2})]), "Done."])
    with Agent("x", tools=[given]).run("go", provider=script) as ran:
        assert [each.content for each in ran.messages if each.role == "tool"] == ["3"]


def test_an_object_that_can_be_called_is_a_tool() -> None:
    (made,) = Agent("x", tools=[Adder(1)]).own_tools
    assert (made.name, made.description) == ("adder", "Adds what it was made with.")


def test_a_model_as_text_simply_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with WireServer(["Hello."]) as server:
        monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
        monkeypatch.setenv("ANTHROPIC_BASE_URL", server.anthropic_url)
        with Agent("x").run("Greet", provider="anthropic/a-model") as ran:
            assert ran.text == "Hello."
        assert server.requests[0].body["model"] == "a-model"
    assert isinstance(provider_named("anthropic/x", max_output_tokens=9), Anthropic)
