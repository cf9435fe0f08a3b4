"""Stage `extract`: run every sample of a shard through the target once and keep the tapped states."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import polars as pl

from dflash_lab import files
from dflash_lab.errors import InputError
from dflash_lab.extraction.manifest import (
    MANIFEST_FILE,
    STORE_FILE,
    Broken,
    finished_draws,
    open_identity,
    other_setup,
    read_lines,
    sealed_parts,
    shard_folders,
    shard_lock,
    shard_name,
    trial_of,
)
from dflash_lab.files import Move, beside
from dflash_lab.params import BROKEN, StageParams, param
from dflash_lab.results import FAILURE, RESULT
from dflash_lab.stage_run import LOCK

TABLES = ("batches", "quarantined", "states")  # Parquet files of the result
SELFTEST, FIGURES = "selftest.json", "figures.json"
log = logging.getLogger(__name__)
_EXAMINED = 64  # samples of the shard whose stored states are summed up for the figure
_QUANTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95, "max": 1.0}


class ExtractParams(StageParams):
    """Parameters of `extract`."""

    stage: ClassVar[str] = "extract"
    passing: ClassVar[tuple[str, ...]] = (*StageParams.passing, "recheck", "ignore_memory")
    growing: ClassVar[tuple[str, ...]] = ("max_samples",)

    samples: str = param("", "samples file; empty: the run's", group="data")
    store: str = param("", "feature store folder; empty: the run's")
    max_samples: int = param(0, "a trial of so many samples, drawn by the seed; 0: all. More goes on", low=0)
    shard: int = param(0, "which shard this run does, from 0", low=0)
    num_shards: int = param(1, "shards in all, one process (GPU) each", low=1, high=99999)
    tap_ids: list[int] = param(
        [],
        "layers to tap (0-based layer ids); empty: num_taps spread by the DFlash rule",
        low=0,
        group="what is kept",
    )
    num_taps: int = param(5, "taps when tap_ids is empty", low=1, high=64)
    store_final: bool = param(
        False, "also keep the last layer's output before the final norm, for soft targets"
    )
    storage: str = param(
        "bf16", "of the taps: bf16 is exact; fp8 and int8 halve the bytes", choices=("bf16", "fp8", "int8")
    )
    token_budget: int = param(
        16384,
        "padded tokens of a batch; 0: as the memory planner says",
        unit="tokens",
        low=0,
        group="batches",
    )
    max_batch: int = param(512, "most samples of a batch", low=1)
    window: int = param(32768, "samples sorted by length together; 0: all", low=0)
    part_gib: float = param(
        4.0,
        "the most that a crash can lose; a part file takes up to half of it",
        unit="GiB",
        low=0.001,
        high=64,
    )
    fast: str = param(
        "auto",
        "fused kernels on CUDA: auto (where they exist), on (or fail), off",
        choices=("auto", "on", "off"),
        group="care and speed",
    )
    allow_slow_kernels: bool = param(False, "run a hybrid target on CUDA without its fast kernels")
    ignore_memory: bool = param(False, "start although memory is predicted to be short")
    recheck: bool = param(False, "read every stored byte before trusting what is stored already")
    max_quarantined: int = param(0, "samples that may be quarantined before the stage fails", low=0)
    assumed_tflops: float = param(
        0.0, "for the predicted hours; 0: a typical figure of the device", unit="TFLOP/s", low=0
    )

    def check(self) -> None:
        """A shard lies below the count; taps rise."""
        self.require(
            self.shard < self.num_shards,
            "shard",
            f"shards count from 0 to num_shards - 1 = {self.num_shards - 1}",
        )
        self.require(
            self.tap_ids == sorted(set(self.tap_ids)), "tap_ids", "write each layer once, in rising order"
        )

    @property
    def samples_path(self) -> Path:
        """The samples file to read."""
        return self.path_or(self.samples, "samples.parquet")

    @property
    def store_path(self) -> Path:
        """The feature store to write."""
        return self.path_or(self.store, "store")

    @property
    def folder(self) -> Path:
        """One result folder a shard: runs of several shards stand side by side."""
        return self.run_folder / f"extract-{self.shard}"

    def inputs(self) -> list[Path]:
        """The samples decide whether a finished shard still counts."""
        return [self.samples_path]

    def needs(self) -> list[tuple[Path, str]]:
        """The samples."""
        return [(self.samples_path, "" if self.samples else "prepare")]

    def rendered(self) -> list[Path]:
        """The samples."""
        return [self.samples_path]

    @property
    def new_store(self) -> Path:
        """Where a store grows that will take the place of one of another setup."""
        return beside(self.store_path)

    def products(self) -> list[Move]:
        """The new store, where there is one."""
        return [Move(self.new_store, self.store_path, whole=True)]

    def replacement(self) -> tuple[list[Move], list[Path]]:
        """A new store takes its place, with the results of all its shards, when the last of them is done. The
        results of shards beyond their count go then, too: their samples are in these.
        """
        renewed = self.new_store.exists()
        shards = [self.changed(shard=shard) for shard in range(self.num_shards)]
        mine = [shard.folder for shard in shards]
        others = [path for path in self.run_folder.glob("extract-*") if path not in mine]
        gone = [path / name for path in others for name in (RESULT, FAILURE, LOCK) if (path / name).exists()]
        if not renewed:
            moves, removed = super().replacement()
            last = all(one == self or one.folder.joinpath(RESULT).exists() for one in shards)
            return moves, [*removed, *(gone if last else [])]
        if not all((shard.fresh / RESULT).exists() for shard in shards):
            return [], []
        moves = self.products()
        for shard in shards:
            own, removed = StageParams.replacement(shard)
            moves += own[1:]
            gone += removed
        return moves, gone

    def outputs(self) -> list[Path]:
        """The store's file and the shard's manifest; without them the stage runs again."""
        return [self.store_path / STORE_FILE, self._shard_folder / MANIFEST_FILE]

    def lacks(self) -> str:
        """A part that is gone, cut short or given up, or a broken line of the manifest, means that the stage
        runs again and redoes its samples; so does `recheck`, which looks for what a size does not tell. A
        larger `max_samples` goes on.
        """
        folder = self._shard_folder
        if self.recheck:
            return "every stored byte is to be read again (recheck)"
        if gone := super().lacks():
            return gone
        broken: list[Broken] = []
        ended = [line["kind"] for line in read_lines(folder, broken)][-1:] == ["end"]
        faults = any(part.size_fault(self.store_path) for part in sealed_parts(folder, broken))
        if faults or broken or not ended:
            return BROKEN
        draws = finished_draws(folder)
        if any(not one["max_samples"] or self._within(one) for one in draws):
            return ""
        had = max((one["max_samples"] for one in draws), default=0)
        more = f"{self.max_samples:,}" if self.max_samples else "all"
        return f"max_samples was {had:,}, now {more}: the others of them are still to be extracted"

    def remains(self) -> str:
        """A trial goes on to the other samples."""
        of = trial_of(self.store_path)
        had = max((one["max_samples"] for one in finished_draws(self._shard_folder)), default=0)
        return f"a trial of {had:,} of {of:,} samples; -p max_samples 0 goes on to the others" if of else ""

    def _within(self, drawn: dict[str, Any]) -> bool:
        """Whether all samples of this trial were among those of a finished one."""
        return 0 < self.max_samples <= drawn["max_samples"] and drawn["seed"] == self.seed

    @property
    def _shard_folder(self) -> Path:
        return self.store_path / shard_name(self.shard, self.num_shards)


@dataclass(frozen=True)
class ExtractResult:
    """Headline figures and what the notebook draws.

    `batches`: samples, longest, tokens, seconds of each batch in the order run. `quarantined`: id, hash,
    length, reason. `states`: quantiles of the row RMS of each stored state. `selftest`: as in the manifest,
    empty if nothing was left to do.
    """

    figures: dict[str, float | int | str]
    batches: pl.DataFrame
    quarantined: pl.DataFrame
    states: pl.DataFrame
    selftest: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Leave the result in the stage's folder."""
        for name in TABLES:
            with files.atomic_path(folder / f"{name}.parquet") as temporary:
                getattr(self, name).write_parquet(temporary)
        files.write_json(folder / SELFTEST, self.selftest)
        files.write_json(folder / FIGURES, files.plain(self.figures))

    @classmethod
    def load(cls, folder: Path) -> ExtractResult:
        """Read a finished result again."""
        return cls(
            figures=files.read_json(folder / FIGURES),
            selftest=files.read_json(folder / SELFTEST),
            **{name: pl.read_parquet(folder / f"{name}.parquet") for name in TABLES},
        )


