"""Items for the offline metrics: from a feature store, or with states that the target makes now, of stored
samples or of answers that were just decoded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from dflash_lab.acceptance.study import Study
from dflash_lab.data.items import FeatureItem
from dflash_lab.drafter.live import SampleItems
from dflash_lab.errors import InputError
from dflash_lab.extraction.store import FeatureStore
from dflash_lab.target.model import Target
from dflash_lab.target.taps import Taps

PASS_TOKENS = 8192  # padded tokens of one forward over several texts, on CUDA


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


def passes(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Cut texts of these lengths, as they come, into runs [start, end) of at most `most` padded tokens, or of
    one text.
    """
    start = widest = 0
    for end, length in enumerate(lengths):
        widest = max(widest, length)
        if end > start and widest * (end + 1 - start) > most:
            yield start, end
            start, widest = end, length
    if lengths:
        yield start, len(lengths)


class TextItems(Sequence[FeatureItem]):
    """Texts whose states the target makes when they are asked for; nothing is kept. One after the other, on
    CUDA several share a forward: what pads a text on its right is seen by none of its tokens.
    """

    def __init__(
        self,
        target: Target,
        tap_ids: tuple[int, ...],
        texts: Sequence[tuple[str, torch.Tensor, torch.Tensor]],
    ) -> None:
        """`texts`: hash, token ids [L] and loss mask [L] of each."""
        self._target, self._tap_ids, self._texts = target, tap_ids, texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return TextItems(self._target, self._tap_ids, self._texts[index])
        return self._made([self._texts[index]])[0]

    def __iter__(self) -> Iterator[FeatureItem]:
        most = PASS_TOKENS if self._target.device.type == "cuda" else 0
        for start, end in passes([len(ids) for _, ids, _ in self._texts], most):
            yield from self._made(self._texts[start:end])

    @torch.no_grad()
    def _made(self, texts: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> list[FeatureItem]:
        last = self._target.num_layers - 1
        wanted = tuple(sorted({*self._tap_ids, last}))
        rows = pad_sequence([ids.long() for _, ids, _ in texts], batch_first=True)
        with Taps(self._target.layers, wanted) as taps:
            self._target.body(input_ids=rows.to(self._target.device), use_cache=False)
            of_layer = dict(zip(wanted, taps.take()))
        states = torch.cat([of_layer[layer] for layer in self._tap_ids], dim=-1)
        return [
            FeatureItem(name, ids.int(), mask, states[row, : len(ids)], of_layer[last][row, : len(ids)], True)
            for row, (name, ids, mask) in enumerate(texts)
        ]


def text_hash(ids: Sequence[int]) -> str:
    """Name a text that no samples file names: 32 hex digits."""
    return hashlib.sha256(repr(list(ids)).encode()).hexdigest()[:32]


def answered_items(target: Target, tap_ids: tuple[int, ...], study: Study) -> TextItems:
    """Return every answer of `study` with its prompt, and states of the target."""
    texts = []
    for asked, answer in zip(study.asked, study.answers):
        ids = torch.tensor([*asked, *answer.tokens])
        mask = torch.zeros(len(ids), dtype=torch.uint8)
        mask[len(asked) :] = 1
        texts.append((text_hash(ids.tolist()), ids, mask))
    return TextItems(target, tap_ids, texts)


def sample_items(
    target: Target,
    tap_ids: tuple[int, ...],
    samples: Path,
    hashes: Sequence[str],
    *,
    extra: int = 0,
    heldout_only: bool = True,
) -> TextItems:
    """Return the samples of a file with these hashes, in that order, then up to `extra` other held-out ones
    (or any), with states of the target: what `stored_items` reads from a store.
    """
    chosen = SampleItems(samples, target.hidden_size, list(tap_ids))
    chosen.check_vocabulary(target.vocab_size)
    number = {name: index for index, name in enumerate(chosen.hashes)}
    indices = [number[name] for name in hashes]
    taken = set(indices)
    others = np.flatnonzero(chosen.heldout) if heldout_only else np.arange(len(chosen.hashes))
    indices += [i for i in others.tolist() if i not in taken][:extra]
    bare = [chosen.bare(index) for index in indices]
    return TextItems(target, tap_ids, [(item.hash, item.input_ids, item.loss_mask) for item in bare])
