"""One process of several, as torchrun starts them: `train_ranks.py JOBS` trains tiny drafters one after
another, as a test does in one process.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import weakref
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from support.tiny_drafters import LOSS, head_on, learner, tiny_items, tiny_settings
from torch.distributed.tensor import DTensor

from dflash_lab.drafter.distributed import Sharded, Single, join
from dflash_lab.drafter.loss import VocabShard
from dflash_lab.drafter.optim import OptimizerConfig
from dflash_lab.drafter.train import TrainReport, train


def tiny_run(
    folder: str,
    values: dict,
    group: Single | None = None,
    device: str | torch.device = "cpu",
    target_device: str | None = None,
) -> TrainReport:
    """The same tiny run in any number of processes; `accumulate` counts rows of one process. With
    `head_parallel` among the values each holds a slice of the head.
    """
    head_parallel = values.pop("head_parallel", False)
    chosen = tiny_settings(
        loss=dataclasses.replace(LOSS, weighting="dpace"),
        optimizer=OptimizerConfig(kind=values.pop("kind", "adamw"), lr=2e-3),
        **values,
    )
    head, shard = head_on(device), None
    if head_parallel:
        shard = VocabShard(len(head.weight))
        head = dataclasses.replace(head, weight=head.weight[shard.slice()].clone())
    options = dict(folder=folder, group=group, shard=shard, target_device=target_device)
    return train(tiny_items(), head, learner(device=device), chosen, **options)


def check_whole(group: Sharded) -> None:
    """The first process gets every tensor, the others none; of whole ones at most one is there at a time."""
    drafter = learner()
    wanted = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    group.wrap(drafter)
    alive, most, full_tensor = 0, 0, DTensor.full_tensor

    def counted(tensor: DTensor) -> torch.Tensor:
        nonlocal alive, most
        found = full_tensor(tensor)
        alive, most = alive + 1, max(most, alive + 1)
        weakref.finalize(found, dropped)
        return found

    def dropped() -> None:
        nonlocal alive
        alive -= 1

    with mock.patch.object(DTensor, "full_tensor", counted):
        found = group.whole(drafter.state_dict())
    copied = group.replica(drafter).state_dict()
    if group.rank == 0:
        assert found.keys() == wanted.keys() == copied.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert all(torch.equal(copied[name], wanted[name]) for name in wanted)
    else:
        assert not found and most == 1, (list(found), most)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for job in json.loads(sys.argv[1]):
        joined, device = join(job.pop("mode"), job.pop("device", "cpu"))
        lost = Path(job["folder"]) / "checkpoints" / job.pop("drop", "none")
        if lost.exists() and joined.rank == 0:
            lost.rename(Path(job["folder"]) / "lost")
        joined.barrier()
        tiny_run(job.pop("folder"), job, joined, device)
        if isinstance(joined, Sharded):
            check_whole(joined)
    torch.distributed.destroy_process_group()
