"""One sweep over chunks of whole anchors: logits, terms, logit gradient, hidden gradient, and on to the next
chunk.

The gradient of the hidden states is finished inside the forward, so nothing of size [chunk, V] outlives its
chunk, and a [rows, V] tensor never exists. (A loop over chunks under autograd keeps every chunk's logits: it
saves nothing.) One set of buffers serves all chunks. Forward and backward see the same logits by
construction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lab.drafter.loss.config import LossConfig
from dflash_lab.drafter.loss.matmul import logit_buffer, logit_dtype, project, project_back
from dflash_lab.drafter.loss.row_pass import RowPass
from dflash_lab.drafter.loss.selection import Chunk, Selection
from dflash_lab.drafter.loss.shard import VocabShard
from dflash_lab.drafter.loss.teacher import Teacher
from dflash_lab.drafter.loss.terms import Rows, TargetTerms, Terms, finish_drafter, finish_target
from dflash_lab.drafter.loss.weighting import coefficients, row_weights


@dataclass(frozen=True)
class Job:
    """Everything a sweep needs beside the hidden states."""

    head: Tensor  # [V, H] (this rank's slice of it with a shard)
    selection: Selection
    target_states: Tensor | None
    target_head: Tensor | None
    config: LossConfig
    row_pass: RowPass
    shard: VocabShard | None


def sweep(hidden: Tensor, job: Job, *, want_gradient: bool) -> tuple[Tensor | None, Terms]:
    """Return (d total / d hidden [A, B, H] or None, terms of the live rows)."""
    config, chosen = job.config, job.selection
    target = job.target_states is not None
    terms = Terms.empty(chosen.label, chosen.weight, target=target, overlap=target and config.needs_overlap)
    grad = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if want_gradient else None
    if not chosen.chunks:
        return grad, terms
    most = max(chunk.rows for chunk in chosen.chunks)
    vocab = job.head.shape[0]
    logits = logit_buffer(most, vocab, logit_dtype(hidden.dtype), hidden.device)
    logit_grad = logit_buffer(most, vocab, hidden.dtype, hidden.device) if want_gradient else None
    teacher = _teacher(job, most, hidden.device)
    one_pass = (
        job.row_pass.one_pass_hard
        and not target
        and job.shard is None
        and config.hard_weight > 0
        and not config.logit_softcap
    )
    for chunk in chosen.chunks:
        place = (chosen.anchor[chunk.start : chunk.end], chosen.slot[chunk.start : chunk.end])
        out = terms.slice(chunk.start, chunk.end)
        rows = _logits(hidden[place], job, chunk, teacher, logits[: chunk.rows], out)
        g = None if logit_grad is None else logit_grad[: chunk.rows]
        lost = scale = None
        if g is not None and one_pass:
            lost, scale = job.row_pass.hard_gradient(rows, out, config, g)
            _weigh(job, chunk, out, hidden.shape[1])
            scale = scale * out.weight * (config.hard_weight * config.logit_scale)
        else:
            _fill_terms(rows, job, out)
            _weigh(job, chunk, out, hidden.shape[1])
            if target and (config.needs_overlap or g is None):
                _fill_divergence(rows, job, out)
            if g is not None:
                lost = _logit_gradient(rows, job, out, g)
        if grad is not None and g is not None:
            assert lost is not None
            _hidden_gradient(g, rows, job, lost, scale, grad, place)
    return grad, terms


def _teacher(job: Job, rows: int, device: torch.device) -> Teacher | None:
    if job.target_states is None:
        return None
    head = job.head if job.target_head is None else job.target_head
    return Teacher.allocate(
        job.target_states, head, rows, device, job.config, separate=job.target_head is not None
    )


def _logits(
    states: Tensor, job: Job, chunk: Chunk, teacher: Teacher | None, logits: Tensor, out: Terms
) -> Rows:
    """Project both sides of a chunk; the target comes first because its argmax may be the label."""
    config, chosen = job.config, job.selection
    offset = 0 if job.shard is None else job.shard.start
    s = source = target = None
    if teacher is not None and chosen.target_row is not None:
        s, source = teacher.logits(chosen.target_row[chunk.start : chunk.end])
        target = _target_terms(s, job, offset)
        assert out.target_argmax is not None
        torch.index_select(target.argmax, 0, source, out=out.target_argmax)
        if chosen.label is None:
            out.label.copy_(out.target_argmax)
    z = project(states, job.head, logits, scale=config.logit_scale, softcap=config.logit_softcap)
    return Rows(z, out.label, s, source, target, offset)


def _target_terms(s: Tensor, job: Job, offset: int) -> TargetTerms:
    if job.shard is None:
        return job.row_pass.target_terms(s, job.config.temperature)
    sums = job.row_pass.target_sums(s, offset, job.config.temperature)
    return finish_target(job.shard.merge_target(sums, job.config.temperature), job.config.temperature)


def _fill_terms(rows: Rows, job: Job, out: Terms) -> None:
    temperature = job.config.temperature
    if job.shard is None:
        job.row_pass.drafter_terms(rows, temperature, out)
        return
    logit = job.shard.maximum(rows.label_logit())
    sums = job.shard.merge_drafter(job.row_pass.drafter_sums(rows, logit, temperature), temperature)
    finish_drafter(sums, logit, rows.label, job.shard.total, temperature, out)


def _fill_divergence(rows: Rows, job: Job, out: Terms) -> None:
    sums = torch.stack(job.row_pass.divergence(rows, out, job.config.temperature))
    if job.shard is not None:
        sums = job.shard.sum(sums)
    for field, value in zip((out.kl, out.tv, out.below), sums):
        if field is not None:
            field.copy_(value)


def _weigh(job: Job, chunk: Chunk, out: Terms, block: int) -> None:
    """Write the weights that depend on the chunk's terms; given weights are in place already."""
    if job.config.weighting == "given":
        return
    chosen, part = job.selection, slice(chunk.start, chunk.end)
    block_of = chosen.block_of[part]
    weight = row_weights(out.weight, out.ce, block_of - block_of[0], chosen.slot[part], block, job.config)
    out.weight.copy_(weight)


def _logit_gradient(rows: Rows, job: Job, out: Terms, g: Tensor) -> Tensor:
    """Write the logit gradient into g [n, V]; return what rounding lost at the label [n]."""
    lost, kl = job.row_pass.gradient(rows, out, coefficients(out, job.config), job.config, g)
    if kl is not None and out.kl is not None and not job.config.needs_overlap:
        out.kl.copy_(kl if job.shard is None else job.shard.sum(kl))
    return lost


def _hidden_gradient(
    g: Tensor,
    rows: Rows,
    job: Job,
    lost: Tensor,
    scale: Tensor | None,
    grad: Tensor,
    place: tuple[Tensor, Tensor],
) -> None:
    """The logit gradient through the head, summed in the accumulation dtype, over the shards too, into grad[place]."""
    part = torch.empty(g.shape[0], job.head.shape[1], dtype=rows.z.dtype, device=g.device)
    project_back(g, job.head, part)
    give_back = None if g.dtype == rows.z.dtype else lost
    if job.shard is not None:
        if give_back is not None:
            part.addcmul_(give_back[:, None], job.head[rows.local_label].to(part.dtype))
        part, give_back = job.shard.sum(part), None
    job.row_pass.deposit(grad, place, part, rows, job.head, lost=give_back, scale=scale)
