"""Tokenised samples on disk, one Parquet row a sample; and the item that a drafter is given."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import xxhash

from dflash_lab import files
from dflash_lab.data.records import BadRecord
from dflash_lab.errors import InputError, StoreError, naming, reading

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FeatureItem:
    """One sample of L tokens with the target's states, K taps of width H concatenated in id order, as feature
    stores and live targets give it.
    """

    hash: str  # content_hash of the sample, 32 hex digits
    input_ids: Tensor  # [L] i32
    loss_mask: Tensor  # [L] u8, 1 on assistant tokens
    taps: Tensor  # [L, K*H]
    final: Tensor | None  # [L, H], output of the last decoder layer before the final norm
    heldout: bool

    def __post_init__(self) -> None:
        length = self.input_ids.shape[0]
        for name in ("loss_mask", "taps", "final"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape[0] != length:
                raise ValueError(f"sample {self.hash}: {name} has {tensor.shape[0]} rows for {length} tokens")

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])


# ---- What rows of a samples file must hold, told with row and column when they do not ----
# A Parquet file can be whole and its values still wrong: edited by hand, written by another program, or with
# a byte flipped on the disk (pages carry no checksum). A split that is neither ``train`` nor ``heldout``
# would be trained on without anybody's knowing; tokens that are not those of their hash would stand in the
# feature store under a name that is not theirs. So every reader of rows comes through `checked`.

# column -> (what its values must be as a polars mask of the wrong ones, words for a wrong value)
_WRONG: dict[str, tuple[Callable[[pl.Series], pl.Series], str]] = {
    "split": (lambda s: ~s.is_in(["train", "heldout"]), "{!r}, which is neither 'train' nor 'heldout'"),
    "content_hash": (lambda s: ~s.str.contains("^[0-9a-f]{32}$"), "{!r}, which is not 32 hex digits"),
    "length": (lambda s: s < 0, "{}"),
    "response_start": (lambda s: s < 0, "{}"),
    "loss_mask": (lambda s: s.list.max().fill_null(0) > 1, "values other than 0 and 1"),
}


def content_hash(input_ids: Any, loss_mask: Any) -> str:
    """Return the xxh3-128 (hex) of the little-endian int32 ids followed by the uint8 mask."""
    digest = xxhash.xxh3_128(np.ascontiguousarray(input_ids, dtype="<i4").data)
    digest.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).data)
    return digest.hexdigest()


def checked(frame: pl.DataFrame, path: Path | str, rows: np.ndarray | None = None) -> pl.DataFrame:
    """Return `frame`, some columns and rows of the samples file at `path`, when every value is one that a
    samples file may hold. `rows` [N] are its places in the file, if not all.

    Raises `InputError` with row, column and value of the first that is not.
    """
    for name in frame.columns:
        _refuse(frame, path, rows, name, frame[name].is_null(), "no value")
        if isinstance(frame.schema[name], pl.List) and frame[name].explode(empty_as_null=False).null_count():
            inner = frame[name].list.eval(pl.element().is_null()).list.any()
            _refuse(frame, path, rows, name, inner, "a missing value within it")
        if name in _WRONG:
            wrong, words = _WRONG[name]
            _refuse(frame, path, rows, name, wrong(frame[name]), words)
    for name in ("input_ids", "loss_mask"):
        if {name, "length"} <= set(frame.columns):
            other = frame[name].list.len() != frame["length"]
            _refuse(frame, path, rows, name, other, "another length than its `length` says")
    if {"input_ids", "loss_mask", "length", "content_hash"} <= set(frame.columns):
        tokens = FlatTokens(frame)
        hashes = [content_hash(*tokens.of(row)) for row in range(frame.height)]
        words = "{!r}, which is not the hash of its tokens and mask (they were changed, or are damaged)"
        _refuse(frame, path, rows, "content_hash", pl.Series(hashes) != frame["content_hash"], words)
    return frame


def _refuse(
    frame: pl.DataFrame, path: Path | str, rows: np.ndarray | None, name: str, wrong: pl.Series, words: str
) -> None:
    """Raise `InputError` about column `name` if any row of it is `wrong`."""
    places = wrong.arg_true()
    if not len(places):
        return
    first = int(places[0])
    row = first if rows is None else int(rows[first])
    sample = f" (sample {frame['id'][first]!r})" if "id" in frame.columns and name != "id" else ""
    more = f" ({len(places) - 1:,} more rows are like it)" if len(places) > 1 else ""
    found = words.format(frame[name][first])
    raise InputError(
        f"{path}: row {row + 1}{sample}: {name} has {found}{more}. Mend the file, or make it again with "
        "prepare."
    )


# ---- Samples on disk: exact duplicates once, the held-out split decided by content ----
# The hash of tokens and mask is a sample's identity for duplicates, for resuming an extraction and for the
# split: it falls on the same side in every run and in every merge. Rows are written in batches of bounded
# size and joined by a streaming pass: memory holds the hashes (about 100 bytes a sample), never the tokens.

SCHEMA: dict[str, Any] = {
    "id": pl.String,
    "input_ids": pl.List(pl.Int32),
    "loss_mask": pl.List(pl.UInt8),
    "length": pl.Int32,
    "response_start": pl.Int32,
    "source": pl.String,
    "content_hash": pl.String,
    "split": pl.String,
}
FORMAT = 1
# Version of what is masked and how fields are rendered (`models/template.py`). Raised whenever the same
# records would come out with other ids or another mask: older samples are not what the target says.
MASK_RULES = 2
_ROW_GROUP = 8192
_BATCH_TOKENS = 4 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One tokenised conversation: `input_ids` [L], `loss_mask` [L] with 1 on what the target is to say."""

    id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    source: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_ids", np.ascontiguousarray(self.input_ids, dtype="<i4"))
        object.__setattr__(self, "loss_mask", np.ascontiguousarray(self.loss_mask, dtype=np.uint8))
        if self.input_ids.ndim != 1 or self.input_ids.shape != self.loss_mask.shape:
            raise ValueError(
                f"sample {self.id}: a mask of {self.loss_mask.shape} for {self.input_ids.shape} tokens"
            )
        if self.loss_mask.size and self.loss_mask.max() > 1:
            raise ValueError(
                f"sample {self.id}: the loss mask holds {self.loss_mask.max()}, not only 0 and 1"
            )


