"""Vocabulary-parallel mode over gloo: two ranks hold a slice of the head each and agree with one device."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from loss_reference import make_case, reference, relative
from safetensors.torch import load_file
from test_loss_backends import INTERPRETED
from test_loss_gradient import CONFIGS

from dflash_lab.drafter.loss import merge_drafter, merge_target
from dflash_lab.drafter.loss_rows import TorchRows
from dflash_lab.drafter.loss_terms import DrafterSums, Rows, TargetSums

WORKER = Path(__file__).with_name("shard_worker.py")


def run_ranks(folder: Path, backend: str, size: int = 2) -> None:
    environment = os.environ | {
        "PYTHONPATH": f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(size), str(folder), backend],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    for rank in ranks:
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors


@pytest.mark.parametrize(
    "backend",
    [
        "torch",
        pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
    ],
)
def test_two_ranks_equal_float64_autograd_on_one_device(tmp_path: Path, backend: str) -> None:
    run_ranks(tmp_path, backend)
    exact = backend == "torch"
    for name, config in CONFIGS.items():
        case = make_case()
        total, grad, stats = reference(case, config)
        live = case.weights != 0
        ranks = [load_file(tmp_path / f"{name}-{rank}.safetensors") for rank in range(2)]
        for found in ranks:
            assert relative(found["total"], total) < (1e-12 if exact else 1e-5), name
            assert relative(found["grad"], grad) < (1e-10 if exact else 1e-5), name
            for field, wanted in stats.items():
                if field in found:
                    tolerance = 1e-10 if exact else 3e-5
                    same = torch.allclose(
                        found[field][live], wanted[live].double(), rtol=tolerance, atol=tolerance
                    )
                    assert same, (name, field)
        assert torch.equal(ranks[0]["total"], ranks[1]["total"]) and torch.equal(
            ranks[0]["grad"], ranks[1]["grad"]
        )
    notes = [(tmp_path / f"rank-{rank}.txt").read_text().splitlines() for rank in range(2)]
    assert notes[0][0] == notes[1][0]
    for note, mine in zip(notes, ("[0, 49)", "[49, 97)"), strict=True):
        assert f"the head has 50 tokens, but this rank's slice of a vocabulary of 97 is {mine}" in note[1]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_merged_sums_of_slices_equal_the_sums_of_the_whole(temperature: float) -> None:
    """Padding may fill a whole slice, the peak may lie in any, and equal peaks go to the first."""
    vocab, cuts = 101, [0, 20, 55, 60, 101]
    z = torch.randn(6, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4
    z[:, 55:60] = -math.inf
    z[1, 100] = 1e4
    z[2, 3] = z[2, 70] = 50.0
    label = torch.tensor([0, 100, 70, 19, 20, 99])
    row_pass = TorchRows()
    whole = Rows(z, label)
    logit = whole.label_logit()
    parts, target_parts = [], []
    for start, end in pairwise(cuts):
        parts.append(row_pass.drafter_sums(Rows(z[:, start:end], label, offset=start), logit, temperature))
        target_parts.append(row_pass.target_sums(z[:, start:end], start, temperature))
    merged = merge_drafter(
        DrafterSums(*map(torch.stack, zip(*(vars(p).values() for p in parts)))), temperature
    )
    target = merge_target(
        TargetSums(*map(torch.stack, zip(*(vars(p).values() for p in target_parts)))), temperature
    )
    pairs = [
        (merged, row_pass.drafter_sums(whole, logit, temperature)),
        (target, row_pass.target_sums(z, 0, temperature)),
    ]
    for found, wanted in pairs:
        for field, value in vars(wanted).items():
            assert torch.allclose(getattr(found, field).double(), value.double(), rtol=1e-12), field
