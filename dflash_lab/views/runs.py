"""Several runs side by side, for the notebook `runs`: its parameters, figures, and the browser of runs."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import plotly.graph_objects as go
import polars as pl

from dflash_lab.errors import LabError, reading
from dflash_lab.params import Params, param
from dflash_lab.runs import compare_figures, compare_parameters, overview, run_status
from dflash_lab.views.style import PALETTE, escape, live, thin

if TYPE_CHECKING:
    import ipywidgets


class RunsParams(Params):
    """Parameters of `notebooks/runs.ipynb`, which is no stage: it reads runs and writes its figures alone."""

    stage: ClassVar[str] = "runs"

    root: str = param("runs", "folder that holds the runs")
    curve: str = param(
        "loss",
        "curve to lay over each other in the figure",
        choices=("loss", "accuracy", "streak", "chained_tau"),
    )
    interactive: bool = param(True, "widgets; false for headless runs")

    @property
    def folder(self) -> Path:
        """Where the notebook's figures go: beside the runs, in a folder that is none."""
        return Path(self.root) / "overview"


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


# --- The run browser: filter and sort runs, select some, see their curves together and what differs


SORTS = ("last", "run", "state", "seconds", "loss_last", "tau_trained")


def matching(table: pl.DataFrame, words: str, sort: str) -> pl.DataFrame:
    """Return the rows whose run or state contains every word, sorted; numbers and times the largest first."""
    for word in words.lower().split():
        text = pl.concat_str(["run", "state"], separator=" ").str.to_lowercase()
        table = table.filter(text.str.contains(word, literal=True))
    return table.sort(sort, "run", descending=[sort not in ("run", "state"), False], nulls_last=True)


def browser(root: Path | str = "runs") -> ipywidgets.Widget:
    """Return the browser of the runs below `root`; select one for its stages, two or more to compare them."""
    import ipywidgets as widgets

    root = Path(root)
    words = widgets.Text(placeholder="filter by name or state", layout={"width": "240px"})
    sort = widgets.Dropdown(options=SORTS, value="last", description="sort by", layout={"width": "200px"})
    metric = widgets.Dropdown(
        options=list(CURVES), value="loss", description="curve", layout={"width": "220px"}
    )
    refresh = widgets.Button(description="read again", icon="refresh")
    chosen = widgets.SelectMultiple(rows=8, description="runs", layout={"width": "98%"})
    message, table, differing, numbers = (widgets.HTML() for _ in range(4))
    figure = live(curves({}, "loss"))
    state: dict[str, Any] = {"table": overview(root)}

    def list_runs(*_: Any) -> None:
        rows = matching(state["table"], words.value, sort.value)
        kept = [name for name in chosen.value if name in rows["run"].to_list()]
        chosen.options = [(_line(row), row["run"]) for row in rows.iter_rows(named=True)]
        chosen.value = kept
        table.value = rows._repr_html_()
        message.value = html.escape(
            f"{rows.height} of {state['table'].height} runs; select one for its stages, more to compare"
        )

    def compare(*_: Any) -> None:
        try:
            frames = {name: curve(root / name, metric.value) for name in chosen.value}
        except LabError as error:
            message.value = f"<b>{html.escape(str(error))}</b>"
            return
        fresh = curves(frames, metric.value)
        with figure.batch_update():
            figure.data = []
            figure.add_traces(fresh.data)
            figure.layout.title, figure.layout.annotations = fresh.layout.title, fresh.layout.annotations
            figure.layout.yaxis.title = fresh.layout.yaxis.title
        differing.value = numbers.value = ""
        if len(chosen.value) == 1:
            differing.value = _stages(root / chosen.value[0])
        if len(chosen.value) < 2:
            return
        folders = [root / name for name in chosen.value]
        try:
            with pl.Config(tbl_rows=200, fmt_str_lengths=80):
                differing.value = (
                    "<h4>parameters that differ</h4>" + compare_parameters(folders)._repr_html_()
                )
                numbers.value = "<h4>figures</h4>" + compare_figures(folders)._repr_html_()
        except LabError as error:
            message.value = f"<b>{html.escape(str(error))}</b>"

    def read_again(*_: Any) -> None:
        state["table"] = overview(root)
        list_runs()
        compare()

    words.observe(list_runs, "value")
    sort.observe(list_runs, "value")
    chosen.observe(compare, "value")
    metric.observe(compare, "value")
    refresh.on_click(read_again)
    list_runs()
    return widgets.VBox(
        [widgets.HBox([words, sort, metric, refresh]), chosen, message, figure, differing, numbers, table]
    )


def _stages(run: Path) -> str:
    """Return the state of each stage of a run as a table, with what would be done again and why."""
    try:
        rows = [(one.folder, one.state, one.why) for one in run_status(run.name, run)]
    except LabError as error:
        return f"<b>{html.escape(str(error))}</b>"
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    head = "<tr><th>stage</th><th>state</th><th></th></tr>"
    return (
        f'<h4>stages</h4><table class="dataframe">{head}{"".join(f"<tr>{row}</tr>" for row in cells)}</table>'
    )


def _line(row: dict[str, Any]) -> str:
    tau = "" if row["tau_trained"] is None else f", tau {row['tau_trained']:.2f}"
    return f"{row['run']}: {row['state']}, {row['finished']} stages, {row['seconds']:.0f} s{tau}"
