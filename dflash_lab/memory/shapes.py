"""What is predicted: the numbers of a target that memory depends on, and a batch or a step of it. Any model
type that is not understood is refused by name: an estimate of a guessed structure looks like a good one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dflash_lab.errors import InputError, UnsupportedTarget
from dflash_lab.models.spans import FULL, LINEAR, SLIDING, layer_spans

GIB = 2**30
MIB = 2**20
CHUNK = 64  # tokens: the gated delta rule pads every row to a multiple of this

_DENSE = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
_MOE = ("qwen3_moe", "mixtral")
HYBRID_MODULES = {
    "qwen3_5_text": "transformers.models.qwen3_5.modeling_qwen3_5",
    "qwen3_5_moe_text": "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
    "qwen3_next": "transformers.models.qwen3_next.modeling_qwen3_next",
}
_HYBRID = tuple(HYBRID_MODULES)
KNOWN_TYPES = (*_DENSE, *_MOE, *_HYBRID)
_QK_NORM = ("qwen3", "qwen3_moe", *_HYBRID)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class DeltaNet:
    """Dimensions of a gated delta net; the conv kernel in tokens."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    split_projections: bool  # Qwen3.5: qkv, z, b, a apart; Qwen3-Next: qkvz and ba

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.keys + self.values


@dataclass(frozen=True)
class Experts:
    """Routed experts: `count` of width `intermediate`, `active` a token; `shared`: the shared expert's
    width, 0 for none."""

    count: int
    active: int
    intermediate: int
    shared: int


@dataclass(frozen=True)
class TargetShape:
    """A decoder-only target. Widths are in elements; `layer_types`, `windows` (tokens) and `sparse` have an
    entry a layer."""

    model_type: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layer_types: tuple[str, ...]
    windows: tuple[int | None, ...]
    sparse: tuple[bool, ...]
    tied: bool
    bias: bool  # q, k and v projections
    output_bias: bool
    qk_norm: bool
    gated_attention: bool  # the query projection also makes an output gate
    rotary_dim: int
    delta: DeltaNet | None  # of linear layers, if there are any
    experts: Experts | None  # of sparse layers, if there are any

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    def mixer_parameters(self, kind: str) -> int:
        """Count the parameters of one layer's attention or gated delta net."""
        if kind == LINEAR:
            delta = self.delta
            assert delta is not None
            projections = self.hidden * (delta.conv_channels + delta.values + 2 * delta.value_heads)
            conv = delta.conv_channels * delta.conv_kernel
            return projections + conv + 2 * delta.value_heads + delta.value_dim + delta.values * self.hidden
        q = self.heads * self.head_dim * (2 if self.gated_attention else 1)
        kv = self.kv_heads * self.head_dim
        total = self.hidden * (q + 2 * kv) + self.heads * self.head_dim * self.hidden
        total += (q + 2 * kv) * self.bias + self.hidden * self.output_bias
        return total + 2 * self.head_dim * self.qk_norm

    def feed_forward_parameters(self, sparse: bool) -> int:
        """Count the parameters of one layer's MLP, or of its router, experts and shared expert."""
        if not sparse:
            return 3 * self.hidden * self.intermediate
        experts = self.experts
        assert experts is not None
        total = experts.count * (3 * self.hidden * experts.intermediate + self.hidden)
        return total + (3 * self.hidden * experts.shared + self.hidden if experts.shared else 0)

    def layer_parameters(self, index: int) -> int:
        """Count the parameters of decoder layer `index` (0-based), its two norms included."""
        mixer = self.mixer_parameters(self.layer_types[index])
        return mixer + self.feed_forward_parameters(self.sparse[index]) + 2 * self.hidden

    def body_parameters(self, layers: int | None = None) -> int:
        """Count embedding, the first `layers` decoder layers (all by default) and the final norm."""
        count = self.layers if layers is None else layers
        return self.vocab * self.hidden + sum(map(self.layer_parameters, range(count))) + self.hidden

    def head_parameters(self) -> int:
        """Count the output head: nothing when it is the embedding's own matrix."""
        return 0 if self.tied else self.vocab * self.hidden

    def flops_per_token(self, layers: int | None = None) -> float:
        """Return matmul FLOP a token of the first `layers` layers: 2 x the weights that a token meets."""
        count = self.layers if layers is None else layers
        met = 0
        for index in range(count):
            met += self.mixer_parameters(self.layer_types[index])
            if self.sparse[index]:
                experts = self.experts
                assert experts is not None
                met += 3 * self.hidden * (experts.active * experts.intermediate + experts.shared)
            else:
                met += 3 * self.hidden * self.intermediate
        return 2.0 * met


