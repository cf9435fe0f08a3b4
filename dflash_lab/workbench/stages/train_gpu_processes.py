"""What the processes of a run hold, device by device, asked before any of them starts.

Targets make rows on their GPUs, drafters train on theirs, and a frozen head may lie on one of its own; a GPU
may be named for several. Once one of them has loaded, what is free says nothing about the others any more.
Each process writes afterwards what it held beside what was predicted.
"""

from __future__ import annotations

import concurrent.futures
import logging
import multiprocessing
from functools import partial
from typing import TYPE_CHECKING, Any

from dflash_lab.errors import UnsupportedTarget

if TYPE_CHECKING:
    import torch

    from dflash_lab.drafter.config import DrafterConfig
    from dflash_lab.memory.account import Account
    from dflash_lab.memory.gate import GpuProcess
    from dflash_lab.workbench.stages.train_drafter import TrainDrafterParams

logger = logging.getLogger(__name__)


def clear_processes(params: TrainDrafterParams) -> None:
    """`DoesNotFit` where a GPU of the run is predicted to be named for more than it holds, unless
    forced; a target whose memory is not understood is told in the log.
    """
    from dflash_lab.memory.gate import clear_devices

    try:
        found = gpu_processes(params)
    except UnsupportedTarget as error:
        logger.warning("started without a prediction of its memory: %s", error)
        return
    here = params.world == 1 and not params.targets  # what this process holds unused is its own to take
    budgets_gib = free_gib(sorted({process.device for process in found}), here=here)
    over = clear_devices(found, budgets_gib, force=params.ignore_memory)
    for process in found:
        words = "too much together with the others, forced" if process.device in over else "cleared"
        logger.info(
            "%s on %s: %.2f GiB predicted, %s", process.name, process.device, process.peak / 2**30, words
        )


def gpu_processes(params: TrainDrafterParams) -> list[GpuProcess]:
    """Return what each process of the run is predicted to hold, on each device that it uses."""
    from dflash_lab.memory.account import OUTSIDE_TORCH
    from dflash_lab.memory.advice import advise_training
    from dflash_lab.memory.gate import GpuProcess
    from dflash_lab.memory.shapes import TrainingSetup, target_shape
    from dflash_lab.memory.training import head_process, target_head_process, training_account
    from dflash_lab.models.load import choose_device
    from dflash_lab.models.source import load_config
    from dflash_lab.workbench.stages import train_setup
    from dflash_lab.workbench.stages.train_memory import setup_options

    store = train_setup.open_bare(params) if params.source == "store" else None
    config, drafter = load_config(params.target), train_setup.drafter_config(params, store)
    shape, home = target_shape(config), choose_device(params.device)
    cuda, final = home.type == "cuda", bool(getattr(store, "has_final", False))
    gpus = params.drafters or (range(params.gpus) if params.gpus > 1 else [home.index or 0])
    found = []
    for number, gpu in enumerate(gpus):
        device = placed(home, gpu)
        dtype = train_setup.drafter_dtype(params, device)
        options = setup_options(params, config, device, dtype, final_states=final)
        setup = TrainingSetup(
            anchors=params.anchors, context=params.context_tokens, block_size=drafter.block_size, **options
        )
        found.append(
            GpuProcess(
                f"drafter-{number}",
                str(device),
                training_account(shape, drafter, setup, cuda=cuda),
                partial(advise_training, shape, drafter, setup, cuda=cuda),
                OUTSIDE_TORCH if cuda and len(gpus) > 1 else 0,  # NCCL's buffers
            )
        )
        if setup.head_elsewhere:
            account = head_process(shape, drafter, setup, cuda=cuda)
            found.append(GpuProcess(f"head of drafter-{number}", str(placed(home, params.head)), account))
        if params.target_head_gpu >= 0:
            account = target_head_process(shape, setup, cuda=cuda)
            where = str(placed(home, params.target_head_gpu))
            found.append(GpuProcess(f"target's head of drafter-{number}", where, account))
    for number, gpu in enumerate(params.targets):
        device = placed(home, gpu)
        found.append(
            GpuProcess(f"target-{number}", str(device), target_account(params, config, drafter, device))
        )
    return found


def target_account(
    params: TrainDrafterParams, config: Any, drafter: DrafterConfig, device: torch.device, rows: str = ""
) -> Account:
    """Return the account of a target's process; `rows`: see `clearance.ask_training`."""
    from dflash_lab.memory.shapes import TrainingSetup, target_shape
    from dflash_lab.memory.training import target_process
    from dflash_lab.workbench.stages.train_memory import target_options

    setup = TrainingSetup(
        anchors=1,
        context=params.context_tokens,
        block_size=drafter.block_size,
        **target_options(params, config, device, rows),
    )
    return target_process(target_shape(config), drafter, setup, cuda=device.type == "cuda")


def target_figures(
    params: TrainDrafterParams, config: Any, device: torch.device, rows: str
) -> dict[str, float]:
    """Return what a target's process was predicted to hold, as it ran its rows, and what it held."""
    from dflash_lab.memory.gate import Clearance, outcome
    from dflash_lab.workbench.stages import train_setup

    try:
        account = target_account(params, config, train_setup.drafter_config(params, None), device, rows)
    except UnsupportedTarget:
        return {}  # told before it started
    return outcome(Clearance(account, 0.0, params.ignore_memory), device)


def free_gib(devices: list[str], *, here: bool) -> dict[str, float]:
    """Return what is free on `devices` for processes still to start, or for this one (`here`); where GPUs are
    not for this one, another process looks, whose context ends with it.
    """
    if here or devices == ["cpu"]:
        return _free_gib(devices)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_free_gib, devices).result()


def _free_gib(devices: list[str]) -> dict[str, float]:
    from dflash_lab.machine import device_budget_gib

    return {device: device_budget_gib(device) for device in devices}


def placed(device: torch.device, number: int) -> torch.device:
    """Return GPU `number`, or the CPU where the run is on one."""
    import torch

    return torch.device("cuda", number) if device.type == "cuda" else device
