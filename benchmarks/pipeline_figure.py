"""The figures of the pipeline benchmark: rows a second by split, and who waited for whom in the first split.

python benchmarks/pipeline_figure.py RESULT.json FOLDER
"""

from __future__ import annotations

import sys
from typing import Any

import plotly.graph_objects as go
import polars as pl
from result_figure import figure_arguments, save_figure
from result_file import made_of, read_result, told

from dflash_lab.drafter.pipeline import TIMING_SCHEMA
from dflash_lab.views.style import BLUE, GREY
from dflash_lab.views.train_drafter import queues


def rates(found: dict[str, Any]) -> go.Figure:
    """Rows a second of one device for both sides, and of each split."""
    names = ["both on one GPU", *(f"{len(s['targets'])} + {len(s['drafters'])}" for s in found["splits"])]
    one = 1e3 / found["one_device"]["step_ms"]
    values = [one, *(len(s["drafters"]) * 1e3 / s["step_ms"] for s in found["splits"])]
    busy = [
        "",
        *(f"drafter busy {s['drafter_busy_pct']:.1f} %, limit: {s['limit']}" for s in found["splits"]),
    ]
    figure = go.Figure(
        go.Bar(x=names, y=values, text=busy, marker_color=[GREY, *[BLUE] * len(found["splits"])])
    )
    return figure.update_layout(
        title="Online training: rows a second",
        xaxis_title="target GPUs + drafter GPUs",
        yaxis_title="rows a second",
    )


def main() -> None:
    """Draw both."""
    args = figure_arguments(__doc__).parse_args()
    found = read_result(args.result, "pipeline.py", splits=list, one_device=dict)
    with made_of(args.result, "pipeline.py"):
        diary = pl.DataFrame(found["splits"][0]["diary"], schema=TIMING_SCHEMA)
        figures = {"pipeline_rates": rates(found), "pipeline_queues": queues(diary)}
    for name, figure in figures.items():
        save_figure(figure.update_layout(template="dflash", width=900, height=500), args.folder, name)


if __name__ == "__main__":
    sys.exit(told(main))
