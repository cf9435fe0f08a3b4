"""Acceptance from stored answers, with no target forward: draft a block at every answer token and compare.
Below it, which answers an evaluation looks at, and where the states come from.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import torch
from torch.nn.utils.rnn import pad_sequence

from dflash_lab.acceptance.decode import Draft, Study
from dflash_lab.acceptance.prompts import HELDOUT, Prompt, chosen
from dflash_lab.acceptance.results import OfflineReport
from dflash_lab.acceptance.settings import EvaluationSettings
from dflash_lab.acceptance.tree import accepted_by_budget
from dflash_lab.data.samples import FeatureItem, provenance_path, read_provenance, scan_samples
from dflash_lab.drafter.attention import row_layout
from dflash_lab.drafter.live import SampleItems
from dflash_lab.drafter.model import DraftCache, Drafter
from dflash_lab.errors import InputError
from dflash_lab.extraction.manifest import trial_of
from dflash_lab.extraction.store import FeatureStore, open_store
from dflash_lab.models.hooks import Taps
from dflash_lab.models.load import Target, TargetHead

logger = logging.getLogger(__name__)
BUDGETS = (16, 32, 64, 128, 256, 512, 1024)
TOP_K = (1, 2, 4, 8, 16)
CPU_ELEMENTS, CUDA_ELEMENTS = 1 << 25, 1 << 27  # logits held at once: 128 and 512 MiB of fp32
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
    on_item: Callable[[int], None] | None = None,
) -> OfflineReport:
    """Draft at every answer token of `items`, on the drafter's device, and compare with the stored answer.

    items: samples with the target's tapped states, such as those of a feature store. head: the target's.
    block_size: the anchor and block_size - 1 drafts; None: as the drafter was trained. budgets: of trees, in
    nodes. top_k: of the oracles. temperatures: also expect the accepted drafts of speculative sampling there,
    sum over k of prod over j <= k of (1 - TV(p_j, q_j)), from the items' final states; plain DFlash only.
    on_item: called after each item with its tokens.

    An item with states that are not numbers is named in the log and left out. Raises `InputError` when no
    item has an answer of at least two tokens.
    """
    size = drafter.config.block_size if block_size is None else block_size
    budgets, top_k = tuple(sorted(set(budgets))), tuple(sorted(set(top_k)))
    if size < 2 or any(b < 1 for b in budgets):
        raise InputError(f"block_size {size} must be at least 2 and tree budgets {list(budgets)} positive.")
    if temperatures and drafter.candidate_selector is not None:
        raise InputError(
            "temperatures: expected acceptance is known for plain DFlash drafts only, not DFlash 2's."
        )
    # A document's context is computed once; its anchors are drafted in chunks that bound the logits.
    elements = CUDA_ELEMENTS if head.weight.is_cuda else CPU_ELEMENTS
    chunk = max(1, elements // ((size - 1) * head.weight.shape[0] * (2 if temperatures else 1)))
    frames, counts, answers = [], np.zeros((4, size - 1), np.int64), 0
    for item in items:
        if not all(states.isfinite().all() for states in (item.taps, item.final) if states is not None):
            logger.warning("sample %s is left out: its stored states are not numbers", item.hash)
            continue
        ids = item.input_ids.to(head.weight.device).long()
        segments = answer_segments(item.loss_mask)
        context = context_of(drafter, item.taps.to(head.weight.device)) if segments else None
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


def context_of(drafter: Drafter, taps: torch.Tensor) -> DraftCache:
    """Return a document's context keys and values, from which blocks are drafted at any of its positions."""
    context = DraftCache(drafter, len(taps))
    context.extend(taps)
    return context


def blocks_at(
    context: DraftCache, anchors: list[int], embeddings: torch.Tensor, *, visible_shift: int = 0
) -> torch.Tensor:
    """Hidden states [A, B, H] of blocks at `anchors` (rising), from raw embedding rows [A, B, H];
    visible_shift as `run_blocks` has it.
    """
    layout = row_layout([anchors], [context.length], embeddings.shape[1])
    layout = layout.map(lambda index: index.to(embeddings.device))
    return context.blocks(embeddings, layout, visible_shift)


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
    context: DraftCache,
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
        hidden = blocks_at(context, anchors.tolist(), head.embed(block))[:, 1:].to(head.weight.dtype)
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


