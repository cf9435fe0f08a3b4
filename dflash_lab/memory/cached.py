"""Fake-tensor counts kept on disk, by what they depend on.

The key is the content: the configuration, the setup, the versions of torch and transformers, and the source
of the code that counts and of the drafter that is counted. Changing any of them counts again; nothing is
ever stale.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
from pathlib import Path
from typing import Any

import xxhash

from dflash_lab import files
from dflash_lab.errors import StoreError
from dflash_lab.memory.account import Account
from dflash_lab.memory.fit import as_plain
from dflash_lab.memory.setups import ExtractionSetup, TrainingSetup
from dflash_lab.target.smollm2 import cache_root

logger = logging.getLogger(__name__)


def fake_extraction(config: Any, setup: ExtractionSetup, *, folder: Path | None = None) -> Account:
    """Return `count_extraction`'s account, from the cache (`folder`, by default the lab's) if it is there."""
    from dflash_lab.memory.fake import count_extraction

    path = _path(folder, "extraction", _text(config), as_plain(setup))
    found = _read(path)
    return found or _write(path, count_extraction(config, setup)[0])


def fake_training(target: Any, drafter: Any, setup: TrainingSetup, *, folder: Path | None = None) -> Account:
    """Return `count_training`'s account for a `DrafterConfig`, from the cache if it is there."""
    from dflash_lab.memory.fake_training import count_training

    path = _path(folder, "training", _text(target), drafter.to_json(), as_plain(setup))
    found = _read(path)
    return found or _write(path, count_training(target, drafter, setup)[0])


def _text(config: Any) -> dict[str, Any]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return text.to_dict()


def _path(folder: Path | None, *parts: Any) -> Path:
    text = json.dumps([*parts, *_versions()], sort_keys=True, default=str)
    name = xxhash.xxh3_128(text.encode()).hexdigest()
    return (folder or cache_root() / "memory") / f"{parts[0]}-{name}.json"


@functools.cache
def _versions() -> tuple[str, ...]:
    """Return the library versions and a hash of the sources that the counts depend on."""
    package = Path(__file__).resolve().parents[1]
    digest = xxhash.xxh3_128()
    for room in ("drafter", "memory", "extraction/fast"):  # whose layers are run on fake tensors
        for path in sorted((package / room).rglob("*.py")):
            digest.update(path.read_bytes())
    libraries = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    return (*libraries, digest.hexdigest())


def _read(path: Path) -> Account | None:
    if not path.exists():
        return None
    try:
        values = files.read_json(path)
        return Account(**{**values, "notes": tuple(values["notes"])})
    except (StoreError, KeyError, TypeError, AttributeError, ValueError) as error:
        logger.warning("%s: counted again, for it holds no account (%s)", path, error)
        path.unlink()
        return None


def _write(path: Path, account: Account) -> Account:
    values = {name: getattr(account, name) for name in account.__dataclass_fields__}
    files.write_json(path, {**values, "terms": dict(account.terms), "formulas": dict(account.formulas)})
    return account
