"""The benchmark of memory goes on from a result of its own alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory.py"


@pytest.mark.parametrize(("text", "words"), [('{"rows', "not valid JSON"), ("[1]", "no result of this")])
def test_what_it_cannot_resume_from_is_named_and_kept(tmp_path, text, words):
    path = tmp_path / "memory.json"
    path.write_text(text)
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--resume", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and str(path) in done.stderr and words in done.stderr
    assert path.read_text() == text
