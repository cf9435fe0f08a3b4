"""Tiny targets and sample files for the extraction tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.tiny_targets import build_tiny

from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.target.loading import load_target
from dflash_lab.target.model import Target

TAP_IDS = [1, 3, 5]


def make_samples(path: Path, lengths: list[int], *, seed: int = 0) -> Path:
    """Write random samples of these lengths, half of each masked in as answer; a third is held out.

    Bytes only: the padding token's embedding is zero, and a sample that starts with it has all-zero states.
    """
    generator = np.random.default_rng(seed)
    samples = [
        Sample(
            f"s{number}",
            generator.integers(0, 256, length),
            (np.arange(length) >= length // 2).astype(np.uint8),
            "test",
        )
        for number, length in enumerate(lengths)
    ]
    report = write_samples(path, samples, heldout_fraction=0.3, provenance={"test": True})
    assert report.stored == len(lengths), "random samples collided"
    return path


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory):
    """A function: kind -> folder of a tiny checkpoint, built once a session."""
    built: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in built:
            built[kind] = build_tiny(kind, tmp_path_factory.mktemp(kind))
        return built[kind]

    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    """A function: kind -> loaded tiny target on the CPU in float32, loaded once a session."""
    loaded: dict[str, Target] = {}

    def target(kind: str) -> Target:
        if kind not in loaded:
            loaded[kind] = load_target(str(tiny_folder(kind)))
        return loaded[kind]

    return target
