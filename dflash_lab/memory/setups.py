"""What is to be predicted: one frozen description of an extraction batch and one of a training step.

The same descriptions go to the analytic account, the fake-tensor count, the measurement and the advice
(which changes one field at a time and asks again), so the four can only differ in how they count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash_lab.errors import InputError
from dflash_lab.memory.shapes import dtype_bytes

Kernels = Literal["fla", "torch"]  # of the gated delta rule
Capture = Literal["hooks", "output_hidden_states"]
LossPath = Literal["naive", "loop", "concat", "checkpoint", "fused"]
LOSS_PATHS: tuple[LossPath, ...] = ("naive", "loop", "concat", "checkpoint", "fused")
Placement = Literal["cached", "same device", "other device"]
PLACEMENTS: tuple[Placement, ...] = ("cached", "same device", "other device")
Checkpointing = Literal["none", "layers", "mlp", "head"]
Optimizer = Literal["adamw", "muon", "adamw8bit", "cpu-offload"]
OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "muon", "adamw8bit", "cpu-offload")


@dataclass(frozen=True, kw_only=True)
class ExtractionSetup:
    """One batch through the target. `batch` x `length` tokens, padding included."""

    batch: int
    length: int
    tap_ids: tuple[int, ...]
    dtype: str = "bfloat16"
    capture: Capture = "hooks"
    store_final: bool = False  # also the last layer's output before the final norm
    logits: bool = False  # all positions' logits
    use_cache: bool = False
    mask: bool = False  # an attention mask with a pad in it
    stop_early: bool = True  # layers after the last one needed are not even loaded
    packed: bool = True  # taps are concatenated on the device into [T, K*H] before the one copy to the host
    kernels: Kernels = "fla"
    fused: bool = False  # the lab's fused layers (extraction/fast) instead of transformers' own
    plain_layers: tuple[int, ...] = ()  # of a fused target: layers that kept transformers' own forward
    in_flight: int = 0  # batches before this one whose packed states are still being copied to the host
    expandable: bool = False  # the allocator's expandable_segments:True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tap_ids", tuple(sorted(int(tap) for tap in self.tap_ids)))
        for name in ("batch", "length"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: at least 1.")
        if not self.tap_ids and not self.store_final:
            raise InputError("Nothing to extract: tap_ids is empty and store_final is false.")
        dtype_bytes(self.dtype)

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def last_layer(self, num_layers: int) -> int:
        """Return the 0-based index of the last layer that runs."""
        if any(tap < 0 or tap >= num_layers for tap in self.tap_ids):
            raise InputError(f"tap ids {list(self.tap_ids)}: this target has layers 0 to {num_layers - 1}.")
        whole = not self.stop_early or self.store_final or self.logits or self.capture != "hooks"
        return num_layers - 1 if whole else self.tap_ids[-1]


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """One optimizer step of the drafter on one device: `anchors` blocks, `context` target positions."""

    anchors: int
    context: int
    block_size: int
    dtype: str = "bfloat16"
    masters: bool = True  # fp32 copies of the weights that the optimizer steps
    soft_targets: bool = True  # KL to the target's logits: the target side of the loss
    loss: LossPath = "fused"
    chunk: int = 0  # rows of logits at a time; 0: as the loss plans it by itself
    checkpointing: Checkpointing = "none"
    optimizer: Optimizer = "adamw"
    placement: Placement = (
        "cached"  # where the target is: not at all (feature store), here, or on another device
    )
    target_logits_elsewhere: bool = False  # the target side of the loss is made on a second device
    vocabulary_shards: int = 1  # the head's rows are split over this many devices
    data_parallel: int = 1
    expandable: bool = False  # the allocator's expandable_segments:True
    compiled: bool = False  # every draft layer with its attention is one compiled graph
    shards: int = 1  # processes that hold a share of drafter, gradients and optimizer each (FSDP)
    gradients_kept: bool = False  # from row to row of a step, or in DDP's buckets: they are always there
    rows_ahead: int = 0  # rows of the loop on the device beside the one in use
    final_states: bool = False  # rows carry the target's final states though no term of the loss needs them
    noise: bool = False  # the loop adds noise to a copy of the row's states
    head_elsewhere: bool = False  # embedding, head and loss are on another device than the drafter
    target_dtype: str = ""  # of a target on the same device; empty: the drafter's
    recorded: bool = False  # that target's forward of a row is a CUDA graph

    def __post_init__(self) -> None:
        for name in ("anchors", "context", "block_size", "vocabulary_shards", "data_parallel", "shards"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: at least 1.")
        if self.chunk < 0:
            raise InputError(f"chunk={self.chunk}: rows of logits, or 0 to let the loss plan them.")
        for name, known in (("loss", LOSS_PATHS), ("placement", PLACEMENTS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise InputError(f"{name}={getattr(self, name)!r} is none of {', '.join(known)}.")
        for dtype in (self.dtype, self.target_dtype or self.dtype):
            dtype_bytes(dtype)

    @property
    def live(self) -> bool:
        """Whether the target makes the rows' states on the device that trains."""
        return self.placement == "same device"

    @property
    def rows(self) -> int:
        """Drafted positions: every slot of every block."""
        return self.anchors * self.block_size
