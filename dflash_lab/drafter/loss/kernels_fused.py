"""Triton kernels that find a row's terms and write its gradient in one launch, reading the logits from memory once.

A row of 248,320 float32 logits is 1 MB, so a pass that first sums and then writes reads every row twice. Here the second
read comes from the L2 cache (`joint_kernel`: many programs share a row, so that only about twenty rows are in flight), or is
not needed at all (`hard_kernel`: cross-entropy alone, whose gradient is proportional to e^z up to the label's entry).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dflash_lab.drafter.loss.kernels import (
    LOG2E,
    LOWEST,
    absorb,
    before_label,
    first_column,
    merge_lanes,
    write_gradient,
)


@triton.jit
def joint_kernel(
    Z, S, SOURCE, LABEL, HARD, SOFT, CAP, OUT, LOST, KL, REAL, WHOLE, TICKET, ARRIVED,
    LSE, LSE_T, CE, ENTROPY, P_MAX, ARGMAX, RANK, TARGET_ARGMAX,
    stride, target_stride, out_stride, vocab, inv_t, softcap, rows, pieces, span,
    HAS_HARD: tl.constexpr, HAS_SOFT: tl.constexpr, HAS_CAP: tl.constexpr, TARGET: tl.constexpr, HOT: tl.constexpr,
    CAPPED: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Persistent programs take (row, piece of `span` columns) in order: sum the piece, meet the row's other pieces, write.

    Tickets are handed out in order, so a program only ever waits for pieces that running programs hold or will take
    next: with at least `pieces` programs resident nothing can wait for ever, whatever the scheduler does.
    REAL [rows, 7, PIECES] and WHOLE [rows, 3, PIECES] carry the pieces' sums; TICKET [1], ARRIVED [rows] start at 0.
    """
    TILE: tl.constexpr = LANES * 4
    column = tl.arange(0, LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]
    slot = tl.arange(0, PIECES)
    ticket = tl.atomic_add(TICKET, 1)
    while ticket < rows * pieces:
        row = (ticket // pieces).to(tl.int64)
        piece = ticket % pieces
        z_row = Z + row * stride
        s_row = S
        if TARGET:
            s_row = S + tl.load(SOURCE + row) * target_stride
        label = tl.load(LABEL + row).to(tl.int32)
        known = (label >= 0) & (label < vocab)
        logit = tl.load(z_row + tl.where(known, label, 0))
        first = piece * span
        last = tl.minimum(first + span, vocab)
        peak = tl.full([LANES], LOWEST, tl.float32)
        mass = tl.zeros([LANES], tl.float32)
        slope = tl.zeros([LANES], tl.float32)
        mass_t = tl.zeros([LANES], tl.float32)
        best = tl.zeros([LANES], tl.int32)
        above = tl.zeros([LANES], tl.int32)
        target_peak = tl.full([LANES], LOWEST, tl.float32)
        target_mass = tl.zeros([LANES], tl.float32)
        target_slope = tl.zeros([LANES], tl.float32)
        target_mass_t = tl.zeros([LANES], tl.float32)
        target_best = tl.zeros([LANES], tl.int32)
        for start in range(first, last, TILE):
            inside = start + column < last
            z = tl.load(z_row + start + column, mask=inside, other=-float("inf"), eviction_policy="evict_last")
            peak, mass, slope, mass_t, best = absorb(z, start, peak, mass, slope, mass_t, best, inv_t, HOT)
            above += before_label(z, start + column, logit, label, start, TILE)
            if TARGET:
                s = tl.load(s_row + start + column, mask=inside, other=-float("inf"), eviction_policy="evict_last")
                target_peak, target_mass, target_slope, target_mass_t, target_best = absorb(
                    s, start, target_peak, target_mass, target_slope, target_mass_t, target_best, inv_t, HOT
                )
        if not HOT:
            mass_t = mass
            target_mass_t = target_mass
        top, row_mass, row_slope, row_mass_t = merge_lanes(peak, mass, slope, mass_t, inv_t)
        real = REAL + row * (7 * PIECES) + piece
        whole = WHOLE + row * (3 * PIECES) + piece
        tl.store(real, top)
        tl.store(real + PIECES, row_mass)
        tl.store(real + 2 * PIECES, row_slope)
        tl.store(real + 3 * PIECES, row_mass_t)
        tl.store(whole, first_column(z_row, top, peak, best, vocab, LANES))
        tl.store(whole + PIECES, tl.sum(above, axis=0))
        if TARGET:
            top, row_mass, row_slope, row_mass_t = merge_lanes(
                target_peak, target_mass, target_slope, target_mass_t, inv_t
            )
            tl.store(real + 4 * PIECES, top)
            tl.store(real + 5 * PIECES, row_mass)
            tl.store(real + 6 * PIECES, row_mass_t)
            tl.store(whole + 2 * PIECES, first_column(s_row, top, target_peak, target_best, vocab, LANES))
        tl.debug_barrier()
        tl.atomic_add(ARRIVED + row, 1, sem="acq_rel", scope="gpu")
        arrived = tl.atomic_add(ARRIVED + row, 0, sem="acquire", scope="gpu")
        while arrived < pieces:
            arrived = tl.atomic_add(ARRIVED + row, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()
        real = REAL + row * (7 * PIECES) + slot
        whole = WHOLE + row * (3 * PIECES) + slot
        there = slot < pieces
        peaks = tl.load(real, mask=there, other=LOWEST, cache_modifier=".cg")
        top, row_mass, row_slope, row_mass_t = merge_lanes(
            peaks,
            tl.load(real + PIECES, mask=there, other=0.0, cache_modifier=".cg"),
            tl.load(real + 2 * PIECES, mask=there, other=0.0, cache_modifier=".cg"),
            tl.load(real + 3 * PIECES, mask=there, other=0.0, cache_modifier=".cg"),
            inv_t,
        )
        rank = tl.sum(tl.load(whole + PIECES, mask=there, other=0, cache_modifier=".cg"), axis=0)
        log_mass = tl.log(row_mass)
        lse = top + log_mass
        lse_t = top * inv_t + tl.log(row_mass_t)
        entropy = log_mass - row_slope / row_mass
        target_lse_t = 0.0
        if TARGET:
            target_peaks = tl.load(real + 4 * PIECES, mask=there, other=LOWEST, cache_modifier=".cg")
            masses = tl.load(real + 5 * PIECES, mask=there, other=0.0, cache_modifier=".cg")
            target_top, row_mass_s, unused, target_row_mass_t = merge_lanes(
                target_peaks, masses, masses, tl.load(real + 6 * PIECES, mask=there, other=0.0, cache_modifier=".cg"), inv_t
            )  # fmt: skip
            target_lse_t = target_top * inv_t + tl.log(target_row_mass_t)
        if piece == 0:
            tokens = tl.load(whole, mask=there, other=0, cache_modifier=".cg")
            tl.store(ARGMAX + row, tl.min(tl.where(peaks == top, tokens, vocab - 1), axis=0).to(tl.int64))
            tl.store(RANK + row, rank.to(tl.int64))
            tl.store(LSE + row, lse)
            tl.store(LSE_T + row, lse_t)
            tl.store(CE + row, tl.where(known, lse - logit, float("nan")))
            tl.store(ENTROPY + row, entropy)
            tl.store(P_MAX + row, 1.0 / row_mass)
            if TARGET:
                tokens = tl.load(whole + 2 * PIECES, mask=there, other=0, cache_modifier=".cg")
                best_token = tl.min(tl.where(target_peaks == target_top, tokens, vocab - 1), axis=0)
                tl.store(TARGET_ARGMAX + row, best_token.to(tl.int64))
        hard = 0.0
        soft = 0.0
        cap = 0.0
        if HAS_HARD:
            hard = tl.load(HARD + row)
        if HAS_SOFT:
            soft = tl.load(SOFT + row)
        if HAS_CAP:
            cap = tl.where(rank == 0, tl.load(CAP + row), 0.0)
        kl = write_gradient(
            z_row, s_row, OUT + row * out_stride, LOST + row, first, last, label, lse, lse_t, entropy,
            0.0, target_lse_t, 0.0, hard, soft, cap, 0.0, inv_t, softcap,
            HAS_CAP, False, TARGET, HOT, CAPPED, BLOCK,
        )  # fmt: skip
        if TARGET:
            tl.store(KL + row * pieces + piece, kl)
        ticket = tl.atomic_add(TICKET, 1)


@triton.jit
def hard_kernel(
    Z, LABEL, LSE, CE, ENTROPY, P_MAX, ARGMAX, RANK, OUT, LOST, INVERSE, stride, out_stride, vocab, cap,
    HAS_CAP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One program a row: cross-entropy terms and its unnormalised gradient in a single read of the logits.

    Writes e^(z - k) - mass 1[y] with mass = sum e^(z - k), for a k that needs no pass of its own: the largest logit of
    the first tile or of the label. The row's factor 1 / mass is applied to the hidden gradient, after the matmul. A
    row is read again only where that k was more than 60 below the true peak, or where CAP (cap = cap_weight /
    hard_weight) acts.
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
