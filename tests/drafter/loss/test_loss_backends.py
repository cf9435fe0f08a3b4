"""The compiled and the Triton row pass against float64 autograd and the torch pass. The Triton kernels
run on a CUDA device, or on the CPU under TRITON_INTERPRET=1 where the triton package is installed.
"""

from __future__ import annotations

import math

import pytest
import torch
from loss_reference import CONFIGS, INTERPRETED, agree, make_case, reference, relative

from dflash_lab.drafter.loss import fused_draft_loss, load_backend
from dflash_lab.drafter.loss_terms import Coefficients, LossConfig, Rows, Terms

CUDA = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not CUDA, reason="no CUDA device")
PASSES = [
    pytest.param("torch", "cuda", marks=[pytest.mark.gpu, needs_cuda]),
    pytest.param("triton", "cuda", marks=[pytest.mark.gpu, needs_cuda]),
    pytest.param(
        "triton",
        "cpu",
        marks=pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1"),
    ),
]


@pytest.mark.parametrize("vocab", [97, 2051, 8192])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("backend", "device"), PASSES)
def test_float32_equals_float64_autograd(backend: str, device: str, name: str, vocab: int) -> None:
    case, config = make_case(vocab=vocab, dtype=torch.float32, device=device), CONFIGS[name]
    for with_target in (True,) if config.needs_target else (True, False):
        case.hidden.grad = None
        positional, target = case.arguments(target=with_target)
        found = fused_draft_loss(*positional, **target, config=config, chunk_rows=12, backend=backend)
        found.total.backward()
        wanted = reference(case, config, target=with_target)
        agree(found, case.hidden.grad, case, wanted, total=1e-6, gradient=1e-5, stats=3e-5)


@pytest.mark.parametrize("name", ["ce", "ce_kl_cap_hot", "all", "dpace"])
@pytest.mark.parametrize(("backend", "device"), [*PASSES, ("torch", "cpu")])
def test_bfloat16_stays_within_two_permille(backend: str, device: str, name: str) -> None:
    case = make_case(anchors=16, block=8, vocab=4099, size=64, dtype=torch.bfloat16, device=device)
    config = CONFIGS[name]
    # Triton's interpreter truncates to bfloat16 where the device rounds.
    bound = 6e-3 if (backend, device) == ("triton", "cpu") else 2e-3
    for with_target in (True,) if config.needs_target else (True, False):
        case.hidden.grad = None
        positional, target = case.arguments(target=with_target)
        found = fused_draft_loss(*positional, **target, config=config, chunk_rows=40, backend=backend)
        found.total.backward()
        total, grad, stats = reference(case, config, target=with_target)
        live = case.weights.cpu() != 0
        assert found.total.dtype == torch.float32 and case.hidden.grad.dtype == torch.bfloat16
        assert relative(found.total, total) < 1e-5
        assert relative(case.hidden.grad, grad) < bound
        assert (found.rows.argmax.cpu()[live] == stats["argmax"][live]).all()
        assert (found.rows.rank.cpu()[live] == stats["rank"][live]).all()


