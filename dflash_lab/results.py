"""Finished results: whether one still stands, in what it differs from what is wanted now, and what rests on
it. Nothing here makes or changes a file.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from dflash_lab.errors import FileError, InputError, StoreError, naming, near
from dflash_lab.files import checksum, read_json, walk
from dflash_lab.params import StageParams, defaults
from dflash_lab.secrets import redact_tree
from dflash_lab.stages import LEAVES

SCHEMA_VERSION = 1
RESULT = "result.json"
FAILURE = "failure.json"
_TOLD = 4  # differences that a sentence names


def is_finished(params: StageParams, inputs: dict[str, str] | None = None) -> bool:
    """Say whether `result.json` stands for these parameters and the present content of the inputs."""
    finished = (params.folder / RESULT).exists()
    return finished and not differences(params, inputs) and not params.lacks()


def read_result(path: Path) -> dict[str, Any]:
    """Read a `result.json`; a `StoreError` when it is not one, or of another version of this program."""
    result = read_json(path)
    version = result.get("schema_version") if isinstance(result, dict) else None
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{path}: schema version {version!r}, this program writes {SCHEMA_VERSION}. "
            "Move the run folder away, or give another run_dir."
        )
    kinds: dict[str, Any] = {"figures": dict}
    if "run" not in result:  # a stage's own, not the closing table of the run
        kinds |= {"parameters": dict, "inputs": dict, "stage": str, "seconds": int | float}
    for name, kind in kinds.items():
        if not isinstance(result.get(name), kind):
            raise StoreError(f"{path}: has no {name}. Remove the file to make it again.")
    return result


def input_fingerprints(params: StageParams) -> dict[str, str]:
    """Return the fingerprint of each input by its path, that of a local target among them."""
    target = Path(os.path.expanduser(params.target))
    # A folder without a config is no checkpoint, and may be a whole disk.
    folders = [target] if os.path.exists(target / "config.json") else []
    return fingerprints([*folders, *params.inputs()], params.run_folder)


class WouldReplace(InputError):
    """A finished result is of other parameters or inputs, and nobody asked to replace it."""


def check_ready(params: StageParams, inputs: dict[str, str] | None = None) -> None:
    """Raise an `InputError` when the stage cannot begin: something it needs is not there (the message names
    the stage that makes it), or it would replace a finished result unasked (`WouldReplace`).
    """
    for path, maker in params.needs():
        if path.exists():
            continue
        if maker:
            raise InputError(
                f"{params.stage}: {path} is not there yet. Run {maker} first: dflash-lab {maker} "
                f"{_named(params)}{_other_folder(params)}"
            )
        raise InputError(f"{params.stage}: {path} is not there. Give a path that exists.")
    if params.force:
        return
    _check_rules(params)
    finished = (params.folder / RESULT).exists()
    for path in [] if finished else params.taken():
        raise WouldReplace(
            f"{path} is there, and {params.stage} of run {params.run_name} did not make it. Nothing changed. "
            "To replace it, set force (-p force True); to keep it, give another place or another run"
        )
    if changes := differences(params, inputs):
        later = stale_after(params)
        then = f" {', '.join(later)} would be of the old one and go stale." if later else ""
        more = f" and {len(changes) - _TOLD} more" if len(changes) > _TOLD else ""
        raise WouldReplace(
            f"{params.folder.name} of run {params.run_name} is finished with other "
            f"parameters or inputs: {'; '.join(changes[:_TOLD])}{more}. Nothing changed.{then} To replace "
            "it, set force (-p force True); to keep both, make another run: "
            f"dflash-lab new NAME --from {params.run}"
        )


def out_of_date(params: StageParams) -> list[str]:
    """Say why a finished result would be made again: its differences, and older mask rules of samples that
    the stage itself makes (who only reads them can do nothing about it); empty where there is no reason.
    """
    found = differences(params)
    if (params.folder / RESULT).exists() and _makes_samples(params) and (older := older_rules(params)):
        found.append(older)
    return found


def _makes_samples(params: StageParams) -> bool:
    return not {*params.rendered()}.isdisjoint(move.place for move in params.products())


def older_rules(params: StageParams) -> str:
    """Say which samples of a stage were masked by older rules, of which a drafter would learn what the target
    never says; empty if there are none.
    """
    from dflash_lab.data.samples import MASK_RULES, old_rules

    found = ((path, old_rules(path)) for path in params.rendered())
    told = (f"{path} was rendered by mask rules {old}, these are {MASK_RULES}" for path, old in found if old)
    return next(told, "")


def made_again(params: StageParams) -> str:
    """What makes samples of older mask rules again, as a sentence with what to type."""
    return f"Make it again: dflash-lab prepare {_named(params)} -p force True"


def _check_rules(params: StageParams) -> None:
    if (told := older_rules(params)) and not _makes_samples(params):
        raise InputError(
            f"{params.stage}: {told}, which mask what the target generates under more templates. "
            f"{made_again(params)}. To use it as it is, set force here (-p force True)"
        )


def _named(params: StageParams) -> str:
    given = f"--run {params.run}"
    return f"{given} -p run_dir {params.run_dir}" if params.run_dir else given


def _other_folder(params: StageParams) -> str:
    """A hint at the folder that was meant, where the run's folder was mistyped."""
    folder = params.run_folder
    if folder.is_dir() or not params.run_dir:
        return ""
    if folder.exists():
        return f" ({folder} is a file, not a run's folder)"
    beside = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
    return f" ({folder} is not there{near(folder.name, beside)})"


