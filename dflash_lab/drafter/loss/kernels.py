"""Triton kernels of the row pass. One row of logits is streamed from memory, 16 bytes a thread, float32.

Sums are kept a lane at a time: each lane (4 neighbouring columns of every tile) has its own running maximum
and sums, so the loop has no reduction across threads at all; lanes are merged once at a row's end, as an
online softmax merges. Where a lane has seen only -inf its maximum is the finite LOWEST, so that no -inf -
-inf arises; a NaN reaches the sums.
Row offsets are int64: row * V passes 2^31 at 8,649 rows of 248,320.
"""

# ruff: noqa: N803  (kernel arguments follow Triton's convention: pointers and constants in capitals)

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.0e38)
NOWHERE = tl.constexpr(2147483647)


@triton.jit
def _absorb(
    z,
    column,
    tile,
    peak,
    mass,
    slope,
    mass_t,
    best,
    above,
    logit,
    label,
    inv_t,
    RANK: tl.constexpr,
    HOT: tl.constexpr,
):  # noqa: E501
    """Add one tile z [LANES, 4] to every lane's running sums."""
    new = tl.maximum(peak, tl.max(z, axis=1))
    best = tl.where(new > peak, tile, best)
    distance = (z - new[:, None]) * LOG2E
    share = tl.exp2(distance)
    moved = peak - new
    scale = tl.exp2(moved * LOG2E)
    # -1.5e4 stands for -inf, whose product with share = 0 would be NaN
    slope = (slope + mass * moved) * scale + tl.sum(share * tl.maximum(distance, -1.5e4), axis=1) / LOG2E
    mass = mass * scale + tl.sum(share, axis=1)
    if HOT:
        mass_t = mass_t * tl.exp2(moved * LOG2E * inv_t) + tl.sum(tl.exp2(distance * inv_t), axis=1)
    if RANK:
        before = (z > logit) | ((z == logit) & (column < label))
        above += tl.sum(before.to(tl.int32), axis=1)
    return new, mass, slope, mass_t, best, above


