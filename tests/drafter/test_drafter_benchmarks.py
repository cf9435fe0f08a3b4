"""What the benchmarks of many GPUs make of what was measured: parts put together, placements read."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from dflash_lab.files import read_json, write_json

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def as_a_script(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_parts_that_were_run_one_by_one_are_put_together(tmp_path, monkeypatch):
    head = {"figures": {}, "failed": {}, "gpus": 2}
    extracted = [
        {"gpus": gpus, "tokens_per_s": rate, "skew_pct": skew, "write_gb_per_s": 1.5 * gpus, "host_gib": gpus}
        for gpus, rate, skew in ((1, 40_000.0, 0.0), (2, 78_000.0, 1.5))
    ]
    trained = {"gpus": 2, "exit_code": 0, "one": {"step_ms": 700.0, "peak_gib": 52.0}}
    for name, ms in (("ddp", 720.0), ("fsdp", 800.0)):
        trained[name] = {"step_ms": ms, "peak_gib": 50.0, "gradient_rel_error": 0.003}
    both, *parts = (str(tmp_path / f"{name}.json") for name in ("both", "a", "b"))
    write_json(tmp_path / "a.json", head | {"seconds": {"extraction": 40}, "extraction": extracted})
    write_json(tmp_path / "b.json", head | {"seconds": {"training": 80}, "training": [trained]})
    monkeypatch.setattr(sys, "argv", ["many_gpus.py", "--json", both, "--merge", *parts])
    runpy.run_path(str(BENCHMARKS / "many_gpus.py"))["main"]()
    found = read_json(tmp_path / "both.json")
    assert found["seconds"] == {"extraction": 40, "training": 80}
    assert found["figures"]["extraction_efficiency"] == pytest.approx(0.975)
    assert found["figures"]["ddp_2_efficiency"] == pytest.approx(700 / 720)
    assert found["figures"]["fsdp_2_gradient_rel_error"] == 0.003


@pytest.mark.parametrize(
    ("split", "gpus"),
    [
        ("5+1", ([1, 2, 3, 4, 5], [0])),
        ("6+2", ([2, 3, 4, 5, 6, 7], [0, 1])),
        ("0,0+1", ([0, 0], [1])),
        ("0+1", ([0], [1])),
    ],
)
def test_a_split_names_gpus(split, gpus):
    assert runpy.run_path(str(BENCHMARKS / "pipeline.py"))["read_split"](split) == gpus
