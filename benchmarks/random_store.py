"""A feature store of random states, written in the store's own format: what training benchmarks read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from dflash_lab.data.samples import content_hash
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.extraction.manifest import SCHEMA, add_line, open_identity, part_name, shard_name
from dflash_lab.extraction.store import hex_to_hashes, write_part


def write_random_store(
    folder: Path,
    config: DrafterConfig,
    lengths: Sequence[int],
    *,
    final: bool,
    device: torch.device | str = "cpu",
    prompt_tokens: int = 8,
    seed: int = 0,
) -> Path:
    """Write samples of `lengths` tokens with the drafter's taps, a part each GiB; random values are drawn on
    `device`.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shard = folder / shard_name(0, 1)
    shard.mkdir(parents=True)
    width = len(config.tap_ids) * config.hidden_size
    open_identity(
        folder,
        {
            "schema": SCHEMA, "target": {"name": "random states"}, "compute_dtype": "bfloat16",
            "tap_ids": list(config.tap_ids), "tap_ids_plus_one": [tap + 1 for tap in config.tap_ids],
            "hidden": config.hidden_size, "has_final": final, "storage": "bf16", "samples": f"seed {seed}",
        },
    )  # fmt: skip
    most = max(1, 2**29 // width)  # tokens of a part
    groups: list[list[int]] = [[]]
    for length in lengths:
        if groups[-1] and sum(groups[-1]) + length > most:
            groups.append([])
        groups[-1].append(int(length))

    def states(tokens: int, size: int) -> torch.Tensor:
        drawn = torch.randn(tokens, size, generator=generator, device=device, dtype=torch.bfloat16)
        return drawn.cpu()

    for number, group in enumerate(groups):
        tokens, offsets = sum(group), np.concatenate([[0], np.cumsum(group)])
        drawn = torch.randint(config.vocab_size, (tokens,), generator=generator, device=device)
        ids, mask = drawn.int().cpu(), torch.ones(tokens, dtype=torch.uint8)
        for start in offsets[:-1]:
            mask[start : start + prompt_tokens] = 0
        spans = list(pairwise(offsets))
        hashes = [content_hash(ids[a:b].numpy(), mask[a:b].numpy()) for a, b in spans]
        tensors = {"taps": states(tokens, width)}
        if final:
            tensors["final"] = states(tokens, config.hidden_size)
        tensors |= {
            "input_ids": ids,
            "loss_mask": mask,
            "offsets": torch.from_numpy(offsets.astype(np.int64)),
            "hashes": hex_to_hashes(hashes),
            "heldout": torch.zeros(len(group), dtype=torch.uint8),
        }
        name = part_name(number)
        size, checksum = write_part(shard / name, tensors)
        add_line(shard, "part", file=name, bytes=size, checksum=checksum, samples=len(group), tokens=tokens)
    return folder
