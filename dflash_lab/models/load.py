"""A target, loaded: its parts found and checked, its weights read, its head kept apart."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from dflash_lab.errors import InputError, UnsupportedTarget, near
from dflash_lab.models import source as structure
from dflash_lab.models.source import (
    Checkpoint,
    Source,
    identify,
    randomise,
    randomise_alone,
    resolve,
    source_stop_ids,
    source_tokenizer,
    whole_config,
)
from dflash_lab.models.spans import LINEAR, Span, layer_spans

# ----------------------------------------------------------------------------------------------------
# The head of a target alone: embedding, final norm and head matrix, which is all that training a drafter
# needs of it.
#
# The final norm is the model class's own module: Qwen3.5 and Gemma multiply by (1 + w), Llama by w, and a
# norm written again here would be wrong for one of them.


@dataclass(frozen=True)
class TargetHead:
    """Frozen ends of a target. V vocabulary, H hidden size; all on one device in one dtype."""

    embedding_weight: torch.Tensor  # [V, H], raw: a model that scales its embeddings does so after this
    norm: nn.Module  # the final norm, [.., H] -> [.., H]
    weight: torch.Tensor  # [V, H]; the same tensor as embedding_weight when they are tied

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the raw embedding rows of `ids`: [..] -> [.., H]."""
        return F.embedding(ids, self.embedding_weight)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to the output of the last decoder layer: [.., H] -> [.., H]."""
        return self.norm(hidden)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the logits of normed states: [.., H] -> [.., V]."""
        return F.linear(normed, self.weight)


# ----------------------------------------------------------------------------------------------------
# A target as the rest of the lab sees it: a frozen body that turns token ids into states, and a head
# matrix.
#
# The causal-LM class is not used. With body and head apart, one path serves dense, mixture-of-experts,
# hybrid and multimodal-wrapped checkpoints, and layers or a head that nobody asked for are never read.


class Target:
    """A frozen model that text is drafted for. B batch, L length, H hidden size, V vocabulary.

    body(input_ids=[B, L], use_cache=False).last_hidden_state is [B, L, H], after the final norm.
    """

    def __init__(
        self,
        source: Source,
        config: PretrainedConfig,
        body: PreTrainedModel,
        head_weight: torch.Tensor | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        self.name = source.name
        self.config = config  # text config; num_hidden_layers counts the layers that were loaded
        self.body = body
        self.head_weight = head_weight  # [V, H], or None with with_head=False
        self.device = device
        self.dtype = dtype
        self.seed = seed  # of the random weights; means nothing for a checkpoint
        self._source = source
        self._parts = structure.find_parts(body, config, source.name)

    def __repr__(self) -> str:
        size = f"{self.num_layers} layers, hidden size {self.hidden_size}"
        return f"<Target {self.name}: {size}, {str(self.dtype).removeprefix('torch.')} on {self.device}>"

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers; a forward hook on layer k sees tap id k."""
        return self._parts.layers

    @property
    def embedding(self) -> nn.Embedding:
        return self._parts.embedding

    @property
    def final_norm(self) -> nn.Module:
        return self._parts.norm

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.embedding.weight.shape[0]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """What each layer attends to."""
        return layer_spans(self.config, self.body)

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers keep a recurrent state instead of keys and values."""
        return any(span.recurrent for span in self.spans)

    @property
    def has_experts(self) -> bool:
        """Whether layers route tokens to experts."""
        return structure.has_experts(self.config)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer; `InputError` for a random target."""
        return source_tokenizer(self._source)

    @cached_property
    def stop_ids(self) -> list[int]:
        """Token ids that end an answer: from the generation config, the config and the tokenizer."""
        return source_stop_ids(self._source, self.config)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the states of this target depend on, as plain JSON values (see `identity.identify`)."""
        return identify(self._source, seed=self.seed)

    @property
    def head(self) -> TargetHead:
        """Embedding, final norm and head matrix; shares this target's tensors."""
        return TargetHead(self.embedding.weight, self.final_norm, self._weight())

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of what the last decoder layer put out, before the final norm: [.., H] -> [..,
        V].
        """
        return F.linear(self.final_norm(hidden), self._weight())

    def _weight(self) -> torch.Tensor:
        if self.head_weight is None:
            raise InputError(f"{self.name} was loaded with with_head=False and has no logits.")
        return self.head_weight


# ----------------------------------------------------------------------------------------------------
# Load a target, or its head alone, reading only the tensors that were asked for.


log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(device: str | torch.device) -> torch.device:
    """Return the device meant: ``auto`` is CUDA where there is one, else the CPU."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device {device!r}: expected auto, cpu, cuda or cuda:<number>.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {device!r}: torch sees no CUDA device here. Use device=cpu or device=auto.")
    if chosen.type != "cuda":
        return chosen
    if chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())  # equal to the device of tensors on it
    if chosen.index >= (count := torch.cuda.device_count()):
        raise InputError(f"device {device!r}: torch sees {count} CUDA device(s) here, numbered from 0.")
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


