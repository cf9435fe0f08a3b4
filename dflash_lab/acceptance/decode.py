"""Speculative decoding of one prompt: draft a block, let the target look at it in one forward, keep what it
agrees with.

A round starts from an anchor, the last token known, on which the target has not run. The drafter fills
block_size - 1 slots after it (or a tree of nodes), the target runs on the anchor and the drafts, the accepted
drafts are committed and the target's own next token becomes the new anchor. So a round yields accepted + 1
tokens, and with greedy choice the output is what plain decoding gives, token for token. Sampled chains use
rejection sampling; sampled trees draw one token at each node and follow it while it is drafted. Both leave
the target's distribution as it is.

Between device and host there is one copy a round for a chain (the target's choices beside the drafts), two
for a tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dflash_lab.acceptance.clock import PHASES, Clock
from dflash_lab.acceptance.proposals import Draft, Proposer, check_pair
from dflash_lab.acceptance.rejection import probabilities, verify_sampled
from dflash_lab.acceptance.rollback import check_goes_on
from dflash_lab.acceptance.target_run import TargetRun, check_tree_target
from dflash_lab.drafter.model import Drafter
from dflash_lab.errors import InputError
from dflash_lab.target.choice import check_temperature, choose, draw
from dflash_lab.target.head import TargetHead
from dflash_lab.target.model import Target


class Round(NamedTuple):
    """One round: `accepted` drafts, tokens `produced` that the answer kept, slots or nodes `drafted`, and the
    first `rejected` draft token where the chain broke (-1: none, or a tree)."""

    accepted: int
    produced: int
    drafted: int
    rejected: int = -1


@dataclass
class Decoded:
    """An answer: `tokens` (a stop token included), its rounds, and where the time went.

    `seconds` is the wall-clock from the end of the prefill to the end; `phase_seconds` splits it (on CUDA
    as the device saw it, see `clock`). `waits` counts how often the host waited for a record of the device
    (fixed shapes only, see `static_decode`).
    """

    tokens: list[int]
    rounds: list[Round] = field(default_factory=list)
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    stopped: bool = False
    waits: int = 0

    @property
    def produced(self) -> list[int]:
        """Tokens kept, by round (the truncated convention of tau)."""
        return [r.produced for r in self.rounds]

    @property
    def lengths(self) -> list[int]:
        """1 + accepted drafts, by round (the overshoot convention)."""
        return [r.accepted + 1 for r in self.rounds]

    @property
    def seconds_per_token(self) -> float:
        """Wall-clock a token after the first, which the prefill gives."""
        return self.seconds / max(1, len(self.tokens) - 1)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise InputError(
                f"top_p {self.top_p}, top_k {self.top_k}: give 0 < top_p <= 1 (1: all), top_k >= 0 (0: all)."
            )

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose one token for each row of logits [n, V]."""
        if self.temperature == 0 or (self.top_p == 1 and self.top_k == 0):
            return choose(logits, self.temperature, self.generator)
        return draw(self.chances(logits), self.generator)

    def chances(self, logits: torch.Tensor) -> torch.Tensor:
        return probabilities(logits, self.temperature, self.top_p, self.top_k)


class Verdict(NamedTuple):
    """What a verification decided: accepted rows of the step (the anchor's is the first), tokens, and the
    round."""

    path: list[int]
    tokens: list[int]  # accepted drafts, then the bonus
    drafted: int
    rejected: int