@triton.jit
def sums_kernel(
    Z, LABEL, LOGIT, LSE, LSE_T, CE, ENTROPY, P_MAX, ARGMAX, ABOVE, PEAK, MASS, SLOPE, MASS_T,
    stride, vocab, offset, inv_t,
    RANK: tl.constexpr, HOT: tl.constexpr, FINISH: tl.constexpr, TARGET: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One program a row: its sums, and with FINISH its terms.

    RANK: a label is given. HOT: temperature is not 1. TARGET: a target row, of which only lse, lse_t, argmax
    are wanted.
    """
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
    whole = vocab // (LANES * 4)
    for tile in range(whole):
        start = tile * (LANES * 4)
        z = tl.load(Z + start + column)
        peak, mass, slope, mass_t, best, above = _absorb(
            z, start + column, tile, peak, mass, slope, mass_t, best, above, logit, label, inv_t, RANK, HOT
        )
    start = whole * (LANES * 4)
    if start < vocab:
        inside = start + column < vocab
        z = tl.load(Z + start + column, mask=inside, other=-float("inf"))
        # a column past the end ties with a label logit of -inf, but never comes before the label
        peak, mass, slope, mass_t, best, above = _absorb(
            z, start + column, whole, peak, mass, slope, mass_t, best, above, logit, label, inv_t, RANK, HOT
        )
    top = tl.max(peak, axis=0)
    moved = peak - top
    scale = tl.exp2(moved * LOG2E)
    row_slope = tl.sum((slope + mass * moved) * scale, axis=0)
    row_mass = tl.sum(mass * scale, axis=0)
    # the first group of 4 columns that holds the maximum, then the first column in it
    group = tl.min(tl.where(peak == top, best * (LANES * 4) + tl.arange(0, LANES) * 4, NOWHERE), axis=0)
    group = tl.minimum(group, vocab - 1)
    near = group + tl.arange(0, 4)
    value = tl.load(Z + near, mask=near < vocab, other=-float("inf"))
    first = tl.min(tl.where(value == top, near, NOWHERE), axis=0)
    argmax = tl.where(first == NOWHERE, group, first).to(tl.int64) + offset
    tl.store(ARGMAX + row, argmax)
    row_mass_t = row_mass
    if HOT:
        row_mass_t = tl.sum(mass_t * tl.exp2(moved * LOG2E * inv_t), axis=0)
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
def gradient_kernel(
    Z, S, SOURCE, LABEL, LSE, LSE_T, ENTROPY, RANK, TARGET_LSE, TARGET_LSE_T, BELOW, HARD, SOFT, CAP, TV, OUT, LOST, KL,
    stride, target_stride, out_stride, vocab, offset, inv_t, softcap, span,
    HAS_HARD: tl.constexpr, HAS_SOFT: tl.constexpr, HAS_CAP: tl.constexpr, HAS_TV: tl.constexpr,
    TARGET: tl.constexpr, HOT: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part) writes the logit gradient of `span` columns; see RowPass.gradient.

    Rows are the fast axis, so programs that run together read the same columns of shared target rows (from
    L2).
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
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
                grad += tv * p * (below - tl.where(p < q, 1.0, 0.0))
        if HAS_HARD:
            if (label >= start) & (label < start + BLOCK):
                grad = tl.where(column == label, grad - hard, grad)
        if CAPPED:
            ratio = z / softcap
            grad *= 1.0 - ratio * ratio
        rounded = grad.to(OUT.dtype.element_ty)
        tl.store(OUT + column, rounded, mask=inside)
        if (label >= start) & (label < tl.minimum(start + BLOCK, last)):
            error = tl.where(column == label, grad - rounded.to(tl.float32), 0.0)
            tl.store(LOST + row, tl.sum(error, axis=0))
    if (part == 0) & ((label < 0) | (label >= vocab)):
        tl.store(LOST + row, 0.0)
    if TARGET:
        tl.store(KL + row * tl.num_programs(1) + part, tl.sum(kl, axis=0))


@triton.jit
def hard_kernel(
    Z, LABEL, LSE, CE, ENTROPY, P_MAX, ARGMAX, ABOVE, OUT, LOST, INVERSE, stride, out_stride, vocab, cap,
    HAS_CAP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One program a row: cross-entropy terms and its unnormalised gradient in a single read of the logits.

    Writes e^(z - k) - mass 1[y] with mass = sum e^(z - k), for a k that needs no pass of its own: the largest
    logit of the first tile or of the label. The row's factor 1 / mass is applied to the hidden gradient,
    after the matmul. A row is read again only where that k was more than 60 below the true peak, or where CAP
    (cap = cap_weight / hard_weight) acts.
    """
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
    tiles = tl.cdiv(vocab, LANES * 4)
    for tile in range(tiles):
        at = tile * (LANES * 4) + column
        z = tl.load(Z + at, mask=at < vocab, other=-float("inf"))
        distance = (z - k) * LOG2E
        share = tl.exp2(distance)
        tl.store(OUT + at, share.to(OUT.dtype.element_ty), mask=at < vocab)
        mass += tl.sum(share, axis=1)
        slope += tl.sum(share * tl.maximum(distance, -1.5e4), axis=1)
        highest = tl.max(z, axis=1)
        best = tl.where(highest > peak, tile, best)
        peak = tl.maximum(peak, highest)
        above += tl.sum(((z > logit) | ((z == logit) & (at < label))).to(tl.int32), axis=1)
    top = tl.max(peak, axis=0)
    rank = tl.sum(above, axis=0)
    row_mass = tl.sum(mass, axis=0)
    row_slope = tl.sum(slope, axis=0) / LOG2E
    far = top - k > 60.0
    if far:
        mass = tl.zeros([LANES], tl.float32)
        slope = tl.zeros([LANES], tl.float32)
        for tile in range(tiles):
            at = tile * (LANES * 4) + column
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
        for tile in range(tiles):
            at = tile * (LANES * 4) + column
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
    group = tl.min(tl.where(peak == top, best * (LANES * 4) + tl.arange(0, LANES) * 4, NOWHERE), axis=0)
    group = tl.minimum(group, vocab - 1)
    near = group + tl.arange(0, 4)
    value = tl.load(Z + near, mask=near < vocab, other=-float("inf"))
    first = tl.min(tl.where(value == top, near, NOWHERE), axis=0)
    tl.store(ARGMAX + row, tl.where(first == NOWHERE, group, first).to(tl.int64))
    lse = k + log_mass
    tl.store(LSE + row, lse)
    tl.store(CE + row, tl.where(known, lse - logit, float("nan")))
    tl.store(ENTROPY + row, entropy)
    tl.store(P_MAX + row, tl.exp2((top - k) * LOG2E) / row_mass)
    tl.store(ABOVE + row, rank.to(tl.int64))


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