def differences(params: StageParams, inputs: dict[str, str] | None = None) -> list[str]:
    """Say in what a finished result differs from these parameters and today's inputs, a phrase each; empty
    where there is none or it matches.
    """
    path = params.folder / RESULT
    if not path.exists():
        return []
    result = read_result(path)
    inputs = input_fingerprints(params) if inputs is None else inputs
    then = _significant(params, of_today(type(params), result["parameters"]))
    now = _significant(params, redact_tree(params.as_dict()))
    found = [
        f"{name} was {then.get(name, 'unknown')!r}, now {now.get(name, 'unknown')!r}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
    for name in sorted({*result["inputs"], *inputs}):
        if result["inputs"].get(name) != inputs.get(name):
            found.append(f"{name} {_became(result['inputs'].get(name), inputs.get(name))}")
    return found


def kept_more(params: StageParams) -> list[str]:
    """Say with more of which `growing` parameters (0: all) a finished result was made than is asked now."""
    then = of_today(type(params), read_result(params.folder / RESULT)["parameters"])
    now = {name: getattr(params, name) for name in params.growing}
    return [
        f"{name} was {then[name] or 'all'}, now {value}: what is stored stays"
        for name, value in now.items()
        if value and not 0 < then[name] <= value
    ]


def _became(then: str | None, now: str | None) -> str:
    if now == "absent":
        return "is gone"
    return (
        "was not read"
        if then in (None, "absent")
        else "is not read any more"
        if now is None
        else "has changed"
    )


def stale_after(params: StageParams) -> list[str]:
    """Return the finished stages that rest on what this stage leaves, and those that rest on them."""
    places = [params.run_folder / name for name in LEAVES.get(params.stage, ())]
    places += [move.place for move in params.products()]  # which a person may have put elsewhere
    left, found, rest = set(fingerprint_names(places, params.run_folder)), [], {}
    for path in sorted(params.run_folder.glob(f"*/{RESULT}")):
        with contextlib.suppress(StoreError):  # its own stage tells that it cannot be read
            rest[path.parent.name] = read_result(path)
    while hit := next((name for name, one in rest.items() if left & {*one["inputs"]}), ""):
        left |= set(LEAVES.get(rest.pop(hit)["stage"], ()))
        if hit != params.folder.name:
            found.append(hit)
    return found


def _significant(params: StageParams, parameters: dict[str, Any]) -> dict[str, Any]:
    """Leave out the parameters that change how a stage runs, or how far, not what it finds."""
    left_out = (*params.passing, *params.growing)
    return {name: value for name, value in parameters.items() if name not in left_out}


def of_today(cls: type[StageParams], parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a result under today's names; one that an earlier version did not know had
    its default.
    """
    named = {cls.renamed.get(name, name): value for name, value in parameters.items()}
    return {**defaults(cls), **named}


# --- Fingerprints: whether inputs changed, without reading terabytes
#
# A file counts by its content. A folder (a feature store, a checkpoint, a local target) counts by the names
# and sizes of all its files and by the content of the small ones: manifests, configs and indexes carry the
# checksums of the large. Times are left out, so that a copied run folder is still finished.

_SMALL = 4 << 20  # bytes; files of a folder up to this size are read
_LARGE = 256 << 20  # bytes; a single file above this counts by size, its first and its last MiB


def fingerprints(paths: Iterable[Path], run: Path) -> dict[str, str]:
    """Return a fingerprint for each path, keyed relative to the run folder.

    A path that is absent reads ``absent``.
    """
    paths = [Path(path) for path in paths]
    return dict(zip(fingerprint_names(paths, run), map(fingerprint, paths), strict=True))


def fingerprint_names(paths: Iterable[Path], run: Path) -> list[str]:
    """Return each path's name in a result: relative to the run folder, or as it is where it lies outside."""
    relatives = [(path, os.path.relpath(path, run)) for path in paths]
    return [str(path) if relative.startswith("..") else relative for path, relative in relatives]


def fingerprint(path: Path) -> str:
    """Return the xxh3-128 of a file's content, or of a folder's names, sizes and small files; `FileError` for
    what is neither, `InputError` for a folder without end.
    """
    with naming(path):  # also asking whether it is there can fail: a name too long, a dead network mount
        if path.is_dir():
            return _folder(path)
        if path.exists() and not path.is_file():  # a device or a pipe, which may never end
            raise FileError(errno.EINVAL, path)
        return _file(path) if path.exists() else "absent"


def _file(path: Path) -> str:
    size = path.stat().st_size
    if size <= _LARGE:
        return checksum(path)
    with open(path, "rb") as file:
        first = file.read(1 << 20)
        file.seek(-(1 << 20), os.SEEK_END)
        return xxhash.xxh3_128_hexdigest(str(size).encode() + first + file.read())


def _folder(folder: Path) -> str:
    digest = xxhash.xxh3_128()
    for path in sorted(walk(folder)):
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()}\0{size}\0".encode())
        if size <= _SMALL:
            digest.update(checksum(path).encode())
    return digest.hexdigest()
