"""The chunk plan: what a row costs, what fits, and that the answer is kept."""

from __future__ import annotations

import pytest
import torch
from loss_reference import make_case, reference, relative
from support.wording import refused

from dflash_lab.drafter import loss as planning
from dflash_lab.drafter.loss import FusedDraftLoss, bytes_per_row, plan_chunk_rows, select_live
from dflash_lab.drafter.loss_terms import LossConfig
from dflash_lab.errors import InputError

CPU = torch.device("cpu")
GIB = 2**30


def choose(
    free: float, *, rows: int = 10**6, vocab: int = 248_320, block: int = 24, soft: bool = True
) -> int:
    return plan_chunk_rows(
        vocab=vocab, block=block, dtype=torch.bfloat16, device=CPU, soft=soft, rows=rows, free=int(free * GIB)
    )


def test_rows_follow_half_of_free_memory_up_to_the_budget() -> None:
    row = bytes_per_row(248_320, torch.bfloat16, soft=True)
    assert row == 248_320 * (4 + 4 + 2) and bytes_per_row(100, torch.bfloat16, soft=False) == 100 * (4 + 2)
    assert choose(0.2) == int(0.1 * GIB) // row < 128  # little: exactly what fits
    roomy = choose(1000)  # the budget, not the memory, decides
    assert roomy == choose(2000) and roomy * row <= planning.CPU_BUDGET_GIB * GIB
    assert choose(1000, vocab=5000) % planning.ROW_TILE == 0


def test_a_chunk_is_never_larger_than_the_step_and_never_smaller_than_a_block() -> None:
    assert choose(1000, vocab=100, rows=48) == 48
    row = bytes_per_row(248_320, torch.bfloat16, soft=True)
    assert choose(2.1 * 200 * row / GIB, block=200) == 200  # over the budget, but one block has to fit


def test_too_little_memory_says_how_much_is_needed() -> None:
    with refused(InputError):
        choose(0.05)


def test_memory_is_measured_once_and_then_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[int] = []

    def measured(device: torch.device) -> int:
        readings.append(GIB >> len(readings))
        return readings[-1]

    monkeypatch.setattr(planning, "free_bytes", measured)
    loss = FusedDraftLoss(LossConfig())
    found = []
    for seed in range(3):
        case = make_case(seed=seed)
        positional, _ = case.arguments(target=False)
        loss(*positional).total.backward()
        assert relative(case.hidden.grad, reference(case, loss.config, target=False)[1]) < 1e-10
        found.append(loss.chunk_rows)
    assert len(readings) == 1 and found[0] == found[1] == found[2]


def test_a_small_first_step_does_not_make_later_chunks_small() -> None:
    loss = FusedDraftLoss(LossConfig())
    positional, _ = make_case(anchors=2).arguments(target=False)
    loss(*positional)
    assert loss.chunk_rows is not None and loss.chunk_rows > 1000


def test_chunks_hold_whole_anchors_cover_all_live_rows_and_skip_dead_anchors() -> None:
    case = make_case(anchors=40, block=6)
    case.weights[5:9] = 0
    chosen = select_live(
        case.labels, case.weights, case.target_rows, vocab=97, target_size=len(case.target_hidden),
        chunk_rows=11,
        device=CPU, dtype=torch.float64,
    )  # fmt: skip
    live = case.weights != 0
    assert len(chosen) == live.sum() and len(chosen.chunks) > 10
    assert chosen.chunks[0].start == 0 and chosen.chunks[-1].stop == len(chosen)
    for first, second in zip(chosen.chunks, chosen.chunks[1:]):
        assert first.stop == second.start and chosen.anchor[first.stop - 1] != chosen.anchor[second.start]
    assert all(0 < chunk.stop - chunk.start <= 11 for chunk in chosen.chunks)
    place = (chosen.anchor, chosen.slot)
    assert live[place].all() and torch.equal(chosen.label, case.labels[place])
    assert chosen.block_of.max() + 1 == live.any(1).sum()
