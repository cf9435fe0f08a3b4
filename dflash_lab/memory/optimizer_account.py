"""What each optimizer keeps of a drafter's parameters and needs for its update, in bytes with the formula.

Sources: `drafter/optimizer.py` (AdamW is one kernel a parameter on CUDA; Muon orthogonalises matrices of one
shape together, up to 2^26 elements) and `drafter/moments.py` (codes are made in plain tensor operations).
"""

from __future__ import annotations

from typing import Any

from dflash_lab.memory.setups import Optimizer

MUON_ELEMENTS = 1 << 26
_MOMENTS = {"adamw": 8.0, "adamw8bit": 2.03, "cpu-offload": 0.0}  # a parameter
_CODES = 46  # bytes an element while its codes are made: 11 fp32 copies and both codes
_HOST = 12  # master and both moments of one matrix, come from the host and go back
_MUON = 16  # momentum ahead, the stack of matrices, the update and its scaled copy


def moments(drafter: Any, optimizer: Optimizer, parameters: int) -> tuple[int, str]:
    """Return the bytes of the moments on the device."""
    if optimizer == "muon":
        matrices = drafter.num_layers * sum(count * size for count, size in _layer_matrices(drafter))
        return 8 * parameters - 4 * matrices, "8 P - 4 x matrices of the layers: one momentum each"
    return int(_MOMENTS[optimizer] * parameters), f"{_MOMENTS[optimizer]:g} P ({optimizer})"


def update_temporaries(drafter: Any, optimizer: Optimizer, largest: int) -> tuple[int, str]:
    """Return the bytes that the update needs beside gradients and state; `largest`: elements of a matrix."""
    if optimizer == "muon":
        return _MUON * _together(drafter), "16 x elements of the matrices orthogonalised together"
    if optimizer == "adamw8bit":
        return _CODES * largest, "largest matrix x 11 fp32 copies: codes are made in plain tensor operations"
    if optimizer == "cpu-offload":
        return _HOST * largest, "largest matrix x 3 fp32 copies: master and moments come and go"
    return 0, "one kernel a parameter: nothing"


def _layer_matrices(drafter: Any) -> list[tuple[int, int]]:
    """(how many of one shape, elements of each) of a layer's matrices."""
    hidden = drafter.hidden_size
    q, kv = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
    sizes: dict[int, int] = {}
    for count, width in ((2, q), (2, kv), (3, drafter.intermediate_size)):
        sizes[hidden * width] = sizes.get(hidden * width, 0) + count
    return [(count, size) for size, count in sizes.items()]


def _together(drafter: Any) -> int:
    """Elements of the largest group that Muon orthogonalises at once."""
    groups = ((drafter.num_layers * count, size) for count, size in _layer_matrices(drafter))
    return max(min(count, max(1, MUON_ELEMENTS // size)) * size for count, size in groups)
