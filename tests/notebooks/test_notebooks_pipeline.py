"""A new user's walk: own chats, own local target folder, one command from a copy of the demo's parameters to
tau.

Everything is real: the launcher, papermill, seven kernels, the closing table, the report; only the target is
tiny.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_lab.files import read_json
from dflash_lab.workbench import cli
from dflash_lab.workbench.closing import ROWS

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))
SHORTER = {
    "max_steps": 4,
    "eval_every": 2,
    "tau_samples": 1,
    "num_prompts": 2,
    "max_new_tokens": 8,
    "untrained_tokens": 8,
    "offline_samples": 2,
    "measure_s": 2,
    "cost_repeats": 1,
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def start(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "dflash_lab.workbench.cli", *words],
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def walked(tmp_path_factory, tiny_target) -> tuple[Path, list[str], str]:
    from test_notebooks_headless import conversations

    root = tmp_path_factory.mktemp("walk")
    chats = conversations(root / "mine.jsonl")
    words = ["run", "params/demo", "-p", "run_dir", str(root / "runs" / "mine"), "-p", "input", str(chats)]
    words += ["-p", "target", str(tiny_target("llama"))]
    for name, value in SHORTER.items():
        words += ["-p", name, str(value)]
    code, output = start(*words)
    assert code == 0, output[-4000:]
    return root / "runs", words, output


def test_the_run_closes_with_every_number(walked):
    root, _, output = walked
    figures = read_json(root / "mine" / "result.json")["figures"]
    assert set(figures) >= set(ROWS) and figures["samples_stored"] == figures["samples_in"] == 24
    assert figures["samples_quarantined"] == 0 and figures["tau_trained"] >= 1.0
    for name in ("tau_trained", "extract_tokens_per_s", "padding_waste_pct", "report"):
        assert name in output


def test_every_stage_left_its_notebook_and_the_report_reads_them(walked):
    root, _, _ = walked
    names = {path.stem for path in (root / "mine").glob("*.ipynb")}
    assert names == {
        "prepare",
        "dataset_stats",
        "extract-0",
        "extract-1",
        "memory_sweep",
        "train_drafter",
        "acceptance",
    }
    assert (root / "index.html").exists() and (root / "mine" / "report.html").stat().st_size > 4_000_000


def test_a_second_start_does_no_work(walked):
    root, words, _ = walked
    before = {
        path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file() and path.name != ".lock"
    }
    code, output = start(*words)
    assert code == 0 and output.count("finished before") == 7 and "tau_trained" in output
    after = {
        path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file() and path.name != ".lock"
    }
    assert after == before


def test_the_other_commands_read_the_run(walked, capsys):
    root, _, _ = walked
    assert cli.main(["verify", str(root / "mine" / "store")]) == 0
    assert cli.main(["runs", str(root)]) == 0
    assert cli.main(["report", str(root / "mine")]) == 0
    assert cli.main(["runs", "--compare", str(root / "mine"), str(root / "mine")]) == 0
    assert "mine" in capsys.readouterr().out


def test_verify_names_a_damaged_part(walked, tmp_path, capsys):
    import shutil

    root, _, _ = walked
    copy = tmp_path / "store"
    shutil.copytree(root / "mine" / "store", copy)
    part = next(copy.glob("shard-*/part-*.safetensors"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(bytes(data))
    assert cli.main(["verify", str(copy)]) == 1
    assert part.name in capsys.readouterr().out
