"""The target's side: distinct rows projected once, slices where they can be, and a head of its own on a
second device.
"""

from __future__ import annotations

import pytest
import torch
from loss_reference import make_case, reference, relative
from test_loss_rules import Watch

from dflash_lab.drafter.loss import distinct_states, fused_draft_loss
from dflash_lab.drafter.loss_terms import LossConfig

CONFIG = LossConfig(soft_weight=0.5, cap_weight=0.2, temperature=2, logit_scale=1.2, logit_softcap=4.0)


def test_overlapping_blocks_project_each_target_row_once_a_chunk() -> None:
    case = make_case(anchors=8, block=6, hole=0.0, target_size=20)
    anchors = torch.tensor([0, 1, 2, 3, 9, 10, 11, 12]) + 1
    case.target_rows = anchors[:, None] + torch.arange(6) - 1
    positional, target = case.arguments()
    with Watch() as watch:
        found = fused_draft_loss(*positional, **target, config=CONFIG, chunk_rows=20, backend="torch")
    found.total.backward()
    # 4 anchors x 5 live slots a chunk, over 8 neighbouring rows: rho = 8 / 20, one matmul for both
    assert watch.matmuls(97) == [28, 28]
    assert relative(case.hidden.grad, reference(case, CONFIG)[1]) < 1e-10


@pytest.mark.parametrize(("rows", "copied"), [([4, 3, 5, 3], False), ([4, 3, 6, 3], True)])
def test_neighbouring_rows_are_a_slice_and_scattered_rows_are_gathered(rows: list[int], copied: bool) -> None:
    states = torch.randn(9, 4, dtype=torch.float64)
    with Watch() as watch:
        distinct, source = distinct_states(states, torch.tensor(rows))
    assert any("index_select" in name for name, _ in watch.seen) == copied
    assert distinct.shape == (3, 4) and torch.equal(distinct[source], states[rows])


def test_target_head_of_its_own_gives_the_same_result_and_only_chunk_logits_cross() -> None:
    case = make_case()
    positional, target = case.arguments()
    one = fused_draft_loss(*positional, **target, config=CONFIG, chunk_rows=12)
    (wanted,) = torch.autograd.grad(one.total, case.hidden)
    with Watch() as watch:
        two = fused_draft_loss(
            *positional, **target, target_head=case.head.clone(), config=CONFIG, chunk_rows=12
        )
    (found,) = torch.autograd.grad(two.total, case.hidden)
    assert relative(found, wanted) < 1e-13 and torch.allclose(two.total, one.total, rtol=1e-13)
    crossing = [shape for name, shape in watch.seen if "copy_" in name and shape[-1] == 97]
    assert crossing and all(shape[0] <= 12 for shape in crossing)


def test_target_may_be_wider_than_the_drafter_with_its_own_head() -> None:
    case = make_case()
    states = torch.randn(len(case.target_hidden), 40, dtype=torch.float64)
    head = torch.randn(97, 40, dtype=torch.float64) * 0.3
    positional, _ = case.arguments()
    config = LossConfig(hard_weight=0, soft_weight=1)
    found = fused_draft_loss(
        *positional, target_hidden=states, target_rows=case.target_rows, target_head=head, config=config
    )
    log_p = (case.hidden @ case.head.T).log_softmax(-1)
    log_q = (states @ head.T).log_softmax(-1)[case.target_rows]
    kl = (log_q.exp() * (log_q - log_p)).sum(-1)
    wanted = torch.where(case.weights != 0, case.weights * kl, 0).sum()
    assert torch.allclose(found.total, wanted, rtol=1e-10)
