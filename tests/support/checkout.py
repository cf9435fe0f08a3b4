"""A fresh checkout in miniature: the repository with parameters cut down to seconds."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tests" / "notebooks"))


class Checkout:
    """The repository with parameters cut down to seconds, a tiny target at `path/to/model`, chats in
    `mine.jsonl`.
    """

    def __init__(self, root: Path, target: Path, preloaded: dict[str, str] | None = None) -> None:
        """`preloaded`, of the fixture of that name, speeds up what `run` begins."""
        from test_notebooks_headless import TINY, conversations

        self.root, self.preloaded = root, preloaded or {}
        for name in ("dflash_lab", "benchmarks", "docs", "data", "Makefile", "tests"):
            (root / name).symlink_to(REPO / name)
        shutil.copytree(REPO / "notebooks", root / "notebooks")  # a link leads into the other checkout
        self._install()
        (root / ".venv").mkdir()
        (root / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
        shutil.copytree(REPO / "params", root / "params")
        for folder in ("demo", "own", "own-cpu"):
            for stage, values in TINY.items():
                self._set(root / "params" / folder / f"{stage}.yaml", values)
            common = {"device": "cpu", "dtype": "float32"}
            common |= {"target": str(target)} if folder == "demo" else {}
            self._set(root / "params" / folder / "common.yaml", common)
        self._set(root / "params" / "demo" / "prepare.yaml", {"limit": 40})
        for folder in ("own", "own-cpu"):
            self._set(root / "params" / folder / "extract.yaml", {"num_shards": 1})
        conversations(root / "mine.jsonl")
        (root / "path" / "to").mkdir(parents=True)
        shutil.copytree(target, root / "path" / "to" / "model")

    def _install(self) -> None:
        """Leave the metadata that an installation of this very pyproject.toml leaves on the import path."""
        project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
        info = self.root / f"dflash_lab-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
        points = configparser.ConfigParser(delimiters=("=",))
        points.optionxform = str  # type: ignore[assignment, method-assign]
        points.read_dict({**project["entry-points"], "console_scripts": project["scripts"]})
        with (info / "entry_points.txt").open("w") as file:
            points.write(file)

    @staticmethod
    def _set(path: Path, values: dict[str, Any]) -> None:
        old = yaml.safe_load(path.read_text()) or {}
        if path.stem == "train_drafter":  # the demo's own loss and optimizer need no cutting down
            old.pop("mask_token_id", None)
        path.write_text(yaml.safe_dump({**old, **values}))

    def environment(self) -> dict[str, str]:
        """What a person's shell would have here."""
        environment = {**os.environ, **self.preloaded, "OMP_NUM_THREADS": "1"}
        first = [self.preloaded["PYTHONPATH"]] if self.preloaded else []
        environment["PYTHONPATH"] = os.pathsep.join([*first, str(self.root)])
        environment["BROWSER_PATH"] = "/nowhere/chromium"  # pictures cost a browser start a notebook
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        return environment

    def run(self, command: str, folder: str = "", timeout_s: float = 400, **streams: Any) -> tuple[int, str]:
        """Run shell text as a person does in a folder of the checkout; return exit code and output."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **streams}
        streams = {"stderr": subprocess.STDOUT, **streams}
        words, cwd = ["bash", "-e", "-c", command], self.root / folder
        environment = self.environment()
        done = subprocess.run(words, cwd=cwd, env=environment, text=True, timeout=timeout_s, **streams)
        return done.returncode, done.stdout
