"""What a drafter is, how the public `config.json` says it, and which token stands in its masked slots."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_lab.errors import InputError, UnsupportedTarget

logger = logging.getLogger(__name__)


# Typed reads from a file of another machine or program ------------------------------------------------------
# A word where a number belongs is told with the file and the field as that file spells it, not by the first
# layer that cannot be built from it.


REMEDY = "Copy it again from where it came, or remove it and run the stage that wrote it again."
LARGEST = 2**31 - 1  # of a size or an id: both end in 32-bit indices somewhere
MOST_LAYERS = 4096
LARGEST_FLOAT = 1e30
_WORDS = {bool: "true or false", str: "text", list: "a list", dict: "an object"}


def shown(value: Any) -> str:
    """`value` as JSON, cut to what a message can hold."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."


class Fields:
    """Typed reads from `objects`, of which the first that has a name rules; null counts as not there.

    `where` begins every message. All reads raise `InputError` for another kind of value; those with a default
    return it where the name is missing.
    """

    def __init__(self, where: str, *objects: Mapping[str, Any]) -> None:
        self._where, self._objects = where, objects
        self.read: set[str] = set()  # names that were asked for

    def whole(self, name: str, default: int | None = None, *, low: int = 1, high: int = LARGEST) -> int:
        """A whole number in low..high; without a default it must be there."""
        return self._whole(name, self._must(name, default), low, high)

    def wholes(self, name: str, *, low: int, high: int, optional: bool = False) -> list[int]:
        """A list of at least one whole number; where it is missing and `optional`, an empty one."""
        found = self._of_kind(name, list, None)
        if not optional:
            self._must(name, found)
        if found == []:
            raise self.error(name, found, "a list of at least one number")
        return [self._whole(f"{name}[{at}]", one, low, high) for at, one in enumerate(found or ())]

    def number(self, name: str, default: float, *, positive: bool = True) -> float:
        """A finite number above zero, or, where not `positive`, also zero itself."""
        value = self._must(name, default)
        what = "a number above 0" if positive else "a number of at least 0"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, value, what)
        if not (0 < value < LARGEST_FLOAT or (value == 0 and not positive)):  # NaN is neither
            raise self.error(name, value, what)
        return float(value)

    def flag(self, name: str, default: bool | None) -> bool | None:
        """True, false, or the default."""
        return self._of_kind(name, bool, default)

    def words(self, name: str) -> list[str]:
        """A list of texts; an empty one where it is missing."""
        found = self._of_kind(name, list, [])
        for at, one in enumerate(found):
            if not isinstance(one, str):
                raise self.error(f"{name}[{at}]", one, "text")
        return found

    def part(self, name: str) -> dict[str, Any]:
        """An object within; an empty one where it is missing."""
        return self._of_kind(name, dict, {})

    def error(self, name: str, value: Any, must: str) -> InputError:
        """The error that `name` has a value it cannot have."""
        return InputError(f"{self._where}: {name!r} is {shown(value)}; it must be {must}. {REMEDY}")

    def _get(self, name: str) -> Any:
        self.read.add(name)
        found = (one.get(name) for one in self._objects)
        return next((value for value in found if value is not None), None)

    def _must(self, name: str, default: Any) -> Any:
        value = self._get(name)
        value = default if value is None else value
        if value is None:
            raise InputError(f"{self._where}: {name!r} is missing; is this a DFlash checkpoint? {REMEDY}")
        return value

    def _of_kind(self, name: str, kind: type, default: Any) -> Any:
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self.error(name, value, _WORDS[kind])
        return value

    def _whole(self, name: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            many = f"between {low} and {high}" if high < LARGEST else f"of at least {low}"
            raise self.error(name, value, f"a whole number {many}")
        return value


# What a drafter is ----------------------------------------------------------------------------------------


FULL, SLIDING = "full_attention", "sliding_attention"
_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_OPTIONAL = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping", *_DFLASH2)
# Read, but not always written; the others of a file are `extra`.
_READ_ONLY = (
    "torch_dtype",
    "transformers_version",
    "mask_token_id",
    "target_layer_ids",
    "is_causal",
    *_OPTIONAL,
)
_SPELLED = {  # our names -> the file's
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "tap_ids": "target_layer_ids",
}
_PLAIN = {  # fields that change what is computed, with the only value that is computed here
    "partial_rotary_factor": 1.0,
    "mlp_bias": False,
    "sample_from_anchor": False,
    "attn_logit_softcapping": None,
}
LARGEST_BLOCK = 1024  # slots; a drafter that was trained has tens


@dataclass(frozen=True)
class LayerMask:
    """How one layer's slots see: `window` W keeps keys p of query t with t - p < W; `causal` hides later
    slots.
    """

    causal: bool
    window: int | None


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape and meaning of a drafter. `block_size` counts the anchor; `tap_ids` are 0-based target layer
    outputs.

    Partial rotary or multi-axis positions of a target never enter: a drafter rotates all of its head
    dimension by plain absolute positions.
    """

    vocab_size: int
    hidden_size: int  # equals the target's: embedding and head are the target's own
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    tap_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...] = ()  # empty: full attention everywhere
    sliding_window: int | None = None  # tokens
    is_causal: bool | None = None  # None: sliding layers are causal inside the block, full layers are not
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0  # 0: none
    conv_kernel_size: int = 0  # the four below are DFlash 2's; 0: plain DFlash
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)  # of a file: what means nothing here, kept

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_layers)
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        object.__setattr__(self, "tap_ids", tuple(int(tap) for tap in self.tap_ids))

        def need(holds: bool, message: str) -> None:
            if not holds:
                raise InputError(f"drafter config: {message}")

        sizes = "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim"
        for name in sizes.split():
            need(getattr(self, name) >= 1, f"{name} = {getattr(self, name)} must be at least 1.")
        need(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}.",
        )
        need(self.head_dim % 2 == 0, f"head_dim {self.head_dim} must be even for rotary positions.")
        need(
            self.block_size >= 2,
            f"block_size {self.block_size} must be at least 2 (anchor + one drafted token).",
        )
        need(
            len(self.layer_types) == self.num_layers,
            f"{len(self.layer_types)} layer_types for {self.num_layers} layers.",
        )
        unknown = sorted(set(self.layer_types) - {FULL, SLIDING})
        need(not unknown, f"layer_types {unknown} unknown; each is {FULL!r} or {SLIDING!r}.")
        need(
            SLIDING not in self.layer_types or (self.sliding_window or 0) >= 1,
            "sliding layers need sliding_window >= 1 (tokens).",
        )
        need(bool(self.tap_ids), "tap_ids is empty; name at least one target layer.")
        need(
            all(0 <= tap < self.num_target_layers for tap in self.tap_ids),
            f"tap_ids {list(self.tap_ids)} must lie in 0..{self.num_target_layers - 1}, the target's layers.",
        )
        need(
            list(self.tap_ids) == sorted(set(self.tap_ids)),
            f"tap_ids {list(self.tap_ids)}: each layer once, in rising order.",
        )
        need(
            0 <= self.mask_token_id < self.vocab_size,
            f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}.",
        )
        dflash2 = [getattr(self, name) for name in _DFLASH2]
        need(all(dflash2) or not any(dflash2), f"DFlash 2 needs {', '.join(_DFLASH2)}, or none.")
        if self.conv_group_size:
            need(
                self.hidden_size % self.conv_group_size == 0,
                f"conv_group_size {self.conv_group_size} does not divide hidden_size {self.hidden_size}.",
            )

    @property
    def is_dflash2(self) -> bool:
        """True for DFlash 2 (dynamic convolutions and a candidate selector)."""
        return self.conv_kernel_size > 0

    @property
    def parameter_count(self) -> int:
        """Weights of the drafter, the target's embedding and head not counted."""
        size, heads, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = size * (2 * heads + 2 * kv + 3 * self.intermediate_size) + 2 * size + 2 * self.head_dim
        total = len(self.tap_ids) * size * size + 2 * size
        if self.is_dflash2:
            projection = 2 * self.conv_kernel_size * (size // self.conv_group_size)
            layer += 2 * (2 * self.conv_kernel_size * size + size * projection)
            total += (2 * self.vocab_size + size) * self.selector_rank
        return total + self.num_layers * layer

    def layer_mask(self, layer: int) -> LayerMask:
        """Mask of draft layer `layer`: an explicit `is_causal` rules all layers, else sliding layers are
        causal.
        """
        sliding = self.layer_types[layer] == SLIDING
        return LayerMask(
            causal=sliding if self.is_causal is None else self.is_causal,
            window=self.sliding_window if sliding else None,
        )

    def differences(self, other: DrafterConfig) -> list[str]:
        """What of a drafter of this shape computes otherwise than `other`, as "name: ours, theirs".

        Notes (`extra`), the range of a first draw and the longest position that was declared change nothing,
        nor does a window where no layer slides; masks are compared layer by layer.
        """
        notes = {"extra", "initializer_range", "max_position_embeddings"}
        masks = [[one.layer_mask(layer) for layer in range(one.num_layers)] for one in (self, other)]
        if masks[0] == masks[1]:
            notes |= {"layer_types", "sliding_window", "is_causal"}
        names = [field.name for field in dataclasses.fields(self) if field.name not in notes]
        values = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name}: {ours}, {theirs}" for name, ours, theirs in values if ours != theirs]

    @classmethod
    def from_target(
        cls,
        target: Any,
        *,
        mask_token_id: int,
        num_layers: int = 5,
        block_size: int = 16,
        tap_ids: tuple[int, ...] | list[int] = (),
        sliding_layers: int | tuple[int, ...] = 0,
        sliding_window: int | None = None,
        **overrides: Any,
    ) -> DrafterConfig:
        """Shape a drafter for `target`, a Hugging Face text configuration.

        `tap_ids` empty means the released rule for `num_layers` taps; `sliding_layers` is a count of leading
        layers or their indices. Heads, feed-forward width and rotary base follow the target unless given in
        `overrides` (`num_heads`, `num_kv_heads`, `head_dim`, `intermediate_size`, `rope_theta`, DFlash 2's
        four, ...).
        """
        sliding = set(range(sliding_layers)) if isinstance(sliding_layers, int) else set(sliding_layers)
        if any(not 0 <= layer < num_layers for layer in sliding):
            raise InputError(f"sliding_layers {sorted(sliding)}: the drafter has layers 0..{num_layers - 1}.")
        depth = target.num_hidden_layers
        heads = overrides.pop("num_heads", 0) or target.num_attention_heads
        values = dict(
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            intermediate_size=getattr(target, "intermediate_size", None) or 3 * target.hidden_size,
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=getattr(target, "num_key_value_heads", None) or heads,
            head_dim=getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
            block_size=block_size,
            mask_token_id=mask_token_id,
            tap_ids=tuple(tap_ids) or released_tap_ids(depth, num_layers),
            num_target_layers=depth,
            layer_types=tuple(SLIDING if i in sliding else FULL for i in range(num_layers)),
            sliding_window=sliding_window if sliding else None,
            rope_theta=rope_theta(target.to_dict()),
            rms_norm_eps=getattr(target, "rms_norm_eps", 1e-6),
            max_position_embeddings=getattr(target, "max_position_embeddings", 32768),
        )
        values.update({name: value for name, value in overrides.items() if value is not None})
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise InputError(f"drafter config: unknown fields {unknown}; known are {sorted(known)}.")
        return cls(**values)

    def to_json(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The z-lab `config.json` as plain values: a flat Qwen3 configuration plus `dflash_config`. `dtype`
        is the weights' type by torch name.

        Readers disagree on two spots, so both are written: `block_size` stands at the top level and in
        `dflash_config` (the inner one wins when read), the rotary base as `rope_theta` and inside
        `rope_parameters`.
        """
        inner: dict[str, Any] = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.tap_ids),
        }
        defaults = {one.name: one.default for one in dataclasses.fields(self)}
        inner |= {name: getattr(self, name) for name in _OPTIONAL if getattr(self, name) != defaults[name]}
        architecture = "DFlash2DraftModel" if self.is_dflash2 else "DFlashDraftModel"
        values: dict[str, Any] = {
            "architectures": [architecture],
            "auto_map": {"AutoModel": f"dflash.{architecture}"},
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "use_sliding_window": SLIDING in self.layer_types,
            "max_window_layers": self.num_layers,
            "tie_word_embeddings": False,
            "use_cache": True,
            "dtype": dtype,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "dflash_config": inner,
        }
        if self.is_causal is not None:
            values["is_causal"] = self.is_causal
        return {**self.extra, **values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str = "drafter config.json") -> DrafterConfig:
        """Read a z-lab `config.json`, the file `where`. `InputError` names a missing or damaged field,
        `UnsupportedTarget` what is not known; of `dflash_config`, what nothing reads is told in the log.
        """
        outer = Fields(where, values)
        inner = outer.part("dflash_config")
        fields = Fields(where, inner, values)
        if outer.flag("attention_bias", False):
            raise UnsupportedTarget(f"{where}: attention_bias is true; DFlash projections have no bias.")
        if (act := values.get("hidden_act", "silu")) != "silu":
            raise UnsupportedTarget(f"{where}: hidden_act is {shown(act)}; only 'silu' is known.")
        tables = outer.part("rope_parameters")
        own = Fields(where, tables).part(FULL) or tables  # some files have a table a kind of layer
        rope = {**outer.part("rope_scaling"), **own}
        if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
            raise UnsupportedTarget(f"{where}: rope type is {shown(kind)}; only 'default' is known.")
        for name, plain in _PLAIN.items():
            found = next((one[name] for one in (inner, rope, values) if one.get(name) is not None), plain)
            if found != plain:
                raise UnsupportedTarget(f"{where}: {name} is {shown(found)}; only {shown(plain)} is known.")
        layers = fields.whole("num_hidden_layers", high=MOST_LAYERS)
        depth = fields.whole("num_target_layers", high=MOST_LAYERS)
        hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
        window = None if values.get("sliding_window") is None else outer.whole("sliding_window")
        taps = fields.wholes("target_layer_ids", low=0, high=depth - 1, optional=True)
        try:
            config = cls(
                vocab_size=fields.whole("vocab_size"),
                hidden_size=hidden,
                intermediate_size=fields.whole("intermediate_size"),
                num_layers=layers,
                num_heads=heads,
                num_kv_heads=fields.whole("num_key_value_heads", heads),
                head_dim=fields.whole("head_dim", hidden // heads),
                block_size=fields.whole("block_size", 16, low=2, high=LARGEST_BLOCK),
                mask_token_id=fields.whole("mask_token_id", low=0),
                tap_ids=tuple(taps or released_tap_ids(depth, layers)),
                num_target_layers=depth,
                layer_types=tuple(outer.words("layer_types")),
                sliding_window=window,
                is_causal=outer.flag("is_causal", None),
                rope_theta=Fields(where, rope, values).number("rope_theta", 1e6),
                rms_norm_eps=outer.number("rms_norm_eps", 1e-6),
                max_position_embeddings=outer.whole("max_position_embeddings", 32768),
                initializer_range=outer.number("initializer_range", 0.02, positive=False),
                input_embedding_scale=fields.number("input_embedding_scale", 1.0),
                output_multiplier=fields.number("output_multiplier", 1.0),
                final_logit_softcapping=fields.number("final_logit_softcapping", 0.0, positive=False),
                conv_kernel_size=fields.whole("conv_kernel_size", 0, low=0),
                conv_group_size=fields.whole("conv_group_size", 0, low=0),
                selector_rank=fields.whole("selector_rank", 0, low=0),
                selector_top_k=fields.whole("selector_top_k", 0, low=0),
            )
        except InputError as error:
            if str(error).startswith(where):
                raise
            raise InputError(f"{where}: {_spelled(str(error))} {REMEDY}") from error
        try:
            json.dumps(values, allow_nan=False)  # Python reads what it could not write back
        except ValueError as error:
            raise InputError(f"{where}: holds NaN or Infinity, which JSON cannot. {REMEDY}") from error
        if unread := sorted(inner.keys() - fields.read - _PLAIN.keys()):
            logger.warning("%s: dflash_config has %s, which is not read here", where, ", ".join(unread))
        known = {*config.to_json(), *_READ_ONLY}
        return dataclasses.replace(config, extra={n: value for n, value in values.items() if n not in known})


def _spelled(message: str) -> str:
    """What `DrafterConfig` says of its fields, with the names that the file has for them."""
    told = message.removeprefix("drafter config: ")
    return re.sub("|".join(_SPELLED), lambda found: _SPELLED[found[0]], told)


def released_tap_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """`models.hooks`' tap rule, imported late so that reading a configuration stays free of torch."""
    from dflash_lab.models.hooks import default_tap_ids

    return tuple(default_tap_ids(num_target_layers, count))


def rope_theta(values: Mapping[str, Any]) -> float:
    """Rotary base of a Qwen3-like configuration, old (`rope_theta`) or new (`rope_parameters`) spelling."""
    parameters = values.get("rope_parameters") or {}
    parameters = parameters.get(FULL, parameters)  # per-layer-type tables: take the full layers' entry
    theta = parameters.get("rope_theta") or values.get("rope_theta")
    return float(theta) if theta else 1e6


# The token of masked slots -------------------------------------------------------------------------------


# How vocabularies name the tokens that they keep free.
_RESERVED = re.compile(r"[<\[].*(reserved|unused|extra_|dummy|placeholder|special_\d).*[>\]]", re.IGNORECASE)


def resolve_mask_token_id(
    vocab_size: int,
    *,
    explicit: int = -1,
    tokenizer: Any = None,
    occurs: Callable[[int], bool] = lambda token: False,
) -> tuple[int, str]:
    """Return the token id of a masked slot and why it was chosen; the embedding is never resized.

    Order: `explicit` (>= 0), the tokenizer's mask token, an embedding row without a token, tokens
    that the vocabulary keeps in reserve, any other special token that the chat template does not spell. None
    of these ends a turn, and none for which `occurs(token)` (in the data) is taken: a slot that says "masked"
    must mean nothing else. Without a tokenizer the last embedding row is taken. Raises `InputError` when no
    token is free.
    """
    if explicit >= 0:
        if explicit >= vocab_size:
            raise InputError(f"mask_token_id = {explicit}: the target has only {vocab_size} embedding rows.")
        return explicit, "given"
    if tokenizer is None:
        return vocab_size - 1, "last embedding row (the target has no tokenizer)"
    for token, why in _free_tokens(vocab_size, tokenizer):
        if not occurs(token):
            return token, why
    raise InputError(
        "mask_token_id: every embedding row is a token that turns or data use. Give one that is rare in your "
        "data (-p mask_token_id N)."
    )


def _free_tokens(vocab_size: int, tokenizer: Any) -> Iterator[tuple[int, str]]:
    """Yield tokens that say nothing, the best first, each with why."""
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id < vocab_size:
        yield tokenizer.mask_token_id, "the tokenizer's mask token"
    taken = set(tokenizer.get_vocab().values())
    yield from ((row, "an embedding row without a token") for row in range(vocab_size) if row not in taken)
    template = str(tokenizer.chat_template or "")
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    marked = {token for token, spelled in tokenizer.added_tokens_decoder.items() if spelled.special}
    free = {
        token: spelled
        for spelled, token in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        if (token in marked or _RESERVED.fullmatch(spelled))
        and token not in used
        and token < vocab_size
        and spelled not in template
    }
    reserved = [token for token, spelled in free.items() if _RESERVED.fullmatch(spelled)]
    yield from ((token, f"{free[token]}, which the vocabulary keeps free") for token in reserved)
    others = [token for token in free if token not in reserved]
    yield from ((token, f"{free[token]}, which the template does not use") for token in others)
