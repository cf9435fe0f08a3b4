"""Greedy decoding at fixed shapes, so that every step of a round is a CUDA graph, and `Methods`, which takes
that way where it applies. Both ways give the same greedy tokens.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from dflash_lab.acceptance.decode import (
    Clock,
    Decoded,
    Draft,
    Sampling,
    TargetRun,
    Verdict,
    accept_greedy,
    append,
    check_block_size,
    check_pair,
    decode,
    finish,
    plain_decode,
    prefill,
    rejected_draft,
    stop_tokens,
    unmaskable,
)
from dflash_lab.acceptance.tree import Choices, LevelTree, TreePlan, best_tree, plan_build
from dflash_lab.drafter.attention import BlockLayout, Segment
from dflash_lab.drafter.model import ContextKeys, Drafter, RMSNorm, rotate, run_blocks
from dflash_lab.errors import UnsupportedTarget
from dflash_lab.models.compiled import Call, captured, new_pool
from dflash_lab.models.hooks import Taps
from dflash_lab.models.kv_cache import StaticCache, additive_mask, run_cached
from dflash_lab.models.load import Target
from dflash_lab.models.spans import FULL

_LOOKS_AT_POSITIONS = ("dynamic", "longrope")  # rotary angles chosen on the host by the longest position


def why_not(target: Target) -> str:
    """Return why `target` cannot be decoded at fixed shapes; empty if it can.

    A recurrent state cannot be cut back to the accepted tokens on the device without running them again, a
    sliding window forgets cells that a rejection would need, attention that counts places in the cache would
    count the unused ones, and experts have shapes that follow the data.
    """
    config = target.config
    if why := unmaskable(target, FULL):
        return f"{why}, and only what does can be rolled back at a fixed size"
    if target.has_experts:
        return "its experts are called on as many tokens as are routed to them, which no fixed shape holds"
    if hasattr(config, "kv_lora_rank"):
        return "its attention keeps compressed keys and values"
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type") in _LOOKS_AT_POSITIONS:
        return "its rotary angles follow the longest position, which the host must look at"
    return ""


Method = Callable[..., Decoded]  # (prompt_ids, *, max_new_tokens, stop_ids=None, on_round=None)


class Methods:
    """Makes decoding methods for one target under one way of choosing tokens, each with a generator of its
    own from `seed`.

    Fixed shapes need a CUDA device (without graphs they only compute masked cells on top), greedy choice and
    a target whose cache has a fixed form; everything else takes the growing cache. Plain decoding takes the
    same way as what is compared with it. `workspace`: None with the growing cache, and then `why` says why.
    """

    def __init__(
        self,
        target: Target,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
    ) -> None:
        self.target, self.seed = target, seed
        self._choice = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        self.why = why_not(target)
        if target.device.type != "cuda":
            self.why = f"graphs need a CUDA device, this is {target.device.type}"
        elif temperature > 0:
            self.why = "sampling draws random numbers, which these graphs do not"
        self.workspace = None if self.why else Workspace(target)

    @property
    def sentence(self) -> str:
        """How everything is decoded, for the report."""
        if self.workspace is not None:
            return "Plain and speculative decoding run as CUDA graphs over fixed shapes."
        return f"Plain and speculative decoding run with a growing cache: {self.why}."

    def plain(self) -> Method:
        """One token a forward."""
        if self.workspace is not None:
            return StaticDecoder(self.workspace)
        return partial(plain_decode, self.target, **self.sampling())

    def speculative(
        self, drafter: Drafter, block_size: int, budget: int = 0, tree_mode: str = "mask"
    ) -> Method:
        """Chains, or trees of `budget` nodes, verified as `tree_mode` of `decode` says: paths, which have no
        fixed shape, with the growing cache.
        """
        if self.workspace is not None and not (budget and tree_mode == "paths"):
            return StaticDecoder(self.workspace, drafter, block_size=block_size, budget=budget)
        options = {"block_size": block_size, "tree_budget": budget, "tree_mode": tree_mode, **self.sampling()}
        return partial(decode, self.target, drafter, **options)

    def sampling(self) -> dict[str, Any]:
        """The options of `decode` that say how tokens are chosen."""
        return {**self._choice, "generator": torch.Generator(self.target.device).manual_seed(self.seed)}


LEAST_CAPACITY = 512  # tokens; graphs are made once for each power of two and kept, for all prompts of a set


class Workspace:
    """Keys, values and contexts by capacity, shared by decoders of one target that take turns."""

    def __init__(self, target: Target) -> None:
        if why := why_not(target):
            raise UnsupportedTarget(
                f"{target.name} ({target.config.model_type}) cannot be decoded at fixed shapes: {why}. Use "
                "the growing cache (acceptance.decode)."
            )
        self.target = target
        self._keys: dict[int, StaticCache] = {}
        self._contexts: dict[tuple[Drafter, int], StaticContext] = {}

    def round(self, drafter: Drafter | None, capacity: int, block_size: int, budget: int) -> StaticRound:
        """Make a round; without a drafter it is a step of plain decoding."""
        if capacity not in self._keys:
            self._keys[capacity] = StaticCache(self.target, 1, capacity)
        if drafter is None:
            return StaticRound(self.target, self._keys[capacity])
        place = (drafter, capacity)
        if place not in self._contexts:
            self._contexts[place] = StaticContext(drafter, capacity)
        return StaticRound(
            self.target,
            self._keys[capacity],
            drafter,
            self._contexts[place],
            block_size=block_size,
            budget=budget,
        )


class StaticDecoder:
    """`decode`, or `plain_decode` where no drafter is given, for greedy choice at fixed shapes.

    The host sees what a round decided, appends it and looks for a stop token while the device is at work on
    the next round already, so the device never waits. The price is one round too many at a stop token.
    """

    def __init__(
        self,
        workspace: Workspace,
        drafter: Drafter | None = None,
        *,
        block_size: int | None = None,
        budget: int = 0,
    ) -> None:
        self.workspace, self.drafter, self.budget = workspace, drafter, budget
        self.block_size = 1
        if drafter is not None:
            check_pair(workspace.target, drafter)
            self.block_size = drafter.config.block_size if block_size is None else block_size
            check_block_size(self.block_size)
        self._rounds: dict[int, StaticRound] = {}

    def prepared(self, tokens: int) -> StaticRound:
        """Return the round for sequences of up to `tokens`, made now if need be."""
        capacity = LEAST_CAPACITY
        while capacity < tokens + 3 * self.block_size + self.budget:
            capacity *= 2
        if capacity not in self._rounds:
            self._rounds[capacity] = self.workspace.round(
                self.drafter, capacity, self.block_size, self.budget
            )
        return self._rounds[capacity]

    @torch.no_grad()
    def __call__(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] | None = None,
        on_round: Callable[[int], None] | None = None,
    ) -> Decoded:
        """Decode `prompt_ids`; see `decode.decode` for the arguments."""
        target, drafter = self.workspace.target, self.drafter
        stops = stop_tokens(target, stop_ids)
        now = self.prepared(len(prompt_ids) + max_new_tokens)
        tap_ids = drafter.config.tap_ids if drafter is not None else ()
        with TargetRun(target, tap_ids) as run:
            answer, taps = prefill(run, prompt_ids, Sampling(), stops)
            now.load(run.cache, taps, answer.tokens[0], run.length)
        reader = _Reader(now.record)
        clock = Clock(target.device)
        start = time.perf_counter()
        while not answer.stopped and len(answer.tokens) < max_new_tokens:
            # Every round gives a token at least.
            while reader.free and len(answer.tokens) + reader.flying < max_new_tokens:
                clock.lap()
                for phase, launch in now.steps.items():
                    launch()
                    clock.lap(phase)
                reader.send()
            accepted, drafted, bonus, *drafts = reader.receive()
            rejected = -1 if self.budget else rejected_draft(drafts, accepted)
            verdict = Verdict([*drafts[:accepted], bonus], drafted, rejected)
            append(answer, verdict, max_new_tokens - len(answer.tokens), stops)
            if on_round is not None:
                on_round(len(answer.tokens))
        finish(answer, start, target.device)
        if drafter is None:
            answer.rounds.clear()  # plain decoding has none
        answer.phase_seconds = clock.seconds()
        answer.waits = reader.waits
        return answer


class _Reader:
    """Copies of the device's record on their way to the host, at most two at a time."""

    def __init__(self, record: torch.Tensor) -> None:
        self._record, self._cuda = record, record.is_cuda
        ahead = 2 if self._cuda else 1  # rounds in flight
        self._slots = deque(
            torch.empty(record.shape, dtype=record.dtype, pin_memory=self._cuda) for _ in range(ahead)
        )
        self._sent: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self.waits = 0

    @property
    def free(self) -> int:
        return len(self._slots)

    @property
    def flying(self) -> int:
        return len(self._sent)

    def send(self) -> None:
        slot = self._slots.popleft()
        slot.copy_(self._record, non_blocking=True)
        event = torch.cuda.Event() if self._cuda else None
        if event is not None:
            event.record()
        self._sent.append((slot, event))

    def receive(self) -> list[int]:
        """Wait for the oldest record and return it."""
        slot, event = self._sent.popleft()
        if event is not None:
            event.synchronize()
            self.waits += 1
        values = slot.tolist()
        self._slots.append(slot)
        return values