def run_extract(params: ExtractParams, progress: Any = None) -> ExtractResult:
    """Extract one shard and seal it; raises `QuarantineError` at the end if samples could not be stored."""
    from dflash_lab.extraction.checks import preflight
    from dflash_lab.extraction.fused_layers import speed_up
    from dflash_lab.extraction.loop import extract
    from dflash_lab.extraction.shard import drawn, read_index
    from dflash_lab.memory.gate import Clearance, explained
    from dflash_lab.models.hooks import default_tap_ids
    from dflash_lab.models.load import choose_device, load_target
    from dflash_lab.models.source import load_config
    from dflash_lab.stages.clearance import SNAPSHOT, ask_extraction, extraction_budgets, memory_figures

    config = load_config(params.target)
    tap_ids = params.tap_ids or default_tap_ids(config.num_hidden_layers, params.num_taps)
    device = choose_device(params.device)
    index = read_index(params.samples_path)
    lengths = index.lengths[drawn(index, params.max_samples, params.seed)]
    store = _store_to_fill(params, config, tap_ids, index.set_hash)
    checked = preflight(
        config,
        lengths,
        store,
        tap_ids=tap_ids,
        store_final=params.store_final,
        storage=params.storage,
        device_type=device.type,
        tflops=params.assumed_tflops,
        replaced=params.store_path if store == params.new_store else None,
    )
    longest = int(lengths.max(initial=1))
    cleared = ask_extraction(params, config, device, tap_ids=tap_ids, longest=longest)
    extraction_budgets(params, cleared)  # the planner must have an answer, if asked, before a target loads
    sizes = {
        "token_budget": params.token_budget, "batch": params.max_batch, "length": longest,
        "hidden": config.hidden_size, "taps": len(tap_ids),
        "intermediate": getattr(config, "intermediate_size", 0) or 0,
    }  # fmt: skip
    watch: dict[str, Any] = dict(device=device, snapshot=params.folder / SNAPSHOT)
    with explained(cleared, sizes, **watch):
        target = load_target(
            params.target,
            device=device,
            dtype=params.dtype,
            seed=params.seed,
            last_layer=None if params.store_final else max(tap_ids),
            with_head=False,
            allow_slow_kernels=params.allow_slow_kernels,
        )
        fast = speed_up(target, params.fast)
    if isinstance(cleared, Clearance) and fast.plain:  # plain layers hold more than fused ones
        cleared = ask_extraction(
            params,
            config,
            device,
            tap_ids=tap_ids,
            longest=longest,
            plain_layers=sorted(fast.plain),
            budget_gib=cleared.budget_gib,
        )
    token_budget, max_batch = extraction_budgets(params, cleared)
    with explained(cleared, {**sizes, "token_budget": token_budget, "batch": max_batch}, **watch):
        report = extract(
            target,
            params.samples_path,
            store,
            tap_ids=tap_ids,
            shard=params.shard,
            num_shards=params.num_shards,
            max_samples=params.max_samples,
            seed=params.seed,
            token_budget=token_budget,
            max_batch=max_batch,
            store_final=params.store_final,
            storage=params.storage,
            window=params.window,
            part_gib=params.part_gib,
            recheck=params.recheck,
            notes={"fast_path": fast.summary(), "preflight": checked.figures()},
            on_progress=progress,
        )
    result = ExtractResult(
        figures={
            **report.figures(),
            **checked.figures(),
            **memory_figures(cleared, device),
            "taps": str(tap_ids),
            "samples_of_set": len(index.lengths),
            "fused_layers": len(fast.errors),
        },
        batches=pl.DataFrame(report.batches, schema=_BATCH_SCHEMA),
        quarantined=pl.DataFrame(report.quarantined, schema=_QUARANTINE_SCHEMA),
        states=_state_rms(store)
        if report.samples_in > len(report.quarantined)
        else pl.DataFrame(schema=_STATE_SCHEMA),
        selftest=report.selftest,
    )
    report.raise_for_quarantine(params.max_quarantined)
    return result


