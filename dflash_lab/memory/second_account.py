"""What DFlash 2's convolutions and candidate selector hold beside a DFlash layer and its loss.

Letters are those of `training_account`; t taps of a convolution, g channels of a group, r rank and k
candidates of the selector. A layer has four convolutions. Plain, each keeps for every tap its kernel and the
shifted input; compiled, torch's cut keeps less (`compiled_account`). The tests hold both to the real layer.
"""

from __future__ import annotations

from typing import Any

from dflash_lab.memory.extraction_account import Live
from dflash_lab.memory.setups import TrainingSetup
from dflash_lab.memory.shapes import dtype_bytes

SELECTOR_ELEMENTS = 1 << 26  # logits the selector holds at once: `drafter.selector_loss.ELEMENTS`


def convolution_bytes(drafter: Any, setup: TrainingSetup) -> tuple[int, str]:
    """Return what the convolutions of one layer keep for the backward; nothing for a DFlash drafter."""
    taps, size = drafter.conv_kernel_size, dtype_bytes(setup.dtype)
    if not taps:
        return 0, ""
    state = setup.rows * drafter.hidden_size * size
    if not setup.compiled:
        return 8 * taps * state, "a layer: 8 t N H s: kernels and shifted inputs of 4 convolutions"
    deltas = 4 * taps * setup.rows * (drafter.hidden_size // drafter.conv_group_size) * size
    return (4 * taps + 1) * state + deltas, "a compiled layer: (4 t + 1) N H s + 4 t N H s / g"


def selector(drafter: Any, setup: TrainingSetup, *, loss: bool) -> Live:
    """Return the gradients of the selector's codebooks, which come first, and in the loss one chunk's work: a
    bound, for candidates' rows are gathered and one codebook's gradient at a time is made whole.
    """
    rank, vocab = drafter.selector_rank, drafter.vocab_size
    if not rank:
        return {}
    size = dtype_bytes(setup.dtype)
    codebook = vocab * rank * size
    live: Live = {"selector gradients": (2 * codebook, "2 V r s: of both codebooks")}
    if loss:
        rows = min(setup.rows, max(1, SELECTOR_ELEMENTS // vocab))
        gathered = rows * drafter.selector_top_k * (2 * drafter.hidden_size + 3 * rank) * size
        chunk = rows * vocab * size + gathered + codebook
        live["selector's chunk"] = (chunk, "c V s + c k (2 H + 3 r) s + V r s")
    return live