Build = Callable[[Choices, torch.Tensor, TreePlan], LevelTree]
See = Callable[[LevelTree, int], torch.Tensor]


def tree_builder(device: torch.device) -> tuple[Build, See]:
    """Return how trees are built on `device` and who sees whom in them: one kernel each, or, where there is
    no Triton, plain operations.
    """
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from dflash_lab.acceptance import tree_kernel

        return tree_kernel.best_tree, tree_kernel.visibility
    return best_tree, LevelTree.visibility


class StaticRound:
    """A round over `keys` and `context`, each of whose `steps` (phase -> launch) is a CUDA graph.

    All that a round needs of the one before stays on the device: how many tokens are committed, the anchor,
    the tap states that the drafter has not taken in yet. So rounds can be launched one after the other; each
    leaves its `record` [3 + B-1] int64: accepted drafts, drafts verified, the bonus, then the drafts of the
    chain or of the accepted path. Shapes are fixed by block size, tree budget and capacity; what a round does
    not need of its `width` tokens is computed and masked. Without a drafter a round is a step of plain
    decoding, so the baseline of a speed-up gains as much from graphs as what is compared with it.
    """

    def __init__(
        self,
        target: Target,
        keys: StaticCache,
        drafter: Drafter | None = None,
        context: StaticContext | None = None,
        *,
        block_size: int = 1,
        budget: int = 0,
    ) -> None:
        self.target, self.keys, self.context = target, keys, context
        self.drafter, self.head = drafter, target.head
        self.block_size, self.budget = block_size, budget
        slots = block_size - 1
        device = target.device
        self._plan: TreePlan | None = None
        if budget and drafter is not None:
            second = drafter.candidate_selector
            fan = min(budget if second is None else second.top_k, target.vocab_size)
            self._plan = plan_build(budget, slots, fan, second is not None, device)
            self._best_tree, self._visibility = tree_builder(device)
        self.nodes = self._plan.nodes + slots if self._plan is not None else 0
        self.width = 1 + (self.nodes or slots)

        def whole(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        self.length, self.anchor, self.fresh = whole(1), whole(1), whole(1)
        self.record = whole(3 + slots)
        self._drafts, self._choices = whole(slots), whole(self.width)
        self._tree = LevelTree(
            whole(self.nodes), whole(self.nodes), whole(self.nodes), whole(self.nodes).bool()
        )
        self._seen = torch.zeros(1 + self.nodes, 1 + self.nodes, dtype=torch.bool, device=device)
        steps = {"verify": self._verify, "commit": self._commit}
        self._hooks: Any = contextlib.nullcontext()
        if drafter is not None:
            self._hooks = Taps(target, drafter.config.tap_ids)
            wide = len(drafter.config.tap_ids) * target.hidden_size
            options: Any = {"dtype": target.dtype, "device": device}
            self._taps = torch.zeros(block_size, wide, **options)  # of the tokens committed last, in order
            self._new_taps = torch.zeros(self.width, wide, **options)
            self._logits = torch.zeros(slots, target.vocab_size, **options)
            self._hidden = torch.zeros(slots, target.hidden_size, **options)
            steps = {"draft": self._draft, **({"build": self._build} if budget else {}), **steps}
        pool = new_pool(device)
        with torch.no_grad():
            self.steps: dict[str, Call] = {
                name: captured(call, device, pool=pool) for name, call in steps.items()
            }

    @torch.no_grad()
    def load(self, cache: DynamicCache, taps: torch.Tensor, anchor: int, length: int) -> None:
        """Start from a prefilled prompt of `length` tokens, its tap states, and its first answer token."""
        self.keys.load(cache, length)
        if self.context is not None:
            self.context.extend(taps, self.length.new_zeros(1))
        self.length.fill_(length)
        self.anchor.fill_(anchor)
        self.fresh.zero_()

    def _draft(self) -> None:
        assert self.context is not None and self.drafter is not None
        self.context.extend(self._taps, self.length - self.fresh)
        mask = self.anchor.new_full((self.block_size - 1,), self.drafter.config.mask_token_id)
        embeddings = self.head.embed(torch.cat([self.anchor, mask]))
        hidden = self.context.block(embeddings, self.length)[1:].to(self.head.weight.dtype)
        logits = self.drafter.logits(hidden, self.head.weight)
        self._hidden.copy_(hidden)
        self._logits.copy_(logits)
        self._drafts.copy_(Draft(self.drafter, self.anchor, hidden, logits).greedy())

    def _build(self) -> None:
        assert self.drafter is not None and self._plan is not None
        draft = Draft(self.drafter, self.anchor, self._hidden, self._logits)
        tree = self._best_tree(draft.choices(self.budget), self._drafts, self._plan)
        for own, new in zip(self._tree, tree):
            own.copy_(new)
        self._seen.copy_(self._visibility(tree, self.block_size - 1))

    def _verify(self) -> None:
        cells = self.length + torch.arange(self.width, device=self.length.device)
        every = torch.arange(self.keys.capacity, device=self.length.device)
        if self.nodes:
            tokens = torch.cat([self.anchor, self._tree.tokens])
            positions = self.length + torch.cat([self._tree.depths.new_zeros(1), self._tree.depths])
            seen = (every < self.length).expand(self.width, -1).index_copy(1, cells, self._seen)
        else:
            tokens = torch.cat([self.anchor, self._drafts])
            positions, seen = cells, every <= cells[:, None]
        self.keys.cells = cells[None]
        mask = additive_mask(seen, self.target.dtype)[None, None]
        with self._hooks as taps:
            normed = run_cached(self.target, self.keys, tokens[None], positions[None], mask)[0]
            if taps is not None:
                self._new_taps.copy_(torch.cat(taps.take(), dim=-1)[0])
        self._choices.copy_(self.head.logits(normed).argmax(-1))

    def _commit(self) -> None:
        slots = torch.arange(self.block_size, device=self.length.device)
        if self.nodes:
            path, drafts = self._accepted_path(slots)
            self.keys.move(self.length + path, self.length + slots)
            accepted, drafted = (path > 0).sum(0, keepdim=True), self._tree.active.sum(0, keepdim=True)
            bonus = self._choices[path.amax(0, keepdim=True)]
        else:
            path, drafts = slots, self._drafts
            accepted, bonus = accept_greedy(drafts[None], self._choices[None])
            drafted = torch.full_like(accepted, len(drafts))
        if self.drafter is not None:
            self._taps.copy_(self._new_taps[path])
        self.record.copy_(torch.cat([accepted, drafted, bonus, drafts]))
        self.fresh.copy_(accepted + 1)
        self.length.add_(self.fresh)
        self.anchor.copy_(bonus)

    def _accepted_path(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the accepted node at each depth [B] (0 past the last) and their tokens [B-1].

        A node is accepted when it and all its ancestors carry the token that the target chose at their
        parents; siblings carry different tokens, so there is one at most at a depth.
        """
        tree = self._tree
        right = tree.active & (tree.tokens == self._choices[tree.parents])
        right = torch.cat([right.new_ones(1), right])
        accepted = right & ~(self._seen & ~right).any(1)
        depths = torch.cat([tree.depths.new_zeros(1), tree.depths]) * accepted
        nodes = torch.arange(self.width, device=slots.device) * accepted
        path = torch.zeros_like(slots).scatter_reduce_(0, depths, nodes, "amax")
        return path, torch.where(path[1:] > 0, tree.tokens[path[1:] - 1], -1)


class StaticContext:
    """`drafter.model.DraftCache` at a fixed size and address: `store` [2, layers, capacity, heads, d].

    A token's cell is its position. A block's attention reads all cells under the mask that `dense_attend`
    builds from the anchor's position; rows past the committed ones may be written, for the next round
    overwrites them before any block can see them.
    """

    def __init__(self, drafter: Drafter, capacity: int) -> None:
        config = drafter.config
        self.drafter, self.capacity = drafter, capacity
        weight = drafter.fc.weight
        shape = (2, config.num_layers, capacity, config.num_kv_heads, config.head_dim)
        self.store = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        # All layers read the same fused states, so their keys and values are one product and one norm.
        attentions = [layer.self_attn for layer in drafter.blocks()]
        both = [a.k_proj.weight for a in attentions] + [a.v_proj.weight for a in attentions]
        self._both = torch.cat(both).detach()
        self._norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        gains = torch.stack([a.k_norm.weight for a in attentions])[:, None]  # [layers, 1, d]
        self._norm.weight = torch.nn.Parameter(gains.detach(), requires_grad=False)

    def extend(self, taps: torch.Tensor, start: torch.Tensor) -> None:
        """Write tapped states [n, K*H] of positions start .. start+n-1; `start` [1] is on the device."""
        ctx = self.drafter.context(taps.to(self.store.dtype))
        cells = start + torch.arange(len(taps), device=taps.device)
        cos, sin = self.drafter.angles(cells, ctx.dtype)
        _, layers, _, heads, size = self.store.shape
        keys, values = F.linear(ctx, self._both).view(-1, 2, layers, heads, size).unbind(1)
        keys = rotate(self._norm(keys), (cos[:, None], sin[:, None]))
        self.store[0].index_copy_(1, cells, keys.transpose(0, 1))
        self.store[1].index_copy_(1, cells, values.transpose(0, 1))

    def block(self, embeddings: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, H] of a block whose anchor stands at position `length` [1]; embeddings [B, H] are
        raw rows.
        """
        device = embeddings.device
        layout = BlockLayout(
            length,
            torch.zeros_like(length),
            torch.arange(self.capacity, device=device),
            (Segment(0, self.capacity, 0, 1),),
            len(embeddings),
        )
        contexts = map(ContextKeys, *self.store)
        return run_blocks(self.drafter, embeddings[None], layout, contexts)[0]
