"""Training samples whose states are made by a live target when they are needed: no feature store.

A row is drawn and packed from token ids alone (`bare`, cheap, on the prefetch thread); its states are filled
in on the training device by one forward of the whole row (`fill`). Nothing is kept, so the target's states
cost no disk and every epoch runs the target again. What is filled in depends on the row alone, so a run
resumes exactly, as from a store.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import xxhash

from dflash_lab.data.samples import FeatureItem, FlatTokens, read_samples
from dflash_lab.drafter.live_forward import RowForward
from dflash_lab.drafter.rows import Row
from dflash_lab.errors import InputError
from dflash_lab.models.load import Target


class SampleItems:
    """The samples of a file without states: what rows are planned and packed from."""

    def __init__(self, path: Path | str, hidden_size: int, tap_ids: list[int]) -> None:
        """Read all tokens into memory (5 bytes a token)."""
        frame = read_samples(path)
        if frame.is_empty():
            raise InputError(f"{path}: holds no sample. Run prepare on conversations first.")
        self.hidden_size, self.tap_ids = hidden_size, list(tap_ids)
        self.lengths = frame["length"].to_numpy()
        if self.lengths.min() < 1:
            empty = frame["id"][int(self.lengths.argmin())]
            raise InputError(f"{path}: sample {empty!r} has no token. Run prepare again.")
        self.heldout = (frame["split"] == "heldout").to_numpy()
        self.hashes: list[str] = frame["content_hash"].to_list()
        self._tokens = FlatTokens(frame)
        self.path = path

    def __len__(self) -> int:
        return len(self.lengths)

    def bare(self, index: int) -> FeatureItem:
        """Sample `index` with states of width 0."""
        ids, mask = map(torch.from_numpy, self._tokens.of(index))
        return FeatureItem(
            hash=self.hashes[index],
            input_ids=ids,
            loss_mask=mask,
            taps=torch.zeros(len(ids), 0, dtype=torch.bfloat16),
            final=None,
            heldout=bool(self.heldout[index]),
        )

    def check_vocabulary(self, size: int) -> None:
        """`InputError` if a token lies outside a vocabulary of `size`."""
        lowest, highest = self._tokens.id_range()
        if lowest < 0 or highest >= size:
            raise InputError(
                f"{self.path}: holds token {lowest if lowest < 0 else highest}, the target knows "
                f"0..{size - 1}: the samples were made with another tokenizer. Run prepare with this target."
            )

    def digest(self) -> str:
        """Hash of the samples in their order, on which the drawing of rows depends."""
        digest = xxhash.xxh3_128()
        for name, heldout in zip(self.hashes, self.heldout, strict=True):
            digest.update(bytes.fromhex(name) + bytes([bool(heldout)]))
        return digest.hexdigest()


class LiveItems(SampleItems):
    """Samples and the target that fills in their states, on the target's device.

    The target is theirs from then on: its attention is told apart by documents, so it runs no other forwards.
    """

    def __init__(
        self,
        path: Path | str,
        target: Target,
        *,
        tap_ids: list[int],
        context_tokens: int,
        compile: bool = False,
    ) -> None:
        super().__init__(path, target.hidden_size, tap_ids)
        self.check_vocabulary(target.vocab_size)
        self.target = target
        longest = int(min(self.lengths.max(), context_tokens))
        self.forward = RowForward(
            target, tap_ids, row_tokens=context_tokens, longest=longest, compile=compile
        )

    def source(self) -> dict[str, Any]:
        """What the states depend on, as plain JSON values."""
        return {"samples": self.digest(), "target": self.target.identity, "tap_ids": self.tap_ids}

    def begin(self, epoch: int, index: int) -> None:
        """Rows are filled when they are asked for; nothing runs ahead."""

    def fill(self, row: Row, epoch: int, index: int) -> Row:
        """`row`, on the target's device, with its states."""
        return self._filled(row)

    def fill_heldout(self, row: Row, number: int) -> Row:
        """The same for held-out row `number`."""
        return self._filled(row)

    def _filled(self, row: Row) -> Row:
        bounds = [
            (part.context_start, part.context_stop)
            for part in row.layout.segments
            if part.context_stop > part.context_start
        ]
        taps, final = self.forward(row.input_ids, row.layout.positions, bounds)
        return dataclasses.replace(row, taps=taps, final=final)

    def __getitem__(self, index: int) -> FeatureItem:
        """Sample `index`, its first row of tokens at most, with its states in host memory."""
        item = self.bare(index)
        length = min(len(item), self.forward.row_tokens)
        size = self.forward.row_tokens if self.target.device.type == "cuda" else length
        ids, positions = torch.zeros(2, size, dtype=torch.long)
        ids[:length], positions[:length] = item.input_ids[:length], torch.arange(length)
        device = self.target.device
        states = self.forward(ids.to(device), positions.to(device), [(0, length)])
        taps, final = (tensor[:length].cpu() for tensor in states)
        ids, mask = item.input_ids[:length], item.loss_mask[:length]
        return dataclasses.replace(item, input_ids=ids, loss_mask=mask, taps=taps, final=final)
