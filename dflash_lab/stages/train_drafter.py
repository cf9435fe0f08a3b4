"""Stage `train_drafter`: a DFlash drafter from stored target states, or from a target that runs beside it.

Its run resumes from its last checkpoint; with other parameters the earlier steps are set aside.
"""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import polars as pl

from dflash_lab import files
from dflash_lab.drafter.journal import BY_SLOT, read_journal
from dflash_lab.errors import FileError
from dflash_lab.files import Move, beside
from dflash_lab.params import StageParams, param
from dflash_lab.stages.judgement import of_training

if TYPE_CHECKING:
    from dflash_lab.drafter.train import TrainReport
    from dflash_lab.stages.training_inputs import TrainingInputs

# Parameters ------------------------------------------------------------------------------------------------


class TrainDrafterParams(StageParams):
    """Parameters of `train_drafter`."""

    stage: ClassVar[str] = "train_drafter"
    passing: ClassVar[tuple[str, ...]] = (*StageParams.passing, "ignore_memory")

    source: str = param(
        "store", "of states: a feature store, or the live target", choices=("store", "live"), group="data"
    )
    store: str = param("", "feature store folder; empty: the run's")
    check_store: bool = param(True, "hold the store against its checksums once, before the first step")
    samples: str = param("", "samples file (live); empty: the run's")
    tap_ids: list[int] = param(
        [], "layers to tap (live; a store has its own); empty: five by the DFlash rule", low=0
    )
    drafter: str = param("", "where the finished drafter goes; empty: drafter/ of the run")
    start_from: str = param("", "drafter checkpoint to start from; empty: random weights")

    num_layers: int = param(5, "draft layers", low=1, high=64, group="drafter")
    block_size: int = param(16, "slots of a block, the anchor included", low=2, high=256)
    sliding_layers: list[int] = param([], "draft layers with a sliding window, from 0", low=0)
    sliding_window: int = param(2048, "window of those layers", unit="tokens", low=1, high=2**24)
    mask_token_id: int = param(-1, "token of masked slots; -1: chosen from the tokenizer", low=-1)
    num_heads: int = param(0, "attention heads; 0: the target's", low=0, high=4096)
    num_kv_heads: int = param(0, "key/value heads; 0: the target's", low=0, high=4096)
    head_dim: int = param(0, "size of a head; 0: the target's", low=0, high=4096)
    intermediate_size: int = param(0, "feed-forward width; 0: the target's", low=0, high=2**20)
    dflash2: bool = param(False, "DFlash 2: dynamic convolutions and a candidate selector")
    selector_weight: float = param(
        1.0, "factor of the selector's cross-entropy (DFlash 2)", low=0.0, high=1e4
    )
    drafter_dtype: str = param(
        "auto", "weights; auto: bfloat16 on CUDA, else float32", choices=("auto", "float32", "bfloat16")
    )

    context_tokens: int = param(
        8192, "context of a packed row", unit="tokens", low=2, high=2**24, group="rows"
    )
    anchors: int = param(
        512, "blocks of a packed row; 0: the most that the memory planner says fit", low=0, high=2**20
    )
    grad_accum_steps: int = param(1, "rows of an optimizer step", low=1, high=2**16)
    noise_std: float = param(0.0, "uniform noise on the states, half width", low=0.0, high=100.0)

    gamma: float = param(
        7.0, "slot k weighs exp(-(k-1)/gamma); 0: all alike", low=0.0, high=1e4, group="loss"
    )
    weighting: str = param("decay", "of slots: decay alone, or times D-PACE's", choices=("decay", "dpace"))
    dpace_alpha: float = param(0.5, "floor of D-PACE's confidences", low=0.0, high=1.0)
    denominator: str = param(
        "weights",
        "loss is divided by the sum of slot weights, or by the number of slots",
        choices=("weights", "mask"),
    )
    labels: str = param(
        "data", "hard labels: stored tokens or the target's argmax", choices=("data", "argmax")
    )
    hard_weight: float = param(1.0, "factor of cross-entropy", low=0.0, high=1e4)
    soft_weight: float = param(0.0, "factor of KL(target || drafter)", low=0.0, high=1e4)
    temperature: float = param(1.0, "of the KL term", low=0.01, high=100.0)
    cap_weight: float = param(0.0, "factor of the entropy of right predictions (CAP)", low=0.0, high=1e4)
    tv_weight: float = param(0.0, "factor of the total variation distance", low=0.0, high=1e4)
    lk_weight: float = param(0.0, "factor of the LK hybrid", low=0.0, high=1e4)
    lk_decay: float = param(3.0, "how fast the hybrid goes from KL to TV as overlap grows", low=0.0, high=1e4)
    length_weight: float = param(0.0, "factor of the expected accepted length", low=0.0, high=1e4)
    acceptance: str = param(
        "label",
        "in that length, a slot's: label's probability, or overlap with the target",
        choices=("label", "overlap"),
    )

    optimizer: str = param(
        "adamw",
        "muon takes the layers' matrices, adamw the rest",
        choices=("adamw", "muon"),
        group="optimizer",
    )
    lr: float = param(6e-4, "peak learning rate of AdamW", low=0.0, high=10.0)
    weight_decay: float = param(0.0, "of AdamW", low=0.0, high=10.0)
    beta1: float = param(0.9, "AdamW's decay of the first moment", low=0.0, high=0.9999)
    beta2: float = param(0.999, "AdamW's decay of the second moment", low=0.0, high=0.999999)
    eps: float = param(1e-8, "AdamW's, beside the root of the second moment", low=1e-16, high=1.0)
    muon_lr: float = param(1e-3, "peak learning rate of Muon", low=0.0, high=10.0)
    muon_momentum: float = param(0.95, "of Muon", low=0.0, high=0.9999)
    muon_weight_decay: float = param(0.1, "of Muon", low=0.0, high=10.0)
    moments: str = param("fp32", "Adam's moments; int8: a byte each", choices=("fp32", "int8"))
    offload: bool = param(False, "masters and moments in host memory: slower steps, 12 bytes a weight less")
    warmup: float = param(0.04, "share of the run", low=0.0, high=1.0)
    min_lr_ratio: float = param(0.0, "last learning rate as a share of the peak", low=0.0, high=1.0)
    clip_norm: float = param(1.0, "gradient norm above which gradients shrink; 0: never", low=0.0)

    max_steps: int = param(
        0, "optimizer steps; 0: from epochs", low=0, high=10**9, group="length and measuring"
    )
    epochs: float = param(6.0, "passes over the training samples when max_steps is 0", low=0.0, high=1e5)
    min_steps: int = param(0, "least steps where they come from epochs", low=0, high=10**9)
    time_limit_s: float = param(
        0.0, "time in steps after which training winds up; 0: none", unit="s", low=0.0
    )
    log_every: int = param(10, "steps between records of training metrics", low=1, high=10**9)
    eval_every: int = param(100, "steps between held-out metrics", low=1, high=10**9)
    eval_rows: int = param(4, "packed held-out rows to measure", low=0, high=10**6)
    tau_samples: int = param(8, "held-out samples for the chained tau; 0: none", low=0, high=10**6)
    checkpoint_every: int = param(500, "steps between checkpoints", low=1, high=10**9)
    keep: int = param(2, "checkpoints kept", low=1, high=10**6)
    max_bad_steps: int = param(5, "skipped steps in a row that end the run", low=1, high=10**6)
    explode_factor: float = param(50.0, "skip a gradient this many times the usual norm", low=1.01)
    export: str = param("best", "which weights become the drafter", choices=("best", "last"))
    gradient_checkpointing: bool = param(
        False, "recompute layers in the backward pass", group="speed and GPUs"
    )
    compile: bool = param(True, "on CUDA: compile each layer of the drafter into one graph")
    compile_target: bool = param(False, "on CUDA, live: the target's layers too; states then differ a little")
    attention: str = param("auto", "auto: flex on CUDA, else dense", choices=("auto", "dense", "flex"))
    ignore_memory: bool = param(False, "start although memory is predicted to be short")
    gpus: int = param(1, "GPUs to train with, a process each; on a CPU: processes", low=1, high=1024)
    parallel: str = param(
        "ddp", "of several processes: whole drafter in each, or sharded", choices=("ddp", "fsdp")
    )
    target_gpus: list[int] = param(
        [], "GPUs of targets that feed drafters on others (live); empty: in one process", low=0, high=1023
    )
    drafter_gpus: list[int] = param(
        [], "GPUs of the drafters they feed; several train as one", low=0, high=1023
    )
    head_gpu: int = param(
        -1, "GPU of the frozen head, where the loss is; -1: the drafter's own", low=-1, high=1023
    )
    target_head_gpu: int = param(
        -1, "GPU of a copy of the head that makes the target's logits; -1: none", low=-1, high=1023
    )
    head_parallel: bool = param(
        False, "of several processes: each holds a slice of the head, for the rows of all"
    )
    queue_rows: int = param(2, "rows that may lie ready between a target and a drafter", low=1, high=64)

    def check(self) -> None:
        """Rules between fields that need neither store nor target."""
        self.require(
            self.tap_ids == sorted(set(self.tap_ids)), "tap_ids", "write each layer once, in rising order"
        )
        self.require(
            self.source == "live" or not self.tap_ids, "tap_ids", "a store has its own; give them to extract"
        )
        apart = bool(self.target_gpus)
        self.require(
            apart == bool(self.drafter_gpus),
            "target_gpus" if apart else "drafter_gpus",
            "name GPUs for both targets and drafters, by target_gpus and drafter_gpus",
        )
        self.require(
            not apart or self.source == "live",
            "target_gpus",
            "targets that feed drafters need source: live",
        )
        self.require(not apart or self.gpus == 1, "gpus", "drafter_gpus says on which GPUs to train")
        once = len(set(self.drafter_gpus)) == len(self.drafter_gpus)
        self.require(
            once, "drafter_gpus", "name each GPU once: drafters that train as one cannot share a GPU"
        )
        alone = self.head_gpu < 0 and self.target_head_gpu < 0 and not self.dflash2
        self.require(not self.head_parallel or self.world > 1, "head_parallel", "one process has no slices")
        self.require(
            not self.head_parallel or alone,
            "head_parallel",
            "slices lie with their drafters, and the selector of dflash2 needs the whole head: not with "
            "head_gpu, target_head_gpu or dflash2",
        )
        over = [layer for layer in self.sliding_layers if layer >= self.num_layers]
        self.require(not over, "sliding_layers", f"the drafter has layers 0..{self.num_layers - 1}")
        self.require(bool(self.max_steps or self.epochs), "max_steps", "give max_steps or epochs")
        timed = self.time_limit_s == 0 or self.time_limit_s >= 1
        self.require(timed, "time_limit_s", "give at least 1 second, or 0 for no limit")
        terms = ("hard", "soft", "cap", "tv", "lk", "length")
        self.require(
            any(getattr(self, f"{term}_weight") for term in terms),
            "hard_weight",
            "every term of the loss is 0; give at least one a weight",
        )

    @property
    def store_path(self) -> Path:
        """The feature store to read."""
        return self.path_or(self.store, "store")

    @property
    def world(self) -> int:
        """Processes that train one drafter."""
        return len(self.drafter_gpus) or self.gpus

    @property
    def samples_path(self) -> Path:
        """The samples that the live target reads."""
        return self.path_or(self.samples, "samples.parquet")

    @property
    def drafter_path(self) -> Path:
        """The folder of the finished drafter."""
        return self.path_or(self.drafter, "drafter")

    @property
    def fresh_drafter(self) -> Path:
        """Where the drafter is put together, on the disk of its place."""
        return beside(self.drafter_path)

    def products(self) -> list[Move]:
        """The finished drafter."""
        return [Move(self.fresh_drafter, self.drafter_path)]

    def taken(self) -> list[Path]:
        """A drafter at a path that other runs may have, too."""
        there = self.drafter and any(path.exists() for path in self.outputs())
        return [self.drafter_path] if there else []

    def needs(self) -> list[tuple[Path, str]]:
        """The states, or the samples that a live target reads; the drafter to start from."""
        live = self.source == "live"
        states = (self.samples_path, "" if self.samples else "prepare")
        stored = (self.store_path / "store.json", "" if self.store else "extract")
        return [states if live else stored, *([(Path(self.start_from), "")] if self.start_from else [])]

    def rendered(self) -> list[Path]:
        """The samples that are read live, or that the run's store was made of."""
        return [self.samples_path] if self.source == "live" or not self.store else []

    def inputs(self) -> list[Path]:
        """The store or the samples, and the drafter to start from."""
        states = self.samples_path if self.source == "live" else self.store_path
        return [states, *([Path(self.start_from)] if self.start_from else [])]

    def outputs(self) -> list[Path]:
        """The finished drafter."""
        return [self.drafter_path / name for name in ("model.safetensors", "config.json", "serve.md")]


