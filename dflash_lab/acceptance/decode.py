"""Speculative decoding of one prompt: draft a block, verify it in one forward of the target, accept what both
agree on. `decode` is the loop; below it, what drafts, what accepts, and the target's cache.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from dflash_lab.acceptance.results import Tau, summarize
from dflash_lab.acceptance.tree import (
    UNITS_A_NAT,
    Choices,
    DraftTree,
    Edges,
    best_tokens,
    build_tree,
    exact_costs,
    marginal_edges,
    with_chain,
)
from dflash_lab.drafter.model import DraftCache, Drafter
from dflash_lab.errors import InputError, UnsupportedTarget
from dflash_lab.models.generate import check_temperature, choose, draw
from dflash_lab.models.hooks import Taps
from dflash_lab.models.kv_cache import (
    additive_mask,
    check_goes_on,
    crop_keys,
    restore_states,
    rollback_cache,
    run_cached,
    save_states,
    select_rows,
)
from dflash_lab.models.load import Target, TargetHead
from dflash_lab.models.spans import FULL, besides

PHASES = ("draft", "build", "verify", "commit")
PATHS_A_FORWARD = 64  # rows of a batch that verifies a tree path by path, a cache copy each


class Round(NamedTuple):
    """One round of an answer."""

    accepted: int  # drafts
    produced: int  # tokens that the answer kept
    drafted: int  # slots of the chain, or nodes of the tree
    rejected: int = -1  # the draft token at which the chain broke; -1: none, or a tree


@dataclass
class Decoded:
    """An answer, its rounds, and where the time went."""

    tokens: list[int]  # a stop token included
    rounds: list[Round] = field(default_factory=list)
    seconds: float = 0.0  # wall-clock from the end of the prefill on
    prefill_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # see Clock
    stopped: bool = False  # by a stop token
    waits: int = 0  # of the host for a record of the device (fixed shapes only)

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


@dataclass
class Study:
    """Answers of one method, in prompt order; with several turns a prompt has several answers."""

    method: str
    answers: list[Decoded] = field(default_factory=list)
    asked: list[tuple[int, ...]] = field(default_factory=list)  # the exact ids each answer continues
    prompt: list[int] = field(default_factory=list)  # index of the prompt of each answer

    def tau(self, seed: int = 0) -> Tau:
        """Summarise the acceptance lengths of all answers."""
        return summarize([a.produced for a in self.answers], [a.lengths for a in self.answers], seed=seed)

    @property
    def answer_taus(self) -> np.ndarray:
        """Tau of each answer [answers]; NaN for those without a round, whose first token was their last."""
        return np.asarray([sum(a.produced) / len(a.rounds) if a.rounds else np.nan for a in self.answers])

    @property
    def seconds_per_token(self) -> float:
        """Mean over answers of the wall-clock a token after the first."""
        timed = [a.seconds_per_token for a in self.answers if len(a.tokens) > 1]
        return sum(timed) / len(timed)

    def phase_share(self) -> dict[str, float]:
        """Return each phase's share of the decoding time."""
        total = sum(sum(a.phase_seconds.values()) for a in self.answers) or 1.0
        return {phase: sum(a.phase_seconds[phase] for a in self.answers) / total for phase in PHASES}


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: temperature 0 is greedy; top_p 1 and top_k 0 keep all tokens."""

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
        return draw(self.probabilities(logits), self.generator)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return fp32 probabilities [.., V] of logits [.., V], at a temperature above 0.

        Top-k comes before top-p, which keeps the smallest set whose mass reaches it (its first token always).
        """
        scores = logits if self.temperature == 1 else logits.float() / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            values, tokens = scores.topk(self.top_k, dim=-1)
            scores = torch.full_like(scores, -torch.inf).scatter(-1, tokens, values)
        found = torch.softmax(scores, dim=-1, dtype=torch.float32)
        if self.top_p < 1:
            ordered, tokens = found.sort(dim=-1, descending=True)
            ordered = torch.where(ordered.cumsum(-1) - ordered < self.top_p, ordered, 0.0)
            found = torch.zeros_like(found).scatter(-1, tokens, ordered)
            found = found / found.sum(-1, keepdim=True)
        return found


