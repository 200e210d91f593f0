"""The fused step on CUDA: a kernel that measures and settles, and one that updates.

A program takes one chunk of a tensor. Whoever is last to measure a chunk of a segment adds the
segment's partial sums, in a fixed order, and settles s; the last segment to settle gives |g| and the
clip factor. Where ranks add up their sums in between, settling is a separate kernel. The update walks
the chunks backwards: what was measured last is still in the L2 cache.

`columns.py` describes the tables, `tables.py` makes them. This module is imported only where triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tam.step.fused import columns

# Kernels see only globals that are constexpr. A test compares all of them with the enums.

THETA, MOMENTUM, SECOND, STEP, NUMEL, SHARE, SEGMENT, GROUP, KIND = map(tl.constexpr, map(int, columns.Row))
FIRST, COUNT, ALIGNMENT, WIDE = map(tl.constexpr, map(int, columns.Segment))
FIRST_CHUNK, CHUNK_COUNT = map(tl.constexpr, map(int, columns.Share))
LR, BETA1, BETA2, EPS, FLOOR, DECAY, SIGN, SMOOTHING, MAX_NORM, GAIN = map(
    tl.constexpr, map(int, columns.Option)
)
DOT, MM, GG, PRESENT = map(tl.constexpr, map(int, columns.Sum))
FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = map(tl.constexpr, map(int, columns.Kind))
FOUND_INF = tl.constexpr(int(columns.FOUND_INF))
OPTIONS, SUMS, KINDS = (tl.constexpr(len(table)) for table in (columns.Option, columns.Sum, columns.Kind))

LANES = tl.constexpr(1024)


@triton.jit
def load_cell(table, length, column, i):
    return tl.load(table + length * column + i)


@triton.jit
def as_pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load_values(pointer, o, size, MASKED: tl.constexpr, POLICY: tl.constexpr):
    # Without a mask the loads are 16 bytes wide.
    if MASKED:
        x = tl.load(pointer + o, o < size, other=0.0, eviction_policy=POLICY)
    else:
        x = tl.load(pointer + o, eviction_policy=POLICY)
    return x.to(tl.float32)


@triton.jit
def store_values(pointer, o, size, x, dtype: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + o, x.to(dtype), o < size, eviction_policy="evict_first")
    else:
        tl.store(pointer + o, x.to(dtype), eviction_policy="evict_first")


@triton.jit
def _measure(
    rows, n_rows, row, gradient, start, size, scale,
    dtype: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """<m, g>, |m|^2, |g|^2 of one chunk."""
    m_ptr = as_pointer(load_cell(rows, n_rows, MOMENTUM, row), dtype, ALIGNED) + start
    g_ptr = as_pointer(gradient, dtype, ALIGNED) + start
    lane = tl.arange(0, BLOCK)
    mg = tl.zeros((BLOCK,), tl.float32)
    mm = tl.zeros((BLOCK,), tl.float32)
    gg = tl.zeros((BLOCK,), tl.float32)
    whole = size // BLOCK * BLOCK
    for i in range(0, whole, BLOCK):
        m = load_values(m_ptr, i + lane, size, False, "")
        g = load_values(g_ptr, i + lane, size, False, "") * scale
        mg = tl.fma(m, g, mg)
        mm = tl.fma(m, m, mm)
        gg = tl.fma(g, g, gg)
    if whole < size:
        m = load_values(m_ptr, whole + lane, size, True, "")
        g = load_values(g_ptr, whole + lane, size, True, "") * scale
        mg = tl.fma(m, g, mg)
        mm = tl.fma(m, m, mm)
        gg = tl.fma(g, g, gg)
    return tl.sum(mg), tl.sum(mm), tl.sum(gg)


@triton.jit
def sum_partials(partial, first, count):
    """The sum of `count` numbers in float64, in an order that depends on the count alone."""
    total = tl.zeros((LANES,), tl.float64)
    for i in range(0, count, LANES):
        o = i + tl.arange(0, LANES)
        total += tl.load(partial + first + o, o < count, other=0.0, cache_modifier=".cg").to(tl.float64)
    return tl.sum(total)


@triton.jit
def _finite(x):
    return (x - x) == 0


@triton.jit
def _damping_of(s, gain):
    """d, given s. A gain of 1 is the paper's rule, and changes no bit of it."""
    s = tl.where(gain != 1, tl.minimum(tl.maximum(gain * s, -1.0), 1.0), s)
    return (1 + s) / 2


