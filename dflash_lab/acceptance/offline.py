"""Acceptance from stored answers, with no target forward: draft a block at every answer token and compare.

The tapped states in the feature store are all that a drafter needs of the target, and the stored answer is
what the target would have said (exactly so when it was generated greedily). One document's context keys and
values are computed once; its anchors are then drafted in chunks that keep the logits [chunk, B-1, V] within a
fixed number of elements.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch

from dflash_lab.acceptance.offline_report import OfflineReport
from dflash_lab.acceptance.proposals import Draft
from dflash_lab.acceptance.tree_rank import accepted_by_budget
from dflash_lab.data.items import FeatureItem
from dflash_lab.drafter.attention import dense_attend, row_layout
from dflash_lab.drafter.model import ContextKeys, Drafter
from dflash_lab.errors import InputError
from dflash_lab.target.head import TargetHead

logger = logging.getLogger(__name__)
BUDGETS = (16, 32, 64, 128, 256, 512, 1024)
TOP_K = (1, 2, 4, 8, 16)
Columns = dict[str, np.ndarray]


@torch.no_grad()
def offline(
    items: Iterable[FeatureItem],
    head: TargetHead,
    drafter: Drafter,
    *,
    block_size: int | None = None,
    budgets: Sequence[int] = BUDGETS,
    top_k: Sequence[int] = TOP_K,
    temperatures: Sequence[float] = (),
    chunk_elements: int = 0,
    on_item: Callable[[int], None] | None = None,
) -> OfflineReport:
    """Draft at every answer token of `items` and return the report. Runs on the drafter's device.

    temperatures: also give the expected accepted drafts of rejection sampling at these temperatures, sum over
    k of prod over j <= k of (1 - TV(p_j, q_j)), from the items' final states; plain DFlash only.
    chunk_elements: logits held at once; 0: 128 MiB of fp32, on CUDA 512 MiB. on_item(tokens) is called after
    each item. An item with states that are not numbers is named in the log and left out. Raises `InputError`
    when no item has an answer of at least two tokens.
    """
    size = drafter.config.block_size if block_size is None else block_size
    budgets, top_k = tuple(sorted(set(budgets))), tuple(sorted(set(top_k)))
    if size < 2 or any(b < 1 for b in budgets):
        raise InputError(f"block_size {size} must be at least 2 and tree budgets {list(budgets)} positive.")
    if temperatures and drafter.candidate_selector is not None:
        raise InputError(
            "temperatures: expected acceptance is known for plain DFlash drafts only, not DFlash 2's."
        )
    chunk_elements = chunk_elements or 1 << (27 if head.weight.is_cuda else 25)
    chunk = max(1, chunk_elements // ((size - 1) * head.weight.shape[0] * (2 if temperatures else 1)))
    frames, counts, answers = [], np.zeros((4, size - 1), np.int64), 0
    for item in items:
        if not all(states.isfinite().all() for states in (item.taps, item.final) if states is not None):
            logger.warning("sample %s is left out: its stored states are not numbers", item.hash)
            continue
        ids = item.input_ids.to(head.weight.device).long()
        segments = answer_segments(item.loss_mask)
        context = Context(drafter, item.taps.to(head.weight.device)) if segments else None
        for start, stop in segments:
            assert context is not None
            teacher = _teacher(item, head, start, stop) if temperatures else None
            plan = _Plan(size, budgets, top_k, tuple(temperatures), chunk)
            columns, seen = _answer(context, head, ids, start, stop, plan, teacher)
            frames.append(_frame(columns, item.hash, answers, start, stop))
            counts += seen
            answers += 1
        if on_item is not None:
            on_item(len(item))
    if not frames:
        raise InputError("no item has an answer of two tokens or more: nothing can be drafted and compared.")
    slots = pl.DataFrame(
        {"slot": np.arange(1, size), **dict(zip(("valid", "hits", "reached", "held"), counts))}
    )
    return OfflineReport(pl.concat(frames), slots, size, budgets, top_k, tuple(temperatures))


def answer_segments(loss_mask: torch.Tensor) -> list[tuple[int, int]]:
    """Return [start, stop) of every run of assistant tokens with at least one token to draft after its
    first."""
    mask = np.concatenate([[0], loss_mask.cpu().numpy().astype(np.int8), [0]])
    edges = np.diff(mask)
    runs = zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist())
    return [(start, stop) for start, stop in runs if stop - start >= 2]


class Context:
    """A document's context keys and values, from which blocks are drafted at any of its positions."""

    def __init__(self, drafter: Drafter, taps: torch.Tensor) -> None:
        self.drafter = drafter
        self.length = len(taps)
        ctx = drafter.context(taps.to(drafter.fc.weight.dtype))
        angles = drafter.angles(torch.arange(self.length, device=taps.device), ctx.dtype)
        layers: Any = drafter.layers
        self._contexts = [ContextKeys(*layer.self_attn.keys_values(ctx, angles)) for layer in layers]

    def blocks(self, anchors: list[int], embeddings: torch.Tensor, *, visible_shift: int = 0) -> torch.Tensor:
        """Hidden states [A, B, H] of blocks at `anchors` (rising), from raw embedding rows [A, B, H].

        visible_shift: let blocks see that many more context positions than those before their anchor (a
        diagnosis).
        """
        layout = row_layout([anchors], [self.length], embeddings.shape[1])
        layout = layout.map(lambda index: index.to(embeddings.device))
        angles = self.drafter.angles(layout.slot_positions, self.drafter.fc.weight.dtype)
        if visible_shift:
            layout = replace(layout, anchors=layout.anchors + visible_shift)
        attends = dense_attend(layout)
        h = self.drafter.scaled(embeddings).to(self.drafter.fc.weight.dtype)
        for layer, context in zip(self.drafter.blocks(), self._contexts):
            h = layer(h, angles, context, attends(layer.mask))
        return self.drafter.norm(h)