# Run -------------------------------------------------------------------------------------------------------


def run_train_drafter(params: TrainDrafterParams, progress: Any = None) -> TrainDrafterResult:
    """Train, export the drafter (`export`: the best on held-out rows, or the last), and collect what the
    figures need.
    """
    from dflash_lab.drafter.checkpoint import copy_checkpoint
    from dflash_lab.drafter.formats import write_serving_notes
    from dflash_lab.models.source import served_name
    from dflash_lab.stages.clearance import clear_processes, with_anchors
    from dflash_lab.stages.train_processes import train_apart, train_here, train_pipeline
    from dflash_lab.stages.training_inputs import check_placement, check_states, resolve_inputs

    # All that can be refused is refused before targets load and processes start.
    check_placement(params)
    inputs = resolve_inputs(params)
    check_states(inputs, progress)
    inputs = with_anchors(inputs)
    params = inputs.params
    if params.target_gpus or max(params.head_gpu, params.target_head_gpu) >= 0:  # one GPU for several
        clear_processes(inputs)
    if params.drafter_path.exists() and not params.drafter_path.is_dir():
        raise FileError(errno.ENOTDIR, params.drafter_path)
    shutil.rmtree(params.fresh_drafter, ignore_errors=True)  # of an attempt that was killed
    # On the disk of the drafter: one that cannot be written to is told now.
    files.make_folder(params.fresh_drafter)
    if params.target_gpus:
        report = train_pipeline(params, progress)
    elif params.gpus > 1:
        report = train_apart(params, progress)
    else:
        report = train_here(inputs, progress)
    chosen = report.best if params.export == "best" else report.last_checkpoint
    copy_checkpoint(chosen, params.fresh_drafter)
    write_serving_notes(
        params.fresh_drafter,
        served_name(params.target),
        inputs.target_dtype,
        place=params.drafter_path,
    )
    return collect(inputs, report)


