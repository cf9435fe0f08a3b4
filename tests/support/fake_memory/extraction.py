"""Count the tensors of a real forward on fake tensors: no weights, no device, seconds on a laptop. Layers
that repeat others are left out, and what grows with depth (weights, cache, stored states) is added.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from support.fake_memory.fused_layers import fuse
from support.fake_memory.kernels import kernels_of
from support.fake_memory.tracker import LabelledTensors, module_scopes
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModel, AutoModelForCausalLM

from dflash_lab.memory.account import Account, cache_bytes, target_weight_bytes
from dflash_lab.memory.shapes import ExtractionSetup, TargetShape, dtype_bytes, target_shape


def representative_layers(shape: TargetShape, taps: tuple[int, ...], last: int) -> list[int]:
    """Return the layers to keep of ``0..last``: every tapped one, and of each kind the one that runs latest.

    The later a layer runs, the more states are captured beside it; an earlier one of the same kind is never
    the peak. An untapped layer in front of a kept one stays too: its output is a tensor of its own, where a
    tapped layer's is among the captured ones.
    """
    seen: set[tuple[str, bool]] = set()
    kept: set[int] = set()
    for index in range(last, -1, -1):
        kind = (shape.layer_types[index], shape.sparse[index])
        if kind not in seen:
            kept |= {index} | ({index - 1} if index and index - 1 not in taps else set())
        seen.add(kind)
    return sorted(kept | set(taps) | {last})


def _latest_plain(shape: TargetShape, setup: ExtractionSetup, last: int) -> set[int]:
    """Of each kind the plain layer of a fused target that runs latest, and the layer in front of it."""
    latest = {shape.layer_types[index]: index for index in sorted(setup.plain_layers) if index <= last}
    return {index for at in latest.values() for index in (at - 1, at) if index >= 0}


def count_extraction(config: Any, setup: ExtractionSetup) -> tuple[Account, LabelledTensors]:
    """Run one batch on fake tensors; return the account and the tracker with its trace."""
    shape = target_shape(config)
    last = setup.last_layer(shape.layers)
    taps = tuple(sorted({*setup.tap_ids, *((shape.layers - 1,) if setup.store_final else ())}))
    kept = representative_layers(shape, taps, last)
    if setup.fused and setup.plain_layers:
        kept = sorted({*kept, *_latest_plain(shape, setup, last)})
    tracker = LabelledTensors()
    with FakeTensorMode(), torch.no_grad(), kernels_of(shape.model_type, setup.kernels):
        model = fake_model(config, kept, setup.dtype, head=setup.logits)
        if setup.fused:
            fuse(model, tracker, plain=[kept.index(layer) for layer in kept if layer in setup.plain_layers])
        ids = torch.zeros(setup.batch, setup.length, dtype=torch.long)
        with module_scopes(tracker, layer_labels(model)), tracker:
            tracker.add(model.parameters(), "target weights")
            tracker.add(model.buffers(), "target weights")
            tracker.add([ids], "token ids")
            tracker.start_peak_here()
            _run(model, ids, setup, [kept.index(tap) for tap in taps], tracker)
    terms = tracker.by_label()
    terms["target weights"] = target_weight_bytes(shape, setup)
    missing = last + 1 - len(kept)
    if setup.capture == "output_hidden_states":
        extra = missing * setup.tokens * shape.hidden * dtype_bytes(setup.dtype)
        terms["stored hidden states"] = terms.get("stored hidden states", 0) + extra
    if setup.in_flight:
        states = len(setup.tap_ids) + setup.store_final
        each = states * setup.tokens * shape.hidden * dtype_bytes(setup.dtype)
        terms["packed states in flight"] = setup.in_flight * each
    if setup.use_cache:
        absent = [index for index in range(last + 1) if index not in kept]
        terms["cache"] = terms.get("cache", 0) + sum(cache_bytes(shape, setup, index) for index in absent)
    return Account(f"extraction {setup.batch} x {setup.length}", terms, moment=tracker.moment()), tracker


def fake_model(config: Any, kept: list[int], dtype: str, *, head: bool) -> Any:
    """Build the decoder with only the layers `kept`; call inside a `FakeTensorMode`."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    text = copy.deepcopy(text)
    shape = target_shape(text)
    types = [shape.layer_types[index] for index in kept]
    text.num_hidden_layers = len(kept)
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = types
    if any(shape.sparse) and hasattr(text, "mlp_only_layers"):
        text.mlp_only_layers = [place for place, index in enumerate(kept) if not shape.sparse[index]]
        text.decoder_sparse_step = 1
    auto = AutoModelForCausalLM if head else AutoModel
    model = auto.from_config(text, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def layer_labels(model: Any) -> dict[torch.nn.Module, str]:
    """Return the term that each submodule of a decoder layer stands for."""
    body = getattr(model, "model", model)
    labels: dict[torch.nn.Module, str] = {body: "residual stream", body.embed_tokens: "embedded tokens"}
    for layer in body.layers:
        labels[layer] = "residual stream"
        for name, child in layer.named_children():
            labels[child] = _CHILDREN.get(name, "norms" if "norm" in name else "activations")
    if hasattr(model, "lm_head"):
        labels[model.lm_head] = "logits"
    return labels


_CHILDREN = {
    "self_attn": "attention",
    "linear_attn": "gated delta net",
    "mlp": "MLP",
    "block_sparse_moe": "MLP",
}


def _run(
    model: Any, ids: torch.Tensor, setup: ExtractionSetup, taps: list[int], tracker: LabelledTensors
) -> None:
    """Run the batch with taps on the layers at `taps`, keeping every result alive until the end."""
    captured: dict[int, torch.Tensor] = {}

    def hook(place: int) -> Any:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            state = output[0] if isinstance(output, tuple) else output
            captured[place] = state
            tracker.relabel(state, "captured states")

        return keep

    body = getattr(model, "model", model)
    handles = []
    if setup.capture == "hooks":
        handles = [body.layers[place].register_forward_hook(hook(place)) for place in taps]
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": setup.use_cache}
    if setup.mask:
        with tracker.scope("mask"):
            arguments["attention_mask"] = torch.ones_like(ids)
    if setup.capture == "output_hidden_states":
        arguments["output_hidden_states"] = True
    try:
        output = model(**arguments)
    finally:
        for handle in handles:
            handle.remove()
    if setup.capture == "output_hidden_states":
        for state in output.hidden_states:
            tracker.relabel(state, "stored hidden states")
    elif setup.packed and captured:
        with tracker.scope("packed states"):
            packed = torch.cat([captured[place].flatten(0, 1) for place in taps], dim=-1)
            captured.clear()
            del packed
    del output
