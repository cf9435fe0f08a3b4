"""Decoder layers computed with fewer, larger kernels, proven equal to the originals before they are used."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_lab.errors import InputError
from dflash_lab.extraction import fused_reference
from dflash_lab.extraction.fused_reference import Gates
from dflash_lab.models.hooks import TOLERANCE, layer_errors
from dflash_lab.models.kv_cache import CACHE_KEYWORDS
from dflash_lab.models.load import Target
from dflash_lab.models.spans import FULL, LINEAR, Span

log = logging.getLogger(__name__)
_PROBE = (2, 70)  # sequences x tokens: two chunks of 64, the second one short
_ROWS = 128  # rows are filled up to whole tiles: a product with 16,480 columns runs like one with 16,512


def speed_up(target: Target, mode: str = "auto", ops: Ops | None = None) -> FastPath:
    """Fuse the layers of `target` in place. mode: auto (whatever can be), on (`InputError` if a layer
    cannot), off. ops: the operations to use, by default those of the target's device.

    A layer that is not understood, or whose fused forward is not proven equal to the plain one, keeps its
    plain forward, and the report names it and says why.
    """
    path = FastPath(_layers=target.layers)
    ops = ops or ops_for(target.device)
    if mode == "off" or ops is None:
        if mode == "on":
            raise InputError(
                f"fast=on: no fused kernels for {target.device}: they need CUDA and Triton. Use fast=auto."
            )
        return path
    path.ops = ops.name
    fused: dict[int, FusedLayer] = {}
    for index, (layer, span) in enumerate(zip(target.layers, target.spans, strict=True)):
        try:
            if span not in (Span(FULL), Span(LINEAR)):
                raise NotUnderstood(str(span))
            fused[index] = FusedLayer(layer, ops)
        except (NotUnderstood, AttributeError) as error:
            path.plain[index] = str(error)
        else:
            fused[index].prepare()
    nets = [layer.mixer for layer in fused.values() if isinstance(layer.mixer, FusedDeltaNet)]
    if nets and target.device.type == "cuda":
        nets[0].tune(ops, target.device)
    path.errors = _prove(target, fused)
    limit = TOLERANCE.get(target.dtype, 1e-4)
    for index, found in list(path.errors.items()):
        if found > limit:
            path.plain[index] = f"the fused layer differs by rel-L2 {found:.2g} (at most {limit:g})"
            del path.errors[index], fused[index]
    if path.plain and mode == "on":
        listed = "; ".join(f"layer {index}: {why}" for index, why in list(path.plain.items())[:5])
        raise InputError(
            f"fast=on: {len(path.plain)} of {len(target.layers)} layers stay plain. {listed}. Use fast=auto."
        )
    for index, forward in fused.items():
        target.layers[index].forward = forward
    path._fused = fused
    log.info("fast path: %s", path.summary())
    return path


@torch.inference_mode()
def _prove(target: Target, fused: dict[int, FusedLayer]) -> dict[int, float]:
    """Return for each fused layer the rel-L2 error of what it adds to the stream, rounding of the stream
    discounted: in one plain forward of random tokens it gets the same input as the plain layer.
    """
    rounding = torch.finfo(target.dtype).eps

    def measure(before: Tensor, plain: Tensor, other: Tensor) -> float:
        error = (other.double() - plain.double()).norm() - rounding * plain.double().norm()
        added = (plain.double() - before.double()).norm().clamp_min(1e-30)
        return max(0.0, float(error / added)) if bool(other.isfinite().all()) else float("inf")

    def covered(layer: FusedLayer) -> Callable[..., Tensor | None]:
        # a model that passes a mask or a cache: nothing would be fused
        return lambda *args, **kwargs: layer(*args, **kwargs) if layer.covers(args[1:], kwargs) else None

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, _PROBE, generator=generator).to(target.device)
    return layer_errors(
        target.layers,
        {index: covered(layer) for index, layer in fused.items()},
        lambda: target.body(input_ids=ids, use_cache=False),
        measure,
    )


@dataclass
class FastPath:
    """What `speed_up` did. `errors`: rel-L2 of what each fused layer adds; `plain`: layer -> why it was left
    alone.
    """

    ops: str = "none"
    errors: dict[int, float] = field(default_factory=dict)
    plain: dict[int, str] = field(default_factory=dict)
    _fused: dict[int, FusedLayer] = field(default_factory=dict, repr=False)
    _layers: Any = field(default=None, repr=False)

    def summary(self) -> dict[str, Any]:
        """Return plain JSON values for a manifest."""
        reasons = sorted(set(self.plain.values()))
        worst = max(self.errors.values(), default=0.0)
        return {
            "ops": self.ops,
            "fused_layers": len(self.errors),
            "plain_because": reasons,
            "worst_error": worst,
        }

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Run with the plain forward for a while, to compare."""
        for index in self._fused:
            del self._layers[index].forward
        try:
            yield
        finally:
            for index, fused in self._fused.items():
                self._layers[index].forward = fused