@triton.jit
def _settle(segments, n_segments, segment, present, settings, mg, mm, gg, scalars):
    """s and d of one segment. scalars: d of each segment, |g|^2 of each segment, clip factor."""
    s_ptr = load_cell(segments, n_segments, ALIGNMENT, segment).to(tl.pointer_type(tl.float32))
    s = tl.load(s_ptr).to(tl.float64)
    norms = tl.sqrt(mm) * tl.sqrt(gg)
    cosine = tl.where(norms > 0, mg / tl.where(norms > 0, norms, 1.0), 0.0)
    cosine = tl.minimum(tl.maximum(cosine, -1.0), 1.0)
    smoothing = tl.load(settings + SMOOTHING)
    smoothed = smoothing * s + (1 - smoothing) * cosine
    taken = present & _finite(mg) & _finite(mm) & _finite(gg)
    s = tl.where(taken, smoothed, s).to(tl.float32)
    tl.store(s_ptr, s)
    tl.store(scalars + segment, _damping_of(s.to(tl.float64), tl.load(settings + GAIN)))
    tl.store(scalars + n_segments + segment, gg)


@triton.jit
def _clip(settings, length, scalars, n_segments, norm):
    """|g| and the clip factor."""
    k = tl.load(settings + MAX_NORM) / (length + 1e-6)
    tl.store(norm, length.to(tl.float32))
    tl.store(scalars + 2 * n_segments, tl.where(k > 1, 1.0, k))


@triton.jit
def _move(
    p_ptr, g_ptr, m_ptr, v_ptr, o, size, w, b, lr, decay, factor, b2, r2, eps, correction, shrink,
    dtype: tl.constexpr, MASKED: tl.constexpr, ADAPTIVE: tl.constexpr, DECOUPLED: tl.constexpr,
    CORRECT: tl.constexpr,
):  # fmt: skip
    """Moves one block.

    Launched without contraction: fma stands where torch's own operations round once, so with fixed
    damping TAM is torch's SGD to the bit.
    """
    g = load_values(g_ptr, o, size, MASKED, "evict_first") * factor
    m = load_values(m_ptr, o, size, MASKED, "evict_first")
    theta = load_values(p_ptr, o, size, MASKED, "evict_first")
    if not DECOUPLED:
        # 0 times a parameter that is not finite would be nan.
        g = tl.where(decay != 0, tl.fma(theta, decay + tl.zeros_like(theta), g), g)
    m = b * m + w * g
    if ADAPTIVE:
        v = load_values(v_ptr, o, size, MASKED, "evict_first")
        v = b2 * v + r2 * (g * g)
        denominator = tl.sqrt(v)
        if CORRECT:
            denominator = denominator / correction
        if DECOUPLED:
            theta = theta * shrink
        theta = tl.fma(m / (denominator + eps), tl.zeros_like(m) - lr, theta)
        store_values(v_ptr, o, size, v, dtype, MASKED)
    else:
        theta = tl.fma(m, tl.zeros_like(m) - lr, theta)
    store_values(m_ptr, o, size, m, dtype, MASKED)
    store_values(p_ptr, o, size, theta, dtype, MASKED)