@dataclass
class WriteReport:
    """What `write_samples` did; ``given == stored + duplicates``."""

    given: int = 0
    stored: int = 0
    duplicates: int = 0
    heldout: int = 0
    tokens: int = 0
    answer_tokens: int = 0
    longest: int = 0
    duplicate_ids: list[str] = field(default_factory=list)  # the first thousand


def is_heldout(hash_hex: str, fraction: float) -> bool:
    """Return whether the sample with this content hash is held out; a larger fraction only adds samples."""
    return int(hash_hex[:16], 16) < fraction * 2**64


def fitted(ids: list[int], mask: list[int], limit: int, over_long: str) -> tuple[list[int], list[int]]:
    """Return ids [L] and mask [L] within `limit` tokens (0: none): as they are, or cut with ``truncate``.

    Raises `BadRecord` when the sample is too long and not to be cut, or holds no token to train on.
    """
    if limit and len(ids) > limit:
        if over_long == "drop":
            raise BadRecord("too long", f"{len(ids):,} tokens; max_length is {limit:,}")
        if any(mask) and not any(mask[:limit]):
            raise BadRecord("too long", f"the answer begins after max_length={limit:,} tokens")
        ids, mask = ids[:limit], mask[:limit]
    if not any(mask):
        raise BadRecord("no answer", "the template shows no assistant token of this conversation")
    return ids, mask


def write_samples(
    path: Path | str, samples: Iterable[Sample], *, heldout_fraction: float, provenance: Mapping[str, Any]
) -> WriteReport:
    """Write `samples` to `path` (Parquet) and what made them to the `.json` beside it; both atomic.

    `provenance` must be plain JSON; the report's counts and the file's checksum are added to it. Raises
    `InputError` if the fraction is not in [0, 1).
    """
    path = Path(path)
    if not 0 <= heldout_fraction < 1:
        raise InputError(f"heldout_fraction={heldout_fraction}: give a share from 0 up to, but not, 1.")
    report = WriteReport()
    files.make_folder(path.parent)
    with (
        naming(path),
        tempfile.TemporaryDirectory(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent) as folder,
    ):
        parts: list[Path] = []
        for rows in _batches(samples, heldout_fraction, report):
            parts.append(Path(folder) / f"{len(parts):06d}.parquet")
            pl.DataFrame(rows, schema=SCHEMA).write_parquet(parts[-1], row_group_size=_ROW_GROUP)
        joined = pl.scan_parquet(parts, glob=False) if parts else pl.LazyFrame(schema=SCHEMA)
        with files.atomic_path(path) as temporary:
            joined.sink_parquet(temporary, row_group_size=_ROW_GROUP, maintain_order=True)
    counts = {name: value for name, value in vars(report).items() if name != "duplicate_ids"}
    made = {"format": FORMAT, "heldout_fraction": heldout_fraction, "counts": counts}
    files.write_json(provenance_path(path), {**made, "checksum": files.checksum(path), **provenance})
    return report


