"""What each optimizer keeps of a drafter's parameters and needs for its update, in bytes with the formula.

Sources: `drafter/optimizer.py` (AdamW is one kernel a parameter on CUDA, and one for all norms, laid side by
side; Muon orthogonalises matrices of one shape together, up to 2^26 elements) and `drafter/moments.py` (codes
are made in plain tensor operations). The tests hold both to the counted step.
"""

from __future__ import annotations

from typing import Any

from dflash_lab.memory.setups import Optimizer

MUON_ELEMENTS = 1 << 26
_MOMENTS = {"adamw": 8.0, "adamw8bit": 2.03, "cpu-offload": 0.0}  # a parameter
_CODES = 46  # bytes an element while its codes are made: 11 fp32 copies and both codes
_HOST = 12  # master and both moments of one matrix, come from the host and go back
_MUON = 12  # the stack of matrices, the update and its scaled copy
_FLAT = 4  # the momentum ahead, in one buffer; and of one matrix the pull towards the gradient


def moments(drafter: Any, optimizer: Optimizer, parameters: int) -> tuple[int, str]:
    """Return the bytes of the moments on the device."""
    if optimizer == "muon":
        matrices = drafter.num_layers * sum(count * size for count, size in _layer_matrices(drafter))
        return 8 * parameters - 4 * matrices, "8 P - 4 x matrices of the layers: one momentum each"
    return int(_MOMENTS[optimizer] * parameters), f"{_MOMENTS[optimizer]:g} P ({optimizer})"


def update_temporaries(
    drafter: Any, optimizer: Optimizer, largest: int, *, element: int, shards: int = 1
) -> tuple[int, str]:
    """Return the bytes that the update needs beside gradients and state.

    `largest`: elements of the largest matrix, of a sharded drafter of a process's share; `element`: bytes of
    one of the drafter's. Muon orthogonalises whole matrices, so of a sharded one all are gathered.
    """
    if optimizer == "muon":
        together, most = _together(drafter)
        flat = -(-_FLAT * (together + most) // shards)
        whole = 4 * together if shards > 1 else 0
        formula = "16 E + 4 m" if shards == 1 else f"16 E + 4 (E + m) / {shards}"
        text = f"{formula}: E elements of the matrices orthogonalised together, m of one of them"
        return _MUON * together + flat + whole, text
    if optimizer == "adamw8bit":
        return _CODES * largest, "largest matrix x 11 fp32 copies: codes are made in plain tensor operations"
    if optimizer == "cpu-offload":
        return _HOST * largest, "largest matrix x 3 fp32 copies: master and moments come and go"
    norms = drafter.num_layers * 2 * (drafter.hidden_size + drafter.head_dim) + 2 * drafter.hidden_size
    state = 8 if element == 4 else 12
    return (2 * element + state) * norms // shards, "of the norms, side by side: weights, gradients and state"


def _layer_matrices(drafter: Any) -> list[tuple[int, int]]:
    """(how many of one shape, elements of each) of a layer's matrices; DFlash 2 has two more for kernels."""
    hidden = drafter.hidden_size
    q, kv = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
    kernels = (
        2 * drafter.conv_kernel_size * (hidden // drafter.conv_group_size if drafter.conv_kernel_size else 0)
    )
    sizes: dict[int, int] = {}
    for count, width in ((2, q), (2, kv), (3, drafter.intermediate_size), (2, kernels)):
        sizes[hidden * width] = sizes.get(hidden * width, 0) + count
    return [(count, size) for size, count in sizes.items()]


def _together(drafter: Any) -> tuple[int, int]:
    """Elements of the largest group that Muon orthogonalises at once, and of one of its matrices."""
    groups = [(drafter.num_layers * count, size) for count, size in _layer_matrices(drafter) if size]
    return max((min(count, max(1, MUON_ELEMENTS // size)) * size, size) for count, size in groups)
