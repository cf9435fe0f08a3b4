"""Generation at the rate of the device: fixed slots, a static cache, one recorded step, no waiting for the
host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from dflash_lab.cuda_graphs import captured
from dflash_lab.target.choice import choose
from dflash_lab.target.kv_cache import StaticCache, run_cached
from dflash_lab.target.model import Target
from dflash_lab.target.spans import FULL, besides

STEPS_A_LOOK = 32  # steps between two looks of the host at the counter
MOST_SLOTS = 4096


def takes_slots(target: Target) -> bool:
    """Whether a target's layers can be run this way: attention over everything, and nothing whose shapes
    depend on data (experts).
    """
    capped = getattr(target.config, "attn_logit_softcapping", None)
    plain = not besides(target.spans, [FULL]) and not target.has_experts and not capped
    return plain and bool(target.body._supports_attention_backend)


def slot_bytes(target: Target, width: int) -> int:
    """Bytes a slot takes: keys and values of `width` positions, and its logits while a token is chosen."""
    config = target.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * target.num_layers * heads * size * width * target.dtype.itemsize
    return cache + target.vocab_size * 4 * 4 + 24 * max(config.hidden_size, config.intermediate_size)


@dataclass
class _Slots:
    """Where every slot stands. N prompts, R slots; job N is nobody's, for slots without work.

    Each slot holds one prompt at its own position and takes one token a step: the next of its own prompt
    while that lasts, a generated one after it. A slot whose answer ends takes the next prompt of the queue in
    the same step, on the device, so all slots stay busy until the queue is empty.
    """

    text: Tensor  # [N + 1, W] int32: prompts, and what is generated after them
    lengths: Tensor  # [N + 1] tokens of each prompt
    limits: Tensor  # [N + 1] one past the last token allowed
    ends: Tensor  # [N + 1] one past the last token, 0 while unfinished
    job: Tensor  # [R]
    position: Tensor  # [R] of the token that is fed next
    queue: Tensor  # [] next job that no slot has taken
    finished: Tensor  # [] jobs done

    @classmethod
    def fill(cls, prompts: Sequence[Sequence[int]], max_new: int, rows: int, device: torch.device) -> _Slots:
        lengths = torch.tensor([*map(len, prompts), 1], dtype=torch.long)
        text = torch.zeros(len(prompts) + 1, int(lengths.max()) + max_new, dtype=torch.int32)
        flat = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32)
        text[:-1][torch.arange(text.shape[1]) < lengths[:-1, None]] = flat
        lengths = lengths.to(device)
        return cls(
            text=text.to(device),
            lengths=lengths,
            limits=lengths + max_new,
            ends=torch.zeros_like(lengths),
            job=torch.arange(rows, device=device),
            position=torch.zeros(rows, dtype=torch.long, device=device),
            queue=torch.tensor(rows, device=device),
            finished=torch.tensor(0, device=device),
        )

    def start(self) -> None:
        """Put every slot at the beginning of its first prompt."""
        torch.arange(len(self.job), out=self.job)
        self.queue.fill_(len(self.job))
        for tensor in (self.ends, self.position, self.finished):
            tensor.zero_()

    def take(self, chosen: Tensor, stop: Tensor) -> None:
        """Write each slot's next token and move on; who is done takes the next job."""
        nobody = len(self.lengths) - 1
        new = self.position + 1
        own = self.text[self.job, new].long()
        in_prompt = new < self.lengths[self.job]
        token = torch.where(in_prompt, own, chosen)
        self.text[self.job, new] = token.int()
        full = new + 1 >= self.limits[self.job]
        done = ~in_prompt & ((token[:, None] == stop).any(1) | full) & (self.job < nobody)
        self.ends[self.job] = torch.where(done, new + 1, self.ends[self.job])
        following = (self.queue + done.cumsum(0) - 1).clamp(max=nobody)
        self.job.copy_(torch.where(done, following, self.job))
        self.position.copy_(torch.where(done | (self.job == nobody), 0, new))
        self.queue += done.sum()
        self.finished += done.sum()


