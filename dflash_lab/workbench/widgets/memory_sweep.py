"""The memory planner's sliders, and a sweep that runs beside them in a thread."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dflash_lab.errors import InputError
from dflash_lab.workbench.figures import memory_sweep as figures
from dflash_lab.workbench.figures import style
from dflash_lab.workbench.figures.memory_map import map_axes, peak_map
from dflash_lab.workbench.figures.style import escape

if TYPE_CHECKING:
    import ipywidgets
    import plotly.graph_objects as go

    from dflash_lab.memory.planner import Answer, Question
    from dflash_lab.stages.memory_sweep import MemorySweepParams, MemorySweepResult, SweepInputs


class Planner:
    """What the sliders show, without any widget: both figures and a verdict for a question."""

    def __init__(self, inputs: SweepInputs, points: Any) -> None:
        self.inputs, self.points = inputs, points
        self.batches, self.lengths = map_axes(points)
        self._peaks = lru_cache(maxsize=8)(self._compute)

    def answer(self, question: Question) -> Answer:
        """Both accounts and the largest sizes that fit."""
        from dflash_lab.memory.planner import answer

        inputs = self.inputs
        parts = (inputs.shape, inputs.drafter, inputs.extraction, inputs.training)
        return answer(question, *parts, cuda=inputs.cuda)

    def draw(self, question: Question) -> tuple[go.Figure, go.Figure, str]:
        """Return (map with the budget's contour, stacked bars, verdict as HTML)."""
        told = self.answer(question)
        peaks = self._peaks(question.vocabulary)
        chart = peak_map(self.batches, self.lengths, peaks, question.budget_gib, self.points)
        bars = {"extraction": told.extraction, "training": told.training}
        return chart, figures.account_bars(bars, question.budget_gib), verdict(question, told)

    def _compute(self, vocabulary: int) -> list[list[float]]:
        from dataclasses import replace

        from dflash_lab.memory.planner import peak_map as compute

        shape, extraction = self.inputs.shape, self.inputs.extraction
        shape = replace(shape, vocab=vocabulary) if vocabulary else shape
        return compute(shape, extraction, self.batches, self.lengths, cuda=self.inputs.cuda)


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
        lines.append(text + f"most of it: {escape(term)}, {size / 2**30:.2f} GiB")
    return "<br>".join(lines)


def planner(result: MemorySweepResult, params: MemorySweepParams) -> ipywidgets.Widget:
    """Return sliders for budget, batch, length, anchors, block, vocabulary, chunk and placement, and two
    figures.
    """
    import ipywidgets as widgets

    from dflash_lab.memory.planner import Question
    from dflash_lab.memory.training import with_chunk
    from dflash_lab.stages.memory_sweep import PLACEMENTS, sweep_inputs

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
        from dflash_lab.release import release
        from dflash_lab.stages.memory_sweep import measure_points, sweep_inputs
        from dflash_lab.workbench.progress import Stopped

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
    import polars as pl

    from dflash_lab.stages.memory_sweep import POINT_SCHEMA

    run, stop = widgets.Button(description="Run sweep"), widgets.Button(description="Stop", disabled=True)
    bar, line = widgets.IntProgress(min=0, max=1), widgets.Label()
    shown = style.live(figures.predicted_measured(result.points))

    def changed() -> None:
        bar.max, bar.value = max(sweep.total, 1), sweep.done
        finished = not sweep.running or (threading.current_thread() is sweep.thread and bool(sweep.error))
        ended = finished or (sweep.total > 0 and sweep.done >= sweep.total)
        run.disabled, stop.disabled = not ended, ended
        line.value = sweep.error or f"{sweep.done} of {sweep.total} points"
        redraw(shown, figures.predicted_measured(pl.DataFrame(sweep.rows, schema=POINT_SCHEMA)))

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

    from dflash_lab.memory.planner import ladder

    steps = sorted({*ladder(low, max(high, value), 80), value})
    return widgets.SelectionSlider(options=[(f"{step:,}", step) for step in steps], value=value)