# Which answers are looked at. Held-out samples have stored answers; their states are read from the feature
# store, or made by the target now where nothing was extracted. Prompts without an answer take what plain
# decoding said.


class Answers:
    """Answers of an evaluation with `settings`, for a drafter with taps `tap_ids`.

    `stored`: whether the prompts have answers in the samples file. `has_final`: whether the items will have
    final states. Raises `InputError` for a store of another target or of other taps; one of a trial has not
    all that prompts are drawn from, and is left aside.
    """

    def __init__(self, settings: EvaluationSettings, target: Target, tap_ids: tuple[int, ...]) -> None:
        self._settings, self._target, self._tap_ids = settings, target, tap_ids
        self.stored = [one.name for one in chosen(settings.prompts)] == [HELDOUT]
        self._store = self._open(settings.store) if self.stored and settings.store is not None else None
        self.has_final = self._store is None or self._store.has_final

    @property
    def source(self) -> str:
        """Where answers and states come from, for the report."""
        if not self.stored:
            return "answers of plain decoding"
        return "stored answers" if self._store is not None else "stored answers, states of the live target"

    def _open(self, path: Path) -> FeatureStore | None:
        store = open_store(path)
        store.check_made_by(self._settings.target, self._target.identity["weights"], self._target.hidden_size)
        if tuple(store.tap_ids) != self._tap_ids:
            raise InputError(
                f"{path} holds taps {list(store.tap_ids)}, the drafter was made for "
                f"{list(self._tap_ids)}: give the store that it was trained from."
            )
        if total := trial_of(path):
            logger.info(
                "%s holds %d of %d samples, a trial (max_samples of extract): the live target makes the "
                "states of the answers", path, len(store), total,
            )  # fmt: skip
            return None
        return store

    def items(self, prompts: Sequence[Prompt], plain: Study, *, extra: int = 0) -> StoredItems | TextItems:
        """Return the answers of `prompts`, then up to `extra` more held-out ones."""
        if not self.stored:
            return answered_items(self._target, self._tap_ids, plain)
        hashes = [prompt.hash for prompt in prompts]
        if self._store is not None:
            return stored_items(self._store, hashes, extra=extra)
        return sample_items(self._target, self._tap_ids, self._settings.samples, hashes, extra=extra)

    def texts(self, prompts: Sequence[Prompt], plain: Study) -> tuple[list[str], list[Sequence[int]]]:
        """Return hash and answer tokens of what `items` holds of each decoded answer."""
        if self.stored:
            return [prompt.hash for prompt in prompts], [prompt.answer for prompt in prompts]
        names = [text_hash([*asked, *a.tokens]) for asked, a in zip(plain.asked, plain.answers)]
        return names, [answer.tokens for answer in plain.answers]

    def made_by(self) -> tuple[Path | None, bool | None]:
        """Return the samples file that says how training text was rendered, if there is one, and whether the
        prompts were rendered with thinking on (None: they are that file's own).
        """
        samples = self._settings.samples
        if self.stored:
            return samples, None
        return samples if provenance_path(samples).exists() else None, self._settings.thinking

    def thinking(self) -> bool:
        """Return whether the prompts were rendered with thinking on."""
        _, given = self.made_by()
        return bool(read_provenance(self._settings.samples).get("thinking")) if given is None else given

    def sources(self, prompts: Sequence[Prompt], plain: Study) -> dict[str, str]:
        """Return the source of each sample that `items` holds, by its hash."""
        if not self.stored:
            names, _ = self.texts(prompts, plain)
            return {name: prompts[number].source for name, number in zip(names, plain.prompt, strict=True)}
        known = scan_samples(self._settings.samples).select("content_hash", "source").collect()
        return dict(known.iter_rows())

    def date(self) -> str:
        """Return the day that the samples' template printed as today; empty if none is recorded."""
        samples = self._settings.samples
        return str(read_provenance(samples).get("date", "")) if provenance_path(samples).exists() else ""


PASS_TOKENS = 8192  # padded tokens of one forward over several texts, on CUDA


class StoredItems:
    """Chosen samples of a store, read as they are asked for."""

    def __init__(self, store: FeatureStore, indices: list[int]) -> None:
        self._store, self._indices = store, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[FeatureItem]:
        return map(self._store.__getitem__, self._indices)


