"""The closing table of a run: the few numbers of each stage that answer "did it work", taken from the results
on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from dflash_lab.stages import STAGES
from dflash_lab.workbench.finished import RESULT, read_result

Figures = dict[str, Any]
JUDGEMENT = "judgement"  # a sentence of `acceptance` among the numbers

# What an earlier start of the stage left, which its own figures count apart.
EARLIER = {"samples_stored": "samples_stored_before", "tokens_stored": "tokens_stored_before"}
# name in the table -> (unit, stage, name in that stage's figures, how several shards are put together)
ROWS: dict[str, tuple[str, str, str, Callable[[list[float]], float]]] = {
    "samples_in": ("", "prepare", "samples_in", sum),
    "samples_stored": ("", "extract", "samples_stored", sum),
    "samples_quarantined": ("", "extract", "samples_quarantined", sum),
    "tokens_stored": ("tokens", "extract", "tokens_stored", sum),
    "extract_tokens_per_s": ("tokens/s a process", "extract", "extract_tokens_per_s", fmean),
    "padding_waste_pct": ("%", "extract", "padding_waste_pct", max),
    "predicted_peak_gib": ("GiB", "memory_sweep", "predicted_peak_gib", max),
    "measured_peak_gib": ("GiB", "memory_sweep", "measured_peak_gib", max),
    "loss_first": ("nats", "train_drafter", "loss_first", max),
    "loss_last": ("nats", "train_drafter", "loss_last", max),
    "tau_trained": ("tokens/round", "acceptance", "tau_trained", max),
    "tau_untrained": ("tokens/round", "acceptance", "tau_untrained", max),
}


def stage_results(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the finished results below a run folder by stage name; shards of a stage in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(run.glob(f"*/{RESULT}")):
        result = read_result(path)
        found.setdefault(result["stage"], []).append(result)
    return found


def closing_figures(run: Path) -> Figures:
    """Return the table's numbers by name, and the sentence on tau. A stage that has not run leaves out its
    own.
    """
    results = stage_results(run)
    figures: Figures = {}
    for name, (_, stage, source, together) in ROWS.items():
        values = [
            result["figures"][source] for result in results.get(stage, []) if source in result["figures"]
        ]
        values = [value for value in values if value is not None]
        if values and source in EARLIER:
            values += [result["figures"].get(EARLIER[source], 0) for result in results[stage]]
        if values:
            figures[name] = together(values)
    told = [result["figures"].get(JUDGEMENT) for result in results.get("acceptance", [])]
    if any(told):
        figures[JUDGEMENT] = told[-1]
    for stage in STAGES:
        if stage in results:
            figures[f"{stage}_seconds"] = round(sum(result["seconds"] for result in results[stage]), 1)
    return figures


def closing_rows(figures: Figures) -> list[tuple[str, str, str]]:
    """Return the table as text: name, value, unit."""
    return [
        (name, _number(value), ROWS[name][0])
        if name in ROWS
        else (name.removesuffix("_seconds") + " time", f"{value:,.1f}", "s")
        for name, value in figures.items()
        if name != JUDGEMENT
    ]


def closing_lines(figures: Figures) -> list[str]:
    """Return the table as aligned lines of text, and below it what the measured tau amounts to."""
    rows = closing_rows(figures)
    width = max((len(row[0]) for row in rows), default=0)
    right = max((len(row[1]) for row in rows), default=0)
    lines = [f"{name:<{width}}  {value:>{right}} {unit}".rstrip() for name, value, unit in rows]
    return [*lines, *([figures[JUDGEMENT]] if JUDGEMENT in figures else [])]


def _number(value: float) -> str:
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    )
