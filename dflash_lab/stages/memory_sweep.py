"""Stage `memory_sweep`: what a batch and a step take, predicted before a weight is loaded, then measured. A
lack of memory is a result.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import polars as pl

from dflash_lab import files
from dflash_lab.memory.account import Account, predict_extraction
from dflash_lab.memory.advice import advise
from dflash_lab.memory.crash import requested_bytes
from dflash_lab.memory.planner import expandable_segments, extraction_budget
from dflash_lab.memory.shapes import GIB, ExtractionSetup, Placement, TargetShape, TrainingSetup, target_shape
from dflash_lab.memory.training import predict_training
from dflash_lab.params import StageParams, param
from dflash_lab.progress import duration

if TYPE_CHECKING:
    from dflash_lab.drafter.config import DrafterConfig

logger = logging.getLogger(__name__)
FRAMES = ("points", "steps", "terms", "advice", "buckets")
PLACEMENTS = get_args(Placement)
ADVICE_FIELDS = ("name", "saves_gib", "peak_gib", "time_pct", "fits", "same_goal", "built_in", "why")
POINTS_SHARE = 0.6  # of the time to measure for, where training steps are measured too
POINT_SCHEMA: dict[str, Any] = {
    "batch": pl.Int64,
    "length": pl.Int64,
    "analytic_gib": pl.Float64,  # these two: peaks of live tensors, weights included
    "measured_gib": pl.Float64,  # null: not measured
    "reserved_gib": pl.Float64,  # as measured; this and the next three null on a CPU
    "fragmentation_gib": pl.Float64,  # reserved and in no live block
    "outside_gib": pl.Float64,  # the device's memory outside torch
    "failed_gib": pl.Float64,  # the largest request that was refused; 0: none was
    "analytic_moving": pl.Int64,  # bytes that the batch brings, without weights and other standing parts
    "measured_moving": pl.Int64,
    "order": pl.String,  # falling or rising sizes, empty: not measured
    "out_of_memory": pl.Boolean,
    "seconds": pl.Float64,
}
STEP_SCHEMA = {"anchors": pl.Int64, "block_size": pl.Int64, **dict(list(POINT_SCHEMA.items())[2:])}
Progress = Callable[..., None]


class MemorySweepParams(StageParams):
    """Parameters of `memory_sweep`."""

    stage: ClassVar[str] = "memory_sweep"

    budget_gib: float = param(
        0.0, "memory to plan for; 0: what is free on the device now", unit="GiB", low=0, group="extraction"
    )
    batches: list[int] = param([1, 2, 4, 8, 16], "batches of the grid", low=1)
    lengths: list[int] = param([64, 65, 256, 1024], "lengths of the grid", unit="tokens", low=1)
    tap_ids: list[int] = param([], "layers to tap (0-based); empty: num_taps by the DFlash rule", low=0)
    num_taps: int = param(5, "taps when tap_ids is empty", low=1, high=64)
    store_final: bool = param(False, "also keep the last layer's output before the final norm")
    max_batch: int = param(512, "most rows a batch may have in the plan", low=1)
    measure: bool = param(
        True, "load the target and measure the grid; false: predict only", group="measuring"
    )
    measure_s: float = param(600.0, "seconds to measure for", unit="s", low=1)
    orders: list[str] = param(
        ["falling"], "orders of measuring on CUDA; on a CPU, sizes rise", choices=("falling", "rising")
    )
    num_layers: int = param(5, "layers of the drafter", low=1, high=64, group="drafter")
    num_heads: int = param(0, "attention heads of the drafter; 0: the target's", low=0, high=4096)
    num_kv_heads: int = param(0, "key/value heads of the drafter; 0: the target's", low=0, high=4096)
    head_dim: int = param(0, "size of a head of the drafter; 0: the target's", low=0, high=4096)
    intermediate_size: int = param(0, "feed-forward width of the drafter; 0: the target's", low=0, high=2**20)
    dflash2: bool = param(False, "the drafter is a DFlash 2")
    optimizer: str = param("adamw", "of a training step", choices=("adamw", "muon"), group="optimizer")
    moments: str = param("fp32", "Adam's moments; int8: a byte each", choices=("fp32", "int8"))
    offload: bool = param(False, "masters and moments in host memory")
    gradient_checkpointing: bool = param(False, "recompute draft layers in the backward pass")
    anchors: int = param(512, "blocks of a training step", low=1, group="training step")
    block_size: int = param(16, "slots of a block", low=2, high=128)
    context_tokens: int = param(4096, "target positions of a training step", unit="tokens", low=2)
    chunk: int = param(0, "rows of logits at a time in the loss; 0: as the loss plans it", low=0)
    soft_targets: bool = param(True, "the loss compares with the target's distribution")
    step_anchors: list[int] = param([128, 256, 512], "anchors of the grid of training steps", low=1)
    step_blocks: list[int] = param([8, 16, 24], "block sizes of the grid of training steps", low=2, high=128)
    compile_steps: bool = param(
        False, "on CUDA, measure compiled steps, as train_drafter runs: a minute a shape"
    )
    placement: str = param(
        "cached", "where the target is while the drafter trains", choices=PLACEMENTS, group="machine"
    )
    allow_slow_kernels: bool = param(False, "run a hybrid target on CUDA without its fast kernels")

    def check(self) -> None:
        """Grids are not empty; anchors stand inside the context."""
        self.require(bool(self.batches), "batches", "at least one batch")
        self.require(bool(self.lengths), "lengths", "at least one length")
        self.require(
            max([self.anchors, *self.step_anchors]) < self.context_tokens,
            "anchors" if self.anchors >= self.context_tokens else "step_anchors",
            f"anchors stand in the context: at most context_tokens - 1 = {self.context_tokens - 1}",
        )


@dataclass(frozen=True)
class SweepInputs:
    """What every prediction of a run shares: shapes, fixed parts of the setups, budget, and the device."""

    shape: TargetShape
    drafter: DrafterConfig
    extraction: ExtractionSetup
    training: TrainingSetup
    measured_step: TrainingSetup  # as steps are measured; its sizes are those of `training`
    budget_gib: float
    device: str

    @property
    def cuda(self) -> bool:
        return self.device != "cpu"


@dataclass(frozen=True)
class MemorySweepResult:
    """Headline figures and tables, of extraction and training (`what`).

    `points`: POINT_SCHEMA. `steps`: STEP_SCHEMA, measured on CUDA only. `terms`: what, title, term, gib,
    formula. `advice`: what, and ADVICE_FIELDS. `buckets`: length, batch, planned, gib, limited_by. `texts`: a
    paragraph each.
    """

    figures: dict[str, float | int | str]
    points: pl.DataFrame
    steps: pl.DataFrame
    terms: pl.DataFrame
    advice: pl.DataFrame
    buckets: pl.DataFrame
    texts: dict[str, str] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Leave the result in the stage's folder."""
        for name in FRAMES:
            with files.atomic_path(folder / f"{name}.parquet") as temporary:
                getattr(self, name).write_parquet(temporary)
        files.write_json(folder / "summary.json", files.plain({"figures": self.figures, "texts": self.texts}))

    @classmethod
    def load(cls, folder: Path) -> MemorySweepResult:
        """Read a finished result again."""
        summary = files.read_json(folder / "summary.json")
        frames = {name: pl.read_parquet(folder / f"{name}.parquet") for name in FRAMES}
        if "kind" in frames["terms"].columns:  # earlier versions kept other predictions beside the formulas'
            frames["terms"] = frames["terms"].filter(kind="analytic").drop("kind")
            for name in ("points", "steps"):
                frames[name] = frames[name].drop("fake_gib", "fake_reserved_gib", "fake_moving", strict=False)
        return cls(figures=summary["figures"], texts=summary["texts"], **frames)


