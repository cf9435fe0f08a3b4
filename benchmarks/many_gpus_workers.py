"""One process a GPU of `many_gpus.py`: `extract` answers orders on its standard input, `train` runs under
torchrun.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from training import large_case, measure, new_trainer, random_head

from dflash_lab import files
from dflash_lab.drafter.distributed import Single, join
from dflash_lab.drafter.loss import VocabShard, fused_draft_loss
from dflash_lab.drafter.loss_terms import LossConfig
from dflash_lab.drafter.rows import feed, prefetch
from dflash_lab.drafter.train import Trainer


def extract_worker(order: dict[str, Any]) -> None:
    """Load the target once, then extract the shards that are asked for, one JSON line each way."""
    from dflash_lab.extraction.fused_layers import speed_up
    from dflash_lab.extraction.loop import extract
    from dflash_lab.models.hooks import default_tap_ids
    from dflash_lab.models.load import load_target
    from dflash_lab.models.source import load_config

    name = f"random:{order['target']}"
    taps = default_tap_ids(load_config(name).num_hidden_layers)
    target = load_target(
        name, device=order["device"], dtype="bfloat16", last_layer=max(taps), with_head=False
    )
    speed_up(target, "auto")
    run = dict(tap_ids=taps, token_budget=order["token_budget"], max_batch=512)
    extract(target, order["warm"], order["scratch"], **run)
    shutil.rmtree(order["scratch"])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.time()
        report = extract(
            target,
            asked["samples"],
            asked["store"],
            shard=asked["shard"],
            num_shards=asked["num_shards"],
            **run,
        )
        found = {"began": began, "ended": time.time(), "tokens": report.tokens_stored,
                 "bytes": report.bytes_written, "gpu_idle_pct": report.gpu_idle_pct,
                 "host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}  # fmt: skip
        print(json.dumps(found), flush=True)


def train_worker(order: dict[str, Any]) -> None:
    """Train alone, every GPU for itself, then in each mode of the order with all processes; rank 0 leaves
    what is known after each.
    """
    group, device = join("ddp", order["device"])
    rank, world = group.rank, group.world
    found: dict[str, Any] = {}
    reference: dict[str, Tensor] = {}
    for mode in ("one", *(order["modes"] if world > 1 else ())):
        group = Single() if mode == "one" else join(mode, order["device"])[0]
        case = large_case(order["toy"], steps=order["steps"])
        with contextlib.closing(Scratch(order["scratch"], mode, rank)) as folder:
            trainer = new_trainer(case, Path(order["store"]), folder.path, device, group)
            trainer.warm_up()
            result: dict[str, Any] = {}
            if world > 1:
                mine = gradients(trainer, world if mode == "one" else 1, keep=rank == 0)
                if mode == "one":
                    reference = mine
                elif rank == 0:
                    result["gradient_rel_error"] = gradient_error(mine, reference)
                del mine
                dist.barrier()
            result |= measure(case, trainer, profile=False)
        if device.type == "cuda":
            result["peak_gib"] = group.longest(torch.cuda.max_memory_allocated() / 2**30)
        found[mode] = result
        keep(found, order, rank)
        del trainer
        gc.collect()
    if world > 1 and order["vocabulary_parallel"]:
        found["vocabulary_parallel"] = vocabulary_parallel(device, order["toy"])
        keep(found, order, rank)
    if dist.is_initialized():
        dist.destroy_process_group()


def keep(found: dict[str, Any], order: dict[str, Any], rank: int) -> None:
    """Write what is known so far, on rank 0."""
    if rank == 0:
        files.write_json(Path(order["result"]), found)
        print(json.dumps(found), flush=True)


class Scratch:
    """A folder of one process, removed at the end."""

    def __init__(self, root: str, mode: str, rank: int) -> None:
        self.path = Path(root) / f"{mode}-{rank}"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def gradient_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Relative L2 distance of all gradients together."""
    above = sum(
        float((found[name].float() - tensor.float()).square().sum()) for name, tensor in wanted.items()
    )
    return (above / sum(float(tensor.float().square().sum()) for tensor in wanted.values())) ** 0.5


def gradients(trainer: Trainer, rows: int, keep: bool) -> dict[str, Tensor]:
    """Gradients of one step over `rows` rows of this process, whole, divided by the step's denominator, if
    they are to be kept; the weights stay.
    """
    kept: dict[str, Tensor] = {}
    step, settings, place = trainer.optimizer.step, trainer.settings, dict(trainer.place)

    def collect(factor: float, scale: Tensor, go: Tensor) -> None:
        named = {n: p.grad * scale.to(p.grad.dtype) for n, p in trainer.drafter.named_parameters()}
        whole = trainer.group.whole(named)
        if keep:
            kept.update({n: g.cpu().contiguous() for n, g in whole.items()})

    trainer.optimizer.step = collect  # type: ignore[method-assign, assignment]
    trainer.settings = dataclasses.replace(settings, accumulate=rows)
    with contextlib.closing(prefetch(feed(trainer.stream(), trainer.device))) as stream:
        trainer.train_step(stream)
        trainer.catch_up()
    trainer.optimizer.step, trainer.settings, trainer.place = step, settings, place  # type: ignore[method-assign]
    return kept


def vocabulary_parallel(device: torch.device, toy: bool) -> dict[str, float]:
    """The draft loss with the head in shards over all processes, beside one process with the whole head."""
    case = large_case(toy)
    config, dtype = case.config, torch.bfloat16 if device.type == "cuda" else torch.float32
    head = random_head(config, device, dtype).weight
    anchors = case.settings.anchors
    g = torch.Generator(device).manual_seed(0)
    shape = anchors, config.block_size, config.hidden_size
    hidden = nn.Parameter(torch.randn(shape, generator=g, device=device, dtype=dtype))
    target = torch.randn(8 * anchors, config.hidden_size, generator=g, device=device, dtype=dtype)
    host = torch.Generator().manual_seed(0)
    labels = torch.randint(config.vocab_size, shape[:2], generator=host)
    rows = (torch.arange(anchors)[:, None] * 8 + torch.arange(config.block_size)).clamp(max=8 * anchors - 1)
    weights = torch.ones(shape[:2])
    weights[:, 0] = 0
    shard = VocabShard(config.vocab_size)
    loss = LossConfig(hard_weight=0.85, soft_weight=0.15, cap_weight=0.1)
    parts = {"whole": (head, None), "shards": (head[shard.slice()].contiguous(), shard)}
    times, grads, totals = {}, {}, {}
    for name, (weight, split) in parts.items():
        for _ in range(3):
            hidden.grad = None
            synchronize(device)
            dist.barrier()
            began = time.perf_counter()
            result = fused_draft_loss(
                hidden, weight, labels, weights, target_hidden=target, target_rows=rows, config=loss,
                shard=split, scale=1e-4,
            )  # fmt: skip
            result.total.backward()
            synchronize(device)
            times[name] = (time.perf_counter() - began) * 1e3
        grads[name], totals[name] = hidden.grad, float(result.total.detach())
    error = (grads["shards"].float() - grads["whole"].float()).norm() / grads["whole"].float().norm()
    return {"whole_ms": times["whole"], "shards_ms": times["shards"], "gradient_rel_error": float(error),
            "loss_rel_error": abs(totals["shards"] / totals["whole"] - 1)}  # fmt: skip


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    kind, text = sys.argv[1:3]
    {"extract": extract_worker, "train": train_worker}[kind](json.loads(text))
