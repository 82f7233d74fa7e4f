"""`PromptTemplate[Out]`, `Prompt[Out]` and `Section[Params]` know their type when they are made."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Generic, TypeVar

import pytest
from prompt_kit import Review, Task, prompt_of, template_of

from treenail.errors import PromptValidationError
from treenail.prompt import MarkdownSection, Prompt, PromptResponse, PromptTemplate, Section

T = TypeVar("T")


def test_a_template_knows_its_output_type() -> None:
    template = PromptTemplate[Review](ns="tests", key="case")
    assert template.output_type is Review
    assert isinstance(template, PromptTemplate)


def test_text_is_the_output_type_of_a_template_without_one() -> None:
    assert template_of().output_type is str
    assert PromptTemplate[None](ns="tests", key="case").output_type is str
    assert prompt_of().render().structured_output is None


def test_the_same_brackets_give_the_same_class() -> None:
    """So two templates that were written alike are of one class."""
    assert PromptTemplate[Review] is PromptTemplate[Review]
    assert PromptTemplate[Review] is not PromptTemplate[Task]
    assert PromptTemplate[list[Review]] is PromptTemplate[list[Review]]


def test_a_prompt_made_directly_knows_its_output_type() -> None:
    prompt = Prompt[list[Review]](ns="tests", key="case", sections=[MarkdownSection("Do", "it")])
    assert prompt.output_type == list[Review]
    assert prompt.render().container == "array"
    assert prompt.render().output_type is Review


def test_a_prompt_takes_the_output_type_of_its_template() -> None:
    template = PromptTemplate[Review](ns="tests", key="case")
    assert Prompt(template).output_type is Review
    assert Prompt[Review](template).template is template


def test_a_prompt_gives_its_output_type_to_a_template_without_one() -> None:
    template = template_of(MarkdownSection("Do", "it"), name="The case")
    prompt = Prompt[Review](template)
    assert prompt.output_type is Review
    assert (prompt.ns, prompt.key, prompt.name) == ("tests", "case", "The case")
    assert prompt.template.sections == template.sections


def test_a_prompt_and_a_template_of_different_types_do_not_go_together() -> None:
    with pytest.raises(PromptValidationError, match=r"Task.*Review"):
        Prompt[Task](PromptTemplate[Review](ns="tests", key="case"))


def test_a_section_class_of_ones_own_knows_its_parameters() -> None:
    class Weather(Section[Task]):
        def render_body(self, params: Task, *, session: object = None) -> str:
            return params.path

    assert Weather("Weather").params_type is Task
    assert MarkdownSection[Task]("Do", "$path").params_type is Task
    assert MarkdownSection("Do", "it").params_type is None


def test_a_generic_section_class_can_be_derived_and_filled_in_later() -> None:
    @dataclass(frozen=True, eq=False)
    class Shouting(Section[T], Generic[T]):
        end: str = "!"

        def render_body(self, params: T, *, session: object = None) -> str:
            return f"{params}{self.end}"

    section = Shouting[Task]("Shout", end="!!")
    assert section.params_type is Task
    assert "Task(path='x', times=2)!!" in prompt_of(section).bind(Task("x")).render().text


def test_brackets_on_a_class_that_takes_none_are_refused() -> None:
    with pytest.raises(TypeError):
        PromptTemplate[Review][Task]


def test_subscripted_classes_work_as_annotations() -> None:
    """A dataclass may hold a prompt, or none, and its annotations can be resolved."""

    @dataclass
    class Judge:
        prompt: Prompt[Review] | None = None

    hints = typing.get_type_hints(Judge, {"Prompt": Prompt, "Review": Review})
    assert typing.get_args(hints["prompt"]) == (Prompt[Review], type(None))


def test_frozen_means_frozen() -> None:
    template = PromptTemplate[Review](ns="tests", key="case")
    with pytest.raises(dataclasses.FrozenInstanceError):
        template.key = "other"  # type: ignore[misc]  # that it is frozen is the point
    with pytest.raises(dataclasses.FrozenInstanceError):
        MarkdownSection("Do", "it").title = "other"  # type: ignore[misc]  # that it is frozen is the point
    with pytest.raises(dataclasses.FrozenInstanceError):
        PromptResponse[Review]("p", "t", Review(1)).text = ""  # type: ignore[misc]  # that it is frozen is the point