def skip_tuning() -> Callable[[], None]:
    """Let flash-linear-attention's kernels take their first tile shape instead of trying all, a minute a
    process: for tests and measurements of memory, where their rate is no matter. What is returned undoes it.
    """
    tuned: list[tuple[Any, Any]] = []

    def undo() -> None:
        for kernel, configs in reversed(tuned):
            kernel.configs = configs

    if importlib.util.find_spec("fla") is None or not torch.cuda.is_available():
        return undo
    importlib.import_module("fla.ops.gated_delta_rule")
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import KernelInterface

    modules = [module for name, module in sys.modules.items() if name.startswith("fla.")]
    for kernel in [value for module in modules for value in vars(module).values()]:
        while isinstance(kernel, KernelInterface):
            if isinstance(kernel, Autotuner):
                tuned.append((kernel, kernel.configs))
                kernel.configs = kernel.configs[:1]
            kernel = getattr(kernel, "fn", None)
    return undo


# The fused forward of a decoder layer ---------------------------------------------------------------------
#
# A layer is understood by its parts (two norms, a gated MLP, attention or a gated delta net without biases),
# never by its class name. Norms take the residual add with them, projections are merged, gates are one kernel
# each.


class FusedLayer:
    """A decoder layer's forward; call it like the layer. Anything it does not cover goes to the plain
    forward.
    """

    def __init__(self, layer: Any, ops: Ops) -> None:
        self._ops, self._plain = ops, layer.forward
        known = {"input_layernorm", "post_attention_layernorm", "mlp", "self_attn", "linear_attn"}
        if strange := sorted({name for name, _ in layer.named_children()} - known):
            raise NotUnderstood(f"the layer has {', '.join(strange)} besides norms, mixer and mlp")
        self._before = read_norm(layer.input_layernorm, "input_layernorm")
        self._between = read_norm(layer.post_attention_layernorm, "post_attention_layernorm")
        if isinstance(mixer := getattr(layer, "linear_attn", None), nn.Module):
            if ops.delta_rule is None:
                raise NotUnderstood("the gated delta rule needs flash-linear-attention")
            self.mixer: FusedDeltaNet | FusedAttention = FusedDeltaNet(mixer)
        elif isinstance(mixer := getattr(layer, "self_attn", None), nn.Module):
            self.mixer = FusedAttention(mixer)
        else:
            raise NotUnderstood("the layer has neither self_attn nor linear_attn")
        try:
            self.mlp: FusedMlp | PlainMlp = FusedMlp(layer.mlp)
        except NotUnderstood:  # a mixture of experts: its routing stays its own
            self.mlp = PlainMlp(layer.mlp)

    def prepare(self) -> None:
        """Merge weights: only now does anything change in the layer."""
        self.mixer.prepare()
        self.mlp.prepare()

    @staticmethod
    def covers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call (its arguments after the hidden states) has no mask and no cache."""
        absent = ("attention_mask", *CACHE_KEYWORDS)
        return not args and not kwargs.get("use_cache") and all(kwargs.get(name) is None for name in absent)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the layer's output [B, L, H]."""
        if not self.covers(args, kwargs):
            return self._plain(hidden_states, *args, **kwargs)
        batch, length, hidden = hidden_states.shape
        x = hidden_states.reshape(batch * length, hidden)
        before, between = self._before, self._between
        normed = self._ops.rms_norm(x, before.weight, before.eps, before.offset)
        mixed = self.mixer(self._ops, normed, batch, kwargs.get("position_embeddings"))
        total, normed = self._ops.add_rms_norm(x, mixed, between.weight, between.eps, between.offset)
        del mixed
        return self.mlp.add_to(self._ops, total, normed).view(batch, length, hidden)


