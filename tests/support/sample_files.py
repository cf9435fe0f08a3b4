"""Sample files for the extraction tests, and the layers they tap."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dflash_lab.data.samples import Sample, write_samples

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
