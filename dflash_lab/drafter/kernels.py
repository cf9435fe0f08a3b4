"""Triton kernels of training: the loss's row pass and AdamW."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_lab.drafter.loss_rows import RowPass
from dflash_lab.drafter.loss_terms import (
    Coefficients,
    DrafterSums,
    LossConfig,
    Rows,
    TargetSums,
    TargetTerms,
    Terms,
)

# ---- the row pass: float32 logits are read once for the terms and once for the gradient
#
# Tile sizes were chosen on an H200, where each kernel moves 3.8 to 4.0 TB/s of the 4.0 that a copy reaches.

LANES, WARPS = 512, 8  # a tile of 4 * LANES columns, 16 bytes a thread
TILE_COLUMNS = 2048
GRADIENT_TILES = 4  # tiles a program of the gradient kernel
DEPOSIT_COLUMNS = 1024

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.0e38)  # the maximum of a lane that has seen only -inf, so that no -inf - -inf arises
NOWHERE = tl.constexpr(2147483647)

# Pointers to one number a row. They start where a chunk starts, so their alignment changes from row to row of
# a run; a kernel made for each case would be compiled in the middle of it. No flag (constexpr) may bear one
# of these names: Triton 3.6 refuses such a kernel at its first launch.
ROWS = (
    "LABEL", "LOGIT", "LSE", "LSE_T", "CE", "ENTROPY", "P_MAX", "ARGMAX", "ABOVE", "PEAK", "MASS", "SLOPE",
    "MASS_T", "SOURCE", "TARGET_LSE", "TARGET_LSE_T", "LESS_MASS", "RANK", "HARD", "SOFT", "CAP", "TV",
    "LOST", "KL", "INVERSE", "SCALE", "ANCHOR", "SLOT",
)  # fmt: skip


@triton.jit
def before_label(z, column, logit, label, start, TILE: tl.constexpr):
    """How many of each lane's 4 logits come before the label: larger, or equal with a lower column."""
    if start + TILE <= label:
        count = tl.sum((z >= logit).to(tl.int32), axis=1)
    else:
        if start > label:
            count = tl.sum((z > logit).to(tl.int32), axis=1)
        else:
            count = tl.sum(((z > logit) | ((z == logit) & (column < label))).to(tl.int32), axis=1)
    return count


@triton.jit
def absorb(z, start, peak, mass, slope, mass_t, best, inv_t, HOT: tl.constexpr):
    """Add one tile z [LANES, 4] that starts at column `start` to every lane's running sums."""
    new = tl.maximum(peak, tl.max(z, axis=1))
    best = tl.where(new > peak, start, best)
    distance = (z - new[:, None]) * LOG2E
    share = tl.exp2(distance)
    moved = peak - new
    scale = tl.exp2(moved * LOG2E)
    # -1.5e4 stands for -inf, whose product with share = 0 would be NaN
    slope = (slope + mass * moved) * scale + tl.sum(share * tl.maximum(distance, -1.5e4), axis=1) / LOG2E
    mass = mass * scale + tl.sum(share, axis=1)
    if HOT:
        mass_t = mass_t * tl.exp2(moved * LOG2E * inv_t) + tl.sum(tl.exp2(distance * inv_t), axis=1)
    return new, mass, slope, mass_t, best


@triton.jit
def merge_lanes(peak, mass, slope, mass_t, inv_t):
    """(maximum, mass, slope, mass at T) of lanes, or of any parts of a row, each with sums relative to its
    own peak.
    """
    top = tl.max(peak, axis=0)
    moved = peak - top
    scale = tl.exp2(moved * LOG2E)
    scale_t = tl.exp2(moved * LOG2E * inv_t)
    row_slope = tl.sum((slope + mass * moved) * scale, axis=0)
    return top, tl.sum(mass * scale, axis=0), row_slope, tl.sum(mass_t * scale_t, axis=0)


