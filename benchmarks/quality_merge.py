"""Several folders of the study's data, written side by side with different seeds, as one.

What is measured with stays apart: held-out and HumanEval files are the first folder's, and no training sample
may share its prompt with any of them, or with a held-out sample of any folder; nor may a document made of
such a sample (its id names its two origins).
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
from quality_augment import flat, samples_of
from quality_data import check_data

from dflash_lab.data.samples import Sample, read_provenance, read_samples, write_samples
from dflash_lab.errors import InputError

log = logging.getLogger("quality")
TRAINING = ("samples", "whole", "augmented")
MEASURED = ("heldout", "humaneval")
Prompt = tuple[int, ...]


def merge_data(folders: list[Path], out: Path) -> dict[str, Any]:
    """Write `out` from `folders`: each training file that all of them have, and the first one's measured
    files; return counts and seconds, each part's own among them. `InputError` for a folder that `quality.py
    data` did not write, that is given twice, or that is `out` itself.
    """
    started = time.perf_counter()
    places = [folder.resolve() for folder in folders]
    if twice := [folder for folder, place in zip(folders, places) if places.count(place) > 1]:
        raise InputError(
            f"--data {twice[-1]}: given twice; its samples would count as two parts. Give it once."
        )
    if out.resolve() in places:
        raise InputError(f"--out {out}: is one of --data and would be written over. Give a new folder.")
    for number, folder in enumerate(folders):
        check_data(folder, ("samples", *MEASURED) if number == 0 else ("samples",))
    frames = [read_samples(folder / "samples.parquet") for folder in folders]
    asked = [prompts_by_id(frame) for frame in frames]
    shut = {
        prompt
        for name in MEASURED
        for prompt in prompts_by_id(read_samples(folders[0] / f"{name}.parquet")).values()
    }
    made = [read_provenance(folder / "samples.parquet") for folder in folders]
    facts: dict[str, Any] = {"files": {}, "parts": [{"folder": str(f), **m} for f, m in zip(folders, made)]}
    fraction = made[0]["heldout_fraction"]
    for name in TRAINING:
        paths = [folder / f"{name}.parquet" for folder in folders]
        if not all(path.is_file() for path in paths):
            continue
        parts = frames if name == "samples" else [read_samples(path) for path in paths]
        closed = shut | {prompt for part, known in zip(parts, asked) for prompt in _heldout(part, known)}
        kept = [part.filter(_open_rows(part, known, closed)) for part, known in zip(parts, asked)]
        beside = {"parts": [read_provenance(path) for path in paths]}
        once = pl.concat([part.select("content_hash", "length") for part in kept]).unique("content_hash")
        report = write_samples(
            out / f"{name}.parquet",
            _renamed(kept),
            heldout_fraction=fraction,
            provenance={"tokens": int(once["length"].sum()), "samples": len(once), **beside},
        )
        facts["files"][name] = {
            "given": sum(map(len, parts)),
            "prompt_held_out": sum(map(len, parts)) - sum(map(len, kept)),
            "duplicates": report.duplicates,
            "stored": report.stored,
            "tokens": report.tokens,
        }
    for name in MEASURED:
        for suffix in (".parquet", ".json"):
            shutil.copy(folders[0] / (name + suffix), out)
    facts["seconds"] = round(time.perf_counter() - started, 2)
    log.info("merged: %s, %s s", facts["files"], facts["seconds"])
    return facts


def prompts_by_id(frame: pl.DataFrame) -> dict[str, Prompt]:
    """Id of each sample of one turn -> the tokens before its answer."""
    prompts = frame.select(pl.col("input_ids").list.head(pl.col("response_start"))).to_series().to_list()
    return dict(zip(frame["id"].to_list(), map(tuple, prompts), strict=True))


def _origins(name: str) -> list[str]:
    """Ids of the samples that a sample is, or was made of."""
    return name.split("~")[:2]


def _heldout(part: pl.DataFrame, known: dict[str, Prompt]) -> Iterator[Prompt]:
    for name in part.filter(pl.col("split") == "heldout")["id"]:
        yield from (known[origin] for origin in _origins(name))


def _open_rows(part: pl.DataFrame, known: dict[str, Prompt], closed: set[Prompt]) -> pl.Series:
    """Rows [n] bool that stay: held-out ones, and those none of whose origins' prompts is in `closed`."""
    barred = {name for name, prompt in known.items() if prompt in closed}
    stays = [
        split == "heldout" or barred.isdisjoint(_origins(name))
        for name, split in zip(part["id"], part["split"], strict=True)
    ]
    return pl.Series(stays, dtype=pl.Boolean)


def _renamed(parts: list[pl.DataFrame]) -> Iterator[Sample]:
    """All samples, their ids told apart by the folder's number."""
    for number, part in enumerate(parts):
        for one in samples_of(part, flat(part)):
            yield Sample(f"{number}/{one.id}", one.input_ids, one.loss_mask, one.source)
