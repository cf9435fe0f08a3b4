"""Many prompts decoded together, each with its own position and its own acceptance: for throughput, where
`decode`, one prompt at a time, is the published protocol.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from dflash_lab.acceptance.decode import (
    Decoded,
    Draft,
    Proposer,
    Sampling,
    Study,
    TargetRun,
    Verdict,
    accept_greedy,
    accept_sampled,
    append,
    check_block_size,
    check_pair,
    finish,
    prefill,
    rejected_draft,
    stop_tokens,
    unmaskable,
)
from dflash_lab.acceptance.prompts import Prompt
from dflash_lab.drafter.model import Drafter
from dflash_lab.errors import InputError, UnsupportedTarget
from dflash_lab.models.hooks import Taps
from dflash_lab.models.kv_cache import (
    additive_mask,
    attention_layers,
    check_goes_on,
    linear_layers,
    restore_states,
    run_cached,
    save_states,
    select_rows,
    shallow_copy,
    stack_rows,
)
from dflash_lab.models.load import Target
from dflash_lab.models.spans import FULL, LINEAR


def check_batch_target(target: Target) -> None:
    """Raise `UnsupportedTarget`, with the reason, unless rows of different lengths can share a cache."""
    why = unmaskable(target, FULL, LINEAR)
    if not why and not any(span.kind == FULL for span in target.spans):
        why = f"no layer of this {target.config.model_type} has keys to tell rows of different lengths by"
    if why:
        raise UnsupportedTarget(
            f"{target.name}: rows of a batch accept different counts, which it cannot follow: {why}. Decode "
            "one prompt at a time (batch 1, acceptance.decode)."
        )
    check_goes_on(target)


@torch.no_grad()
def decode_batch(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    block_size: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop_ids: Collection[int] | None = None,
    generator: torch.Generator | None = None,
    on_round: Callable[[int], None] | None = None,
) -> list[Decoded]:
    """Decode all `prompts` together with chains of drafts; `max_new_tokens` may differ by prompt.

    The arguments are those of `decode`. Each answer's `seconds` run from the end of all prefills until it was
    finished. on_round(tokens of all answers so far) is called after each round.
    """
    check_pair(target, drafter)
    check_batch_target(target)
    size = drafter.config.block_size if block_size is None else block_size
    check_block_size(size)
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(limits) != len(prompts):
        raise InputError(f"{len(limits)} values of max_new_tokens for {len(prompts)} prompts.")
    sampling = Sampling(temperature, top_p, top_k, generator)
    stops = stop_tokens(target, stop_ids)
    answers, rows = [], []
    for number, prompt in enumerate(prompts):
        with TargetRun(target, drafter.config.tap_ids) as run:
            answer, taps = prefill(run, prompt, sampling, stops)
        answers.append(answer)
        if not answer.stopped and limits[number] > 1:
            proposer = Proposer(drafter, target.head)
            proposer.extend(taps)
            rows.append((number, run, proposer))
    start = time.perf_counter()
    if rows:
        batch = _Batch(target, drafter, rows)
        with batch.taps:
            while batch.numbers:
                drafts, q = batch.draft([answers[n].tokens[-1] for n in batch.numbers], size, sampling)
                done = []
                for number, verdict in zip(batch.numbers, batch.verify(drafts, q, sampling)):
                    answer = answers[number]
                    append(answer, verdict, limits[number] - len(answer.tokens), stops)
                    over = answer.stopped or len(answer.tokens) >= limits[number]
                    if over:
                        finish(answer, start, target.device)
                    done.append(over)
                batch.drop(done)
                if on_round is not None:
                    on_round(sum(len(answer.tokens) for answer in answers))
    return answers


class _Batch:
    """The rows still decoding: one cache for all, a length and a draft cache for each.

    Rows accept different numbers of drafts, so their caches grow apart. Keys and values lie left-aligned in
    one tensor a layer and a mask hides the unused cells; after a round the accepted ones move next to the
    row's own, which is exact because keys carry their true rotary position wherever they lie. No forward has
    padding, which would spoil a recurrent state: prompts are prefilled one by one, and every row of a round
    has the same number of tokens.
    """

    def __init__(self, target: Target, drafter: Drafter, rows: list[tuple[int, TargetRun, Proposer]]) -> None:
        self.target, self.drafter = target, drafter
        self.numbers = [number for number, _, _ in rows]
        self.proposers = [proposer for _, _, proposer in rows]
        self.lengths = torch.tensor([run.length for _, run, _ in rows], device=target.device)
        self.taps = Taps(target, drafter.config.tap_ids)
        self.cache = stack_rows([run.cache for _, run, _ in rows])
        self.anchors = self.lengths  # replaced by `draft`

    def draft(
        self, anchors: list[int], size: int, sampling: Sampling
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft a block for every row: tokens [R, L], and q [R, L, V] that they were drawn from (T > 0)."""
        self.anchors = torch.tensor(anchors, device=self.target.device)
        drafts: list[Draft] = [p.draft(a[None], size) for p, a in zip(self.proposers, self.anchors)]
        if sampling.temperature <= 0:
            return torch.stack([draft.greedy() for draft in drafts]), None
        tokens, q = zip(*(draft.sampled(sampling) for draft in drafts))
        return torch.stack(tokens), torch.stack(q)

    def verify(self, drafts: torch.Tensor, q: torch.Tensor | None, sampling: Sampling) -> list[Verdict]:
        """Run all rows once, accept, commit, and feed the accepted tap states to the draft caches."""
        tokens = torch.cat([self.anchors[:, None], drafts], dim=1)
        saved = save_states(self.cache)
        before = shallow_copy(self.cache)  # attention layers as they are now, for rows that run again
        normed, taps = self._forward(self.cache, tokens, self.lengths)
        logits = self.target.head.logits(normed)
        if q is None:
            accepted, bonus = accept_greedy(drafts, logits.argmax(-1))
        else:
            accepted, bonus = accept_sampled(drafts, q, sampling.probabilities(logits), sampling.generator)
        counts = accepted + 1
        if saved:
            self._replay(before, saved, tokens, counts)
        self._compact(counts, tokens.shape[1])
        verdicts = []
        table = torch.cat([accepted[:, None], bonus[:, None], drafts], dim=1).tolist()
        for row, (count, last, *guess) in enumerate(table):
            self.proposers[row].extend(taps[row, : 1 + count])
            verdicts.append(Verdict([*guess[:count], last], len(guess), rejected_draft(guess, count)))
        return verdicts

    def drop(self, done: list[bool]) -> None:
        """Take finished rows out of the batch."""
        if not any(done):
            return
        kept = [row for row, over in enumerate(done) if not over]
        self.numbers = [self.numbers[row] for row in kept]
        self.proposers = [self.proposers[row] for row in kept]
        index = torch.tensor(kept, dtype=torch.long, device=self.target.device)
        self.lengths = self.lengths[index]
        if kept:
            self.cache = select_rows(self.cache, index)

    def _forward(
        self, cache: Any, tokens: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run tokens [R, Q] after `lengths` [R]; returns normed [R, Q, H] and tap states [R, Q, K*H]."""
        rows, count = tokens.shape
        steps = torch.arange(count, device=tokens.device)
        stored = attention_layers(cache)[0].keys.shape[2]
        cells = torch.arange(stored, device=tokens.device)
        old = (cells[None] < lengths[:, None])[:, None].expand(rows, count, stored)
        new = (steps[None] <= steps[:, None])[None].expand(rows, count, count)
        seen = torch.cat([old, new], dim=-1)[:, None]  # [R, 1, Q, stored + Q]
        mask: Any = additive_mask(seen, self.target.dtype)
        if self.target.is_hybrid:
            mask = {"full_attention": mask, "linear_attention": None}
        normed = run_cached(self.target, cache, tokens, lengths[:, None] + steps, mask)
        return normed, torch.cat(self.taps.take(), dim=-1)

    def _replay(
        self, before: Any, saved: list[list[torch.Tensor]], tokens: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Bring the recurrent states of partially accepted rows to where their accepted tokens end."""
        for count in counts.unique().tolist():
            if count == tokens.shape[1]:
                continue  # everything was accepted: the states already stand there
            rows = (counts == count).nonzero()[:, 0]
            part = select_rows(before, rows)
            restore_states(part, [[state[rows] for state in layer] for layer in saved])
            self._forward(part, tokens[rows, :count], self.lengths[rows])
            for layer, own in zip(linear_layers(part), linear_layers(self.cache)):
                for name in ("conv_states", "recurrent_states"):
                    for key, state in getattr(layer, name).items():
                        if state is not None:
                            getattr(own, name)[key][rows] = state

    def _compact(self, counts: torch.Tensor, appended: int) -> None:
        """Move each row's accepted keys and values next to its own ones; cut what no row needs."""
        layers = attention_layers(self.cache)
        stored = layers[0].keys.shape[2] - appended
        after = self.lengths + counts
        cells = torch.arange(int(after.max()), device=counts.device)[None]
        moved = stored + cells - self.lengths[:, None]
        source = torch.where(cells < self.lengths[:, None], cells, moved.clamp_max(stored + appended - 1))
        for layer in layers:
            for name in ("keys", "values"):
                tensor = getattr(layer, name)
                index = source[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
                setattr(layer, name, tensor.gather(2, index))
        self.lengths = after


def run_together(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    batch: int,
    max_new_tokens: int,
    progress: Callable[..., None] | None = None,
    **options: Any,
) -> tuple[Study, float]:
    """Decode `prompts`, `batch` at a time, with chains; returns the study and tokens a second of all of it.

    `options` are those of `decode_batch`. Raises `InputError` for prompts of several turns, whose next turn
    depends on the answer before.
    """
    several = next((prompt.id for prompt in prompts if prompt.several), None)
    if several is not None:
        raise InputError(
            f"batch {batch}: prompt {several} has several turns; set batch to 1 for such prompts."
        )
    study = Study("together")
    start = time.perf_counter()
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]

        def tick(tokens: int, first: int = first) -> None:
            if progress is not None:
                progress("decode together", first, len(prompts), tokens=tokens)

        study.answers += decode_batch(
            target,
            drafter,
            [prompt.input_ids for prompt in part],
            max_new_tokens=[prompt.longest(max_new_tokens) for prompt in part],
            on_round=tick,
            **options,
        )
        study.asked += [prompt.input_ids for prompt in part]
        study.prompt += range(first, first + len(part))
    seconds = time.perf_counter() - start
    return study, sum(len(answer.tokens) for answer in study.answers) / seconds