class NotUnderstood(Exception):
    """A layer has a part that the fused forward does not know; the message says which."""


@dataclass(frozen=True)
class Norm:
    """An RMS norm as numbers: out = x / rms(x) * (offset + weight)."""

    weight: Tensor
    eps: float
    offset: float


def read_norm(module: nn.Module, name: str) -> Norm:
    """Find out by trial which RMS norm a module computes: gain `weight` or 1 + `weight`."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    if (
        weight is None
        or weight.ndim != 1
        or not isinstance(eps, float)
        or getattr(module, "bias", None) is not None
    ):
        raise NotUnderstood(f"{name} ({type(module).__name__}) is no RMS norm with a weight and an eps")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, len(weight), generator=generator).to(weight.device, weight.dtype)
    with torch.no_grad():
        found = module(x).float()
        plain = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        for offset in (0.0, 1.0):
            expected = plain * (offset + weight.float())
            if (found - expected).norm() <= 2e-2 * found.norm():
                return Norm(weight.detach(), eps, offset)
    raise NotUnderstood(f"{name} ({type(module).__name__}) does not compute x / rms(x) * weight")


def linears(module: Any, *names: str) -> list[nn.Linear]:
    """Return the linear layers of these names; `NotUnderstood` unless all are plain and without a bias."""
    found: list[nn.Linear] = []
    for name in names:
        part = getattr(module, name, None)
        if type(part) is not nn.Linear or part.bias is not None:
            raise NotUnderstood(f"{type(module).__name__} has no bias-free linear {name}")
        found.append(part)
    if len({(part.in_features, part.weight.dtype) for part in found}) != 1:
        raise NotUnderstood(f"{type(module).__name__}: {', '.join(names)} differ in input width or type")
    return found


class FusedMlp:
    """silu(x Wg) * (x Wu) Wd added onto the residual in the last product."""

    def __init__(self, module: Any) -> None:
        self._parts = linears(module, "gate_proj", "up_proj")
        (self._out,) = linears(module, "down_proj")
        act = getattr(module, "act_fn", None)
        probe = torch.linspace(-3, 3, 7)
        if act is None or not torch.allclose(act(probe), F.silu(probe), atol=1e-5):
            raise NotUnderstood(f"mlp activation {type(act).__name__} is not SiLU")

    def prepare(self) -> None:
        """Merge the weights; after every check has passed."""
        self._gate_up, _ = merge(self._parts)
        self._width = self._parts[0].out_features
        self._down = self._out.weight.detach().t()

    def add_to(self, ops: Ops, residual: Tensor, normed: Tensor) -> Tensor:
        """Return residual + mlp(normed), written into `residual` [T, H]."""
        active = ops.swiglu(F.linear(normed, self._gate_up)[:, : 2 * self._width])
        return residual.addmm_(active, self._down)


class PlainMlp:
    """Any other feed-forward module, called as it is."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def prepare(self) -> None:
        """Nothing to merge."""

    def add_to(self, ops: Ops, residual: Tensor, normed: Tensor) -> Tensor:
        """Return residual + mlp(normed), written into `residual` [T, H]."""
        out = self._module(normed[None])
        return residual.add_((out[0] if isinstance(out, tuple) else out).view_as(residual))


