"""Catch what chosen decoder layers put out, and nothing else.

`output_hidden_states=True` keeps every layer's output (four times the memory of five taps on a 64-layer
target), and its last entry has gone through the final norm. A forward hook on the tapped layers has neither
fault. A hook registered after a compiled forward never fires, so enter `Taps` before the first compiled call.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from dflash_lab.errors import InputError, LabError


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
    """Return `ids` as a list; `InputError` if empty, repeated, unsorted or not in 0..num_layers - 1."""
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
    """Context manager holding one forward hook on each tapped layer; `take()` hands over one forward's
    tensors.

    The states are views of what the model computed: no copy is made, and `take` keeps no reference to them.
    """

    def __init__(self, layers: nn.ModuleList, ids: Sequence[int]) -> None:
        self.ids = check_tap_ids(ids, len(layers))
        self._layers = layers
        self._caught: dict[int, list[torch.Tensor]] = {i: [] for i in self.ids}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Self:
        if self._handles:
            raise TapError("These taps are already in place; a second set would catch every layer twice.")
        for i in self.ids:
            self._handles.append(self._layers[i].register_forward_hook(self._hook(i)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
