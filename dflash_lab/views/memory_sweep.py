"""Figures of memory, the planner's sliders, and a sweep that runs beside them."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
import polars as pl

from dflash_lab.errors import InputError
from dflash_lab.memory.account import Account
from dflash_lab.memory.planner import Answer, Question, answer, ladder, predicted_peaks
from dflash_lab.memory.shapes import GIB
from dflash_lab.memory.training import with_chunk
from dflash_lab.stages.memory_sweep import PLACEMENTS, POINT_SCHEMA, measure_points, sweep_inputs
from dflash_lab.views import style
from dflash_lab.views.style import BLUE, GREEN, GREY, LOG_AXIS, ORANGE, PURPLE, RED, SEQUENTIAL, SKY, escape

if TYPE_CHECKING:
    import ipywidgets

    from dflash_lab.stages.memory_sweep import MemorySweepParams, MemorySweepResult, SweepInputs

MAP_STEPS = 15


def peak_map(
    batches: Sequence[int],
    lengths: Sequence[int],
    gib: Sequence[Sequence[float]],
    budget_gib: float,
    points: pl.DataFrame | None = None,
) -> go.Figure:
    """Predicted peak over batch (across) and length (up), with the budget's contour and the measured points.

    `gib` has a row a length. Colour is logarithmic.
    """
    levels = [[math.log10(max(value, 1e-6)) for value in row] for row in gib]
    flat = [value for row in gib for value in row]
    ticks = _ticks(min(flat), max(flat))
    crossed = min(flat) <= budget_gib <= max(flat)
    figure = go.Figure(
        go.Heatmap(
            x=list(batches),
            y=list(lengths),
            z=levels,
            customdata=[list(row) for row in gib],
            colorscale=SEQUENTIAL,
            colorbar={
                "title": "GiB",
                "tickvals": [math.log10(t) for t in ticks],
                "ticktext": [f"{t:g}" for t in ticks],
            },
            hovertemplate="batch %{x:,} x %{y:,} tokens<br>predicted %{customdata:.2f} GiB<extra></extra>",
            name="predicted",
        )
    )
    figure.add_contour(
        x=list(batches),
        y=list(lengths),
        z=levels,
        contours={
            "start": math.log10(budget_gib),
            "end": math.log10(budget_gib),
            "size": 1,
            "coloring": "none",
        },
        line={"color": RED, "width": 3},
        showscale=False,
        hoverinfo="skip",
        name="budget",
        showlegend=crossed,
    )
    tried = pl.col("measured_gib").is_not_null() | pl.col("out_of_memory")
    rows = points.filter(tried).to_dicts() if points is not None else []
    figure.add_scatter(
        x=[row["batch"] for row in rows],
        y=[row["length"] for row in rows],
        mode="markers",
        marker={
            "symbol": ["x" if row["out_of_memory"] else "circle-open" for row in rows],
            "color": "white",
            "size": 9,
            "line": {"width": 2, "color": "white"},
        },
        customdata=[_measured_text(row) for row in rows],
        hovertemplate="%{x:,} x %{y:,}: %{customdata}<extra></extra>",
        name="measured",
        showlegend=False,
    )
    figure.update_layout(
        title="Predicted peak; " + _budget_words(budget_gib, crossed, fits=max(flat) <= budget_gib),
        xaxis={"title": "batch", "type": "log", "tickvals": _powers(batches)},
        yaxis={"title": "length, tokens", "type": "log", "tickvals": _powers(lengths)},
    )
    return figure


def map_axes(points: pl.DataFrame) -> tuple[list[int], list[int]]:
    """Return the batches and lengths that a map of these points spans: the grid and somewhat beyond."""
    batch, length = points.select(pl.col("batch", "length").max()).row(0)
    return ladder(1, max(batch * 8, 64), MAP_STEPS), ladder(16, max(length * 4, 4096), MAP_STEPS)


def budget_map(inputs: SweepInputs, points: pl.DataFrame, budget_gib: float | None = None) -> go.Figure:
    """The map of a finished stage, spanning its grid and somewhat beyond."""
    budget = budget_gib or inputs.budget_gib
    batches, lengths = map_axes(points)
    gib = predicted_peaks(inputs.shape, inputs.extraction, batches, lengths, cuda=inputs.cuda)
    return peak_map(batches, lengths, gib, budget, points)


def _budget_words(budget_gib: float, crossed: bool, *, fits: bool) -> str:
    if crossed:
        return f"the red line is the budget of {budget_gib:.3g} GiB"
    return f"{'all' if fits else 'nothing'} here fits the budget of {budget_gib:.3g} GiB"


def _measured_text(row: Mapping[str, Any]) -> str:
    if row["out_of_memory"]:
        return "did not fit"
    return f"measured {row['measured_gib']:.2f} GiB, predicted {row['analytic_gib']:.2f}"


def _ticks(low: float, high: float) -> list[float]:
    steps = [m * 10.0**e for e in range(-4, 5) for m in (1, 2, 5)]
    return [step for step in steps if low <= step <= high] or [high]


def _powers(values: Sequence[int]) -> list[int]:
    return [2**power for power in range(0, 21) if min(values) <= 2**power <= max(values)]


# Terms as stacked bars, prediction against measurement, batches that fit, advice

# Colour and order of the terms in a bar, by what they are.
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "weights": (BLUE, ("target weights", "head and embedding", "drafter weights", "gathered weights")),
    "optimizer": (PURPLE, (
        "fp32 masters", "optimizer moments", "gradients", "gathered gradients", "selector gradients",
        "update temporaries",
    )),
    "captured states": (GREEN, (
        "captured states", "stored hidden states", "packed states", "packed states in flight",
        "target final states", "rows ahead", "rows on their way", "noisy states",
        "recorded forward's states", "fc output and its norm",
    )),
    "activations": (SKY, (
        "embedded tokens", "residual stream", "norms", "attention", "gated delta net",
        "gated delta net chunk states", "MLP", "block states", "draft layers: norms",
        "draft layers: attention", "draft layers: MLP", "draft layers: convolutions",
        "draft layers: stream", "draft layers: inputs", "gradients inside the backward",
        "target's forward of a row",
    )),
    "logits and loss": (ORANGE, (
        "logits", "logits of one chunk", "softmax and its gradient", "selector's chunk", "loss inputs",
    )),
    "cache, mask, positions": (RED, ("cache", "mask", "positions")),
    "workspace and fragments": (GREY, (
        "workspace", "fragmentation", "recorded forward's pool", "outside torch",
    )),
}  # fmt: skip


def account_bars(bars: Mapping[str, Account], budget_gib: float) -> go.Figure:
    """One stacked bar an account, a segment a term; what fits ends before the dashed line."""
    formulas = {label: account.formulas for label, account in bars.items()}
    sizes = {
        label: {term: size / GIB for term, size in account.terms.items()} for label, account in bars.items()
    }
    return _stacked(sizes, formulas, budget_gib)


def term_bars(terms: pl.DataFrame, budget_gib: float) -> go.Figure:
    """The stage's accounts side by side: extraction and training."""
    sizes: dict[str, dict[str, float]] = {}
    formulas: dict[str, dict[str, str]] = {}
    for row in terms.iter_rows(named=True):
        label = row["title"].replace(", ", "<br>")
        sizes.setdefault(label, {})[row["term"]] = row["gib"]
        formulas.setdefault(label, {})[row["term"]] = row["formula"]
    return _stacked(sizes, formulas, budget_gib)


