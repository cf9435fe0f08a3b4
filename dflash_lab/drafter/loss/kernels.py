"""Triton kernels of the row pass. Rows of float32 logits are streamed from memory, 16 bytes a thread.

Sums are kept a lane at a time: each lane (4 neighbouring columns of every tile) has its own running maximum
and sums, so the loop has no reduction across threads at all; lanes are merged once at a row's end, as an
online softmax merges. Where a lane has seen only -inf its maximum is the finite LOWEST, so that no -inf -
-inf arises; a NaN reaches the sums. Row offsets are int64: row * V passes 2^31 at 8,649 rows of 248,320.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.0e38)
NOWHERE = tl.constexpr(2147483647)

# Pointers to one number a row. They start where a chunk starts, so their alignment changes from row to row of
# a run; a kernel made for each case would be compiled in the middle of it. No flag (constexpr) may bear one
# of these names: Triton 3.6 refuses such a kernel at its first launch.
ROWS = (
    "LABEL", "LOGIT", "LSE", "LSE_T", "CE", "ENTROPY", "P_MAX", "ARGMAX", "ABOVE", "PEAK", "MASS", "SLOPE",
    "MASS_T", "SOURCE", "TARGET_LSE", "TARGET_LSE_T", "BELOW", "RANK", "HARD", "SOFT", "CAP", "TV", "LOST",
    "KL", "INVERSE", "SCALE", "ANCHOR", "SLOT",
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

    LABELLED: a label is given. HOT: temperature is not 1. TARGET: a target row, of which only lse, lse_t,
    argmax are wanted.
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