def stored_items(store: FeatureStore, hashes: Sequence[str], *, extra: int = 0) -> StoredItems:
    """Return the samples with these content hashes, in that order, then up to `extra` other held-out ones."""
    missing = []
    indices = []
    for content_hash in hashes:
        try:
            indices.append(store.find(content_hash))
        except KeyError:
            missing.append(content_hash)
    if missing:
        raise InputError(
            f"{store.path} lacks {len(missing)} of {len(hashes)} samples (first: {missing[0]}): it was made "
            "from other samples, or extraction is not finished. Run extract for every shard."
        )
    taken = set(indices)
    others = [i for i in np.flatnonzero(store.heldout).tolist() if i not in taken]
    return StoredItems(store, indices + others[:extra])


def passes(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Cut texts of these lengths, as they come, into runs [start, end) of at most `most` padded tokens, or of
    one text.
    """
    start = widest = 0
    for end, length in enumerate(lengths):
        widest = max(widest, length)
        if end > start and widest * (end + 1 - start) > most:
            yield start, end
            start, widest = end, length
    if lengths:
        yield start, len(lengths)


class TextItems:
    """Texts whose states the target makes as they are asked for; nothing is kept. On CUDA several share a
    forward: what pads a text on its right is seen by none of its tokens.
    """

    def __init__(
        self,
        target: Target,
        tap_ids: tuple[int, ...],
        texts: Sequence[tuple[str, torch.Tensor, torch.Tensor]],
    ) -> None:
        """`texts`: hash, token ids [L] and loss mask [L] of each."""
        self._target, self._tap_ids, self._texts = target, tap_ids, texts

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[FeatureItem]:
        most = PASS_TOKENS if self._target.device.type == "cuda" else 0
        for start, end in passes([len(ids) for _, ids, _ in self._texts], most):
            yield from self._made(self._texts[start:end])

    @torch.no_grad()
    def _made(self, texts: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> list[FeatureItem]:
        last = self._target.num_layers - 1
        wanted = tuple(sorted({*self._tap_ids, last}))
        rows = pad_sequence([ids.long() for _, ids, _ in texts], batch_first=True)
        with Taps(self._target, wanted) as taps:
            self._target.body(input_ids=rows.to(self._target.device), use_cache=False)
            of_layer = dict(zip(wanted, taps.take()))
        states = torch.cat([of_layer[layer] for layer in self._tap_ids], dim=-1)
        return [
            FeatureItem(name, ids.int(), mask, states[row, : len(ids)], of_layer[last][row, : len(ids)], True)
            for row, (name, ids, mask) in enumerate(texts)
        ]


def text_hash(ids: Sequence[int]) -> str:
    """Name a text that no samples file names: 32 hex digits."""
    return hashlib.sha256(repr(list(ids)).encode()).hexdigest()[:32]


def answered_items(target: Target, tap_ids: tuple[int, ...], study: Study) -> TextItems:
    """Return every answer of `study` with its prompt, and states of the target."""
    texts = []
    for asked, answer in zip(study.asked, study.answers):
        ids = torch.tensor([*asked, *answer.tokens])
        mask = torch.zeros(len(ids), dtype=torch.uint8)
        mask[len(asked) :] = 1
        texts.append((text_hash(ids.tolist()), ids, mask))
    return TextItems(target, tap_ids, texts)


def sample_items(
    target: Target,
    tap_ids: tuple[int, ...],
    samples: Path,
    hashes: Sequence[str],
    *,
    extra: int = 0,
) -> TextItems:
    """Return the samples of a file with these hashes, in that order, then up to `extra` other held-out ones,
    with states of the target: what `stored_items` reads from a store.
    """
    chosen = SampleItems(samples, target.hidden_size, list(tap_ids))
    chosen.check_vocabulary(target.vocab_size)
    number = {name: index for index, name in enumerate(chosen.hashes)}
    indices = [number[name] for name in hashes]
    taken = set(indices)
    others = np.flatnonzero(chosen.heldout).tolist()
    indices += [i for i in others if i not in taken][:extra]
    bare = [chosen.bare(index) for index in indices]
    return TextItems(target, tap_ids, [(item.hash, item.input_ids, item.loss_mask) for item in bare])