def sweep_inputs(params: MemorySweepParams) -> SweepInputs:
    """Settle shapes, setups and budget from the parameters; no weight is read."""
    from dflash_lab.drafter.config import DrafterConfig
    from dflash_lab.machine import device_budget_gib
    from dflash_lab.models.hooks import default_tap_ids
    from dflash_lab.models.load import choose_device, choose_dtype
    from dflash_lab.models.source import load_config
    from dflash_lab.stages.training_inputs import optimizer_of, own_shape

    config = load_config(params.target)
    device = choose_device(params.device)
    dtype = str(choose_dtype(params.dtype, config)).removeprefix("torch.")
    taps = tuple(params.tap_ids or default_tap_ids(config.num_hidden_layers, params.num_taps))
    cuda = device.type == "cuda"
    drafter = DrafterConfig.from_target(
        config,
        mask_token_id=0,
        num_layers=params.num_layers,
        block_size=params.block_size,
        tap_ids=taps,
        **own_shape(params),
    )
    extraction = ExtractionSetup(
        batch=1,
        length=1,
        tap_ids=taps,
        dtype=dtype,
        store_final=params.store_final,
        kernels="fla" if cuda and not params.allow_slow_kernels else "torch",
        fused=cuda,
        expandable=expandable_segments(),
    )
    training = TrainingSetup(
        anchors=params.anchors,
        context=params.context_tokens,
        block_size=params.block_size,
        dtype=dtype,
        chunk=params.chunk,
        soft_targets=params.soft_targets,
        placement=params.placement,  # type: ignore[arg-type]
        expandable=expandable_segments(),
        compiled=cuda,  # as train_drafter does
        checkpointing="layers" if params.gradient_checkpointing else "none",
        optimizer=optimizer_of(params),  # type: ignore[arg-type]
    )
    return SweepInputs(
        shape=target_shape(config),
        drafter=drafter,
        extraction=extraction,
        training=training,
        measured_step=replace(training, compiled=cuda and params.compile_steps),
        budget_gib=params.budget_gib or device_budget_gib(device),
        device=str(device),
    )


