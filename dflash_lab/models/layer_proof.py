"""Whether another forward of a decoder layer gives what its own does: tried layer by layer on the same
input, because after thirty layers the rounding of a bf16 stream differs by percents between two ways to
compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}  # relative L2

# (stream before the layer, what the layer puts out, what the other forward does), each [B, L, H] -> error.
# What a layer ADDS to the stream is to be compared; the stream itself would hide an error.
Measure = Callable[[Tensor, Tensor, Tensor], float]


def layer_errors(
    layers: nn.ModuleList,
    others: Mapping[int, Callable[..., Any]],
    run: Callable[[], Any],
    measure: Measure,
) -> dict[int, float]:
    """Call `run`, one forward through `layers`, and at each layer of `others` its other forward on the same
    arguments; return the error of each. None from the other forward: it does not do such a call (infinity).
    """
    errors: dict[int, float] = {}

    def compare(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            stream = args[0] if args else kwargs["hidden_states"]
            plain, other = (
                out[0] if isinstance(out, tuple) else out for out in (output, others[index](*args, **kwargs))
            )
            errors[index] = float("inf") if other is None else measure(stream, plain, other)

        return hook

    handles = [layers[index].register_forward_hook(compare(index), with_kwargs=True) for index in others]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return errors
