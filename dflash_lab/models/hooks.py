"""Forward hooks on decoder layers: catch what they put out, and try another forward beside their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from dflash_lab.errors import InputError, LabError
from dflash_lab.models.load import Target, find_parts


class TapError(LabError, RuntimeError):
    """A forward did not give exactly one tensor for each tapped layer."""


def default_tap_ids(num_layers: int, count: int = 5) -> list[int]:
    """Return the DFlash rule's `count` layer ids, spread evenly from layer 1 to layer num_layers - 3.

    Id k is the output of the 0-based decoder layer k (Hugging Face `hidden_states[k + 1]`); (64, 5) gives
    [1, 16, 31, 46, 61]. One tap is the middle layer. Source: z-lab's `build_target_layer_ids`.
    """
    if count < 1:
        raise InputError(f"count={count}: at least one tap is needed.")
    if count == 1:
        return [num_layers // 2]
    first, last = 1, num_layers - 3
    if last - first + 1 < count:
        raise InputError(
            f"{count} taps do not fit a target of {num_layers} layers: the rule spreads them over layers "
            f"{first}..{last}. Ask for fewer taps, or name the layers yourself."
        )
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


def check_tap_ids(ids: Sequence[int], num_layers: int) -> list[int]:
    """Return `ids` as a list; `InputError` if not whole numbers, empty, repeated, unsorted or not in
    0..num_layers - 1.
    """
    if isinstance(ids, str) or not all(isinstance(i, Integral) and not isinstance(i, bool) for i in ids):
        raise InputError(f"tap_ids {ids!r}: give whole numbers, such as [1, 16, 31].")
    ids = [int(i) for i in ids]
    if not ids:
        raise InputError("No layer to tap: tap_ids is empty.")
    wrong = [i for i in ids if not 0 <= i < num_layers]
    if wrong:
        raise InputError(
            f"tap_ids {wrong}: the target has layers 0..{num_layers - 1}. Id k is the output of the 0-based "
            "decoder layer k; vLLM and speculators count one more."
        )
    if ids != sorted(set(ids)):
        raise InputError(f"tap_ids {ids}: write each layer once, in rising order.")
    return ids


class Taps:
    """Context manager with one forward hook on each tapped layer; `take()` hands over one forward's tensors.

    model: a `Target`, or any causal language model of transformers whose layers `find_parts` finds. ids: tap
    ids, `default_tap_ids` if None. Enter before the first compiled call: a compiled forward does not see
    hooks that come after it. States are views of what the model computed, never copies.
    """

    # `output_hidden_states=True` would keep every layer's output, of which five taps are a thirteenth on a
    # 64-layer target, and its last entry has gone through the final norm.

    def __init__(self, model: Target | PreTrainedModel, ids: Sequence[int] | None = None) -> None:
        if isinstance(model, Target):
            self._layers = model.layers
        elif not isinstance(model, nn.Module) or not hasattr(model, "config"):
            raise InputError(
                f"Taps({type(model).__name__}): expected a Target or a causal language model of transformers."
            )
        else:
            self._layers = find_parts(model, model.config.get_text_config(), type(model).__name__).layers
        count = len(self._layers)
        self.ids = default_tap_ids(count) if ids is None else check_tap_ids(ids, count)
        self._caught: dict[int, list[torch.Tensor]] = {i: [] for i in self.ids}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Self:
        if self._handles:
            raise TapError("These taps are already in place; a second set would catch every layer twice.")
        for i in self.ids:
            self._handles.append(self._layers[i].register_forward_hook(self._hook(i)))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()

    def _hook(self, layer: int) -> Any:
        caught = self._caught[layer]

        def keep(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            caught.append(output[0] if isinstance(output, tuple) else output)

        return keep

    def clear(self) -> None:
        """Forget what was caught, for example after a forward that failed half way."""
        for caught in self._caught.values():
            caught.clear()

    def take(self) -> list[torch.Tensor]:
        """Return the tapped states of the one forward since the last `take`: a list of [B, L, H] in id order.

        Raises `TapError`, and forgets everything caught, unless each tapped layer gave exactly one tensor.
        """
        counts = {i: len(caught) for i, caught in self._caught.items()}
        if any(count != 1 for count in counts.values()):
            self.clear()
            raise TapError(
                f"Tensors caught a layer since the last take: {counts}; expected one each. 0: no forward "
                "reached the layer, or it was compiled before the hook. 2: forwards without a take between."
            )
        return [self._caught[i].pop() for i in self.ids]


# Relative L2, layer by layer on the same input: after thirty layers the rounding of a bf16 stream differs by
# percents between two ways to compute the same.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def layer_errors(
    layers: nn.ModuleList,
    others: Mapping[int, Callable[..., Any]],
    run: Callable[[], Any],
    measure: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], float],
) -> dict[int, float]:
    """Call `run`, one forward through `layers`, and at each layer of `others` its other forward on the same
    arguments; return the error of each. None from the other forward: it does not do such a call (infinity).

    measure: (stream before the layer, what the layer puts out, what the other forward does), each [B, L, H]
    -> error. What a layer ADDS to the stream is to be compared; the stream itself would hide an error.
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