@triton.jit
def first_column(Z, top, peak, best, vocab, LANES: tl.constexpr):
    """The first column whose logit is `top`, given each lane's maximum and the tile that first reached it."""
    group = tl.min(tl.where(peak == top, best + tl.arange(0, LANES) * 4, NOWHERE), axis=0)
    group = tl.minimum(group, vocab - 1)
    near = group + tl.arange(0, 4)
    value = tl.load(Z + near, mask=near < vocab, other=-float("inf"))
    first = tl.min(tl.where(value == top, near, NOWHERE), axis=0)
    return tl.where(first == NOWHERE, group, first)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def sums_kernel(
    Z, LABEL, LOGIT, LSE, LSE_T, CE, ENTROPY, P_MAX, ARGMAX, ABOVE, PEAK, MASS, SLOPE, MASS_T,
    stride, vocab, offset, inv_t,
    LABELLED: tl.constexpr, HOT: tl.constexpr, FINISH: tl.constexpr, TARGET: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """One program a row: its sums, or with FINISH its terms.

    Sums are kept a lane at a time: each lane (4 neighbouring columns of every tile) has its own running
    maximum and sums, so the loop has no reduction across threads; lanes are merged once at a row's end, as an
    online softmax merges.

    LABELLED: a label is given. HOT: temperature is not 1. TARGET: a target row, of which only lse, lse_t,
    argmax are wanted.
    """
    TILE: tl.constexpr = LANES * 4
    row = tl.program_id(0).to(tl.int64)  # row * V passes 2^31 at 8,649 rows of 248,320
    Z += row * stride
    column = tl.arange(0, LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]
    peak = tl.full([LANES], LOWEST, tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    slope = tl.zeros([LANES], tl.float32)
    mass_t = tl.zeros([LANES], tl.float32)
    best = tl.zeros([LANES], tl.int32)
    above = tl.zeros([LANES], tl.int32)
    logit = 0.0
    label = 0
    if LABELLED:
        label = (tl.load(LABEL + row) - offset).to(tl.int32)
        if FINISH:
            logit = tl.load(Z + tl.where((label >= 0) & (label < vocab), label, 0))
        else:
            logit = tl.load(LOGIT + row)
    whole = vocab // TILE * TILE
    for start in range(0, whole, TILE):
        z = tl.load(Z + start + column)
        peak, mass, slope, mass_t, best = absorb(z, start, peak, mass, slope, mass_t, best, inv_t, HOT)
        if LABELLED:
            above += before_label(z, start + column, logit, label, start, TILE)
    if whole < vocab:
        z = tl.load(Z + whole + column, mask=whole + column < vocab, other=-float("inf"))
        peak, mass, slope, mass_t, best = absorb(z, whole, peak, mass, slope, mass_t, best, inv_t, HOT)
        if LABELLED:
            # columns past the end are -inf and must not tie with a label of -inf that another slice owns
            tie = (z == logit) & (whole + column < tl.minimum(label, vocab))
            above += tl.sum(((z > logit) | tie).to(tl.int32), axis=1)
    if not HOT:
        mass_t = mass
    top, row_mass, row_slope, row_mass_t = merge_lanes(peak, mass, slope, mass_t, inv_t)
    tl.store(ARGMAX + row, first_column(Z, top, peak, best, vocab, LANES).to(tl.int64) + offset)
    if LABELLED:
        tl.store(ABOVE + row, tl.sum(above, axis=0).to(tl.int64))
    if FINISH:
        log_mass = tl.log(row_mass)
        lse = top + log_mass
        tl.store(LSE + row, lse)
        tl.store(LSE_T + row, top * inv_t + tl.log(row_mass_t))
        if not TARGET:
            known = (label >= 0) & (label < vocab)
            tl.store(CE + row, tl.where(known, lse - logit, float("nan")))
            tl.store(ENTROPY + row, log_mass - row_slope / row_mass)
            tl.store(P_MAX + row, 1.0 / row_mass)
    else:
        tl.store(PEAK + row, top)
        tl.store(MASS + row, row_mass)
        tl.store(MASS_T + row, row_mass_t)
        if not TARGET:
            tl.store(SLOPE + row, row_slope)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def divergence_kernel(
    Z, S, SOURCE, LSE, LSE_T, TARGET_LSE, TARGET_LSE_T, KL, TV, LESS_MASS,
    stride, target_stride, vocab, inv_t, HOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row: sums of q (log q - log p) at T, of max(q - p, 0), and of p where p < q."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(SOURCE + row)
    Z += row * stride
    S += source * target_stride
    lse = tl.load(LSE + row)
    lse_t = tl.load(LSE_T + row)
    target_lse = tl.load(TARGET_LSE + source)
    target_lse_t = tl.load(TARGET_LSE_T + source)
    kl = tl.zeros([BLOCK], tl.float32)
    tv = tl.zeros([BLOCK], tl.float32)
    less_mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(Z + column, mask=column < vocab, other=-float("inf"))
        s = tl.load(S + column, mask=column < vocab, other=-float("inf"))
        log_p = z - lse
        log_q = s - target_lse
        p = tl.exp2(log_p * LOG2E)
        q = tl.exp2(log_q * LOG2E)
        tv += tl.maximum(q - p, 0.0)
        less_mass += tl.where(p < q, p, 0.0)
        if HOT:
            log_p = z * inv_t - lse_t
            log_q = s * inv_t - target_lse_t
            q = tl.exp2(log_q * LOG2E)
        kl += tl.where(q == 0.0, 0.0, q * (log_q - log_p))
    tl.store(KL + row, tl.sum(kl, axis=0))
    tl.store(TV + row, tl.sum(tv, axis=0))
    tl.store(LESS_MASS + row, tl.sum(less_mass, axis=0))


@triton.jit(do_not_specialize_on_alignment=ROWS)
def gradient_kernel(
    Z, S, SOURCE, LABEL, LSE, LSE_T, ENTROPY, RANK, TARGET_LSE, TARGET_LSE_T, LESS_MASS, HARD, SOFT, CAP, TV,
    OUT, LOST, KL,
    stride, target_stride, out_stride, vocab, offset, inv_t, softcap, span,
    HAS_HARD: tl.constexpr, HAS_SOFT: tl.constexpr, HAS_CAP: tl.constexpr, HAS_TV: tl.constexpr,
    TARGET: tl.constexpr, HOT: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part) writes the logit gradient of `span` columns of a row; see RowPass.gradient.

    Rows are the fast axis, so programs that run together read the same columns of shared target rows (from
    L2). Parts go from the last to the first, because the last columns are what the sums have just read.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.num_programs(1) - 1 - tl.program_id(1)
    Z += row * stride
    OUT += row * out_stride
    lse = tl.load(LSE + row)
    lse_t = tl.load(LSE_T + row)
    label = (tl.load(LABEL + row) - offset).to(tl.int32)
    target_lse = 0.0
    target_lse_t = 0.0
    hard = 0.0
    soft = 0.0
    cap = 0.0
    entropy = 0.0
    tv = 0.0
    less_mass = 0.0
    if TARGET:
        source = tl.load(SOURCE + row)
        S += source * target_stride
        target_lse_t = tl.load(TARGET_LSE_T + source)
        target_lse = tl.load(TARGET_LSE + source)
    if HAS_HARD:
        hard = tl.load(HARD + row)
    if HAS_SOFT:
        soft = tl.load(SOFT + row)
    if HAS_CAP:
        entropy = tl.load(ENTROPY + row)
        cap = tl.where(tl.load(RANK + row) == 0, tl.load(CAP + row), 0.0)
    if HAS_TV:
        tv = tl.load(TV + row)
        less_mass = tl.load(LESS_MASS + row)
    if (part == 0) & ((label < 0) | (label >= vocab)):
        tl.store(LOST + row, 0.0)
    kl = tl.zeros([BLOCK], tl.float32)
    first = part * span
    last = tl.minimum(first + span, vocab)
    for start in range(first, last, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < last
        z = tl.load(Z + column, mask=inside, other=-float("inf"))
        log_p = z - lse
        p = tl.exp2(log_p * LOG2E)
        grad = hard * p
        if HAS_CAP:
            grad -= tl.where(p == 0.0, 0.0, cap * p * (log_p + entropy))
        if TARGET:
            s = tl.load(S + column, mask=inside, other=-float("inf"))
            log_q = s * inv_t - target_lse_t
            q = tl.exp2(log_q * LOG2E)
            log_p_t = log_p
            p_t = p
            if HOT:
                log_p_t = z * inv_t - lse_t
                p_t = tl.exp2(log_p_t * LOG2E)
            kl += tl.where(q == 0.0, 0.0, q * (log_q - log_p_t))
            if HAS_SOFT:
                grad += soft * (p_t - q)
            if HAS_TV:
                if HOT:
                    q = tl.exp2((s - target_lse) * LOG2E)
                grad += tv * p * (less_mass - tl.where(p < q, 1.0, 0.0))
        here = (label >= start) & (label < tl.minimum(start + BLOCK, last))
        if here:
            grad = tl.where(column == label, grad - hard, grad)
        if CAPPED:
            ratio = z / softcap
            grad *= 1.0 - ratio * ratio
        rounded = grad.to(OUT.dtype.element_ty)
        tl.store(OUT + column, rounded, mask=inside)
        if here:
            error = tl.where(column == label, grad - rounded.to(tl.float32), 0.0)
            tl.store(LOST + row, tl.sum(error, axis=0))
    if TARGET:
        tl.store(KL + row * tl.num_programs(1) + part, tl.sum(kl, axis=0))


@triton.jit(do_not_specialize_on_alignment=ROWS)
def hard_kernel(
    Z, LABEL, LSE, CE, ENTROPY, P_MAX, ARGMAX, RANK, OUT, LOST, INVERSE, stride, out_stride, vocab, cap,
    HAS_CAP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One program a row: cross-entropy terms and its unnormalised gradient in a single read of the logits.

    Writes e^(z - k) - mass 1[y] with mass = sum e^(z - k), for a k that needs no pass of its own: the largest
    logit of the first tile or of the label. The row's factor 1 / mass is applied to the hidden gradient,
    after the matmul. A row is read again only where that k was more than 60 below the true peak, or where CAP
    (cap = cap_weight / hard_weight) acts.
    """
    TILE: tl.constexpr = LANES * 4
    row = tl.program_id(0).to(tl.int64)
    Z += row * stride
    OUT += row * out_stride
    column = tl.arange(0, LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]
    label = tl.load(LABEL + row).to(tl.int32)
    known = (label >= 0) & (label < vocab)
    logit = tl.load(Z + tl.where(known, label, 0))
    z = tl.load(Z + column, mask=column < vocab, other=-float("inf"))
    k = tl.maximum(tl.maximum(tl.max(tl.max(z, axis=1), axis=0), logit), LOWEST)
    peak = tl.full([LANES], LOWEST, tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    slope = tl.zeros([LANES], tl.float32)
    best = tl.zeros([LANES], tl.int32)
    above = tl.zeros([LANES], tl.int32)
    for start in range(0, vocab, TILE):
        at = start + column
        z = tl.load(Z + at, mask=at < vocab, other=-float("inf"))
        distance = (z - k) * LOG2E
        share = tl.exp2(distance)
        tl.store(OUT + at, share.to(OUT.dtype.element_ty), mask=at < vocab)
        mass += tl.sum(share, axis=1)
        slope += tl.sum(share * tl.maximum(distance, -1.5e4), axis=1)
        highest = tl.max(z, axis=1)
        best = tl.where(highest > peak, start, best)
        peak = tl.maximum(peak, highest)
        above += before_label(z, at, logit, label, start, TILE)
    top = tl.max(peak, axis=0)
    rank = tl.sum(above, axis=0)
    row_mass = tl.sum(mass, axis=0)
    row_slope = tl.sum(slope, axis=0) / LOG2E
    far = top - k > 60.0
    if far:
        mass = tl.zeros([LANES], tl.float32)
        slope = tl.zeros([LANES], tl.float32)
        for start in range(0, vocab, TILE):
            at = start + column
            z = tl.load(Z + at, mask=at < vocab, other=-float("inf"))
            distance = (z - top) * LOG2E
            share = tl.exp2(distance)
            mass += tl.sum(share, axis=1)
            slope += tl.sum(share * tl.maximum(distance, -1.5e4), axis=1)
        k = top
        row_mass = tl.sum(mass, axis=0)
        row_slope = tl.sum(slope, axis=0) / LOG2E
    log_mass = tl.log(row_mass)
    entropy = log_mass - row_slope / row_mass
    acts = 0.0
    if HAS_CAP:
        acts = tl.where(rank == 0, cap, 0.0)
    if far | (acts != 0.0):
        tl.debug_barrier()
        for start in range(0, vocab, TILE):
            at = start + column
            z = tl.load(Z + at, mask=at < vocab, other=-float("inf"))
            distance = tl.maximum(z - k, -1.0e4)
            share = tl.exp2(distance * LOG2E) * (1.0 - acts * (distance - log_mass + entropy))
            tl.store(OUT + at, share.to(OUT.dtype.element_ty), mask=at < vocab)
    tl.debug_barrier()  # the label's entry replaces one that another thread of this program wrote
    distance = logit - k
    entry = tl.exp2(distance * LOG2E)
    if HAS_CAP:
        entry *= 1.0 - acts * (distance - log_mass + entropy)
    entry = entry - row_mass
    rounded = entry.to(OUT.dtype.element_ty)
    tl.store(OUT + label, rounded, mask=known)
    tl.store(LOST + row, tl.where(known, entry - rounded.to(tl.float32), float("nan")))
    tl.store(INVERSE + row, 1.0 / row_mass)
    tl.store(ARGMAX + row, first_column(Z, top, peak, best, vocab, LANES).to(tl.int64))
    lse = k + log_mass
    tl.store(LSE + row, lse)
    tl.store(CE + row, tl.where(known, lse - logit, float("nan")))
    tl.store(ENTROPY + row, entropy)
    tl.store(P_MAX + row, tl.exp2((top - k) * LOG2E) / row_mass)
    tl.store(RANK + row, rank.to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=ROWS)
def deposit_kernel(
    PART, LOST, SCALE, HEAD, LABEL, ANCHOR, SLOT, OUT, part_stride, head_stride, stride_a, stride_b, size,
    GIVE_BACK: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part of the hidden size): OUT[anchor, slot] = scale * (PART + lost * HEAD[label]),
    rounded once.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(PART + row * part_stride + column, mask=inside, other=0.0)
    if GIVE_BACK:
        weight = tl.load(HEAD + tl.load(LABEL + row) * head_stride + column, mask=inside, other=0.0)
        value += tl.load(LOST + row) * weight.to(tl.float32)
    if SCALED:
        value *= tl.load(SCALE + row)
    OUT += tl.load(ANCHOR + row) * stride_a + tl.load(SLOT + row) * stride_b
    tl.store(OUT + column, value.to(OUT.dtype.element_ty), mask=inside)


class TritonRows(RowPass):
    """One launch a method; merging over shards and all else around the kernels is the contract's own code."""

    one_pass_hard = True

    def drafter_sums(self, rows: Rows, label_logit: Tensor, temperature: float) -> DrafterSums:
        count, device = rows.z.shape[0], rows.z.device
        peak, mass, slope, mass_t = torch.empty(4, count, device=device)
        argmax, above = torch.empty(2, count, dtype=torch.int64, device=device)
        _launch_sums(
            rows.z, temperature, offset=rows.offset, label=rows.label, logit=label_logit, argmax=argmax,
            above=above,
            peak=peak, mass=mass, slope=slope, mass_t=mass_t,
        )  # fmt: skip
        return DrafterSums(peak, mass, slope, mass_t, argmax, above)

    def target_sums(self, s: Tensor, offset: int, temperature: float) -> TargetSums:
        peak, mass, mass_t = torch.empty(3, s.shape[0], device=s.device)
        argmax = torch.empty(s.shape[0], dtype=torch.int64, device=s.device)
        _launch_sums(s, temperature, offset=offset, argmax=argmax, peak=peak, mass=mass, mass_t=mass_t)
        return TargetSums(peak, mass, mass_t, argmax)

    def drafter_terms(self, rows: Rows, temperature: float, out: Terms) -> None:
        _launch_sums(
            rows.z, temperature, label=rows.label, lse=out.lse, lse_t=out.lse_t, ce=out.ce,
            entropy=out.entropy,
            p_max=out.p_max, argmax=out.argmax, above=out.rank,
        )  # fmt: skip

    def target_terms(self, s: Tensor, temperature: float) -> TargetTerms:
        lse, lse_t = torch.empty(2, s.shape[0], device=s.device)
        argmax = torch.empty(s.shape[0], dtype=torch.int64, device=s.device)
        _launch_sums(s, temperature, lse=lse, lse_t=lse_t, argmax=argmax)
        return TargetTerms(lse, lse_t, argmax)

    def divergence(self, rows: Rows, terms: Terms, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        assert rows.s is not None and rows.source is not None and rows.target is not None
        count, vocab = rows.z.shape
        kl, tv, less_mass = torch.empty(3, count, device=rows.z.device)
        divergence_kernel[(count,)](
            rows.z, rows.s, rows.source, terms.lse, terms.lse_t, rows.target.lse, rows.target.lse_t, kl, tv,
            less_mass,
            rows.z.stride(0), rows.s.stride(0), vocab, 1 / temperature,
            HOT=temperature != 1.0, BLOCK=TILE_COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        return kl, tv, less_mass

    def gradient(
        self, rows: Rows, terms: Terms, factors: Coefficients, config: LossConfig, out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        count, vocab = rows.z.shape
        span = TILE_COLUMNS * GRADIENT_TILES
        parts = triton.cdiv(vocab, span)
        has_target = rows.s is not None
        lost = torch.empty(count, device=out.device)
        kl = torch.empty(count, parts, device=out.device) if has_target else None
        target = rows.target
        gradient_kernel[(count, parts)](
            rows.z, rows.s, rows.source, rows.label, terms.lse, terms.lse_t, terms.entropy, terms.rank,
            None if target is None else target.lse, None if target is None else target.lse_t, terms.less_mass,
            factors.hard, factors.soft, factors.cap, factors.tv, out, lost, kl,
            rows.z.stride(0), 0 if rows.s is None else rows.s.stride(0), out.stride(0), vocab, rows.offset,
            1 / config.temperature, config.logit_softcap, span,
            HAS_HARD=factors.hard is not None, HAS_SOFT=factors.soft is not None,
            HAS_CAP=factors.cap is not None,
            HAS_TV=factors.tv is not None, TARGET=has_target, HOT=config.temperature != 1.0,
            CAPPED=config.logit_softcap != 0.0, BLOCK=TILE_COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        return lost, None if kl is None else kl.sum(1)

    def hard_gradient(
        self, rows: Rows, terms: Terms, config: LossConfig, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        count, vocab = rows.z.shape
        lost, inverse = torch.empty(2, count, device=out.device)
        hard_kernel[(count,)](
            rows.z, rows.label, terms.lse, terms.ce, terms.entropy, terms.p_max, terms.argmax, terms.rank,
            out, lost,
            inverse, rows.z.stride(0), out.stride(0), vocab, config.cap_weight / config.hard_weight,
            HAS_CAP=config.cap_weight != 0.0, LANES=LANES, num_warps=WARPS,
        )  # fmt: skip
        return lost, inverse

    def deposit(
        self, grad: Tensor, place: tuple[Tensor, Tensor], part: Tensor, rows: Rows, head: Tensor, *,
        lost: Tensor | None, scale: Tensor | None,
    ) -> None:  # fmt: skip
        count, size = part.shape
        deposit_kernel[(count, triton.cdiv(size, DEPOSIT_COLUMNS))](
            part, lost, scale, head, rows.label, *place, grad, part.stride(0), head.stride(0),
            *grad.stride()[:2], size,
            GIVE_BACK=lost is not None, SCALED=scale is not None, BLOCK=DEPOSIT_COLUMNS, num_warps=4,
        )  # fmt: skip


def _launch_sums(
    logits: Tensor, temperature: float, *, argmax: Tensor, offset: int = 0, label: Tensor | None = None,
    logit: Tensor | None = None, lse: Tensor | None = None, lse_t: Tensor | None = None,
    ce: Tensor | None = None,
    entropy: Tensor | None = None, p_max: Tensor | None = None, above: Tensor | None = None,
    peak: Tensor | None = None,
    mass: Tensor | None = None, slope: Tensor | None = None, mass_t: Tensor | None = None,
) -> None:  # fmt: skip
    """Terms when `lse` is given, else sums; drafter rows when `label` is given, else target rows."""
    sums_kernel[(logits.shape[0],)](
        logits, label, logit, lse, lse_t, ce, entropy, p_max, argmax, above, peak, mass, slope, mass_t,
        logits.stride(0), logits.shape[1], offset, 1 / temperature,
        LABELLED=label is not None, HOT=temperature != 1.0, FINISH=lse is not None, TARGET=label is None,
        LANES=LANES, num_warps=WARPS,
    )  # fmt: skip


# ---- AdamW: one kernel a parameter; gradient, master and moments are read once and written once

_BLOCK = 1024


@triton.jit
def _adam(
    grad, weight, master, first, second, scalars, count,
    rate, decay, new1, beta2, new2, eps,  # new: 1 - beta, exact only before it is rounded to fp32
    MASTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    go = tl.load(scalars)
    if go != 0:
        scale, bias1, root2 = tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3)
        where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = where < count
        g = tl.load(grad + where, mask=inside, other=0.0).to(tl.float32) * scale
        m = tl.load(first + where, mask=inside, other=0.0)
        v = tl.load(second + where, mask=inside, other=0.0)
        home = master if MASTER else weight
        w = tl.load(home + where, mask=inside, other=0.0)
        m += new1 * (g - m)
        v = v * beta2 + new2 * g * g
        w = w * (1 - decay) - rate * (m / bias1) / (tl.sqrt(v) / root2 + eps)
        tl.store(first + where, m, mask=inside)
        tl.store(second + where, v, mask=inside)
        if MASTER:
            tl.store(master + where, w, mask=inside)
        tl.store(weight + where, w.to(weight.dtype.element_ty), mask=inside)


def adam(
    grad: Tensor, weight: Tensor, state: dict[str, Tensor], scalars: Tensor, rate: float, decay: float,
    betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """Move `weight` and its fp32 `state` (exp_avg, exp_avg_sq, perhaps master) in place, all contiguous.

    28 bytes a parameter cross the memory bus (bf16 gradient and weight, fp32 master and moments) and no
    temporary exists; the same update in plain operations moves about four times as much. Whether the step
    happens is read on the device, so nobody waits for the verdict.

    `scalars` fp32 [4]: whether to move at all, what multiplies the gradient, 1 - beta1^t, sqrt(1 - beta2^t).
    `rate` is the learning rate of the step, `decay` that times the weight decay.
    """
    count = weight.numel()
    if not count:
        return
    master = state.get("master")
    with torch.cuda.device_of(weight):
        _adam[(triton.cdiv(count, _BLOCK),)](
            grad, weight, weight if master is None else master, state["exp_avg"], state["exp_avg_sq"],
            scalars, count, rate, decay, 1 - betas[0], betas[1], 1 - betas[1], eps,
            MASTER=master is not None, BLOCK=_BLOCK,
        )  # fmt: skip
