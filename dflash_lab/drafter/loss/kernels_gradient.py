"""Triton kernels that write: the logit gradient in two forms, the divergences, and the hidden gradient's last
step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dflash_lab.drafter.loss.kernels import LOG2E, LOWEST, ROWS, before_label, first_column


@triton.jit(do_not_specialize_on_alignment=ROWS)
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


@triton.jit(do_not_specialize_on_alignment=ROWS)
def gradient_kernel(
    Z, S, SOURCE, LABEL, LSE, LSE_T, ENTROPY, RANK, TARGET_LSE, TARGET_LSE_T, BELOW, HARD, SOFT, CAP, TV,
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
