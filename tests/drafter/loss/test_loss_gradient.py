"""Value, gradient and every statistic of the fused loss against float64 autograd over full logits."""

from __future__ import annotations

import doctest

import pytest
import torch
import torch.nn.functional as F
from loss_reference import make_case, reference, relative

from dflash_lab.drafter.loss import FusedDraftLoss, fused_draft_loss
from dflash_lab.drafter.loss_terms import LossConfig

CONFIGS = {
    "ce": LossConfig(),
    "kl": LossConfig(hard_weight=0, soft_weight=1),
    "kl_hot": LossConfig(hard_weight=0, soft_weight=0.7, temperature=2),
    "ce_kl_cap": LossConfig(hard_weight=0.85, soft_weight=0.15, cap_weight=0.3),
    "ce_kl_cap_hot": LossConfig(hard_weight=0.85, soft_weight=0.15, cap_weight=0.3, temperature=2),
    "tv": LossConfig(hard_weight=0, tv_weight=1),
    "lk": LossConfig(hard_weight=0, lk_weight=1),
    "all": LossConfig(hard_weight=0.5, soft_weight=0.2, cap_weight=0.1, tv_weight=0.3, lk_weight=0.4),
    "dpace": LossConfig(weighting="dpace", soft_weight=0.3, cap_weight=0.2),
    "length": LossConfig(hard_weight=0, length_weight=1),
    "length_overlap": LossConfig(hard_weight=0, length_weight=1, acceptance="overlap"),
    "length_ce_cap": LossConfig(hard_weight=0.5, cap_weight=0.2, length_weight=0.7, logit_scale=1.5),
    "length_all": LossConfig(
        soft_weight=0.3,
        tv_weight=0.2,
        lk_weight=0.1,
        length_weight=0.7,
        acceptance="overlap",
        logit_scale=1.5,
    ),
    "argmax": LossConfig(label_source="argmax", soft_weight=0.3, cap_weight=0.2),
    "softcap": LossConfig(soft_weight=0.3, cap_weight=0.2, tv_weight=0.1, logit_scale=1.5, logit_softcap=3.0),
}


@pytest.mark.parametrize("rows", [5, 12, 1000])
@pytest.mark.parametrize("name", CONFIGS)
def test_value_gradient_and_statistics_equal_float64_autograd(name: str, rows: int) -> None:
    case, config = make_case(), CONFIGS[name]
    positional, target = case.arguments()
    found = fused_draft_loss(*positional, **target, config=config, chunk_rows=rows, backend="torch")
    found.total.backward()
    total, grad, stats = reference(case, config)
    live = case.weights != 0
    assert live.any() and (~live).any() and (found.rows.rank[live] == 0).any()
    assert torch.allclose(found.total, total, rtol=1e-12, atol=0)
    assert relative(case.hidden.grad, grad) < 1e-10
    assert case.hidden.grad[~live].count_nonzero() == 0
    for field, wanted in stats.items():
        value = getattr(found.rows, field)
        if value is not None:
            assert torch.allclose(value[live].double(), wanted[live].double(), rtol=1e-10, atol=1e-12), field
    assert (found.rows.live == live).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_total_is_the_factors_times_the_sums(name: str) -> None:
    case, config = make_case(seed=3), CONFIGS[name]
    positional, target = case.arguments()
    found = fused_draft_loss(*positional, **target, config=config)
    factors = {
        "ce": config.hard_weight, "kl": config.soft_weight, "cap": config.cap_weight, "tv": config.tv_weight,
        "lk": config.lk_weight, "length": config.length_weight,
    }  # fmt: skip
    rebuilt = sum(factor * found.sums[term] for term, factor in factors.items() if factor)
    assert torch.allclose(found.total, torch.as_tensor(rebuilt), rtol=1e-12)
    assert found.sums["correct"] == found.rows.correct.sum()
    assert found.row_count == (case.weights != 0).sum()
    assert torch.allclose(found.weight_sum, found.rows.weight.sum(), rtol=1e-12)


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


def test_without_a_target_there_are_no_target_statistics() -> None:
    case, config = make_case(), CONFIGS["ce"]
    positional, _ = case.arguments(target=False)
    found = fused_draft_loss(*positional, config=config, chunk_rows=8)
    found.total.backward()
    total, grad, _ = reference(case, config, target=False)
    assert torch.allclose(found.total, total, rtol=1e-12)
    assert relative(case.hidden.grad, grad) < 1e-10
    assert found.rows.kl is None and found.rows.target_argmax is None and "kl" not in found.sums


@pytest.mark.parametrize("rows", [5, 1000])
def test_the_length_term_without_a_target(rows: int) -> None:
    case, config = make_case(), CONFIGS["length_ce_cap"]
    positional, _ = case.arguments(target=False)
    found = fused_draft_loss(*positional, config=config, chunk_rows=rows)
    found.total.backward()
    total, grad, _ = reference(case, config, target=False)
    assert torch.allclose(found.total, total, rtol=1e-12)
    assert relative(case.hidden.grad, grad) < 1e-10
    with torch.no_grad():
        assert fused_draft_loss(*positional, config=config, chunk_rows=rows).total == found.total


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


@pytest.mark.parametrize("name", ["ce", "ce_kl_cap_hot", "all"])
def test_bfloat16_inputs_with_float32_logits_stay_within_two_permille(name: str) -> None:
    case = make_case(anchors=16, block=8, vocab=1031, size=64, dtype=torch.bfloat16)
    config = CONFIGS[name]
    positional, target = case.arguments()
    found = fused_draft_loss(*positional, **target, config=config, chunk_rows=40)
    found.total.backward()
    total, grad, stats = reference(case, config)
    live = case.weights != 0
    assert found.total.dtype == torch.float32 and case.hidden.grad.dtype == torch.bfloat16
    assert relative(found.total, total) < 1e-5
    assert relative(case.hidden.grad, grad) < 2e-3
    assert relative(found.rows.ce[live], stats["ce"][live]) < 1e-5
    assert (found.rows.argmax[live] == stats["argmax"][live]).all() and (
        found.rows.rank[live] == stats["rank"][live]
    ).all()


def test_no_grad_computes_the_same_numbers_without_a_gradient() -> None:
    case, config = make_case(), CONFIGS["ce_kl_cap"]
    positional, target = case.arguments()
    wanted = fused_draft_loss(*positional, **target, config=config)
    with torch.no_grad():
        found = fused_draft_loss(*positional, **target, config=config)
    assert not found.total.requires_grad and wanted.total.requires_grad
    assert found.total == wanted.total and (found.rows.ce == wanted.rows.ce).all()


def test_module_keeps_its_first_chunk_rows() -> None:
    loss, kept = FusedDraftLoss(CONFIGS["ce_kl_cap"]), []
    for seed in range(2):
        case = make_case(seed=seed)
        positional, target = case.arguments()
        found = loss(*positional, **target)
        found.total.backward()
        assert relative(case.hidden.grad, reference(case, loss.config)[1]) < 1e-10
        kept.append(loss.chunk_rows)
    assert kept[0] is not None and kept[0] == kept[1]