def predicted_measured(points: pl.DataFrame) -> go.Figure:
    """What a batch brings, predicted against measured; on the line is right."""
    measured = points.filter(pl.col("measured_moving").is_not_null() & ~pl.col("out_of_memory"))
    figure = go.Figure()
    ends = [1e-3, 1e-2]
    if measured.height:
        low, high = measured["measured_moving"].min(), measured["measured_moving"].max()
        ends = [float(low) / GIB / 2, float(high) / GIB * 2]  # type: ignore[arg-type]
    figure.add_scatter(
        x=ends, y=ends, mode="lines", line={"color": GREY, "dash": "dot"}, name="exact", hoverinfo="skip"
    )
    rows = measured.with_columns(
        predicted=pl.col("analytic_moving") / GIB, measured=pl.col("measured_moving") / GIB
    ).to_dicts()
    figure.add_scatter(
        x=[row["measured"] for row in rows],
        y=[row["predicted"] for row in rows],
        mode="markers",
        marker={"color": BLUE, "symbol": "circle", "size": 9},
        name="predicted",
        customdata=[
            [row["batch"], row["length"], 100 * (row["predicted"] / row["measured"] - 1)] for row in rows
        ],
        hovertemplate="%{customdata[0]:,} x %{customdata[1]:,}<br>measured %{x:.4f} GiB"
        "<br>predicted %{y:.4f} GiB (%{customdata[2]:+.1f} %)<extra></extra>",
    )
    figure.update_layout(
        title="What a batch brings: predicted against measured",
        xaxis={"title": "measured, GiB", **LOG_AXIS},
        yaxis={"title": "predicted, GiB", **LOG_AXIS},
    )
    return figure


