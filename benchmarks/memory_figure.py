"""The figures and tables of the memory benchmark: predicted against measured, and rates under the limits.

python benchmarks/memory_figure.py benchmarks/results/<device>/memory.json docs/results --page docs/memory.md

The page's part between the lines `<!-- memory.json -->` and `<!-- /memory.json -->` is written anew.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from memory_points import brought
from result_figure import figure_arguments, save_figure
from result_file import made_of, read_result, told

from dflash_lab.errors import InputError
from dflash_lab.files import write_bytes
from dflash_lab.memory.shapes import GIB
from dflash_lab.views import style

BEGIN, END = "<!-- memory.json -->", "<!-- /memory.json -->"
COLOURS = {"extraction": style.BLUE, "training": style.ORANGE}
LEGEND = {"orientation": "v", "x": 1.02, "y": 1.0, "xanchor": "left", "yanchor": "top"}
SYMBOLS = {"random:qwen3.6-27b": "circle", "random:qwen3-8b": "square", "random:smollm2-135m": "diamond"}


def points_figure(result: Mapping[str, Any]) -> go.Figure:
    """What a batch or step brought on the device, against the error of its prediction."""
    groups: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for row in result["rows"]:
        if row["measured"]["out_of_memory"]:
            continue
        measured, predicted = brought(row, "measured"), brought(row, "analytic")
        setup = row["setup"]
        name = " x ".join(
            str(setup[key]) for key in ("batch", "length", "anchors", "block_size") if key in setup
        )
        groups.setdefault((row["what"], row["target"]), []).append(
            (measured / GIB, 100 * (predicted / measured - 1), name)
        )
    fig = go.Figure()
    for (what, target), points in groups.items():
        size, error, names = zip(*points)
        fig.add_scatter(
            x=size, y=error, text=names, mode="markers", name=f"{what}, {target.removeprefix('random:')}",
            marker={"color": COLOURS[what], "symbol": SYMBOLS[target], "size": 9},
            hovertemplate="%{text}: %{x:.3f} GiB, %{y:+.2f} %<extra></extra>",
        )  # fmt: skip
    return fig.update_layout(
        title="Memory a batch or step brings: predicted, against an H200",
        xaxis={"title": "measured (GiB)", "type": "log"},
        yaxis={"title": "predicted - measured (%)", "zeroline": True},
        template="plotly_white", width=1000, height=460, legend=LEGEND,
    )  # fmt: skip


def runs_figure(result: Mapping[str, Any]) -> go.Figure:
    """Rates of all sizes tried under each limit, in percent of the best; the planner's is ringed."""
    fig = go.Figure()
    for part, size_of in (("extraction", "token_budget"), ("training", "anchors")):
        found = result["runs"].get(part, {"limits": {}})
        for number, (limit, one) in enumerate(found["limits"].items()):
            if "compare" not in one:
                continue
            planned = str(one.get(size_of, found.get(size_of)))
            rates = {name: rate for name, rate in one["compare"]["rates"].items() if rate is not None}
            best = max(rates.values())
            ring = [3 if name == planned else 0 for name in rates]
            fig.add_scatter(
                x=[int(name) for name in rates], y=[100 * rate / best for rate in rates.values()],
                name=f"{part}, {limit} GiB", mode="lines+markers",
                line={"color": COLOURS[part], "dash": ("solid", "dash", "dot")[number % 3]},
                marker={"size": 10, "line": {"width": ring, "color": "black"}},
            )  # fmt: skip
    fig.add_hline(y=90, line={"color": style.GREY, "dash": "dot"})
    return fig.update_layout(
        title="Rate of sizes set by hand and of the planner's (ringed), as a share of the best",
        xaxis={"title": "tokens a batch (extraction), anchors a step (training)", "type": "log"},
        yaxis={"title": "of the best (%)"}, template="plotly_white", width=1000, height=460, legend=LEGEND,
    )  # fmt: skip


def tables(result: Mapping[str, Any]) -> str:
    """Return the page's part: errors, and what ran under the limits."""
    figures = result["figures"]
    lines = [
        "| error of what a batch or step brings | median | worst |",
        "|---|---|---|",
    ]
    for words, found in (("all", figures), *sorted(result["groups"].items())):
        median, worst = (found[f"{name}_error_pct"] for name in ("median", "worst"))
        name = words.replace(" random:", ", ")
        lines.append(f"| {name}, {found['points']} points | {median:.2f} % | {worst:.1f} % |")
    lines += ["", "![error of the predictions by size](results/memory.png)", ""]
    for part, unit, word in (("extraction", "batches", "tokens a batch"), ("training", "steps", "anchors")):
        found = result.get("runs", {}).get(part, {"limits": {}})
        if not found["limits"]:
            continue
        lines += [
            f"| {part} under | planner's {word} | {unit} run | out of memory | peak | of the best |",
            "|---|---|---|---|---|---|",
        ]
        for limit, one in found["limits"].items():
            size = one.get("token_budget", found.get("anchors"))
            share = f"{one['share_of_best_pct']} %" if "share_of_best_pct" in one else "not compared"
            ran = one["planned"]
            lines.append(
                f"| {limit} GiB | {size:,} | {ran[unit]:,} | {ran['out_of_memory']} | "
                f"{one['peak_reserved_gib']} GiB | {share} |"
            )
        about = found["about"]
        lines += [
            "",
            f"Real: {about['real']}. Ballast: {about['ballast']}. Left out: {about['left out']}.",
            "",
        ]
    if "filled_batches" in figures:
        lines += [
            f"{figures['filled_batches']} batches more filled the budget to its margin; memory lacked in "
            f"{figures['filled_out_of_memory']}.",
            "",
        ]
    if any(
        "compare" in one
        for part in result.get("runs", {}).values()
        for one in part.get("limits", {}).values()
    ):
        lines += ["![rates under the limits](results/memory-runs.png)", ""]
    return "\n".join(lines)


def write_page(page: Path, text: str) -> None:
    """Put `text` between the page's two lines."""
    old = page.read_text()
    if old.count(BEGIN) != 1 or old.count(END) != 1:
        raise InputError(f"{page}: needs one line {BEGIN} and one {END} after it.")
    head, rest = old.split(BEGIN)
    write_bytes(page, f"{head}{BEGIN}\n{text}{END}{rest.split(END)[1]}".encode())


def main() -> None:
    """Write the figures and the page's tables."""
    parser = figure_arguments(__doc__)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    result = read_result(args.result, "memory.py", figures=dict, rows=list, groups=dict)
    with made_of(args.result, "memory.py"):
        figures = {"memory": points_figure(result)}
        if result.get("runs"):
            figures["memory-runs"] = runs_figure(result)
        text = tables(result)
    for name, fig in figures.items():
        save_figure(fig, args.folder, name)
    if args.page:
        write_page(args.page, text)


if __name__ == "__main__":
    sys.exit(told(main))
