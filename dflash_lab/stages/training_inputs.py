"""What the parameters of a training run come to on this machine, resolved once and handed on: shapes, device,
store, settings.
"""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_lab.data.samples import occurs
from dflash_lab.drafter.checkpoint import WEIGHTS, differences, newest, saved_setup
from dflash_lab.drafter.config import DrafterConfig, resolve_mask_token_id
from dflash_lab.drafter.live import LiveItems, SampleItems
from dflash_lab.drafter.loss_terms import LossConfig
from dflash_lab.drafter.objective import TrainSettings
from dflash_lab.drafter.optim import OptimizerConfig
from dflash_lab.drafter.rows import PackedRows
from dflash_lab.errors import InputError
from dflash_lab.extraction.checks import check_parts
from dflash_lab.extraction.fused_layers import speed_up
from dflash_lab.extraction.manifest import trial_of
from dflash_lab.extraction.store import FeatureStore, open_store
from dflash_lab.files import checksum
from dflash_lab.models.hooks import default_tap_ids
from dflash_lab.models.load import TargetHead, choose_device, choose_dtype, load_head, load_target
from dflash_lab.models.source import identify, load_config, load_tokenizer, resolve

if TYPE_CHECKING:
    import torch

    from dflash_lab.progress import ProgressCallback
    from dflash_lab.stages.memory_sweep import MemorySweepParams
    from dflash_lab.stages.train_drafter import TrainDrafterParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingInputs:
    """A run's parameters and what they come to. Nothing here holds weights."""

    params: TrainDrafterParams
    device: torch.device  # that trains; of several, this process's own
    dtype: torch.dtype  # of the drafter's weights
    target: Any  # the target's text configuration
    drafter: DrafterConfig
    store: FeatureStore | None  # None: a live target makes the states

    @property
    def final_states(self) -> bool:
        """Whether rows come with the target's final states; a live target always makes them."""
        return self.store is None or self.store.has_final

    @property
    def target_dtype(self) -> str:
        """Type of the target's weights when the states were made, by torch name."""
        if self.store is not None:
            return self.store.manifest["compute_dtype"]
        return str(choose_dtype(self.params.dtype, self.target)).removeprefix("torch.")

    @cached_property
    def items(self) -> FeatureStore | SampleItems:
        """What rows are planned from, without a target: the store, or the samples alone, checked."""
        if self.store is not None:
            return self.store
        path = self.params.samples_path
        items = SampleItems(path, self.target.hidden_size, list(self.drafter.tap_ids))
        items.check_vocabulary(self.target.vocab_size)
        if items.heldout.all():
            raise InputError(
                f"{path}: every sample is held out, none is left to train on. Run prepare with more "
                "conversations or a smaller heldout_fraction."
            )
        return items


def resolve_inputs(params: TrainDrafterParams) -> TrainingInputs:
    """Settle device, type, shapes and store. `InputError` for a store that another target made, and where the
    vocabulary has no token free for masked slots.
    """
    import torch

    device, target = choose_device(params.device), load_config(params.target)
    name = params.drafter_dtype
    dtype = ("bfloat16" if device.type == "cuda" else "float32") if name == "auto" else name
    store = open_store(params.store_path) if params.source == "store" else None
    if store is not None:
        weights = identify(resolve(params.target), seed=params.seed)["weights"]
        store.check_made_by(params.target, weights, target.hidden_size)
    drafter = DrafterConfig.from_target(
        target,
        mask_token_id=_mask_token(params, target.vocab_size),
        num_layers=params.num_layers,
        block_size=params.block_size,
        tap_ids=store.tap_ids if store else params.tap_ids or default_tap_ids(target.num_hidden_layers),
        sliding_layers=tuple(params.sliding_layers),
        sliding_window=params.sliding_window,
        **own_shape(params),
    )
    return TrainingInputs(params, device, getattr(torch, dtype), target, drafter, store)


def _mask_token(params: TrainDrafterParams, vocab_size: int) -> int:
    """The token of masked slots, which should not occur in the samples where these are at hand."""
    rendered = [path for path in params.rendered()[:1] if path.exists()]

    def occurring(token: int) -> bool:
        return any(occurs(path, token) for path in rendered)

    mask, why = resolve_mask_token_id(
        vocab_size,
        explicit=params.mask_token_id,
        tokenizer=None if params.target.startswith("random:") else load_tokenizer(params.target),
        occurs=occurring,
    )
    logger.info("masked slots hold token %d: %s", mask, why)
    if params.mask_token_id >= 0 and occurring(mask):
        logger.warning("mask_token_id=%d occurs in the samples: a masked slot looks like that token", mask)
    return mask