def step_bars(steps: pl.DataFrame, budget_gib: float) -> go.Figure:
    """Peaks of training steps over anchors x block size: predicted, and as measured."""
    table = steps.sort(pl.col("anchors") * pl.col("block_size"), "block_size", "order")
    several = steps.select("anchors", "block_size").is_duplicated().any()  # measured in both orders
    labels = [
        f"{row['anchors']} x {row['block_size']}" + (f", {row['order']}" if several and row["order"] else "")
        for row in table.iter_rows(named=True)
    ]
    figure = go.Figure()
    for column, name, colour in (("analytic_gib", "predicted", BLUE), ("measured_gib", "measured", GREEN)):
        figure.add_bar(
            x=labels,
            y=table[column].to_list(),
            name=name,
            marker_color=colour,
            hovertemplate=f"%{{x}}: %{{y:.3f}} GiB {name}<extra></extra>",
        )
    figure.add_hline(y=budget_gib, line={"color": RED, "dash": "dash"})
    top = max(table["analytic_gib"], default=1.0)
    high = max(top, budget_gib) if budget_gib < 4 * top else top
    figure.update_layout(
        title=f"Peak of a training step; the red line is {budget_gib:.4g} GiB",
        xaxis={"title": "anchors x block size", "type": "category"},
        yaxis={"title": "GiB", "range": [0, 1.12 * high]},
    )
    return figure


def bucket_bars(buckets: pl.DataFrame, budget_gib: float) -> go.Figure:
    """The largest batch of each length bucket, and what the plan takes of it (the rate is flat beyond)."""
    edges = [f"{length:,}" for length in buckets["length"]]
    figure = go.Figure()
    for column, name, colour in (("batch", "fits", SKY), ("planned", "planned", BLUE)):
        figure.add_bar(
            x=edges,
            y=buckets[column].to_list(),
            name=name,
            marker_color=colour,
            text=[f"{value:,}" for value in buckets[column]],
            customdata=[[escape(row["limited_by"]), row["gib"]] for row in buckets.iter_rows(named=True)],
            hovertemplate=f"up to %{{x}} tokens: %{{y:,}} rows {name}<br>limited by %{{customdata[0]}}"
            "<br>%{customdata[1]:.2f} GiB at the largest<extra></extra>",
        )
    figure.update_layout(
        title=f"Largest batch by length under {budget_gib:.4g} GiB",
        barmode="overlay",
        xaxis={"title": "longest sample of the batch, tokens", "type": "category"},
        yaxis={"title": "rows", "type": "log", "dtick": 1},
    )
    return figure


