"""Mistakes are found when a prompt is built or bound; the text names the section and the placeholder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from prompt_kit import Review, Task, look, named_tool, prompt_of, template_of
from pydantic import BaseModel, Field

from treenail.errors import PromptError, PromptRenderError, PromptValidationError, ToolDefinitionError
from treenail.prompt import MarkdownSection, Prompt, PromptTemplate, Section, SectionVisibility


def in_guide(section: Section[Any]) -> PromptTemplate[str]:
    """Put a section below another one, so that its path has two parts."""
    return template_of(MarkdownSection("Guide", "x", children=[section]))


# --- placeholders ----------------------------------------------------------------------------------


def test_a_placeholder_without_a_field_is_found_when_the_template_is_built() -> None:
    with pytest.raises(PromptValidationError) as caught:
        in_guide(MarkdownSection[Task]("Do", "Read $pth."))
    assert caught.value.section_path == ("guide", "do")
    assert caught.value.placeholder == "pth"
    assert str(caught.value).startswith("section 'guide.do': the placeholder ${pth} has no field in Task")
    assert "path, times" in str(caught.value)


def test_a_placeholder_of_a_summary_is_checked_as_well() -> None:
    with pytest.raises(PromptValidationError) as caught:
        in_guide(MarkdownSection[Task]("Do", "x", summary="About $topic."))
    assert caught.value.placeholder == "topic"


@pytest.mark.parametrize("text", ["It costs $5.", "All of ${it", "The end: $", "${a.b}"])
def test_a_stray_dollar_sign_is_found_when_the_template_is_built(text: str) -> None:
    with pytest.raises(PromptValidationError, match=r"section 'guide.do': line 2 .*write \$\$") as caught:
        in_guide(MarkdownSection("Do", f"First line.\n{text}"))
    assert caught.value.section_path == ("guide", "do")


def test_missing_values_are_all_named_at_the_first_rendering() -> None:
    """Also those of sections that are only summarised now: they would be missed later."""
    prompt = prompt_of(
        MarkdownSection("Ask", "$question", children=[MarkdownSection("Why", "$reason")]),
        MarkdownSection[Task]("Do", "$path", key="do", summary="It.", visibility=SectionVisibility.SUMMARY),
    )
    with pytest.raises(PromptRenderError) as caught:
        prompt.render()
    assert caught.value.section_path == ("ask",)
    assert caught.value.placeholder == "question"
    assert "with_variables(question=...)" in str(caught.value)
    assert "ask.why: ${reason}" in str(caught.value)
    assert "do: ${path}" in str(caught.value)


def test_parameters_that_are_missing_say_how_to_bind_them() -> None:
    with pytest.raises(PromptRenderError, match=r"\$\{path\} has no value; give it one with bind\(Task"):
        prompt_of(MarkdownSection[Task]("Do", "$path")).render()


def test_a_section_that_is_never_enabled_needs_no_values() -> None:
    prompt = prompt_of(MarkdownSection("Off", "$missing", enabled=False), MarkdownSection("On", "here"))
    assert "here" in prompt.render().text


# --- binding ---------------------------------------------------------------------------------------


def test_parameters_that_no_section_takes_are_refused_when_they_are_bound() -> None:
    with pytest.raises(PromptValidationError, match=r"takes Review \(its sections take: Task\)"):
        prompt_of(MarkdownSection[Task]("Do", "$path")).bind(Review(1))


def test_two_of_one_type_at_once_are_refused() -> None:
    with pytest.raises(PromptValidationError, match="two Task"):
        prompt_of(MarkdownSection[Task]("Do", "$path")).bind(Task("a"), Task("b"))


@pytest.mark.parametrize(("given", "match"), [(Task, r"Task is a class"), ("text", "a str cannot")])
def test_what_is_no_record_is_refused_when_it_is_bound(given: object, match: str) -> None:
    with pytest.raises(PromptValidationError, match=match):
        prompt_of(MarkdownSection[Task]("Do", "$path")).bind(given)


def test_a_variable_that_nothing_uses_is_refused() -> None:
    with pytest.raises(
        PromptValidationError, match=r"no placeholder for pth \(it has: path, times\)"
    ) as caught:
        prompt_of(MarkdownSection[Task]("Do", "$path")).with_variables(pth="x")
    assert caught.value.placeholder == "pth"


def test_a_variable_that_the_parameter_type_does_not_take_is_refused_when_it_is_given() -> None:
    class Strict(BaseModel):
        count: int = Field(default=1, ge=1)

    prompt = prompt_of(MarkdownSection[Strict]("Do", "$count"))
    with pytest.raises(PromptValidationError, match="section 'do': its parameters Strict") as caught:
        prompt.with_variables(count="many")
    assert caught.value.section_path == ("do",)


# --- keys, titles, paths ---------------------------------------------------------------------------


def test_keys_are_normalised() -> None:
    template = PromptTemplate(ns=" Team/Agents ", key=" Code.Review-2_x ")
    assert (template.ns, template.key) == ("team/agents", "code.review-2_x")
    assert MarkdownSection("Your Task, Today!", "x").key == "your-task-today"
    assert MarkdownSection("Task", "x", key=" My_Task ").key == "my_task"


@pytest.mark.parametrize("key", ["", " ", "-x", "a b", "ä", "x" * 65, ".x", "a/b"])
def test_a_bad_prompt_key_is_refused(key: str) -> None:
    with pytest.raises(PromptValidationError, match="not a prompt's key"):
        PromptTemplate(ns="tests", key=key)


@pytest.mark.parametrize("ns", ["", "a//b", "/a", "a b"])
def test_a_bad_namespace_is_refused(ns: str) -> None:
    with pytest.raises(PromptValidationError, match="not a prompt's ns"):
        PromptTemplate(ns=ns, key="case")


@pytest.mark.parametrize("key", ["-x", "a b", "a.b", "x" * 65])
def test_a_bad_section_key_is_refused(key: str) -> None:
    """A dot would make two paths look the same."""
    with pytest.raises(PromptValidationError, match="no section key"):
        MarkdownSection("Task", "x", key=key)


@pytest.mark.parametrize("title", ["", "  ", "two\nlines", "\u2028a\u2028b"])
def test_a_bad_title_is_refused(title: str) -> None:
    with pytest.raises(PromptValidationError, match="title"):
        MarkdownSection(title, "x", key="k")


def test_a_title_without_letters_needs_a_key() -> None:
    with pytest.raises(PromptValidationError, match="no section key"):
        MarkdownSection("!!!", "x")
    assert MarkdownSection("!!!", "x", key="wow").key == "wow"


def test_two_sections_with_one_path_are_refused() -> None:
    twins = [MarkdownSection("Twin", "a"), MarkdownSection("Twin", "b")]
    with pytest.raises(PromptValidationError, match="two sections have this path") as caught:
        in_guide(MarkdownSection("Parent", "x", children=twins))
    assert caught.value.section_path == ("guide", "parent", "twin")


def test_one_key_in_two_places_is_fine() -> None:
    template = template_of(
        MarkdownSection("A", "x", children=[MarkdownSection("Note", "1")]),
        MarkdownSection("B", "x", children=[MarkdownSection("Note", "2")]),
    )
    assert template.find_section("b.note") is template.sections[1].children[0]


def test_what_is_no_section_is_refused() -> None:
    with pytest.raises(PromptValidationError, match="a str among its sections"):
        PromptTemplate(ns="tests", key="case", sections=["Do it."])  # type: ignore[list-item]  # what is wrong is the point
    with pytest.raises(PromptValidationError, match="section 'top': the prompt 'case' has a str"):
        template_of(MarkdownSection("Top", "x", children=["Do it."]))  # type: ignore[list-item]  # what is wrong is the point


# --- tools -----------------------------------------------------------------------------------------


def test_two_tools_with_one_name_are_refused_wherever_they_stand() -> None:
    """Also in a section that is not enabled now: it may be later."""
    with pytest.raises(PromptValidationError, match="'look' is also one of the section 'a'") as caught:
        template_of(
            MarkdownSection("A", "x", tools=[look]),
            MarkdownSection(
                "B",
                "x",
                enabled=False,
                children=[MarkdownSection("C", "x", tools=[named_tool("look")])],
            ),
        )
    assert caught.value.section_path == ("b", "c")


@pytest.mark.parametrize("name", ["open_sections", "read_section"])
def test_the_names_of_the_prompts_own_tools_are_taken(name: str) -> None:
    with pytest.raises(PromptValidationError, match=f"'{name}', which prompts use themselves"):
        template_of(MarkdownSection("A", "x", tools=[named_tool(name)]))


def test_a_function_that_cannot_be_a_tool_is_refused() -> None:
    with pytest.raises(ToolDefinitionError):
        MarkdownSection("A", "x", tools=[lambda x: x])


def test_a_tool_that_is_not_there_has_no_policies() -> None:
    with pytest.raises(PromptValidationError, match=r"no tool 'nope' \(it has: look\)"):
        template_of(MarkdownSection("A", "x", tools=[look])).policies_for_tool("nope")


# --- visibility and enabled ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "visibility", [SectionVisibility.SUMMARY, lambda: SectionVisibility.FULL], ids=["constant", "function"]
)
def test_a_section_that_may_be_summarised_needs_a_summary(visibility: Any) -> None:
    with pytest.raises(PromptValidationError, match=r"section 'guide\.do': .*summary=") as caught:
        in_guide(MarkdownSection("Do", "x", visibility=visibility))
    assert caught.value.section_path == ("guide", "do")


def two(a: object, b: object) -> bool:
    return bool(a and b)


def wants_other(*, other: object) -> bool:
    return bool(other)


@pytest.mark.parametrize("function", [two, wants_other, "yes", 1, type])
def test_a_function_that_could_not_be_called_is_refused(function: Any) -> None:
    with pytest.raises(PromptValidationError, match=r"section 'guide\.do': .*enabled"):
        in_guide(MarkdownSection[Task]("Do", "x", enabled=function))


def test_a_function_of_parameters_needs_a_parameter_type() -> None:
    with pytest.raises(PromptValidationError, match="has no parameter type"):
        in_guide(MarkdownSection("Do", "x", enabled=lambda params: True))


# --- types -----------------------------------------------------------------------------------------


def test_parameters_are_records() -> None:
    with pytest.raises(PromptValidationError, match="its parameters are int"):
        in_guide(MarkdownSection[int]("Do", "x"))


def test_default_parameters_are_of_the_sections_type() -> None:
    with pytest.raises(PromptValidationError, match="of type Review, but the section takes Task"):
        in_guide(MarkdownSection[Task]("Do", "x", default_params=Review(1)))  # type: ignore[arg-type]  # what is wrong is the point
    with pytest.raises(PromptValidationError, match="has no parameter type"):
        in_guide(MarkdownSection("Do", "x", default_params=Review(1)))  # type: ignore[arg-type]  # what is wrong is the point


class Opaque:
    pass


@dataclass
class HoldsOpaque:
    inner: Opaque


@pytest.mark.parametrize("kind", [Opaque, dict[str, Opaque], Opaque | None, HoldsOpaque, list[HoldsOpaque]])
def test_an_output_type_that_is_not_supported_is_refused(kind: Any) -> None:
    with pytest.raises(PromptValidationError, match="cannot have the output type"):
        PromptTemplate[kind](ns="tests", key="case")


# --- the rest --------------------------------------------------------------------------------------


def test_a_prompt_without_a_template_needs_a_namespace_and_a_key() -> None:
    with pytest.raises(PromptValidationError, match="needs ns"):
        Prompt(key="case")
    with pytest.raises(PromptValidationError, match="needs key"):
        Prompt(ns="tests")


def test_a_prompt_of_a_template_takes_nothing_else() -> None:
    with pytest.raises(PromptValidationError, match="but got sections"):
        Prompt(template_of(), sections=[MarkdownSection("A", "x")])


def test_judges_are_checked_by_their_shape() -> None:
    with pytest.raises(PromptValidationError, match="FeedbackProviderConfig"):
        template_of(feedback_providers=[object()])
    with pytest.raises(PromptValidationError, match=r"no method check\(context\)"):
        template_of(task_completion_checker=object())


@pytest.mark.parametrize("selector", ["nope", ("a", "nope"), Review])
def test_a_section_that_is_not_there_cannot_be_found(selector: Any) -> None:
    with pytest.raises(PromptValidationError, match=r"no section is meant .*a, a\.b"):
        template_of(MarkdownSection("A", "x", children=[MarkdownSection("B", "x")])).find_section(selector)


def test_a_key_that_is_meant_twice_asks_for_a_path() -> None:
    note = MarkdownSection("Note", "x")
    template = template_of(
        MarkdownSection("A", "x", children=[note]), MarkdownSection("B", "x", children=[note])
    )
    with pytest.raises(PromptValidationError, match=r"several sections are meant .*a\.note, b\.note"):
        template.find_section("note")


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: prompt_of(MarkdownSection("A", "$x")).render(),
        lambda: PromptTemplate(ns="tests", key="!"),
    ],
)
def test_every_mistake_is_a_prompt_error_and_a_value_error(mistake: Callable[[], object]) -> None:
    with pytest.raises(PromptError) as caught:
        mistake()
    assert isinstance(caught.value, ValueError)
