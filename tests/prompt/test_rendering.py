"""Rendering: numbered, deterministic, and nothing in it that is not enabled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from prompt_kit import (
    Plan,
    Review,
    Task,
    above,
    everything,
    look,
    named_tool,
    plans,
    prompt_of,
    template_of,
)
from pydantic import BaseModel

from treenail.errors import PromptRenderError, ReadOnlyError
from treenail.prompt import MarkdownSection, Prompt, PromptTemplate, Section, SectionVisibility
from treenail.state import Binding, Deadline, ResourceRegistry, Session
from treenail.tools import SequentialDependencyPolicy, Tool, ToolExample, ToolResult

HEADING = re.compile(r"^(#+) ([\d.]+)\. Section \w+ \(([\w.]+)\)$", re.MULTILINE)


def rendered(made: tuple[Plan, ...], *, by_function: bool = False) -> Any:
    return prompt_of(*(each.section(by_function=by_function) for each in made)).render()


# --- laws ------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(plans())
def test_rendering_is_deterministic(made: tuple[Plan, ...]) -> None:
    """The same sections give the same text, tools and hash, built again, as constants or as functions."""
    one, other, third = rendered(made), rendered(made), rendered(made, by_function=True)
    assert one.text == other.text == third.text
    assert [each.name for each in one.tools] == [each.name for each in third.tools]
    assert one.descriptor == other.descriptor == third.descriptor


@settings(max_examples=60, deadline=None)
@given(plans())
def test_numbers_enumerate_what_is_shown_depth_first(made: tuple[Plan, ...]) -> None:
    """Each number is the first below the one before it, or the next beside it or beside one above it."""
    result = rendered(made)
    found = HEADING.findall(result.text)
    numbers = [tuple(map(int, number.split("."))) for _, number, _ in found]
    before: tuple[int, ...] = ()
    for number in numbers:
        successors = {(*before, 1)} | {
            (*before[:length], before[length] + 1) for length in range(len(before))
        }
        assert number in successors
        before = number
    for (marks, _, path), number in zip(found, numbers, strict=True):
        assert len(marks) == len(number) + 1
        assert len(path.split(".")) == len(number)
    assert [(each.number, ".".join(each.path)) for each in result.sections] == [
        (number, path) for _, number, path in found
    ]


@settings(max_examples=100, deadline=None)
@given(plans())
def test_what_is_not_enabled_or_is_covered_leaks_neither_text_nor_tools(made: tuple[Plan, ...]) -> None:
    """And everything else is there exactly once."""
    result = rendered(made)
    names = [each.name for each in result.tools]
    all_plans = everything(made)
    for plan in all_plans:
        parents = above(plan, all_plans)
        is_there = plan.enabled and all(each.enabled and not each.summarised for each in parents)
        is_whole = is_there and not plan.summarised
        assert result.text.count(plan.mark) == (1 if is_whole else 0)
        assert result.text.count(plan.mark.replace("body", "summary")) == (
            1 if is_there and plan.summarised else 0
        )
        assert names.count(plan.tool_name) == (1 if is_whole and plan.has_tool else 0)
        assert (plan.tool_name in result.policies) == (is_whole and plan.has_tool)


def test_rendering_is_the_same_in_another_process() -> None:
    """Sets have no order that survives a process; their text and hash do."""
    code = (
        "from treenail.prompt import *\n"
        "words = frozenset(f'word-{i}' for i in range(40))\n"
        "prompt = Prompt(PromptTemplate(ns='n', key='k', sections=[MarkdownSection('A', '$words')]))\n"
        "result = prompt.with_variables(words=words).render()\n"
        "print(result.text, result.descriptor.hash)"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
    assert "word-39" in seen.pop()


# --- the form --------------------------------------------------------------------------------------


def test_a_whole_prompt_as_a_model_sees_it() -> None:
    @dataclass(frozen=True)
    class Query:
        text: str

    def search(params: Query, *, context: object) -> ToolResult[str]:
        """Search."""
        return ToolResult.ok(params.text)

    tool = Tool[Query, None](
        name="search",
        description="Search the files.",
        handler=search,
        examples=(ToolExample("Find a word", Query("treenail"), "a.py"),),
    )
    prompt = prompt_of(
        MarkdownSection[Task](
            "Your task",
            """
            Review $path:
              - ${times} times
              - for $$5
            """,
            children=[MarkdownSection("Tools", "Use them.", tools=[tool]), MarkdownSection("Empty", "")],
        ),
        MarkdownSection("Off", "never", enabled=False),
        MarkdownSection("Last", "Words."),
    )
    assert prompt.bind(Task("a.py", 3)).render().text == (
        "## 1. Your task (your-task)\n\n"
        "Review a.py:\n  - 3 times\n  - for $5\n\n"
        "### 1.1. Tools (your-task.tools)\n\n"
        "Use them.\n\n"
        'Examples of `search`:\n\n- Find a word\n  - input: {"text": "treenail"}\n  - output: a.py\n\n'
        "### 1.2. Empty (your-task.empty)\n\n"
        "## 2. Last (last)\n\n"
        "Words."
    )


def test_headings_stop_at_the_sixth_level_and_numbers_go_on() -> None:
    section = MarkdownSection("S", "x", key="deep")
    for level in range(7):
        section = MarkdownSection("S", "x", key=f"l{level}", children=[section])
    last = prompt_of(section).render().text.splitlines()[-3]
    assert last.startswith("###### 1.1.1.1.1.1.1.1. S")


class Colour(Enum):
    RED = "red"


class Model(BaseModel):
    n: int = 1


class Loud:
    def render(self) -> str:
        return "LOUD"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain $text ${here}", "plain $text ${here}"),
        (3, "3"),
        (None, "None"),
        (Colour.RED, "red"),
        (Loud(), "LOUD"),
        (Review(1, ["ä"]), '{\n  "score": 1,\n  "notes": [\n    "ä"\n  ]\n}'),
        (Model(), '{\n  "n": 1\n}'),
        ({"a": {1, 0}}, '{\n  "a": [\n    0,\n    1\n  ]\n}'),
        (timedelta(seconds=1), "0:00:01"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_value_becomes_the_text_that_a_model_reads(value: object, text: str) -> None:
    """And a dollar sign in a value is never a placeholder."""
    shown = prompt_of(MarkdownSection("A", "<$value>")).with_variables(value=value).render().text
    assert shown == f"## 1. A (a)\n\n<{text}>"


def test_a_body_may_be_indented_with_its_code_and_keeps_its_own_indentation() -> None:
    section = MarkdownSection("A", "\n\n      - one\n        - two   \n\n      three\n\n")
    assert section.template == "- one\n  - two   \n\nthree"
    assert MarkdownSection("A", "- one\n  - two").template == "- one\n  - two"


# --- values ----------------------------------------------------------------------------------------


def test_where_parameters_come_from() -> None:
    """What is bound wins over the section's defaults, and those over the type's own."""

    @dataclass(frozen=True)
    class Optional:
        a: str = "type"

    plain = prompt_of(MarkdownSection[Optional]("A", "<$a>"))
    defaults = prompt_of(MarkdownSection[Optional]("A", "<$a>", default_params=Optional("section")))
    assert "<type>" in plain.render().text
    assert "<section>" in defaults.render().text
    assert "<bound>" in defaults.bind(Optional("bound")).render().text
    assert "<newer>" in defaults.bind(Optional("bound")).bind(Optional("newer")).render().text
    assert "<named>" in defaults.bind(Optional("bound")).with_variables(a="named").render().text
    assert "<named>" in plain.with_variables(a="named").render().text


def test_variables_reach_every_placeholder_of_their_name() -> None:
    prompt = prompt_of(
        MarkdownSection("A", "$path"),
        MarkdownSection[Task]("B", "$path $times"),
        MarkdownSection("C", "$path"),
    )
    text = prompt.with_variables(path="here").render().text
    assert re.findall(r"^here.*$", text, re.MULTILINE) == ["here", "here 2", "here"]


def test_binding_leaves_the_prompt_at_hand_as_it_was() -> None:
    """One prompt can serve several evaluations at a time."""
    prompt = prompt_of(MarkdownSection("A", "<$x>"))
    one, two = prompt.with_variables(x=1), prompt.with_variables(x=2)
    assert "<1>" in one.render().text
    assert "<2>" in two.render().text
    with pytest.raises(PromptRenderError):
        prompt.render()


def test_a_computed_field_can_be_a_placeholder() -> None:
    class Area(BaseModel):
        side: int

    @dataclass
    class Square:
        side: int
        area: int = 0

        def __post_init__(self) -> None:
            self.area = self.side**2

    assert "9" in prompt_of(MarkdownSection[Square]("A", "$area")).with_variables(side=3).render().text
    assert "3" in prompt_of(MarkdownSection[Area]("A", "$side")).bind(Area(side=3)).render().text


def test_what_was_bound_can_be_told_as_data() -> None:
    prompt = prompt_of(MarkdownSection[Task]("A", "$path"), MarkdownSection("B", "$who"))
    assert prompt.bind(Task("p")).with_variables(who=Colour.RED).render_inputs == {
        "params": {"Task": {"path": "p", "times": 2}},
        "variables": {"who": "red"},
    }


# --- sections of one's own, and functions that decide ----------------------------------------------


@dataclass(frozen=True, eq=False)
class Counting(Section[Task]):
    """Shows how many tasks a session holds."""

    unit: str = "tasks"

    def render_body(self, params: Task, *, session: Any = None) -> str:
        count = 0 if session is None else len(session[Review].all())
        return f"{params.path}: {count} {self.unit}"

    def resources(self) -> ResourceRegistry:
        return ResourceRegistry.of(Binding.instance(list, [self.unit]))


def test_a_section_of_ones_own_sees_its_parameters_and_the_state() -> None:
    session = Session()
    session.dispatch(Review(1))
    prompt = prompt_of(Counting("Count", unit="reviews")).bind(Task("p"))
    assert "p: 1 reviews" in prompt.render(session).text
    assert "p: 1 reviews" in prompt.render(session.read_only_view()).text
    assert "p: 0 reviews" in prompt.render().text


def test_a_class_derived_from_a_text_section_is_asked_each_time() -> None:
    """It may say something else than its text, and something else each time."""

    class Seen(MarkdownSection[None]):
        def render_body(self, params: object, *, session: Any = None) -> str:
            return f"{len(session[Review].all())} seen"

    class Later(MarkdownSection):
        def is_enabled(self, params: Any, *, session: Any, path: Any) -> bool:
            return len(session[Review].all()) > 0

    session = Session()
    prompt = prompt_of(Seen("S", "text"), Later("L", "later"))
    assert ["0 seen" in prompt.render(session).text, "later" in prompt.render(session).text] == [True, False]
    session.dispatch(Review(1))
    assert ["1 seen" in prompt.render(session).text, "later" in prompt.render(session).text] == [True, True]


def test_rendering_cannot_change_the_state() -> None:
    class Meddling(Section[None]):
        def render_body(self, params: object, *, session: Any = None) -> str:
            session.dispatch(Review(1))
            return ""

    session = Session()
    with pytest.raises(PromptRenderError, match="section 'm'") as caught:
        prompt_of(Meddling("M")).render(session)
    assert isinstance(caught.value.__cause__, ReadOnlyError)
    assert session[Review].all() == ()


def many_reviews(*, session: Any) -> bool:
    return session is not None and len(session[Review].all()) > 1


@pytest.mark.parametrize(
    ("enabled", "is_shown"),
    [
        (lambda: True, True),
        (lambda: False, False),
        (lambda params: params.times > 1, True),
        (lambda params: params.times > 2, False),
        (many_reviews, True),
        (lambda params, *, session: many_reviews(session=session) and params.times == 2, True),
        (lambda flag=False: flag, False),
    ],
)
def test_a_function_decides_whether_a_section_is_there(enabled: Any, is_shown: bool) -> None:
    session = Session()
    session.dispatch_all([Review(1), Review(2)])
    prompt = prompt_of(MarkdownSection[Task]("A", "body", enabled=enabled, tools=[look])).bind(Task("p"))
    result = prompt.render(session)
    assert ("body" in result.text) is is_shown
    assert (len(result.tools) == 1) is is_shown


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"enabled": lambda: 1 / 0}, "section 'top.a': its function for enabled failed: ZeroDivisionError"),
        ({"enabled": lambda: "yes"}, "returned 'yes'; return a bool"),
        ({"visibility": lambda: "full", "summary": "s"}, "returned 'full'; return a SectionVisibility"),
    ],
)
def test_a_function_that_fails_says_where(fields: Any, match: str) -> None:
    prompt = prompt_of(MarkdownSection("Top", "x", children=[MarkdownSection("A", "x", **fields)]))
    with pytest.raises(PromptRenderError, match=match) as caught:
        prompt.render()
    assert caught.value.section_path == ("top", "a")


# --- tools, policies, resources --------------------------------------------------------------------


def test_tools_come_in_the_order_of_their_sections() -> None:
    prompt = prompt_of(
        MarkdownSection("A", "x", tools=[named_tool("b"), named_tool("a")]),
        MarkdownSection("B", "x", children=[MarkdownSection("C", "x", tools=[named_tool("c")])]),
    )
    assert [each.name for each in prompt.render().tools] == ["b", "a", "c"]
    assert [each.name for each in prompt.tools] == ["b", "a", "c"]
    assert list(prompt.render().tool_registry) == ["b", "a", "c"]


def test_the_model_is_told_about_parameters() -> None:
    def find(word: str) -> str:
        """Find a word.

        Args:
            word: What to look for.
        """
        return word

    assert prompt_of(MarkdownSection("A", "x", tools=[find])).render().tool_param_descriptions == {
        "find": {"word": "What to look for."}
    }


def test_policies_are_those_of_the_section_of_the_ones_above_and_of_the_template() -> None:
    one, two, three, four = (SequentialDependencyPolicy({}, name=name) for name in "1234")
    prompt = prompt_of(
        MarkdownSection(
            "A",
            "x",
            policies=[two],
            tools=[named_tool("outer")],
            children=[MarkdownSection("B", "x", policies=[one], tools=[named_tool("inner")])],
        ),
        MarkdownSection("C", "x", policies=[four]),
        policies=[three],
    )
    assert prompt.policies_for_tool("inner") == (one, two, three)
    assert prompt.policies_for_tool("outer") == (two, three)
    assert prompt.policies_for_tool("open_sections") == (three,)
    assert prompt.render().policies == {"outer": (two, three), "inner": (one, two, three)}


def test_resources_of_template_sections_and_binding_are_one_and_the_later_wins() -> None:
    template = template_of(
        Counting("First", unit="first", children=[Counting("Inner", unit="inner")]),
        resources={list: ["template"], dict: {"of": "template"}, set: {"template"}},
    )
    prompt = Prompt(template)
    assert prompt.resources.get(list) == ["inner"]
    assert prompt.resources.get(dict) == {"of": "template"}
    bound = prompt.bind(resources={list: ["bound"]}).bind(resources=ResourceRegistry.build({set: {"bound"}}))
    assert (bound.resources.get(list), bound.resources.get(set)) == (["bound"], {"bound"})
    assert prompt.resources.get(list) == ["inner"]


def test_two_prompts_of_one_template_share_nothing_that_a_section_makes() -> None:
    template = template_of(Counting("A"))
    one, two = Prompt(template), Prompt(template)
    assert one.resources.get(list) is one.resources.get(list)
    assert one.resources.get(list) is not two.resources.get(list)


def test_a_section_is_found_by_path_key_or_class() -> None:
    inner, counting = MarkdownSection("Inner", "x"), Counting("Count")
    prompt = prompt_of(MarkdownSection("Outer", "x", children=[inner]), counting)
    assert prompt.find_section("inner") is inner
    assert prompt.find_section("outer.inner") is inner
    assert prompt.find_section(("outer", "inner")) is inner
    assert prompt.find_section(Counting) is counting


def test_a_path_is_preferred_to_a_key_of_the_same_text() -> None:
    top = MarkdownSection("Note", "x")
    prompt = prompt_of(top, MarkdownSection("A", "x", children=[MarkdownSection("Note", "y")]))
    assert prompt.find_section("note") is top


# --- the descriptor --------------------------------------------------------------------------------


def base(**changes: Any) -> PromptTemplate[Any]:
    said = {
        "title": "A",
        "text": "$x",
        "summary": "s",
        "tool": "look",
        "output": None,
        "key": "case",
    } | changes
    kind = PromptTemplate if said["output"] is None else PromptTemplate[said["output"]]
    section = MarkdownSection(
        said["title"], said["text"], key="a", summary=said["summary"], tools=[named_tool(said["tool"])]
    )
    return kind(ns="tests", key=said["key"], sections=[section])


def test_the_hash_is_the_same_whatever_is_bound() -> None:
    prompt = Prompt(base())
    one, two = prompt.with_variables(x="1").render(), prompt.with_variables(x="2").render()
    assert one.descriptor == two.descriptor == base().descriptor


@pytest.mark.parametrize(
    "change",
    [
        {"title": "B"},
        {"text": "$x!"},
        {"summary": "t"},
        {"tool": "peek"},
        {"output": Review},
        {"key": "other"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_hash_changes_with_what_the_prompt_is(change: dict[str, Any]) -> None:
    assert base(**change).descriptor.hash != base().descriptor.hash


def test_a_deadline_travels_with_the_rendering() -> None:
    """With one rendering, and not with the next one of the same prompt."""
    deadline = Deadline.after(timedelta(minutes=1))
    for prompt in (prompt_of(), prompt_of(MarkdownSection("A", enabled=lambda: True))):
        assert prompt.render().deadline is None
        assert prompt.render(deadline=deadline).deadline is deadline
        assert prompt.render().deadline is None


def test_visibility_can_be_said_for_one_rendering() -> None:
    prompt = prompt_of(MarkdownSection("A", "whole", summary="short", children=[MarkdownSection("B", "x")]))
    assert "short" in prompt.render(visibility={"a": SectionVisibility.SUMMARY}).text
    assert "whole" in prompt.render().text
