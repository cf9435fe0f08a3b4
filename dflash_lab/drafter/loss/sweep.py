"""One sweep over chunks of whole anchors: logits, terms, logit gradient, hidden gradient, and on to the next chunk.

The gradient of the hidden states is finished inside the forward, so nothing of size [chunk, V] outlives its chunk, and a
[rows, V] tensor never exists. (A loop over chunks under autograd keeps every chunk's logits: it saves nothing.) One set of
buffers serves all chunks. Forward and backward see the same logits by construction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lab.drafter.loss.backends import RowPass
from dflash_lab.drafter.loss.config import LossConfig
from dflash_lab.drafter.loss.matmul import logit_dtype, project, project_back
from dflash_lab.drafter.loss.plan import ChunkPlan
from dflash_lab.drafter.loss.selection import Chunk, Selection
from dflash_lab.drafter.loss.shard import VocabShard
from dflash_lab.drafter.loss.teacher import Teacher
from dflash_lab.drafter.loss.terms import Rows, Terms, finish
from dflash_lab.drafter.loss.weighting import coefficients, row_weights


@dataclass(frozen=True)
class Job:
    """Everything a sweep needs beside the hidden states."""

    head: Tensor  # [V, H] (this rank's slice of it with a shard)
    selection: Selection
    target_states: Tensor | None
    target_head: Tensor | None
    config: LossConfig
    plan: ChunkPlan
    row_pass: RowPass
    shard: VocabShard | None


def sweep(hidden: Tensor, job: Job, *, want_gradient: bool) -> tuple[Tensor | None, Terms]:
    """Return (d total / d hidden [A, B, H] or None, terms of the live rows)."""
    config, chosen = job.config, job.selection
    dtype = logit_dtype(hidden.dtype)
    target = job.target_states is not None
    terms = Terms.empty(
        chosen.rows, hidden.device, dtype, target=target, overlap=target and config.needs_overlap
    )
    grad = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if want_gradient else None
    if not chosen.chunks:
        return grad, terms
    rows = max(chunk.rows for chunk in chosen.chunks)
    vocab = job.head.shape[0]
    logits = torch.empty(rows, vocab, dtype=dtype, device=hidden.device)
    teacher = _teacher(job, rows, hidden.device)
    logit_grad = torch.empty(rows, vocab, dtype=hidden.dtype, device=hidden.device) if want_gradient else None
    for chunk in chosen.chunks:
        place = (chosen.anchor[chunk.start : chunk.end], chosen.slot[chunk.start : chunk.end])
        out = terms.slice(chunk.start, chunk.end)
        z = project(
            hidden[place],
            job.head,
            logits[: chunk.rows],
            scale=config.logit_scale,
            softcap=config.logit_softcap,
        )
        chunk_rows = _rows(job, chunk, z, teacher)
        compute_terms(chunk_rows, job, out)
        _weigh(job, chunk, out, hidden.shape[1])
        if grad is None or logit_grad is None:
            continue
        g = logit_grad[: chunk.rows]
        lost = job.row_pass.gradient(
            chunk_rows, out, coefficients(out, config), config.temperature, config.logit_softcap, g
        )
        grad[place] = _hidden_gradient(g, lost, chunk_rows, job)
    return grad, terms


def compute_terms(rows: Rows, job: Job, out: Terms) -> None:
    """Fill the chunk's terms: partial sums by the row pass, merged over the shards if there are any."""
    config, shard = job.config, job.shard
    out.label.copy_(rows.label)
    label_logit = rows.label_logit()
    if shard is not None:
        label_logit = shard.maximum(label_logit)
    sums = job.row_pass.partials(rows, label_logit, config.temperature)
    if shard is not None:
        sums = shard.merge(sums, config.temperature)
    vocab = rows.z.shape[1] if shard is None else shard.total
    finish(sums, label_logit, rows.label, vocab, config.temperature, out)
    if out.tv is None or out.below is None:
        return
    tv, below = job.row_pass.overlap(rows, out)
    if shard is not None:
        tv, below = shard.sum(torch.stack((tv, below)))
    out.tv.copy_(tv)
    out.below.copy_(below)


def _teacher(job: Job, rows: int, device: torch.device) -> Teacher | None:
    if job.target_states is None:
        return None
    head = job.head if job.target_head is None else job.target_head
    return Teacher.allocate(
        job.target_states, head, rows, device, job.config, separate=job.target_head is not None
    )


def _rows(job: Job, chunk: Chunk, z: Tensor, teacher: Teacher | None) -> Rows:
    """Gather what the row pass needs; the target's argmax becomes the label when the config says so."""
    chosen = job.selection
    offset = 0 if job.shard is None else job.shard.start
    s = source = None
    if teacher is not None and chosen.target_row is not None:
        s, source = teacher.logits(chosen.target_row[chunk.start : chunk.end])
    if chosen.label is not None:
        return Rows(z, s, source, chosen.label[chunk.start : chunk.end], offset)
    assert s is not None and source is not None
    value, token = job.row_pass.argmax(s, offset)
    if job.shard is not None:
        token = job.shard.first_largest(value, token)
    return Rows(z, s, source, token[source], offset)


def _weigh(job: Job, chunk: Chunk, out: Terms, block: int) -> None:
    """Write the weights that the loss uses for this chunk's rows."""
    chosen = job.selection
    part = slice(chunk.start, chunk.end)
    block_of = chosen.block_of[part]
    out.weight.copy_(
        row_weights(chosen.weight[part], out.ce, block_of - block_of[0], chosen.slot[part], block, job.config)
    )


def _hidden_gradient(g: Tensor, lost: Tensor, rows: Rows, job: Job) -> Tensor:
    """[n, H]: the logit gradient through the head, summed in the accumulation dtype, over the shards too.

    What rounding `g` lost at the label's column is given back as a rank-one update a row, exact and nearly free.
    """
    part = project_back(
        g, job.head, torch.empty(g.shape[0], job.head.shape[1], dtype=rows.z.dtype, device=g.device)
    )
    if g.dtype != rows.z.dtype:
        part.addcmul_(lost[:, None], job.head[rows.local_label].to(part.dtype))
    if job.shard is not None:
        part = job.shard.sum(part)
    return part.to(g.dtype)