@torch.no_grad()
def decode(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    block_size: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    tree_budget: int = 0,
    tree_mode: str = "mask",
    stop_ids: Collection[int] | None = None,
    generator: torch.Generator | None = None,
    last_block: str = "full",
    on_round: Callable[[int], None] | None = None,
) -> Decoded:
    """Decode `prompt_ids` with `drafter` guessing `block_size` - 1 tokens a round (default: as it was
    trained).

    tree_budget: verify a tree of that many nodes a round instead of a chain; tree_mode: in one masked
    forward, or with its leaf ``paths`` as a batch, which any target can. stop_ids None: the target's own.
    last_block: ``full`` drafts whole blocks to the end; ``shrink`` cuts the last block to the tokens still
    allowed, as the dflash 0.1.0 package does. `max_new_tokens` counts the first token, which the prefill
    gives. on_round(tokens so far) is called after each round.
    """
    check_pair(target, drafter)
    size = drafter.config.block_size if block_size is None else block_size
    check_block_size(size)
    if last_block not in ("full", "shrink"):
        raise InputError(f"last_block {last_block!r}: choose 'full' or 'shrink'.")
    if tree_mode not in ("mask", "paths"):
        raise InputError(f"tree_mode {tree_mode!r}: choose 'mask' or 'paths'.")
    check_goes_on(target)
    if tree_budget and tree_mode == "mask":
        check_tree_target(target)
    sampling = Sampling(temperature, top_p, top_k, generator)
    stops = stop_tokens(target, stop_ids)
    head = target.head
    proposer = Proposer(drafter, head)
    with TargetRun(target, drafter.config.tap_ids) as run:
        answer, taps = prefill(run, head, prompt_ids, sampling, stops)
        anchor = torch.tensor(answer.tokens, device=target.device)
        clock = Clock(target.device)
        start = time.perf_counter()
        while not answer.stopped and len(answer.tokens) < max_new_tokens:
            clock.lap()
            left = max_new_tokens - len(answer.tokens)
            proposer.extend(taps)
            draft = proposer.draft(anchor, size if last_block == "full" else min(size, left + 1))
            clock.lap("draft")
            if tree_budget:
                outcome, anchor, taps = _verify_tree(
                    run, head, draft, tree_budget, tree_mode, sampling, clock
                )
            else:
                outcome, anchor, taps = _verify_chain(run, head, draft, sampling, clock)
            clock.lap("commit")
            append(answer, outcome, left, stops)
            if on_round is not None:
                on_round(len(answer.tokens))
        finish(answer, start, target.device)
        answer.phase_seconds = clock.seconds()
    return answer


@torch.no_grad()
def plain_decode(
    target: Target,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop_ids: Collection[int] | None = None,
    generator: torch.Generator | None = None,
    on_round: Callable[[int], None] | None = None,
) -> Decoded:
    """Decode one token a forward with the same target code: the baseline of every speed-up."""
    sampling = Sampling(temperature, top_p, top_k, generator)
    stops = stop_tokens(target, stop_ids)
    head = target.head
    with TargetRun(target) as run:
        answer, _ = prefill(run, head, prompt_ids, sampling, stops)
        start = time.perf_counter()
        while not answer.stopped and len(answer.tokens) < max_new_tokens:
            step = run.step(torch.tensor(answer.tokens[-1:], device=target.device), certain=True)
            run.commit(1)
            token = int(sampling.choose(head.logits(step.normed))[0])
            answer.tokens.append(token)
            answer.stopped = token in stops
            if on_round is not None:
                on_round(len(answer.tokens))
        finish(answer, start, target.device)
    return answer


def check_block_size(size: int) -> None:
    """Raise `InputError` for a block without a draft."""
    if size < 2:
        raise InputError(
            f"block_size {size}: a block is an anchor and at least one draft. plain_decode drafts none."
        )


def stop_tokens(target: Target, stop_ids: Collection[int] | None) -> frozenset[int]:
    """Return the ids that end an answer: those given, or the target's own."""
    return frozenset(target.stop_ids if stop_ids is None else stop_ids)


