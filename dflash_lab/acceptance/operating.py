"""Which block size and which tree budget pay on this machine: chosen on a dev part of the answers,
reported on the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from dflash_lab.acceptance.costs import measure_costs, measure_fixed_costs
from dflash_lab.acceptance.offline_report import OfflineReport
from dflash_lab.acceptance.prompts import split_dev
from dflash_lab.acceptance.static_decode import Workspace
from dflash_lab.acceptance.study import Study
from dflash_lab.acceptance.whatif import Costs, operating_points
from dflash_lab.drafter.model import Drafter
from dflash_lab.target.model import Target

BLOCK_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32)


class Operating(NamedTuple):
    """`costs`: see `costs.measure_costs`. `points`: expected speed-up of each block size and budget by the
    dev part's tau, best first. `budgets`: `part`, `budget`, `tau`, `low`, `high`. `block_size`, `budget`
    (0: no tree measured): the best.
    """

    costs: pl.DataFrame
    points: pl.DataFrame
    budgets: pl.DataFrame
    block_size: int
    budget: int


def measure_operating_points(
    target: Target,
    drafter: Drafter,
    report: OfflineReport,
    *,
    dev_share: float,
    tree_steps: bool,
    context_tokens: int,
    repeats: int,
    workspace: Workspace | None = None,
    on_point: Callable[[int, int], None] | None = None,
) -> Operating:
    """Measure what rounds cost, and combine it with what the offline report says they give.

    tree_steps: also time target steps as wide as the trees; else their cost is extrapolated from the chains'
    widths. workspace: measure decoding at fixed shapes.
    """
    sizes = sorted({*(size for size in BLOCK_SIZES if size < report.block_size), report.block_size})
    wide = (report.block_size + budget for budget in report.budgets if tree_steps)
    options: dict[str, Any] = dict(
        block_sizes=sizes,
        budgets=report.budgets,
        context_tokens=context_tokens,
        repeats=repeats,
        on_point=on_point,
    )
    if workspace is not None:
        costs = measure_fixed_costs(workspace, drafter, **options)
    else:
        costs = measure_costs(target, drafter, widths=sorted({1, *sizes, *wide}), **options)
    dev, test = split_dev(report.num_answers, dev_share)
    taus = [(size, 0, report.tau(block_size=size, answers=dev).mean) for size in sizes]
    taus += [(report.block_size, budget, report.tau(budget, answers=dev).mean) for budget in report.budgets]
    known = pl.DataFrame(taus, schema=["block_size", "budget", "tau"], orient="row")
    points = operating_points(Costs.from_frame(costs, replay=target.is_hybrid), known)
    chains, trees = points.filter(pl.col("budget") == 0), points.filter(pl.col("budget") > 0)
    return Operating(
        costs,
        points,
        _by_part(report, {"dev": dev, "test": test, "all": None}),
        int(chains["block_size"][0]),
        int(trees["budget"][0]) if trees.height else 0,
    )


def _by_part(report: OfflineReport, parts: dict[str, list[int] | None]) -> pl.DataFrame:
    rows = []
    for part, answers in parts.items():
        for budget in (0, *report.budgets):
            tau = report.tau(budget, answers=answers)
            rows.append((part, budget, tau.mean, tau.interval.low, tau.interval.high))
    return pl.DataFrame(rows, schema=["part", "budget", "tau", "low", "high"], orient="row")


def typical_context(asked: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> int:
    """Return the median of prompt and half an answer, in tokens."""
    lengths = sorted(len(ids) + len(tokens) // 2 for ids, tokens in zip(asked, answers))
    return max(8, lengths[len(lengths) // 2])


def speeds(studies: Mapping[str, Study], size: int, best_size: int) -> tuple[dict[str, float], str]:
    """Return figures of how much faster than plain decoding each method was, and a sentence on the fastest
    chain: blocks of `size` slots (``trained``) or of `best_size` (``best block``).
    """
    plain = studies["plain"].seconds_per_token
    faster = {name: plain / study.seconds_per_token for name, study in studies.items() if name != "plain"}
    chains = {name: faster[name] for name in ("trained", "best block") if name in faster}
    best = max(chains, key=chains.__getitem__)
    figures = {
        "plain_ms_per_token": round(1e3 * plain, 3),
        "speedup_chain": round(chains[best], 4),
        "speedup_trained_block": round(faster["trained"], 4),
    }
    if "tree" in faster:
        figures["speedup_tree"] = round(faster["tree"], 4)
    return figures, speed_sentence(studies[best], size if best == "trained" else best_size, 1e3 * plain)


def speed_sentence(study: Study, size: int, plain_ms: float) -> str:
    """Say how fast `study` was at block size `size` against `plain_ms` a plain step, and why it was slower
    if it was.
    """
    tau = study.tau().pooled
    rounds = sum(len(a.rounds) for a in study.answers)
    round_ms = 1e3 * sum(a.seconds for a in study.answers) / max(1, rounds)
    shares = ", ".join(
        f"{phase} {100 * share:.0f} %" for phase, share in study.phase_share().items() if share > 0
    )
    paid, speed = round_ms / plain_ms, plain_ms / (1e3 * study.seconds_per_token)
    head = f"At block size {size} a round took {round_ms:.1f} ms ({shares}) and gave {tau:.2f} tokens; "
    head += f"a plain step took {plain_ms:.1f} ms."
    if speed >= 1:
        return f"{head} Speculative decoding was {speed:.2f} times as fast."
    reason = f"a round costs {paid:.2f} plain steps, so it pays only above tau {paid:.2f}; "
    return f"{head} It was slower ({speed:.2f} times): {reason}this drafter reaches {tau:.2f} there."
