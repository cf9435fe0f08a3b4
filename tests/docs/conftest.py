"""A fresh checkout in miniature, in which the documentation's commands are run as they stand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))
REPO = Path(__file__).resolve().parents[2]


class Checkout:
    """The repository with parameters cut down to seconds, a tiny target at `path/to/model`, chats in
    `mine.jsonl`.
    """

    def __init__(self, root: Path, target: Path) -> None:
        from test_notebooks_headless import TINY, conversations

        self.root = root
        for name in ("dflash_lab", "benchmarks", "docs", "data", "notebooks", "Makefile", "tests"):
            (root / name).symlink_to(REPO / name)
        (root / ".venv").mkdir()
        (root / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
        shutil.copytree(REPO / "params", root / "params")
        for folder in ("demo", "own"):
            for stage, values in TINY.items():
                self._set(root / "params" / folder / f"{stage}.yaml", values)
            common = {"device": "cpu", "dtype": "float32"}
            common |= {"target": str(target)} if folder == "demo" else {}
            self._set(root / "params" / folder / "common.yaml", common)
        self._set(root / "params" / "demo" / "prepare.yaml", {"limit": 40})
        self._set(root / "params" / "own" / "extract.yaml", {"num_shards": 1})
        conversations(root / "mine.jsonl")
        (root / "path" / "to").mkdir(parents=True)
        shutil.copytree(target, root / "path" / "to" / "model")

    @staticmethod
    def _set(path: Path, values: dict[str, Any]) -> None:
        old = yaml.safe_load(path.read_text()) or {}
        if path.stem == "train_drafter":  # the demo's own loss and optimizer need no cutting down
            old.pop("mask_token_id", None)
        path.write_text(yaml.safe_dump({**old, **values}))

    def run(self, command: str, timeout_s: float = 400) -> tuple[int, str]:
        """Run shell text as a person does in the checkout's root; return exit code and output."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.root)}
        environment["BROWSER_PATH"] = "/nowhere/chromium"  # pictures cost a browser start a notebook
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        done = subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        return done.returncode, done.stdout


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory, tiny_target: Callable[[str], Path]) -> Checkout:
    """One miniature checkout for all pages: what the README's commands leave, later pages use."""
    return Checkout(tmp_path_factory.mktemp("checkout"), tiny_target("llama"))
