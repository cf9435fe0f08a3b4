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
from loss_reference import CONFIGS, INTERPRETED, make_case, reference, relative
from safetensors.torch import load_file
from shard_worker import run_rank
from support.wording import check_wording

from dflash_lab.drafter.loss import merge_drafter, merge_target
from dflash_lab.drafter.loss_rows import TorchRows
from dflash_lab.drafter.loss_terms import DrafterSums, Rows, TargetSums

WORKER = Path(__file__).with_name("shard_worker.py")
NEEDS_TRITON = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=NEEDS_TRITON)])
def test_two_ranks_equal_float64_autograd_on_one_device(tmp_path: Path, backend: str) -> None:
    """This process is one of the two."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), str(tmp_path), backend]
    other = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        check_wording(run_rank(0, tmp_path, backend))
    finally:
        _, errors = other.communicate(timeout=300)
    assert other.returncode == 0, errors
    exact = backend == "torch"
    for name, config in CONFIGS.items():
        case = make_case()
        total, grad, stats = reference(case, config)
        live = case.weights != 0
        first, second = (load_file(tmp_path / f"{name}-{rank}.safetensors") for rank in range(2))
        for found in (first, second):
            assert relative(found["total"], total) < (1e-12 if exact else 1e-5), name
            assert relative(found["grad"], grad) < (1e-10 if exact else 1e-5), name
            tolerance = 1e-10 if exact else 3e-5
            for field in stats.keys() & found.keys():
                same = torch.allclose(
                    found[field][live], stats[field][live].double(), rtol=tolerance, atol=tolerance
                )
                assert same, (name, field)
        assert torch.equal(first["total"], second["total"]) and torch.equal(first["grad"], second["grad"])
    assert (tmp_path / "chunk-0.txt").read_text() == (tmp_path / "chunk-1.txt").read_text()


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
