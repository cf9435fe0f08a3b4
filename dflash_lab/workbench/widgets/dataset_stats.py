"""The length explorer: sliders for limits, budget and policy over `data.policies.explore` and one figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_lab.errors import InputError
from dflash_lab.workbench.figures.style import escape
from dflash_lab.workbench.progress import duration

if TYPE_CHECKING:
    import ipywidgets

    from dflash_lab.stages.dataset_stats import DatasetStatsParams, DatasetStatsResult


def explorer(result: DatasetStatsResult, params: DatasetStatsParams) -> ipywidgets.Widget:
    """Return the explorer; its start is `params`. On sets beyond 200,000 samples counts are scaled up from so
    many."""
    import ipywidgets as widgets

    from dflash_lab.data.batching import POLICIES
    from dflash_lab.workbench.figures.dataset_stats import exploration, explored
    from dflash_lab.workbench.figures.style import live

    longest = int(result.figures["longest_tokens"])
    top = max(longest, params.max_length, 2)
    choices: dict[str, Any] = {
        "max_length": _slider("length limit", params.max_length or longest, 1, top),
        "over_long": widgets.ToggleButtons(options=["drop", "truncate"], description="longer ones"),
        "token_budget": _slider("token budget", params.token_budget, 256, max(262144, params.token_budget)),
        "max_batch": _slider("rows a batch", params.max_batch, 1, max(4096, params.max_batch)),
        "policy": widgets.Dropdown(
            options=list(POLICIES), value="sort in 32,768 windows", description="policy"
        ),
        "tokens_per_s": widgets.BoundedFloatText(
            value=params.tokens_per_s, min=1, max=1e9, step=100, description="tokens/s"
        ),
    }
    for control in choices.values():
        control.style = {"description_width": "90px"}
        control.layout.width = "400px"
    table = widgets.HTML()
    start = explored(result, params, **{name: control.value for name, control in choices.items()})
    figure = live(exploration(result.histogram, start, max_length=choices["max_length"].value), height=340)
    table.value = outcome_table(start)

    def update(change: dict[str, Any]) -> None:
        values = {name: control.value for name, control in choices.items()}
        try:
            found = explored(result, params, **values)
        except InputError as error:
            table.value = f"<b>{escape(str(error))}</b>"
            return
        fresh = exploration(result.histogram, found, max_length=values["max_length"])
        with figure.batch_update():
            figure.layout.title.text = fresh.layout.title.text
            figure.layout.shapes = fresh.layout.shapes
            figure.layout.annotations = fresh.layout.annotations
        table.value = outcome_table(found)

    for control in choices.values():
        control.observe(update, names="value")
    return widgets.VBox([widgets.HBox([widgets.VBox(list(choices.values())), table]), figure])


def outcome_table(found: Any) -> str:
    """Return the outcome as a small HTML table; all of it numbers."""
    rows = (
        ("samples kept", f"{found.kept:,}"),
        ("dropped", f"{found.dropped:,}"),
        ("truncated", f"{found.truncated:,}"),
        ("tokens kept", f"{found.tokens:,} ({found.kept_tokens_pct:.1f} %)"),
        ("padding", f"{found.waste_pct:.2f} %"),
        ("batches", f"{found.batches:,}, up to {found.largest_batch:,} rows"),
        ("over the budget alone", f"{found.over_budget:,}"),
        ("predicted", duration(3600 * found.hours)),
    )
    cells = "".join(
        f"<tr><td>{name}</td><td style='text-align:right'><b>{value}</b></td></tr>" for name, value in rows
    )
    return f"<table style='margin-left:24px; line-height:1.5'>{cells}</table>"


def _slider(description: str, value: int, low: int, high: int) -> ipywidgets.Widget:
    """A slider over whole numbers in even ratios, which answers when it is let go."""
    import ipywidgets as widgets

    steps = sorted({value, low, high, *(round(low * (high / low) ** (step / 60)) for step in range(61))})
    return widgets.SelectionSlider(
        options=[(f"{step:,}", step) for step in steps],
        value=value,
        description=description,
        continuous_update=False,
    )
