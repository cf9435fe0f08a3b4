"""One sweep over chunks of whole anchors: logits, terms, logit gradient, hidden gradient, and on to the next
chunk.

The gradient of the hidden states is finished inside the forward, so nothing of size [chunk, V] outlives its
chunk, and a [rows, V] tensor never exists. (A loop over chunks under autograd keeps every chunk's logits: it
saves nothing.) One set of buffers serves all chunks. Forward and backward see the same logits by
construction. Both sides of a chunk are projected by one matmul, so that the head is read twice a chunk, not
three times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lab.drafter.loss.config import LossConfig
from dflash_lab.drafter.loss.matmul import logit_buffer, logit_dtype, project, project_back
from dflash_lab.drafter.loss.row_pass import RowPass
from dflash_lab.drafter.loss.selection import Chunk, Selection, upload
from dflash_lab.drafter.loss.shard import VocabShard
from dflash_lab.drafter.loss.teacher import Teacher
from dflash_lab.drafter.loss.terms import Rows, TargetTerms, Terms, finish_drafter, finish_target
from dflash_lab.drafter.loss.weighting import (
    Coefficients,
    Length,
    Places,
    coefficients,
    dpace_weights,
    length,
)


@dataclass(frozen=True)
class SweepJob:
    """Everything a sweep needs beside the hidden states."""

    head: Tensor  # [V, H] (this rank's slice of it with a shard)
    selection: Selection
    target_states: Tensor | None
    target_head: Tensor | None
    config: LossConfig
    row_pass: RowPass
    shard: VocabShard | None
    scale: Tensor | None  # scalar that multiplies the gradient before it is rounded


def sweep(hidden: Tensor, job: SweepJob, *, want_gradient: bool) -> tuple[Tensor | None, Terms]:
    """Return (scale * d total / d hidden [A, B, H] or None, terms of the live rows)."""
    chosen, target = job.selection, job.target_states is not None
    overlap = target and job.config.needs_overlap
    terms = Terms.empty(
        chosen.label, chosen.weight, target=target, overlap=overlap, length=job.config.length_weight > 0
    )
    grad = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if want_gradient else None
    if chosen.chunks:
        _Sweep(hidden, job, terms, grad).run()
    return grad, terms


class _Sweep:
    """The buffers of one sweep and the steps of a chunk."""

    def __init__(self, hidden: Tensor, job: SweepJob, terms: Terms, grad: Tensor | None) -> None:
        self.hidden, self.job, self.terms, self.grad = hidden, job, terms, grad
        self.config = job.config
        self.offset = 0 if job.shard is None else job.shard.start
        most, device = max(chunk.rows for chunk in job.selection.chunks), hidden.device
        self.teacher = None
        if job.target_states is not None:
            self.teacher = Teacher.allocate(job.target_states, job.target_head, most, device, self.config)
        both = 2 * most if self.teacher is not None and self.teacher.head is None else most
        vocab, size = job.head.shape
        self.states = torch.empty(both, size, dtype=hidden.dtype, device=device)
        self.logits = logit_buffer(both, vocab, logit_dtype(hidden.dtype), device)
        self.part = torch.empty(most, size, dtype=self.logits.dtype, device=device)
        self.logit_grad = None if grad is None else logit_buffer(most, vocab, hidden.dtype, device)
        self.flat = hidden.view(-1, size) if hidden.is_contiguous() else None
        varies = self.config.lk_weight or self.config.length_weight
        fixed = self.config.weighting == "given" and not varies
        self.fixed = coefficients(terms, self.config, job.scale) if fixed else None
        if self.config.weighting == "dpace" or self.config.length_weight:
            block_of, chunks = job.selection.block_of, job.selection.chunks
            within = torch.cat([block_of[c.start : c.end] - block_of[c.start] for c in chunks])
            self.block_of = upload(within, device)  # counted from 0 in each chunk
            self.back = hidden.shape[1] - 1 - job.selection.slot

    def run(self) -> None:
        for chunk in self.job.selection.chunks:
            out = self.terms.slice(chunk.start, chunk.end)
            rows = self.project(chunk, out)
            if self.grad is None or self.logit_grad is None:
                self.fill_terms(chunk, rows, out)
                if self.config.length_weight:
                    self.length(chunk, out)
                continue
            g = self.logit_grad[: chunk.rows]
            lost, scale = self.logit_gradient(chunk, rows, out, g)
            self.hidden_gradient(chunk, rows, g, lost, scale, self.grad)

    def project(self, chunk: Chunk, out: Terms) -> Rows:
        """Logits of both sides of a chunk."""
        job, n = self.job, chunk.rows
        states = self.states[:n]
        place = self.place(chunk)
        if self.flat is not None:
            torch.index_select(self.flat, 0, job.selection.position[chunk.start : chunk.end], out=states)
        else:
            states.copy_(self.hidden[place])
        s = source = None
        u = 0
        if self.teacher is not None and job.selection.target_row is not None:
            target, source = self.teacher.select(job.selection.target_row[chunk.start : chunk.end])
            source = upload(source, self.hidden.device)
            if self.teacher.head is None:
                u = target.shape[0]
                self.states[n : n + u].copy_(target)
            else:
                s = self.teacher.logits(target)
        shape = {"scale": self.config.logit_scale, "softcap": self.config.logit_softcap}
        logits = project(self.states[: n + u], job.head, self.logits[: n + u], **shape)
        return Rows(logits[:n], out.label, logits[n:] if u else s, source, None, self.offset)

    def place(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        chosen = self.job.selection
        return chosen.anchor[chunk.start : chunk.end], chosen.slot[chunk.start : chunk.end]

    def logit_gradient(self, chunk: Chunk, rows: Rows, out: Terms, g: Tensor) -> tuple[Tensor, Tensor | None]:
        """Fill the terms and the logit gradient g [n, V]; (what rounding lost at the label, factor still to
        apply).
        """
        row_pass, config = self.job.row_pass, self.config
        alone = (
            rows.s is None
            and self.job.shard is None
            and config.hard_weight > 0
            and not config.logit_softcap
            and not config.length_weight
        )
        if row_pass.one_pass_hard and alone:
            lost, scale = row_pass.hard_gradient(rows, out, config, g)
            self.weigh(chunk, out)
            factor = self.factors(chunk, out).hard
            assert factor is not None
            return lost, scale * factor
        rows = self.fill_terms(chunk, rows, out)
        lost, kl = row_pass.gradient(rows, out, self.factors(chunk, out), config, g)
        if kl is not None and out.kl is not None and not config.needs_overlap:
            out.kl.copy_(kl if self.job.shard is None else self.job.shard.sum(kl))
        return lost, None

    def factors(self, chunk: Chunk, out: Terms) -> Coefficients:
        if self.fixed is not None:
            return self.fixed.slice(chunk.start, chunk.end)
        hanging = self.length(chunk, out) if self.config.length_weight else None
        return coefficients(out, self.config, self.job.scale, hanging)

    def length(self, chunk: Chunk, out: Terms) -> Length:
        """The length term of a chunk whose other terms are there; fills `reached`."""
        if self.config.overlaps:
            assert out.tv is not None
            acceptance = 1 - out.tv
        else:
            acceptance = torch.exp(-out.ce)
        found = length(acceptance, out.weight, self.places(chunk))
        assert out.reached is not None
        out.reached.copy_(found.reached)
        return found

    def fill_terms(self, chunk: Chunk, rows: Rows, out: Terms) -> Rows:
        """Fill the terms of a chunk; return its rows with the target's terms in place."""
        if rows.s is not None and rows.source is not None:
            target = self.target_terms(rows.s)
            assert out.target_argmax is not None
            torch.index_select(target.argmax, 0, rows.source, out=out.target_argmax)
            if self.job.selection.label is None:
                out.label.copy_(out.target_argmax)
            rows = Rows(rows.z, rows.label, rows.s, rows.source, target, rows.offset)
        self.drafter_terms(rows, out)
        self.weigh(chunk, out)
        if rows.s is not None and (self.config.needs_overlap or self.grad is None):
            sums = torch.stack(self.job.row_pass.divergence(rows, out, self.config.temperature))
            if self.job.shard is not None:
                sums = self.job.shard.sum(sums)
            for field, value in zip((out.kl, out.tv, out.below), sums):
                if field is not None:
                    field.copy_(value)
        return rows

    def target_terms(self, s: Tensor) -> TargetTerms:
        row_pass, temperature = self.job.row_pass, self.config.temperature
        if self.job.shard is None:
            return row_pass.target_terms(s, temperature)
        sums = self.job.shard.merge_target(row_pass.target_sums(s, self.offset, temperature), temperature)
        return finish_target(sums, temperature)

    def drafter_terms(self, rows: Rows, out: Terms) -> None:
        row_pass, shard, temperature = self.job.row_pass, self.job.shard, self.config.temperature
        if shard is None:
            row_pass.drafter_terms(rows, temperature, out)
            return
        logit = shard.maximum(rows.label_logit())
        sums = shard.merge_drafter(row_pass.drafter_sums(rows, logit, temperature), temperature)
        finish_drafter(sums, logit, rows.label, shard.total, temperature, out)

    def weigh(self, chunk: Chunk, out: Terms) -> None:
        """Multiply in the weights that depend on the chunk's terms; given weights are in place already."""
        if self.config.weighting == "dpace":
            out.weight.mul_(dpace_weights(out.ce, self.places(chunk), self.config.dpace_alpha))

    def places(self, chunk: Chunk) -> Places:
        """Where a chunk's rows stand in its blocks."""
        part, block_of = slice(chunk.start, chunk.end), self.job.selection.block_of
        blocks = int(block_of[chunk.end - 1] - block_of[chunk.start]) + 1  # on the CPU
        slot = self.job.selection.slot[part]
        return Places(self.block_of[part], slot, self.back[part], blocks, self.hidden.shape[1])

    def hidden_gradient(
        self, chunk: Chunk, rows: Rows, g: Tensor, lost: Tensor, scale: Tensor | None, grad: Tensor
    ) -> None:
        """The logit gradient through the head, summed in the accumulation dtype, over the shards too, into
        grad.
        """
        job = self.job
        part = project_back(g, job.head, self.part[: chunk.rows])
        give_back = None if g.dtype == part.dtype else lost
        if job.shard is not None:
            if give_back is not None:
                part.addcmul_(give_back[:, None], job.head[rows.local_label].to(part.dtype))
            part, give_back = job.shard.sum(part), None
        job.row_pass.deposit(grad, self.place(chunk), part, rows, job.head, lost=give_back, scale=scale)
