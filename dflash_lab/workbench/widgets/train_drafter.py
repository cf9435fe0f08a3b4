"""Live views of training: a monitor that follows a run's journal, and an explorer of what blocks see."""

from __future__ import annotations

import datetime
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_lab import files
from dflash_lab.drafter.journal import NAME
from dflash_lab.file_errors import naming
from dflash_lab.workbench.figures import train_drafter as figures
from dflash_lab.workbench.figures.style import live
from dflash_lab.workbench.finished import FAILURE
from dflash_lab.workbench.progress import duration

if TYPE_CHECKING:
    import ipywidgets
    import polars as pl

    from dflash_lab.drafter.journal import Reader
    from dflash_lab.stages.train_drafter import TrainDrafterResult

VIEWS = ("losses", "positions", "streaks", "accuracies", "pace")
BUSY = 50  # times as long between drawings as a drawing takes: training may share this process


def snapshot(journal: Reader) -> tuple[list[Any], str]:
    """The figures of VIEWS as a run's journal stands, and a line of text about it."""
    from dflash_lab.stages.train_drafter import metric_frame, position_frame, step_frame

    records = journal.read()
    steps, metrics, places = step_frame(records), metric_frame(records), position_frame(records)
    drawn = [
        figures.losses(steps, metrics),
        figures.positions(places),
        figures.streaks(metrics),
        figures.accuracies(metrics),
        figures.pace(steps, metrics),
    ]
    if not steps.height:
        return drawn, f"nothing recorded yet in {journal.path.parent}"
    return drawn, _stand(steps, metrics)


def _stand(steps: pl.DataFrame, metrics: pl.DataFrame) -> str:
    """Where a run is, how fast, with what memory, and when it will end."""
    from dflash_lab.stages.train_drafter import seconds_left

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

    from dflash_lab.drafter.journal import Reader

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
    holder = widgets.VBox([live(figures.mask(row))])

    def update(*_: Any) -> None:
        holder.children[0].close()
        holder.children = [live(figures.mask(row, block.value, kind.value))]

    block.observe(update, "value")
    kind.observe(update, "value")
    return widgets.VBox([widgets.HBox([block, kind]), holder])