def target_shape(config: Any) -> TargetShape:
    """Return the `TargetShape` of a transformers config (of its text config, if it has one); one that is a
    `TargetShape` already is returned as it is.

    Raises `UnsupportedTarget` for a model type, layer type, activation, bias or quantisation whose memory is
    not understood.
    """
    if isinstance(config, TargetShape):
        return config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in KNOWN_TYPES:
        raise UnsupportedTarget(
            f"Memory of model type {kind!r} is not understood, and it is not guessed. Known: "
            f"{', '.join(KNOWN_TYPES)}. Measure it instead (dflash_lab.memory.measure), or add its layers to "
            "dflash_lab/memory/shapes.py."
        )
    odd = {
        f"hidden_act={config.hidden_act!r}": config.hidden_act not in ("silu", "swish"),
        "mlp_bias=True": getattr(config, "mlp_bias", False),
        "quantization_config": getattr(config, "quantization_config", None),
    }
    if named := [name for name, given in odd.items() if given]:
        raise UnsupportedTarget(
            f"Memory of {kind!r} with {', '.join(named)} is not understood, and it is not guessed. Measure "
            "it instead (dflash_lab.memory.measure)."
        )
    count = int(config.num_hidden_layers)
    spans = layer_spans(config)
    types = tuple(span.kind for span in spans)
    for index, layer_type in enumerate(types):
        if layer_type not in (FULL, SLIDING, LINEAR) or (layer_type == LINEAR and kind not in _HYBRID):
            raise UnsupportedTarget(
                f"Layer {index} of this {kind!r} config is {layer_type!r}, which is not understood."
            )
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    sparse = _sparse_layers(config, kind, count)
    return TargetShape(
        model_type=kind,
        hidden=int(config.hidden_size),
        intermediate=int(config.intermediate_size or 0),
        heads=int(config.num_attention_heads),
        kv_heads=int(config.num_key_value_heads),
        head_dim=head_dim,
        vocab=int(config.vocab_size),
        layer_types=types,
        windows=tuple(span.tokens for span in spans),
        sparse=sparse,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        bias=kind == "qwen2" or bool(getattr(config, "attention_bias", False)),
        output_bias=kind != "qwen2" and bool(getattr(config, "attention_bias", False)),
        qk_norm=kind in _QK_NORM,
        gated_attention=kind in _HYBRID,
        rotary_dim=int(head_dim * _partial_rotary(config)),
        delta=_delta(config, kind) if LINEAR in types else None,
        experts=_experts(config, kind) if any(sparse) else None,
    )


@functools.cache
def repeats_keys(model_type: str) -> bool:
    """Tell whether the installed transformers repeats queries and keys for the delta rule's value heads."""
    module = importlib.import_module(HYBRID_MODULES[model_type])
    layers = [value for name, value in vars(module).items() if name.endswith("GatedDeltaNet")]
    return any("repeat_interleave" in inspect.getsource(layer.forward) for layer in layers)


