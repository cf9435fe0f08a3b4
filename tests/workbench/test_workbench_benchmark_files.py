"""Benchmark scripts that read a result say in one line what is wrong with a file that is none."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"
JUNK = {
    "absent": None, "broken": '{"figures', "a list": "[1]", "a text": '"x"', "null": "null", "empty": "{}",
    "binary": "\x00\x01", "figures alone": '{"figures": {}}',
    "another benchmark's": (RESULTS / "cpu" / "planning.json").read_text(),
    "hollow": json.dumps({
        "figures": {}, "details": {}, "table": {}, "small_table": {}, "shape": {}, "runs": [], "rows": [{}],
        "groups": {}, "splits": [], "one_device": {}, "gpus": 1, "seconds": {}, "failed": {}, "cases": {},
        "counts": {}, "studies": {"a": {}},
    }),
}  # fmt: skip
READERS = {  # script -> its arguments, FILE being read
    "acceptance_figure": ["FILE", "OUT"],
    "loss_figure": ["FILE", "OUT"],
    "many_gpus_figure": ["FILE", "OUT"],
    "memory_figure": ["FILE", "OUT"],
    "pipeline_figure": ["FILE", "OUT"],
    "loss": ["--json", "FILE", "--only", "none"],
    "many_gpus": ["--json", "OUT", "--merge", "FILE", "FILE"],
    "memory": ["--again", "FILE"],
    "training": ["--json", "FILE", "--pipeline", "FILE"],
    "quality_report": ["FILE", "OUT"],
    "references": ["--against", "FILE"],
}


@pytest.fixture
def started(monkeypatch, tmp_path, capsys):
    """Run a script's main as its last line does; return status and standard error."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def start(script: str, words: list[str], path: Path) -> tuple[int, str]:
        places = {"FILE": str(path), "OUT": str(tmp_path / "out")}
        monkeypatch.setattr(sys, "argv", [script, *(places.get(word, word) for word in words)])
        status = importlib.import_module("result_file").told(importlib.import_module(script).main)
        return status, capsys.readouterr().err

    return start


@pytest.mark.parametrize("script", READERS)
@pytest.mark.parametrize("junk", JUNK)
def test_a_file_that_is_no_result_is_named_in_one_line(tmp_path, started, script, junk):
    if (script, junk) in (("quality_report", "absent"), ("many_gpus", "hollow")):
        return  # it makes the file; parts without a measure can be put together
    path = tmp_path / "given.json"
    if JUNK[junk] is not None:
        path.write_text(JUNK[junk])
    status, said = started(script, READERS[script], path)
    assert status == 1 and said.startswith(f"{path}") and said.count("\n") == 1
    assert junk == "absent" or "no result of benchmarks/" in said
    assert not (tmp_path / "out").exists()
    assert JUNK[junk] is None or path.read_text() == JUNK[junk]


def test_every_script_that_reads_a_result_is_among_them():
    """A new one must stand above, and end with `told`."""
    texts = {path.stem: path.read_text() for path in BENCHMARKS.glob("*.py")}
    reading = {name for name, text in texts.items() if "read_result(" in text and name != "result_file"}
    assert reading == set(READERS)
    assert all("sys.exit(told(main))" in texts[name] for name in reading)
    assert not [name for name, text in texts.items() if "read_json(sys.argv" in text]


@pytest.mark.parametrize(
    ("script", "result"),
    [("loss_figure", "h200/loss.json"), ("pipeline_figure", "h200-x2/pipeline.json")],
)
def test_a_true_result_is_read(tmp_path, started, monkeypatch, script, result):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    drawn = []
    module = importlib.import_module(script)
    monkeypatch.setattr(module, "save_figure", lambda fig, folder, name: drawn.append(name))
    assert started(script, ["FILE", "OUT"], RESULTS / result) == (0, "") and drawn


def test_a_study_to_report_is_given_as_name_and_path(tmp_path, started, capsys):
    with pytest.raises(SystemExit):
        started("quality_report", ["FILE", "OUT", "--study", "runs/x"], tmp_path / "x.json")
    assert "'runs/x' is not NAME=PATH" in capsys.readouterr().err
    status, said = started("quality_report", ["FILE", "OUT", "--run", f"a={tmp_path}"], tmp_path / "x.json")
    assert status == 1 and str(tmp_path / "row.json") in said and said.count("\n") == 1
