"""The figure of the scaling benchmark: throughput over GPUs beside the straight line, for each part.

python benchmarks/many_gpus_figure.py RESULT.json FOLDER
"""

from __future__ import annotations

import sys
from typing import Any

import plotly.graph_objects as go
from result_figure import figure_arguments, save_figure
from result_file import made_of, read_result, told

NAMES = {"ddp": "training, DDP", "fsdp": "training, FSDP2"}


def curves(result: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Throughput by count of GPUs, as a multiple of one GPU's, for each part measured."""
    found: dict[str, dict[int, float]] = {}
    rows = result.get("extraction", [])
    if rows:
        one = rows[0]["tokens_per_s"] / rows[0]["gpus"]
        found["extraction"] = {row["gpus"]: row["tokens_per_s"] / one for row in rows}
    for row in result.get("training", []):
        for name, label in NAMES.items():
            if name in row:
                found.setdefault(label, {1: 1.0})[row["gpus"]] = row["gpus"] * row[name]["efficiency"]
    return found


def figure(result: dict[str, Any]) -> go.Figure:
    """Build the figure from a result of benchmarks/many_gpus.py."""
    found = curves(result)
    most = max(gpus for curve in found.values() for gpus in curve)
    fig = go.Figure()
    fig.add_scatter(
        x=[1, most], y=[1, most], name="as many times as GPUs", mode="lines",
        line={"color": "grey", "dash": "dot"},
    )  # fmt: skip
    for name, curve in found.items():
        share = [value / gpus for gpus, value in curve.items()]
        fig.add_scatter(
            x=list(curve), y=list(curve.values()), name=name, mode="lines+markers", customdata=share,
            hovertemplate="%{x} GPUs: %{y:.2f} times one (%{customdata:.1%})<extra>" + name + "</extra>",
        )  # fmt: skip
    name = result.get("device", {}).get("device", "")
    fig.update_layout(
        title=f"Throughput over GPUs of one machine, {name}",
        xaxis={"title": "GPUs", "tickvals": sorted({gpus for curve in found.values() for gpus in curve})},
        yaxis={"title": "throughput, times that of one GPU", "rangemode": "tozero"},
        legend={"orientation": "h", "x": 0, "y": 1.0, "xanchor": "left", "yanchor": "bottom"},
        template="plotly_white", width=760, height=480, margin={"t": 90, "r": 30},
    )  # fmt: skip
    return fig


def main() -> None:
    """Draw the result."""
    args = figure_arguments(__doc__).parse_args()
    result = read_result(args.result, "many_gpus.py", gpus=int, seconds=dict, failed=dict)
    with made_of(args.result, "many_gpus.py"):
        fig = figure(result)
    save_figure(fig, args.folder, "many_gpus")


if __name__ == "__main__":
    sys.exit(told(main))