class FusedAttention:
    """Grouped-query attention with optional head norms, partial rotary angles and an optional output gate."""

    def __init__(self, module: Any) -> None:
        self._parts = linears(module, "q_proj", "k_proj", "v_proj")
        (self._out,) = linears(module, "o_proj")
        self._width, self._scale = int(module.head_dim), float(module.scaling)
        self._heads = self._out.in_features // self._width
        self._kv_heads = self._parts[1].out_features // self._width
        gated = self._parts[0].out_features // (self._heads * self._width)
        if gated not in (1, 2) or gated * self._heads * self._width != self._parts[0].out_features:
            raise NotUnderstood("q_proj is neither queries nor queries with a gate a head")
        self._gated, self._stride = gated == 2, gated * self._width
        norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
        self._norms = [
            None if norm is None else read_norm(norm, name) for norm, name in zip(norms, ("q_norm", "k_norm"))
        ]
        if any(norm is not None and len(norm.weight) != self._width for norm in self._norms):
            raise NotUnderstood("q_norm over more than one head")

    def prepare(self) -> None:
        """Merge the weights."""
        self._weight, self._starts = merge(self._parts)

    def __call__(self, ops: Ops, normed: Tensor, batch: int, positions: Any) -> Tensor:
        """Return the attention output [T, H] of `normed` [T, H]; positions: cos, sin, each [B or 1, L, R]."""
        rows, (cos, sin) = F.linear(normed, self._weight), positions
        q, k = (
            ops.norm_rope(
                rows, start, stride, heads, self._width, cos, sin,
                norm.weight if norm else None, norm.eps if norm else 0.0, norm.offset if norm else 0.0,
            )
            for start, stride, heads, norm in (
                (self._starts[0], self._stride, self._heads, self._norms[0]),
                (self._starts[1], self._width, self._kv_heads, self._norms[1]),
            )
        )  # fmt: skip
        v = rows[:, self._starts[2] : self._starts[2] + self._kv_heads * self._width]
        v = v.view(batch, -1, self._kv_heads, self._width)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            is_causal=True, scale=self._scale, enable_gqa=self._heads != self._kv_heads,
        ).transpose(1, 2)  # fmt: skip
        if self._gated:
            flat = ops.sigmoid_gate(mixed, rows, self._starts[0] + self._width, self._stride)
        else:
            flat = mixed.reshape(len(rows), -1)
        return F.linear(flat, self._out.weight)


