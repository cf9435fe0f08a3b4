"""A target, loaded: its parts found and checked, only the weights asked for read, its head kept apart."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
import transformers
import xxhash
from torch import nn
from transformers import (
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dflash_lab.errors import InputError, UnsupportedTarget, near
from dflash_lab.models.source import (
    Checkpoint,
    Source,
    identify,
    resolve,
    source_stop_ids,
    source_tokenizer,
    whole_config,
)
from dflash_lab.models.spans import LINEAR, Span, layer_spans

log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class TargetHead:
    """Frozen ends of a target, all that training a drafter needs of it; on one device in one dtype. V
    vocabulary, H hidden size.
    """

    embedding_weight: torch.Tensor  # [V, H], raw: a model that scales its embeddings does so after this
    # The final norm, [.., H] -> [.., H]: the model class's own module, for Qwen3.5 and Gemma multiply by
    # (1 + w), Llama by w, and a norm written again here would be wrong for one of them.
    norm: nn.Module
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


class Target:
    """A frozen model that text is drafted for, body and head apart. B batch, L length, H hidden size.

    The causal-LM class is not used: one path serves dense, mixture-of-experts, hybrid and multimodal-wrapped
    checkpoints, and layers or a head that nobody asked for are never read.

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
        self._parts = find_parts(body, config, source.name)

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
        """Whether layers route tokens to experts, so that shapes inside them follow the data."""
        counts = ("num_experts", "num_local_experts", "n_routed_experts")
        return any(getattr(self.config, name, 0) for name in counts)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer; `InputError` for a random target."""
        return source_tokenizer(self._source)

    @cached_property
    def stop_ids(self) -> list[int]:
        """Token ids that end an answer: from the generation config, the config and the tokenizer."""
        return source_stop_ids(self._source, self.config)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the states of this target depend on, as plain JSON values (see `source.identify`)."""
        return identify(self._source, seed=self.seed)

    @property
    def head(self) -> TargetHead:
        """Embedding, final norm and head matrix; shares this target's tensors."""
        if self.head_weight is None:
            raise InputError(f"{self.name} was loaded with with_head=False and has no logits.")
        return TargetHead(self.embedding.weight, self.final_norm, self.head_weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last decoder layer's output before the final norm: [.., H] -> [.., V]."""
        return self.head.logits(self.final_norm(hidden))


# ---- Loading ----


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

    def skeleton(self, config: PretrainedConfig) -> tuple[PreTrainedModel, Parts]:
        """Build the body of `config` on the meta device and find its parts, before gigabytes are read."""
        body = skeleton(
            config,
            name=self.source.name,
            dtype=self.dtype,
            trust_remote_code=self.source.trust_remote_code,
        )
        return body, find_parts(body, config, self.source.name)


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
    config = cut_config(order.text, last_layer)
    config.use_cache = False  # forgotten, it would keep 144 MiB of recurrent state a row on a 27B hybrid
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
    parts = find_parts(body, config, target)
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
    body, parts = order.skeleton(cut_config(order.text, 0))
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
    order: _Order, checkpoint: Checkpoint, config: PretrainedConfig, parts: Parts
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
    head = head_of(text, name=order.source.name, trust_remote_code=order.source.trust_remote_code)
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
    body, _ = order.skeleton(cut_config(text, 0))
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


# ---- Where things are in a causal language model ----
# Only public accessors and the module tree are used, never a list of model names, so that a new architecture
# works on the day transformers has it. What cannot be found for sure is refused by name: a wrong norm or
# layer would cost acceptance silently.


@dataclass(frozen=True)
class Parts:
    """The pieces of a body, found once: modules, and the names of their weights inside the body."""

    layers: nn.ModuleList
    embedding: nn.Embedding
    norm: nn.Module
    embedding_name: str
    norm_name: str


def find_parts(body: PreTrainedModel, config: PretrainedConfig, name: str) -> Parts:
    """Find layers, embedding and final norm of a model; `UnsupportedTarget` says what is missing."""

    def missing(what: str) -> UnsupportedTarget:
        return UnsupportedTarget(f"{name}: {type(body).__name__} is not understood: {what}.")

    decoder = body.get_decoder()
    names = {id(module): child for child, module in body.named_modules()}
    lists = [
        m for m in decoder.children() if isinstance(m, nn.ModuleList) and len(m) == config.num_hidden_layers
    ]
    if len(lists) != 1:
        raise missing(
            f"expected one list of {config.num_hidden_layers} decoder layers in it, found {len(lists)}"
        )
    embedding = body.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or embedding.weight.shape[1] != config.hidden_size:
        raise missing(
            f"expected an input embedding of width {config.hidden_size} (the drafter works on that width), "
            f"found {type(embedding).__name__}"
        )
    norms = [
        module
        for module in decoder.children()
        if "norm" in type(module).__name__.lower()
        and getattr(module, "weight", None) is not None
        and module.weight.shape == (config.hidden_size,)
    ]
    if len(norms) > 1:  # a norm of the embeddings beside the final one
        norms = [module for module in norms if "embed" not in names[id(module)]]
    if len(norms) != 1:
        raise missing(
            f"expected one final norm of width {config.hidden_size} beside the layers, found {len(norms)}"
        )
    return Parts(lists[0], embedding, norms[0], names[id(embedding)], names[id(norms[0])])


def skeleton(
    config: PretrainedConfig, *, name: str, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build the body of a text config on the meta device: names and shapes without memory."""
    try:
        with torch.device("meta"):
            return AutoModel.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if type(config) in MODEL_MAPPING:  # there is such a model, but it does not take these settings
            raise InputError(
                f"{name}: {error} Another attention can be asked for, such as attn='eager'."
            ) from error
        raise UnsupportedTarget(
            f"{name}: transformers has no text model for model_type {config.model_type!r} ({error}). "
            "It would need one, or trust_remote_code=True if it brings code of its own that you trust."
        ) from error


def cut_config(config: PretrainedConfig, last_layer: int | None) -> PretrainedConfig:
    """Return a copy of a text config that stops after `last_layer` (0-based; None keeps all)."""
    config = copy.deepcopy(config)
    if last_layer is None:
        return config
    if not 0 <= last_layer < config.num_hidden_layers:
        raise InputError(f"last_layer={last_layer}: the target has layers 0..{config.num_hidden_layers - 1}.")
    whole, config.num_hidden_layers = config.num_hidden_layers, last_layer + 1
    if len(getattr(config, "layer_types", None) or ()) > last_layer + 1:
        config.layer_types = config.layer_types[: last_layer + 1]
    if shared := getattr(config, "num_kv_shared_layers", 0):  # the last ones; they are counted from the end
        config.num_kv_shared_layers = max(0, shared - (whole - config.num_hidden_layers))
    return config


def head_of(config: PretrainedConfig, *, name: str, trust_remote_code: bool = False) -> str:
    """Return the name of the head module in the causal model of a text config, usually ``lm_head``."""
    try:
        with torch.device("meta"):
            causal: Any = AutoModelForCausalLM.from_config(
                cut_config(config, 0), trust_remote_code=trust_remote_code
            )
    except ValueError:
        return "lm_head"  # a text model that exists only inside a multimodal wrapper (qwen3_vl_text)
    head = causal.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise UnsupportedTarget(
            f"{name}: the head of {type(causal).__name__} is {head!r}. It would need to be one matrix "
            "without bias: the losses compute hidden @ weight.T and no more."
        )
    return next(child for child, module in causal.named_modules() if module is head)


# ---- Random weights, for memory and speed work before a 54 GB download ----
# They are made on the device, in the dtype, one module after another, so a 27B target needs its own 54 GB and
# no fp32 copy. Each module is seeded by (seed, its name): the same rows come out whatever else is built, so a
# head made alone equals the head of the whole target.


def randomise(model: PreTrainedModel, *, seed: int, device: torch.device, dtype: torch.dtype) -> None:
    """Give a model on the meta device its random weights, in place, as its class initialises them."""
    strict = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, module in model.named_modules():
        buffers = [key for key, _ in module.named_buffers(recurse=False)]
        if buffers and "RotaryEmbedding" not in type(module).__name__:
            raise UnsupportedTarget(
                f"random: {type(module).__name__} ({name}) computes the buffers {buffers} when it is built, "
                "which a model made on the meta device lacks. Save a checkpoint of it and give its folder."
            )
        _allocate(module, name, device, dtype, strict)
    for name, module in reversed(list(model.named_modules())):  # a block may set its children's weights again
        _initialise(module, model, seed, name, device)
    empty = [name for name, parameter in model.named_parameters() if bool(parameter.isnan().any())]
    if empty:
        raise UnsupportedTarget(
            f"random: {type(model).__name__} does not initialise {len(empty)} of its parameters, "
            f"first {empty[0]}. Save a checkpoint of it and give the folder as target."
        )


def randomise_alone(
    module: nn.Module,
    name: str,
    model: PreTrainedModel,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Give one module the weights that it would have as `name` in a whole random model of `model`'s class."""
    _allocate(module, name, device, dtype, ())
    _initialise(module, model, seed, name, device)


def _allocate(
    module: nn.Module, name: str, device: torch.device, dtype: torch.dtype, fp32_names: Collection[str]
) -> None:
    """Put the tensors that `module` itself holds on the device; parameters are NaN until initialised."""
    for key, tensor in list(module.named_parameters(recurse=False)):
        kind = torch.float32 if any(part in f"{name}.{key}" for part in fp32_names) else dtype
        fresh = torch.full(tensor.shape, float("nan"), dtype=kind, device=device)
        setattr(module, key, nn.Parameter(fresh, requires_grad=False))
    for key, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, key, torch.empty_like(buffer, device=device))


def _initialise(
    module: nn.Module, model: PreTrainedModel, seed: int, name: str, device: torch.device
) -> None:
    """Call the class's own initialiser on one module, seeded by (seed, name).

    It draws from the global generators, so their state is put back afterwards.
    """
    devices = list(range(torch.cuda.device_count())) if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1)
        model._init_weights(module)