def run_memory_sweep(params: MemorySweepParams, progress: Progress | None = None) -> MemorySweepResult:
    """Predict the grid, measure it, and say what fits."""
    progress = progress or _silent
    inputs = sweep_inputs(params)
    points = predict_points(params, inputs, progress)
    if params.measure:
        points = measure_points(params, inputs, points, progress)
    frame = pl.DataFrame(points, schema=POINT_SCHEMA)
    steps = pl.DataFrame(step_points(params, inputs, progress), schema=STEP_SCHEMA)
    buckets = bucket_frame(params, inputs)
    advice, texts = advice_frame(params, inputs)
    figures = headline(inputs, frame, steps, buckets)
    if params.measure and (left := not_measured(params.measure_s, points)):
        logger.info("not measured: %s", left)
        figures["not_measured"] = left
    return MemorySweepResult(figures, frame, steps, term_frame(params, inputs), advice, buckets, texts)


def _silent(description: str, done: int, total: int, **fields: Any) -> None:
    """Report to nobody."""


# Extraction batches: batch x length


def predict_points(
    params: MemorySweepParams, inputs: SweepInputs, progress: Progress
) -> list[dict[str, Any]]:
    """Return a row (POINT_SCHEMA) a grid point, as predicted."""
    grid = [(b, length) for b in sorted(set(params.batches)) for length in sorted(set(params.lengths))]
    rows = []
    for batch, length in grid:
        setup = replace(inputs.extraction, batch=batch, length=length)
        account = predict_extraction(inputs.shape, setup, cuda=inputs.cuda)
        rows.append({"batch": batch, "length": length, **_predicted(account)})
    progress("predicting", len(grid), len(grid))
    return rows


def _predicted(account: Account) -> dict[str, Any]:
    """Return the columns of a point before anything is measured there."""
    return {
        "analytic_gib": account.live / GIB,
        "analytic_moving": account.live - account.static,
        "order": "",
        "out_of_memory": False,
    }


