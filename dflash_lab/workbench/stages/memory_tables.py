"""The tables of `memory_sweep`: terms, advice, length buckets, and the headline figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

if TYPE_CHECKING:
    from dflash_lab.memory.account import Account
    from dflash_lab.memory.setups import TrainingSetup
    from dflash_lab.workbench.stages.memory_sweep import MemorySweepParams, Scene

GIB = 2**30
ADVICE_FIELDS = ("name", "saves_gib", "peak_gib", "time_pct", "fits", "same_goal", "built_in", "why")


def predicted_columns(analytic: Account, fake: Account | None) -> dict[str, Any]:
    """Return the columns of a point that both predictions fill, before anything is measured there; `fake` is
    None where nothing counts it.
    """
    return {
        "analytic_gib": analytic.live / 2**30,
        "fake_gib": fake.live / 2**30 if fake else None,
        "fake_reserved_gib": fake.reserved / 2**30 if fake else None,
        "analytic_moving": analytic.live - analytic.static,
        "fake_moving": fake.live - fake.static if fake else None,
        "order": "",
        "out_of_memory": False,
    }


def counted_step(found: Scene, drafter: Any, step: TrainingSetup) -> Account | None:
    """Return the count of a training step on fake tensors; None of what no count knows: compiled layers, an
    optimizer on the host, DFlash 2.
    """
    from dflash_lab.memory.cached import fake_training

    if step.compiled or step.optimizer == "cpu-offload" or drafter.selector_rank:
        return None
    return fake_training(found.config, drafter, step)


def term_frame(params: MemorySweepParams, found: Scene) -> pl.DataFrame:
    """Return terms of the largest batch of the grid and of the training step: by formulas, calibrated where
    something was measured, and counted on fake tensors. Where layers are compiled, which no count knows, also
    as they are without.
    """
    from dataclasses import replace

    from dflash_lab.memory.cached import fake_extraction
    from dflash_lab.memory.calibrated import extraction_prediction, training_prediction

    batch = replace(found.extraction, batch=max(params.batches), length=max(params.lengths))
    step, plain = found.training, replace(found.training, compiled=False)
    batches, steps = found.calibrated
    cuda, shape, drafter = found.cuda, found.shape, found.drafter
    ways = [(step, None), *([(step, steps)] if steps else []), *([(plain, None)] if step.compiled else [])]
    accounts = {
        "extraction": [
            extraction_prediction(shape, batch, cuda=cuda, calibration=known)
            for known in (None, *([batches] if batches else []))
        ],
        "training": [
            training_prediction(shape, drafter, way, cuda=cuda, calibration=known) for way, known in ways
        ],
    }
    accounts["extraction"].append(fake_extraction(found.config, batch))
    if (counted := counted_step(found, drafter, plain)) is not None:
        accounts["training"].append(counted)
    rows = [
        {
            "what": what,
            "title": account.title,
            "kind": account.kind,
            "term": term,
            "gib": size / GIB,
            "formula": account.formulas.get(term, ""),
        }
        for what, several in accounts.items()
        for account in several
        for term, size in account.terms.items()
    ]
    return pl.DataFrame(rows)


def advice_frame(params: MemorySweepParams, found: Scene) -> tuple[pl.DataFrame, dict[str, str]]:
    """Return the changes ranked for both kinds of run, and a paragraph each."""
    from dataclasses import replace

    from dflash_lab.memory.advise import advise_extraction, advise_training

    setup = replace(found.extraction, batch=max(params.batches), length=max(params.lengths))
    batches, anchors = found.calibrated
    extraction = advise_extraction(found.shape, setup, found.budget_gib, cuda=found.cuda, calibration=batches)
    training = advise_training(
        found.shape, found.drafter, found.training, found.budget_gib, cuda=found.cuda, calibration=anchors
    )
    rows = [
        {"what": what, **{name: getattr(change, name) for name in ADVICE_FIELDS}}
        for what, advice in (("extraction", extraction), ("training", training))
        for change in advice.changes
    ]
    texts = {"extraction": extraction.paragraph, "training": training.paragraph}
    return pl.DataFrame(rows), texts


def bucket_frame(params: MemorySweepParams, found: Scene) -> pl.DataFrame:
    """Return the largest batch of each length bucket under the budget."""
    from dflash_lab.extraction.loop import BUFFERS
    from dflash_lab.memory.planner import extraction_budget

    setup = found.extraction
    budget = extraction_budget(
        found.shape,
        found.budget_gib,
        tap_ids=setup.tap_ids,
        longest=max(params.lengths),
        dtype=setup.dtype,
        store_final=setup.store_final,
        kernels=setup.kernels,
        fused=setup.fused,
        in_flight=BUFFERS if found.cuda else 0,
        max_batch=params.max_batch,
        cuda=found.cuda,
        calibration=found.calibrated[0],
    )
    rows = [
        {
            "length": length,
            "batch": batch,
            "planned": budget.batch(length),
            "gib": budget.accounts[length].peak_gib,
            "limited_by": budget.limited_by[length],
        }
        for length, batch in budget.batches.items()
    ]
    return pl.DataFrame(rows)


def headline(
    found: Scene,
    points: pl.DataFrame,
    steps: pl.DataFrame,
    buckets: pl.DataFrame,
) -> dict[str, float | int | str]:
    """Return the flat figures: the largest measured point, the errors over all, and the largest batch that
    fits.
    """
    from dflash_lab.memory.fit import error_figures

    figures: dict[str, float | int | str] = {"budget_gib": round(found.budget_gib, 3)}
    measured = points.filter(pl.col("measured_moving").is_not_null() & ~pl.col("out_of_memory"))
    largest = points.sort(pl.col("batch") * pl.col("length"), descending=True).row(0, named=True)
    if measured.height:
        largest = measured.sort("measured_moving", descending=True).row(0, named=True)
        figures["measured_peak_gib"] = round(largest["measured_gib"], 4)
        for kind, prefix in (("fake", ""), ("analytic", "analytic_")):
            errors = _errors(measured, f"{kind}_moving")
            median, worst = error_figures(errors)
            figures |= {
                f"{prefix}median_error_pct": round(median, 3),
                f"{prefix}worst_error_pct": round(worst, 3),
            }
    figures |= _step_figures(steps)
    figures |= _basis_figures(found)
    figures["predicted_peak_gib"] = round(largest["fake_gib"], 4)
    figures["points_measured"] = measured.height
    figures["out_of_memory"] = int(points["out_of_memory"].sum())
    longest = buckets.sort("length").row(-1, named=True)
    figures |= {"largest_batch": longest["batch"], "largest_batch_length": longest["length"]}
    figures["token_budget"] = int((buckets["planned"] * buckets["length"]).max())  # type: ignore[arg-type]
    return figures


def _step_figures(steps: pl.DataFrame) -> dict[str, float | int | str]:
    """Return the largest step's predicted peak, and the errors where steps were measured."""
    from dflash_lab.memory.fit import error_figures

    figures: dict[str, float | int | str] = {}
    kind = "analytic" if steps["fake_gib"].null_count() else "fake"  # compiled steps are not counted
    if steps.height:
        figures["predicted_step_gib"] = round(float(steps[f"{kind}_gib"].max()), 4)  # type: ignore[arg-type]
    measured = steps.filter(pl.col("measured_moving").is_not_null() & ~pl.col("out_of_memory"))
    if measured.height:
        median, worst = error_figures(_errors(measured, f"{kind}_moving"))
        figures |= {"step_median_error_pct": round(median, 3), "step_worst_error_pct": round(worst, 3)}
    return figures


def _errors(measured: pl.DataFrame, column: str) -> list[float]:
    return (100 * (measured[column] / measured["measured_moving"] - 1)).to_list()


def _basis_figures(found: Scene) -> dict[str, float | int | str]:
    """Return what the plan rests on, and a calibration's errors on points that took no part in the fit."""
    figures: dict[str, float | int | str] = {}
    kinds = (("extraction", "calibrated"), ("training", "step_calibrated"))
    for (what, prefix), basis in zip(kinds, found.bases, strict=True):
        figures[f"{what}_basis"] = basis.words
        if calibration := basis.calibration:
            figures |= {
                f"{prefix}_median_error_pct": round(calibration.median_error_pct, 3),
                f"{prefix}_worst_error_pct": round(calibration.worst_error_pct, 3),
                f"{prefix}_heldout_points": calibration.heldout_points,
            }
    return figures