def finish(answer: Decoded, start: float, device: torch.device) -> None:
    """Stop the wall-clock once the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    answer.seconds = time.perf_counter() - start


def prefill(
    run: TargetRun, head: TargetHead, prompt_ids: Sequence[int], sampling: Sampling, stops: frozenset[int]
) -> tuple[Decoded, torch.Tensor]:
    """Run the prompt and choose the first token. Returns the answer so far and the prompt's tap states [P,
    K*H]."""
    if not len(prompt_ids):
        raise InputError("the prompt is empty: give at least one token.")
    start = time.perf_counter()
    step = run.step(torch.tensor(list(prompt_ids), device=run.target.device), certain=True)
    run.commit(len(prompt_ids))
    token = int(sampling.choose(head.logits(step.normed[-1:]))[0])
    answer = Decoded([token], prefill_seconds=time.perf_counter() - start, stopped=token in stops)
    return answer, step.taps if step.taps is not None else step.normed[:0]


def _verify_chain(
    run: TargetRun, head: TargetHead, draft: Draft, sampling: Sampling, clock: Clock
) -> tuple[Verdict, torch.Tensor, torch.Tensor]:
    """Verify a chain; returns the outcome, the next anchor [1] and the committed rows' tap states, both on
    the device.
    """
    if sampling.temperature > 0:
        drafts, q = draft.sampled(sampling.temperature, sampling.top_p, sampling.top_k, sampling.generator)
    else:
        drafts, q = draft.greedy(), draft.logits
    clock.lap("draft")
    step = run.step(torch.cat([draft.anchor, drafts]))
    logits = head.logits(step.normed)
    if sampling.temperature > 0:
        accepted, bonus = verify_sampled(
            drafts[None], q[None], sampling.chances(logits)[None], sampling.generator
        )
        values = torch.cat([drafts, accepted, bonus]).tolist()
        drafted, count, last = values[:-2], values[-2], values[-1]
    else:
        choices = logits.argmax(-1)
        values = torch.cat([drafts, choices]).tolist()
        drafted, chosen = values[: len(drafts)], values[len(drafts) :]
        count = next((i for i, (d, c) in enumerate(zip(drafted, chosen)) if d != c), len(drafted))
        last, bonus = chosen[count], choices[count : count + 1]
    clock.lap("verify")
    run.commit(count + 1)
    assert step.taps is not None
    rejected = drafted[count] if count < len(drafted) else -1
    outcome = Verdict(list(range(count + 1)), [*drafted[:count], last], len(drafted), rejected)
    return outcome, bonus, step.taps[: count + 1]


def _verify_tree(
    run: TargetRun,
    head: TargetHead,
    draft: Draft,
    budget: int,
    mode: str,
    sampling: Sampling,
    clock: Clock,
) -> tuple[Verdict, torch.Tensor, torch.Tensor]:
    """Verify a tree of `budget` nodes and commit the accepted path; returns what `_verify_chain` does."""
    tree = draft.tree(budget, sampling.temperature)
    clock.lap("build")
    step = (run.step_tree if mode == "mask" else run.step_paths)(draft.anchor, tree)
    choices = sampling.choose(head.logits(step.normed))
    path, bonus = tree.walk(choices.tolist())
    clock.lap("verify")
    run.commit_path(path)
    assert step.taps is not None
    tokens = [int(tree.tokens[node - 1]) for node in path[1:]]
    rows = torch.tensor(path).to(draft.anchor.device, non_blocking=True)
    outcome = Verdict(path, [*tokens, bonus], len(tree), -1)
    return outcome, choices[path[-1] : path[-1] + 1], step.taps[rows]


def append(answer: Decoded, outcome: Verdict, left: int, stops: frozenset[int]) -> None:
    """Add a round's tokens to the answer, cut at the token limit and at the first stop token."""
    kept = outcome.tokens[:left]
    end = next((i for i, token in enumerate(kept) if token in stops), None)
    if end is not None:
        kept = kept[: end + 1]
        answer.stopped = True
    answer.tokens += kept
    answer.rounds.append(Round(len(outcome.path) - 1, len(kept), outcome.drafted, outcome.rejected))
