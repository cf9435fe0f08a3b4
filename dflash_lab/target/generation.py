"""Plain generation in batches, without padding and without attention masks.

Attention-only targets on CUDA go through `slots`, which is faster by far. For all others, rows of a batch
start together with the first tokens of their prompts, as many as the shortest has, and then take one token a
step: the next one of their own prompt while it lasts, a generated one after that. Every row is therefore at
the same position in every step. That is exact for attention and for recurrent layers alike, where left
padding changes a recurrent state and gives NaN in fully masked rows on CUDA. Prompts are sorted by length
first, and a batch ends where feeding the rest of longer prompts one by one would cost more than a batch of
its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import cast

import torch

from dflash_lab.errors import InputError
from dflash_lab.target.choice import check_temperature, choose
from dflash_lab.target.kv_cache import growing_cache, run_cached
from dflash_lab.target.model import Target
from dflash_lab.target.slots import MOST_SLOTS, generate_in_slots, slot_bytes, takes_slots

log = logging.getLogger(__name__)
PLAIN_BATCH = 32
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
    batch: int = 0,
    progress: Callable[..., None] | None = None,
) -> list[list[int]]:
    """Continue every prompt; return the new tokens in the order of the prompts.

    A continuation ends with its stop token, which is included, or after `max_new_tokens` without one.
    temperature 0 takes the most probable token; above 0 samples from softmax(logits / temperature) with a
    generator seeded by `seed` (the draws depend on how prompts fall into batches). stop_ids: default
    `target.stop_ids`. batch: rows at a time; 0 takes 32, or what a CUDA device has room for.
    """
    _check(target, prompts, max_new_tokens, temperature, batch)
    stop = torch.tensor(sorted(set(target.stop_ids if stop_ids is None else stop_ids)), device=target.device)
    generator = torch.Generator(target.device).manual_seed(seed)
    if slots := _slots(target, prompts, max_new_tokens, batch):
        return generate_in_slots(
            target,
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            generator=generator,
            stop=stop,
            slots=slots,
            progress=progress,
        )
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    done = 0
    for rows in _batches([len(prompts[i]) for i in order], batch or PLAIN_BATCH):
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
    if max_new < 1 or batch < 0:
        raise InputError(f"max_new_tokens={max_new} must be at least 1, batch={batch} at least 0.")
    check_temperature(temperature)
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise InputError(f"Prompt {i} is empty: a model needs at least one token to continue.")
        if not 0 <= min(prompt) <= max(prompt) < target.vocab_size:
            raise InputError(f"Prompt {i} has token ids outside 0..{target.vocab_size - 1}.")


def usual_batch(target: Target) -> int:
    """Prompts worth handing to `generate` at once: what fills its slots, or one plain batch."""
    return MOST_SLOTS if target.device.type == "cuda" and takes_slots(target) else PLAIN_BATCH


def _slots(target: Target, prompts: Sequence[Sequence[int]], max_new: int, batch: int) -> int:
    """Slots to generate in on this device; 0: the plain way. Prompts enter slots a token a step, so they must
    not be much longer than answers.
    """
    if target.device.type != "cuda" or not prompts or not takes_slots(target):
        return 0
    if sum(map(len, prompts)) > 2 * max_new * len(prompts):
        return 0
    free, _ = torch.cuda.mem_get_info(target.device)
    free += torch.cuda.memory_reserved(target.device) - torch.cuda.memory_allocated(target.device)
    room = int(0.7 * free) // slot_bytes(target, max(map(len, prompts)) + max_new)
    if not room:
        log.warning(
            "%s: %.1f GiB free hold no prompt of %d tokens with its answer, so generation goes the slow way",
            target.name, free / 2**30, max(map(len, prompts)),
        )  # fmt: skip
    return min(batch or MOST_SLOTS, room)


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
    cache = growing_cache(target)
    tokens = text[:, :shortest]
    for position in range(shortest, width):
        # Given, for some hybrids count places wrongly by themselves.
        places = torch.arange(position - tokens.shape[1], position, device=device).expand_as(tokens)
        normed = run_cached(target, cache, tokens, places)
        chosen = choose(target.head.logits(normed[:, -1]), temperature, generator)  # [R]
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
