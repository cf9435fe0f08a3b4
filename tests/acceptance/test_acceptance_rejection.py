"""Rejection sampling is lossless: the joint law of the tokens it emits is the target's, by chi-square."""

from __future__ import annotations

import math

import pytest
import torch

from dflash_lab.acceptance.rejection import draw, probabilities, verify_sampled
from dflash_lab.errors import InputError

VOCAB = 5


def _chi_square_p(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Upper tail probability of the chi-square statistic (Wilson-Hilferty normal approximation)."""
    keep = expected > 5
    statistic = float(((observed - expected)[keep] ** 2 / expected[keep]).sum())
    freedom = int(keep.sum()) - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def _first_two_tokens(
    count: int, broken: bool, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Emit two tokens from a target whose second law depends on the first, with independent drafts; return
    counts, law."""
    logits = 1.5 * torch.randn(1 + VOCAB, VOCAB, generator=generator)
    p_first, p_second = probabilities(logits[0], 0.8), probabilities(logits[1:], 0.8)
    q = probabilities(torch.randn(2, VOCAB, generator=generator), 0.8)
    drafts = draw(q[None].expand(count, -1, -1), generator)
    last = p_second[torch.zeros(count, dtype=torch.long)]
    p = torch.stack([p_first.expand(count, -1), p_second[drafts[:, 0]], last], dim=1)
    if broken:  # a sampler that always accepts
        accepted, after = torch.full((count,), 2), drafts[:, 0]
    else:
        accepted, after = verify_sampled(drafts, q[None].expand(count, -1, -1), p, generator)
    first = torch.where(accepted >= 1, drafts[:, 0], after)
    # A round that stopped at the first token draws the second in its next round; draw it plainly here.
    second = torch.where(
        accepted >= 2, drafts[:, 1], torch.where(accepted == 1, after, draw(p_second[first], generator))
    )
    counts = torch.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB).double()
    return counts, (p_first[:, None] * p_second).flatten().double() * count


def test_emitted_tokens_follow_the_target():
    counts, expected = _first_two_tokens(200_000, False, torch.Generator().manual_seed(0))
    assert _chi_square_p(counts, expected) > 1e-3


def test_the_chi_square_test_sees_a_sampler_that_is_not_lossless():
    counts, expected = _first_two_tokens(200_000, True, torch.Generator().manual_seed(0))
    assert _chi_square_p(counts, expected) < 1e-6


def test_bonus_follows_the_last_row_and_equal_laws_accept_everything():
    generator = torch.Generator().manual_seed(1)
    count = 50_000
    p = probabilities(torch.randn(3, VOCAB, generator=generator), 1.0)
    drafts = draw(p[None, :2].expand(count, -1, -1), generator)
    accepted, bonus = verify_sampled(
        drafts, p[None, :2].expand(count, -1, -1), p[None].expand(count, -1, -1), generator
    )
    assert (accepted == 2).all()
    counts = torch.bincount(bonus, minlength=VOCAB).double()
    assert _chi_square_p(counts, p[2].double() * count) > 1e-3


def test_disjoint_support_rejects_at_once_and_never_emits_an_impossible_token():
    q = torch.tensor([[[1.0, 0, 0, 0, 0]]])
    p = torch.tensor([[[0, 0.5, 0.5, 0, 0], [0.2, 0.2, 0.2, 0.2, 0.2]]])
    for seed in range(20):
        accepted, token = verify_sampled(torch.tensor([[0]]), q, p, torch.Generator().manual_seed(seed))
        assert accepted.item() == 0
        assert token.item() in (1, 2)


def test_filters():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    torch.testing.assert_close(probabilities(logits, 1.0, top_k=2), torch.tensor([0.625, 0.375, 0, 0]))
    torch.testing.assert_close(probabilities(logits, 1.0, top_p=0.6), torch.tensor([0.625, 0.375, 0, 0]))
    torch.testing.assert_close(probabilities(logits, 1.0, top_p=0.1), torch.tensor([1.0, 0, 0, 0]))
    sharp = probabilities(logits, 0.5)
    torch.testing.assert_close(sharp, torch.tensor([0.25, 0.09, 0.0225, 0.0025]) / 0.365)
    for bad in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.0}, {"temperature": 1.0, "top_k": -1}):
        with pytest.raises(InputError, match="top_p"):
            probabilities(logits, **bad)