def _store_to_fill(params: ExtractParams, config: Any, tap_ids: list[int], samples_hash: str) -> Path:
    """Return the folder to extract into: the store, or beside one of another setup the one to replace it.

    `StoreError` names the differences where nobody asked for that (`force`). Asked before weights are read.
    """
    from dflash_lab.extraction.store import Layout, find_codec
    from dflash_lab.models.load import choose_dtype
    from dflash_lab.models.source import identify, resolve

    layout = Layout(tuple(tap_ids), config.hidden_size, params.store_final, find_codec(params.storage))
    target = identify(resolve(params.target), seed=params.seed)
    identity = layout.identity(target, choose_dtype(params.dtype, config), samples_hash)
    changed = other_setup(params.store_path, identity)
    if not changed:
        _give_up_new_store(params)
        return params.store_path
    if not params.force:
        open_identity(params.store_path, identity)  # raises, with the differences
    if os.path.ismount(params.store_path):
        raise InputError(
            f"{params.store_path}: a disk is mounted here, so that nothing can take the place of the whole "
            f"folder. Give a folder in it: store={params.store_path / 'store'}"
        )
    if other_setup(params.new_store, identity):
        _give_up_new_store(params)
    log.info(
        "a new store grows beside %s and replaces it when it is whole: %s", params.store_path, changed[0]
    )
    return params.new_store