def advice_bars(advice: pl.DataFrame, what: str) -> go.Figure:
    """What each change gives, ranked; green fits the budget by itself."""
    table = advice.filter(pl.col("what") == what).reverse()
    rows = table.to_dicts()
    figure = go.Figure(
        go.Bar(
            y=[escape(row["name"]) for row in rows],
            x=[max(row["saves_gib"], 0.0) for row in rows],
            orientation="h",
            marker_color=[_advice_colour(row) for row in rows],
            text=[_advice_text(row) for row in rows],
            textposition="outside",
            cliponaxis=False,
            customdata=[[row["peak_gib"], escape(row["why"])] for row in rows],
            hovertemplate="%{y}: %{x:.2f} GiB less, peak %{customdata[0]:.2f} GiB<br>"
            "%{customdata[1]}<extra></extra>",
        )
    )
    figure.update_layout(
        title=f"What each change gives ({what}); green fits by itself, grey is not built in",
        xaxis_title="GiB less at the peak",
        height=max(320, 60 + 26 * len(rows)),
        margin={"r": 140},
    )
    return figure


def _stacked(
    sizes: Mapping[str, Mapping[str, float]],
    formulas: Mapping[str, Mapping[str, str]],
    budget_gib: float,
) -> go.Figure:
    """Every known term is a trace, whether it is there or not, so that a live figure keeps its traces."""
    labels = list(sizes)
    known = [(group, colour, term) for group, (colour, terms) in GROUPS.items() for term in terms]
    others = sorted({term for bar in sizes.values() for term in bar} - {term for *_, term in known})
    figure = go.Figure()
    shown: set[str] = set()
    for group, colour, term in [*known, *(("other", GREY, term) for term in others)]:
        values = [sizes[label].get(term, 0.0) for label in labels]
        first = group not in shown and any(values)
        shown |= {group} if first else set()
        figure.add_bar(
            x=labels,
            y=values,
            name=group,
            legendgroup=group,
            showlegend=first,
            marker={"color": colour, "line": {"width": 0.5, "color": "white"}},
            customdata=[[term, escape(formulas[label].get(term, ""))] for label in labels],
            hovertemplate="%{customdata[0]}: %{y:.3f} GiB<br>%{customdata[1]}<extra></extra>",
        )
    figure.add_hline(
        y=budget_gib,
        line={"color": RED, "dash": "dash"},
        annotation_text=f"budget {budget_gib:.4g} GiB",
        annotation_position="top left",
    )
    top = max((sum(bar.values()) for bar in sizes.values()), default=1.0)
    # A budget far above everything would flatten the bars: the line then lies outside the view.
    high = max(top, budget_gib) if budget_gib < 4 * top else top
    figure.update_layout(
        title="What fills the memory at the peak",
        barmode="stack",
        bargap=0.35,
        yaxis={"title": "GiB", "range": [0, 1.12 * high]},
        legend={"orientation": "v", "x": 1.02, "xanchor": "left", "y": 1.0, "yanchor": "top"},
        margin={"r": 190},
    )
    return figure


def _advice_colour(row: Mapping[str, Any]) -> str:
    if not row["built_in"]:
        return GREY
    return GREEN if row["fits"] else SKY


def _advice_text(row: Mapping[str, Any]) -> str:
    if row["saves_gib"] <= 1e-3:
        return "no help"
    other = "" if row["same_goal"] else ", another run"
    return f"{row['saves_gib']:.2f} GiB, {row['time_pct']:+.0f} % time{other}"


# The planner's sliders, and a sweep that runs beside them in a thread


