"""Advice in failure.json: the error's own, else by its kind."""

from __future__ import annotations

import errno
from typing import ClassVar

import pytest
from support.extraction_faults import memory_error
from support.wording import check_wording

from dflash_lab.errors import file_error
from dflash_lab.params import StageParams, param
from dflash_lab.stage_run import advice_for, failure_record


class ToyParams(StageParams):
    stage: ClassVar[str] = "toy"
    max_batch: int = param(8, "batch")
    token_budget: int = param(2**22, "budget")


class Knowing(RuntimeError):
    advice = "lower token_budget"
    details: ClassVar[dict] = {"batch": 3}


def test_own_advice_and_details_win_also_through_a_cause():
    error = ValueError("stage failed")
    error.__cause__ = Knowing("inner")
    assert advice_for(error, ToyParams()) == "lower token_budget"
    assert failure_record(ToyParams(), error, 0.0)["details"] == {"batch": 3}


SIZED = f"CUDA out of memory. Tried to allocate {8 * 2**22 * 4 / 2**20:.2f} MiB. GPU 0 has a total capacity"


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(type("OutOfMemoryError", (RuntimeError,), {})(SIZED), id="a size"),
        pytest.param(MemoryError(), id="no size"),
        pytest.param(memory_error("wrapped"), id="a cause"),
        pytest.param(file_error(OSError(errno.ENOSPC, "no space"), "x.parquet"), id="a full disk"),
        pytest.param(file_error(OSError(errno.EDQUOT, "no space"), "x.parquet"), id="a full quota"),
        pytest.param(ZeroDivisionError(), id="none"),
    ],
)
def test_what_to_do_is_said_with_the_runs_sizes(error):
    check_wording(advice_for(error, ToyParams()))
