"""More contexts from the same tokens: what a live target can teach beyond its own transcripts.

The target says what it would write after any text, so a drafter need not see only what it did write. Each
training sample gives `variants` documents: the user's turn is another sample's in half of them, the answer
begins at a random place (up to its middle) in three of ten, and a share of the tokens of turn and answer is
replaced by tokens drawn from the samples themselves. One forward of the target then marks what it would have
written itself: loss_mask is 1 where a token of turn or answer is its first choice after what stands before.
A slot counts while all slots up to it are marked, so every block that is trained on goes on greedily from its
context, as in decoding ("patient and consistent" distillation, arXiv 2106.05237, with text for images).

Held-out samples give nothing: they stay as they are, and a variant whose content hash would put it among them
is left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from dflash_lab.data.batching import plan_batches
from dflash_lab.data.samples import (
    Sample,
    content_hash,
    is_heldout,
    read_provenance,
    read_samples,
    write_samples,
)
from dflash_lab.models.load import Target
from dflash_lab.models.template import user_frame

log = logging.getLogger("quality")
OTHER_TURN, LATE_START = 0.5, 0.3  # shares of variants
TOKEN_BUDGET = 65_536  # of a forward
HEAD_ROWS = 8_192  # whose logits stand in memory at once


@dataclass(frozen=True)
class Flat:
    """Documents side by side: document i is tokens[starts[i] : starts[i + 1]]."""

    tokens: np.ndarray  # [T] i32
    starts: np.ndarray  # [n + 1] i64

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)


def augment(target: Target, path: Path, *, variants: int, seed: int, share: float = 0.05) -> dict[str, Any]:
    """Write augmented.parquet beside `path` (a samples file of one turn a sample): its samples, then
    `variants` documents of each that is trained on; return counts and seconds.
    """
    started = time.perf_counter()
    frame, made = read_samples(path), read_provenance(path)
    given = flat(frame)
    answer_starts = frame["response_start"].to_numpy().astype(np.int64)
    train = np.flatnonzero((frame["split"] == "train").to_numpy())
    documents, origins, free = vary(
        given, answer_starts, train, target.tokenizer, variants=variants, seed=seed, share=share
    )
    first = time.perf_counter()
    mask = free & chosen_by(target, documents)
    forward = time.perf_counter() - first
    fraction = made["heldout_fraction"]
    samples = [*samples_of(frame, given), *_variants(documents, mask, frame, origins, fraction)]
    facts = {
        "variants": variants,
        "replaced_share": share,
        "seed": seed,
        "documents": len(samples) - len(frame),
        "document_tokens": len(documents.tokens),
        "marked_share": round(float(mask.sum() / max(free.sum(), 1)), 4),
        "forward_seconds": round(forward, 2),
    }
    out = path.with_name("augmented.parquet")
    kept = {name: value for name, value in made.items() if name not in ("format", "counts", "checksum")}
    write_samples(out, samples, heldout_fraction=fraction, provenance={**kept, "augmented": facts})
    facts["seconds"] = round(time.perf_counter() - started, 2)
    log.info("%s: %s", out, facts)
    return facts


def flat(frame: pl.DataFrame) -> Flat:
    """The tokens of a samples frame."""
    tokens = frame["input_ids"].explode().cast(pl.Int32).to_numpy()
    return Flat(tokens, np.concatenate([[0], np.cumsum(frame["length"].to_numpy(), dtype=np.int64)]))


def samples_of(frame: pl.DataFrame, given: Flat) -> Iterator[Sample]:
    """The samples of a frame as they were given."""
    masks = frame["loss_mask"].explode().cast(pl.UInt8).to_numpy()
    for name, source, a, b in zip(
        frame["id"], frame["source"], given.starts[:-1], given.starts[1:], strict=True
    ):
        yield Sample(name, given.tokens[a:b], masks[a:b], source)


def vary(
    given: Flat,
    answer_starts: np.ndarray,
    train: np.ndarray,
    tokenizer: Any,
    *,
    variants: int,
    seed: int,
    share: float,
) -> tuple[Flat, np.ndarray, np.ndarray]:
    """Draw documents from the samples at rows `train` of `given`; return them, the rows [m, 2] that gave
    answer and turn, and free [T] bool: tokens of turns and answers, none of the template's.
    """
    rng = np.random.default_rng(seed)
    answer = np.repeat(train, variants)
    turn = np.where(rng.random(len(answer)) < OTHER_TURN, rng.choice(train, len(answer)), answer)
    late = np.where(rng.random(len(answer)) < LATE_START, rng.random(len(answer)), 0.0)
    skipped = (late * ((given.lengths - answer_starts)[answer] // 2)).astype(np.int64)
    # Two pieces a document: another's prompt whole, then the answer from `skipped` on.
    begins = np.stack([given.starts[turn], (given.starts[:-1] + answer_starts)[answer] + skipped], 1)
    sizes = np.stack([answer_starts[turn], (given.lengths - answer_starts)[answer] - skipped], 1)
    ends = np.cumsum(sizes.ravel())
    inside = np.arange(ends[-1]) - np.repeat(ends - sizes.ravel(), sizes.ravel())  # place in its piece
    tokens = given.tokens[np.repeat(begins.ravel(), sizes.ravel()) + inside]
    starts = np.concatenate([[0], ends[1::2]])

    opening, ending = (len(part) for part in user_frame(tokenizer))
    piece = np.repeat(sizes.ravel(), sizes.ravel())
    in_prompt = np.repeat(np.tile([True, False], len(answer)), sizes.ravel())
    free = ~in_prompt | ((inside >= opening) & (inside < piece - ending))
    special = np.asarray(tokenizer.all_special_ids)
    words = given.tokens[_tokens_at(given, train)]
    words = words[~np.isin(words, special)]
    replaced = free & ~np.isin(tokens, special) & (rng.random(len(tokens)) < share)
    tokens[replaced] = rng.choice(words, int(replaced.sum()))
    return Flat(tokens, starts), np.stack([answer, turn], 1), free


def _tokens_at(given: Flat, rows: np.ndarray) -> np.ndarray:
    """Indices of the tokens of documents `rows`."""
    sizes = given.lengths[rows]
    inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(given.starts[rows], sizes) + inside


@torch.no_grad()
def chosen_by(target: Target, documents: Flat, token_budget: int = TOKEN_BUDGET) -> np.ndarray:
    """Whether each token is the target's first choice after the ones before it in its document, [T] bool.

    Documents are padded on the right, so that causal attention never sees the padding; all of it stays on the
    target's device until the end.
    """
    device = target.device
    tokens = torch.from_numpy(documents.tokens.astype(np.int64)).to(device)
    starts, lengths = (torch.from_numpy(x).to(device) for x in (documents.starts[:-1], documents.lengths))
    chosen = torch.zeros(len(tokens), dtype=torch.bool, device=device)
    plan = plan_batches(documents.lengths, token_budget=token_budget, max_batch=4096)
    for batch, longest in zip(plan.batches, plan.longest.tolist(), strict=True):
        rows = torch.from_numpy(batch).to(device)
        steps = torch.arange(longest, device=device)
        where = (starts[rows, None] + steps).clamp(max=len(tokens) - 1)  # [B, L]
        ids = tokens[where]  # behind a document, whatever follows it: it is not looked at
        states = target.body(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        first = torch.cat([target.head.logits(part).argmax(-1) for part in states.split(HEAD_ROWS)])
        agrees = first.view(len(batch), longest - 1) == ids[:, 1:]
        real = steps[1:] < lengths[rows, None]
        chosen[where[:, 1:][real]] = agrees[real]
    return chosen.cpu().numpy()


def _variants(
    documents: Flat, mask: np.ndarray, frame: pl.DataFrame, origins: np.ndarray, fraction: float
) -> Iterator[Sample]:
    """The documents as samples; their ids name where answer and turn come from."""
    names, sources, mask = frame["id"].to_list(), frame["source"].to_list(), mask.astype(np.uint8)
    for number, (a, b) in enumerate(
        zip(documents.starts[:-1].tolist(), documents.starts[1:].tolist(), strict=True)
    ):
        answer, turn = origins[number]
        one = Sample(
            f"{names[answer]}~{names[turn]}~{number}", documents.tokens[a:b], mask[a:b], sources[answer]
        )
        if mask[a:b].any() and not is_heldout(content_hash(one.input_ids, one.loss_mask), fraction):
            yield one