class _Plan(NamedTuple):
    """What is measured at every anchor, and how many anchors at a time."""

    block_size: int
    budgets: tuple[int, ...]
    top_k: tuple[int, ...]
    temperatures: tuple[float, ...]
    chunk: int


def _teacher(item: FeatureItem, head: TargetHead, start: int, stop: int) -> torch.Tensor:
    """Return the target's logits [n, V] for the answer's tokens after its first: those at start .. stop-2."""
    if item.final is None:
        raise InputError(
            "temperatures need the target's final states: extract with store_final, or give none."
        )
    final = item.final[start : stop - 1].to(head.weight.device, head.weight.dtype)
    return head.logits(head.normed(final))


def _answer(
    context: Context,
    head: TargetHead,
    ids: torch.Tensor,
    start: int,
    stop: int,
    plan: _Plan,
    teacher: torch.Tensor | None,
) -> tuple[Columns, np.ndarray]:
    """Draft at every position of one answer [start, stop) but its last; return columns and slot counts [4,
    B-1].
    """
    drafter = context.drafter
    size = plan.block_size
    parts: list[Columns] = []
    counts = np.zeros((4, size - 1), np.int64)
    padded = torch.cat([ids[:stop], ids.new_full((size,), -1)])
    for low in range(start, stop - 1, plan.chunk):
        anchors = torch.arange(low, min(low + plan.chunk, stop - 1), device=ids.device)
        labels = padded[anchors[:, None] + torch.arange(1, size, device=ids.device)]  # [A, L], -1: past end
        block = torch.full((len(anchors), size), drafter.config.mask_token_id, device=ids.device)
        block[:, 0] = ids[anchors]
        hidden = context.blocks(anchors.tolist(), head.embed(block))[:, 1:].to(head.weight.dtype)
        logits = drafter.logits(hidden, head.weight)
        columns, seen = _compare(drafter, hidden, logits, block[:, 0], labels, plan)
        if teacher is not None:
            rows = (anchors[:, None] - start + torch.arange(size - 1, device=ids.device)).clamp_max(
                len(teacher) - 1
            )
            for temperature in plan.temperatures:
                expected = _expected(logits, teacher[rows], labels >= 0, temperature)
                columns[f"sampled_{temperature:g}"] = expected.cpu().numpy()
        parts.append(columns)
        counts += seen
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, counts


