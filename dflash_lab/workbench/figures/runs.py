"""Figures over several runs: training curves laid over each other, acceptance side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import plotly.graph_objects as go
import polars as pl

from dflash_lab.file_errors import reading
from dflash_lab.workbench.figures.style import PALETTE, escape, thin

DASHES = ("solid", "dash", "dot", "dashdot")
CURVES = {
    "loss": ("training loss", "steps"),
    "grad_norm": ("gradient norm", "steps"),
    "lr": ("learning rate", "steps"),
    "accuracy": ("share of draft tokens that are right", "metrics"),
    "streak": ("right tokens in a row from the first slot", "metrics"),
    "chained_tau": ("tokens a round, chained on stored answers", "metrics"),
}


def curve(run: Path, name: str) -> pl.DataFrame:
    """Return `step` and `value` of a run's curve (held-out records where there are), empty if it has none."""
    table = CURVES[name][1]
    path = run / "train_drafter" / f"{table}.parquet"
    empty = pl.DataFrame(schema={"step": pl.Int64, "value": pl.Float64})
    if not path.exists():
        return empty
    with reading(path, "Remove result.json beside it and run the stage again: it keeps what it has."):
        frame = pl.read_parquet(path)
    if name not in frame.columns:
        return empty
    if "kind" in frame.columns:
        frame = frame.filter(pl.col("kind") == "heldout")
    return frame.select("step", pl.col(name).cast(pl.Float64).alias("value")).drop_nulls().sort("step")


def curves(frames: Mapping[str, pl.DataFrame], name: str) -> go.Figure:
    """Lay the curves of runs over each other; a run keeps its colour and dash by its place in `frames`."""
    label = CURVES[name][0]
    fig = go.Figure()
    for place, (run, frame) in enumerate(frames.items()):
        kept = frame[thin(frame.height)] if frame.height else frame
        fig.add_scatter(
            x=kept["step"].to_numpy(),
            y=kept["value"].to_numpy(),
            name=escape(run),
            mode="lines+markers" if kept.height < 50 else "lines",
            line={
                "color": PALETTE[place % len(PALETTE)],
                "dash": DASHES[place // len(PALETTE) % len(DASHES)],
            },
            hovertemplate=f"{escape(run)}<br>step %{{x:,}}<br>{label} %{{y:.4g}}<extra></extra>",
        )
    fig.update_layout(
        title_text=label[0].upper() + label[1:], xaxis_title="optimizer step", yaxis_title=label
    )
    if not any(frame.height for frame in frames.values()):
        fig.add_annotation(
            text="no run here has this curve yet", showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5
        )
    return fig


def acceptance(overview: pl.DataFrame) -> go.Figure:
    """Compare tau of each run's drafter with that of an untrained one, in tokens a round."""
    known = overview.filter(pl.col("tau_trained").is_not_null())
    names = [escape(name) for name in known["run"]]
    fig = go.Figure()
    for column, label, colour in (
        ("tau_untrained", "untrained", PALETTE[6]),
        ("tau_trained", "trained", PALETTE[0]),
    ):
        fig.add_bar(
            x=names,
            y=known[column].to_numpy(),
            name=label,
            marker_color=colour,
            hovertemplate=f"%{{x}}<br>{label}: %{{y:.3f}} tokens a round<extra></extra>",
        )
    return fig.update_layout(
        title_text="Acceptance length by run", yaxis_title="tau (tokens a round)", xaxis_title="run"
    )
