"""Triton kernels of the row pass. Rows of float32 logits are streamed from memory, 16 bytes a thread.

Sums are kept a lane at a time: each lane (4 neighbouring columns of every tile) has its own running maximum and
sums, so the loop has no reduction across threads at all; lanes are merged once at a row's end, as an online softmax
merges. Where a lane has seen only -inf its maximum is the finite LOWEST, so that no -inf - -inf arises; a NaN
reaches the sums. Row offsets are int64: row * V passes 2^31 at 8,649 rows of 248,320.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.0e38)
NOWHERE = tl.constexpr(2147483647)


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
    """(maximum, mass, slope, mass at T) of lanes, or of any parts of a row, each with sums relative to its own peak."""
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


@triton.jit
def sums_kernel(
    Z, LABEL, LOGIT, LSE, LSE_T, CE, ENTROPY, P_MAX, ARGMAX, ABOVE, PEAK, MASS, SLOPE, MASS_T,
    stride, vocab, offset, inv_t,
    RANK: tl.constexpr, HOT: tl.constexpr, FINISH: tl.constexpr, TARGET: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One program a row: its sums, or with FINISH its terms.

    RANK: a label is given. HOT: temperature is not 1. TARGET: a target row, of which only lse, lse_t, argmax are wanted.
    """
    TILE: tl.constexpr = LANES * 4
    row = tl.program_id(0).to(tl.int64)
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
    if RANK:
        label = (tl.load(LABEL + row) - offset).to(tl.int32)
        if FINISH:
            logit = tl.load(Z + tl.where((label >= 0) & (label < vocab), label, 0))
        else:
            logit = tl.load(LOGIT + row)
    whole = vocab // TILE * TILE
    for start in range(0, whole, TILE):
        z = tl.load(Z + start + column)
        peak, mass, slope, mass_t, best = absorb(z, start, peak, mass, slope, mass_t, best, inv_t, HOT)
        if RANK:
            above += before_label(z, start + column, logit, label, start, TILE)
    if whole < vocab:
        z = tl.load(Z + whole + column, mask=whole + column < vocab, other=-float("inf"))
        peak, mass, slope, mass_t, best = absorb(z, whole, peak, mass, slope, mass_t, best, inv_t, HOT)
        if RANK:
            # columns past the end are -inf and must not tie with a label of -inf that another slice owns
            tie = (z == logit) & (whole + column < tl.minimum(label, vocab))
            above += tl.sum(((z > logit) | tie).to(tl.int32), axis=1)
    if not HOT:
        mass_t = mass
    top, row_mass, row_slope, row_mass_t = merge_lanes(peak, mass, slope, mass_t, inv_t)
    tl.store(ARGMAX + row, first_column(Z, top, peak, best, vocab, LANES).to(tl.int64) + offset)
    if RANK:
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


@triton.jit
def divergence_kernel(
    Z, S, SOURCE, LSE, LSE_T, TARGET_LSE, TARGET_LSE_T, KL, TV, BELOW,
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
    below = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(Z + column, mask=column < vocab, other=-float("inf"))
        s = tl.load(S + column, mask=column < vocab, other=-float("inf"))
        log_p = z - lse
        log_q = s - target_lse
        p = tl.exp2(log_p * LOG2E)
        q = tl.exp2(log_q * LOG2E)
        tv += tl.maximum(q - p, 0.0)
        below += tl.where(p < q, p, 0.0)
        if HOT:
            log_p = z * inv_t - lse_t
            log_q = s * inv_t - target_lse_t
            q = tl.exp2(log_q * LOG2E)
        kl += tl.where(q == 0.0, 0.0, q * (log_q - log_p))
    tl.store(KL + row, tl.sum(kl, axis=0))
    tl.store(TV + row, tl.sum(tv, axis=0))
    tl.store(BELOW + row, tl.sum(below, axis=0))


@triton.jit
def write_gradient(
    Z, S, OUT, LOST, first, last, label, lse, lse_t, entropy, target_lse, target_lse_t, below,
    hard, soft, cap, tv, inv_t, softcap,
    HAS_CAP: tl.constexpr, HAS_TV: tl.constexpr, TARGET: tl.constexpr, HOT: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the logit gradient of one row's columns [first, last); return their KL. See RowPass.gradient.

    The pointers are at the row; where the label lies in these columns, LOST receives what rounding lost at it.
    """
    kl = tl.zeros([BLOCK], tl.float32)
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
            grad += soft * (p_t - q)
            if HAS_TV:
                if HOT:
                    q = tl.exp2((s - target_lse) * LOG2E)
                grad += tv * p * (below - tl.where(p < q, 1.0, 0.0))
        here = (label >= start) & (label < tl.minimum(start + BLOCK, last))
        if here:
            grad = tl.where(column == label, grad - hard, grad)
        if CAPPED:
            ratio = z / softcap
            grad *= 1.0 - ratio * ratio
        rounded = grad.to(OUT.dtype.element_ty)
        tl.store(OUT + column, rounded, mask=inside)
        if here:
            tl.store(LOST, tl.sum(tl.where(column == label, grad - rounded.to(tl.float32), 0.0), axis=0))
    return tl.sum(kl, axis=0)


@triton.jit
def gradient_kernel(
    Z, S, SOURCE, LABEL, LSE, LSE_T, ENTROPY, RANK, TARGET_LSE, TARGET_LSE_T, BELOW, HARD, SOFT, CAP, TV, OUT, LOST, KL,
    stride, target_stride, out_stride, vocab, offset, inv_t, softcap, span,
    HAS_HARD: tl.constexpr, HAS_SOFT: tl.constexpr, HAS_CAP: tl.constexpr, HAS_TV: tl.constexpr,
    TARGET: tl.constexpr, HOT: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part) writes the logit gradient of `span` columns of a row.

    Rows are the fast axis, so programs that run together read the same columns of shared target rows (from L2).
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    label = (tl.load(LABEL + row) - offset).to(tl.int32)
    target_lse = 0.0
    target_lse_t = 0.0
    hard = 0.0
    soft = 0.0
    cap = 0.0
    entropy = 0.0
    tv = 0.0
    below = 0.0
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
        below = tl.load(BELOW + row)
    if (part == 0) & ((label < 0) | (label >= vocab)):
        tl.store(LOST + row, 0.0)
    kl = write_gradient(
        Z + row * stride, S, OUT + row * out_stride, LOST + row, part * span, tl.minimum(part * span + span, vocab),
        label, tl.load(LSE + row), tl.load(LSE_T + row), entropy, target_lse, target_lse_t, below,
        hard, soft, cap, tv, inv_t, softcap, HAS_CAP, HAS_TV, TARGET, HOT, CAPPED, BLOCK,
    )  # fmt: skip
    if TARGET:
        tl.store(KL + row * tl.num_programs(1) + part, kl)


@triton.jit
def deposit_kernel(
    PART, LOST, SCALE, HEAD, LABEL, ANCHOR, SLOT, OUT, part_stride, head_stride, stride_a, stride_b, size,
    GIVE_BACK: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part of the hidden size): OUT[anchor, slot] = scale * (PART + lost * HEAD[label]), rounded once."""
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
