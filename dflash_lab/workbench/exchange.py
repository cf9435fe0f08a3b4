"""Commands that pass work on: drafters in another layout, samples of several runs in one file.

None of them writes over what is there.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from dflash_lab.errors import InputError


def export_drafter(options: argparse.Namespace, extra: list[str]) -> int:
    """Write a drafter in the speculators layout."""
    from dflash_lab.drafter.checkpoint import load_checkpoint
    from dflash_lab.drafter.formats import export_speculators

    if not options.target.strip():
        raise InputError("--target is empty: give the hub id or path by which its users load the target.")
    goal = _new_folder(options.output)
    drafter = load_checkpoint(options.drafter)
    export_speculators(drafter, goal, target=options.target, target_architecture=options.architecture)
    print(f"{goal}: speculators layout, {drafter.config.parameter_count:,} parameters")
    return 0


def import_drafter(options: argparse.Namespace, extra: list[str]) -> int:
    """Write a drafter of the speculators layout as the checkpoint that every stage reads."""
    from dflash_lab.drafter.checkpoint import save_checkpoint
    from dflash_lab.drafter.formats import import_speculators

    goal = _new_folder(options.output)
    drafter = import_speculators(options.folder, num_target_layers=options.layers)
    save_checkpoint(goal, drafter)
    print(f"{goal}: z-lab layout, {drafter.config.parameter_count:,} parameters")
    return 0


def merge(options: argparse.Namespace, extra: list[str]) -> int:
    """Join samples files, each sample once."""
    from dflash_lab.data.samples import merge_samples, provenance_path, read_provenance

    goal = Path(options.output)
    if goal.suffix != ".parquet":  # what made the samples lies beside them, as .json
        raise InputError(f"{goal}: samples files end in .parquet. Give such a name.")
    _refuse_taken(goal, provenance_path(goal))
    made = {path: read_provenance(path) for path in options.inputs}
    fraction = options.heldout_fraction if options.heldout_fraction != -1 else _same_fraction(made)
    report = merge_samples(options.inputs, goal, heldout_fraction=fraction)
    print(
        f"{goal}: {report.stored:,} samples, {report.heldout:,} of them held out "
        f"({report.duplicates:,} of {report.given:,} were there twice)"
    )
    return 0


def _same_fraction(made: dict[str, dict[str, Any]]) -> float:
    """Return the held-out share that all files were made with."""
    shares = {path: one.get("heldout_fraction") for path, one in made.items()}
    found = set(shares.values())
    if len(found) != 1 or not isinstance(fraction := found.pop(), int | float):
        listed = ", ".join(f"{path}: {share}" for path, share in shares.items())
        raise InputError(f"held-out shares differ ({listed}): say which one with --heldout-fraction.")
    return float(fraction)


def _new_folder(name: str) -> Path:
    """Return the path of a folder to write; `InputError` when something is there."""
    path = Path(name)
    if not (path.is_dir() and not any(path.iterdir())):
        _refuse_taken(path)
    return path


def _refuse_taken(*paths: Path) -> None:
    taken = [path for path in paths if path.exists()]
    if taken:
        moves = " && ".join(shlex.join(["mv", str(path), f"{path}.old"]) for path in taken)
        raise InputError(
            f"{taken[0]}: exists already, whole or left by a command that was killed. Give another name, or "
            f"move it away: {moves}"
        )
