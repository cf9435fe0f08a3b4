"""Plain generation in batches, without padding and without attention masks.

All rows of a batch start together with the first tokens of their prompts, as many as the shortest has, and
then take one token a step: the next one of their own prompt while it lasts, a generated one after that. Every
row is therefore at the same position in every step. That is exact for attention and for recurrent layers
alike, where left padding changes a recurrent state and gives NaN in fully masked rows on CUDA. Prompts are
sorted by length first, and a batch ends where feeding the rest of longer prompts one by one would cost more
than a batch of its own.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import cast

import torch
from transformers import DynamicCache

from dflash_lab.errors import InputError
from dflash_lab.target.model import Target

log = logging.getLogger(__name__)
_SLACK_TOKENS = (
    16  # prompt tokens that a row may take one by one, plus a quarter of the batch's shortest prompt
)


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop_ids: Sequence[int] | None = None,
    batch: int = 32,
    progress: Callable[..., None] | None = None,
) -> list[list[int]]:
    """Continue every prompt; return the new tokens in the order of the prompts.

    A continuation ends with its stop token, which is included, or after `max_new_tokens` without one.
    temperature 0 takes the most probable token; above 0 samples from softmax(logits / temperature) with a
    generator seeded by `seed` (the draws depend on how prompts fall into batches). stop_ids: default
    `target.stop_ids`.
    """
    _check(target, prompts, max_new_tokens, temperature, batch)
    stop = torch.tensor(sorted(set(target.stop_ids if stop_ids is None else stop_ids)), device=target.device)
    generator = torch.Generator(target.device).manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    done = 0
    for rows in _batches([len(prompts[i]) for i in order], batch):
        chosen = [order[row] for row in rows]
        new = _generate_batch(
            target, [prompts[i] for i in chosen], max_new_tokens, temperature, generator, stop
        )
        for i, tokens in zip(chosen, new, strict=True):
            answers[i] = tokens
        done += len(chosen)
        if progress is not None:
            progress("generate", done, len(prompts))
    return answers


def _check(
    target: Target, prompts: Sequence[Sequence[int]], max_new: int, temperature: float, batch: int
) -> None:
    if max_new < 1 or batch < 1:
        raise InputError(f"max_new_tokens={max_new}, batch={batch}: both must be at least 1.")
    if not 0 <= temperature < float("inf"):
        raise InputError(f"temperature={temperature}: expected 0 (greedy) or a positive number.")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise InputError(f"Prompt {i} is empty: a model needs at least one token to continue.")
        if not 0 <= min(prompt) <= max(prompt) < target.vocab_size:
            raise InputError(f"Prompt {i} has token ids outside 0..{target.vocab_size - 1}.")


def _batches(lengths: list[int], batch: int) -> list[range]:
    """Cut sorted prompt lengths into runs of at most `batch` whose lengths are close."""
    runs, start = [], 0
    for i in range(1, len(lengths) + 1):
        if i == len(lengths) or i - start == batch or lengths[i] > 1.25 * lengths[start] + _SLACK_TOKENS:
            runs.append(range(start, i))
            start = i
    return runs


@torch.inference_mode()
def _generate_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new: int,
    temperature: float,
    generator: torch.Generator,
    stop: torch.Tensor,
) -> list[list[int]]:
    """Generate for prompts of similar length. R rows are alive; finished rows leave the cache when a quarter
    has.
    """
    device = target.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    shortest = int(lengths.min())
    width = int(lengths.max()) + max_new
    text = torch.zeros(len(prompts), width, dtype=torch.long, device=device)  # prompt, then what is generated
    for row, prompt in enumerate(prompts):
        text[row, : len(prompt)] = torch.tensor(prompt, device=device)
    ends = lengths + max_new  # [n] one past the last token of each row; pulled in by a stop token
    alive = torch.arange(len(prompts), device=device)  # [R] rows in the cache
    cache = DynamicCache(config=target.config)
    keyword = "cache" if "cache" in inspect.signature(target.body.forward).parameters else "past_key_values"
    tokens = text[:, :shortest]
    for position in range(shortest, width):
        out = target.body(input_ids=tokens, use_cache=True, **{keyword: cache})
        chosen = _choose(target.head.logits(out.last_hidden_state[:, -1]), temperature, generator)  # [R]
        in_prompt = position < lengths[alive]
        chosen = torch.where(in_prompt, text[alive, position], chosen)
        text[alive, position] = chosen
        stopped = ~in_prompt & torch.isin(chosen, stop)
        ends[alive] = torch.where(stopped & (ends[alive] > position), position + 1, ends[alive])
        live = ends[alive] > position + 1
        count = int(live.sum())
        if count == 0:
            break
        if count <= 0.75 * len(alive):
            kept = live.nonzero().squeeze(1)
            cache.reorder_cache(cast(torch.LongTensor, kept))
            alive, chosen = alive[kept], chosen[kept]
        tokens = chosen.unsqueeze(1)
    rows = text.tolist()
    return [rows[i][len(prompts[i]) : int(end)] for i, end in enumerate(ends.tolist())]


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """Take a token a row: logits [R, V] -> [R]."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits.float() / temperature, -1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
