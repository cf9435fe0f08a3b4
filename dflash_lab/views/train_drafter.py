"""Figures of training, its live view, and an explorer of what blocks see."""

from __future__ import annotations

import datetime
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from dflash_lab import files
from dflash_lab.drafter.journal import NAME, Reader
from dflash_lab.errors import naming
from dflash_lab.progress import duration
from dflash_lab.results import FAILURE
from dflash_lab.stages.train_drafter import (
    TrainDrafterResult,
    metric_frame,
    position_frame,
    seconds_left,
    step_frame,
)
from dflash_lab.views.style import BLUE, GREEN, GREY, LOG_AXIS, ORANGE, PURPLE, RED, SKY, escape, live, thin

if TYPE_CHECKING:
    import ipywidgets


_TERMS = {"loss": BLUE, "ce": ORANGE, "kl": GREEN, "entropy": PURPLE}
# What each term adds to the loss, its factor included; cross-entropy's and KL's show in their own lines.
_PARTS = {"loss_cap": PURPLE, "loss_tv": SKY, "loss_lk": RED, "loss_length": GREY, "loss_selector": GREEN}
_TAUS = {
    "streak": ("streak, held out", BLUE, "solid"),
    "chained_tau": ("chained tau", RED, "solid"),
    "tree16_tau": ("tau of a tree of 16", GREEN, "solid"),
    "tree64_tau": ("tau of a tree of 64", PURPLE, "solid"),
    "top4_streak": ("streak if one of 4 were enough", GREY, "dot"),
    "top16_streak": ("... of 16", GREY, "dash"),
}


def _line(
    fig: go.Figure,
    frame: pl.DataFrame,
    column: str,
    name: str,
    color: str,
    dash: str | None = None,
    **more: Any,
) -> None:
    """Add a column over the steps; `more` goes to plotly, as the row of a figure with several."""
    line = {"color": color, "dash": dash}
    fig.add_scatter(x=frame["step"], y=frame[column], name=name, line=line, **more)


def _of_kind(metrics: pl.DataFrame, kind: str) -> pl.DataFrame:
    frame = metrics.filter(pl.col("kind") == kind)
    return frame[thin(frame.height)]


def losses(steps: pl.DataFrame, metrics: pl.DataFrame) -> go.Figure:
    """The loss of each step, the window means by term (per slot, nats), and the same on held-out rows."""
    fig = go.Figure()
    good = steps.filter(pl.col("loss").is_not_null())
    good = good[thin(good.height)]
    marker = {"color": SKY, "size": 3}
    fig.add_scatter(x=good["step"], y=good["loss"], mode="markers", name="each step", marker=marker)
    for kind, dash, dotted in (("train", "solid", "dot"), ("heldout", "dash", "dashdot")):
        frame = _of_kind(metrics, kind)
        for term, color in _TERMS.items():
            shown = frame.filter(pl.col(term).is_not_null())
            if shown.height and (term != "kl" or shown["kl"].max()):
                _line(fig, shown, term, f"{term}, {kind}", color, dash)
        for part in (name for name in _PARTS if name in frame.columns and frame[name].count()):
            name = f"{part.removeprefix('loss_')} in the loss, {kind}"
            _line(fig, frame, part, name, _PARTS[part], dotted)
    for step, fault in steps.filter(pl.col("skipped").is_not_null()).select("step", "skipped").rows()[:50]:
        fig.add_vline(
            x=step,
            line={"color": RED, "width": 1},
            annotation_text=escape("skipped"),
            annotation_hovertext=escape(fault),
        )
    fig.update_layout(title="Loss by term", xaxis_title="step", yaxis_title="nats a slot")
    return fig


def accuracies(metrics: pl.DataFrame) -> go.Figure:
    """Share of right slots, and how often the target's argmax is the data token: the ceiling of hard
    labels.
    """
    fig = go.Figure()
    for kind, color in (("train", BLUE), ("heldout", ORANGE)):
        frame = _of_kind(metrics, kind)
        _line(fig, frame, "accuracy", f"accuracy, {kind}", color)
        _line(fig, frame, "ece", f"calibration error, {kind}", color, "dot")
    ceiling = metrics.filter(pl.col("agreement").is_not_null())
    if ceiling.height:
        value = float(ceiling["agreement"][-1])
        words = f"target agrees with data: {value:.1%}"
        fig.add_hline(y=value, line={"color": GREY, "dash": "dash"}, annotation_text=words)
    fig.update_layout(title="Accuracy of slots", xaxis_title="step", yaxis_title="share")
    fig.update_yaxes(range=[0, 1.02])
    return fig