class Planner:
    """What the sliders show, without any widget: both figures and a verdict for a question."""

    def __init__(self, inputs: SweepInputs, points: Any) -> None:
        self.inputs, self.points = inputs, points
        self.batches, self.lengths = map_axes(points)
        self._peaks = lru_cache(maxsize=8)(self._compute)

    def answer(self, question: Question) -> Answer:
        """Both accounts and the largest sizes that fit."""
        inputs = self.inputs
        parts = (inputs.shape, inputs.drafter, inputs.extraction, inputs.training)
        return answer(question, *parts, cuda=inputs.cuda)

    def draw(self, question: Question) -> tuple[go.Figure, go.Figure, str]:
        """Return (map with the budget's contour, stacked bars, verdict as HTML)."""
        told = self.answer(question)
        peaks = self._peaks(question.vocabulary)
        chart = peak_map(self.batches, self.lengths, peaks, question.budget_gib, self.points)
        bars = {"extraction": told.extraction, "training": told.training}
        return chart, account_bars(bars, question.budget_gib), verdict(question, told)

    def _compute(self, vocabulary: int) -> list[list[float]]:
        shape, extraction = self.inputs.shape, self.inputs.extraction
        shape = replace(shape, vocab=vocabulary) if vocabulary else shape
        return predicted_peaks(shape, extraction, self.batches, self.lengths, cuda=self.inputs.cuda)


def verdict(question: Question, told: Answer) -> str:
    """Say in two lines of HTML what fits."""
    lines = []
    for name, account, fits, most in (
        (
            f"extraction {question.batch} x {question.length:,}",
            told.extraction,
            told.extraction_fits,
            f"largest batch {told.largest_batch:,}",
        ),
        (
            f"training {question.anchors} x {question.block_size}",
            told.training,
            told.training_fits,
            f"most anchors {told.largest_anchors:,}",
        ),
    ):
        word = "fits" if fits else "<span style='color:#D55E00'>does not fit</span>"
        term, size = account.largest(1)[0]
        text = f"<b>{escape(name)}</b>: {account.peak_gib:.2f} GiB, {word}; {most}; "
        lines.append(text + f"most of it: {escape(term)}, {size / GIB:.2f} GiB")
    return "<br>".join(lines)


def planner(result: MemorySweepResult, params: MemorySweepParams) -> ipywidgets.Widget:
    """Return sliders for budget, batch, length, anchors, block, vocabulary, chunk and placement, and two
    figures.
    """
    import ipywidgets as widgets

    inputs = sweep_inputs(params)
    brain = Planner(inputs, result.points)
    chunk = with_chunk(inputs.training, inputs.shape.vocab, cuda=inputs.cuda).chunk
    controls: dict[str, Any] = {
        "budget_gib": widgets.FloatLogSlider(
            value=inputs.budget_gib, base=10, min=-1, max=3, step=0.01, readout_format=".2f"
        ),
        "batch": _slider(max(params.batches), 1, 4096),
        "length": _slider(max(params.lengths), 1, 65536),
        "anchors": _slider(params.anchors, 8, 4096),
        "block_size": _slider(params.block_size, 2, 64),
        "vocabulary": _slider(inputs.shape.vocab, 1024, 524288),
        "chunk": _slider(chunk, 16, 8192),
        "placement": widgets.Dropdown(options=list(PLACEMENTS), value=params.placement),
    }
    for name, control in controls.items():
        control.description = name.replace("_", " ").replace(" gib", ", GiB")
        control.style = {"description_width": "90px"}
        control.layout.width = "300px"
        if hasattr(control, "continuous_update"):
            control.continuous_update = False

    def question() -> Question:
        return Question(**{name: control.value for name, control in controls.items()})

    text = widgets.HTML()
    chart, bars, text.value = brain.draw(question())
    shown = [style.live(chart, height=360), style.live(bars, height=360)]

    def update(_change: dict[str, Any]) -> None:
        try:
            chart, bars, text.value = brain.draw(question())
        except InputError as error:
            text.value = f"<b>{escape(str(error))}</b>"
            return
        for figure, fresh in zip(shown, (chart, bars)):
            redraw(figure, fresh)

    for control in controls.values():
        control.observe(update, names="value")
    return widgets.VBox([widgets.HBox([widgets.VBox(list(controls.values())), text]), widgets.VBox(shown)])


