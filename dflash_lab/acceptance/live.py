"""Items for the offline metrics: from a feature store, or captured now from answers that were just
decoded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from dflash_lab.acceptance.study import Study
from dflash_lab.acceptance.target_run import TargetRun
from dflash_lab.data.items import FeatureItem
from dflash_lab.errors import InputError
from dflash_lab.extraction.store import FeatureStore
from dflash_lab.target.model import Target


class StoredItems(Sequence[FeatureItem]):
    """Chosen samples of a store, read when asked for."""

    def __init__(self, store: FeatureStore, indices: list[int]) -> None:
        self._store, self._indices = store, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return StoredItems(self._store, self._indices[index])
        return self._store[self._indices[index]]


def stored_items(store: FeatureStore, hashes: Sequence[str], *, extra: int = 0) -> StoredItems:
    """Return the samples with these content hashes, in that order, then up to `extra` other held-out ones."""
    missing = []
    indices = []
    for content_hash in hashes:
        try:
            indices.append(store.find(content_hash))
        except KeyError:
            missing.append(content_hash)
    if missing:
        raise InputError(
            f"{store.path} lacks {len(missing)} of {len(hashes)} samples (first: {missing[0]}): it was made "
            "from other samples, or extraction is not finished. Run extract for every shard."
        )
    taken = set(indices)
    others = [i for i in np.flatnonzero(store.heldout).tolist() if i not in taken]
    return StoredItems(store, indices + others[:extra])


@torch.no_grad()
def live_items(target: Target, tap_ids: tuple[int, ...], study: Study) -> list[FeatureItem]:
    """Run the target over every answer of `study` and its prompt; keep the tapped and final states."""
    items = []
    for asked, answer in zip(study.asked, study.answers):
        ids = torch.tensor([*asked, *answer.tokens], device=target.device)
        wanted = sorted({*tap_ids, target.num_layers - 1})
        with TargetRun(target, tuple(wanted)) as run:
            states = run.step(ids, certain=True).taps
        assert states is not None
        of_layer = dict(zip(wanted, states.chunk(len(wanted), dim=-1)))
        taps = torch.cat([of_layer[layer] for layer in tap_ids], dim=-1)
        mask = torch.zeros(len(ids), dtype=torch.uint8)
        mask[len(asked) :] = 1
        name = hashlib.sha256(repr(ids.tolist()).encode()).hexdigest()[:32]
        items.append(FeatureItem(name, ids.int().cpu(), mask, taps, of_layer[target.num_layers - 1], True))
    return items
