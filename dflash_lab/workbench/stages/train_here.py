"""Training in this process: ask for the memory, load, train, and say how right the answer was."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_lab import files
from dflash_lab.errors import InputError
from dflash_lab.workbench.judgement import before_training
from dflash_lab.workbench.stages.clearance import SNAPSHOT
from dflash_lab.workbench.stages.train_probe import tau_probe

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from dflash_lab.drafter.config import DrafterConfig
    from dflash_lab.drafter.model import Drafter
    from dflash_lab.drafter.train import TrainReport
    from dflash_lab.memory.gate import Clearance, NotPredicted
    from dflash_lab.models.load import TargetHead
    from dflash_lab.workbench.stages.train_drafter import TrainDrafterParams

logger = logging.getLogger(__name__)
MEMORY = "memory.json"  # of the first process: predicted and measured peak, how a live target runs its rows


def train_here(
    params: TrainDrafterParams, progress: Any = None, open_with: Callable[..., Any] | None = None
) -> TrainReport:
    """Load states (or the target that makes them), the ends of the target and the drafter, and train in this
    process, perhaps one of several. `open_with` replaces `open_states`.
    """
    import torch

    from dflash_lab.drafter.checkpoint import setup
    from dflash_lab.drafter.distributed import join
    from dflash_lab.drafter.live import LiveItems
    from dflash_lab.drafter.loss import VocabShard
    from dflash_lab.drafter.train import train
    from dflash_lab.machine import device_budget_gib
    from dflash_lab.memory.gate import explained
    from dflash_lab.models.load import choose_device
    from dflash_lab.models.source import load_config
    from dflash_lab.workbench.stages import train_setup
    from dflash_lab.workbench.stages.clearance import ask_training, memory_figures

    group, device = join(params.parallel, choose_device(params.device))
    if params.attention == "flex" and device.type != "cuda":
        raise InputError(
            f"train_drafter: attention='flex' needs CUDA for its backward pass, and this trains on {device}. "
            "Give attention='auto'."
        )
    dtype = train_setup.drafter_dtype(params, device)
    if params.compile and device.type == "cuda":
        torch.compiler.reset()  # shapes of earlier runs of this process count against the compiler's limit
    target, free_gib = load_config(params.target), device_budget_gib(device)
    store = train_setup.open_bare(params) if params.source == "store" else None
    config = train_setup.drafter_config(params, store)
    train_setup.check_room(params, config, dtype)
    final = bool(getattr(store, "has_final", False))

    def ask(rows: str = "") -> Clearance | NotPredicted:
        return ask_training(
            params, target, config, device, dtype, final_states=final, rows=rows, budget_gib=free_gib
        )

    cleared = ask()  # before anything is loaded
    sizes = {
        "anchors": params.anchors, "block_size": config.block_size, "context": params.context_tokens,
        "hidden": config.hidden_size, "vocabulary": config.vocab_size, "taps": len(config.tap_ids),
        "intermediate": config.intermediate_size,
    }  # fmt: skip
    watch: dict[str, Any] = dict(device=device, snapshot=params.folder / snapshot_name(group))
    with explained(cleared, sizes, **watch):
        items, head = (open_with or train_setup.open_states)(params, device, dtype)
        drafter = first_drafter(params, config, head, device, dtype)
    if isinstance(items, LiveItems):
        cleared = ask(items.forward.path)
    settings = train_setup.train_settings(params, items, config)
    run, source = params.folder / "run", train_setup.source_of(params, items)
    if group.rank == 0:
        lengths = items.lengths[~items.heldout].tolist()
        if warning := before_training(settings.max_steps, len(lengths), sum(lengths)):
            logger.warning("%s", warning)
        now = setup(settings, drafter, lengths, group.world, source)
        train_setup.set_aside_other_run(run, now, anew=params.force)
    group.barrier()
    whole, shard = head, None
    measured = bool(params.tau_samples) and group.rank == 0  # tau is measured with the whole head
    if params.head_parallel:
        shard = VocabShard(config.vocab_size)
        mine = whole.weight[shard.slice()]  # a view, where the whole stays for others
        tied = whole.weight is whole.embedding_weight
        kept = tied or measured or isinstance(items, LiveItems)
        head = dataclasses.replace(whole, weight=mine if kept else mine.clone())
    probe = tau_probe(params, items, whole if measured else head) if params.tau_samples else None
    del whole
    apart = params.target_head_gpu
    with explained(cleared, sizes, **watch):
        report = train(
            items,
            head,
            drafter,
            settings,
            folder=run,
            probe=probe,
            on_progress=progress,
            group=group,
            source=source,
            shard=shard,
            target_device=torch.device("cuda", apart) if apart >= 0 else None,
        )
    if group.rank == 0:
        figures: dict[str, Any] = memory_figures(cleared, device)
        if isinstance(items, LiveItems):
            figures["live_rows"] = items.forward.way
        files.write_json(params.folder / MEMORY, figures)
    return report


def snapshot_name(group: Any) -> str:
    """The file of a process's last refused request; of one process, simply that."""
    path = Path(SNAPSHOT)
    return path.name if group.world == 1 else f"{path.stem}-{group.rank}{path.suffix}"


def first_drafter(
    params: TrainDrafterParams,
    config: DrafterConfig,
    head: TargetHead,
    device: torch.device,
    dtype: torch.dtype,
) -> Drafter:
    """The drafter before its first step, drawn or read, compiled on CUDA if asked for."""
    import torch

    from dflash_lab.drafter.checkpoint import load_checkpoint
    from dflash_lab.drafter.model import Drafter

    if params.start_from:
        drafter = load_checkpoint(params.start_from, device, dtype)
        if told := drafter.config.differences(config):
            raise InputError(
                f"train_drafter: {params.start_from} is a drafter of another shape than these parameters say "
                f"({'; '.join(told)}: the drafter's value first). Give the drafter's values, or start from "
                "another."
            )
    else:
        with torch.device("meta"):  # a billion weights are drawn once, not first as torch's layers would
            empty = Drafter(config)
        empty.to_empty(device="cpu").initialize(torch.Generator().manual_seed(params.seed))
        drafter = empty.to(device, dtype)
        drafter.fit_to_head(head.weight)
    drafter.gradient_checkpointing = params.gradient_checkpointing
    if params.compile and device.type == "cuda":
        drafter.compile_layers()
    return drafter
