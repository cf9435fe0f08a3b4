"""Value, gradient and every statistic of the fused loss against float64 autograd over full logits."""

from __future__ import annotations

import doctest

import pytest
import torch
import torch.nn.functional as F
from loss_reference import CONFIGS, agree, make_case, reference, relative

from dflash_lab.drafter.loss import fused_draft_loss
from dflash_lab.drafter.loss_terms import LossConfig


@pytest.mark.parametrize("name", CONFIGS)
def test_value_gradient_and_statistics_equal_float64_autograd(name: str) -> None:
    case, config = make_case(), CONFIGS[name]
    live = case.weights != 0
    for with_target in (True,) if config.needs_target else (True, False):
        positional, target = case.arguments(target=with_target)
        wanted = reference(case, config, target=with_target)
        for rows in (5, 12, 1000):
            case.hidden.grad = None
            found = fused_draft_loss(*positional, **target, config=config, chunk_rows=rows, backend="torch")
            found.total.backward()
            agree(found, case.hidden.grad, case, wanted, total=1e-12, gradient=1e-10, stats=1e-10)
        assert live.any() and (~live).any() and (found.rows.rank[live] == 0).any()
        assert case.hidden.grad[~live].count_nonzero() == 0 and (found.rows.live == live).all()
        assert with_target or (found.rows.kl is found.rows.target_argmax is None and "kl" not in found.sums)
        # The total is the factors times the sums, over one denominator or the other.
        parts = [
            getattr(config, f"{factor}_weight") * found.sums[term]
            for factor, term in zip(FACTORS, ("ce", "kl", "cap", "tv", "lk", "length"), strict=True)
            if getattr(config, f"{factor}_weight")
        ]
        assert torch.allclose(found.total, torch.as_tensor(sum(parts)), rtol=1e-12)
        assert found.sums["correct"] == found.rows.correct.sum()
        assert found.row_count == live.sum() != found.weight_sum
        assert torch.allclose(found.weight_sum, found.rows.weight.sum(), rtol=1e-12)
        with torch.no_grad():
            same = fused_draft_loss(*positional, **target, config=config, chunk_rows=1000, backend="torch")
        assert not same.total.requires_grad and same.total == found.total
        assert (same.rows.ce == found.rows.ce).all()


FACTORS = ("hard", "soft", "cap", "tv", "lk", "length")


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_without_a_config_it_is_torchs_cross_entropy(dtype: torch.dtype, bound: float) -> None:
    case = make_case(dtype=dtype)
    live = case.weights != 0
    case.weights = live.to(dtype)
    (hidden, *others), _ = case.arguments(target=False)
    found = fused_draft_loss(hidden, *others, chunk_rows=8)
    (found.total / found.row_count).backward()
    full = hidden.detach().requires_grad_()
    wanted = F.cross_entropy((full @ case.head.T)[live], case.labels[live])
    wanted.backward()
    assert relative(found.total / found.row_count, wanted) < bound
    assert relative(hidden.grad, full.grad) < bound


def test_the_docstrings_example_runs() -> None:
    (example,) = doctest.DocTestFinder().find(
        fused_draft_loss, globs={"torch": torch, "fused_draft_loss": fused_draft_loss}
    )
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0


def test_the_length_term_is_the_expected_length_and_bears_slots_that_cannot_be_accepted() -> None:
    case = make_case(hole=0.0)
    case.weights = (case.weights != 0).double()
    config = LossConfig(hard_weight=0, length_weight=1)
    positional, _ = case.arguments(target=False)
    p = (case.hidden @ case.head.T).softmax(-1).gather(-1, case.labels[..., None])[..., 0]
    drafted = p[:, 1:].cumprod(1).sum()
    found = fused_draft_loss(*positional, config=config)
    assert torch.allclose(found.row_count - found.total, drafted)
    head, sharp = case.head * 1e4, case.hidden.detach().requires_grad_()
    found = fused_draft_loss(sharp, head, case.labels, case.weights, config=config)
    found.total.backward()
    assert sharp.grad.isfinite().all() and found.total > 0


def test_dpace_with_alpha_zero_is_the_gradient_of_minus_the_expected_accepted_length() -> None:
    case = make_case(hole=0.0)
    config = LossConfig(weighting="dpace", dpace_alpha=0.0)
    live = case.weights != 0
    case.weights = live.double()
    positional, _ = case.arguments(target=False)
    fused_draft_loss(*positional, config=config, chunk_rows=8).total.backward()
    hidden = case.hidden.detach().clone().requires_grad_()
    p = (hidden @ case.head.T).softmax(-1).gather(-1, case.labels[..., None])[..., 0]
    expected_length = p[:, 1:].cumprod(1).sum()
    (grad,) = torch.autograd.grad(-expected_length, hidden)
    assert relative(case.hidden.grad, grad) < 1e-10
