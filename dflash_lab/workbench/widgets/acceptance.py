"""What-if sliders over `speed.what_if`: costs typed in or measured, a block size and a tree budget to
look at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

if TYPE_CHECKING:
    import ipywidgets

    from dflash_lab.acceptance.results import Evaluation


def known_taus(result: Evaluation, temperature: float = 0.0) -> pl.DataFrame:
    """Return every measured point: `block_size`, `budget` (0: chain), `tau`, over all answers.

    At a temperature the drafts beyond the bonus are scaled by what the offline estimate says sampling keeps
    of them.
    """
    report = result.offline
    streaks = dict(report.by_temperature().iter_rows())
    kept = (streaks[temperature] - 1) / max(1e-9, streaks[0.0] - 1) if temperature else 1.0
    chains = report.by_block_size().select("block_size", budget=pl.lit(0, dtype=pl.Int64), tau=pl.col("tau"))
    trees = report.by_budget().filter(pl.col("budget") > 0)
    trees = trees.select(block_size=pl.lit(report.block_size, dtype=pl.Int64), budget="budget", tau="tau")
    points = pl.concat([chains, trees])
    return points.with_columns(tau=1 + (pl.col("tau") - 1) * kept)


def what_if(result: Evaluation) -> ipywidgets.Widget:
    """Return the sliders and their figure; `measured` uses this machine's costs, otherwise the typed ones."""
    import ipywidgets as widgets

    from dflash_lab.acceptance.results import Costs, at
    from dflash_lab.workbench.figures import acceptance_speed as speed
    from dflash_lab.workbench.figures.style import live

    known = known_taus(result)
    costs = result.cost_model
    sizes = sorted(set(known.filter(pl.col("budget") == 0)["block_size"]))
    budgets = sorted(set(known["budget"]))
    wide = max(costs.step)
    slope = (at(costs.step, wide) - at(costs.step, 1)) / max(1, wide - 1)
    look: dict[str, Any] = {"continuous_update": False, "style": {"description_width": "150px"}}
    controls: dict[str, Any] = {
        "block_size": widgets.SelectionSlider(
            options=sizes, value=sizes[-1], description="block size", **look
        ),
        "budget": widgets.SelectionSlider(
            options=budgets, value=0, description="tree nodes (0: chain)", **look
        ),
        "temperature": widgets.SelectionSlider(
            options=[0.0, *result.offline.temperatures], value=0.0, description="temperature", **look
        ),
        "measured": widgets.Checkbox(value=True, description="costs measured here"),
        "step_ms": widgets.FloatLogSlider(
            value=at(costs.step, 1), min=-1, max=4, description="target step (ms)", **look
        ),
        "slope_ms": widgets.FloatText(
            value=round(max(0.0, slope), 4), description="each more token (ms)", style=look["style"]
        ),
        "draft_ms": widgets.FloatLogSlider(
            value=at(costs.draft, sizes[-1]), min=-1, max=4, description="draft (ms)", **look
        ),
    }
    figure = live(speed.what_if(costs, known, block_size=sizes[-1]))

    def update(_: Any) -> None:
        chosen = costs
        if not controls["measured"].value:
            chosen = Costs.typed(
                step_ms=controls["step_ms"].value,
                step_ms_per_token=max(0.0, controls["slope_ms"].value),
                draft_ms=controls["draft_ms"].value,
                replay=costs.replay,
            )
        budget = controls["budget"].value
        size = result.offline.block_size if budget else controls["block_size"].value
        taus = known_taus(result, controls["temperature"].value)
        fresh = speed.what_if(chosen, taus, block_size=size, budget=budget)
        with figure.batch_update():
            figure.layout.title = fresh.layout.title
            for old, new in zip(figure.data, fresh.data):
                old.x, old.y, old.customdata = new.x, new.y, new.customdata

    for control in controls.values():
        control.observe(update, names="value")
    return widgets.VBox([widgets.VBox(list(controls.values())), figure])
