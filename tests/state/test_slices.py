"""Slices: persistent sequences that behave like tuples, whatever their length and history."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from state_kit import Box

from treenail.codec import codec
from treenail.state import Slice, entries_of
from treenail.state.slices import EMPTY, sealed

BORDERS = [0, 1, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 1056, 1057, 32 * 32 * 32 + 33]


def grown(count: int, start: Slice[int] = EMPTY) -> Slice[int]:
    slice_ = start
    for number in range(len(start), count):
        slice_ = slice_.append(number, number)
    return slice_


@pytest.mark.parametrize("count", BORDERS)
def test_a_slice_of_any_length_has_its_items_in_order(count: int) -> None:
    for slice_ in (grown(count), Slice.of((number, number) for number in range(count))):
        assert slice_.all() == tuple(range(count))
        assert len(slice_) == count
        assert [slice_[index] for index in range(0, count, 7)] == list(range(0, count, 7))
        assert [origin for _, origin in entries_of(slice_)] == list(range(count))
        longer = slice_.append(-1)
        assert longer.latest() == -1
        assert len(slice_) == count
    with pytest.raises(IndexError):
        grown(count)[count]


@given(
    steps=st.lists(st.one_of(st.integers(1, 70), st.just("branch"), st.just("rebuild")), max_size=8),
    picks=st.lists(st.integers(-200, 200), max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_versions_that_grow_apart_do_not_touch_each_other(steps: list[int | str], picks: list[int]) -> None:
    versions: list[tuple[Slice[int], list[int]]] = [(EMPTY, [])]
    for step in steps:
        slice_, model = versions[-1]
        if step == "branch":
            slice_, model = versions[len(versions) // 2]
        elif step == "rebuild":
            slice_ = Slice.of(entries_of(slice_))
        else:
            assert isinstance(step, int)
            for number in range(step):
                slice_ = slice_.append(number * len(versions))
                model = [*model, number * len(versions)]
        versions.append((slice_, model))
    for slice_, model in versions:
        assert list(slice_) == model
        assert slice_ == model
        assert slice_[2:-1] == tuple(model[2:-1])
        for pick in picks:
            if -len(model) <= pick < len(model):
                assert slice_[pick] == model[pick]


@given(numbers=st.lists(st.integers(0, 5), max_size=80), branch=st.integers(0, 80))
@settings(max_examples=60, deadline=None)
def test_find_names_the_last_item_with_a_key_in_every_version(numbers: list[int], branch: int) -> None:
    def key(item: int) -> int:
        return item % 4

    def expected(model: list[int], wanted: int) -> int | None:
        places = [index for index, item in enumerate(model) if item % 4 == wanted]
        return places[-1] if places else None

    slice_: Slice[int] = EMPTY
    other: tuple[Slice[int], list[int]] = (EMPTY, [])
    for index, number in enumerate(numbers):
        slice_ = slice_.append(number)
        assert slice_.find(key, number % 4) == index
        if index == branch:
            other = (slice_.append(7).append(6), [*numbers[: index + 1], 7, 6])
        if other[1]:
            for wanted in range(4):
                assert other[0].find(key, wanted) == expected(other[1], wanted)
    for wanted in range(5):
        assert slice_.find(key, wanted) == expected(numbers, wanted)


def test_a_slice_compares_and_adds_like_a_tuple() -> None:
    slice_ = grown(3)
    assert slice_ == (0, 1, 2) == slice_
    assert slice_ == [0, 1, 2]
    assert slice_ != (0, 1)
    assert slice_ != "012"
    assert (*slice_, 3) == (0, 1, 2, 3)
    assert slice_ + (3,) == (0, 1, 2, 3)  # noqa: RUF005  # the operator is meant
    assert (-1,) + slice_ == (-1, 0, 1, 2)  # noqa: RUF005  # the operator is meant
    assert 1 in slice_
    assert repr(slice_) == "Slice([0, 1, 2])"
    assert EMPTY.latest() is None
    with pytest.raises(TypeError):
        hash(slice_)


def test_an_item_that_can_change_is_made_anew_for_each_reader() -> None:
    box = Box([1])
    slice_: Slice[Box] = EMPTY.append(sealed(codec, box, codec.encode(box)))
    one, two = slice_[0], slice_[0]
    assert one == two == box
    assert one is not two
    assert one is not box
    assert slice_[0:1][0] is not slice_[0:1][0]
