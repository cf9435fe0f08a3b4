"""Stage `memory_sweep`: what a batch will take, predicted before a weight is loaded and then measured.

Three numbers a point, kept apart: the analytic account, the count of a run on fake tensors, and the
measurement. On a CPU the measurement is a count of live tensors in a real run; on CUDA it is what the
allocator reserved. From nine sizes on a calibration is fitted, judged on points that it has not seen, and
kept for the advice here and for the other stages of the run. On CUDA points are measured largest first until
the time given is up, on a CPU smallest first as long as the next one fits into it; a lack of memory is a
result.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import polars as pl

from dflash_lab import files
from dflash_lab.workbench.params import StageParams, param
from dflash_lab.workbench.replace import Move

if TYPE_CHECKING:
    from dflash_lab.drafter.config import DrafterConfig
    from dflash_lab.memory.calibrated import Basis
    from dflash_lab.memory.fit import Calibration
    from dflash_lab.memory.setups import ExtractionSetup, TrainingSetup
    from dflash_lab.memory.shapes import TargetShape

logger = logging.getLogger(__name__)
FRAMES = ("points", "steps", "terms", "advice", "buckets")
PLACEMENTS = ("cached", "same device", "other device")
POINT_SCHEMA: dict[str, Any] = {
    "batch": pl.Int64,
    "length": pl.Int64,
    "analytic_gib": pl.Float64,  # these three: peaks of live tensors, weights included
    "fake_gib": pl.Float64,
    "measured_gib": pl.Float64,  # null: not measured
    "fake_reserved_gib": pl.Float64,  # with the allocator's fragments, simulated
    "reserved_gib": pl.Float64,  # as measured; null on a CPU
    "fragmentation_gib": pl.Float64,  # reserved and in no live block; this and the next two null on a CPU
    "outside_gib": pl.Float64,  # the device's memory outside torch
    "failed_gib": pl.Float64,  # the largest request that was refused; 0: none was
    "analytic_moving": pl.Int64,  # bytes that the batch brings, without weights and other standing parts
    "fake_moving": pl.Int64,
    "measured_moving": pl.Int64,
    "order": pl.String,  # falling or rising sizes, empty: not measured
    "out_of_memory": pl.Boolean,
    "seconds": pl.Float64,
}


STEP_SCHEMA = {"anchors": pl.Int64, "block_size": pl.Int64, **dict(list(POINT_SCHEMA.items())[2:])}


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
    second: bool = param(False, "the drafter is a DFlash 2, whose steps no fake tensor counts")
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

    @property
    def calibrations(self) -> list[Path]:
        """What was fitted, for the other stages of the run."""
        return [self.folder / f"calibration-{what}.json" for what in ("extraction", "training")]

    def replacement(self) -> tuple[list[Move], list[Path]]:
        """With the result goes a calibration that this sweep found worse than the formulas."""
        moves, removed = super().replacement()
        return moves, [
            *removed,
            *(path for path in self.calibrations if not (self.fresh / path.name).exists()),
        ]

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
class Scene:
    """What every prediction of a run shares: shapes, fixed parts of the setups, budget, and the kind of
    device.
    """

    config: Any
    shape: TargetShape
    drafter: DrafterConfig
    extraction: ExtractionSetup
    training: TrainingSetup
    budget_gib: float
    device: str
    measured_step: TrainingSetup  # as steps are measured; its sizes are those of `training`
    bases: tuple[Basis, Basis] | tuple[()] = ()  # what predictions of extraction and training rest on

    @property
    def calibrated(self) -> tuple[Calibration | None, Calibration | None]:
        """The calibrations of extraction and of training, where there are any."""
        return (self.bases[0].calibration, self.bases[1].calibration) if self.bases else (None, None)

    @property
    def cuda(self) -> bool:
        return self.device != "cpu"


@dataclass(frozen=True)
class MemorySweepResult:
    """Headline figures and tables.

    `points`: POINT_SCHEMA. `steps`: STEP_SCHEMA, measured on CUDA only. `terms`: what (extraction,
    training), kind, term, gib, formula. `advice`: what, name, saves_gib, peak_gib, time_pct, fits,
    same_goal, built_in, why. `buckets`: length, batch, tokens, limited_by, gib. `texts`: a paragraph each
    for extraction and training.
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
        return cls(figures=summary["figures"], texts=summary["texts"], **frames)


def scene(params: MemorySweepParams) -> Scene:
    """Settle shapes, setups and budget from the parameters; no weight is read."""
    from dataclasses import replace

    from dflash_lab.drafter.config import DrafterConfig
    from dflash_lab.machine import device_budget_gib
    from dflash_lab.memory.planner import expandable_segments
    from dflash_lab.memory.setups import ExtractionSetup, TrainingSetup
    from dflash_lab.memory.shapes import target_shape
    from dflash_lab.target.loading import choose_device, choose_dtype
    from dflash_lab.target.sources import load_config
    from dflash_lab.target.taps import default_tap_ids
    from dflash_lab.workbench.stages.train_memory import optimizer_of
    from dflash_lab.workbench.stages.train_setup import own_shape

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
    return with_calibrations(
        params,
        Scene(
            config=config,
            shape=target_shape(config),
            drafter=drafter,
            extraction=extraction,
            training=training,
            measured_step=replace(training, compiled=cuda and params.compile_steps),
            budget_gib=params.budget_gib or device_budget_gib(device),
            device=str(device),
        ),
    )


def with_calibrations(params: MemorySweepParams, found: Scene) -> Scene:
    """Return the scene with what was measured in this run for its layers, if anything was."""
    from dataclasses import replace

    from dflash_lab.workbench.stages.memory_calibration import extraction_basis, training_basis

    bases = (
        extraction_basis(params, found.config, found.extraction, found.device),
        training_basis(params, found.config, found.drafter, found.training, found.device),
    )
    return replace(found, bases=bases)


def run_memory_sweep(params: MemorySweepParams, progress: Any = None) -> MemorySweepResult:
    """Predict the grid, measure it, and say what fits."""
    from dflash_lab.workbench.stages.memory_calibration import calibrate, take_earlier
    from dflash_lab.workbench.stages.memory_points import measure_points, not_measured, predict_points
    from dflash_lab.workbench.stages.memory_steps import step_points
    from dflash_lab.workbench.stages.memory_tables import advice_frame, bucket_frame, headline, term_frame

    take_earlier(params)
    found = scene(params)
    points = predict_points(params, found, progress or _silent)
    if params.measure:
        points = measure_points(params, found, points, progress or _silent)
    frame = pl.DataFrame(points, schema=POINT_SCHEMA)
    steps = pl.DataFrame(step_points(params, found, progress or _silent), schema=STEP_SCHEMA)
    if params.measure:
        calibrate(params, found, frame, steps)
        found = with_calibrations(params, found)
    for what, basis in zip(("extraction", "training"), found.bases):
        logger.info("memory of %s: %s", what, basis.words)
    buckets = bucket_frame(params, found)
    advice, texts = advice_frame(params, found)
    figures = headline(found, frame, steps, buckets)
    if params.measure and (left := not_measured(params.measure_s, points)):
        logger.info("not measured: %s", left)
        figures["not_measured"] = left
    return MemorySweepResult(figures, frame, steps, term_frame(params, found), advice, buckets, texts)


def _silent(description: str, done: int, total: int, **fields: Any) -> None:
    """Report to nobody."""
