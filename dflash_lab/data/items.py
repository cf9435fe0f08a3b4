"""The item that feature stores and online queues hand to the drafter: one sample with its captured states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FeatureItem:
    """One sample of L tokens with the target's states; K taps of width H, concatenated in id order."""

    hash: str  # content_hash of the sample, 32 hex digits
    input_ids: Tensor  # [L] i32
    loss_mask: Tensor  # [L] u8, 1 on assistant tokens
    taps: Tensor  # [L, K*H]
    final: Tensor | None  # [L, H], output of the last decoder layer before the final norm
    heldout: bool

    def __post_init__(self) -> None:
        length = self.input_ids.shape[0]
        for name in ("loss_mask", "taps", "final"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape[0] != length:
                raise ValueError(f"sample {self.hash}: {name} has {tensor.shape[0]} rows for {length} tokens")

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])