@torch.inference_mode()
def generate_in_slots(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    stop: Tensor,
    slots: int,
    progress: Callable[..., None] | None = None,
) -> list[list[int]]:
    """Continue every prompt with `slots` of them at a time; arguments as in `generation.generate`.

    Shapes never change, so on CUDA the step is recorded once and replayed; the host looks at a counter every
    few steps. On a CPU the same step runs unrecorded, which is how it is tested.
    """
    if not prompts:
        return []
    rows = min(slots, len(prompts))
    state = _Slots.fill(prompts, max_new_tokens, rows, target.device)
    with few_kernels(target.body):
        cache = StaticCache(target, rows, state.text.shape[1])
        cache.cells = state.position[:, None]

        def step() -> None:
            tokens = state.text[state.job, state.position].long()[:, None]
            normed = run_cached(target, cache, tokens, cache.cells)
            logits = target.head.logits(normed[:, -1])
            state.take(choose(logits, temperature, generator), stop)

        with _attention(target):
            run = captured(step, target.device, generator=generator)
            state.start()  # what recording did is for nothing
            while (done := int(state.finished)) < len(prompts):
                if progress is not None:
                    progress("generate", done, len(prompts))
                for _ in range(STEPS_A_LOOK):
                    run()
    if progress is not None:
        progress("generate", len(prompts), len(prompts))
    texts, ends = state.text.cpu().numpy(), state.ends.tolist()
    return [texts[i, len(prompt) : ends[i]].tolist() for i, prompt in enumerate(prompts)]


@contextlib.contextmanager
def _attention(target: Target) -> Iterator[None]:
    """Let the target's layers attend through the slot cache meanwhile."""
    config = target.body.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


# ---- Attention of one new token a row, each row with its own length ----
# A row's keys and values at positions after its own are leftovers of whoever had the slot before, and are
# never read. On CUDA one Triton program a (row, key head) streams exactly the keys that the row has, for all
# query heads that share them, so nothing is repeated for grouped queries and padding costs nothing;
# elsewhere the same rule is a boolean mask of scaled_dot_product_attention.

NAME = "dflash_slots"  # under which transformers' models find `attend`


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    position_ids: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [R, nq, 1, d] over key and value [R, nkv, W, d] up to each row's position; returns [R, 1, nq,
    d].
    """
    rows, heads, _, size = query.shape
    scale = size**-0.5 if scaling is None else scaling
    positions = position_ids[:, 0]  # [R]
    if query.is_cuda and size >= 16 and size & (size - 1) == 0:
        from dflash_lab.target.slot_kernels import attend_slots

        return attend_slots(query[:, :, 0].contiguous(), key, value, positions, scale)[:, None], None
    grouped = query.view(rows, key.shape[1], -1, size)  # query heads that share a key head stand together
    seen = torch.arange(key.shape[2], device=key.device) <= positions[:, None]
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=seen[:, None, None], scale=scale)
    return out.reshape(rows, 1, heads, size), None


AttentionInterface.register(NAME, attend)


# ---- RMS norms in two kernels instead of eight ----
# Transformers writes Llama's norm in plain operations: to float32, square, mean, add, root, multiply, back,
# times the weight. `F.rms_norm` without a weight is all but the last as one kernel, with the one rounding at
# the same place; only the order in which the squares are summed is the kernel's own. A norm is replaced if
# its forward is Llama's, instruction by instruction, as in most families. Those that multiply by (1 + w) or
# round elsewhere stay as they are, and so do those of float32 models, which are run for their exact numbers.


@contextlib.contextmanager
def few_kernels(body: nn.Module) -> Iterator[int]:
    """Replace the norms of `body` meanwhile; how many there are."""
    norms = [module for module in body.modules() if _is_llamas(module)]
    for norm in norms:
        norm.forward = partial(_normed, norm)
    try:
        yield len(norms)
    finally:
        for norm in norms:
            del norm.forward


def _is_llamas(module: Any) -> bool:
    if "forward" in vars(module) or getattr(module, "weight", None) is None:  # wrapped by somebody else
        return False
    code, theirs = (getattr(kind.forward, "__code__", None) for kind in (type(module), LlamaRMSNorm))
    if code is None or theirs is None:
        return False
    same = all(getattr(code, part) == getattr(theirs, part) for part in ("co_code", "co_names", "co_consts"))
    return same and module.weight.dtype in (torch.bfloat16, torch.float16)  # of others it may be no tensor


def _normed(norm: Any, hidden: Tensor) -> Tensor:
    return norm.weight * F.rms_norm(hidden, hidden.shape[-1:], eps=norm.variance_epsilon)