@triton.jit
def _update(
    rows, n_rows, row, gradient, start, size, settings, damping, clip, scale,
    dtype: tl.constexpr, ALIGNED: tl.constexpr, ADAPTIVE: tl.constexpr, DECOUPLED: tl.constexpr,
    EMA: tl.constexpr, CORRECT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves one chunk. `settings` points at its group's."""
    weight = tl.load(settings + FLOOR) + damping
    keep = 1 - weight if EMA else tl.load(settings + BETA1)
    lr = tl.load(settings + LR)
    decay = tl.load(settings + DECAY)
    beta2 = tl.load(settings + BETA2)
    factor = (tl.load(settings + SIGN) * clip).to(tl.float32) * scale
    correction = lr
    if CORRECT:
        t = load_cell(rows, n_rows, STEP, row).to(tl.pointer_type(tl.float32))
        correction = tl.sqrt(1 - tl.exp(tl.load(t, cache_modifier=".cg").to(tl.float64) * tl.log(beta2)))
    p_ptr = as_pointer(load_cell(rows, n_rows, THETA, row), dtype, ALIGNED) + start
    g_ptr = as_pointer(gradient, dtype, ALIGNED) + start
    m_ptr = as_pointer(load_cell(rows, n_rows, MOMENTUM, row), dtype, ALIGNED) + start
    v_ptr = m_ptr
    if ADAPTIVE:
        v_ptr = as_pointer(load_cell(rows, n_rows, SECOND, row), dtype, ALIGNED) + start
    w, b, r2 = weight.to(tl.float32), keep.to(tl.float32), (1 - beta2).to(tl.float32)
    shrink, eps = (1 - lr * decay).to(tl.float32), tl.load(settings + EPS).to(tl.float32)
    lr, decay, b2 = lr.to(tl.float32), decay.to(tl.float32), beta2.to(tl.float32)
    correction = correction.to(tl.float32)
    lane = tl.arange(0, BLOCK)
    whole = size // BLOCK * BLOCK
    for i in range(0, whole, BLOCK):
        _move(
            p_ptr, g_ptr, m_ptr, v_ptr, i + lane, size, w, b, lr, decay, factor, b2, r2, eps, correction,
            shrink, dtype, False, ADAPTIVE, DECOUPLED, CORRECT,
        )  # fmt: skip
    if whole < size:
        _move(
            p_ptr, g_ptr, m_ptr, v_ptr, whole + lane, size, w, b, lr, decay, factor, b2, r2, eps, correction,
            shrink, dtype, True, ADAPTIVE, DECOUPLED, CORRECT,
        )  # fmt: skip


@triton.jit
def measure(
    chunks, rows, gradients, shares, segments, settings, partial, sums, scalars, norm, counters, grad_scale,
    found_inf, n_chunks, n_rows, n_shares, n_segments,
    DTYPES: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr,
    ADAPTIVE: tl.constexpr, TOGETHER: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Measures one chunk. DTYPES has a bit for each `Kind` that occurs.

    counters: how many chunks of each share have been measured, and behind them how many segments have
    settled; left at 0. TOGETHER: other ranks' sums are added before `settle`.
    """
    if SKIPS:
        if tl.load(found_inf) != 0:
            return
    scale = tl.full((), 1.0, tl.float32)
    if SCALED:
        scale = 1.0 / tl.load(grad_scale)
    chunk = tl.program_id(0)
    row = tl.load(chunks + chunk)
    start = tl.load(chunks + n_chunks + chunk).to(tl.int64) * CHUNK
    share = load_cell(rows, n_rows, SHARE, row).to(tl.int32)
    kind = load_cell(rows, n_rows, KIND, row).to(tl.int32)
    sign = tl.load(settings + load_cell(rows, n_rows, GROUP, row) * OPTIONS + SIGN).to(tl.float32)
    gradient = tl.load(gradients + row)
    size = tl.minimum(load_cell(rows, n_rows, NUMEL, row) - start, CHUNK).to(tl.int32)
    size = tl.where(gradient != 0, size, 0)
    mg = tl.full((), 0.0, tl.float32)
    mm = tl.full((), 0.0, tl.float32)
    gg = tl.full((), 0.0, tl.float32)
    for k in tl.static_range(KINDS):
        if (DTYPES >> k) & 1:
            if kind == k:
                mg, mm, gg = _measure(
                    rows, n_rows, row, gradient, start, size, scale,
                    tl.float32 if k == FLOAT32 else tl.bfloat16 if k == BFLOAT16 else tl.float16,
                    ALIGNED, BLOCK,
                )  # fmt: skip
    tl.store(partial + chunk, mg * sign)
    tl.store(partial + n_chunks + chunk, mm)
    tl.store(partial + 2 * n_chunks + chunk, gg)
    if ADAPTIVE and not TOGETHER:
        if (start == 0) & (gradient != 0):
            t = load_cell(rows, n_rows, STEP, row).to(tl.pointer_type(tl.float32))
            tl.store(t, tl.load(t) + 1)
    tl.debug_barrier()
    count = load_cell(shares, n_shares, CHUNK_COUNT, share).to(tl.int32)
    if tl.atomic_add(counters + share, 1, sem="acq_rel") == count - 1:
        tl.store(counters + share, 0)
        first = load_cell(shares, n_shares, FIRST_CHUNK, share).to(tl.int32)
        dot = sum_partials(partial, first, count)
        mm_total = sum_partials(partial + n_chunks, first, count)
        gg_total = sum_partials(partial + 2 * n_chunks, first, count)
        present = tl.load(gradients + n_rows + share) != 0
        if TOGETHER:
            tl.store(sums + share * SUMS + DOT, dot)
            tl.store(sums + share * SUMS + MM, mm_total)
            tl.store(sums + share * SUMS + GG, gg_total)
            tl.store(sums + share * SUMS + PRESENT, present.to(tl.float64))
        else:  # a share is a segment
            _settle(segments, n_segments, share, present, settings, dot, mm_total, gg_total, scalars)
            tl.debug_barrier()
            if tl.atomic_add(counters + n_shares, 1, sem="acq_rel") == n_segments - 1:
                tl.store(counters + n_shares, 0)
                length = tl.sqrt(sum_partials(scalars + n_segments, 0, n_segments))
                _clip(settings, length, scalars, n_segments, norm)


@triton.jit
def settle(
    rows, gradients, segments, settings, sums, scalars, norm, n_rows, n_shares, n_segments,
    ADAPTIVE: tl.constexpr,
):  # fmt: skip
    """Settles one segment from the sums of its shares, which the ranks have added up; the first also counts
    the step."""
    whole = sums + n_shares * SUMS
    if tl.load(whole + FOUND_INF) != 0:
        return
    segment = tl.program_id(0)
    first = load_cell(segments, n_segments, FIRST, segment).to(tl.int32)
    dot = tl.full((), 0.0, tl.float64)
    mm = tl.full((), 0.0, tl.float64)
    gg = tl.full((), 0.0, tl.float64)
    present = tl.full((), 0.0, tl.float64)
    for i in range(first, first + load_cell(segments, n_segments, COUNT, segment).to(tl.int32)):
        dot += tl.load(sums + i * SUMS + DOT)
        mm += tl.load(sums + i * SUMS + MM)
        gg += tl.load(sums + i * SUMS + GG)
        present += tl.load(sums + i * SUMS + PRESENT)
    _settle(segments, n_segments, segment, present > 0, settings, dot, mm, gg, scalars)
    if segment == 0:
        _clip(settings, tl.sqrt(tl.load(whole + GG)), scalars, n_segments, norm)
        if ADAPTIVE:
            for i in range(0, n_rows, LANES):
                row = i + tl.arange(0, LANES)
                moves = tl.load(gradients + row, row < n_rows, other=0) != 0
                t = tl.load(rows + STEP * n_rows + row, moves, other=0).to(tl.pointer_type(tl.float32))
                tl.store(t, tl.load(t, moves, other=0.0) + 1, moves)


@triton.jit
def update(
    chunks, rows, gradients, settings, scalars, grad_scale, found_inf, n_chunks, n_rows, n_shares, n_segments,
    DTYPES: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr,
    ADAPTIVE: tl.constexpr, DECOUPLED: tl.constexpr, EMA: tl.constexpr, CORRECT: tl.constexpr,
    CLIP: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves one chunk, the last one first."""
    if SKIPS:
        if tl.load(found_inf) != 0:
            return
    scale = tl.full((), 1.0, tl.float32)
    if SCALED:
        scale = 1.0 / tl.load(grad_scale)
    chunk = n_chunks - 1 - tl.program_id(0)
    row = tl.load(chunks + chunk)
    start = tl.load(chunks + n_chunks + chunk).to(tl.int64) * CHUNK
    gradient = tl.load(gradients + row)
    if gradient == 0:
        return
    size = tl.minimum(load_cell(rows, n_rows, NUMEL, row) - start, CHUNK).to(tl.int32)
    mine = settings + load_cell(rows, n_rows, GROUP, row) * OPTIONS
    kind = load_cell(rows, n_rows, KIND, row).to(tl.int32)
    damping = tl.load(scalars + load_cell(rows, n_rows, SEGMENT, row))
    clip = tl.load(scalars + 2 * n_segments) if CLIP else tl.full((), 1.0, tl.float64)
    for k in tl.static_range(KINDS):
        if (DTYPES >> k) & 1:
            if kind == k:
                _update(
                    rows, n_rows, row, gradient, start, size, mine, damping, clip, scale,
                    tl.float32 if k == FLOAT32 else tl.bfloat16 if k == BFLOAT16 else tl.float16,
                    ALIGNED, ADAPTIVE, DECOUPLED, EMA, CORRECT, BLOCK,
                )  # fmt: skip
