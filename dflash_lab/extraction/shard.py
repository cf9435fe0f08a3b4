"""The samples of one shard: who gets which, what is stored already, and their tokens. All of it follows from
the content, so that processes started apart agree without talking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from dflash_lab.data.batching import balance_shards, predicted_cost
from dflash_lab.data.samples import FlatTokens, checked, read_samples, reading_samples, scan_samples
from dflash_lab.errors import InputError
from dflash_lab.extraction.store import as_keys, hex_to_hashes


@dataclass(frozen=True, eq=False)
class SampleIndex:
    """Every distinct sample of a samples file without its tokens, in file order."""

    path: Path
    row: np.ndarray  # [N] position in the file
    ids: list[str]
    lengths: np.ndarray  # [N] i64
    content_hashes: list[str]  # [N] hex
    heldout: np.ndarray  # [N] bool
    duplicates: int  # rows of the file left out because an equal one stands before them

    @property
    def set_hash(self) -> str:
        """Xxh3-128 of the sorted content hashes: equal for equal sets in any order."""
        return xxhash.xxh3_128("\n".join(sorted(self.content_hashes)).encode()).hexdigest()


def read_index(path: Path | str) -> SampleIndex:
    """Read ids, lengths and hashes of a samples file; `InputError` when it has no sample or one without a
    token.
    """
    path = Path(path)
    columns = ("id", "length", "content_hash", "split")
    with reading_samples(path):
        frame = (
            scan_samples(path).select(columns).with_row_index("row").collect(engine="in-memory").sort("row")
        )
    kept = checked(frame, path).unique("content_hash", keep="first", maintain_order=True)
    if not kept.height:
        raise InputError(f"{path} holds no sample. Run prepare on data that has some.")
    lengths = kept["length"].to_numpy().astype(np.int64)
    if lengths.min() < 1:
        raise InputError(
            f"{path}: sample {kept['id'][int(lengths.argmin())]!r} has no token. Run prepare again."
        )
    return SampleIndex(
        path,
        kept["row"].to_numpy(),
        kept["id"].to_list(),
        lengths,
        kept["content_hash"].to_list(),
        (kept["split"] == "heldout").to_numpy(),
        frame.height - kept.height,
    )


def shard_rows(index: SampleIndex, shard: int, num_shards: int, *, chunk: int, hidden: int) -> np.ndarray:
    """Return the sample numbers of a shard, rising. Costs grow with whole chunks and with
    attention's square.
    """
    if num_shards == 1:
        return np.arange(len(index.lengths))
    cost = predicted_cost(index.lengths, chunk=chunk, attention_per_token=1 / (6 * hidden))
    keys = np.asarray([int(digest[:16], 16) for digest in index.content_hashes], dtype=np.uint64)
    return np.flatnonzero(balance_shards(cost, num_shards, keys=keys) == shard)


def drawn(index: SampleIndex, max_samples: int, seed: int) -> np.ndarray:
    """Return which samples [N] bool a trial of `max_samples` takes (0: all): those whose content hash, hashed
    again with the seed, is smallest. So a larger trial holds the smaller, and both splits are drawn alike.
    """
    found = np.ones(len(index.lengths), bool)
    if max_samples:
        ranks = [xxhash.xxh3_64_intdigest(digest.encode(), seed) for digest in index.content_hashes]
        found[np.argsort(np.asarray(ranks, np.uint64), kind="stable")[max_samples:]] = False
    return found


def not_stored(index: SampleIndex, rows: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Return those of `rows` whose content hash is not among the sorted 16-byte keys `stored`."""
    if not len(stored) or not len(rows):
        return rows
    keys = as_keys(hex_to_hashes([index.content_hashes[row] for row in rows]))
    return rows[~np.isin(keys, stored)]


class Tokens:
    """Token ids and masks of some samples, read once and asked for by sample number."""

    def __init__(self, index: SampleIndex, rows: np.ndarray) -> None:
        self._flat = FlatTokens(read_samples(index.path, index.row[rows]))
        self.id_range = self._flat.id_range
        self._at = np.full(len(index.lengths), -1, np.int64)
        self._at[rows] = np.arange(len(rows))

    def of(self, rows: Sequence[int] | np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return input_ids (int32) and loss_mask (uint8) of sample numbers `rows`, as views."""
        pairs = [self._flat.of(at) for at in self._at[rows]]
        return [ids for ids, _ in pairs], [mask for _, mask in pairs]
