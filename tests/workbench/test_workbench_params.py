"""Parameters: conversion, ranges, near matches, and what a notebook injects."""

from __future__ import annotations

import doctest
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wording import refused

from dflash_lab import params as params_module
from dflash_lab.errors import InputError, LabError
from dflash_lab.params import StageParams, WrongParameters, check_names, fields_table, param
from dflash_lab.run_params import from_notebook
from dflash_lab.stages import params_class


class ToyParams(StageParams):
    stage: ClassVar[str] = "toy"
    shard: int = param(0, "which shard", low=0)
    lr: float = param(1e-3, "learning rate", low=0.0, high=1.0)
    tap_ids: list[int] = param([], "tapped layers", low=0)
    names: list[str] = param(["a"], "names")
    mode: str = param("plain", "tone", choices=("plain", "loud"))
    extra: dict = param({}, "options")

    def check(self) -> None:
        self.require(self.mode == "plain" or self.shard < 5, "shard", "loud has 5 shards")


def test_the_docstring_example_is_true():
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    assert doctest.testmod(params_module, optionflags=flags) == (0, 3)


@pytest.mark.parametrize(
    ("name", "given_value", "meant"),
    [
        ("lr", "1e-4", 1e-4),
        ("lr", 1, 1.0),
        ("shard", "3", 3),
        ("shard", 3.0, 3),
        ("shard", "1e3", 1000),
        ("interactive", "false", False),
        ("interactive", "True", True),
        ("tap_ids", "1,2,3", [1, 2, 3]),
        ("tap_ids", "[1, 2]", [1, 2]),
        ("tap_ids", 7, [7]),
        ("tap_ids", (1, "2"), [1, 2]),
        ("tap_ids", "", []),
        ("names", "x, y", ["x", "y"]),
        ("extra", '{"a": 1}', {"a": 1}),
    ],
)
def test_values_become_what_they_mean(name, given_value, meant):
    value = getattr(ToyParams(**{name: given_value}), name)
    assert value == meant and type(value) is type(meant)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shard", True),
        ("shard", 1.5),
        ("shard", -1),
        ("shard", None),
        ("shard", "three"),
        ("lr", "fast"),
        ("lr", float("nan")),
        ("lr", "inf"),
        ("lr", 2),
        ("lr", 10**400),
        ("lr", str(10**400)),
        ("lr", -(10**400)),
        ("target", 7),
        ("target", ""),
        ("interactive", 1),
        ("mode", "lout"),
        ("dtype", "fp8"),
        ("tap_ids", [1, -2]),
        ("tap_ids", "[1, 2"),
        ("tap_ids", {"a": 1}),
        ("extra", "[1]"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_wrong_values_name_the_field_and_the_remedy(name, value):
    with refused(WrongParameters):
        ToyParams(**{name: value})


def test_a_rule_between_fields_is_told():
    with refused(InputError):
        ToyParams(mode="loud", shard=5)


def test_one_refusal_tells_of_every_wrong_parameter():
    with refused(WrongParameters) as caught:
        ToyParams(shrad=0, lr="fast", names=["a", 3], mode="lout", shard=2)
    assert list(caught.value.wrong) == ["lr", "names", "mode", "shrad"]
    with refused(WrongParameters):
        check_names(ToyParams, {"shrad": 0, "seed": 1, "taps": 2}, where="x.yaml")


def test_a_refusal_shows_no_access_token():
    token = "hf_" + "a" * 20
    for values in ({"target": token}, {"mode": token}, {"extra": {"a": token}}, {"shard": token}):
        with pytest.raises(WrongParameters) as caught:
            ToyParams(**values)
        assert token not in str(caught.value) and next(iter(values)) in str(caught.value)


def test_parameters_are_frozen_and_changed_ones_are_checked():
    params = ToyParams(shard=2)
    assert params.changed(shard=3).shard == 3 and params.shard == 2
    with refused(WrongParameters):
        params.changed(shard=-1)
    with pytest.raises(ValueError, match="frozen"):
        params.shard = 3


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    """A workspace with the parameters of one run, in which a notebook is opened."""
    (tmp_path / "params" / "demo").mkdir(parents=True)
    (tmp_path / "params" / "demo" / "common.yaml").write_text("seed: 5\n")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")


def notebook(**changes):
    """The globals of a notebook whose parameters cell ran: the run is set, the rest is None."""
    return {**dict.fromkeys(ToyParams().as_dict()), "run": "demo", **changes}


def test_notebook_values_are_taken_and_checked():
    made = from_notebook(ToyParams, notebook(shard=4, lr=0.5, In=["", "# Parameters\nshard = 4\n"]))
    assert (made.shard, made.lr, made.seed, made.mode) == (4, 0.5, 5, "plain")
    with refused(InputError):
        from_notebook(ToyParams, notebook(shard=-1))


def test_notebook_judges_the_names_of_the_latest_injection_only():
    wrong, right = "# Parameters\nshrad = 3\n", "# Parameters\nshard = 3\n"
    with refused(InputError):
        from_notebook(ToyParams, notebook(shrad=3, In=["", wrong, "x = 1"]))
    assert from_notebook(ToyParams, notebook(shard=3, In=["", wrong, right])).shard == 3


def test_notebook_with_a_renamed_line_is_told():
    cell = notebook()
    del cell["shard"]
    with refused(InputError):
        from_notebook(ToyParams, cell)


def test_help_rows_show_type_unit_range_and_default():
    rows = {row.name: row for row in fields_table(ToyParams)}
    assert rows["lr"].type == "float" and rows["lr"].allowed == "0.0..1.0" and rows["lr"].default == 1e-3
    assert rows["tap_ids"].type == "list[int]" and rows["tap_ids"].default == []
    assert rows["mode"].allowed == "plain | loud"
    assert list(rows)[:2] == ["run", "shard"] and list(rows)[-1] == "force"


@settings(max_examples=50)
@given(
    st.sampled_from([row.name for row in fields_table(ToyParams)]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ),
)
def test_any_value_is_either_taken_with_the_declared_type_or_refused_as_input(name, value):
    try:
        made = ToyParams(**{name: value})
    except LabError as error:
        assert name in str(error)
    else:
        assert type(getattr(made, name)) is type(getattr(ToyParams(), name))


def test_a_home_folder_in_a_file_is_the_persons_own(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    made = params_class("extract")(run_dir="~/runs/x", store="~/store", target="~/model")
    found = (made.run_dir, str(made.store_path), made.target)
    assert found == ("/somewhere/runs/x", "/somewhere/store", "/somewhere/model")
    assert params_class("extract")(run_dir="~x").run_dir == "~x"