class Verdict(NamedTuple):
    """What a verification decided."""

    tokens: list[int]  # accepted drafts, then the bonus: the target's own next token
    drafted: int
    rejected: int = -1  # as in `Round`


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
    """Decode `prompt_ids` with blocks of `drafter`; greedily, the tokens are those of plain decoding.

    max_new_tokens: of the answer, its first token (which the prefill gives) included.
    block_size: the anchor and block_size - 1 drafts; None: as the drafter was trained.
    temperature, top_p, top_k, generator: 0 is greedy; else the target's distribution is kept exactly.
    tree_budget: verify a tree of that many nodes a round, not a chain (0). tree_mode: in one masked forward
    (``mask``), or with its ``paths`` as a batch, which any target can.
    stop_ids: tokens that end the answer; None: the target's own.
    last_block: ``full`` drafts whole blocks to the end; ``shrink`` cuts the last one to the tokens still
    allowed, as the dflash 0.1.0 package does.
    on_round: called after each round with the count of tokens so far; it may raise to stop.
    Raises `InputError` for a drafter of another target, `UnsupportedTarget` where a tree cannot be verified.
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
    proposer = Proposer(drafter, target.head)
    with TargetRun(target, drafter.config.tap_ids) as run:
        answer, taps = prefill(run, prompt_ids, sampling, stops)
        # The anchor is the last token known, on which the target has not run: it heads the next block.
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
                verdict, anchor, taps = _verify_tree(run, draft, tree_budget, tree_mode, sampling, clock)
            else:
                verdict, anchor, taps = _verify_chain(run, draft, sampling, clock)
            clock.lap("commit")
            append(answer, verdict, left, stops)
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
    """Decode one token a forward with the same target code: the baseline of every speed-up.

    The arguments are those of `decode`; `on_round` is called after each token.
    """
    sampling = Sampling(temperature, top_p, top_k, generator)
    stops = stop_tokens(target, stop_ids)
    with TargetRun(target) as run:
        answer, _ = prefill(run, prompt_ids, sampling, stops)
        start = time.perf_counter()
        while not answer.stopped and len(answer.tokens) < max_new_tokens:
            step = run.step(torch.tensor(answer.tokens[-1:], device=target.device), certain=True)
            run.commit(1)
            token = int(sampling.choose(target.head.logits(step.normed))[0])
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
    run: TargetRun, prompt_ids: Sequence[int], sampling: Sampling, stops: frozenset[int]
) -> tuple[Decoded, torch.Tensor]:
    """Run the prompt and choose the first token. Returns the answer so far and the prompt's tap states [P,
    K*H].
    """
    if not len(prompt_ids):
        raise InputError("the prompt is empty: give at least one token.")
    start = time.perf_counter()
    step = run.step(torch.tensor(list(prompt_ids), device=run.target.device), certain=True)
    run.commit(len(prompt_ids))
    token = int(sampling.choose(run.target.head.logits(step.normed[-1:]))[0])
    answer = Decoded([token], prefill_seconds=time.perf_counter() - start, stopped=token in stops)
    return answer, step.taps if step.taps is not None else step.normed[:0]


def _verify_chain(
    run: TargetRun, draft: Draft, sampling: Sampling, clock: Clock
) -> tuple[Verdict, torch.Tensor, torch.Tensor]:
    """Verify a chain and commit what is accepted; returns the verdict, the next anchor [1], and the committed
    rows' tap states.
    """
    drafts, q = draft.sampled(sampling) if sampling.temperature > 0 else (draft.greedy(), None)
    clock.lap("draft")
    step = run.step(torch.cat([draft.anchor, drafts]))
    logits = run.target.head.logits(step.normed)  # row i: what the target says after the anchor and i drafts
    if q is None:
        accepted, bonus = accept_greedy(drafts[None], logits.argmax(-1)[None])
    else:
        p = sampling.probabilities(logits)
        accepted, bonus = accept_sampled(drafts[None], q[None], p[None], sampling.generator)
    *guessed, count, last = torch.cat([drafts, accepted, bonus]).tolist()  # the round's one copy to the host
    clock.lap("verify")
    run.commit(1 + count)
    assert step.taps is not None
    verdict = Verdict([*guessed[:count], last], len(guessed), rejected_draft(guessed, count))
    return verdict, bonus, step.taps[: 1 + count]


def _verify_tree(
    run: TargetRun, draft: Draft, budget: int, mode: str, sampling: Sampling, clock: Clock
) -> tuple[Verdict, torch.Tensor, torch.Tensor]:
    """Verify a tree of `budget` nodes and commit the accepted path; returns what `_verify_chain` does.

    The target's token is drawn at every node and followed while it is drafted, which keeps its distribution.
    """
    tree = draft.tree(budget, sampling.temperature)
    clock.lap("build")
    step = (run.step_tree if mode == "mask" else run.step_paths)(draft.anchor, tree)
    choices = sampling.choose(run.target.head.logits(step.normed))
    path, bonus = tree.walk(choices.tolist())
    clock.lap("verify")
    run.commit_path(path)
    assert step.taps is not None
    rows = torch.tensor(path).to(draft.anchor.device, non_blocking=True)
    verdict = Verdict([*(int(tree.tokens[node - 1]) for node in path[1:]), bonus], len(tree))
    return verdict, choices[path[-1] : path[-1] + 1], step.taps[rows]


def rejected_draft(drafts: Sequence[int], accepted: int) -> int:
    """Return the draft at which a chain broke, -1 if all were accepted."""
    return drafts[accepted] if accepted < len(drafts) else -1


def append(answer: Decoded, verdict: Verdict, left: int, stops: frozenset[int]) -> None:
    """Add a round's tokens to the answer, cut at the token limit and at the first stop token."""
    kept = verdict.tokens[:left]
    end = next((i for i, token in enumerate(kept) if token in stops), None)
    if end is not None:
        kept = kept[: end + 1]
        answer.stopped = True
    answer.tokens += kept
    answer.rounds.append(Round(len(verdict.tokens) - 1, len(kept), verdict.drafted, verdict.rejected))


