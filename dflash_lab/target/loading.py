"""Load a target, or its head alone, reading only the tensors that were asked for."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from dflash_lab.errors import InputError, UnsupportedTarget, near
from dflash_lab.target import shapes, structure
from dflash_lab.target.checkpoint import Checkpoint
from dflash_lab.target.head import TargetHead
from dflash_lab.target.model import Target
from dflash_lab.target.sources import Source, resolve, whole_config

log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(device: str | torch.device) -> torch.device:
    """Return the device meant: ``auto`` is CUDA where there is one, else the CPU."""
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device {device!r}: expected auto, cpu, cuda or cuda:<number>.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {device!r}: torch sees no CUDA device here. Use device=cpu or device=auto.")
    return chosen


def choose_dtype(dtype: str | torch.dtype, config: PretrainedConfig) -> torch.dtype:
    """Return the dtype meant: ``auto`` is the one the config names (float32 if it names none)."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        stored = getattr(config, "dtype", None)
        return stored if isinstance(stored, torch.dtype) else _DTYPES.get(str(stored), torch.float32)
    if dtype not in _DTYPES:
        raise InputError(f"dtype {dtype!r}: expected auto, {', '.join(_DTYPES)}{near(dtype, _DTYPES)}.")
    return _DTYPES[dtype]


def load_target(
    target: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    seed: int = 0,
    last_layer: int | None = None,
    with_head: bool = True,
    attn: str = "sdpa",
    allow_slow_kernels: bool = False,
) -> Target:
    """Load a target for inference: evaluation mode, no gradients.

    target: ``smollm2``, a folder, a hub id, or ``random:<named shape | config.json>`` (weights from `seed`).
    last_layer: the last decoder layer to load (0-based, z-lab id); later ones are not read. with_head: False leaves the
    head matrix unread. device ``meta`` gives shapes without weights.
    Raises `InputError` for a name or value that means nothing and `UnsupportedTarget` for a model that is not understood.
    """
    source = resolve(target, trust_remote_code=trust_remote_code)
    chosen = choose_device(device)
    whole = whole_config(source)
    kind = choose_dtype(dtype, whole.get_text_config())
    config = structure.cut_config(whole.get_text_config(), last_layer)
    config._attn_implementation = attn
    if chosen.type == "cuda" and structure.is_hybrid(config) and not allow_slow_kernels:
        _require_fast_kernels(source.name)
    started = time.monotonic()
    body = structure.skeleton(config, name=source.name, dtype=kind, trust_remote_code=trust_remote_code)
    parts = structure.find_parts(body, config, source.name)  # refuse before gigabytes are read
    checkpoint = None if source.checkpoint is None else Checkpoint(source.checkpoint)
    if chosen.type != "meta":
        if checkpoint is None:
            shapes.randomise(body, seed=seed, device=chosen, dtype=kind)
        else:
            body = _read_body(source, checkpoint, config, parts, chosen, kind)
    body.requires_grad_(False).eval()
    weight = None
    if with_head:
        embedding = body.get_input_embeddings().weight
        weight = _head_weight(source, checkpoint, whole, embedding, chosen, kind, seed)
    log.info(
        "%s: %d layers, %s on %s, %.1f s",
        target,
        config.num_hidden_layers,
        kind,
        chosen,
        time.monotonic() - started,
    )
    return Target(source, config, body, weight, device=chosen, dtype=kind, seed=seed)