def redraw(live: go.FigureWidget, fresh: go.Figure) -> None:
    """Bring a live figure to the state of `fresh`, which has the same traces; its size stays.

    Most traces do not change, and comparing is cheaper than setting.
    """
    with live.batch_update():
        for trace, new in zip(live.data, fresh.data, strict=True):
            wanted = new.to_plotly_json()
            if wanted != {name: value for name, value in trace.to_plotly_json().items() if name != "uid"}:
                trace.update(wanted, overwrite=True)
        live.layout.title.text = fresh.layout.title.text
        live.layout.shapes = fresh.layout.shapes
        live.layout.annotations = fresh.layout.annotations
        live.layout.yaxis.range = fresh.layout.yaxis.range


class SweepRun:
    """A sweep in a thread: start, stop between points, rows so far, and the error if there was one."""

    def __init__(self, params: MemorySweepParams, result: MemorySweepResult, changed: Any) -> None:
        self.params, self.result, self.changed = params, result, changed
        self.stopping = threading.Event()
        self.thread: threading.Thread | None = None
        self.rows: list[dict[str, Any]] = result.points.to_dicts()
        self.done, self.total, self.error = 0, 0, ""

    @property
    def running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def start(self) -> None:
        """Measure the grid again; one sweep at a time."""
        if self.running:
            return
        self.stopping.clear()
        self.error = ""
        self.thread = threading.Thread(target=self._work, name="memory-sweep", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Stop after the point that is being measured."""
        self.stopping.set()

    def _work(self) -> None:
        from dflash_lab.machine import release
        from dflash_lab.progress import Stopped

        def report(description: str, done: int, total: int, **_fields: Any) -> None:
            self.done, self.total = done, total
            self.changed()
            if self.stopping.is_set():
                raise Stopped("stopped")

        def keep(rows: list[dict[str, Any]]) -> None:
            self.rows = [dict(row) for row in rows]

        unmeasured = dict.fromkeys(("measured_gib", "measured_moving", "reserved_gib", "failed_gib"))
        fresh = {**unmeasured, "order": "", "out_of_memory": False}
        # A size that several orders measured is one point to measure again.
        start = list({(row["batch"], row["length"]): {**row, **fresh} for row in self.rows}.values())
        try:
            measure_points(self.params, sweep_inputs(self.params), start, report, each=keep)
        except Stopped:
            self.error = "stopped; what was measured stays"
        except Exception as error:  # shown, for a thread's exception reaches nobody
            self.error = f"{type(error).__name__}: {error}"
        release()
        self.changed()


def sweep_control(result: MemorySweepResult, params: MemorySweepParams) -> ipywidgets.Widget:
    """Run and stop buttons, a bar, and prediction against measurement as points come in."""
    import ipywidgets as widgets

    run, stop = widgets.Button(description="Run sweep"), widgets.Button(description="Stop", disabled=True)
    bar, line = widgets.IntProgress(min=0, max=1), widgets.Label()
    shown = style.live(predicted_measured(result.points))

    def changed() -> None:
        bar.max, bar.value = max(sweep.total, 1), sweep.done
        finished = not sweep.running or (threading.current_thread() is sweep.thread and bool(sweep.error))
        ended = finished or (sweep.total > 0 and sweep.done >= sweep.total)
        run.disabled, stop.disabled = not ended, ended
        line.value = sweep.error or f"{sweep.done} of {sweep.total} points"
        redraw(shown, predicted_measured(pl.DataFrame(sweep.rows, schema=POINT_SCHEMA)))

    sweep = SweepRun(params, result, changed)

    def start(_button: Any) -> None:
        run.disabled, stop.disabled = True, False
        line.value = "loading the target"
        sweep.start()

    def halt(_button: Any) -> None:
        line.value = "stopping after this point"
        sweep.stop()

    run.on_click(start)
    stop.on_click(halt)
    box = widgets.VBox([widgets.HBox([run, stop, bar, line]), shown])
    box.sweep = sweep
    return box


def _slider(value: int, low: int, high: int) -> ipywidgets.Widget:
    """A slider over whole numbers in even ratios, the given value among them."""
    import ipywidgets as widgets

    steps = sorted({*ladder(low, max(high, value), 80), value})
    return widgets.SelectionSlider(options=[(f"{step:,}", step) for step in steps], value=value)
