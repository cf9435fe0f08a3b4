"""Advice in failure.json: the error's own, else by its kind."""

from __future__ import annotations

import errno
from typing import ClassVar

import pytest
from support.extraction_faults import MEMORY_ERRORS, memory_error

from dflash_lab.errors import chain, file_error
from dflash_lab.params import StageParams, param
from dflash_lab.stage_run import advice_for, failure_record


class ToyParams(StageParams):
    stage: ClassVar[str] = "toy"
    max_batch: int = param(8, "batch")
    token_budget: int = param(2**22, "budget")


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


class Knowing(RuntimeError):
    advice = "lower token_budget"
    details: ClassVar[dict] = {"batch": 3}


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_own_advice_and_details_win_also_through_a_cause():
    error = raised(ValueError("stage failed"), Knowing("inner"))
    assert advice_for(error, ToyParams()) == "lower token_budget" and failure_record(ToyParams(), error, 0.0)[
        "details"
    ] == {"batch": 3}


def test_an_out_of_memory_is_explained_with_the_runs_sizes():
    size = 8 * 2**22 * 4
    message = f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. GPU 0 has a total capacity"
    text = advice_for(raised(OutOfMemoryError(message)), ToyParams())
    assert "asked for" in text and "max_batch 8 x token_budget 4,194,304" in text and "memory_sweep" in text


def test_an_out_of_memory_without_numbers_still_says_what_to_do():
    assert "memory_sweep" in advice_for(MemoryError(), ToyParams())


@pytest.mark.parametrize("name", MEMORY_ERRORS)
def test_every_form_of_a_lack_of_memory_is_advised_on(name):
    assert "memory_sweep" in advice_for(memory_error(name), ToyParams())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named(number):
    named = file_error(OSError(number, "no space"), "x.parquet")
    assert "Free space" in advice_for(named, ToyParams()) and str(named).startswith("x.parquet: ")


def test_others_get_no_advice():
    assert advice_for(ZeroDivisionError(), ToyParams()) == ""


def test_chain_ends_on_a_loop():
    first, second = ValueError(), KeyError()
    first.__context__, second.__context__ = second, first
    assert list(chain(first)) == [first, second]
