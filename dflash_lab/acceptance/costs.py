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
from dflash_lab.acceptance.static_decode import StaticDecoder, Workspace
from dflash_lab.acceptance.static_round import StaticRound
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
    on_point: Callable[[int, int], None] | None = None,
) -> pl.DataFrame:
    """Return `what`, `size`, `ms`: ``step`` (target on that many tokens, rolled back), ``draft`` (block
    size), ``build``.

    A step includes choosing the tokens and forgetting them all again. On a hybrid target keeping some of them
    runs those once more, which costs another step of their width (see `whatif.round_ms`).
    on_point(done, total) is called before every point.
    """
    head = target.head
    device = target.device
    rows: list[tuple[str, int, float]] = []
    total = len(widths) + len(block_sizes) + len(budgets)

    def point(what: str, size: int, call: Callable[[], Any]) -> None:
        if on_point is not None:
            on_point(len(rows), total)
        rows.append((what, size, median_ms(call, device, repeats)))

    tokens = torch.arange(context_tokens, device=device) % target.vocab_size
    with TargetRun(target, drafter.config.tap_ids) as run:
        taps = run.step(tokens, certain=True).taps
        run.commit(context_tokens)
        assert taps is not None

        def step(width: int) -> None:
            head.logits(run.step(tokens[:1].expand(width)).normed).argmax(-1).tolist()
            run.commit(0)

        for width in widths:
            point("step", width, partial(step, width))
    proposer = Proposer(drafter, head)
    proposer.extend(taps)

    def draft(size: int) -> None:
        proposer.extend(taps[:2])
        proposer.draft(tokens[:1], size).greedy().tolist()
        proposer.cache.crop(context_tokens)

    for size in block_sizes:
        point("draft", size, partial(draft, size))
    longest = proposer.draft(tokens[:1], max(block_sizes))
    for budget in budgets:
        point("build", budget, partial(longest.tree, budget))
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def _again(now: StaticRound, length: int, launch: Callable[[], None]) -> None:
    now.length.fill_(length)
    launch()


@torch.no_grad()
def measure_fixed_costs(
    workspace: Workspace,
    drafter: Drafter,
    *,
    block_sizes: Sequence[int],
    budgets: Sequence[int] = (),
    context_tokens: int = 128,
    repeats: int = 5,
    on_point: Callable[[int, int], None] | None = None,
) -> pl.DataFrame:
    """The same for decoding at fixed shapes: every phase of a round is timed as it is launched there.

    Trees are those of the largest block size; a step of width block size + budget is theirs.
    """
    device = workspace.target.device
    rows: list[tuple[str, int, float]] = []
    longest = max(block_sizes)
    points = [(1, 0), *((size, 0) for size in block_sizes), *((longest, budget) for budget in budgets)]
    for done, (size, budget) in enumerate(points):
        if on_point is not None:
            on_point(done, len(points))
        decoder = StaticDecoder(workspace, drafter if size > 1 else None, block_size=size, budget=budget)
        now = decoder.prepared(2 * context_tokens)
        times = {}
        for phase, launch in now.steps.items():
            times[phase] = median_ms(partial(_again, now, context_tokens, launch), device, repeats)
        rows.append(("step", size + budget, times["verify"] + times["commit"]))
        if size > 1 and not budget:
            rows.append(("draft", size, times["draft"]))
        if budget:
            rows.append(("build", budget, times["build"]))
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")