def streaks(metrics: pl.DataFrame) -> go.Figure:
    """Accepted tokens a round: the streak of uniform anchors, the chained tau, and what the k best could
    reach.
    """
    fig = go.Figure()
    heldout = metrics.filter(pl.col("kind") == "heldout")
    _line(fig, _of_kind(metrics, "train"), "streak", "streak, train", SKY)
    for column, (name, color, dash) in _TAUS.items():
        if column in heldout.columns and heldout[column].count():
            _line(fig, heldout, column, name, color, dash, mode="lines+markers")
    fig.update_layout(title="Tokens a round", xaxis_title="step", yaxis_title="accepted + 1")
    fig.update_yaxes(rangemode="tozero")
    return fig


def positions(frame: pl.DataFrame, kind: str = "heldout", column: str = "accuracy") -> go.Figure:
    """Accuracy of each slot over the run; `conditional` counts only slots whose predecessors were right."""
    shown = frame.filter(pl.col("kind") == kind)
    steps = shown["step"].unique(maintain_order=True)
    steps = steps[thin(len(steps), 300)]
    grid = (
        shown.filter(pl.col("step").is_in(steps.implode()))
        .pivot(on="step", index="slot", values=column, aggregate_function="first")
        .sort("slot")
    )
    fig = go.Figure(
        go.Heatmap(
            x=[int(name) for name in grid.columns[1:]],
            y=grid["slot"].to_list(),
            z=[list(row[1:]) for row in grid.rows()],
            zmin=0,
            zmax=1,
            colorscale="Cividis",
            colorbar={"title": "share right"},
            hovertemplate="step %{x}, slot %{y}: %{z:.1%}<extra></extra>",
        )
    )
    words = "given the slots before it" if column == "conditional" else "by slot"
    fig.update_layout(title=f"Right {words}, {kind}", xaxis_title="step", yaxis_title="slot")
    fig.update_yaxes(tickmode="linear", tick0=1, dtick=max(1, grid.height // 8))
    return fig


def pace(steps: pl.DataFrame, metrics: pl.DataFrame) -> go.Figure:
    """Context tokens and anchors a second, with the learning rate and the gradient norm below, and the peak
    memory so far where the run recorded it.
    """
    train = metrics.filter(pl.col("kind") == "train")
    known = "memory_gib" in train.columns and train["memory_gib"].count() > 0
    count = 3 if known else 2
    fig = make_subplots(
        rows=count, cols=1, shared_xaxes=True, vertical_spacing=0.08, specs=[[{"secondary_y": True}]] * count
    )

    def left(row: int) -> dict[str, Any]:
        return dict(row=row, col=1, secondary_y=False)

    def right(row: int) -> dict[str, Any]:
        return dict(row=row, col=1, secondary_y=True)

    if train.height and "context_tokens" in train.columns:
        more = pl.col("seconds", "context_tokens", "blocks_seen").diff().fill_null(strategy="zero")
        rates = train.with_columns(more.name.suffix("_more")).filter(pl.col("seconds_more") > 0)
        seconds = pl.col("seconds_more")
        rates = rates[thin(rates.height)].with_columns(
            tokens=pl.col("context_tokens_more") / seconds, anchors=pl.col("blocks_seen_more") / seconds
        )
        _line(fig, rates, "tokens", "context tokens / s", BLUE, **left(1))
        _line(fig, rates, "anchors", "anchors / s", ORANGE, **right(1))
    shown = steps[thin(steps.height)]
    _line(fig, shown, "lr", "learning rate", GREEN, **left(2))
    _line(fig, shown, "grad_norm", "gradient norm", GREY, line_width=1, **right(2))
    if known:
        memory = train.filter(pl.col("memory_gib").is_not_null())
        _line(fig, memory[thin(memory.height)], "memory_gib", "peak memory", PURPLE, **left(3))
        fig.update_yaxes(rangemode="tozero", title_text="GiB", **left(3))
    fig.update_layout(title="Pace and schedule", height=260 * count)
    fig.update_xaxes(title_text="step", row=count, col=1)
    fig.update_yaxes(rangemode="tozero", title_text="tokens / s", **left(1))
    fig.update_yaxes(rangemode="tozero", title_text="anchors / s", showgrid=False, **right(1))
    fig.update_yaxes(title_text="learning rate", exponentformat="power", **left(2))
    fig.update_yaxes(**LOG_AXIS, title_text="norm", showgrid=False, **right(2))
    return fig


def mask(row: dict[str, Any], block: int = 0, kind: str = "") -> go.Figure:
    """What the slots of one block see in a layer of a kind: context tokens to the left, the own block to the
    right.
    """
    if not row["anchors"]:
        return go.Figure().update_layout(title="No document of the first row has an anchor")
    chosen = next((k for k in row["kinds"] if k["name"] == kind), row["kinds"][0])
    block = min(max(block, 0), len(row["anchors"]) - 1)
    anchor, size = row["anchors"][block], row["block_size"]
    first = max(0, anchor - 40)
    columns = [f"{p}: {escape(row['texts'][p])!s}" for p in range(first, anchor)]
    columns += [
        f"slot {k}" + (f": {escape(row['texts'][anchor])}" if k == 0 else ": mask") for k in range(size)
    ]
    context = [[int(p >= chosen["low"][block][k]) for p in range(first, anchor)] for k in range(size)]
    counted = row["slot_mask"][block]
    z = [context[k] + [2 * seen for seen in chosen["block"][k]] for k in range(size)]
    fig = go.Figure(
        go.Heatmap(
            x=columns,
            y=[f"slot {k}" + ("" if k == 0 or counted[k] else " (not counted)") for k in range(size)],
            z=z,
            zmin=0,
            zmax=2,
            colorscale=[[0, "rgba(123,128,135,0.12)"], [0.5, BLUE], [1, ORANGE]],
            showscale=False,
            xgap=1,
            ygap=1,
            hovertemplate="%{y} looks at %{x}<extra></extra>",
        )
    )
    window = f", window {chosen['window']}" if chosen["window"] else ""
    layers = ", ".join(map(str, chosen["layers"]))
    fig.update_layout(
        title=f"Anchor {anchor} in {chosen['name']} layers ({layers}{window})", yaxis_title="query"
    )
    fig.update_xaxes(tickangle=-60, title_text="key")
    fig.update_yaxes(autorange="reversed")
    return fig


def anchors(row: dict[str, Any]) -> go.Figure:
    """Where the blocks of a real document start and how far each counts."""
    fig = go.Figure()
    size = row.get("block_size", 0)
    for number, (anchor, counted) in enumerate(zip(row["anchors"], row.get("slot_mask", []), strict=False)):
        reach = sum(counted)
        fig.add_scatter(
            x=[anchor, anchor + reach],
            y=[number, number],
            mode="lines+markers",
            line={"color": BLUE if reach == size - 1 else ORANGE},
            marker={"size": [9, 4]},
            showlegend=False,
            hovertemplate=f"{escape(row['texts'][anchor])}: {reach} of {size - 1} slots count<extra></extra>",
        )
    fig.update_layout(
        title=f"Anchors of one document ({len(row['anchors'])} of the {row.get('row_blocks', 0)} in its row)",
        xaxis_title="position",
        yaxis_title="block",
    )
    return fig


def queues(frame: pl.DataFrame) -> go.Figure:
    """Rows that lay ready for the drafters over time, and how long each side waited for the other a row."""
    fig = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    start = frame["time"].min()
    colours = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
    for number, worker in enumerate(frame["worker"].unique().sort()):
        part = frame.filter(pl.col("worker") == worker).sort("turn")
        part = part[thin(part.height)]
        seconds, line = part["time"] - start, {"color": colours[number % len(colours)]}
        if part["depth"].null_count() < part.height:
            fig.add_scatter(x=seconds, y=part["depth"], name=f"ready for {worker}", line=line, row=1, col=1)
        fig.add_scatter(x=seconds, y=part["waited_ms"], name=f"{worker} waits", line=line, row=2, col=1)
    fig.update_yaxes(title_text="rows ready", rangemode="tozero", row=1, col=1)
    fig.update_yaxes(title_text="ms waited a row", rangemode="tozero", row=2, col=1)
    fig.update_xaxes(title_text="seconds", row=2, col=1)
    fig.update_layout(title="Targets and drafters: who waits for whom")
    return fig


# Live views -------------------------------------------------------------------------------------------------

VIEWS = ("losses", "positions", "streaks", "accuracies", "pace")
BUSY = 50  # times as long between drawings as a drawing takes: training may share this process


def snapshot(journal: Reader) -> tuple[list[Any], str]:
    """The figures of VIEWS as a run's journal stands, and a line of text about it."""
    records = journal.read()
    steps, metrics, places = step_frame(records), metric_frame(records), position_frame(records)
    drawn = [
        losses(steps, metrics),
        positions(places),
        streaks(metrics),
        accuracies(metrics),
        pace(steps, metrics),
    ]
    if not steps.height:
        return drawn, f"nothing recorded yet in {journal.path.parent}"
    return drawn, _stand(steps, metrics)


def _stand(steps: pl.DataFrame, metrics: pl.DataFrame) -> str:
    """Where a run is, how fast, with what memory, and when it will end."""
    last = steps.row(-1, named=True)
    loss = "skipped" if last["loss"] is None else f"{last['loss']:.4f}"
    words = [f"step {last['step']:,}: loss {loss}"]
    told = metrics.filter(metrics["kind"] == "train").tail(1).rows(named=True)
    if told and told[0].get("progress") is not None:
        now = told[0]
        words.append(f"{now['context_tokens'] / max(now['seconds'], 1e-9):,.0f} tokens/s")
        words.append(f"peak memory {now['memory_gib']:.1f} GiB")
        left = seconds_left(metrics)
        if now["progress"] >= 1:
            words.append("done")
        elif left is not None:
            end = datetime.datetime.fromtimestamp(now["time"] + left)
            words.append(f"{now['progress']:.0%} done, ends about {end:%a %H:%M} (in {duration(left)})")
    return ", ".join(words)


def ended(run: Path) -> str:
    """How a run ended early, from the failure that its stage wrote since the last line; "" if it did not."""
    failure, journal = run.parent / FAILURE, run / NAME
    with naming(failure):
        if not failure.exists():
            return ""
        if journal.exists() and failure.stat().st_mtime_ns < journal.stat().st_mtime_ns:
            return ""  # of an earlier start
    told = files.read_json(failure)
    if not isinstance(told, dict) or told.get("state") == "stopped":
        return "stopped; the same cell goes on from the last checkpoint"
    return f"failed: {str(told.get('message', ''))[:200]}"


def monitor(run: Path | str, *, follow: bool = False, every_s: float = 5.0) -> ipywidgets.Widget:
    """Show a running or finished training: `run` is `<run_dir>/train_drafter/run`. Close the widget to stop
    following it.

    Shown with `follow` before a cell that trains, it stays live while the kernel is busy: a thread reads the
    journal, and the buttons of the views work in the browser alone.
    """
    import ipywidgets as widgets

    journal = Reader(Path(run))
    following = widgets.ToggleButton(
        value=False, description="follow", tooltip=f"read the journal every {every_s:g} s"
    )
    refresh = widgets.Button(description="refresh")
    line = widgets.Label()
    view = widgets.ToggleButtons(options=VIEWS)
    places = [widgets.VBox() for _ in VIEWS]  # a figure each
    stack = widgets.Stack(places, selected_index=0)
    widgets.jslink((view, "index"), (stack, "selected_index"))
    stops = [threading.Event()]  # the last one is of the thread that follows
    one_at_a_time = threading.Lock()  # a click may come while the thread reads

    shown: list[Any] = []  # the last record drawn, and how the run ended

    def update(*_: Any, anew: bool = True) -> None:
        with one_at_a_time:
            last = [*journal.read()[-1:], end := ended(Path(run))]
            if not anew and last == shown:
                return
            drawn, where = snapshot(journal)
            shown[:], line.value = last, f"{where.split(', ends about')[0]}; {end}" if end else where
            for place, figure in zip(places, drawn, strict=True):
                old = place.children
                place.children = [live(figure)]
                for drawing in old:
                    drawing.close()

    def work(stop: threading.Event) -> None:
        took = 0.0
        while not stop.wait(max(every_s, BUSY * took)):
            began = time.perf_counter()
            try:
                update(anew=False)
            except Exception as error:  # shown, for a thread's exception reaches nobody; a disk may come back
                line.value = f"cannot read {run}: {error}"
                shown.clear()
            took = time.perf_counter() - began

    def switch(change: dict[str, Any]) -> None:
        stops[-1].set()
        if change["new"]:
            stops.append(threading.Event())
            threading.Thread(target=work, args=stops[-1:], name="training-monitor", daemon=True).start()

    update()
    refresh.on_click(update)
    following.observe(switch, "value")
    following.value = follow
    box = widgets.VBox([widgets.HBox([view, following, refresh]), line, stack])
    box.observe(lambda change: stops[-1].set(), "comm")  # closed
    return box


def mask_explorer(result: TrainDrafterResult) -> ipywidgets.Widget:
    """Step through the blocks of a real document and the kinds of layers."""
    import ipywidgets as widgets

    row = result.row
    block = widgets.IntSlider(
        description="block", min=0, max=max(0, len(row["anchors"]) - 1), continuous_update=False
    )
    kind = widgets.ToggleButtons(options=[k["name"] for k in row["kinds"]] or ["none"])
    holder = widgets.VBox([live(mask(row))])

    def update(*_: Any) -> None:
        holder.children[0].close()
        holder.children = [live(mask(row, block.value, kind.value))]

    block.observe(update, "value")
    kind.observe(update, "value")
    return widgets.VBox([widgets.HBox([block, kind]), holder])
