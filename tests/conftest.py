"""Shared fixtures: tests/ on the import path, few threads, tiny targets built once a session, GPU tests
skipped without one.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles the package anew
sys.dont_write_bytecode = False
sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _small_collections() -> Iterator[None]:
    """Stages collect garbage as they start and end: among what a module makes, not all that is imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a tiny target of a kind, built once a session."""
    from support.tiny_targets import build_tiny

    folders: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = build_tiny(kind, tmp_path_factory.mktemp(kind))
        return folders[kind]

    return folder_of


@pytest.fixture(scope="session")
def preloaded() -> Iterator[dict[str, str]]:
    """Environment of processes whose kernels and `dflash-lab` find torch and the like already imported."""
    if not hasattr(os, "pidfd_open"):  # of Linux
        yield {}
        return
    code, folder = Path(__file__).parent / "support" / "preloaded", tempfile.mkdtemp()
    address = f"{folder}/socket"
    server = subprocess.Popen(
        [sys.executable, str(code / "server.py"), address],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    while server.poll() is None and not Path(address).exists():
        time.sleep(0.01)
    yield {"PRELOADED": address, "PYTHONPATH": str(code)}
    server.communicate()
    shutil.rmtree(folder)
