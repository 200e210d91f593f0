"""The recorder's kernel on CUDA: it takes all measurements between two steps in one pass over the tensors.

The last program to finish its chunk adds the partial sums, in a fixed order. Importing this module needs
triton.
"""

from __future__ import annotations

from enum import IntEnum

import triton
import triton.language as tl

from tam.step.fused.kernels import as_pointer, load_cell, load_values, store_values, sum_partials


class Column(IntEnum):
    """The columns of the table of tensors (int64)."""

    THETA = 0  # an address, like the next two
    COPY = 1  # theta before the step
    MOMENTUM = 2  # 0 if the parameter has no momentum yet
    NUMEL = 3
    KIND = 4  # the index of its dtype in `columns.KINDS` of the fused step
    SIGN = 5  # -1 to maximize


THETA, COPY, MOMENTUM, NUMEL, KIND, SIGN = (tl.constexpr(int(column)) for column in Column)
LANES = tl.constexpr(1024)


@triton.jit
def _add_momentum(
    m_ptr, g_ptr, o, size, scale, has_m, has_g, mg, mm, gg, MASKED: tl.constexpr, COSINE: tl.constexpr
):
    m = tl.where(has_m, load_values(m_ptr, o, size, MASKED, ""), 0.0)
    mm = tl.fma(m, m, mm)
    if COSINE:
        g = tl.where(has_g, load_values(g_ptr, o, size, MASKED, "") * scale, 0.0)
        mg = tl.fma(m, g, mg)
        gg = tl.fma(g, g, gg)
    return mg, mm, gg


@triton.jit
def _add_movement(theta, copy, o, size, uu, pp, dtype: tl.constexpr, MASKED: tl.constexpr):
    old = load_values(copy, o, size, MASKED, "evict_first")
    new = load_values(theta, o, size, MASKED, "")
    store_values(copy, o, size, new, dtype, MASKED)
    return tl.fma(new - old, new - old, uu), tl.fma(old, old, pp)


@triton.jit
def _measure_chunk(
    rows, n_rows, row, gradient, start, size, scale,
    dtype: tl.constexpr, ALIGNED: tl.constexpr, MOVES: tl.constexpr, MOMENTA: tl.constexpr,
    COSINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return <m, g>, |m|^2 (0 without a gradient), |g|^2, |m|^2, |theta - copy|^2 and |copy|^2 of one chunk.

    The copy becomes theta.
    """
    lane = tl.arange(0, BLOCK)
    zero = tl.zeros((BLOCK,), tl.float32)
    mg, gg, mm, uu, pp = zero, zero, zero, zero, zero
    theta_address = load_cell(rows, n_rows, THETA, row)
    whole = size // BLOCK * BLOCK  # without a mask the loads are 16 bytes wide
    if MOMENTA or COSINE:
        m_address = load_cell(rows, n_rows, MOMENTUM, row)
        has_m, has_g = m_address != 0, gradient != 0  # a missing one counts as 0; theta is read in its place
        m_ptr = as_pointer(tl.where(has_m, m_address, theta_address), dtype, ALIGNED) + start
        g_ptr = as_pointer(tl.where(has_g, gradient, theta_address), dtype, ALIGNED) + start
        for i in range(0, whole, BLOCK):
            mg, mm, gg = _add_momentum(
                m_ptr, g_ptr, i + lane, size, scale, has_m, has_g, mg, mm, gg, False, COSINE
            )  # fmt: skip
        if whole < size:
            mg, mm, gg = _add_momentum(
                m_ptr, g_ptr, whole + lane, size, scale, has_m, has_g, mg, mm, gg, True, COSINE
            )  # fmt: skip
    if MOVES:
        theta = as_pointer(theta_address, dtype, ALIGNED) + start
        copy = as_pointer(load_cell(rows, n_rows, COPY, row), dtype, ALIGNED) + start
        for i in range(0, whole, BLOCK):
            uu, pp = _add_movement(theta, copy, i + lane, size, uu, pp, dtype, False)
        if whole < size:
            uu, pp = _add_movement(theta, copy, whole + lane, size, uu, pp, dtype, True)
    all_mm = tl.sum(mm)
    return tl.sum(mg), tl.where(gradient != 0, all_mm, 0.0), tl.sum(gg), all_mm, tl.sum(uu), tl.sum(pp)


@triton.jit
def observe(
    chunks, rows, gradients, sources, sums, partial, counter, out, grad_scale,
    n_chunks, n_rows, n_sources,
    DTYPES: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr, PENDING: tl.constexpr,
    MOVES: tl.constexpr, MOMENTA: tl.constexpr, COSINE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Measure one chunk between two steps; the last program writes the totals.

    PENDING: write the readings, |m|^2, |update|^2 and |theta before|^2 of the step before to `out`. The
    readings are the float32 numbers at the addresses in `sources`, or the old `sums` if there are no sources.
    COSINE: write <m, g>, |m|^2 and |g|^2 of the tensors that have a gradient for the next step to `sums`.
    MOVES: copy the parameters.
    """
    scale = tl.full((), 1.0, tl.float32)
    if SCALED:
        scale = 1.0 / tl.load(grad_scale)
    chunk = tl.program_id(0)
    row = tl.load(chunks + chunk)
    start = tl.load(chunks + n_chunks + chunk).to(tl.int64) * CHUNK
    kind = load_cell(rows, n_rows, KIND, row).to(tl.int32)
    size = tl.minimum(load_cell(rows, n_rows, NUMEL, row) - start, CHUNK).to(tl.int32)
    gradient = tl.full((), 0, tl.int64)
    if COSINE:
        gradient = tl.load(gradients + row)
    zero = tl.full((), 0.0, tl.float32)
    mg, mm, gg, all_mm, uu, pp = zero, zero, zero, zero, zero, zero
    for k in tl.static_range(3):
        if (DTYPES >> k) & 1:
            if kind == k:
                mg, mm, gg, all_mm, uu, pp = _measure_chunk(
                    rows, n_rows, row, gradient, start, size, scale,
                    tl.float32 if k == 0 else tl.bfloat16 if k == 1 else tl.float16,
                    ALIGNED, MOVES, MOMENTA, COSINE, BLOCK,
                )  # fmt: skip
    tl.store(partial + chunk, mg * load_cell(rows, n_rows, SIGN, row).to(tl.float32))
    tl.store(partial + n_chunks + chunk, mm)
    tl.store(partial + 2 * n_chunks + chunk, gg)
    tl.store(partial + 3 * n_chunks + chunk, all_mm)
    tl.store(partial + 4 * n_chunks + chunk, uu)
    tl.store(partial + 5 * n_chunks + chunk, pp)
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel") == n_chunks - 1:
        if PENDING:
            if n_sources == 0:
                for i in tl.static_range(3):
                    tl.store(out + i, tl.load(sums + i))
            for first in range(0, n_sources, LANES):
                o = first + tl.arange(0, LANES)
                address = tl.load(sources + o, o < n_sources, other=0)
                value = tl.load(address.to(tl.pointer_type(tl.float32)), o < n_sources, other=0.0)
                tl.store(out + o, value.to(tl.float64), o < n_sources)
            norms = out + tl.where(n_sources == 0, 3, n_sources)
            for i in tl.static_range(3):
                tl.store(norms + i, sum_partials(partial + (3 + i) * n_chunks, 0, n_chunks))
        if COSINE:
            tl.debug_barrier()  # every thread has read `sums`
            for i in tl.static_range(3):
                tl.store(sums + i, sum_partials(partial + i * n_chunks, 0, n_chunks))
        tl.store(counter, 0)