@pytest.mark.parametrize(("backend", "device"), [*PASSES, ("torch", "cpu")])
def test_padded_infinite_huge_and_nan_logits(backend: str, device: str) -> None:
    """Row by row: padding of -inf, |z| = 1e4 far from the first tile, NaN, all -inf, +inf."""
    rows, terms, coefficients, z = _hostile(device)
    out = torch.full(z.shape, math.nan, device=device)
    config = LossConfig(soft_weight=0.5, cap_weight=0.25)
    row_pass = load_backend(backend)
    rows = Rows(rows.z, rows.label, rows.s, rows.source, row_pass.target_terms(rows.s, 1.0))
    row_pass.drafter_terms(rows, 1.0, terms)
    _, kl = row_pass.gradient(rows, terms, coefficients, config, out)
    wide = z.cpu().double()
    log_p, log_q = wide.log_softmax(1), rows.s.cpu().double()[rows.source.cpu()].log_softmax(1)
    p, q = log_p.exp(), log_q.exp()
    ce = -log_p.gather(1, rows.label.cpu()[:, None])[:, 0]
    wanted_kl = torch.where(q > 0, q * (log_q - log_p), 0).sum(1)
    entropy = -torch.where(p > 0, p * log_p, 0).sum(1)
    grad = p + 0.5 * (p - q)
    grad -= 0.25 * (terms.rank.cpu() == 0)[:, None] * torch.where(p > 0, p * (log_p + entropy[:, None]), 0)
    grad.scatter_add_(1, rows.label.cpu()[:, None], -torch.ones(9, 1, dtype=torch.float64))
    good = slice(0, 6)
    assert relative(out[good], grad[good]) < 2e-6
    assert torch.allclose(terms.ce[good].cpu().double(), ce[good], rtol=1e-6)
    assert torch.allclose(terms.entropy[good].cpu().double(), entropy[good], rtol=1e-5, atol=1e-6)
    assert torch.allclose(kl[good].cpu().double(), wanted_kl[good], rtol=1e-5, atol=1e-6)
    assert (terms.argmax[good].cpu() == z[good].cpu().argmax(1)).all()
    assert terms.ce[6:].isnan().all() and out[6:].isnan().any(1).all()


def _hostile(device: str) -> tuple[Rows, Terms, Coefficients, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    vocab, padding = 5003, 400
    z = torch.randn(9, vocab, generator=g) * 3
    s = z[:3] + torch.randn(3, vocab, generator=g)
    z[:, -padding:] = -math.inf
    s[:, -padding:] = -math.inf
    z[1, 4100] = 1e4  # the peak comes late and far above everything else
    z[2] = torch.where(torch.isinf(z[2]), z[2], -1e4)
    z[2, 7] = 1e4
    z[3, 0] = -1e4
    z[4, 3000] = 90.0
    z[6, 11] = math.nan
    z[7] = -math.inf
    z[8, 4200] = math.inf
    label = torch.tensor([5, 4100, 7, 0, 2, 3, 2, 1, 0])
    source = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 0])
    z, s, label, source = z.to(device), s.to(device), label.to(device), source.to(device)
    ones = torch.ones(9, device=device)
    terms = Terms.empty(label, ones, target=True, overlap=False)
    return Rows(z, label, s, source), terms, Coefficients(ones, 0.5 * ones, 0.25 * ones, None), z


@pytest.mark.parametrize("cap", [0.0, 0.25])
@pytest.mark.parametrize(("backend", "device"), [p for p in PASSES if p.values[0] == "triton"])
def test_one_pass_gradient_equals_two_passes_on_hostile_rows(backend: str, device: str, cap: float) -> None:
    rows, terms, _, z = _hostile(device)
    config = LossConfig(hard_weight=0.5, cap_weight=cap)
    one = torch.full(z.shape, math.nan, device=device)
    lost, inverse = load_backend(backend).hard_gradient(rows, terms, config, one)
    found = (one * inverse[:, None] * 0.5).cpu()
    reference_rows = Rows(rows.z.cpu(), rows.label.cpu())
    other = Terms.empty(rows.label.cpu(), torch.ones(9), target=False, overlap=False)
    torch_pass = load_backend("torch")
    torch_pass.drafter_terms(reference_rows, 1.0, other)
    two = torch.empty(z.shape)
    ones = torch.ones(9)
    torch_pass.gradient(
        reference_rows, other, Coefficients(0.5 * ones, None, cap * ones if cap else None, None), config, two
    )
    good = slice(0, 6)
    assert relative(found[good], two[good]) < 2e-6 and found[6:].isnan().any(1).all()
    assert lost[good].abs().max() == 0  # nothing is rounded in float32
    for field in ("ce", "entropy", "p_max", "lse"):
        assert torch.allclose(
            getattr(terms, field)[good].cpu(), getattr(other, field)[good], rtol=1e-5, atol=1e-6
        ), field
    assert (terms.argmax[good].cpu() == other.argmax[good]).all() and (
        terms.rank[good].cpu() == other.rank[good]
    ).all()