def measure_points(
    params: MemorySweepParams,
    inputs: SweepInputs,
    rows: list[dict[str, Any]],
    progress: Progress,
    *,
    each: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Load the target and fill in what was measured; `each` is called with all rows whenever some are new.

    On CUDA points are measured until the time is up, on a CPU, where the largest takes some hundred times as
    long as the smallest, as long as the next one is expected to fit into it.

    A target whose weights alone do not fit is a result too: every point is marked as out of memory. Raises
    what `progress` raises between points, so a stop takes effect there.
    """
    from dflash_lab.extraction.fused_layers import skip_tuning, speed_up
    from dflash_lab.memory.measure import attempt, measure_extraction
    from dflash_lab.models.load import load_target

    last = inputs.extraction.last_layer(inputs.shape.layers)
    how: dict[str, Any] = dict(
        device=params.device,
        dtype=params.dtype,
        seed=params.seed,
        last_layer=None if last == inputs.shape.layers - 1 else last,
        with_head=False,
        allow_slow_kernels=params.allow_slow_kernels,
    )
    loaded: list[Any] = []
    if message := attempt(lambda: loaded.append(load_target(params.target, **how))):
        logger.warning("no point is measured, for the target's weights do not fit: %s", message)
        lacking = {"out_of_memory": True, "order": params.orders[0]}
        refused = [{**row, **lacking, "failed_gib": requested_bytes(message) / GIB} for row in rows]
        each(refused)
        return refused
    target = loaded.pop()
    measured = [dict(row) for row in rows]
    with contextlib.ExitStack() as afterwards:
        if inputs.extraction.fused:
            afterwards.callback(skip_tuning())
            speed_up(target, "auto")
        allowed_s = params.measure_s * (POINTS_SHARE if inputs.cuda else 1.0)
        deadline = time.monotonic() + allowed_s
        # On a CPU counts are the same in any order, and small points say how long a large one would take.
        for order in params.orders if inputs.cuda else ("rising",):
            sizes = sorted(rows, key=_tokens, reverse=order == "falling")
            what, count = f"measuring, {order} sizes, for {allowed_s:.0f} s", 0
            for row in sizes:
                left_s = max(0.0, deadline - time.monotonic())
                progress(
                    what, count, len(sizes), batch=row["batch"], length=row["length"], left_s=round(left_s)
                )
                if not left_s or (not inputs.cuda and expected_seconds(measured, row) > left_s):
                    break
                setup = replace(inputs.extraction, batch=row["batch"], length=row["length"])
                outcome = measure_extraction(target, setup)
                new = {**row, "order": order, **outcome}
                same = [i for i, old in enumerate(measured) if _is(old, row) and old["order"] in ("", order)]
                if same:
                    measured[same[0]] = new
                else:
                    measured.append(new)
                each(measured)
                count += 1
            progress(what, len(sizes), len(sizes), measured=count)
    return measured


def expected_seconds(rows: list[dict[str, Any]], row: dict[str, Any]) -> float:
    """Return how long `row` should take to measure by those of `rows` that were: as long a token as the
    largest among them that is no larger; 0 as long as none was.
    """
    known = sorted((_tokens(one), one["seconds"]) for one in rows if one.get("seconds"))
    below = [one for one in known if one[0] <= _tokens(row)] or known[:1]
    return below[-1][1] * _tokens(row) / below[-1][0] if below else 0.0


def not_measured(measure_s: float, rows: list[dict[str, Any]]) -> str:
    """Say which points the time did not suffice for, and what to type for them; empty if it sufficed."""
    done = [row for row in rows if row["order"]]
    left = sorted((row for row in rows if not row["order"]), key=_tokens)
    if not left:
        return ""
    took = sum(row.get("seconds") or 0.0 for row in done)
    expected = [expected_seconds(rows, row) for row in left]
    named = [f"{row['batch']} x {row['length']:,} (about {duration(s)})" for row, s in zip(left, expected)]
    which = named[0] if len(left) == 1 else f"{named[0]} to {named[-1]}"
    enough = math.ceil(1.2 * (took + sum(expected)) / 10) * 10
    return (
        f"{len(left)} of {len(rows)} points, {which}: no time was left of the {measure_s:g} s given, of "
        f"which the other {len(done)} took {took:.0f}; they are predicted. "
        f"For all: -p measure_s {enough} -p force True"
    )


def _tokens(row: dict[str, Any]) -> int:
    return row["batch"] * row["length"]


def _is(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (one["batch"], one["length"]) == (other["batch"], other["length"])


# Training steps: anchors x block size. The step that is measured is the training loop's own: real drafter,
# loss and optimizer, a head and an embedding of the target's shape without its values. On a CPU the loop
# takes other paths (dense attention, widened products), so a measurement there would say nothing about a
# device.


def step_points(params: MemorySweepParams, inputs: SweepInputs, progress: Progress) -> list[dict[str, Any]]:
    """Return a row (STEP_SCHEMA) a grid point; on CUDA one each that it was measured in, rising and falling
    sizes as `orders` say, until time is up.
    """
    from dflash_lab.memory.measure import measure_training

    grid = [(a, b) for a in sorted(set(params.step_anchors)) for b in sorted(set(params.step_blocks))]
    rows, points = [], []
    for anchors, block in grid:
        setup = replace(inputs.measured_step, anchors=anchors, block_size=block)
        drafter = replace(inputs.drafter, block_size=block)
        account = predict_training(inputs.shape, drafter, setup, cuda=inputs.cuda)
        rows.append({"anchors": anchors, "block_size": block, **_predicted(account)})
        points.append((setup, drafter))
    progress("training steps", len(grid), len(grid))
    if not (params.measure and inputs.cuda):
        return rows
    deadline = time.monotonic() + (1 - POINTS_SHARE) * params.measure_s
    measured = []
    for order in params.orders:
        sizes = sorted(range(len(grid)), key=lambda at: points[at][0].rows, reverse=order == "falling")
        for number, at in enumerate(sizes):
            progress(f"measuring steps, {order} sizes", number, len(sizes))
            if time.monotonic() >= deadline:
                break
            setup, drafter = points[at]
            outcome = measure_training(inputs.shape, drafter, setup, inputs.device)
            measured.append({**rows[at], "order": order, **outcome})
        progress(f"measuring steps, {order} sizes", len(sizes), len(sizes))
    done = {(row["anchors"], row["block_size"]) for row in measured}
    return [*measured, *(row for row in rows if (row["anchors"], row["block_size"]) not in done)]


# Tables and figures


def largest_batch(params: MemorySweepParams, inputs: SweepInputs) -> ExtractionSetup:
    """Return the largest batch of the grid."""
    return replace(inputs.extraction, batch=max(params.batches), length=max(params.lengths))


def term_frame(params: MemorySweepParams, inputs: SweepInputs) -> pl.DataFrame:
    """Return terms of the largest batch and of the training step; of compiled layers, also as plain ones."""
    step, cuda = inputs.training, inputs.cuda
    ways = [step, replace(step, compiled=False)] if step.compiled else [step]
    accounts = [("extraction", predict_extraction(inputs.shape, largest_batch(params, inputs), cuda=cuda))]
    accounts += [("training", predict_training(inputs.shape, inputs.drafter, way, cuda=cuda)) for way in ways]
    rows = [
        {
            "what": what,
            "title": account.title,
            "term": term,
            "gib": size / GIB,
            "formula": account.formulas.get(term, ""),
        }
        for what, account in accounts
        for term, size in account.terms.items()
    ]
    return pl.DataFrame(rows)


def advice_frame(params: MemorySweepParams, inputs: SweepInputs) -> tuple[pl.DataFrame, dict[str, str]]:
    """Return the changes ranked for both kinds of run, and a paragraph each."""
    setups: dict[str, Any] = {"extraction": largest_batch(params, inputs), "training": inputs.training}
    advices = {
        what: advise(inputs.shape, setup, inputs.budget_gib, drafter=inputs.drafter, cuda=inputs.cuda)
        for what, setup in setups.items()
    }
    rows = [
        {"what": what, **{name: getattr(change, name) for name in ADVICE_FIELDS}}
        for what, advice in advices.items()
        for change in advice.changes
    ]
    return pl.DataFrame(rows), {what: advice.paragraph for what, advice in advices.items()}


def bucket_frame(params: MemorySweepParams, inputs: SweepInputs) -> pl.DataFrame:
    """Return the largest batch of each length bucket under the budget."""
    from dflash_lab.extraction.loop import BUFFERS

    # As `extract` asks, which counts the fragments of an allocator without expandable segments.
    longest = replace(inputs.extraction, length=max(params.lengths), expandable=False)
    longest = replace(longest, in_flight=BUFFERS if inputs.cuda else 0)
    budget = extraction_budget(
        inputs.shape, longest, inputs.budget_gib, max_batch=params.max_batch, cuda=inputs.cuda
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
    inputs: SweepInputs, points: pl.DataFrame, steps: pl.DataFrame, buckets: pl.DataFrame
) -> dict[str, float | int | str]:
    """Return the flat figures: the largest measured point, errors over all, the largest batch that fits."""
    figures: dict[str, float | int | str] = {"budget_gib": round(inputs.budget_gib, 3)}
    measured = _measured(points)
    largest = points.sort(pl.col("batch") * pl.col("length"), descending=True).row(0, named=True)
    if measured.height:
        largest = measured.sort("measured_moving", descending=True).row(0, named=True)
        figures["measured_peak_gib"] = round(largest["measured_gib"], 4)
        figures |= _error_figures(measured)
    if steps.height:
        figures["predicted_step_gib"] = round(float(steps["analytic_gib"].max()), 4)  # type: ignore[arg-type]
    if (measured_steps := _measured(steps)).height:
        figures |= _error_figures(measured_steps, "step_")
    figures["predicted_peak_gib"] = round(largest["analytic_gib"], 4)
    figures["points_measured"] = measured.height
    figures["out_of_memory"] = int(points["out_of_memory"].sum())
    longest = buckets.sort("length").row(-1, named=True)
    figures |= {"largest_batch": longest["batch"], "largest_batch_length": longest["length"]}
    figures["token_budget"] = int((buckets["planned"] * buckets["length"]).max())  # type: ignore[arg-type]
    return figures


def _measured(points: pl.DataFrame) -> pl.DataFrame:
    return points.filter(pl.col("measured_moving").is_not_null() & ~pl.col("out_of_memory"))


def _error_figures(measured: pl.DataFrame, prefix: str = "") -> dict[str, float]:
    """Return how far what batches or steps bring was predicted off, in percent."""
    errors = (100 * (measured["analytic_moving"] / measured["measured_moving"] - 1)).abs().to_list()
    return {
        f"{prefix}median_error_pct": round(statistics.median(errors), 3),
        f"{prefix}worst_error_pct": round(max(errors), 3),
    }
