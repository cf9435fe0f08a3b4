"""Training on states that a live target makes when they are needed: no feature store."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn
from transformers import AttentionInterface

from dflash_lab.data.batching import plan_batches
from dflash_lab.data.samples import FeatureItem, FlatTokens, read_samples
from dflash_lab.drafter.rows import Row, seeded
from dflash_lab.errors import InputError, LabError
from dflash_lab.models.compiled import captured, why_not_compiled
from dflash_lab.models.hooks import TOLERANCE, Taps, layer_errors
from dflash_lab.models.load import Target
from dflash_lab.models.spans import FULL, SLIDING, Span, besides

logger = logging.getLogger(__name__)

# A name with "flash" in it means a kernel package to transformers.
ATTENTION = "packed_documents"


class Unpackable(LabError, RuntimeError):
    """This target's attention cannot be kept inside documents here."""


def documents_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document of a packed row, as transformers calls it.

    query [1, nq, S, d], key and value [1, nkv, S, d] -> [1, S, nq, d]. `cu_seq_lens_q` [n+1] i32 are the
    documents' ends (empty ones allowed), `max_length_q` bounds their length.
    """
    if cu_seq_lens_q is None or softcap is not None or s_aux is not None:
        raise Unpackable("its attention hides the documents' bounds, caps its scores or has sinks")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [S, heads, d]
    if query.is_cuda:
        out = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            0.0,
            True,
            False,
            scale=scaling,
            window_size_left=None if sliding_window is None else sliding_window - 1,
            window_size_right=None if sliding_window is None else 0,
        )[0]
        return out[None], None
    parts = []
    for start, end in itertools.pairwise(cu_seq_lens_q.tolist()):
        if start == end:
            continue
        mask = None
        if sliding_window is not None:
            ahead = torch.arange(end - start)[:, None] - torch.arange(end - start)
            mask = (ahead >= 0) & (ahead < sliding_window)
        q1, k1, v1 = (tensor[start:end].transpose(0, 1)[None] for tensor in (q, k, v))  # [1, heads, L, d]
        out = F.scaled_dot_product_attention(
            q1, k1, v1, attn_mask=mask, is_causal=mask is None, scale=scaling,
            enable_gqa=q1.shape[1] != k1.shape[1],
        )  # fmt: skip
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)[None], None


AttentionInterface.register(ATTENTION, documents_attention)


BOUNDS_STEP = 64  # documents of a row are counted in steps of this many, so that few shapes occur
Bounds = Sequence[tuple[int, int]]  # first row and the one behind the last of each document


def unpackable(spans: Sequence[Span], dtype: torch.dtype, cuda: bool) -> str:
    """Why the packed path is not even tried with a target of `dtype`, or nothing. spans: of its layers."""
    if odd := besides(spans, [FULL, SLIDING]):
        return f"{odd} cannot be kept inside documents"
    if cuda and dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention takes no {dtype}"
    return ""


class RowForward:
    """Runs packed rows through `target` in one forward and hands over the states a drafter is trained on, on
    the device, rounded to bf16 as a feature store keeps them, so that both train the same drafter.

    `packed`: the row runs as one sequence; positions restart with each document and attention stays inside it
    (FlashAttention's variable-length kernel on CUDA, a document at a time on a CPU). Nothing is padded, and
    rows of one shape can be compiled and recorded as a CUDA graph, which launches the whole forward at once.
    `padded`: documents side by side, padded on the right, in batches of similar length. Exact for any causal
    or recurrent layer; the path of hybrid targets, whose recurrent layers know no documents, and of every
    target whose packed forward was not equal to the plain one when it was tried.

    `row_tokens`: rows on CUDA are made this long; `longest`: no document is longer. `compile` fuses each
    layer's small operations (CUDA). `path` says which way was taken.
    """

    def __init__(
        self, target: Target, tap_ids: Sequence[int], *, row_tokens: int, longest: int, compile: bool = False
    ) -> None:
        self.target, self.row_tokens, self.longest = target, row_tokens, min(longest, row_tokens)
        last = target.num_layers - 1
        self._ids = sorted({*tap_ids, last})
        self._order = [self._ids.index(tap) for tap in tap_ids]
        self._taps = Taps(target, self._ids)
        self._taps.__enter__()  # before anything is compiled; they stay as long as the target
        self._cuda = target.device.type == "cuda"
        self._graphs: dict[int, _Graph] = {}
        self._records = False
        self.path, self.compiled = "padded", False
        with torch.no_grad():
            if why := unpackable(target.spans, target.dtype, self._cuda) or self._adopt_packed():
                logger.warning("live target: documents run padded, side by side, which is slower: %s", why)
            elif compile and self._cuda:
                if why := self._compile():
                    logger.warning("live target: its layers stay as they are: %s", why)
                self.compiled = not why
        logger.info("live target %s on %s: rows %s", target.name, target.device, self.way)

    @property
    def way(self) -> str:
        """How rows are run, in words: padded, packed, or packed and compiled."""
        return "packed and compiled" if self.compiled else self.path

    @torch.no_grad()
    def __call__(self, ids: Tensor, positions: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
        """States of a row: taps [S, K*H] and final [S, H] in bf16, zero behind the last document.

        `ids` and `positions` [S] on the target's device; `bounds` of its documents, side by side from 0.
        """
        if self.path == "packed":
            taps, final = self._packed(ids, positions, bounds)
        else:
            taps, final = self._padded(ids, bounds)
        for tensor in (taps, final):
            tensor[bounds[-1][1] :] = 0
        return taps, final

    def _adopt_packed(self) -> str:
        """Take the packed path if it gives what the plain forward does; else say why not."""
        body = self.target.body
        documents, proof = self._proof()
        plain = [self._plain(document[None]) for document in documents]
        before = body.config._attn_implementation
        body.set_attn_implementation(ATTENTION)
        try:
            taps, final = self._sequence(*proof)
        except Unpackable as refusal:
            why = str(refusal)
        else:
            found = torch.cat([taps, final], dim=-1)
            error, start = 0.0, 0
            for states in plain:
                wanted = torch.cat(states, dim=-1)[0]
                error = max(error, _token_error(found[start : start + len(wanted)], wanted))
                start += len(wanted)
            limit = TOLERANCE[self.target.dtype] + torch.finfo(torch.bfloat16).eps
            why = "" if error <= limit else f"packed differs from plain by rel-L2 {error:.2g}"
        if why:
            self._taps.clear()
            body.set_attn_implementation(before)
            return why
        self.path = "packed"
        self._records = self._cuda and not self.target.has_experts
        return ""

    def _proof(self) -> tuple[list[Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Two documents of random tokens, and the inputs of the row that holds them."""
        lengths = [max(1, min(n, self.longest, self.row_tokens // 2)) for n in (70, 33)]
        generator, device = seeded("live proof", 0), self.target.device
        documents = [
            torch.randint(self.target.vocab_size, (n,), generator=generator).to(device) for n in lengths
        ]
        ids = torch.cat(documents)
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        if self._cuda:
            ids, positions = (F.pad(t, (0, self.row_tokens - len(t))) for t in (ids, positions))
        ends = np.cumsum([0, *lengths]).tolist()
        return documents, (ids, positions, self._ends(len(ids), list(itertools.pairwise(ends))))

    def _compile(self) -> str:
        """Compile every layer, and keep that if each adds to the same input what it added before; else say
        why not.
        """
        layers, (_, proof) = list(self.target.layers), self._proof()
        compiled = [torch.compile(layer.forward, dynamic=False) for layer in layers]
        tokens = int(proof[2][2])  # of the two documents

        def measure(*states: Tensor) -> float:
            stream, plain, other = (state[0, :tokens] for state in states)
            return _token_error(other, plain, plain - stream, torch.finfo(plain.dtype).eps * plain)

        try:
            errors = layer_errors(
                self.target.layers, dict(enumerate(compiled)), lambda: self._sequence(*proof), measure
            )
        except Exception as error:
            if not (why := why_not_compiled(error)):
                raise
            return f"they do not compile on this machine ({why})"
        worst = max(errors, key=errors.__getitem__)
        if not errors[worst] <= TOLERANCE[self.target.dtype]:
            return f"compiled, layer {worst} adds something else, by rel-L2 {errors[worst]:.2g}"
        for layer, forward in zip(layers, compiled, strict=True):
            layer.forward = forward
        return ""

    @torch.no_grad()
    def _plain(self, batch: Tensor) -> list[Tensor]:
        """The stored states of documents [B, L], each [B, L, H]: taps in order, then the final one."""
        self.target.body(input_ids=batch, use_cache=False)
        caught = self._taps.take()
        return [*(caught[at] for at in self._order), caught[-1]]

    def _packed(self, ids: Tensor, positions: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
        cumulative = self._ends(len(ids), bounds)
        if not self._records or len(ids) != self.row_tokens:
            return self._sequence(ids, positions, cumulative)
        graph = self._graphs.get(len(cumulative))
        if graph is None:
            graph = self._graphs[len(cumulative)] = _Graph(self._sequence, (ids, positions, cumulative))
        return graph(ids, positions, cumulative)

    def _ends(self, size: int, bounds: Bounds) -> Tensor:
        """Where documents end in a row of `size` tokens, [n+1] i32 on the device."""
        ends = [0, *(stop for _, stop in bounds)]
        while ends[-1] < size:  # padding is made of documents too: attention leaves no row unwritten
            ends.append(min(ends[-1] + self.longest, size))
        ends += [size] * (-len(ends) % BOUNDS_STEP + 1)
        host = torch.tensor(ends, dtype=torch.int32)
        return host.pin_memory().to(self.target.device, non_blocking=True) if self._cuda else host

    def _sequence(self, ids: Tensor, positions: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        self.target.body(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            cu_seq_lens_q=ends,
            cu_seq_lens_k=ends,
            max_length_q=self.longest,
            max_length_k=self.longest,
        )
        caught = [state[0].to(torch.bfloat16) for state in self._taps.take()]
        return torch.cat([caught[at] for at in self._order], dim=-1), caught[-1].clone()

    def _padded(self, ids: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
        lengths = np.asarray([stop - start for start, stop in bounds])
        hidden, device = self.target.hidden_size, ids.device
        taps = torch.zeros(len(ids), len(self._order) * hidden, dtype=torch.bfloat16, device=device)
        final = torch.zeros(len(ids), hidden, dtype=torch.bfloat16, device=device)
        plan = plan_batches(lengths, token_budget=max(self.row_tokens, 1), max_batch=1024, chunk=16)
        for batch in plan.batches:
            longest = int(lengths[batch].max())
            starts = np.asarray([bounds[i][0] for i in batch])
            where = starts[:, None] + np.arange(longest)  # [D, L] row of each token
            real = np.arange(longest) < lengths[batch][:, None]
            rows = _to(np.where(real, where, 0), device)
            padded = torch.where(_to(real, device), ids[rows], 0)
            flat, targets = _to(np.flatnonzero(real), device), _to(where[real], device)
            states = [state.flatten(0, 1)[flat].to(torch.bfloat16) for state in self._plain(padded)]
            taps[targets] = torch.cat(states[:-1], dim=-1)
            final[targets] = states[-1]
        return taps, final


class _Graph:
    """A forward recorded once for one shape; a replay launches all its kernels together."""

    def __init__(self, forward: Any, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = tuple(tensor.clone() for tensor in inputs)

        def run() -> None:
            self._outputs = forward(*self._inputs)

        self._replay = captured(run, inputs[0].device)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        self._replay()
        taps, final = self._outputs
        return taps.clone(), final.clone()  # the next replay writes over its own


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _token_error(
    found: Tensor, wanted: Tensor, scale: Tensor | None = None, allowed: Tensor | None = None
) -> float:
    """Median over tokens [L, N] of |found - wanted| - |allowed|, relative to |scale| (default |wanted|).

    A median, for a token that a model parks its attention on has a hundred times the norm of the others, and
    rounding of its own; a mask that is wrong is wrong for most tokens of a document.
    """
    gap = (found.double() - wanted.double()).norm(dim=-1)
    if allowed is not None:
        gap = (gap - allowed.double().norm(dim=-1)).clamp_min(0)
    denominator = (wanted if scale is None else scale).double().norm(dim=-1).clamp_min(1e-30)
    error = float((gap / denominator).median())
    return error if bool(found.isfinite().all()) else float("inf")


class SampleItems:
    """The samples of a file without states: what rows are planned and packed from, on the prefetch thread."""

    def __init__(self, path: Path | str, hidden_size: int, tap_ids: list[int]) -> None:
        """Read all tokens into memory (5 bytes a token)."""
        frame = read_samples(path)
        if frame.is_empty():
            raise InputError(f"{path}: holds no sample. Run prepare on conversations first.")
        self.hidden_size, self.tap_ids = hidden_size, list(tap_ids)
        self.lengths = frame["length"].to_numpy()
        if self.lengths.min() < 1:
            empty = frame["id"][int(self.lengths.argmin())]
            raise InputError(f"{path}: sample {empty!r} has no token. Run prepare again.")
        self.heldout = (frame["split"] == "heldout").to_numpy()
        self.hashes: list[str] = frame["content_hash"].to_list()
        self._tokens = FlatTokens(frame)
        self.path = path

    def __len__(self) -> int:
        return len(self.lengths)

    def bare(self, index: int) -> FeatureItem:
        """Sample `index` with states of width 0."""
        ids, mask = map(torch.from_numpy, self._tokens.of(index))
        return FeatureItem(
            hash=self.hashes[index],
            input_ids=ids,
            loss_mask=mask,
            taps=torch.zeros(len(ids), 0, dtype=torch.bfloat16),
            final=None,
            heldout=bool(self.heldout[index]),
        )

    def check_vocabulary(self, size: int) -> None:
        """`InputError` if a token lies outside a vocabulary of `size`."""
        lowest, highest = self._tokens.id_range()
        if lowest < 0 or highest >= size:
            raise InputError(
                f"{self.path}: holds token {lowest if lowest < 0 else highest}, the target knows "
                f"0..{size - 1}: the samples were made with another tokenizer. Run prepare with this target."
            )

    def digest(self) -> str:
        """Hash of the samples in their order, on which the drawing of rows depends."""
        digest = xxhash.xxh3_128()
        for name, heldout in zip(self.hashes, self.heldout, strict=True):
            digest.update(bytes.fromhex(name) + bytes([bool(heldout)]))
        return digest.hexdigest()


class LiveItems(SampleItems):
    """Samples and the target that fills in their states, on the target's device, a row at a time. Nothing is
    kept: states cost no disk, and every epoch runs the target again. What is filled in depends on the row
    alone, so a run resumes exactly, as from a store.

    The target is theirs from then on: its attention is told apart by documents, so it runs no other forwards.
    """

    def __init__(
        self,
        path: Path | str,
        target: Target,
        *,
        tap_ids: list[int],
        context_tokens: int,
        compile: bool = False,
    ) -> None:
        super().__init__(path, target.hidden_size, tap_ids)
        self.check_vocabulary(target.vocab_size)
        self.target = target
        longest = int(min(self.lengths.max(), context_tokens))
        self.forward = RowForward(
            target, tap_ids, row_tokens=context_tokens, longest=longest, compile=compile
        )

    def source(self) -> dict[str, Any]:
        """What the states depend on, as plain JSON values."""
        return {"samples": self.digest(), "target": self.target.identity, "tap_ids": self.tap_ids}

    def begin(self, epoch: int, index: int) -> None:
        """Rows are filled when they are asked for; nothing runs ahead."""

    def fill_heldout(self, row: Row, number: int) -> Row:
        """Held-out row `number` with its states."""
        return self.fill(row)

    def fill(self, row: Row, epoch: int = 0, index: int = 0) -> Row:
        """`row`, on the target's device, with its states, which its place in the data does not change."""
        bounds = [
            (part.context_start, part.context_stop)
            for part in row.layout.segments
            if part.context_stop > part.context_start
        ]
        taps, final = self.forward(row.input_ids, row.layout.positions, bounds)
        return dataclasses.replace(row, taps=taps, final=final)

    def __getitem__(self, index: int) -> FeatureItem:
        """Sample `index`, its first row of tokens at most, with its states in host memory."""
        item = self.bare(index)
        length = min(len(item), self.forward.row_tokens)
        size = self.forward.row_tokens if self.target.device.type == "cuda" else length
        ids, positions = torch.zeros(2, size, dtype=torch.long)
        ids[:length], positions[:length] = item.input_ids[:length], torch.arange(length)
        device = self.target.device
        states = self.forward(ids.to(device), positions.to(device), [(0, length)])
        taps, final = (tensor[:length].cpu() for tensor in states)
        ids, mask = item.input_ids[:length], item.loss_mask[:length]
        return dataclasses.replace(item, input_ids=ids, loss_mask=mask, taps=taps, final=final)