def _give_up_new_store(params: ExtractParams) -> None:
    """Remove a store that was to replace another and was never finished, with the results of its shards."""
    if not params.new_store.exists():
        return
    for folder in shard_folders(params.new_store):
        with shard_lock(folder):  # refuses where another process is writing it
            log.info("%s was begun with another setup and not finished: removed", folder)
    for fresh in params.run_folder.glob("extract-*/.fresh"):
        if fresh != params.fresh:
            shutil.rmtree(fresh)
    shutil.rmtree(params.new_store)


_BATCH_SCHEMA: dict[str, Any] = {
    "samples": pl.Int64,
    "longest": pl.Int64,
    "tokens": pl.Int64,
    "seconds": pl.Float64,
}
_QUARANTINE_SCHEMA: dict[str, Any] = {
    "id": pl.String,
    "hash": pl.String,
    "length": pl.Int64,
    "reason": pl.String,
}
_STATE_SCHEMA: dict[str, Any] = {"state": pl.String, **dict.fromkeys(_QUANTILES, pl.Float64)}


def _state_rms(path: Path) -> pl.DataFrame:
    """Re-read some stored samples and sum up the RMS of their rows, by stored state."""
    import torch

    from dflash_lab.extraction.store import open_store

    store = open_store(path)
    sizes: dict[str, list[Any]] = {}
    for index in range(0, len(store), max(1, len(store) // _EXAMINED)):
        item = store[index]
        names = [f"tap {tap}" for tap in store.tap_ids]
        states = dict(zip(names, item.taps.float().split(store.hidden_size, dim=-1), strict=True))
        if item.final is not None:
            states["final"] = item.final.float()
        for name, state in states.items():
            sizes.setdefault(name, []).append(state.square().mean(dim=-1).sqrt())
    marks = torch.tensor([*_QUANTILES.values()])
    found = [
        (name, *torch.cat(rows)[:1_000_000].quantile(marks).tolist())  # quantile takes 16 million at most
        for name, rows in sizes.items()
    ]
    return pl.DataFrame(found, schema=_STATE_SCHEMA, orient="row")
