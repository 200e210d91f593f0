/* The fused step on the CPU: measure, settle, update, over the tables of tables.py.

   Plain C with OpenMP: no Python or torch headers. native_kernels.h is included once for each kind of
   number and instruction set; the instruction set is chosen when the step runs. Sums are taken per
   chunk of fixed size and added in the order of the chunks, so that a result does not depend on the
   number of threads. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif

enum { THETA, MOMENTUM, SECOND, STEP, NUMEL, SEGMENT, GROUP, KIND };
enum { FIRST, COUNT, ALIGNMENT, WIDE };
enum { LR, BETA1, BETA2, EPS, FLOOR, DECAY, SIGN, SMOOTHING, MAX_NORM, OPTIONS };
enum { ADAPTIVE = 1, DECOUPLED = 2, EMA = 4, CORRECT = 8, CLIP = 16, ONE_BY_ONE = 32 };

#define CHUNK 16384 /* elements of a unit of work; a tensor up to this size is one thread's */
#define INNER 512   /* elements added in the kind's own precision before float64 takes over */

/* The coefficients of one tensor's update. */
typedef struct {
    double weight, keep, lr, decay, shrink, beta2, rest2, eps, correction, factor;
    int adaptive, decoupled;
} coefficients;

typedef void (*measure_fn)(const void *m, const void *g, int64_t n, double scale, double *sums);
typedef void (*update_fn)(void *p, const void *g, void *m, void *v, int64_t n, const coefficients *c);

static inline float bf16_to_float(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static inline uint16_t float_to_bf16(float x) { /* to nearest, ties to even; a nan stays one */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0u : rounded);
}

#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)

#define ISA base
#define TARGET
#define FUSED(f, a, b, c) ((a) * (b) + (c)) /* without the instruction, fma is a slow call */
#include "native_kinds.h"
#undef ISA
#undef TARGET
#undef FUSED
#define FUSED(f, a, b, c) __builtin_##f(a, b, c)

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define X86 1
#define ISA avx2
#define TARGET __attribute__((target("avx2,fma")))
#include "native_kinds.h"
#undef ISA
#undef TARGET
#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#include "native_kinds.h"
#undef ISA
#undef TARGET
#endif

/* Of the tables and of tam_step's arguments: native.py has the same number. */
int tam_layout(void) { return 1; }

