"""A run's journal as tables (steps, window metrics, metrics by slot), and its headline figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from dflash_lab import files
from dflash_lab.drafter.journal import BY_SLOT

if TYPE_CHECKING:
    from dflash_lab.drafter.config import DrafterConfig
    from dflash_lab.drafter.train import TrainReport
    from dflash_lab.workbench.stages.train_drafter import TrainDrafterParams

STEP_SCHEMA = {
    "step": pl.Int64,
    "loss": pl.Float64,
    "grad_norm": pl.Float64,
    "lr": pl.Float64,
    "skipped": pl.String,
}
POSITION_SCHEMA = {
    "kind": pl.String,
    "step": pl.Int64,
    "slot": pl.Int64,
    "accuracy": pl.Float64,
    "conditional": pl.Float64,
}


def step_frame(records: list[dict[str, Any]]) -> pl.DataFrame:
    """One row a step: loss, gradient norm, learning rate, and the fault of a skipped one."""
    rows = [{name: r.get(name) for name in STEP_SCHEMA} for r in records if r["kind"] == "step"]
    return pl.DataFrame(rows, schema=STEP_SCHEMA)


def metric_frame(records: list[dict[str, Any]]) -> pl.DataFrame:
    """One row a record of kind `train` or `heldout`; a metric that a kind lacks is null."""
    rows = [
        {name: _number(value) for name, value in r.items() if name not in BY_SLOT}
        for r in records
        if r["kind"] in ("train", "heldout")
    ]
    names = dict.fromkeys(
        ["kind", "step", "loss", "ce", "kl", "entropy", "accuracy", "streak", "agreement", "ece"]
    )
    names |= dict.fromkeys(name for row in rows for name in row)
    schema = {n: pl.String if n == "kind" else pl.Int64 if n == "step" else pl.Float64 for n in names}
    return pl.DataFrame([{name: row.get(name) for name in names} for row in rows], schema=schema)


def seconds_left(metrics: pl.DataFrame) -> float | None:
    """Predicted time to the end of a run: the share not done yet at the pace of its last records; None while
    fewer than two of them tell (a pause between a stop and a resumption is no pace, so it is a median).
    """
    if not {"time", "progress"} <= set(metrics.columns):
        return None
    told = metrics.filter(pl.col("kind") == "train").select("time", "progress").drop_nulls().tail(21)
    steps = told.select(pl.all().diff()).drop_nulls().filter(pl.col("progress") > 0)
    if not steps.height:
        return None
    pace = (steps["time"] / steps["progress"]).median()
    return max(0.0, 1.0 - told["progress"][-1]) * float(pace)  # type: ignore[arg-type]


def position_frame(records: list[dict[str, Any]]) -> pl.DataFrame:
    """One row a record and slot 1..B-1."""
    rows = [
        {"kind": r["kind"], "step": r["step"], "slot": slot, "accuracy": accuracy, "conditional": conditional}
        for r in records
        if r["kind"] in ("train", "heldout")
        for slot, (accuracy, conditional) in enumerate(
            zip(*(r[name] for name in BY_SLOT), strict=True), start=1
        )
    ]
    return pl.DataFrame(rows, schema=POSITION_SCHEMA)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def headline(
    params: TrainDrafterParams, report: TrainReport, config: DrafterConfig, steps: pl.DataFrame, items: Any
) -> dict[str, Any]:
    """The figures of a finished run on `items` (store or samples), with what its processes left of memory and
    rates, and in a sentence what they amount to.
    """
    from dflash_lab.extraction.store import trial_of
    from dflash_lab.workbench.judgement import of_training
    from dflash_lab.workbench.stages.train_here import MEMORY
    from dflash_lab.workbench.train_pipeline import SUMMARY

    losses = steps.filter(pl.col("loss").is_not_null())["loss"]
    measured = report.best / "metrics.json"  # absent when no held-out row could be measured
    best = files.read_json(measured) if measured.exists() else {}
    seconds = max(report.seconds, 1e-9)
    train = ~np.asarray(items.heldout, dtype=bool)
    trial = trial_of(params.store_path) if params.source == "store" else 0
    figures = {
        "steps": report.steps,
        "time_limit_s": params.time_limit_s,
        "training_samples": int(train.sum()),
        "training_tokens": int(np.asarray(items.lengths)[train].sum()),
        "anchors": params.anchors,
        "skipped_steps": report.skipped,
        "loss_first": losses[0] if len(losses) else None,
        "loss_last": losses.tail(max(1, min(10, len(losses) // 10))).mean(),
        "heldout_loss_first": report.first.get("loss"),
        "heldout_loss_last": report.last.get("loss"),
        "accuracy_first": report.first.get("accuracy"),
        "accuracy_last": report.last.get("accuracy"),
        "streak_first": report.first.get("streak"),
        "streak_last": report.last.get("streak"),
        "streak_best": best.get("streak"),
        "chained_tau_first": report.first.get("chained_tau"),
        "chained_tau_last": report.last.get("chained_tau"),
        "best_step": report.best_step,
        "labels": params.labels,
        "agreement": report.last.get("agreement"),
        "train_seconds": seconds,
        "compile_seconds": report.compile_seconds,
        "context_tokens_per_s": report.context_tokens / seconds,
        "anchors_per_s": report.blocks / seconds,
        "loader_share_pct": 100 * report.loader_share,
        "drafter_parameters": config.parameter_count,
        **files.read_json(params.folder / MEMORY),
        **(files.read_json(params.folder / SUMMARY) if params.targets else {}),
        **({"stored_samples": len(items.lengths), "stored_samples_of": trial} if trial else {}),
    }
    return {**figures, "judgement": of_training(figures)}