# Result ----------------------------------------------------------------------------------------------------


_FRAMES = ("steps", "metrics", "positions", "pipeline")


@dataclass(frozen=True)
class TrainDrafterResult:
    """Headline figures and what the notebook draws.

    `steps`: step, loss, grad_norm, lr, skipped (the fault, or null). `metrics`: kind (train | heldout), step
    and the metrics of `drafter.objective.Tally`. `positions`: kind, step, slot, accuracy, conditional. `row`:
    the inspected packed row. `pipeline`: a record a row and worker (TIMING_SCHEMA), empty without one.
    """

    figures: dict[str, Any]
    steps: pl.DataFrame
    metrics: pl.DataFrame
    positions: pl.DataFrame
    row: dict[str, Any]
    pipeline: pl.DataFrame

    def save(self, folder: Path) -> None:
        """Leave the result in the stage's folder."""
        for name in _FRAMES:
            with files.atomic_path(folder / f"{name}.parquet") as temporary:
                getattr(self, name).write_parquet(temporary)
        files.write_json(folder / "row.json", self.row)
        files.write_json(folder / "figures.json", files.plain(self.figures))

    @classmethod
    def load(cls, folder: Path) -> TrainDrafterResult:
        """Read a finished result again."""
        frames = {name: pl.read_parquet(folder / f"{name}.parquet") for name in _FRAMES}
        return cls(
            figures=files.read_json(folder / "figures.json"),
            row=files.read_json(folder / "row.json"),
            **frames,
        )