def _batches(samples: Iterable[Sample], fraction: float, report: WriteReport) -> Iterator[dict[str, list]]:
    seen: set[bytes] = set()
    rows: dict[str, list] = {name: [] for name in SCHEMA}
    tokens = 0
    for sample in samples:
        report.given += 1
        name = content_hash(sample.input_ids, sample.loss_mask)
        key = bytes.fromhex(name)
        if key in seen:
            report.duplicates += 1
            if len(report.duplicate_ids) < 1000:
                report.duplicate_ids.append(sample.id)
            continue
        seen.add(key)
        length = len(sample.input_ids)
        answered = int(sample.loss_mask.sum())
        heldout = is_heldout(name, fraction)
        report.stored += 1
        report.heldout += heldout
        report.tokens += length
        report.answer_tokens += answered
        report.longest = max(report.longest, length)
        first = int(sample.loss_mask.argmax()) if answered else length
        split = "heldout" if heldout else "train"
        values = (sample.id, sample.input_ids, sample.loss_mask, length, first, sample.source, name, split)
        for column, value in zip(rows.values(), values, strict=True):
            column.append(value)
        tokens += length
        if tokens >= _BATCH_TOKENS or len(rows["id"]) >= _ROW_GROUP:
            yield rows
            rows, tokens = {name: [] for name in SCHEMA}, 0
    if rows["id"]:
        yield rows


def provenance_path(path: Path | str) -> Path:
    """Return where the provenance of a samples file lies: `samples.parquet` -> `samples.json`."""
    if not Path(path).name:
        raise InputError(f"{path}: a folder, no samples file. Give a .parquet file of `prepare` or `merge`.")
    return Path(path).with_suffix(".json")


def read_provenance(path: Path | str) -> dict[str, Any]:
    """Return what made a samples file; `StoreError` if that is missing, of a version this code does not know,
    or about other bytes than the file holds.
    """
    beside = provenance_path(path)
    if not beside.is_file():
        raise StoreError(f"{beside} is missing: it says what made {path}. Run prepare (or merge) again.")
    made = files.read_json(beside)
    if not isinstance(made, dict) or made.get("format") != FORMAT:
        found = made.get("format") if isinstance(made, dict) else None
        raise StoreError(f"{beside}: format {found!r}, this version reads {FORMAT}. Run prepare again.")
    if Path(path).exists() and made.get("checksum") != files.checksum(path):
        raise StoreError(
            f"{beside} is not about {path}: the checksum in it is another. Put the two files of one run side "
            "by side, or run prepare again."
        )
    return made


def old_rules(path: Path | str) -> int | None:
    """Return the version of the mask rules that a samples file was rendered by, if it is not today's; None
    also for samples that say nothing of a template (made by another program)."""
    beside = provenance_path(path)
    made = files.read_json(beside) if beside.is_file() else {}
    if not isinstance(made, dict) or not made.get("template_hash"):
        return None
    rules = made.get("mask_rules", 1)
    return None if rules == MASK_RULES else rules


def occurs(path: Path | str, token: int) -> bool:
    """Return whether a token stands in any sample, reading that column only."""
    with reading_samples(path):
        found = scan_samples(path).select(pl.col("input_ids").list.contains(token).any())
        return bool(found.collect(engine="streaming").item())


def reading_samples(path: Path | str) -> contextlib.AbstractContextManager[None]:
    """Stand around whatever collects rows of a samples file: damage shows only when its pages are read."""
    return reading(path, "It is not a whole Parquet file: run prepare again.")


