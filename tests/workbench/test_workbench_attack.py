"""Odd parameters, alone and in combination: a stage runs, or says in its own words which field is wrong; a
library's traceback is never the answer.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.wording import refused

from dflash_lab.errors import FileError, InputError, LabError
from dflash_lab.params import about, field_types
from dflash_lab.stage_run import execute
from dflash_lab.stages import STAGES, params_class

sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))
EXAMPLES = int(os.environ.get("ATTACK_EXAMPLES", "4"))  # a hunt for more: ATTACK_EXAMPLES=500
# What would only make a run long: processes, compilation, sizes of a model; each has tests of its own.
LEFT_OUT = {
    "run", "run_dir", "interactive", "force", "gpus", "compile", "compile_target", "target_gpus",
    "drafter_gpus", "head_gpu", "target",
}  # fmt: skip
ODD: list[Any] = [
    None, True, "", "x", "\0", "1e400", "-1", "0", " 1 ", "nan", "[", "[1, 2]", "{}", "x" * 5000, b"x",
    "\ud800", 0, -1, 2**31, 2**63, -(2**70), 1.5, math.nan, math.inf, -0.0, 1e-300, 1e300, [], [0], [-1],
    [None], [[1]], ["a", 1], [2**70], {}, {"a": 1}, {1: 2}, (1, 2), {3}, object(),
]  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_value_of_any_parameter_is_taken_or_refused_by_its_name(stage, data):
    cls = params_class(stage)
    chosen = data.draw(
        st.lists(st.sampled_from([*cls.model_fields, "shrad"]), min_size=1, max_size=3, unique=True)
    )
    values = {name: data.draw(st.sampled_from(ODD), label=name) for name in chosen}
    try:
        made = cls(**values)
    except InputError as error:
        assert str(error).startswith(f"{stage}: "), error
        assert any(name in str(error) for name in chosen), error
    else:
        kinds = field_types(cls)
        for name in chosen:
            assert isinstance(getattr(made, name), getattr(kinds[name], "__origin__", None) or kinds[name])


def values_of(cls: type, name: str) -> st.SearchStrategy:
    """Values that construction may take: the ends of the range, small numbers, every choice, odd paths."""
    kind, declared = field_types(cls)[name], about(cls, name)
    low, high = declared.get("low"), declared.get("high")
    ends = [end for end in (low, high) if end is not None and abs(end) <= 4096]
    if declared.get("choices") and kind is str:
        return st.sampled_from(declared["choices"])
    small: dict[Any, list[Any]] = {
        int: [0, 1, 2, 3, 7, 16, 63, *ends],
        float: [0.0, 1e-9, 0.3, 1.0, 2.5, *ends],
        bool: [True, False],
        str: ["", "nowhere", "no/where", "/dev/null", "{x}", "~", ".", "x" * 300],
    }
    if kind in small:
        return st.sampled_from(small[kind])
    choices = declared.get("choices") or [0, 1, 2, 5, 7, 64, 0.5]
    return st.lists(st.sampled_from(choices), max_size=4)


@pytest.fixture(scope="module")
def ready(tmp_path_factory, tiny_target) -> dict[str, Any]:
    """A run with samples, store and drafter, and the parameters that made it."""
    from test_notebooks_headless import TINY, conversations

    root = tmp_path_factory.mktemp("attack")
    common = {"run_dir": str(root / "run"), "target": str(tiny_target("llama")), "device": "cpu"}
    common |= {"dtype": "float32", "interactive": False}
    given = {stage: {**common, **TINY[stage]} for stage in STAGES}
    given["prepare"]["input"] = str(conversations(root / "chats.jsonl"))
    given["extract"]["num_shards"] = 1
    given["train_drafter"] |= {"max_steps": 2, "eval_every": 2, "checkpoint_every": 2, "tau_samples": 1}
    given["acceptance"] |= {"num_prompts": 1, "max_new_tokens": 4, "untrained_tokens": 2}
    given["memory_sweep"] |= {"batches": [1], "lengths": [16], "step_anchors": [4], "measure_s": 1.0}
    for stage in ("prepare", "extract", "train_drafter"):
        execute(params_class(stage)(**given[stage]))
    return given


@pytest.mark.parametrize("stage", STAGES)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES < 100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_stage_runs_or_says_what_is_wrong(stage, data, ready, tmp_path_factory):
    cls = params_class(stage)
    fields = [name for name in cls.model_fields if name not in LEFT_OUT]
    chosen = data.draw(st.lists(st.sampled_from(fields), min_size=1, max_size=3, unique=True))
    values = {name: data.draw(values_of(cls, name), label=name) for name in chosen}
    run = Path(ready[stage]["run_dir"])
    own = tmp_path_factory.mktemp("own")
    for name in ("samples.parquet", "samples.json", "store", "drafter"):
        if (stage, name) not in {
            ("extract", "store"),
            ("train_drafter", "drafter"),
            ("prepare", "samples.parquet"),
        }:
            (own / name).symlink_to(run / name)
    with contextlib.chdir(own):  # odd paths are relative ones
        try:
            result = execute(cls(**{**ready[stage], "run_dir": str(own), **values}))
        except LabError as error:
            assert str(error).strip(), values
        else:
            assert result.figures, values


@pytest.mark.parametrize(
    ("stage", "values"),
    [
        ("train_drafter", {"attention": "flex"}),
        ("train_drafter", {"time_limit_s": 1e-9}),
        ("train_drafter", {"drafter": "/dev/null"}),
        ("train_drafter", {"store": "/dev/zero"}),
        ("prepare", {"limit": 2**63}),
        ("prepare", {"input": "/dev/zero"}),
        ("prepare", {"max_record_mib": 2**40}),
        ("extract", {"samples": "."}),
        ("acceptance", {"samples": "/dev/zero"}),
    ],
    ids=lambda given: given if isinstance(given, str) else next(iter(given)),
)
def test_what_a_hunt_once_found(stage, values, ready, tmp_path):
    (tmp_path / "store").symlink_to(Path(ready[stage]["run_dir"]) / "store")
    with refused((InputError, FileError)):
        execute(params_class(stage)(**{**ready[stage], "run_dir": str(tmp_path), **values}))