def collect(inputs: TrainingInputs, report: TrainReport) -> TrainDrafterResult:
    """Turn a finished run into tables and headline figures."""
    from dflash_lab.drafter.pipeline import TIMING_SCHEMA
    from dflash_lab.drafter.rows import inspect_row
    from dflash_lab.models.source import load_tokenizer
    from dflash_lab.stages.train_processes import TIMINGS

    params = inputs.params
    # Random targets have no tokenizer.
    tokenizer: Any = None if params.target.startswith("random:") else load_tokenizer(params.target)
    decode = None if tokenizer is None else lambda token: tokenizer.decode([token])
    pipeline = (
        pl.read_parquet(params.folder / TIMINGS) if params.target_gpus else pl.DataFrame(schema=TIMING_SCHEMA)
    )
    records = read_journal(params.folder / "run")
    steps = step_frame(records)
    row = inspect_row(
        inputs.items, inputs.drafter, params.context_tokens, params.anchors, params.seed, decode
    )
    return TrainDrafterResult(
        figures=headline(inputs, report, steps),
        steps=steps,
        metrics=metric_frame(records),
        positions=position_frame(records),
        row=row,
        pipeline=pipeline,
    )


def headline(inputs: TrainingInputs, report: TrainReport, steps: pl.DataFrame) -> dict[str, Any]:
    """The figures of a finished run, with what its processes left of memory and rates, and in a sentence what
    they amount to.
    """
    from dflash_lab.extraction.manifest import trial_of
    from dflash_lab.stages.train_processes import MEMORY, SUMMARY

    params, items = inputs.params, inputs.items
    losses = steps.filter(pl.col("loss").is_not_null())["loss"]
    measured = report.best / "metrics.json"  # absent when no held-out row could be measured
    best = files.read_json(measured) if measured.exists() else {}
    seconds = max(report.seconds, 1e-9)
    train = ~np.asarray(items.heldout, dtype=bool)
    trial = trial_of(params.store_path) if params.source == "store" else 0
    figures = {
        "steps": report.steps,
        "time_limit_s": params.time_limit_s,
        "training_samples": int(train.sum()),
        "training_tokens": int(np.asarray(items.lengths)[train].sum()),
        "anchors": params.anchors,
        "skipped_steps": report.skipped,
        "loss_first": losses[0] if len(losses) else None,
        "loss_last": losses.tail(max(1, min(10, len(losses) // 10))).mean(),
        "heldout_loss_first": report.first.get("loss"),
        "heldout_loss_last": report.last.get("loss"),
        "accuracy_first": report.first.get("accuracy"),
        "accuracy_last": report.last.get("accuracy"),
        "streak_first": report.first.get("streak"),
        "streak_last": report.last.get("streak"),
        "streak_best": best.get("streak"),
        "chained_tau_first": report.first.get("chained_tau"),
        "chained_tau_last": report.last.get("chained_tau"),
        "best_step": report.best_step,
        "labels": params.labels,
        "agreement": report.last.get("agreement"),
        "train_seconds": seconds,
        "compile_seconds": report.compile_seconds,
        "context_tokens_per_s": report.context_tokens / seconds,
        "anchors_per_s": report.blocks / seconds,
        "loader_share_pct": 100 * report.loader_share,
        "drafter_parameters": inputs.drafter.parameter_count,
        **files.read_json(params.folder / MEMORY),
        **(files.read_json(params.folder / SUMMARY) if params.target_gpus else {}),
        **({"stored_samples": len(items.lengths), "stored_samples_of": trial} if trial else {}),
    }
    return {**figures, "judgement": of_training(figures)}


# The journal as tables ------------------------------------------------------------------------------------


STEP_SCHEMA = {
    "step": pl.Int64,
    "loss": pl.Float64,
    "grad_norm": pl.Float64,
    "lr": pl.Float64,
    "skipped": pl.String,
}
POSITION_SCHEMA = {
    "kind": pl.String,
    "step": pl.Int64,
    "slot": pl.Int64,
    "accuracy": pl.Float64,
    "conditional": pl.Float64,
}


def step_frame(records: list[dict[str, Any]]) -> pl.DataFrame:
    """One row a step: loss, gradient norm, learning rate, and the fault of a skipped one."""
    rows = [{name: r.get(name) for name in STEP_SCHEMA} for r in records if r["kind"] == "step"]
    return pl.DataFrame(rows, schema=STEP_SCHEMA)


def metric_frame(records: list[dict[str, Any]]) -> pl.DataFrame:
    """One row a record of kind `train` or `heldout`; a metric that a kind lacks is null."""
    rows = [
        {name: _number(value) for name, value in r.items() if name not in BY_SLOT}
        for r in records
        if r["kind"] in ("train", "heldout")
    ]
    names = dict.fromkeys(
        ["kind", "step", "loss", "ce", "kl", "entropy", "accuracy", "streak", "agreement", "ece"]
    )
    names |= dict.fromkeys(name for row in rows for name in row)
    schema = {n: pl.String if n == "kind" else pl.Int64 if n == "step" else pl.Float64 for n in names}
    return pl.DataFrame([{name: row.get(name) for name in names} for row in rows], schema=schema)


def seconds_left(metrics: pl.DataFrame) -> float | None:
    """Predicted time to the end of a run: the share not done yet at the pace of its last records; None while
    fewer than two of them tell (a pause between a stop and a resumption is no pace, so it is a median).
    """
    if not {"time", "progress"} <= set(metrics.columns):
        return None
    told = metrics.filter(pl.col("kind") == "train").select("time", "progress").drop_nulls().tail(21)
    steps = told.select(pl.all().diff()).drop_nulls().filter(pl.col("progress") > 0)
    if not steps.height:
        return None
    pace = (steps["time"] / steps["progress"]).median()
    return max(0.0, 1.0 - told["progress"][-1]) * float(pace)  # type: ignore[arg-type]


def position_frame(records: list[dict[str, Any]]) -> pl.DataFrame:
    """One row a record and slot 1..B-1."""
    rows = [
        {"kind": r["kind"], "step": r["step"], "slot": slot, "accuracy": accuracy, "conditional": conditional}
        for r in records
        if r["kind"] in ("train", "heldout")
        for slot, (accuracy, conditional) in enumerate(
            zip(*(r[name] for name in BY_SLOT), strict=True), start=1
        )
    ]
    return pl.DataFrame(rows, schema=POSITION_SCHEMA)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
