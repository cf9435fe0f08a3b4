"""The figure of the loss benchmark: time against extra memory, every way to compute the loss a point.

python benchmarks/loss_figure.py RESULT.json FOLDER
"""

from __future__ import annotations

import math
import sys
from typing import Any

import plotly.graph_objects as go
from result_figure import figure_arguments, save_figure
from result_file import made_of, read_result, told

# what a row of the table computes, by the end of its name
KINDS = [
    ("CE + KL + CAP", "CE + KL + CAP + metrics", "circle", "#1f77b4"),
    ("shared target rows", "CE + KL + CAP + metrics", "circle", "#1f77b4"),
    ("CE + KL", "CE + KL", "diamond", "#d62728"),
    ("KL only", "KL alone", "square", "#9467bd"),
    ("CE only", "CE alone", "triangle-up", "#2ca02c"),
    ("CE", "CE alone", "triangle-up", "#2ca02c"),
]
NAMES = {
    "fused, triton, CE + KL + CAP": "fused (Triton)",
    "fused, compile, CE + KL + CAP": "fused (compile)",
    "fused, torch, CE + KL + CAP": "fused (plain torch)",
    "fused, triton, CE": "fused (Triton)",
    "fused, compile, CE": "fused (compile)",
    "fused, torch, CE": "fused (plain torch)",
    "fused, shared target rows": "fused, anchors in 8k tokens",
    "naive full logits, CE + KL": "naive full logits",
    "checkpointed chunks of 1,024, CE + KL": "checkpointed chunks",
    "Liger fused linear CE, CE only": "Liger",
    "speculators fused KL, KL only": "speculators",
}


def figure(result: dict[str, Any]) -> go.Figure:
    """Build the figure from a result of benchmarks/loss.py made on a device that counts memory."""
    groups: dict[str, list[tuple[str, float, float, str, str]]] = {}
    for name, row in result["table"].items():
        if row.get("extra_gib") is None:
            continue
        _, kind, symbol, color = next(entry for entry in KINDS if name.endswith(entry[0]))
        groups.setdefault(kind, []).append((NAMES[name], row["extra_gib"], row["ms"], symbol, color))
    fig = go.Figure()
    for kind, points in groups.items():
        names, gib, ms, symbols, colors = zip(*points)
        fig.add_scatter(
            x=gib, y=ms, text=names, name=kind, mode="markers+text",
            marker={"symbol": symbols[0], "size": 11, "color": colors[0]},
            textposition="middle right" if kind == "CE alone" else "middle left",
            hovertemplate="%{text}: %{y:.0f} ms, %{x:.2f} GiB<extra></extra>",
        )  # fmt: skip
    shape, rate = result["shape"], result["runs"][0]["matmul_tflops"]
    one = 2 * shape["positions"] * shape["vocab"] * shape["hidden"] / rate / 1e9
    for count, label in ((3, "3 matmuls (CE + KL)"), (2, "2 matmuls (CE)")):
        level = count * one
        fig.add_shape(
            type="line", xref="paper", x0=0, x1=1, y0=level, y1=level, line={"dash": "dot", "color": "grey"}
        )
        fig.add_annotation(  # annotations take the logarithm on a logarithmic axis, shapes the value
            text=f"{label}, at the held rate", xref="paper", x=1, xanchor="right",
            y=math.log10(level), yanchor="bottom", showarrow=False, font={"color": "grey"},
        )  # fmt: skip
    device = result["runs"][0]["provenance"]["device"]["device"]
    fig.update_layout(
        title=f"Draft loss: {shape['positions']:,} positions x {shape['vocab']:,} tokens, {device}",
        xaxis={"title": "peak memory beyond the inputs (GiB)", "type": "log", "range": [-0.6, 2.2],
               "tickvals": [0.5, 1, 2, 5, 10, 20, 50, 100]},
        yaxis={"title": "time (ms)", "type": "log", "range": [2.2, 3.25],
               "tickvals": [200, 300, 400, 600, 800, 1200, 1600]},
        legend={"orientation": "h", "x": 0, "y": 1.0, "xanchor": "left", "yanchor": "bottom"},
        template="plotly_white", width=1000, height=560, margin={"t": 90, "r": 30},
    )  # fmt: skip
    return fig


def main() -> None:
    """Draw the result."""
    args = figure_arguments(__doc__).parse_args()
    result = read_result(args.result, "loss.py", table=dict, shape=dict, runs=list)
    with made_of(args.result, "loss.py"):
        fig = figure(result)
    save_figure(fig, args.folder, "loss")


if __name__ == "__main__":
    sys.exit(told(main))
