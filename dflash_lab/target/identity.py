"""Which model, tokenizer and template made a state: hashes cheap enough to compute at every start.

A weight file is identified by its name, size, safetensors header (names, shapes, offsets) and some bytes
from the middle of every tensor, not by its 54 GB of content: a fine-tune has the header of its base, and its
states are others.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import xxhash

from dflash_lab.target.checkpoint import Checkpoint, local_file
from dflash_lab.target.sources import Source, has_tokenizer, source_tokenizer, whole_config

# Fields that say where or with what a config was read, not what the model computes.
_VOLATILE = ("transformers_version", "_name_or_path", "dtype", "use_cache", "_commit_hash", "torch_dtype")


def _hash(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())


_PROBE_BYTES = 512  # of each tensor: 256 bf16 weights, of which training leaves hardly all as they were


def sampled_hash(path: Path) -> str:
    """Hash a safetensors file's name, size, header and `_PROBE_BYTES` from the middle of each tensor."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
        digest = xxhash.xxh3_128(header)
        tensors = (entry for name, entry in json.loads(header).items() if name != "__metadata__")
        for start, end in sorted(tuple(entry["data_offsets"]) for entry in tensors):
            size = min(_PROBE_BYTES, end - start)
            file.seek(8 + length + start + (end - start - size) // 2)
            digest.update(file.read(size))
    return _hash([path.name, path.stat().st_size, digest.hexdigest()])


def identify(source: Source, *, seed: int = 0) -> dict[str, Any]:
    """Return the identity of a target: name, config hash, weights hash, revision, tokenizer and template
    hash.

    For ``random:`` targets the weights are named by their seed. Tokenizer and template are empty where there
    is no tokenizer.
    """
    config = whole_config(source)
    fields = {k: v for k, v in config.to_dict().items() if k not in _VOLATILE}
    identity: dict[str, Any] = {
        "name": source.name,
        "config": _hash(fields),
        "revision": _revision(source),
    }
    if source.checkpoint is None:
        return {**identity, "weights": f"random, seed {seed}", "tokenizer": "", "template": ""}
    weights = Checkpoint(source.checkpoint).files()
    identity["weights"] = _hash([sampled_hash(path) for path in weights])
    if not has_tokenizer(source):
        return {**identity, "tokenizer": "", "template": ""}
    tokenizer = source_tokenizer(source)
    return {**identity, "tokenizer": tokenizer_hash(tokenizer), "template": template_hash(tokenizer)}


def _revision(source: Source) -> str:
    """Return the commit of a hub's checkpoint, named by its place in the cache; empty for other folders."""
    config = None if source.checkpoint is None else local_file(source.checkpoint, "config.json")
    found = re.search(r"/snapshots/([0-9a-f]{40})/", "" if config is None else config.as_posix())
    return found.group(1) if found else ""


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash what a tokenizer does: its whole definition if it is a fast one, else its vocabulary and special
    tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    definition = (
        backend.to_str() if backend is not None else [tokenizer.get_vocab(), tokenizer.special_tokens_map]
    )
    return _hash(definition)


def template_hash(tokenizer: Any) -> str:
    """Hash a tokenizer's chat template; empty if it has none."""
    return _hash(tokenizer.chat_template) if tokenizer.chat_template else ""
