"""Rows of the quality study train and are measured, on a tiny target with layers like the real one's."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.models.load import load_target
from dflash_lab.models.template import user_frame

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
# What `quality.py` does otherwise than for the base: other samples, weights of the target, another drafter.
ROWS = ("base", "augment-half-kl", "warm", "dflash2", "short")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from support.tiny_targets import build_tiny

    shape = dict(hidden_size=144, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3)
    return build_tiny("llama", tmp_path_factory.mktemp("rows"), **shape)


@pytest.fixture(scope="module")
def data(tmp_path_factory, folder) -> Path:
    """What `quality.py data` leaves, of random words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        from quality_augment import augment
        from quality_data import HELDOUT, _write_training

        out, target, rng = tmp_path_factory.mktemp("data"), load_target(str(folder)), np.random.default_rng(0)
        opening, ending = user_frame(target.tokenizer)

        def samples(count: int) -> list[Sample]:
            made = []
            for number in range(count):
                prompt, answer = [*opening, *rng.integers(0, 256, 9), *ending], rng.integers(0, 256, 24)
                mask = np.repeat(np.array([0, 1], np.uint8), [len(prompt), len(answer)])
                made.append(Sample(f"self:{number}", np.asarray([*prompt, *answer]), mask, "self"))
            return made

        # Enough for the split of one in a hundred to hold some out.
        _write_training(out, samples(300), {"tokens": 1}, len(opening))
        augment(target, out / "samples.parquet", variants=1, seed=0)
        for name in ("heldout", "humaneval"):
            write_samples(out / f"{name}.parquet", samples(3), heldout_fraction=HELDOUT, provenance={})
    return out


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_a_row_trains_and_is_measured(row, folder, data, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import quality

    words = ["quality.py", "train", row, "--data", str(data), "--out", str(tmp_path), "--steps", "2"]
    words += ["--folders", "--target", str(folder), "--device", "cpu", "--answers", "2"]
    small = dict(context_tokens=160, slots=96, log_every=1, eval_every=1, eval_rows=1)
    words += [word for pair in small.items() for word in ("-p", *map(str, pair))]
    monkeypatch.setattr(sys, "argv", words)
    assert quality.main() == 0
    found = json.loads((tmp_path / row / "row.json").read_text())
    assert found["figures"]["steps"] == 2 and found["figures"]["skipped_steps"] == 0
    assert found["training"]["streak"] >= 1 and math.isfinite(found["training"]["loss"])
    for taus in found["tau"].values():
        assert taus["tau"] >= 1 and len(taus["per_answer"]) == taus["answers"] == 2
