"""What a round costs on this machine: a target step by its width, a draft by its block size, a tree by its
budget.

A speed-up is tau over cost, so these few milliseconds decide whether a longer block or a larger tree pays.
Each is the median of a few repeats after one warm-up, with the device drained around it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import polars as pl
import torch

from dflash_lab.acceptance.proposals import Proposer
from dflash_lab.acceptance.target_run import TargetRun
from dflash_lab.drafter.model import Drafter
from dflash_lab.target.model import Target

SCHEMA = {"what": pl.String, "size": pl.Int64, "ms": pl.Float64}


def median_ms(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median milliseconds of `call` after one warm-up."""
    timings = []
    for _ in range(repeats + 1):
        _drain(device)
        start = time.perf_counter()
        call()
        _drain(device)
        timings.append(1e3 * (time.perf_counter() - start))
    return statistics.median(timings[1:])


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def measure_costs(
    target: Target,
    drafter: Drafter,
    *,
    widths: Sequence[int],
    block_sizes: Sequence[int],
    budgets: Sequence[int] = (),
    context_tokens: int = 128,
    repeats: int = 5,
) -> pl.DataFrame:
    """Return `what`, `size`, `ms`: ``step`` (target on that many tokens, rolled back), ``draft`` (block
    size), ``build``.

    A step includes choosing the tokens and forgetting them all again. On a hybrid target keeping some of them
    runs those once more, which costs another step of their width (see `whatif.round_ms`).
    """
    head = target.head
    device = target.device
    rows: list[tuple[str, int, float]] = []
    tokens = torch.arange(context_tokens, device=device) % target.vocab_size
    with TargetRun(target, drafter.config.tap_ids) as run:
        taps = run.step(tokens, certain=True).taps
        run.commit(context_tokens)
        assert taps is not None

        def step(width: int) -> None:
            head.logits(run.step(tokens[:1].expand(width)).normed).argmax(-1).tolist()
            run.commit(0)

        rows += [("step", width, median_ms(partial(step, width), device, repeats)) for width in widths]
    proposer = Proposer(drafter, head)
    proposer.extend(taps)

    def draft(size: int) -> None:
        proposer.extend(taps[:2])
        proposer.draft(tokens[:1], size).greedy().tolist()
        proposer.cache.crop(context_tokens)

    rows += [("draft", size, median_ms(partial(draft, size), device, repeats)) for size in block_sizes]
    longest = proposer.draft(tokens[:1], max(block_sizes))
    rows += [
        ("build", budget, median_ms(partial(longest.tree, budget), device, repeats)) for budget in budgets
    ]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")