# What a drafter proposes for one block: tokens to verify in a row, or edges to grow a tree from. Plain DFlash
# gives independent marginals per slot. DFlash 2's selector rescores the best candidates of a slot given the
# token chosen before it, so its tokens are found from left to right and its edges depend on the token before.

_ROOT = -1  # stands for the anchor in `Edges`: its id need not come to the host


def check_pair(target: Target, drafter: Drafter) -> None:
    """Raise `InputError` unless `drafter` was made for a target of this shape."""
    config = drafter.config
    for name, ours, theirs in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    ):
        if ours != theirs:
            raise InputError(
                f"this drafter was made for another target: its {name} is {ours}, {target.name} has {theirs}."
            )


@dataclass(frozen=True)
class Draft:
    """One drafted block: `logits` [L, V] of slots 1..L, their hidden states [L, H], and the token they
    follow, `anchor` [1]."""

    drafter: Drafter
    anchor: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor

    def greedy(self) -> torch.Tensor:
        """Return the most likely tokens [L]."""
        selector = self.drafter.candidate_selector
        if selector is None:
            return self.logits.argmax(-1)
        return selector.select(self.hidden[None], self.logits[None], self.anchor)[0][0]

    def sampled(self, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw tokens [L] and return them with the probabilities q [L, V] that they were drawn from.

        DFlash 2 draws among its candidates by softmax(score / T); top-p and top-k are the target's affair
        there.
        """
        selector = self.drafter.candidate_selector
        if selector is None:
            q = sampling.probabilities(self.logits)
            return draw(q, sampling.generator), q
        unfiltered = Sampling(sampling.temperature)
        unary, candidates = self.logits.topk(min(selector.top_k, self.logits.shape[-1]), dim=-1)
        q = torch.zeros_like(self.logits, dtype=torch.float32)
        previous, tokens = self.anchor[0], []
        for slot, options in enumerate(candidates):
            score = selector.scores(unary[slot], options, self.hidden[slot], previous)
            among = unfiltered.probabilities(score)
            q[slot].scatter_(0, options, among)
            previous = options[draw(among, sampling.generator)]
            tokens.append(previous)
        return torch.stack(tokens), q

    def edges(self, width: int, temperature: float = 0.0) -> Edges:
        """Return the tree edges of this block, at T > 0 of its distribution at that temperature."""
        scale = 1.0 / temperature if temperature > 0 else 1.0
        if self.drafter.candidate_selector is None:
            return marginal_edges(torch.log_softmax(self.logits.float() * scale, -1), width)
        before, choices = self._conditional(scale)
        table: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
        log_probs = choices.costs.double() / -UNITS_A_NAT
        rows = zip(before.tolist(), choices.tokens.tolist(), log_probs.tolist())
        for level, row in enumerate(rows, start=1):
            for previous, ids, values in zip(*row):
                table[level, previous if level > 1 else _ROOT] = ids, values
        return lambda level, previous: table[level, previous]

    def choices(self, width: int) -> Choices:
        """Return the same edges (greedy ones) as tensors, for the tree that is built on the device."""
        if self.drafter.candidate_selector is not None:
            return self._conditional(1.0)[1]
        tokens, costs = best_tokens(torch.log_softmax(self.logits.float(), -1), width)
        return Choices(tokens[:, None], costs[:, None], torch.zeros_like(tokens)[:, None])

    def tree(self, budget: int, temperature: float = 0.0) -> DraftTree:
        """Build the best tree of `budget` nodes, and add what it lacks of the draft's own chain."""
        edges, depth = self.edges(max(budget, 1), temperature), len(self.logits)
        return with_chain(
            build_tree(edges, root=_ROOT, depth=depth, budget=budget), edges, root=_ROOT, depth=depth
        )

    def _conditional(self, scale: float) -> tuple[torch.Tensor, Choices]:
        """Score every candidate after every candidate of the slot before, in one go on the device.

        Returns the tokens [L, k] that stand before each slot (the anchor's, k times, before the first) and
        what may follow each of them.
        """
        selector = self.drafter.candidate_selector
        assert selector is not None
        unary, candidates = self.logits.topk(min(selector.top_k, self.logits.shape[-1]), dim=-1)
        before = torch.cat([self.anchor.expand(1, candidates.shape[1]), candidates[:-1]])  # [L, k]
        scores = selector.scores(
            unary[:, None], candidates[:, None].expand(-1, before.shape[1], -1), self.hidden[:, None], before
        )
        costs, order = exact_costs(torch.log_softmax(scores.float() * scale, -1)).sort(dim=-1, stable=True)
        tokens = candidates[:, None].expand_as(order).gather(-1, order)
        return before, Choices(tokens, costs, order)


class Proposer:
    """A drafter at work on one sequence: remembers the context's keys and values, drafts the next block."""

    def __init__(self, drafter: Drafter, head: TargetHead) -> None:
        self.drafter = drafter
        self.head = head
        self.cache = DraftCache(drafter)

    def extend(self, taps: torch.Tensor) -> None:
        """Take in the tapped states [n, K*H] of the next n committed tokens."""
        self.cache.extend(taps)

    @torch.no_grad()
    def draft(self, anchor: torch.Tensor, block_size: int) -> Draft:
        """Draft a block after `anchor` [1], a token whose own tap states do not exist yet."""
        mask = anchor.new_full((block_size - 1,), self.drafter.config.mask_token_id)
        hidden = self.cache.block(self.head.embed(torch.cat([anchor, mask])))[1:].to(self.head.weight.dtype)
        return Draft(self.drafter, anchor, hidden, self.drafter.logits(hidden, self.head.weight))


# What is accepted of a chain. Both functions return, for N chains of L drafts, the count of accepted drafts
# [N] and the bonus [N], the target's own next token.


def accept_greedy(drafts: torch.Tensor, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the longest prefix of `drafts` [N, L] that is what the target chose, `choices` [N, L+1]."""
    accepted = (drafts == choices[:, :-1]).int().cumprod(-1).sum(-1)
    return accepted, choices.gather(-1, accepted[:, None])[:, 0]


def accept_sampled(
    drafts: torch.Tensor, q: torch.Tensor, p: torch.Tensor, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept a prefix of `drafts` [N, L], drawn from `q` [N, L, V], against the target's `p` [N, L+1, V].

    Speculative sampling (Leviathan et al. 2023; Chen et al. 2023): a draft x is accepted with probability
    min(1, p(x) / q(x)); at the first rejection the bonus is drawn from the normalised (p - q)+, after full
    acceptance from the last row of p. The tokens are distributed as if the target had been sampled alone.
    """
    rows, length = drafts.shape
    p_drafts = p[:, :length].gather(-1, drafts[..., None])[..., 0]
    q_drafts = q.gather(-1, drafts[..., None])[..., 0]
    uniform = torch.rand(rows, length, generator=generator, device=drafts.device, dtype=q.dtype)
    accepted = (uniform * q_drafts < p_drafts).int().cumprod(-1).sum(-1).long()
    every = torch.arange(rows, device=drafts.device)
    wanted = p[every, accepted]
    broken = (accepted < length)[:, None]  # after full acceptance q = 0
    residual = (wanted - q[every, accepted.clamp_max(length - 1)] * broken).clamp_min(0)
    # No mass means p == q up to rounding, where a rejection has probability ~0; p itself is then the right
    # draw.
    some = residual.amax(-1, keepdim=True) > 0
    return accepted, draw(torch.where(some, residual, wanted), generator)


# The target, ahead of what is certain: append tokens, look, then keep only what was accepted. Attention
# layers are rolled back by dropping the last keys and values. Layers with a recurrent state (gated delta net)
# cannot be: transformers' `crop` leaves that state advanced, which changes the next logits without any error.
# Their states are copied before a verification; after a partial acceptance the copies are put back and the
# accepted tokens are run again, whose tap states and logits equal the first run's.


class Step(NamedTuple):
    """What a forward of Q tokens gave."""

    normed: torch.Tensor  # [Q, H], after the final norm
    taps: torch.Tensor | None  # [Q, K*H]; None where none were asked for


def unmaskable(target: Target, *kinds: str) -> str:
    """Return why a mask and positions cannot tell a forward of `target` who attends to whom; empty if they
    can. kinds: of layers that are fine.
    """
    family = target.config.model_type
    if odd := besides(target.spans, kinds):
        return f"{odd} of this {family} do not attend to everything before them by keys of their own"
    if "position_ids" not in inspect.signature(target.body.forward).parameters or getattr(
        target.config, "alibi", False
    ):
        return f"this {family} takes the positions of tokens from their places in the cache"
    backend = getattr(target.config, "_attn_implementation", "sdpa")
    return "" if backend in ("sdpa", "eager") else f"attention {backend!r} takes no mask (attn='sdpa' does)"


def check_tree_target(target: Target) -> None:
    """Raise `UnsupportedTarget`, with the reason and what to use instead, unless one forward can verify a
    tree."""
    if why := unmaskable(target, FULL):
        leak = "siblings would leak into each other through the recurrent state: " if target.is_hybrid else ""
        raise UnsupportedTarget(
            f"{target.name}: a tree cannot be verified in one forward: {leak}{why}. Measure trees offline "
            "(offline(..., budgets=...) needs no tree forward) or verify their leaf paths as a batch "
            "(tree_mode paths)."
        )


class TargetRun:
    """A target's cache for one sequence. A context manager, for it holds tap hooks.

    `length` counts committed tokens; `step`, `step_tree` and `step_paths` append uncommitted ones, `commit`
    or `commit_path` settle them.
    """

    def __init__(self, target: Target, tap_ids: tuple[int, ...] = ()) -> None:
        self.target = target
        self.length = 0
        self._taps = Taps(target, tap_ids) if tap_ids else None
        self.cache = rollback_cache(target)
        self._pending = torch.empty(0, dtype=torch.long)
        self._saved: list[list[torch.Tensor]] | None = None
        self._untouched = False  # the last step ran on copies: nothing to roll back

    def __enter__(self) -> Self:
        if self._taps is not None:
            self._taps.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._taps is not None:
            self._taps.__exit__(kind, error, trace)

    def step(self, tokens: torch.Tensor, *, certain: bool = False) -> Step:
        """Run `tokens` [Q] after the committed ones. `certain`: all of them will be kept, so no way back is
        prepared."""
        if not certain:
            self._saved = save_states(self.cache)
        positions = self.length + torch.arange(len(tokens), device=tokens.device)
        return self._forward(tokens, positions, None)

    def step_tree(self, root: torch.Tensor, tree: DraftTree) -> Step:
        """Run the anchor `root` [1] and all nodes of `tree` in one forward of 1+n tokens, in node order.

        A node sees the committed tokens and its own ancestors. No mask can separate siblings inside a
        recurrence, and a window forgets cells that a rejection would need: see `check_tree_target`.
        """
        device = root.device
        tokens = torch.cat([root, torch.from_numpy(tree.tokens).to(device, non_blocking=True)])
        depths = torch.from_numpy(tree.depths).to(device, non_blocking=True)
        positions = self.length + torch.cat([torch.zeros_like(root), depths])
        seen = torch.from_numpy(tree.visibility()).to(device, non_blocking=True)
        before = seen.new_ones(len(tokens), self.length)
        mask = additive_mask(torch.cat([before, seen], dim=1), self.target.dtype)
        return self._forward(tokens, positions, mask[None, None])

    def step_paths(self, root: torch.Tensor, tree: DraftTree) -> Step:
        """Like `step_tree`, for any target: every root-to-leaf path is a row of a batch with its own copy of
        the cache.

        Costs the sum of the path lengths and a cache copy a row, at most `PATHS_A_FORWARD` at a time. The
        sequence's own cache is left alone: settle with `commit_path`.
        """
        paths = tree.leaf_paths() or [[]]
        width = 1 + max(len(path) for path in paths)
        # Node of each cell; rows end in repeats of the root.
        table = torch.zeros(len(paths), width, dtype=torch.long)
        for row, path in enumerate(paths):
            table[row, 1 : 1 + len(path)] = torch.tensor(path)
        nodes = torch.cat([root.cpu(), torch.from_numpy(tree.tokens)])
        positions = self.length + torch.arange(width, device=root.device)
        own, normed, taps = self.cache, [], []
        try:
            for rows in table.split(PATHS_A_FORWARD):
                self.cache = select_rows(own, torch.zeros(len(rows), dtype=torch.long, device=root.device))
                step = self._batch(nodes[rows].to(root.device), positions.expand(len(rows), -1))
                normed.append(step.normed)
                taps += [step.taps] if step.taps is not None else []
        finally:
            self.cache = own
        # Any cell that holds the node: their prefixes are equal.
        cell = torch.zeros(1 + len(tree), dtype=torch.long)
        cell[table.flatten().flip(0)] = torch.arange(table.numel()).flip(0)
        cell = cell.to(root.device)
        self._pending, self._untouched = nodes.to(root.device), True
        flat = torch.cat(normed).flatten(0, 1)[cell]
        return Step(flat, torch.cat(taps).flatten(0, 1)[cell] if taps else None)

    def commit(self, count: int) -> None:
        """Keep the first `count` of the tokens appended last and forget the others."""
        appended = len(self._pending)
        if count < appended and self._saved:
            crop_keys(self.cache, appended)
            restore_states(self.cache, self._saved)
            if count:
                self.step(self._pending[:count], certain=True)
        else:
            crop_keys(self.cache, appended - count)
        self._settle(count)

    def commit_path(self, path: list[int]) -> None:
        """Keep the rows `path` (indices into the tokens appended last, rising) of every layer's keys and
        values."""
        kept = torch.tensor(path).to(self._pending.device, non_blocking=True)
        if self._untouched:
            self._untouched = False
            self.step(self._pending[kept], certain=True)
            self._settle(len(path))
            return
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                # [1, heads, length + appended, d]; keys are already rotated to their place
                tensor = getattr(layer, name)
                if path != list(range(len(path))):
                    tensor[:, :, self.length : self.length + len(path)] = tensor[:, :, self.length + kept]
                setattr(layer, name, tensor[:, :, : self.length + len(path)])
        self._settle(len(path))

    def _settle(self, count: int) -> None:
        self.length += count
        self._pending = self._pending[:0]
        self._saved = None

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> Step:
        self._pending = tokens
        step = self._batch(tokens[None], positions[None], mask)
        return Step(step.normed[0], step.taps[0] if step.taps is not None else None)

    def _batch(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None = None) -> Step:
        """One forward of tokens [R, Q] on the current cache."""
        normed = run_cached(self.target, self.cache, tokens, positions, mask)
        taps = torch.cat(self._taps.take(), dim=-1) if self._taps is not None else None
        return Step(normed, taps)


class Clock:
    """Times named phases: what lies between a mark and the one before belongs to the phase it is given.

    On CUDA marks are events in the stream, read only at the end: they time what the device did, gaps in which
    it waited for the host included, and hold nobody up, so the split is that of the very run reported.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str | None, Any]] = []

    def lap(self, phase: str | None = None) -> None:
        """End a phase; None: what came before belongs to none."""
        if self._cuda:
            mark: Any = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self._marks.append((phase, mark))

    def seconds(self) -> dict[str, float]:
        """Seconds by phase; waits for the device."""
        found = dict.fromkeys(PHASES, 0.0)
        if self._cuda and self._marks:
            self._marks[-1][1].synchronize()
        for (_, before), (phase, after) in pairwise(self._marks):
            if phase is not None:
                found[phase] += before.elapsed_time(after) / 1e3 if self._cuda else after - before
        return found