def own_shape(params: TrainDrafterParams | MemorySweepParams) -> dict[str, Any]:
    """The drafter's sizes that the parameters give, None for the target's, and what makes it a DFlash 2."""
    names = ("num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    # As DFlash 2 was released: bidirectional in every layer, the convolutions being causal.
    dflash2: dict[str, Any] = dict(
        conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16, is_causal=False
    )
    return {name: getattr(params, name) or None for name in names} | (dflash2 if params.dflash2 else {})


def optimizer_of(params: TrainDrafterParams | MemorySweepParams) -> str:
    """The memory room's name of the optimizer that these parameters choose."""
    if params.offload:
        return "cpu-offload"
    if params.optimizer == "muon":
        return "muon"
    return "adamw8bit" if params.moments == "int8" else "adamw"


def train_settings(inputs: TrainingInputs, items: Any) -> TrainSettings:
    """The training room's settings; `epochs` become steps by counting the packed rows of `items`, `min_steps`
    at least: a few dozen chats are one row, and six passes over it six steps.
    """
    params, steps = inputs.params, inputs.params.max_steps
    if not steps:
        rows, _ = packed_rows(inputs, items)
        in_a_step = params.grad_accum_steps * params.world
        steps = max(1, params.min_steps, math.ceil(params.epochs * rows.count(0) / in_a_step))
    same = (
        "context_tokens anchors selector_weight gamma denominator noise_std warmup clip_norm log_every "
        "eval_every eval_rows checkpoint_every keep max_bad_steps explode_factor time_limit_s attention seed"
    )
    return TrainSettings(
        max_steps=steps,
        accumulate=params.grad_accum_steps,
        floor=params.min_lr_ratio,
        loss=LossConfig(
            hard_weight=params.hard_weight,
            soft_weight=params.soft_weight,
            temperature=params.temperature,
            cap_weight=params.cap_weight,
            tv_weight=params.tv_weight,
            lk_weight=params.lk_weight,
            lk_decay=params.lk_decay,
            length_weight=params.length_weight,
            acceptance=params.acceptance,  # type: ignore[arg-type]
            label_source=params.labels,  # type: ignore[arg-type]
            weighting="dpace" if params.weighting == "dpace" else "given",
            dpace_alpha=params.dpace_alpha,
        ),
        optimizer=OptimizerConfig(
            kind=params.optimizer,
            lr=params.lr,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
            muon_lr=params.muon_lr,
            muon_momentum=params.muon_momentum,
            muon_weight_decay=params.muon_weight_decay,
            moments=params.moments,
            offload=params.offload,
        ),
        **{name: getattr(params, name) for name in same.split()},
    )


def packed_rows(inputs: TrainingInputs, items: Any) -> tuple[PackedRows, PackedRows | None]:
    """The rows that the training loop draws from `items`, and the held-out ones if there are any."""
    params, pad = inputs.params, inputs.device.type == "cuda"
    sizes = dict(context_tokens=params.context_tokens, anchors=params.anchors, seed=params.seed)
    train, heldout = np.flatnonzero(~items.heldout), np.flatnonzero(items.heldout)
    rows = PackedRows(items, train, inputs.drafter, pad=pad, **sizes)
    return rows, PackedRows(items, heldout, inputs.drafter, pad=pad, **sizes) if len(heldout) else None


# What is loaded --------------------------------------------------------------------------------------------


def open_states(inputs: TrainingInputs) -> tuple[FeatureStore | LiveItems, TargetHead]:
    """The feature store, or the samples and the live target on the device; and the target's head."""
    if inputs.store is not None:
        return inputs.store, load_ends(inputs)
    items = open_live(inputs)
    if items.target.dtype == inputs.dtype and inputs.params.head_gpu < 0:
        return items, items.target.head
    return items, load_ends(inputs)


def load_ends(inputs: TrainingInputs) -> TargetHead:
    """The target's embedding, final norm and head: on the drafter's device, or on the GPU that was named for
    them.
    """
    params, device = inputs.params, inputs.device
    place = placed(device, params.head_gpu) if params.head_gpu >= 0 else device
    return load_head(params.target, device=place, dtype=inputs.dtype, seed=params.seed)


def open_live(inputs: TrainingInputs) -> LiveItems:
    """The samples and the target on the device that makes their states."""
    params = inputs.params
    target = load_target(params.target, device=inputs.device, dtype=params.dtype, seed=params.seed)
    if target.is_hybrid:
        speed_up(target, "auto")
    return LiveItems(
        params.samples_path,
        target,
        tap_ids=list(inputs.drafter.tap_ids),
        context_tokens=params.context_tokens,
        compile=params.compile_target and target.device.type == "cuda",
    )


def placed(device: torch.device, number: int) -> torch.device:
    """GPU `number`, or the CPU where the run is on one."""
    import torch

    return torch.device("cuda", number) if device.type == "cuda" else device


def source_of(inputs: TrainingInputs, items: Any) -> dict[str, Any]:
    """Where states and first weights come from: the identity of the store, or of samples and target; and the
    checkpoint started from.
    """
    start = inputs.params.start_from
    first = checksum(Path(start) / WEIGHTS) if start else f"seed {inputs.params.seed}"
    made_by = {"live": items.source()} if inputs.store is None else {"store": inputs.store.manifest}
    return {**made_by, "first_weights": first}


# What is checked before a target is loaded or a process starts ---------------------------------------------


def check_placement(params: TrainDrafterParams) -> None:
    """`InputError` for GPUs that this machine lacks, and for a head's GPU where there is none."""
    import torch

    heads = {"head_gpu": "the frozen head", "target_head_gpu": "the target's logits"}
    if choose_device(params.device).type != "cuda":
        for name, what in heads.items():
            if getattr(params, name) >= 0:
                raise InputError(
                    f"train_drafter: {name} = {getattr(params, name)} names a GPU for {what}, but this "
                    f"trains on a CPU. Leave {name} at -1."
                )
        return
    count = torch.cuda.device_count()
    for name in ("target_gpus", "drafter_gpus", *heads):
        given = getattr(params, name)
        if max([given] if isinstance(given, int) else given, default=-1) >= count:
            raise InputError(
                f"train_drafter: {name} = {given}, but this machine shows {count} GPUs, numbered from 0."
            )
    if params.world > 1 and (chosen := str(params.device)).startswith("cuda:"):
        raise InputError(
            f"train_drafter: device = {chosen} names one GPU, but several are to train, one a process. Give "
            "device cuda, and which ones by drafter_gpus or CUDA_VISIBLE_DEVICES."
        )
    if params.gpus > count:
        raise InputError(f"train_drafter: gpus = {params.gpus}, but this machine shows {count}.")
    if len(set(params.target_gpus)) < len(params.target_gpus):
        told = params.target_gpus
        logger.warning("target_gpus = %s: a GPU named twice holds two targets, which share it", told)


def check_states(inputs: TrainingInputs, progress: ProgressCallback | None) -> None:
    """Tell what is wrong with the store or the samples; a store's bytes are read where that is wanted."""
    params, items = inputs.params, inputs.items
    if inputs.store is None:
        return
    if total := trial_of(params.store_path):
        logger.info("the store holds %d of %d samples, a trial (max_samples of extract)", len(items), total)
    if params.check_store:
        check_parts(params.store_path, progress)


def check_disks(inputs: TrainingInputs) -> None:
    """Hold what a run leaves against the disks: the drafter, beside which an earlier one stays until it is
    whole, and where training begins anew its best weights and a checkpoint (weights, fp32 masters and two
    moments). `InputError` when it does not fit.
    """
    params, count = inputs.params, inputs.drafter.parameter_count
    weights = count * inputs.dtype.itemsize
    state = count * (4 + 2 * (1 if params.moments == "int8" else 4))
    begun = newest(params.folder / "run" / "checkpoints") is not None
    needs = {params.folder: 0 if begun else 2 * weights + state}
    needs[params.fresh_drafter] = weights
    by_disk: dict[int, int] = {}
    for folder, bytes_needed in needs.items():
        disk = folder.stat().st_dev
        by_disk[disk] = by_disk.get(disk, 0) + bytes_needed
        free = shutil.disk_usage(folder).free
        if by_disk[disk] > free:
            stands = params.drafter_path.exists()
            earlier = " An earlier drafter stays until it is whole." if stands else ""
            raise InputError(
                f"{folder}: the drafter and the checkpoints of its training take "
                f"{by_disk[disk] / 2**30:,.1f} GiB, {free / 2**30:,.1f} GiB are free.{earlier} "
                "Free space, or give run_dir or drafter on another disk."
            )


def set_aside_other_run(run: Path, setup: dict[str, Any], *, anew: bool) -> None:
    """Rename a run of another setup, or a finished one when `anew`, to `run-1`, `run-2`, ...: nothing is
    lost.
    """
    saved, last = saved_setup(run), newest(run / "checkpoints")
    if saved is None or last is None:
        return
    changed = differences(saved, setup)
    finished = last.name == f"step-{setup['settings']['max_steps']:08d}"
    if not changed and not (anew and finished):
        return
    number = 1
    while (other := run.with_name(f"{run.name}-{number}")).exists():
        number += 1
    run.rename(other)
    why = "; ".join(changed[:4]) or "finished, and force is set"
    logger.info("the earlier run (%s) is kept as %s", why, other)
