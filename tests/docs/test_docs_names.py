"""What the pages call by name exists: parameters, functions, fields, figures."""

from __future__ import annotations

import re
from functools import cache

import documents
import pytest

from dflash_lab.workbench.param_files import known_names
from dflash_lab.workbench.registry import STAGES, params_class

REPO = documents.REPO
PLACES = (
    "dflash_lab/**/*.py",
    "benchmarks/*.py",
    "benchmarks/*.yaml",
    "params/**/*.yaml",
    "notebooks/*.ipynb",
)
OTHERS = {"minimum_jobs", "maximum_jobs"}  # of dask-jobqueue
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@cache
def words() -> frozenset[str]:
    """Every name in code, parameter files and notebooks, and of the files beside them."""
    paths = [path for place in PLACES for path in REPO.glob(place)]
    files = [
        path.stem for place in ("benchmarks/results/**/*.json", "tests/**/*.py") for path in REPO.glob(place)
    ]
    return frozenset(re.findall(r"\w+", "\n".join([*(p.read_text(encoding="utf-8") for p in paths), *files])))


@pytest.mark.parametrize("page", documents.pages(), ids=lambda page: page.stem)
def test_names_in_running_text_exist(page):
    spans = re.findall(r"`([^`\n]+)`", _FENCED.sub("", page.read_text(encoding="utf-8")))
    named = {
        name for span in spans for name in re.findall(r"(?<![\w./-])[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b", span)
    }
    known = words() | OTHERS
    assert {
        name for name in named if name.removeprefix("target_") not in known and name not in known
    } == set()


@pytest.mark.parametrize("page", documents.pages(), ids=lambda page: page.stem)
def test_parameters_that_a_sentence_gives_are_some_stage_s(page):
    spans = re.findall(r"`(-p [^`\n]+)`", _FENCED.sub("", page.read_text(encoding="utf-8")))
    given = {name for span in spans for name in re.findall(r"-[pr] (\w+) ", f"{span} ")}
    known = {name for stage in STAGES for name in known_names(params_class(stage))}
    assert given - known == set()
