"""Files under the knife: `kill_child.py FOLDER` kills each case before each of its file operations and checks
what is left; prints the number of kills by case.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)  # no thread pool may exist before a fork
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
from support.killing import ended_well, forked, killed_everywhere  # noqa: E402
from support.tiny_drafters import (  # noqa: E402
    learner,
    records,
    tiny_config,
    tiny_drafter,
    tiny_head,
    tiny_items,
    tiny_settings,
)

from dflash_lab import cli  # noqa: E402
from dflash_lab.data.samples import Sample, read_provenance, read_samples, write_samples  # noqa: E402
from dflash_lab.drafter.checkpoint import copy_checkpoint, load_checkpoint, save_checkpoint  # noqa: E402
from dflash_lab.drafter.formats import import_speculators  # noqa: E402
from dflash_lab.drafter.train import train  # noqa: E402
from dflash_lab.errors import InputError, LabError, StoreError  # noqa: E402
from dflash_lab.files import read_json  # noqa: E402

MADE = {"tokenizer_hash": "t", "template_hash": "m", "thinking": False}
OURS = tiny_config(layer_types=("full_attention",) * 3)  # the speculators layout cannot say a mixture
OTHER = dataclasses.replace(OURS, block_size=6, tap_ids=(0, 2))  # the same tensors, another meaning


def same(drafter, wanted) -> bool:
    tensors = drafter.state_dict()
    return drafter.config == wanted.config and all(
        torch.equal(tensor, tensors[name]) for name, tensor in wanted.state_dict().items()
    )


def loaded(load, folder: Path):
    """The drafter there, or None when the loader says that there is none."""
    try:
        return load(folder)
    except InputError:
        return None


def two_files(folder: Path) -> None:
    for name, numbers in (("a", range(20)), ("b", range(10, 30))):
        rows = [Sample(f"{name}:{n}", np.asarray([n, 2, 3]), np.asarray([0, 1, 1]), name) for n in numbers]
        write_samples(folder / f"{name}.parquet", rows, heldout_fraction=0.5, provenance=MADE)


def merge(folder: Path) -> None:
    files = [str(folder / f"{name}.parquet") for name in ("all", "a", "b")]
    assert cli.main(["merge", *files]) == 0


def merged_or_not(folder: Path) -> None:
    goal = folder / "all.parquet"
    assert read_samples(folder / "a.parquet").height == read_samples(folder / "b.parquet").height == 20
    if goal.exists():
        assert read_samples(goal).height == 30, "a part was taken for the whole"
        try:
            assert read_provenance(goal)["counts"]["stored"] == 30
        except StoreError as error:
            assert "merge" in str(error)
    for name in ("all.parquet", "all.json"):
        (folder / name).unlink(missing_ok=True)
    merge(folder)


def a_drafter(folder: Path) -> None:
    save_checkpoint(folder / "drafter", tiny_drafter(OURS))


def export(folder: Path) -> None:
    words = ["export", str(folder / "drafter"), str(folder / "out"), "--target", "a/b"]
    assert cli.main(words) == 0


def exported_or_not(folder: Path) -> None:
    out = loaded(import_speculators, folder / "out")
    assert out is None or same(out, tiny_drafter(OURS))
    try:
        load_checkpoint(folder / "out")
    except LabError:
        return
    raise AssertionError("half an export is taken for a checkpoint of our own layout")


def an_export(folder: Path) -> None:
    a_drafter(folder)
    export(folder)


def import_it(folder: Path) -> None:
    assert cli.main(["import", str(folder / "out"), str(folder / "back")]) == 0


def imported_or_not(folder: Path) -> None:
    back = loaded(load_checkpoint, folder / "back")
    assert back is None or same(back, tiny_drafter(OURS))


def two_drafters(folder: Path) -> None:
    save_checkpoint(folder / "new", tiny_drafter(OTHER, seed=1))
    a_drafter(folder)


def replace(folder: Path) -> None:
    copy_checkpoint(folder / "new", folder / "drafter")


def old_or_new_or_none(folder: Path) -> None:
    found = loaded(load_checkpoint, folder / "drafter")
    assert found is None or same(found, tiny_drafter(OURS)) or same(found, tiny_drafter(OTHER, seed=1))
    replace(folder)
    assert same(load_checkpoint(folder / "drafter"), tiny_drafter(OTHER, seed=1))


def run(folder: Path) -> None:
    """Train, or go on, and compare with the run that was not killed."""
    settings = tiny_settings(max_steps=3, accumulate=1, log_every=2, eval_every=2, checkpoint_every=1)
    drafter = learner()
    report = train(tiny_items(), tiny_head(), drafter, settings, folder=folder / "run")
    names = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000003"], f"left over: {names}"
    kept = read_json(report.best / "metrics.json")
    told = [records(folder / "run", kind) for kind in ("step", "train", "heldout")]
    values = [tensor.sum().item() for tensor in load_checkpoint(report.best).state_dict().values()]
    values += [tensor.sum().item() for tensor in drafter.state_dict().values()]
    found = json.dumps([told, report.best_step, kept, values])
    wanted = folder.parent / "uninterrupted.json"
    if not wanted.exists():
        wanted.write_text(found)
    assert found == wanted.read_text(), "the resumed run is another one"


def nothing(folder: Path) -> None:
    pass


CASES = {
    "merge": (two_files, merge, merged_or_not),
    "export": (a_drafter, export, exported_or_not),
    "import": (an_export, import_it, imported_or_not),
    "replace": (two_drafters, replace, old_or_new_or_none),
    "train": (nothing, run, run, 17),  # not before each operation: every try trains
}


if __name__ == "__main__":
    root = Path(sys.argv[1])
    (root / "train" / "whole").mkdir(parents=True)
    ended_well(forked(run, root / "train" / "whole"), "the uninterrupted run")
    print(json.dumps({name: killed_everywhere(root / name, *case) for name, case in CASES.items()}))
