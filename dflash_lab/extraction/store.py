"""Read a feature store: samples by number or by content hash, whatever the count of shards that wrote them.

Only what a manifest vouches for is read, after one check of its size; `verify` re-reads every byte. A sample
that two parts hold counts once. Parts are memory mapped and opened on first use, also in worker processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_lab.data.samples import FeatureItem
from dflash_lab.errors import InputError, StoreError
from dflash_lab.extraction import manifest as manifests
from dflash_lab.extraction.codecs import find_codec
from dflash_lab.extraction.parts import open_part


def open_store(path: Path | str) -> FeatureStore:
    """Open a store folder; `InputError` when it is none or holds no sample, `StoreError` when a part is
    damaged.
    """
    return FeatureStore(Path(path))


class FeatureStore:
    """A sequence of `FeatureItem`s. Samples are ordered by shard folder, part and place in the part.

    `manifest` is store.json; `lengths` int64 [n], `heldout` bool [n], `hashes` uint8 [n, 16].
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: dict[str, Any] = manifests.read_identity(path)
        self.tap_ids: list[int] = list(self.manifest["tap_ids"])
        self.hidden_size: int = int(self.manifest["hidden"])
        self.has_final: bool = bool(self.manifest["has_final"])
        self._codec = find_codec(self.manifest["storage"])
        self._handles: dict[int, Any] = {}
        self._files = [
            path / part.name for folder in manifests.shard_folders(path) for part in self._parts(folder)
        ]
        self._index()
        if not self.num_samples:
            raise InputError(
                f"{path} holds no sample yet. Let the extract stage finish, or give another store."
            )

    def _parts(self, folder: Path) -> list[manifests.Part]:
        parts = manifests.sealed_parts(folder)
        for part in parts:
            file = folder / part.file
            size = file.stat().st_size if file.exists() else -1
            if size != part.bytes:
                what = "is missing" if size < 0 else f"has {size} bytes where its manifest says {part.bytes}"
                raise StoreError(f"{file} {what}. Extract again: exactly its samples are redone.")
        return parts

    def _index(self) -> None:
        """Read hashes, offsets and the held-out mark of every part; keep the first copy of each sample."""
        where, start, lengths, heldout, hashes = [], [], [], [], []
        for number in range(len(self._files)):
            part = self._open(number)
            offsets = part.get_tensor("offsets").numpy()
            where.append(np.full(len(offsets) - 1, number, np.int32))
            start.append(offsets[:-1])
            lengths.append(np.diff(offsets))
            heldout.append(part.get_tensor("heldout").numpy().astype(bool))
            hashes.append(part.get_tensor("hashes").numpy())
        all_hashes = np.concatenate(hashes) if hashes else np.empty((0, 16), np.uint8)
        keys = np.ascontiguousarray(all_hashes).view("V16").reshape(-1)
        _, first = np.unique(keys, return_index=True)
        kept = np.sort(first)
        self._part = np.concatenate(where)[kept] if where else np.empty(0, np.int32)
        self._start = np.concatenate(start)[kept] if start else np.empty(0, np.int64)
        self.lengths = np.concatenate(lengths)[kept] if lengths else np.empty(0, np.int64)
        self.heldout = np.concatenate(heldout)[kept] if heldout else np.empty(0, bool)
        self.hashes = all_hashes[kept]
        self._by_hash = {row.tobytes(): number for number, row in enumerate(self.hashes)}

    def check_made_by(self, target: str, weights: str, hidden_size: int) -> None:
        """Refuse states of other weights: width alone cannot tell a model from its fine-tune.

        `weights` and `hidden_size` are those of `target` (`target.identity`).
        """
        if self.hidden_size != hidden_size:
            raise InputError(
                f"{self.path} has states of width {self.hidden_size}, target {target} has {hidden_size}: the "
                "store was made by another target."
            )
        made = self.manifest.get("target", {})
        if made.get("weights") != weights:
            random = " (a random target's weights follow the seed)" if target.startswith("random:") else ""
            raise InputError(
                f"{self.path} was made by {made.get('name')!r} with other weights than those of target "
                f"{target!r}{random}: give the target it was made by, or extract with this one into another "
                "store."
            )

    @property
    def num_samples(self) -> int:
        """Distinct samples stored."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all distinct samples."""
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return self.num_samples

    def find(self, content_hash: str) -> int:
        """Return the number of the sample with this content hash (hex); KeyError when it is not stored."""
        return self._by_hash[bytes.fromhex(content_hash)]

    def __getitem__(self, index: int) -> FeatureItem:
        """Return sample `index` with `taps` [L, K*H] and `final` [L, H] in bf16 on the CPU."""
        if index < 0:
            index += self.num_samples
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        start = int(self._start[index])
        rows = slice(start, start + int(self.lengths[index]))
        part = self._open(int(self._part[index]))
        return FeatureItem(
            hash=self.hashes[index].tobytes().hex(),
            input_ids=part.get_slice("input_ids")[rows].long(),
            loss_mask=part.get_slice("loss_mask")[rows],
            taps=self._taps(part, rows),
            final=part.get_slice("final")[rows] if self.has_final else None,
            heldout=bool(self.heldout[index]),
        )

    def _taps(self, part: Any, rows: slice) -> torch.Tensor:
        scale = part.get_slice("taps_scale")[rows] if self._codec.scaled else None
        return self._codec.decode(part.get_slice("taps")[rows], scale)

    def _open(self, number: int) -> Any:
        if number not in self._handles:
            self._handles[number] = open_part(self._files[number])
        return self._handles[number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": {}}  # a worker process maps the files itself
