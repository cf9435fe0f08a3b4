"""One rank of the vocabulary-parallel tests: runs every case on its slice and leaves what it found."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from loss_reference import make_case
from safetensors.torch import save_file
from test_loss_gradient import CONFIGS

from dflash_lab.drafter.loss import FusedDraftLoss, VocabShard, fused_draft_loss


def main(rank: int, size: int, folder: Path, backend: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    dtype = torch.float64 if backend == "torch" else torch.float32
    for name, config in CONFIGS.items():
        case = make_case(dtype=dtype)
        (hidden, head, labels, weights), target = case.arguments()
        shard = VocabShard(head.shape[0])
        found = fused_draft_loss(
            hidden, head[shard.slice()], labels, weights, **target, config=config, chunk_rows=12,
            shard=shard,
            backend=backend,
        )  # fmt: skip
        found.total.backward()
        rows = {key: value.double() for key, value in vars(found.rows).items() if value is not None}
        save_file(
            {"total": found.total.detach(), "grad": hidden.grad, **rows},
            folder / f"{name}-{rank}.safetensors",
        )
    loss = FusedDraftLoss(CONFIGS["ce"], shard=VocabShard(97))
    loss(hidden, head[loss.shard.slice()], labels, weights)
    message = ""
    try:
        fused_draft_loss(hidden, head[:50], labels, weights, config=CONFIGS["ce"], shard=VocabShard(97))
    except ValueError as error:
        message = str(error)
    (folder / f"rank-{rank}.txt").write_text(f"{loss.chunk_rows}\n{message}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
