"""What a target's name means: the embedded SmolLM2, a Hugging Face id, a local folder, or a random model of a
shape.

Config and tokenizer are read here without touching weights, so that stages can check their parameters in a
second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from dflash_lab.errors import InputError, near
from dflash_lab.target import shapes, smollm2, structure
from dflash_lab.target.checkpoint import local_file

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Source:
    """Where a target comes from: `checkpoint` (a folder or hub id), or `shape` for random weights."""

    name: str
    checkpoint: str | None
    shape: str | None
    trust_remote_code: bool = False


def resolve(target: str, *, trust_remote_code: bool = False) -> Source:
    """Tell which kind of target a name means; `InputError` with the near match when it means none."""
    if target == "smollm2":
        return Source(target, str(smollm2.cached_folder()), None)
    if target.startswith("random:"):
        return Source(target, None, target.removeprefix("random:"))
    if Path(target).expanduser().is_dir():
        return Source(target, str(Path(target).expanduser()), None, trust_remote_code)
    if _HUB_ID.fullmatch(target) and not Path(target).exists():
        return Source(target, target, None, trust_remote_code)
    known = ["smollm2", *(f"random:{name}" for name in shapes.shape_names())]
    raise InputError(
        f"target {target!r} is no folder, no Hugging Face id (owner/name) and no known name"
        f"{near(target, known)}. Known names: {', '.join(known)}, random:<path of a config.json>."
    )


def whole_config(source: Source) -> PretrainedConfig:
    """Return a target's config, a multimodal wrapper included, once it is known to be a causal language
    model.
    """
    if source.checkpoint is None:
        config = shapes.shape_config(source.shape or "")
    else:
        try:
            config = AutoConfig.from_pretrained(source.checkpoint, trust_remote_code=source.trust_remote_code)
        except (OSError, ValueError) as error:
            raise InputError(f"target {source.name!r}: its config cannot be read. {error}") from error
    structure.check_causal(config, source.name)
    return config


def load_config(target: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the text config of a target without reading weights."""
    return whole_config(resolve(target, trust_remote_code=trust_remote_code)).get_text_config()


def load_tokenizer(target: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """Return the target's tokenizer; `InputError` for ``random:`` targets, which have none."""
    return source_tokenizer(resolve(target, trust_remote_code=trust_remote_code))


def has_tokenizer(source: Source) -> bool:
    """Tell whether tokenizer files lie beside the weights."""
    names = ("tokenizer_config.json", "tokenizer.json")
    return source.checkpoint is not None and any(local_file(source.checkpoint, name) for name in names)


def source_tokenizer(source: Source) -> Tokenizer:
    """Return the tokenizer of a resolved target."""
    if source.checkpoint is None:
        raise InputError(
            f"{source.name}: a random target has no tokenizer. Give a checkpoint where text is needed."
        )
    if not has_tokenizer(source):
        raise InputError(
            f"{source.name}: no tokenizer beside the weights. Save the model's tokenizer there too."
        )
    return AutoTokenizer.from_pretrained(source.checkpoint, trust_remote_code=source.trust_remote_code)


def source_stop_ids(source: Source, config: PretrainedConfig) -> list[int]:
    """Return the token ids that end an answer, sorted; a random target knows only its config's eos."""
    found: set[int] = set()
    holders: list[object] = [config]
    if source.checkpoint is not None:
        if has_tokenizer(source):
            holders.append(source_tokenizer(source))
        if local_file(source.checkpoint, "generation_config.json") is not None:
            holders.append(GenerationConfig.from_pretrained(source.checkpoint))
    for holder in holders:
        ids = getattr(holder, "eos_token_id", None)
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return sorted(found)
