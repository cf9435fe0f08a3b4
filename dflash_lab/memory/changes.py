"""The changes that can be tried on a setup that is too large: which field, at what cost in time, and why it
helps.

Times are shares of a batch or step: from operation counts, and for the loss from rates measured on an H200
(24,576 x 248,320 x 5,120, hard and soft targets, ms: whole 389, loop 388, recomputed 644, fused 318),
weighed with the loss's share of a step (about 0.3 there).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_lab.memory.setups import ExtractionSetup, TrainingSetup
from dflash_lab.memory.shapes import TargetShape

_LOSS_MS = {"naive": 389, "concat": 389, "loop": 388, "checkpoint": 644, "fused": 318}
_LOSS_SHARE = 0.3
_EXPANDABLE = (
    "PYTORCH_ALLOC_CONF=expandable_segments:True before CUDA starts: batches of changing shape then share "
    "one growing segment (not together with max_split_size_mb, with which it grows without bound)"
)


@dataclass(frozen=True)
class Option:
    """A change to try: fields to replace, time in percent, and whether it is the same training afterwards.

    `same_goal` is false where the run would be another one (fewer anchors, hard labels); `built_in` is
    false for what the lab's trainer does not offer.
    """

    name: str
    setting: Mapping[str, Any]
    time_pct: float
    why: str
    same_goal: bool = True
    built_in: bool = True


def extraction_options(
    shape: TargetShape, setup: ExtractionSetup, most: int, *, cuda: bool = True
) -> list[Option]:
    """Return what can be changed in an extraction batch; `most` rows of this length fit as it is."""
    options = []
    taps = len(setup.tap_ids)
    if setup.capture != "hooks":
        why = f"keep {taps} tapped layers instead of all {shape.layers + 1} tensors"
        options.append(Option("hooks on the tapped layers", {"capture": "hooks"}, 0.0, why))
    if setup.logits:
        options.append(Option("no logits", {"logits": False}, -5.0, "the states are taken before the head"))
    if setup.use_cache:
        why = "nothing is decoded, and a linear layer's state costs the same for every row, however short"
        options.append(Option("no cache", {"use_cache": False}, 0.0, why))
    if setup.mask:
        why = "exact for causal layers, and no [L, L] tensor is built"
        options.append(Option("right padding, no mask", {"mask": False}, -5.0, why))
    if cuda and setup.kernels == "torch" and shape.delta is not None:
        why = "no fp32 tensors of whole chunks"
        options.append(Option("flash-linear-attention kernels", {"kernels": "fla"}, -40.0, why))
    if not setup.stop_early:
        why = "later layers, final norm and head never run"
        options.append(Option("stop after the last tap", {"stop_early": True}, -7.9, why))
    if 1 <= most < setup.batch:
        options.append(batch_cap(setup, most))
    if setup.batch > 1:
        why = "the rate is flat above a few thousand tokens"
        options.append(Option("half the batch", {"batch": setup.batch // 2}, 2.0, why))
    if taps > 3:
        kept = tuple(setup.tap_ids[round(place * (taps - 1) / 2)] for place in range(3))
        why = "drafts get shorter: 5.38 against 5.64 tokens a round with 3 taps against 5 in the DFlash paper"
        options.append(Option("capture 3 layers", {"tap_ids": kept}, 0.0, why, same_goal=False))
    if cuda and not setup.expandable:
        options.append(Option("expandable segments", {"expandable": True}, 0.0, _EXPANDABLE))
    return options


def batch_cap(setup: ExtractionSetup, most: int) -> Option:
    """Return the change to the largest batch that fits."""
    why = f"for samples of {setup.length:,} tokens; shorter ones are still batched wider"
    return Option(f"bucket by length, at most {most} rows here", {"batch": most}, 1.0, why)


def anchor_cap(setup: TrainingSetup, most: int) -> Option:
    """Return the change to the largest number of anchors that fits."""
    why = "fewer blocks a step; a block takes as long as before"
    return Option(f"{most} anchors", {"anchors": most}, 0.0, why, same_goal=False)


def training_options(setup: TrainingSetup, most: int, *, cuda: bool = True) -> list[Option]:
    """Return what can be changed in a training step; `most` anchors fit as it is."""
    options = []
    if cuda and not setup.compiled:
        why = "compile: true; norms, SwiGLU and rotation keep only what products and attention read again"
        options.append(Option("compile the draft layers", {"compiled": True}, 0.0, why))
    if setup.loss != "fused":
        faster = 100 * (_LOSS_MS["fused"] / _LOSS_MS[setup.loss] - 1) * _LOSS_SHARE
        why = "the gradient is finished inside the chunk, so one chunk's logits exist at a time"
        options.append(Option("chunked loss", {"loss": "fused"}, round(faster, 1), why))
    for chunk in (512, 256):
        if setup.chunk > chunk:
            why = (
                "matrix products of 512 rows still run at full rate"
                if chunk == 512
                else "they lose rate here"
            )
            options.append(
                Option(f"loss chunks of {chunk}", {"chunk": chunk}, 0.0 if chunk == 512 else 3.0, why)
            )
    if setup.checkpointing == "none":
        why = "each draft layer keeps its input and runs twice"
        options.append(Option("checkpoint the draft layers", {"checkpointing": "layers"}, 22.0, why))
        why = "the feed-forwards keep their input and run twice"
        option = Option("checkpoint the feed-forwards", {"checkpointing": "mlp"}, 13.0, why, built_in=False)
        options.append(option)
    if setup.placement == "same device":
        why = "the target's layers leave this device"
        options.append(Option("target on another device", {"placement": "other device"}, 2.0, why))
        why = "the states come from a feature store made before"
        options.append(Option("extract first, train from the store", {"placement": "cached"}, -50.0, why))
    if setup.vocabulary_shards == 1:
        why = "two GPUs hold half of the head each and make half of the logits"
        change = {"vocabulary_shards": 2}
        options.append(Option("vocabulary-parallel head over 2 GPUs", change, 3.0, why, built_in=False))
    if setup.soft_targets and not setup.target_logits_elsewhere:
        why = "the target's side is projected there; with chunks, one chunk of its logits still comes here"
        change = {"target_logits_elsewhere": True}
        options.append(Option("target logits on a second GPU", change, -8.0, why, built_in=False))
    if cuda and not setup.head_elsewhere:
        why = "head: N; embedding, head and loss leave this device, block states cross over and back"
        options.append(Option("head and loss on another GPU", {"head_elsewhere": True}, 2.0, why))
    if setup.optimizer == "adamw":
        why = "moments: int8, a byte each with a scale a block; making the codes takes room for a moment"
        options.append(Option("8-bit optimizer", {"optimizer": "adamw8bit"}, 1.0, why))
        why = "offload: true; moments and masters stay on the host, a matrix at a time comes here"
        options.append(Option("optimizer on the CPU", {"optimizer": "cpu-offload"}, 30.0, why))
    if 8 <= most < setup.anchors:
        options.append(anchor_cap(setup, most))
    for block in (16, 8):
        if setup.block_size > block:
            why = "shorter drafts; a drafter trained on long blocks serves short ones better than the reverse"
            option = Option(f"blocks of {block}", {"block_size": block}, 0.0, why, same_goal=False)
            options.append(option)
    if setup.soft_targets:
        why = "no target logits and no final states, but no KL to the target either"
        option = Option("hard labels only", {"soft_targets": False}, -15.0, why, same_goal=False)
        options.append(option)
    if cuda and not setup.expandable:
        options.append(Option("expandable segments", {"expandable": True}, 0.0, _EXPANDABLE))
    return options
