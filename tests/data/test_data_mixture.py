"""Mixtures: what entries mean and how wrong ones are told, how much is taken of each, and what is drawn."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wording import refused

from dflash_lab.data.conversations import Ingredient, amounts, draw, read_mixture
from dflash_lab.errors import InputError


def test_what_entries_mean():
    given = {"a": 3, "b": 0.5, "c": {"weight": 1, "cap": 20}, "d": {"cap": 7}, "e": {}}
    assert read_mixture(given) == [
        Ingredient("a", Fraction(3)),
        Ingredient("b", Fraction(1, 2)),
        Ingredient("c", Fraction(1), 20),
        Ingredient("d", cap=7),
        Ingredient("e"),
    ]
    assert [one.whole for one in read_mixture(given)] == [False, False, False, False, True]
    assert read_mixture({}) == []


NAN, INF = float("nan"), float("inf")
WRONG = [
    *({"a.jsonl": value} for value in (None, "3", [1, 2], 0, -2.5, NAN, INF, True)),
    *({"a.jsonl": {"weight": value}} for value in ("2", None)),
    *({"a.jsonl": {"cap": value}} for value in (0, -1, 2.5, "all", False)),
    {"a.jsonl": {"wieght": 2}},
    {3: {}},
    {" ": {}},
    {"a.jsonl": 1, "./a.jsonl": 2},
]


@pytest.mark.parametrize("mixture", WRONG, ids=str)
def test_wrong_entries_are_told_by_name_with_what_to_type(mixture):
    with refused(ValueError):
        read_mixture({"good.jsonl": 1, **mixture})


@pytest.mark.parametrize(
    ("mixture", "counts", "taken"),
    [
        ({"a": 3, "b": 1}, [300, 300], [300, 100]),
        ({"a": 3, "b": 1}, [90, 300], [90, 30]),
        ({"a": 3, "b": {"weight": 1, "cap": 10}}, [300, 300], [30, 10]),
        ({"a": 0.1, "b": 0.2, "c": 0.7}, [1000, 1000, 700], [100, 200, 700]),
        ({"a": 1, "b": {"cap": 5}, "c": {}}, [7, 9, 0], [7, 5, 0]),
        ({"a": {"cap": 50}}, [20], [20]),
        ({"a": 1, "b": 10**6}, [100, 100], [0, 100]),
    ],
)
def test_shares_are_limited_by_the_scarcest(mixture, counts, taken):
    assert amounts(read_mixture(mixture), counts) == taken


def test_an_empty_input_with_a_weight_is_told_before_anything_is_lost():
    with refused(InputError):
        amounts(read_mixture({"a": 1, "b": 2}), [10, 0])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 50)), min_size=1, max_size=5))
def test_taken_shares_equal_the_weights_to_a_record_and_one_input_goes_in_whole(inputs):
    mixture = read_mixture({str(number): weight for number, (_, weight) in enumerate(inputs)})
    counts = [count for count, _ in inputs]
    taken = amounts(mixture, counts)
    assert any(number == count for number, count in zip(taken, counts, strict=True))
    assert all(number <= count for number, count in zip(taken, counts, strict=True))
    scale = min(Fraction(count, weight) for count, weight in inputs)
    assert all(0 <= weight * scale - number < 1 for number, (_, weight) in zip(taken, inputs, strict=True))


def test_a_draw_repeats_follows_the_seed_and_the_name_and_grows_with_its_size():
    def drawn(wanted, seed=0, name="a", items=range(1000)):
        found = list(draw(items, 1000, wanted, seed=seed, name=name))
        assert len(found) == len(items)
        return {item for item in found if item is not None}

    assert len(drawn(200)) == 200 and drawn(200) == drawn(200)
    assert drawn(200) < drawn(300) and len(drawn(1000)) == 1000 and not drawn(0)
    others = (drawn(200, seed=1), drawn(200, name="b"))
    assert all(len(other & drawn(200)) < 100 for other in others)
    assert 40 < len(drawn(200) & set(range(250))) < 60 + 1  # from all of it, not from its head
    assert drawn(200, items=range(1200)) == drawn(200)  # more than were counted: not drawn
