"""Rejection sampling is lossless: the joint law of the tokens it emits is the target's, by chi-square."""

from __future__ import annotations

import itertools
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


def _follows(observed: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the chi-square statistic would be as large by chance once in 1,000 (Wilson-Hilferty)."""
    keep = expected > 5
    statistic = float(((observed - expected)[keep] ** 2 / expected[keep]).sum())
    freedom = int(keep.sum()) - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2)) > 1e-3


def test_two_tokens_follow_a_target_whose_second_law_depends_on_the_first():
    generator, count = torch.Generator().manual_seed(0), 200_000
    logits = 1.5 * torch.randn(1 + VOCAB, VOCAB, generator=generator)
    p_first, p_second = Sampling(0.8).probabilities(logits[0]), Sampling(0.8).probabilities(logits[1:])
    q = Sampling(0.8).probabilities(torch.randn(2, VOCAB, generator=generator)).expand(count, -1, -1)
    drafts = draw(q, generator)
    last = p_second[torch.zeros(count, dtype=torch.long)]
    p = torch.stack([p_first.expand(count, -1), p_second[drafts[:, 0]], last], dim=1)
    accepted, after = accept_sampled(drafts, q, p, generator)
    first = torch.where(accepted >= 1, drafts[:, 0], after)
    # A round that stopped at the first token draws the second in its next round; draw it plainly here.
    second = torch.where(accepted == 1, after, draw(p_second[first], generator))
    second = torch.where(accepted >= 2, drafts[:, 1], second)
    counts = torch.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB).double()
    assert _follows(counts, (p_first[:, None] * p_second).flatten().double() * count)


def test_bonus_follows_the_last_row_and_equal_laws_accept_everything():
    generator, count = torch.Generator().manual_seed(1), 50_000
    p = Sampling(1.0).probabilities(torch.randn(3, VOCAB, generator=generator)).expand(count, -1, -1)
    accepted, bonus = accept_sampled(draw(p[:, :2], generator), p[:, :2], p, generator)
    assert (accepted == 2).all()
    assert _follows(torch.bincount(bonus, minlength=VOCAB).double(), p[0, 2].double() * count)


@pytest.mark.parametrize("second", [False, True])
def test_sampled_drafts_follow_the_law_that_they_are_judged_by(loaded, second):
    """Of plain DFlash, and of DFlash 2's selector, whose law of a slot depends on the token drawn before."""
    target = loaded("llama")
    drafter = (second_drafter if second else random_drafter)(target, initializer_range=0.05)
    generator = torch.Generator().manual_seed(0)
    size, wide = 2, target.vocab_size
    hidden = torch.randn(size, target.hidden_size, generator=generator)
    draft = Draft(drafter, torch.tensor([7]), hidden, 0.5 * torch.randn(size, wide, generator=generator))
    observed, expected = torch.zeros(size, wide, dtype=torch.float64), torch.zeros(size, wide).double()
    every = torch.arange(size)
    for _ in range(2000):
        tokens, chances = draft.sampled(Sampling(0.8, 1.0, 6, generator))
        assert torch.allclose(chances.sum(-1), torch.ones(size)) and (chances[every, tokens] > 0).all()
        observed[every, tokens] += 1
        expected += chances.detach()
    for slot in range(size):
        assert len(set(observed[slot].nonzero())) > 3 and _follows(observed[slot], expected[slot])


def test_disjoint_support_rejects_at_once_and_never_emits_an_impossible_token():
    q = torch.tensor([[[1.0, 0, 0, 0, 0]]])
    p = torch.tensor([[[0, 0.5, 0.5, 0, 0], [0.2, 0.2, 0.2, 0.2, 0.2]]])
    for seed in range(20):
        accepted, token = accept_sampled(torch.tensor([[0]]), q, p, torch.Generator().manual_seed(seed))
        assert accepted.item() == 0 and token.item() in (1, 2)


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (Sampling(1.0, top_k=2), [0.625, 0.375, 0, 0]),
        (Sampling(1.0, top_p=0.6), [0.625, 0.375, 0, 0]),
        (Sampling(1.0, top_p=0.1), [1.0, 0, 0, 0]),
        (Sampling(0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    ],
)
def test_filters(sampling, wanted):
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    torch.testing.assert_close(sampling.probabilities(logits), torch.tensor(wanted))


def test_what_logits_cannot_be_divided_by_is_refused():
    for temperature in (float("nan"), float("inf"), -1.0, 1e-5, 1e300):
        with refused(InputError):
            Sampling(temperature)
    for filters in ({"top_p": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}):
        with refused(InputError):
            Sampling(1.0, **filters)


def test_the_ends_of_what_is_allowed_choose_a_token_that_has_a_chance():
    filters = ({}, {"top_p": 1e-9}, {"top_k": 1}, {"top_k": 10**9, "top_p": 0.999})
    for temperature, way, size in itertools.product((1e-4, 1.0, 1e4), filters, (1, 5)):
        logits = torch.full((400, size), 80.0)
        logits[:, 1:3] = -torch.inf
        sampling = Sampling(temperature, generator=torch.Generator().manual_seed(0), **way)
        chances, found = sampling.probabilities(logits), sampling.choose(logits)[:, None]
        torch.testing.assert_close(chances.sum(-1), torch.ones(400))
        assert (chances.gather(1, found) > 0).all() and (logits.gather(1, found) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_are_those_that_multinomial_makes(dtype):
    def seeded():
        return torch.Generator().manual_seed(1)

    logits = (4 * torch.randn(300, 500, generator=torch.Generator().manual_seed(0))).to(dtype)
    logits[:, ::7] = -torch.inf
    for temperature in (0.05, 0.7, 3.0):
        chances = torch.softmax(logits.float() / temperature, -1)
        known = torch.multinomial(chances, 1, generator=seeded())
        assert torch.equal(choose(logits, temperature, seeded()), known[:, 0])
        assert torch.equal(draw(chances.view(100, 3, 500), seeded()).view(-1, 1), known)
        assert (logits.gather(1, known) > -torch.inf).all()
    assert torch.equal(choose(logits, 0.0, None), logits.argmax(-1))


def test_sampling_without_filters_makes_four_passes_over_the_logits():
    """And none that the host waits for, as `torch.multinomial` does twice."""
    logits, generator = torch.randn(8, 1000), torch.Generator().manual_seed(0)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        Sampling(0.7, generator=generator).choose(logits)
    calls = {event.key.removeprefix("aten::"): event.count for event in seen.key_averages()}
    calls = {name: count for name, count in calls.items() if not name.startswith(("empty", "as_strided"))}
    assert calls == {"exponential_": 1, "log_": 1, "sub": 1, "argmin": 1}
