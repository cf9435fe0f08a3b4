"""One rank of the vocabulary-parallel tests: every case on its slice, leaving what it found in a folder."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from loss_reference import CONFIGS, make_case
from safetensors.torch import save_file

from dflash_lab.drafter.loss import FusedDraftLoss, VocabShard, fused_draft_loss
from dflash_lab.errors import InputError


def run_rank(rank: int, folder: Path, backend: str) -> str:
    """Returns what a head of the wrong size is told here."""
    store, patience = f"file://{folder}/store", datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=patience)
    try:
        for name, config in CONFIGS.items():
            case = make_case(dtype=torch.float64 if backend == "torch" else torch.float32)
            (hidden, head, labels, weights), target = case.arguments()
            shard = VocabShard(head.shape[0])
            options = dict(config=config, chunk_rows=12, shard=shard, backend=backend)
            found = fused_draft_loss(hidden, head[shard.slice()], labels, weights, **target, **options)
            found.total.backward()
            rows = {key: value.double() for key, value in vars(found.rows).items() if value is not None}
            found = {"total": found.total.detach(), "grad": hidden.grad, **rows}
            save_file(found, folder / f"{name}-{rank}.safetensors")
        loss = FusedDraftLoss(CONFIGS["ce"], shard=VocabShard(97))
        loss(hidden, head[loss.shard.slice()], labels, weights)
        (folder / f"chunk-{rank}.txt").write_text(str(loss.chunk_rows))
        try:
            fused_draft_loss(hidden, head[:50], labels, weights, config=CONFIGS["ce"], shard=VocabShard(97))
        except InputError as error:
            return str(error)
        return ""
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(1, Path(sys.argv[1]), sys.argv[2])