def _expected(
    logits: torch.Tensor, teacher: torch.Tensor, valid: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return [A]: expected accepted drafts of rejection sampling, given the answer's own tokens before
    each slot.
    """
    q = torch.softmax(logits.float() / temperature, -1)
    p = torch.softmax(teacher.float() / temperature, -1)
    overlap = torch.minimum(p, q).sum(-1).nan_to_num(0.0)  # logits that are not numbers draft nothing
    return (overlap * valid).cumprod(-1).sum(-1)


def _compare(
    drafter: Drafter,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    anchors: torch.Tensor,
    labels: torch.Tensor,
    plan: _Plan,
) -> tuple[Columns, np.ndarray]:
    """Hold drafts [A, L, V] against the answer's tokens `labels` [A, L]."""
    log_probs = torch.log_softmax(logits.float(), -1)
    valid = labels >= 0
    selector = drafter.candidate_selector
    drafts = logits.argmax(-1) if selector is None else selector.select(hidden, logits, anchors)[0]
    own = log_probs.gather(-1, labels.clamp_min(0)[..., None])
    drafted = valid & ~own[..., 0].isnan()  # of logits that are not numbers, no token is above the label's
    hits = (drafts == labels) & drafted
    ranks = (log_probs > own).sum(-1).masked_fill(~drafted, log_probs.shape[-1])  # 0: the most likely token
    accepted = _streak(hits)
    columns = {"accepted": accepted, **{f"top_{k}": _streak(ranks < k) for k in plan.top_k}}
    if plan.budgets:
        if selector is None:
            inside = accepted_by_budget(log_probs, labels.masked_fill(~drafted, -1), plan.budgets)
        else:
            blocks = (Draft(drafter, a[None], h, z) for a, h, z in zip(anchors, hidden, logits))
            inside = torch.tensor(
                [_in_trees(d, row, plan.budgets) for d, row in zip(blocks, labels.tolist())]
            )
        columns |= {f"tree_{budget}": inside[:, i] for i, budget in enumerate(plan.budgets)}
    if selector is not None:
        columns["unselected"] = _streak((logits.argmax(-1) == labels) & valid)
    columns |= _breaks(log_probs, drafts, labels, own[..., 0], accepted, valid)
    reached = torch.cat([torch.ones_like(hits[:, :1]), hits[:, :-1].cumprod(-1).bool()], 1) & valid
    counts = torch.stack([valid, hits, reached, reached & hits]).sum(1)
    return {name: column.cpu().numpy() for name, column in columns.items()}, counts.cpu().numpy()


def _streak(hits: torch.Tensor) -> torch.Tensor:
    """Return [A]: how many leading slots of [A, L] hit."""
    return hits.int().cumprod(-1).sum(-1).to(torch.int16)


def _in_trees(draft: Draft, labels: list[int], budgets: tuple[int, ...]) -> list[int]:
    """Return how many of the answer's tokens each budget's tree accepts, by building and walking it."""
    accepted = []
    for budget in budgets:
        tree = draft.tree(budget)
        choices = [labels[d] if d < len(labels) else -1 for d in (0, *tree.depths.tolist())]
        accepted.append(len(tree.walk(choices)[0]) - 1)
    return accepted


def _breaks(
    log_probs: torch.Tensor,
    drafts: torch.Tensor,
    labels: torch.Tensor,
    own: torch.Tensor,
    accepted: torch.Tensor,
    valid: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Describe the slot at which each chain breaks; label -1 and NaN where it holds to the end."""
    rows = torch.arange(len(labels), device=labels.device)
    slot = accepted.long().clamp_max(labels.shape[1] - 1)
    broke = (accepted < labels.shape[1]) & valid[rows, slot]
    spread = log_probs[rows, slot]  # [A, V]
    entropy = torch.special.entr(spread.exp()).sum(-1)
    values = {"entropy": entropy, "p_top": spread.amax(-1).exp(), "p_label": own[rows, slot].exp()}
    found = {name: value.masked_fill(~broke, torch.nan) for name, value in values.items()}
    found["label"] = labels[rows, slot].masked_fill(~broke, -1).to(torch.int32)
    found["drafted"] = drafts[rows, slot].masked_fill(~broke, -1).to(torch.int32)
    return found


def _frame(columns: Columns, sample: str, answer: int, start: int, stop: int) -> pl.DataFrame:
    count = stop - 1 - start
    place = np.arange(count, dtype=np.int32)
    frame = pl.DataFrame(
        {"answer": np.full(count, answer, np.int32), "anchor": place + start, "place": place, **columns}
    )
    small = [
        name for name in columns if name in ("accepted", "unselected") or name.startswith(("tree_", "top_"))
    ]
    real = ["entropy", "p_top", "p_label", *(name for name in columns if name.startswith("sampled_"))]
    return frame.with_columns(
        pl.lit(sample).alias("sample"),
        (count - pl.col("place")).cast(pl.Int32).alias("left"),
        pl.col(small).cast(pl.UInt8),
        pl.col(real).cast(pl.Float32).fill_nan(None),
        pl.when(pl.col("label") >= 0).then(pl.col("label")),
        pl.when(pl.col("label") >= 0).then(pl.col("drafted")),
    )