def load_head(
    target: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    seed: int = 0,
) -> TargetHead:
    """Load only a target's embedding, final norm and head matrix; equal to ``load_target(...).head``."""
    source = resolve(target, trust_remote_code=trust_remote_code)
    chosen = choose_device(device)
    whole = whole_config(source)
    kind = choose_dtype(dtype, whole.get_text_config())
    config = structure.cut_config(
        whole.get_text_config(), 0
    )  # one layer: the ends have the same names and shapes
    body = structure.skeleton(config, name=source.name, dtype=kind, trust_remote_code=trust_remote_code)
    parts = structure.find_parts(body, config, source.name)
    ends = {parts.embedding_name: parts.embedding, parts.norm_name: parts.norm}
    checkpoint = None
    if source.checkpoint is None:
        for name, module in ends.items():
            shapes.fill_module(module, body, seed=seed, name=name, device=chosen, dtype=kind)
    else:
        checkpoint = Checkpoint(source.checkpoint)
        prefix = checkpoint.text_prefix(parts.embedding_name, parts.norm_name)
        for name, module in ends.items():
            for key, _ in list(module.named_parameters(recurse=False)):
                weight = checkpoint.read(f"{prefix}{name}.{key}", device=chosen, dtype=kind)
                setattr(module, key, nn.Parameter(weight, requires_grad=False))
    norm = parts.norm.requires_grad_(False).eval()
    embedding = parts.embedding.weight.detach()
    weight = _head_weight(source, checkpoint, whole, embedding, chosen, kind, seed)
    return TargetHead(embedding, norm, weight)


def _read_body(
    source: Source,
    checkpoint: Checkpoint,
    config: PretrainedConfig,
    parts: structure.Parts,
    device: torch.device,
    dtype: torch.dtype,
) -> PreTrainedModel:
    """Read the body's own tensors, and no others, straight onto the device."""
    prefix = checkpoint.text_prefix(parts.embedding_name, parts.norm_name)
    with _quiet():
        body, info = AutoModel.from_pretrained(
            source.checkpoint,
            config=config,
            dtype=dtype,
            device_map={"": device} if device.type != "cpu" else None,
            key_mapping={"^" + re.escape(prefix): ""} if prefix else None,
            use_safetensors=True,
            trust_remote_code=source.trust_remote_code,
            output_loading_info=True,
        )
    absent = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if absent:
        raise UnsupportedTarget(
            f"{source.name}: {len(absent)} tensors of {type(body).__name__} are missing or of another shape in the checkpoint, "
            f"first {absent[0]}. Its config.json and its weights do not belong together."
        )
    return body


def _head_weight(
    source: Source,
    checkpoint: Checkpoint | None,
    whole: PretrainedConfig,
    embedding: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> torch.Tensor:
    """Return the head matrix [V, H]: its own tensor, or the embedding's when the two are tied."""
    text = whole.get_text_config()
    tied = bool(getattr(whole, "tie_word_embeddings", False) or getattr(text, "tie_word_embeddings", False))
    head, bias = structure.head_of(text, source.trust_remote_code)
    if bias:
        raise UnsupportedTarget(
            f"{source.name}: its head has a bias; the losses compute hidden @ weight.T and no more."
        )
    if checkpoint is None:
        if tied:
            return embedding
        if device.type == "meta":
            return torch.empty_like(embedding)
        module = nn.Linear(embedding.shape[1], embedding.shape[0], bias=False, device="meta", dtype=dtype)
        small = structure.skeleton(structure.cut_config(text, 0), name=source.name, dtype=dtype)
        shapes.fill_module(module, small, seed=seed, name=head, device=device, dtype=dtype)
        return module.weight.detach()
    name = checkpoint.head_tensor(head)
    if name is None and not tied:
        raise UnsupportedTarget(
            f"{source.name}: no {head}.weight in the checkpoint, and its config does not tie it to the embedding."
        )
    if name is None:
        return embedding
    return (
        torch.empty_like(embedding)
        if device.type == "meta"
        else checkpoint.read(name, device=device, dtype=dtype)
    )


def _require_fast_kernels(name: str) -> None:
    if importlib.util.find_spec("fla") is None:
        raise InputError(
            f"{name} has gated-delta-net layers and flash-linear-attention is not installed: on CUDA the fallback is many times "
            "slower and takes more memory. pip install 'dflash-lab[gpu]', or set allow_slow_kernels=True."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from listing the tensors that were left out on purpose, and its progress bar out of logs."""
    logging_tools: Any = transformers.utils.logging
    level, bars = logging_tools.get_verbosity(), logging_tools.is_progress_bar_enabled()
    logging_tools.set_verbosity_error()
    logging_tools.disable_progress_bar()
    try:
        yield
    finally:
        logging_tools.set_verbosity(level)
        if bars:
            logging_tools.enable_progress_bar()
