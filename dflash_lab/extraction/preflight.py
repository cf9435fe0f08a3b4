"""Before 54 GB are read: do the layers exist, do the states fit on the disk, how many hours will it take?

Everything here comes from the config, the lengths and the file system; no weight is touched.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PretrainedConfig

from dflash_lab.errors import InputError
from dflash_lab.extraction import manifest as manifests
from dflash_lab.extraction.codecs import find_codec
from dflash_lab.extraction.layout import Layout
from dflash_lab.models import source
from dflash_lab.models.hooks import check_tap_ids

ROW_BYTES = 5.0  # token id and mask; offsets, hashes and marks add 25 bytes a sample
SAMPLE_BYTES = 25
MARGIN = 1.02  # headers, and what else writes to the disk meanwhile
ASSUMED_TFLOPS = {"cuda": 500.0, "cpu": 0.1}


@dataclass(frozen=True)
class Preflight:
    """What a run over all shards will take, on paper."""

    samples: int
    tokens: int
    token_bytes: int
    bytes_needed: int
    bytes_stored: int
    bytes_free: int
    body_parameters: int
    hours: float
    assumed_tflops: float

    def figures(self) -> dict[str, float | int]:
        """Return the flat numbers."""
        return {
            "preflight_store_gib": round(self.bytes_needed / 2**30, 4),
            "preflight_free_gib": round(self.bytes_free / 2**30, 2),
            "preflight_hours": round(self.hours, 4),
        }


def preflight(
    config: PretrainedConfig,
    lengths: np.ndarray,
    store: Path,
    *,
    tap_ids: list[int],
    store_final: bool,
    storage: str,
    device_type: str,
    tflops: float = 0.0,
    replaced: Path | None = None,
) -> Preflight:
    """Check a run against the target's config and the disk; `InputError` when it cannot work.

    lengths: tokens of every sample of every shard. replaced: the store whose place this one will take, which
    stays until it is whole. tflops: sustained TFLOP/s of one device, 0 for an assumed one. Work is 2 x
    parameters of the layers that run, a token.
    """
    layers = config.num_hidden_layers
    check_tap_ids(tap_ids, layers)
    layout = Layout(tuple(tap_ids), config.hidden_size, store_final, find_codec(storage))
    needed = int(lengths.sum()) * (layout.token_bytes + ROW_BYTES) + len(lengths) * SAMPLE_BYTES
    stored = sum(
        part.bytes for folder in manifests.shard_folders(store) for part in manifests.sealed_parts(folder, [])
    )
    free = shutil.disk_usage(_existing(store)).free
    missing = max(0.0, needed * MARGIN - stored)
    if missing > free:
        raise InputError(
            f"{store}: the states of {len(lengths):,} samples ({int(lengths.sum()):,} tokens x "
            f"{layout.token_bytes:,} bytes) "
            f"take {needed / 2**30:,.1f} GiB, {stored / 2**30:,.1f} GiB are stored and "
            f"{free / 2**30:,.1f} GiB are free. "
            "Give another store folder, fewer taps, storage=fp8 (half the bytes), or fewer samples."
            + _beside(replaced)
        )
    last = layers - 1 if store_final else max(tap_ids)
    parameters = body_parameters(config, last)
    rate = tflops or ASSUMED_TFLOPS.get(device_type, ASSUMED_TFLOPS["cpu"])
    hours = 2 * parameters * int(lengths.sum()) / (rate * 1e12) / 3600
    return Preflight(
        len(lengths),
        int(lengths.sum()),
        layout.token_bytes,
        int(needed),
        stored,
        free,
        parameters,
        hours,
        rate,
    )


def _beside(replaced: Path | None) -> str:
    if replaced is None:
        return ""
    size = sum(path.stat().st_size for path in replaced.rglob("*") if path.is_file())
    return (
        f" The earlier store, {replaced} ({size / 2**30:,.1f} GiB), stays until this one is whole, and both "
        "do not fit. If it is not needed any more, remove it first."
    )


def body_parameters(config: PretrainedConfig, last_layer: int) -> int:
    """Count the parameters of decoder layers 0..last_layer: what one token is multiplied with, embedding and
    head left out.

    For a mixture of experts every expert counts, so its hours are an upper bound.
    """
    body = source.skeleton(source.cut_config(config, last_layer), name="preflight", dtype=torch.bfloat16)
    layers = source.find_parts(body, source.cut_config(config, last_layer), "preflight").layers
    return sum(parameter.numel() for parameter in layers.parameters())


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
