"""What the pages call by name exists: parameters, functions, fields, figures."""

from __future__ import annotations

import re
from functools import cache

import documents
import pytest

from dflash_lab.stages import STAGES, params_class

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


def exists(name: str) -> bool:
    """Whether code has the name, or makes it of a prefix and a name, as f"loss_{term}" does."""
    cuts = [at for at, letter in enumerate(name, 1) if letter == "_"]
    known = words() | OTHERS
    return name in known or any(name[:at] in known and name[at:] in known for at in cuts)


def test_a_name_that_nothing_has_does_not_exist():
    assert exists("check_store") and exists("target_measured_peak_gib")
    assert not exists("check_stores") and not exists("target_peak_of_gib")


@pytest.mark.parametrize("page", documents.pages(), ids=lambda page: page.stem)
def test_names_in_running_text_exist(page):
    spans = re.findall(r"`([^`\n]+)`", _FENCED.sub("", page.read_text(encoding="utf-8")))
    named = {
        name for span in spans for name in re.findall(r"(?<![\w./-])[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b", span)
    }
    assert {name for name in named if not exists(name)} == set()


@pytest.mark.parametrize("page", documents.pages(), ids=lambda page: page.stem)
def test_parameters_that_a_sentence_gives_are_some_stage_s(page):
    spans = re.findall(r"`(-p [^`\n]+)`", _FENCED.sub("", page.read_text(encoding="utf-8")))
    given = {name for span in spans for name in re.findall(r"-[pr] (\w+) ", f"{span} ")}
    known = {name for stage in STAGES for name in params_class(stage).model_fields}
    assert given - known == set()