@dataclass(frozen=True)
class _Order:
    """What to load, settled: config (wrapper included), origin of the weights, device and dtype."""

    source: Source
    whole: PretrainedConfig
    checkpoint: Checkpoint | None  # None: random weights from `seed`
    device: torch.device
    dtype: torch.dtype
    seed: int

    @property
    def text(self) -> PretrainedConfig:
        return self.whole.get_text_config()

    def skeleton(self, config: PretrainedConfig) -> tuple[PreTrainedModel, structure.Parts]:
        """Build the body of `config` on the meta device and find its parts, before gigabytes are read."""
        body = structure.skeleton(
            config,
            name=self.source.name,
            dtype=self.dtype,
            trust_remote_code=self.source.trust_remote_code,
        )
        return body, structure.find_parts(body, config, self.source.name)


def _order(
    target: str, device: str | torch.device, dtype: str | torch.dtype, trust_remote_code: bool, seed: int
) -> _Order:
    source = resolve(target, trust_remote_code=trust_remote_code)
    chosen = choose_device(device)
    whole = whole_config(source)
    kind = choose_dtype(dtype, whole.get_text_config())
    checkpoint = None if source.checkpoint is None else Checkpoint(source.checkpoint)
    return _Order(source, whole, checkpoint, chosen, kind, seed)


def load_target(
    target: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    seed: int = 0,
    last_layer: int | None = None,
    with_head: bool = True,
    attn: str = "auto",
    allow_slow_kernels: bool = False,
) -> Target:
    """Load a target for inference: evaluation mode, no gradients.

    target: ``smollm2``, a folder, a hub id, or ``random:<named shape | config.json>`` (weights from `seed`).
    last_layer: the last decoder layer to load (0-based, z-lab id); later ones are not read. with_head: False
    leaves the head matrix unread. attn: sdpa where the model has it with ``auto``. device ``meta`` gives
    shapes without weights. Raises `InputError` for a name or value that means nothing and `UnsupportedTarget`
    for a model that is not understood.
    """
    started = time.monotonic()
    order = _order(target, device, dtype, trust_remote_code, seed)
    config = structure.cut_config(order.text, last_layer)
    config.use_cache = (
        False  # a forgotten use_cache would keep 144 MiB of recurrent state a row on a 27B hybrid
    )
    config._attn_implementation = None if attn == "auto" else attn
    if order.device.type == "cuda" and not allow_slow_kernels:
        _require_fast_kernels(target, config)
    body, parts = order.skeleton(config)
    if order.device.type != "meta":
        if order.checkpoint is None:
            randomise(body, seed=seed, device=order.device, dtype=order.dtype)
        else:
            body = _read_body(order, order.checkpoint, config, parts)
    body.requires_grad_(False).eval()
    parts = structure.find_parts(body, config, target)
    weight = _head_weight(order, parts.embedding.weight) if with_head else None
    seconds = time.monotonic() - started
    layers = f"{len(parts.layers)} of {order.text.num_hidden_layers} layers"
    log.info("%s: loaded %s, %s on %s, %.1f s", target, layers, order.dtype, order.device, seconds)
    return Target(order.source, config, body, weight, device=order.device, dtype=order.dtype, seed=seed)


