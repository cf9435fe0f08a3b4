"""Lossless sampled verification: accept a draft token with probability min(1, p/q), else draw from the
normalised (p - q)+.

The tokens that come out are distributed exactly as if the target had been sampled alone, whatever the drafter
proposes (Leviathan et al. 2023; Chen et al. 2023). Greedy decoding is the limit p = one-hot and is done by
comparison, not here.
"""

from __future__ import annotations

import torch

from dflash_lab.errors import InputError
from dflash_lab.target.choice import check_temperature, draw


def probabilities(
    logits: torch.Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0
) -> torch.Tensor:
    """Return fp32 sampling probabilities [..., V] of `logits` [..., V]; `top_k` 0 and `top_p` 1 switch the
    filters off.

    Top-k comes before top-p; the smallest set whose mass reaches `top_p` is kept (its first token always is).
    """
    check_temperature(temperature)
    if temperature == 0 or not 0 < top_p <= 1 or top_k < 0:
        raise InputError(
            f"temperature {temperature}, top_p {top_p}, top_k {top_k}: sampling needs temperature > 0, "
            "0 < top_p <= 1 and top_k >= 0 (0 switches top-k off)."
        )
    scores = logits if temperature == 1 else logits.float() / temperature
    if 0 < top_k < scores.shape[-1]:
        values, tokens = scores.topk(top_k, dim=-1)
        scores = torch.full_like(scores, -torch.inf).scatter(-1, tokens, values)
    chances = torch.softmax(scores, dim=-1, dtype=torch.float32)
    if top_p < 1:
        ordered, tokens = chances.sort(dim=-1, descending=True)
        ordered = torch.where(ordered.cumsum(-1) - ordered < top_p, ordered, 0.0)
        chances = torch.zeros_like(chances).scatter(-1, tokens, ordered)
        chances = chances / chances.sum(-1, keepdim=True)
    return chances


def verify_sampled(
    drafts: torch.Tensor,
    draft_chances: torch.Tensor,
    target_chances: torch.Tensor,
    generator: torch.Generator | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept a prefix of `drafts` [N, L], drawn from `draft_chances` [N, L, V], against `target_chances` [N,
    L+1, V].

    Returns the count of accepted drafts [N] and the next token [N]: drawn from the residual (p - q)+ at the
    first rejection, or from the target's last row when all were accepted.
    """
    rows, length = drafts.shape
    p = target_chances[:, :length].gather(-1, drafts[..., None])[..., 0]
    q = draft_chances.gather(-1, drafts[..., None])[..., 0]
    uniform = torch.rand(rows, length, generator=generator, device=drafts.device, dtype=q.dtype)
    accepted = (uniform * q < p).int().cumprod(-1).sum(-1).long()
    every = torch.arange(rows, device=drafts.device)
    wanted = target_chances[every, accepted]
    broken = (accepted < length)[:, None]  # after full acceptance q = 0
    refused = draft_chances[every, accepted.clamp_max(length - 1)] * broken
    residual = (wanted - refused).clamp_min(0)
    # No mass means p == q up to rounding, where a rejection has probability ~0; p itself is then the right
    # draw.
    some = residual.amax(-1, keepdim=True) > 0
    return accepted, draw(torch.where(some, residual, wanted), generator)