@pytest.mark.parametrize(("backend", "device"), [*PASSES, ("torch", "cpu")])
def test_label_out_of_range_poisons_its_row_instead_of_reading_beyond_it(backend: str, device: str) -> None:
    z = torch.randn(3, 97, device=device)
    label = torch.tensor([5, 97, -1], device=device)
    terms = Terms.empty(label, torch.ones(3, device=device), target=False, overlap=False)
    load_backend(backend).drafter_terms(Rows(z, label), 1.0, terms)
    assert terms.ce.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize(("backend", "device"), [p for p in PASSES if p.values[0] == "triton"])
def test_row_offsets_beyond_two_to_the_31_elements(backend: str, device: str) -> None:
    """Rows 2^28 elements apart, so that row 8 starts at 2^31; on the CPU only touched pages become real."""
    pitch, rows, vocab = 1 << 28, 9, 97
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of device memory")
    space, target = torch.empty(2, rows * pitch, device=device)
    z = space.as_strided((rows, vocab), (pitch, 1))
    out = target.as_strided((rows, vocab), (pitch, 1))
    values = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    z.copy_(values)
    label = torch.arange(rows, device=device)
    ones = torch.ones(rows, device=device)
    row_pass = load_backend(backend)
    got, wanted = (Terms.empty(label, ones, target=False, overlap=False) for _ in range(2))
    small, dense = Rows(values.to(device), label), torch.empty(rows, vocab, device=device)
    for chunk, terms, place in ((Rows(z, label), got, out), (small, wanted, dense)):
        row_pass.drafter_terms(chunk, 1.0, terms)
        row_pass.gradient(chunk, terms, Coefficients(ones, None, None, None), LossConfig(), place)
    assert torch.equal(got.ce, wanted.ce) and torch.equal(out, dense)
    row_pass.hard_gradient(Rows(z, label), got, LossConfig(), out)
    assert torch.allclose(out[8].log_softmax(0).isfinite().float(), torch.ones(vocab, device=device))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_one_chunk_of_more_than_two_to_the_31_logits(backend: str) -> None:
    """9,000 rows of 248,320: N * V = 2.2e9. Compared with the same rows in small chunks."""
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of device memory")
    g = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(375, 24, 64, generator=g, device="cuda", dtype=torch.bfloat16)
    head = torch.randn(248_320, 64, generator=g, device="cuda", dtype=torch.bfloat16) * 0.4
    labels = torch.randint(248_320, (375, 24), generator=g, device="cuda")
    weights = torch.ones(375, 24, device="cuda")
    grads, losses = [], []
    for rows in (9000, 1008):
        states = hidden.clone().requires_grad_()
        loss = fused_draft_loss(
            states, head, labels, weights, target_hidden=hidden.view(-1, 64).flip(0),
            target_rows=torch.arange(9000).view(375, 24), config=LossConfig(soft_weight=0.5, cap_weight=0.1),
            chunk_rows=rows, backend=backend,
        )  # fmt: skip
        loss.total.backward()
        grads.append(states.grad)
        losses.append(loss)
    assert relative(grads[0], grads[1]) < 2e-3 and relative(losses[0].total, losses[1].total) < 1e-5
    assert (losses[0].rows.rank == losses[1].rows.rank).float().mean() > 0.999
    assert grads[0][-1].abs().sum() > 0


@pytest.mark.gpu
@needs_cuda
def test_target_side_on_another_device_equals_one_device() -> None:
    case = make_case(anchors=9, vocab=4099, dtype=torch.float32, device="cuda")
    config = CONFIGS["ce_kl_cap_hot"]
    positional, target = case.arguments()
    one = fused_draft_loss(*positional, **target, config=config, chunk_rows=12)
    (wanted,) = torch.autograd.grad(one.total, case.hidden)
    other = "cuda:1" if torch.cuda.device_count() > 1 else "cpu"
    two = fused_draft_loss(
        *positional, target_hidden=case.target_hidden.to(other), target_rows=case.target_rows,
        target_head=case.head.to(other), config=config, chunk_rows=12,
    )  # fmt: skip
    (found,) = torch.autograd.grad(two.total, case.hidden)
    assert relative(found, wanted) < 1e-5 and relative(two.total, one.total) < 1e-6