def load_head(
    target: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    seed: int = 0,
) -> TargetHead:
    """Load only a target's embedding, final norm and head matrix; equal to ``load_target(...).head``."""
    order = _order(target, device, dtype, trust_remote_code, seed)
    # A body of one layer: its ends have the names and shapes of the whole one's.
    body, parts = order.skeleton(structure.cut_config(order.text, 0))
    for name, module in ((parts.embedding_name, parts.embedding), (parts.norm_name, parts.norm)):
        if order.device.type == "meta":
            continue
        if order.checkpoint is None:
            randomise_alone(module, name, body, seed=seed, device=order.device, dtype=order.dtype)
            continue
        prefix = order.checkpoint.text_prefix(parts.embedding_name, parts.norm_name)
        for key, _ in list(module.named_parameters(recurse=False)):
            weight = order.checkpoint.read(f"{prefix}{name}.{key}", device=order.device, dtype=order.dtype)
            setattr(module, key, nn.Parameter(weight, requires_grad=False))
    norm = parts.norm.requires_grad_(False).eval()
    embedding = parts.embedding.weight.detach()
    return TargetHead(embedding, norm, _head_weight(order, embedding))


def _read_body(
    order: _Order, checkpoint: Checkpoint, config: PretrainedConfig, parts: structure.Parts
) -> PreTrainedModel:
    """Read the body's own tensors, and no others, straight onto the device."""
    prefix = checkpoint.text_prefix(parts.embedding_name, parts.norm_name)
    with _quiet():
        body, info = AutoModel.from_pretrained(
            checkpoint.source,
            config=config,
            dtype=order.dtype,
            device_map={"": order.device} if order.device.type != "cpu" else None,
            key_mapping={"^" + re.escape(prefix): ""} if prefix else None,
            use_safetensors=True,
            trust_remote_code=order.source.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # to refuse them below, by name
        )
    absent = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if absent:
        raise UnsupportedTarget(
            f"{order.source.name}: {len(absent)} tensors of {type(body).__name__} are missing or of another "
            f"shape in the checkpoint, first {absent[0]}. The config and the weights do not match."
        )
    return body


def _head_weight(order: _Order, embedding: torch.Tensor) -> torch.Tensor:
    """Return the head matrix [V, H]: its own tensor, or the embedding's when the two are tied."""
    whole, text, device = order.whole, order.text, order.device
    tied = bool(getattr(whole, "tie_word_embeddings", False) or getattr(text, "tie_word_embeddings", False))
    head = structure.head_of(text, name=order.source.name, trust_remote_code=order.source.trust_remote_code)
    if order.checkpoint is not None:
        tensor = order.checkpoint.head_tensor(head)
        if tensor is not None and device.type != "meta":
            return order.checkpoint.read(tensor, device=device, dtype=order.dtype)
        if tensor is None and not tied:
            raise UnsupportedTarget(
                f"{order.source.name}: no {head}.weight in the checkpoint, and its config does not tie "
                "the head to the embedding."
            )
    if tied or device.type == "meta":
        return embedding if tied else torch.empty_like(embedding)
    module = nn.Linear(embedding.shape[1], embedding.shape[0], bias=False, device="meta", dtype=order.dtype)
    body, _ = order.skeleton(structure.cut_config(text, 0))
    randomise_alone(module, head, body, seed=order.seed, device=device, dtype=order.dtype)
    return module.weight.detach()


def _require_fast_kernels(name: str, config: PretrainedConfig) -> None:
    linear = any(span.kind == LINEAR for span in layer_spans(config))
    if linear and importlib.util.find_spec("fla") is None:
        raise InputError(
            f"{name} has gated-delta-net layers and flash-linear-attention is not installed: on CUDA the "
            "fallback is many times slower and takes more memory. pip install 'dflash-lab[gpu]', or set "
            "allow_slow_kernels=True."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from listing the tensors that were left out on purpose, and its bar out of logs."""
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