def scan_samples(path: Path | str) -> pl.LazyFrame:
    """Open a samples file lazily and check its columns; only the columns selected are read."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such samples file. Run prepare first, or give another path.")
    with reading_samples(path):
        frame = pl.scan_parquet(path, glob=False)
        found = frame.collect_schema()
    wrong = [
        f"{name} is {found.get(name, 'missing')}, not {kind}"
        for name, kind in SCHEMA.items()
        if found.get(name) != kind
    ]
    if wrong:
        raise StoreError(f"{path}: not a samples file: {'; '.join(wrong)}. Make it with prepare.")
    return frame


def read_lengths(path: Path | str) -> np.ndarray:
    """Return the token count of every sample in file order, [N] i32, reading that column only."""
    with reading_samples(path):
        return checked(scan_samples(path).select("length").collect(), path).to_series().to_numpy()


def read_samples(path: Path | str, rows: Iterable[int] | None = None) -> pl.DataFrame:
    """Return all samples, or those at `rows` (file order positions) in that order."""
    frame = scan_samples(path)
    wanted = None if rows is None else np.asarray(list(rows), dtype=np.int64)
    with reading_samples(path):
        found = frame.collect(engine="in-memory") if wanted is None else _rows(frame, path, wanted)
    return checked(found, path, wanted)


class FlatTokens:
    """Token ids and loss masks of the samples of a frame in two flat arrays: 5 bytes a token."""

    def __init__(self, frame: pl.DataFrame) -> None:
        """`frame` as `read_samples` gives it."""
        self._starts = np.concatenate([[0], np.cumsum(frame["length"].to_numpy(), dtype=np.int64)])
        self._ids = frame["input_ids"].explode(empty_as_null=False).cast(pl.Int32).to_numpy(writable=True)
        self._mask = frame["loss_mask"].explode(empty_as_null=False).cast(pl.UInt8).to_numpy(writable=True)

    def of(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return input_ids (int32) and loss_mask (uint8) of the sample in row `number`, as views."""
        here = slice(self._starts[number], self._starts[number + 1])
        return self._ids[here], self._mask[here]

    def id_range(self) -> tuple[int, int]:
        """The smallest and the largest token id in use, (0, 0) without samples."""
        return (int(self._ids.min()), int(self._ids.max())) if len(self._ids) else (0, 0)


def _rows(frame: pl.LazyFrame, path: Path | str, wanted: np.ndarray) -> pl.DataFrame:
    count = frame.select(pl.len()).collect().item()
    if wanted.size and not (wanted.min() >= 0 and wanted.max() < count):
        raise InputError(f"{path}: rows {wanted.min()} to {wanted.max()} asked for, the file has {count}.")
    found, positions = [frame.head(0).collect()], [wanted[:0]]
    for group in np.unique(wanted // _ROW_GROUP).tolist():  # reads groups touched, holds rows asked for
        inside = np.flatnonzero(wanted // _ROW_GROUP == group)
        part = frame.slice(group * _ROW_GROUP, _ROW_GROUP).collect(engine="in-memory")
        found.append(part[(wanted[inside] - group * _ROW_GROUP).tolist()])
        positions.append(inside)
    return pl.concat(found)[np.argsort(np.concatenate(positions)).tolist()]


def merge_samples(
    inputs: Iterable[Path | str], output: Path | str, *, heldout_fraction: float
) -> WriteReport:
    """Join samples files made with one tokenizer and template; a sample that is in several is stored once.

    Raises `InputError` if they were made by different tokenizers or templates.
    """
    paths = [Path(item) for item in inputs]
    if absent := [path for path in paths if not path.is_file()]:
        raise InputError(
            f"{absent[0]}: no samples file is there. Give the .parquet files of `prepare` or `merge`."
        )
    made = [read_provenance(item) for item in paths]
    same = ("tokenizer_hash", "template_hash", "thinking", "date", "mask_rules")
    for path, one in zip(paths, made, strict=True):
        differs = [name for name in same if one.get(name) != made[0].get(name)]
        if differs:
            raise InputError(
                f"{path} and {paths[0]} differ in {', '.join(differs)}: their tokens cannot be mixed."
            )
    samples = (sample for path in paths for sample in _read_all(path))
    kept = {name: made[0][name] for name in same if name in made[0]} if made else {}
    return write_samples(
        output,
        samples,
        heldout_fraction=heldout_fraction,
        provenance={**kept, "merged": [str(path) for path in paths]},
    )


def _read_all(path: Path) -> Iterator[Sample]:
    """Yield every sample of a file, a thousand in memory."""
    done = 0
    with reading_samples(path):
        for batch in scan_samples(path).collect_batches(chunk_size=1024, maintain_order=True):
            places = np.arange(done, done := done + batch.height)
            for row in checked(batch, path, places).iter_rows(named=True):
                ids, mask = np.asarray(row["input_ids"]), np.asarray(row["loss_mask"])
                yield Sample(row["id"], ids, mask, row["source"])
