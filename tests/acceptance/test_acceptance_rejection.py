"""Rejection sampling is lossless: the joint law of the tokens it emits is the target's, by chi-square."""

from __future__ import annotations

import math

import pytest
import torch
from drafters import random_drafter, second_drafter
from support.wording import refused
from torch.profiler import ProfilerActivity, profile

from dflash_lab.acceptance.decode import Draft, Sampling, accept_sampled
from dflash_lab.errors import InputError
from dflash_lab.models.generate import choose, draw

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
    p_first, p_second = Sampling(0.8).probabilities(logits[0]), Sampling(0.8).probabilities(logits[1:])
    q = Sampling(0.8).probabilities(torch.randn(2, VOCAB, generator=generator))
    drafts = draw(q[None].expand(count, -1, -1), generator)
    last = p_second[torch.zeros(count, dtype=torch.long)]
    p = torch.stack([p_first.expand(count, -1), p_second[drafts[:, 0]], last], dim=1)
    if broken:  # a sampler that always accepts
        accepted, after = torch.full((count,), 2), drafts[:, 0]
    else:
        accepted, after = accept_sampled(drafts, q[None].expand(count, -1, -1), p, generator)
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
    p = Sampling(1.0).probabilities(torch.randn(3, VOCAB, generator=generator))
    drafts = draw(p[None, :2].expand(count, -1, -1), generator)
    accepted, bonus = accept_sampled(
        drafts, p[None, :2].expand(count, -1, -1), p[None].expand(count, -1, -1), generator
    )
    assert (accepted == 2).all()
    counts = torch.bincount(bonus, minlength=VOCAB).double()
    assert _chi_square_p(counts, p[2].double() * count) > 1e-3


@pytest.mark.parametrize("second", [False, True])
def test_sampled_drafts_follow_the_law_that_they_are_judged_by(loaded, second):
    """Of plain DFlash, and of DFlash 2's selector, whose law of a slot depends on the token drawn before."""
    target = loaded("llama")
    drafter = (second_drafter if second else random_drafter)(target, initializer_range=0.05)
    generator = torch.Generator().manual_seed(0)
    size, wide = 2, target.vocab_size
    hidden = torch.randn(size, target.hidden_size, generator=generator)
    logits = 0.5 * torch.randn(size, wide, generator=generator)
    draft = Draft(drafter, torch.tensor([7]), hidden, logits)
    observed, expected = torch.zeros(size, wide, dtype=torch.float64), torch.zeros(size, wide).double()
    every = torch.arange(size)
    for _ in range(4000):
        tokens, chances = draft.sampled(Sampling(0.8, 1.0, 6, generator))
        assert torch.allclose(chances.sum(-1), torch.ones(size)) and (chances[every, tokens] > 0).all()
        observed[every, tokens] += 1
        expected += chances.detach()
    for slot in range(size):
        assert len(set(observed[slot].nonzero())) > 3
        assert _chi_square_p(observed[slot], expected[slot]) > 1e-3


def test_disjoint_support_rejects_at_once_and_never_emits_an_impossible_token():
    q = torch.tensor([[[1.0, 0, 0, 0, 0]]])
    p = torch.tensor([[[0, 0.5, 0.5, 0, 0], [0.2, 0.2, 0.2, 0.2, 0.2]]])
    for seed in range(20):
        accepted, token = accept_sampled(torch.tensor([[0]]), q, p, torch.Generator().manual_seed(seed))
        assert accepted.item() == 0
        assert token.item() in (1, 2)


def test_filters():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    torch.testing.assert_close(
        Sampling(1.0, top_k=2).probabilities(logits), torch.tensor([0.625, 0.375, 0, 0])
    )
    torch.testing.assert_close(
        Sampling(1.0, top_p=0.6).probabilities(logits), torch.tensor([0.625, 0.375, 0, 0])
    )
    torch.testing.assert_close(Sampling(1.0, top_p=0.1).probabilities(logits), torch.tensor([1.0, 0, 0, 0]))
    sharp = Sampling(0.5).probabilities(logits)
    torch.testing.assert_close(sharp, torch.tensor([0.25, 0.09, 0.0225, 0.0025]) / 0.365)


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -1.0, 1e-300, 1e-5, 1e300])
def test_a_temperature_that_logits_cannot_be_divided_by_is_refused(temperature):
    with refused(InputError):
        Sampling(temperature)
    for filters in ({"top_p": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}):
        with refused(InputError):
            Sampling(1.0, **filters)


@pytest.mark.parametrize("temperature", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("filters", [{}, {"top_p": 1e-9}, {"top_k": 1}, {"top_k": 10**9, "top_p": 0.999}])
@pytest.mark.parametrize("size", [1, 5])
def test_the_ends_of_what_is_allowed_choose_a_token_that_has_a_chance(temperature, filters, size):
    logits = torch.full((400, size), 80.0)
    logits[:, 1:3] = -torch.inf
    sampling = Sampling(temperature, generator=torch.Generator().manual_seed(0), **filters)
    chances, found = sampling.probabilities(logits), sampling.choose(logits)
    torch.testing.assert_close(chances.sum(-1), torch.ones(400))
    assert (chances.gather(1, found[:, None]) > 0).all() and (logits.gather(1, found[:, None]) > 0).all()


def test_a_draw_is_the_one_that_multinomial_makes():
    for seed in range(5):
        chances = Sampling(0.7).probabilities(
            torch.randn(40, 3, 500, generator=torch.Generator().manual_seed(seed))
        )
        known = torch.multinomial(chances.view(-1, 500), 1, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(draw(chances, torch.Generator().manual_seed(seed)).view(-1, 1), known)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0])
def test_logits_race_to_the_tokens_that_their_probabilities_do(dtype, temperature):
    logits = (4 * torch.randn(500, 2000, generator=torch.Generator().manual_seed(0))).to(dtype)
    logits[:, ::7] = -torch.inf
    one, other = (torch.Generator().manual_seed(1) for _ in range(2))
    found = choose(logits, temperature, one)
    known = torch.multinomial(torch.softmax(logits.float() / temperature, -1), 1, generator=other)[:, 0]
    assert (found == known).all() and (logits.gather(1, found[:, None]) > -torch.inf).all()
    assert torch.equal(choose(logits, 0.0, None), logits.argmax(-1))


def test_a_draw_from_logits_follows_their_law():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -torch.inf, 0.5])
    found = choose(logits.expand(200_000, -1), 0.8, torch.Generator().manual_seed(2))
    expected = torch.softmax(logits / 0.8, -1).double() * len(found)
    counts = torch.bincount(found, minlength=len(logits)).double()
    assert counts[4] == 0 and _chi_square_p(counts, expected) > 1e-3


def test_sampling_without_filters_makes_four_passes_over_the_logits():
    """And none that the host waits for, as `torch.multinomial` does twice."""
    logits, generator = torch.randn(8, 1000), torch.Generator().manual_seed(0)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        Sampling(0.7, generator=generator).choose(logits)
    calls = {event.key.removeprefix("aten::"): event.count for event in seen.key_averages()}
    calls = {name: count for name, count in calls.items() if not name.startswith(("empty", "as_strided"))}
    assert calls == {"exponential_": 1, "log_": 1, "sub": 1, "argmin": 1}