class FusedDeltaNet:
    """Gated delta net: one projection, convolution with SiLU and head norm, the chunked delta rule, a gated
    norm.
    """

    def __init__(self, module: Any) -> None:
        self._parts = linears(module, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        (self._out,) = linears(module, "out_proj")
        conv = getattr(module, "conv1d", None)
        if not isinstance(conv, nn.Conv1d) or conv.bias is not None:
            raise NotUnderstood("delta net without a bias-free conv1d")
        if getattr(module, "activation", "silu") not in ("silu", "swish"):
            raise NotUnderstood(f"delta net activation {module.activation} is not SiLU")
        self._key_heads, self._key_width = int(module.num_k_heads), int(module.head_k_dim)
        self._value_heads, self._value_width = int(module.num_v_heads), int(module.head_v_dim)
        self._conv = conv.weight.detach().squeeze(1).contiguous()
        self._decay = (module.A_log.detach(), module.dt_bias.detach())
        self._norm_weight = module.norm.weight.detach()
        self._eps = float(module.norm.variance_epsilon)

    def prepare(self) -> None:
        """Merge the weights."""
        self._weight, self._starts = merge(self._parts)

    def __call__(self, ops: Ops, normed: Tensor, batch: int, positions: Any) -> Tensor:
        """Return the mixer's output [T, H] of `normed` [T, H]."""
        rows = F.linear(normed, self._weight)
        keys = self._key_heads * self._key_width
        q, k, v = (
            ops.conv_silu(
                rows, start, self._conv[start : start + heads * width], batch, heads, width, normalise
            )
            for start, heads, width, normalise in (
                (0, self._key_heads, self._key_width, True),
                (keys, self._key_heads, self._key_width, True),
                (2 * keys, self._value_heads, self._value_width, False),
            )
        )
        assert ops.delta_rule is not None
        mixed = ops.delta_rule(q, k, v, rows, Gates(self._starts[2], self._starts[3], *self._decay))
        return F.linear(
            ops.gated_rms_norm(mixed, rows, self._starts[1], self._norm_weight, self._eps), self._out.weight
        )

    def tune(self, ops: Ops, device: torch.device) -> None:
        """Run the delta rule once at working size: its kernels choose their tiles at the first call, for
        good.
        """
        batch, length, dtype = 16, 512, self._weight.dtype
        shapes = ((self._key_heads, self._key_width),) * 2 + ((self._value_heads, self._value_width),)
        q, k, v = (torch.ones(batch, length, *shape, device=device, dtype=dtype) for shape in shapes)
        rows = torch.zeros(batch * length, len(self._weight), device=device, dtype=dtype)
        assert ops.delta_rule is not None
        ops.delta_rule(q, k, v, rows, Gates(self._starts[2], self._starts[3], *self._decay))


@torch.no_grad()
def merge(modules: list[nn.Linear]) -> tuple[Tensor, list[int]]:
    """Stack the weights of `modules` ([n_i, H]) to one matrix: a larger product, one read of the input, one
    launch. Return it, [N, H], and each one's first row.

    It takes the place of the single ones: the modules' weights become views of its rows, so nothing is stored
    twice and the plain forward still works on them.
    """
    weights: list[Tensor] = [module.weight for module in modules]
    starts = [0, *torch.tensor([len(weight) for weight in weights]).cumsum(0).tolist()]
    rows = math.ceil(starts[-1] / _ROWS) * _ROWS
    merged = weights[0].new_zeros(rows, weights[0].shape[1])
    for module, weight, start in zip(modules, weights, starts):
        merged[start : start + len(weight)] = weight
        module.weight = nn.Parameter(merged[start : start + len(weight)], requires_grad=False)
    return merged, starts[:-1]


# The operations of a device -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ops:
    """The operations by name; signatures as in `fused_reference`."""

    name: str
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    swiglu: Callable[..., Tensor]
    conv_silu: Callable[..., Tensor]
    delta_rule: Callable[..., Tensor] | None
    gated_rms_norm: Callable[..., Tensor]
    norm_rope: Callable[..., Tensor]
    sigmoid_gate: Callable[..., Tensor]


def _ops(name: str, module: ModuleType) -> Ops:
    operations = {one.name: getattr(module, one.name) for one in fields(Ops) if one.name != "name"}
    return Ops(name, **operations)


def reference_ops() -> Ops:
    """Plain torch: to test the layers' wiring, not for speed."""
    return _ops("reference", fused_reference)


def triton_ops() -> Ops:
    """Triton kernels, and the delta rule of flash-linear-attention (None where that is not installed)."""
    if importlib.util.find_spec("triton") is None:
        raise InputError("fast kernels need Triton, which is not installed here. Use fast=off.")
    from dflash_lab.extraction import kernels

    found = _ops("triton", kernels)
    return found if importlib.util.find_spec("fla") is not None else replace(found, delta_rule=None)


def ops_for(device: torch.device) -> Ops | None:
    """Return the fused operations of a device, or None where there are none."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    return triton_ops()