/* 0: base, 1: AVX2, 2: AVX-512 */
int tam_instruction_set(void) {
#ifdef X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

typedef struct {
    measure_fn measure[4];
    update_fn update[4];
    int64_t size[4];
} kinds;

#define KINDS_OF(isa)                                                                             \
    {{measure_float32_##isa, measure_bfloat16_##isa, 0, measure_float64_##isa},                   \
     {update_float32_##isa, update_bfloat16_##isa, 0, update_float64_##isa},                      \
     {4, 2, 2, 8}}

static const kinds BY_ISA[] = {
    KINDS_OF(base),
#ifdef X86
    KINDS_OF(avx2), KINDS_OF(avx512)
#endif
};

/* The tables of a step. A column of rows is `n` long, a column of segments `n_segments`. */
typedef struct {
    const int64_t *rows, *gradients, *segments;
    const double *options;
    int64_t n, n_segments;
    int flags;
    double scale;       /* 1 / grad_scale */
    double clip;
    double *damping;    /* d by segment */
    const kinds *kind;
} tables;

static inline int64_t row_of(const tables *t, int column, int64_t row) { return t->rows[column * t->n + row]; }
static inline int64_t segment_of(const tables *t, int column, int64_t s) {
    return t->segments[column * t->n_segments + s];
}

static inline char *at(const tables *t, int64_t address, int64_t row, int64_t chunk) {
    return (char *)(intptr_t)address + chunk * CHUNK * t->kind->size[row_of(t, KIND, row)];
}

static inline int64_t length(const tables *t, int64_t row, int64_t chunk) {
    int64_t rest = row_of(t, NUMEL, row) - chunk * CHUNK;
    return rest < CHUNK ? rest : CHUNK;
}

static inline int64_t chunks_of(const tables *t, int64_t row) {
    return t->gradients[row] ? (row_of(t, NUMEL, row) + CHUNK - 1) / CHUNK : 0;
}

static void measure_chunk(const tables *t, int64_t row, int64_t chunk, double *sums) {
    t->kind->measure[row_of(t, KIND, row)](at(t, row_of(t, MOMENTUM, row), row, chunk), at(t, t->gradients[row], row, chunk),
                                           length(t, row, chunk), t->scale, sums);
    sums[0] *= t->options[row_of(t, GROUP, row) * OPTIONS + SIGN];
}

static void update_chunk(const tables *t, int64_t row, int64_t chunk, const coefficients *c) {
    void *second = t->flags & ADAPTIVE ? at(t, row_of(t, SECOND, row), row, chunk) : 0;
    t->kind->update[row_of(t, KIND, row)](at(t, row_of(t, THETA, row), row, chunk), at(t, t->gradients[row], row, chunk),
                                          at(t, row_of(t, MOMENTUM, row), row, chunk), second, length(t, row, chunk), c);
}

/* s and d of a segment from its three sums. */
static void settle(const tables *t, int64_t s, const double *sums) {
    void *address = (void *)(intptr_t)segment_of(t, ALIGNMENT, s);
    int wide = (int)segment_of(t, WIDE, s);
    double before = wide ? *(double *)address : *(float *)address, after = before;
    if (t->gradients[t->n + s] && isfinite(sums[0]) && isfinite(sums[1]) && isfinite(sums[2])) {
        double norms = sqrt(sums[1]) * sqrt(sums[2]), smoothing = t->options[SMOOTHING];
        double cosine = norms > 0 ? sums[0] / norms : 0;
        cosine = cosine > 1 ? 1 : cosine < -1 ? -1 : cosine;
        after = smoothing * before + (1 - smoothing) * cosine;
    }
    if (wide) *(double *)address = after;
    else after = *(float *)address = (float)after;
    t->damping[s] = (1 + after) / 2;
}

static coefficients coefficients_of(const tables *t, int64_t row) {
    const double *o = t->options + row_of(t, GROUP, row) * OPTIONS;
    double weight = o[FLOOR] + t->damping[row_of(t, SEGMENT, row)];
    coefficients c = {
        .weight = weight,
        .keep = t->flags & EMA ? 1 - weight : o[BETA1],
        .lr = o[LR],
        .decay = o[DECAY],
        .shrink = 1 - o[LR] * o[DECAY],
        .beta2 = o[BETA2],
        .rest2 = 1 - o[BETA2],
        .eps = o[EPS],
        .correction = 1,
        .factor = o[SIGN] * t->clip * t->scale,
        .adaptive = (t->flags & ADAPTIVE) != 0,
        .decoupled = (t->flags & DECOUPLED) != 0,
    };
    if (t->flags & CORRECT) c.correction = 1 / sqrt(1 - pow(o[BETA2], *(float *)(intptr_t)row_of(t, STEP, row)));
    return c;
}

static void add(double *sums, const double *more) {
    for (int k = 0; k < 3; k++) sums[k] += more[k];
}

/* One tensor, by one thread. */
static void step_small(const tables *t, int64_t row, double *sums) {
    for (int64_t c = 0; c < chunks_of(t, row); c++) {
        double part[3];
        measure_chunk(t, row, c, part);
        add(sums, part);
    }
    settle(t, row, sums);
    coefficients k = coefficients_of(t, row);
    for (int64_t c = chunks_of(t, row) - 1; c >= 0; c--) update_chunk(t, row, c, &k);
}

/* This thread's share of n chunks. */
static void share(int64_t n, int64_t *begin, int64_t *end) {
    int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
    *begin = n * me / all;
    *end = n * (me + 1) / all;
}

/* One tensor, by all threads; each updates what it has measured, last first: that is in its cache. */
static void step_large(const tables *t, int64_t row, double *sums, double *parts, int threads) {
    int64_t n = chunks_of(t, row);
    coefficients k;
#pragma omp parallel num_threads(threads)
    {
        int64_t begin, end;
        share(n, &begin, &end);
        for (int64_t c = begin; c < end; c++) measure_chunk(t, row, c, parts + 3 * c);
#pragma omp barrier
#pragma omp single
        {
            for (int64_t c = 0; c < n; c++) add(sums, parts + 3 * c);
            settle(t, row, sums);
            k = coefficients_of(t, row);
        }
        for (int64_t c = end - 1; c >= begin; c--) update_chunk(t, row, c, &k);
    }
}

/* Every tensor is its own segment, and nothing else is needed to update it. */
static double step_one_by_one(const tables *t, double *parts, int threads) {
    double *sums = calloc(3 * t->n + 1, sizeof *sums), total = 0;
    if (!sums) return -1;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (t->n > 4)
    for (int64_t row = 0; row < t->n; row++)
        if (row_of(t, NUMEL, row) <= CHUNK) step_small(t, row, sums + 3 * row);
    for (int64_t row = 0; row < t->n; row++) {
        if (row_of(t, NUMEL, row) > CHUNK) step_large(t, row, sums + 3 * row, parts, threads);
        total += sums[3 * row + 2];
    }
    free(sums);
    return sqrt(total);
}

/* s of every segment and the clip factor, from the chunks' sums. Returns |g|. */
static double settle_all(tables *t, const int64_t *first, const double *parts, coefficients *k) {
    double total = 0;
    for (int64_t s = 0; s < t->n_segments; s++) {
        double sums[3] = {0, 0, 0};
        int64_t row = segment_of(t, FIRST, s), end = row + segment_of(t, COUNT, s);
        for (int64_t i = first[row]; i < first[end]; i++) add(sums, parts + 3 * i);
        settle(t, s, sums);
        total += sums[2];
    }
    if (t->flags & CLIP) {
        double factor = t->options[MAX_NORM] / (sqrt(total) + 1e-6);
        t->clip = factor > 1 ? 1 : factor;
    }
    for (int64_t row = 0; row < t->n; row++) k[row] = coefficients_of(t, row);
    return sqrt(total);
}

/* Measure all, settle, then update all; each thread its own share, last first. */
static double step_together(tables *t, const int64_t *first, double *parts, int threads) {
    int64_t n = first[t->n];
    int64_t *row = malloc((n + 1) * sizeof *row);
    coefficients *k = malloc((t->n + 1) * sizeof *k);
    double norm = -1;
    if (!row || !k) goto end;
    for (int64_t j = 0; j < t->n; j++)
        for (int64_t i = first[j]; i < first[j + 1]; i++) row[i] = j;
#pragma omp parallel num_threads(threads) if (n > 1)
    {
        int64_t begin, end;
        share(n, &begin, &end);
        for (int64_t i = begin; i < end; i++) measure_chunk(t, row[i], i - first[row[i]], parts + 3 * i);
#pragma omp barrier
#pragma omp single
        norm = settle_all(t, first, parts, k);
        for (int64_t i = end - 1; i >= begin; i--) update_chunk(t, row[i], i - first[row[i]], &k[row[i]]);
    }
end:
    free(row);
    free(k);
    return norm;
}

/* The step; returns |g|, or -1 where there was no memory for the partial sums. */
double tam_step(const int64_t *rows, int64_t n, const int64_t *gradients, const int64_t *segments,
                int64_t n_segments, const double *options, int flags, double scale, int instruction_set, int threads) {
    tables t = {rows, gradients, segments, options, n, n_segments, flags, scale, 1, 0, &BY_ISA[instruction_set]};
    int64_t *first = malloc((n + 1) * sizeof *first), chunks = 0;
    for (int64_t row = 0; row < n; row++) chunks += chunks_of(&t, row);
    double *parts = malloc((3 * chunks + 1) * sizeof *parts), norm = -1;
    t.damping = malloc(n_segments * sizeof *t.damping);
    if (first && parts && t.damping) {
        first[0] = 0;
        for (int64_t row = 0; row < n; row++) {
            first[row + 1] = first[row] + chunks_of(&t, row);
            if (flags & ADAPTIVE && gradients[row]) *(float *)(intptr_t)row_of(&t, STEP, row) += 1;
        }
        norm = flags & ONE_BY_ONE ? step_one_by_one(&t, parts, threads)
                                  : step_together(&t, first, parts, threads);
    }
    free(first);
    free(parts);
    free(t.damping);
    return norm;
}
