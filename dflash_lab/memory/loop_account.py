"""What the training loop holds beside one step of one row: rows on their way, a target that makes them, and a
drafter whose parts lie on several devices.

S context tokens, H hidden, K taps, P parameters, s bytes an element of the drafter, n processes. States of
rows are bf16 wherever they come from.
"""

from __future__ import annotations

from typing import Any

from dflash_lab.memory.extraction_account import Live, extraction_account
from dflash_lab.memory.setups import ExtractionSetup, TrainingSetup
from dflash_lab.memory.shapes import TargetShape, dtype_bytes

_ROW_BYTES = 2  # an element of a row's states


def beside_the_step(shape: TargetShape, drafter: Any, setup: TrainingSetup, *, cuda: bool) -> Live:
    """Return the rows that wait, the noisy copy of the one in use, and what a recorded forward holds."""
    final = setup.soft_targets or setup.final_states or setup.live
    taps, hidden = len(drafter.tap_ids), drafter.hidden_size
    row = setup.context * (taps + final) * hidden * _ROW_BYTES
    size = dtype_bytes(setup.dtype)
    states = setup.context * taps * hidden
    live: Live = {
        "rows ahead": (setup.rows_ahead * row, f"{setup.rows_ahead} x S (K + final) H 2"),
        "noisy states": (states * size if setup.noise else 0, "S K H s"),
    }
    if setup.recorded:
        kept = setup.context * (taps + 1) * hidden * _ROW_BYTES
        live["recorded forward's states"] = (kept, "S (K + 1) H 2: the graph's own outputs")
        live["recorded forward's pool"] = (
            target_forward(shape, drafter, setup, cuda=cuda)["target's forward of a row"][0],
            "one forward's tensors: reserved for the graph, live in none of its pauses",
        )
    return live


def target_forward(shape: TargetShape, drafter: Any, setup: TrainingSetup, *, cuda: bool) -> Live:
    """Return what the live target's forward of one row holds at its worst moment beside its weights.

    A row is one sequence of S tokens, or documents padded to about as many (each at least 64 long where
    layers are linear).
    """
    one = ExtractionSetup(
        batch=1,
        length=setup.context,
        tap_ids=tuple(drafter.tap_ids),
        dtype=setup.target_dtype or setup.dtype,
        store_final=True,
        kernels="fla" if cuda else "torch",
        fused=cuda and shape.delta is not None,  # what the loop asks for (`speed_up`)
    )
    account = extraction_account(shape, one, cuda=False)
    size = account.live - account.terms["target weights"]
    return {"target's forward of a row": (size, f"1 x S tokens, in {account.moment}")}


def resident_target_bytes(shape: TargetShape, setup: TrainingSetup) -> int:
    """Return the bytes of a live target on the training device beside the head and embedding that the loss
    uses: its layers, and ends of its own where it cannot share those.
    """
    if not setup.live:
        return 0
    layers = sum(map(shape.layer_parameters, range(shape.layers)))
    own = setup.head_elsewhere or setup.target_dtype not in ("", setup.dtype)
    ends = shape.vocab * shape.hidden + shape.hidden + shape.head_parameters() if own else 0
    return (layers + ends) * dtype_bytes(setup.target_dtype or setup.dtype)


def gathered(drafter: Any, setup: TrainingSetup, parameters: int, *, backward: bool) -> Live:
    """Return what FSDP gathers: the fc, which stays, and in the backward two layers with their gradients.

    One layer is used while the next one comes; gradients are whole, and copied once to be scattered. (A
    checkpoint gathers tensor by tensor, which is less.)
    """
    if setup.shards == 1:
        return {}
    fc = len(drafter.tap_ids) * drafter.hidden_size**2
    size = dtype_bytes(setup.dtype)
    layer = (parameters - fc) // drafter.num_layers
    if not backward:
        return {"gathered weights": (fc * size, "fc s: the root stays gathered")}
    return {
        "gathered weights": ((fc + 2 * layer) * size, "fc and 2 layers: one in use, one coming"),
        "gathered gradients": (2 * layer * size, "2 x a layer's: whole, and on their way to be summed"),
    }
