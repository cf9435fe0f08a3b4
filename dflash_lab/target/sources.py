"""What a target's name means: the embedded SmolLM2, a Hugging Face id, a local folder, or a random model of a
shape.

Config and tokenizer are read here without touching weights, so that stages can check their parameters in a
second.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from dflash_lab.errors import InputError, LabError, near
from dflash_lab.target import hub, shapes, smollm2, structure
from dflash_lab.target.checkpoint import local_file

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Source:
    """Where a target comes from: `checkpoint` (a folder or hub id), or `shape` for random weights."""

    name: str
    checkpoint: str | None
    shape: str | None
    trust_remote_code: bool = False


def served_name(target: str) -> str:
    """Return what a server loads for a target: the embedded one is the folder that it was converted to."""
    return str(smollm2.cached_folder()) if target == "smollm2" else target


def is_folder(target: str) -> bool:
    """Say whether a name means a local folder; one too long for the file system means none."""
    return os.path.isdir(os.path.expanduser(target))


def resolve(target: str, *, trust_remote_code: bool = False) -> Source:
    """Tell which kind of target a name means; `InputError` with the near match when it means none."""
    if target == "smollm2":
        return Source(target, str(smollm2.cached_folder()), None)
    if target.startswith("random:"):
        return Source(target, None, target.removeprefix("random:"))
    if is_folder(target):
        return Source(target, str(Path(target).expanduser()), None, trust_remote_code)
    known = ["smollm2", *(f"random:{name}" for name in shapes.shape_names())]
    if _HUB_ID.fullmatch(target) and not os.path.exists(target):
        return Source(target, hub.checkpoint_of(target, known), None, trust_remote_code)
    meant = near(target, [*known, *hub.folders_beside(target)])
    raise InputError(
        f"target {target!r} is no folder, no Hugging Face id (owner/name) and no known name{meant}. "
        f"Known names: {', '.join(known)}, random:<path of a config.json>."
    )


@contextlib.contextmanager
def _foreign_file(source: Source, what: str) -> Iterator[None]:
    """Turn whatever reading a checkpoint's own files raises into an `InputError` that names the target.

    Broken JSON, a value of the wrong type and a class that does not fit each raise another kind of error in
    transformers, tokenizers (bare `Exception`) and huggingface_hub, so every one of them is meant.
    """
    try:
        yield
    except LabError:
        raise
    except Exception as error:
        reason = str(error).strip() or type(error).__name__
        raise InputError(f"target {source.name!r}: its {what} cannot be read. {reason}") from error


def whole_config(source: Source) -> PretrainedConfig:
    """Return a target's config, a multimodal wrapper included, once it is known to be a causal language
    model.
    """
    if source.checkpoint is None:
        config = shapes.shape_config(source.shape or "")
    else:
        with _foreign_file(source, "config"):
            config = AutoConfig.from_pretrained(source.checkpoint, trust_remote_code=source.trust_remote_code)
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
    with _foreign_file(source, "tokenizer"):
        return AutoTokenizer.from_pretrained(source.checkpoint, trust_remote_code=source.trust_remote_code)


def source_stop_ids(source: Source, config: PretrainedConfig) -> list[int]:
    """Return the token ids that end an answer, sorted; a random target knows only its config's eos."""
    found: set[int] = set()
    holders: list[object] = [config]
    if source.checkpoint is not None:
        if has_tokenizer(source):
            holders.append(source_tokenizer(source))
        if local_file(source.checkpoint, "generation_config.json") is not None:
            with _foreign_file(source, "generation config"):
                holders.append(GenerationConfig.from_pretrained(source.checkpoint))
    for holder in holders:
        ids = getattr(holder, "eos_token_id", None)
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return sorted(found)