def dtype_bytes(dtype: Any) -> int:
    """Return bytes an element of a dtype, given by its name or as torch's own."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise InputError(f"dtype {dtype!r}: memory is known for {', '.join(DTYPE_BYTES)}.")
    return DTYPE_BYTES[name]


def _partial_rotary(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    found = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return 1.0 if found is None else float(found)


def _sparse_layers(config: Any, kind: str, count: int) -> tuple[bool, ...]:
    if kind == "mixtral" or kind == "qwen3_5_moe_text":
        return (True,) * count
    if kind not in ("qwen3_moe", "qwen3_next") or not getattr(config, "num_experts", 0):
        return (False,) * count
    step = int(getattr(config, "decoder_sparse_step", 1) or 1)
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(count))


def _experts(config: Any, kind: str) -> Experts:
    if kind == "mixtral":
        return Experts(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size, 0)
    shared = int(getattr(config, "shared_expert_intermediate_size", 0) or 0)
    return Experts(config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, shared)


def _delta(config: Any, kind: str) -> DeltaNet:
    return DeltaNet(
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv_kernel=config.linear_conv_kernel_dim,
        split_projections=kind != "qwen3_next",
    )


# A batch, and a step

Kernels = Literal["fla", "torch"]  # of the gated delta rule
Capture = Literal["hooks", "output_hidden_states"]
LossPath = Literal["naive", "loop", "concat", "checkpoint", "fused"]
Placement = Literal["cached", "same device", "other device"]
Checkpointing = Literal["none", "layers", "mlp"]
Optimizer = Literal["adamw", "muon", "adamw8bit", "cpu-offload"]


@dataclass(frozen=True, kw_only=True)
class ExtractionSetup:
    """One batch through the target. `batch` x `length` tokens, padding included."""

    batch: int
    length: int
    tap_ids: tuple[int, ...]
    dtype: str = "bfloat16"
    capture: Capture = "hooks"
    store_final: bool = False  # also the last layer's output before the final norm
    logits: bool = False  # all positions' logits
    use_cache: bool = False
    mask: bool = False  # an attention mask with a pad in it
    stop_early: bool = True  # layers after the last one needed are not even loaded
    packed: bool = True  # taps are concatenated on the device into [T, K*H] before the one copy to the host
    kernels: Kernels = "fla"
    fused: bool = False  # the lab's fused layers (extraction/fused_layers.py), not transformers' own
    plain_layers: tuple[int, ...] = ()  # of a fused target: layers that kept transformers' own forward
    in_flight: int = 0  # batches before this one whose packed states are still being copied to the host
    expandable: bool = False  # the allocator's expandable_segments:True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tap_ids", tuple(sorted(int(tap) for tap in self.tap_ids)))
        for name in ("batch", "length"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: at least 1.")
        if not self.tap_ids and not self.store_final:
            raise InputError("Nothing to extract: tap_ids is empty and store_final is false.")
        dtype_bytes(self.dtype)

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def last_layer(self, num_layers: int) -> int:
        """Return the 0-based index of the last layer that runs."""
        if any(tap < 0 or tap >= num_layers for tap in self.tap_ids):
            raise InputError(f"tap ids {list(self.tap_ids)}: this target has layers 0 to {num_layers - 1}.")
        whole = not self.stop_early or self.store_final or self.logits or self.capture != "hooks"
        return num_layers - 1 if whole else self.tap_ids[-1]


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """One optimizer step of the drafter on one device: `anchors` blocks, `context` target positions."""

    anchors: int
    context: int
    block_size: int
    dtype: str = "bfloat16"
    masters: bool = True  # fp32 copies of the weights that the optimizer steps
    soft_targets: bool = True  # KL to the target's logits: the target side of the loss
    loss: LossPath = "fused"
    chunk: int = 0  # rows of logits at a time; 0: as the loss plans it by itself
    checkpointing: Checkpointing = "none"
    optimizer: Optimizer = "adamw"
    placement: Placement = "cached"  # the target: not there (feature store), here, or on another device
    target_logits_elsewhere: bool = False  # made on a second device (`target_head_gpu`)
    vocabulary_shards: int = 1  # the head's rows are split over this many devices (`head_parallel`)
    data_parallel: int = 1
    expandable: bool = False  # the allocator's expandable_segments:True
    compiled: bool = False  # every draft layer with its attention is one compiled graph
    shards: int = 1  # processes that hold a share of drafter, gradients and optimizer each (FSDP)
    gradients_kept: bool = False  # from row to row of a step, or in DDP's buckets: they are always there
    rows_ahead: int = 0  # rows of the loop on the device beside the one in use
    final_states: bool = False  # rows carry the target's final states though no term of the loss needs them
    noise: bool = False  # the loop adds noise to a copy of the row's states
    head_elsewhere: bool = False  # embedding, head and loss are on another device than the drafter
    target_dtype: str = ""  # of a target on the same device; empty: the drafter's
    recorded: bool = False  # that target's forward of a row is a CUDA graph

    def __post_init__(self) -> None:
        for name in ("anchors", "context", "block_size", "vocabulary_shards", "data_parallel", "shards"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: at least 1.")
        if self.chunk < 0:
            raise InputError(f"chunk={self.chunk}: rows of logits, or 0 to let the loss plan them.")
        for name, kind in (("loss", LossPath), ("placement", Placement), ("optimizer", Optimizer)):
            if getattr(self, name) not in get_args(kind):
                raise InputError(f"{name}={getattr(self, name)!r} is none of {', '.join(get_args(kind))}.")
        for dtype in (self.dtype, self.target_dtype or self.dtype):
            dtype_bytes(dtype)

    @property
    def live(self) -> bool:
        """Whether the target makes the rows' states on the device that trains."""
        return self.placement == "same device"

    @property
    def rows(self) -> int:
        """Drafted positions: every slot of every block."""
        return self.anchors * self.block_size
