"""What a training run holds where it does not train: a target that feeds drafters, and on a GPU of its own
the frozen head with the loss.

S context tokens, H hidden, K taps, N = anchors x block rows, V vocabulary, s bytes an element. Rows are bf16.
"""

from __future__ import annotations

from typing import Any

from dflash_lab.memory.account import Account, Moment, account_of
from dflash_lab.memory.extraction_account import FRAGMENTS, OUTSIDE_TORCH, WORKSPACE, Live
from dflash_lab.memory.loop_account import target_forward
from dflash_lab.memory.loss_account import loss_terms
from dflash_lab.memory.setups import TrainingSetup
from dflash_lab.memory.shapes import TargetShape, dtype_bytes
from dflash_lab.memory.training_account import with_chunk

_ROW_BYTES = 2


def target_process(shape: TargetShape, drafter: Any, setup: TrainingSetup, *, cuda: bool = True) -> Account:
    """Return the account of a process that makes rows for drafters (`drafter.pipeline.serve`).

    Of `setup` count the context, the target's dtype, and whether its forward is a recorded graph. While a row
    is made, the one before may still be on its way to its drafter's slot.
    """
    taps, hidden = len(drafter.tap_ids), drafter.hidden_size
    weights = (shape.body_parameters() + shape.head_parameters()) * dtype_bytes(
        setup.target_dtype or setup.dtype
    )
    row = setup.context * (taps + 1) * hidden * _ROW_BYTES
    forward = target_forward(shape, drafter, setup, cuda=cuda)
    always: Live = {"target weights": (weights, "all layers, embedding and head")}
    if cuda:
        always["workspace"] = (WORKSPACE, "cuBLAS")
        always["outside torch"] = (OUTSIDE_TORCH, "CUDA context and loaded kernels, typical")
    sent: Live = {"rows on their way": (row, "S (K + 1) H 2: the row before")}
    moments = [Moment("the target's forward of a row", {**always, **forward, **sent})]
    if setup.recorded:
        pool = forward["target's forward of a row"][0]
        replayed: Live = {
            "recorded forward's states": (row, "S (K + 1) H 2: the graph's own outputs"),
            "recorded forward's pool": (pool, "one forward's tensors: reserved for the graph"),
            "rows on their way": (
                2 * row,
                "2 S (K + 1) H 2: a copy of the graph's outputs, and the row before",
            ),
        }
        moments.append(Moment("a replay of the recorded forward", {**always, **replayed}))
    account = account_of("analytic", f"target, rows of {setup.context} tokens", moments)
    return account.fragmented(FRAGMENTS[setup.expandable]) if cuda else account


def head_process(shape: TargetShape, drafter: Any, setup: TrainingSetup, *, cuda: bool = True) -> Account:
    """Return the account of what a drafter's process holds on the GPU of its frozen head."""
    setup = with_chunk(setup, shape.vocab, cuda=cuda)
    size = dtype_bytes(setup.dtype)
    matrix = shape.vocab * shape.hidden * size
    stream = setup.rows * shape.hidden * size
    final = setup.context * shape.hidden * size if setup.soft_targets else 0
    live: Live = {
        "head and embedding": (matrix * (1 if shape.tied else 2), "V H s each (once if tied)"),
        "block states": (2 * stream, "2 N H s: hidden states that came, and their gradient"),
        "target final states": (final, "S H s: a copy"),
        **loss_terms(shape.vocab, drafter.hidden_size, setup),
    }
    if cuda:
        live["workspace"] = (2 * WORKSPACE, "cuBLAS, a handle each for forward and backward")
        live["outside torch"] = (OUTSIDE_TORCH, "CUDA context and loaded kernels, typical")
    account = account_of(
        "analytic", f"head of {setup.anchors} x {setup.block_size}", [Moment("the loss", live)]
    )
    return account.fragmented(FRAGMENTS[setup.expandable]) if cuda else account
