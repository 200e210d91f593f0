/* The fused step on the CPU: measure, settle, update, over the tables that columns.py describes. `tam_measure` and
   `tam_update` are its two halves, between which other ranks' sums can be added. `tam_step_per_tensor` does both
   where every tensor is a segment: each tensor is updated while it is still in the cache.

   Plain C with OpenMP: no Python or torch headers. setup.py writes columns.h from columns.py. cpu_kernels.h is
   included once for each kind of number and instruction set; the instruction set is chosen when the step runs.
   Sums are taken per chunk of fixed size and added in the order of the chunks, so a result does not depend on
   the number of threads. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "columns.h" /* the columns, the struct `tables` and LAYOUT */

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif

#define MEASURED PRESENT /* sums of a chunk: those before PRESENT */
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
#include "cpu_dtypes.h"
#undef ISA
#undef TARGET
#undef FUSED
#define FUSED(f, a, b, c) __builtin_##f(a, b, c)

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define X86 1
#define ISA avx2
#define TARGET __attribute__((target("avx2,fma")))
#include "cpu_dtypes.h"
#undef ISA
#undef TARGET
#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#include "cpu_dtypes.h"
#undef ISA
#undef TARGET
#endif

/* cpu.py refuses a kernel whose layout is not its own. */
int tam_layout(void) { return LAYOUT; }

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
    measure_fn measure[KINDS];
    update_fn update[KINDS];
    int64_t size[KINDS];
} kinds;

#define KINDS_OF(isa)                                                                                                  \
    {{[FLOAT32] = measure_float32_##isa, [BFLOAT16] = measure_bfloat16_##isa, [FLOAT64] = measure_float64_##isa},      \
     {[FLOAT32] = update_float32_##isa, [BFLOAT16] = update_bfloat16_##isa, [FLOAT64] = update_float64_##isa},         \
     {[FLOAT32] = 4, [BFLOAT16] = 2, [FLOAT64] = 8}}

static const kinds BY_ISA[] = {
    KINDS_OF(base),
#ifdef X86
    KINDS_OF(avx2), KINDS_OF(avx512)
#endif
};

static inline int64_t row_of(const tables *t, int column, int64_t row) { return t->rows[column * t->n + row]; }
static inline int64_t segment_of(const tables *t, int column, int64_t s) {
    return t->segments[column * t->n_segments + s];
}
static inline const kinds *kinds_of(const tables *t) { return &BY_ISA[t->instruction_set]; }

static inline char *at(const tables *t, int64_t address, int64_t row, int64_t chunk) {
    return (char *)(intptr_t)address + chunk * CHUNK * kinds_of(t)->size[row_of(t, KIND, row)];
}

static inline int64_t length(const tables *t, int64_t row, int64_t chunk) {
    int64_t rest = row_of(t, NUMEL, row) - chunk * CHUNK;
    return rest < CHUNK ? rest : CHUNK;
}

static inline int64_t chunks_of(const tables *t, int64_t row) {
    return t->gradients[row] ? (row_of(t, NUMEL, row) + CHUNK - 1) / CHUNK : 0;
}

static void measure_chunk(const tables *t, int64_t row, int64_t chunk, double *sums) {
    kinds_of(t)->measure[row_of(t, KIND, row)](at(t, row_of(t, MOMENTUM, row), row, chunk),
                                               at(t, t->gradients[row], row, chunk), length(t, row, chunk), t->scale,
                                               sums);
    sums[DOT] *= t->options[row_of(t, GROUP, row) * OPTIONS + SIGN];
}

static void update_chunk(const tables *t, int64_t row, int64_t chunk, const coefficients *c) {
    void *second = t->flags & ADAPTIVE ? at(t, row_of(t, SECOND, row), row, chunk) : 0;
    kinds_of(t)->update[row_of(t, KIND, row)](at(t, row_of(t, THETA, row), row, chunk),
                                              at(t, t->gradients[row], row, chunk),
                                              at(t, row_of(t, MOMENTUM, row), row, chunk), second,
                                              length(t, row, chunk), c);
}

/* d, given s. A gain of 1 is the paper's rule, and changes no bit of it. */
static double damping_of(double s, double gain) {
    if (gain != 1) {
        s *= gain;
        s = s > 1 ? 1 : s < -1 ? -1 : s;
    }
    return (1 + s) / 2;
}

/* s of a segment from its sums; returns d. */
static double settle(const tables *t, int64_t s, const double *sums) {
    void *address = (void *)(intptr_t)segment_of(t, ALIGNMENT, s);
    int wide = (int)segment_of(t, WIDE, s);
    double before = wide ? *(double *)address : *(float *)address, after = before;
    if (sums[PRESENT] > 0 && isfinite(sums[DOT]) && isfinite(sums[MM]) && isfinite(sums[GG])) {
        double norms = sqrt(sums[MM]) * sqrt(sums[GG]), smoothing = t->options[SMOOTHING];
        double cosine = norms > 0 ? sums[DOT] / norms : 0;
        cosine = cosine > 1 ? 1 : cosine < -1 ? -1 : cosine;
        after = smoothing * before + (1 - smoothing) * cosine;
    }
    if (wide) *(double *)address = after;
    else after = *(float *)address = (float)after;
    return damping_of(after, t->options[GAIN]);
}

static coefficients coefficients_of(const tables *t, int64_t row, double damping, double clip) {
    const double *o = t->options + row_of(t, GROUP, row) * OPTIONS;
    double weight = o[FLOOR] + damping;
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
        .factor = o[SIGN] * clip * t->scale,
        .adaptive = (t->flags & ADAPTIVE) != 0,
        .decoupled = (t->flags & DECOUPLED) != 0,
    };
    if (t->flags & CORRECT) c.correction = 1 / sqrt(1 - pow(o[BETA2], *(float *)(intptr_t)row_of(t, STEP, row)));
    return c;
}

static void count_step(const tables *t, int64_t row) {
    if (t->flags & ADAPTIVE && t->gradients[row]) *(float *)(intptr_t)row_of(t, STEP, row) += 1;
}

static void add(double *sums, const double *more) {
    for (int k = 0; k < MEASURED; k++) sums[k] += more[k];
}

/* This thread's share of n chunks. */
static void share(int64_t n, int64_t *begin, int64_t *end) {
    int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
    *begin = n * me / all;
    *end = n * (me + 1) / all;
}

/* One tensor, by one thread. */
static void step_small(const tables *t, int64_t row, double *sums) {
    for (int64_t c = 0; c < chunks_of(t, row); c++) {
        double part[MEASURED];
        measure_chunk(t, row, c, part);
        add(sums, part);
    }
    coefficients k = coefficients_of(t, row, settle(t, row, sums), 1);
    for (int64_t c = chunks_of(t, row) - 1; c >= 0; c--) update_chunk(t, row, c, &k);
}

/* One tensor, by all threads; each updates what it has measured, last first: that is in its cache. */
static void step_large(const tables *t, int64_t row, double *sums, double *parts) {
    int64_t n = chunks_of(t, row);
    coefficients k;
#pragma omp parallel num_threads(t->threads)
    {
        int64_t begin, end;
        share(n, &begin, &end);
        for (int64_t c = begin; c < end; c++) measure_chunk(t, row, c, parts + MEASURED * c);
#pragma omp barrier
#pragma omp single
        {
            for (int64_t c = 0; c < n; c++) add(sums, parts + MEASURED * c);
            k = coefficients_of(t, row, settle(t, row, sums), 1);
        }
        for (int64_t c = end - 1; c >= begin; c--) update_chunk(t, row, c, &k);
    }
}

/* The step where every tensor is a segment and no other is needed to update it: row k is segment k and share k,
   without clipping and without other ranks. cpu.py checks that. Returns |g|, or -1 where there was no memory. */
double tam_step_per_tensor(const tables *t) {
    int64_t most = 0;
    for (int64_t row = 0; row < t->n; row++) most = chunks_of(t, row) > most ? chunks_of(t, row) : most;
    double *parts = malloc((MEASURED * most + 1) * sizeof *parts), total = 0;
    if (!parts) return -1;
    for (int64_t row = 0; row < t->n; row++) {
        count_step(t, row);
        memset(t->sums + SUMS * row, 0, SUMS * sizeof *t->sums);
        t->sums[SUMS * row + PRESENT] = t->gradients[row] != 0;
    }
#pragma omp parallel for schedule(dynamic, 4) num_threads(t->threads) if (t->n > 4)
    for (int64_t row = 0; row < t->n; row++)
        if (row_of(t, NUMEL, row) <= CHUNK) step_small(t, row, t->sums + SUMS * row);
    for (int64_t row = 0; row < t->n; row++) {
        if (row_of(t, NUMEL, row) > CHUNK) step_large(t, row, t->sums + SUMS * row, parts);
        total += t->sums[SUMS * row + GG];
    }
    free(parts);
    return sqrt(total);
}

/* All chunks of all rows, one after the other. */
typedef struct {
    int64_t n, *row, *chunk;
} chunk_list;

static int list_chunks(const tables *t, chunk_list *list) {
    list->n = 0;
    for (int64_t row = 0; row < t->n; row++) list->n += chunks_of(t, row);
    list->row = malloc((2 * list->n + 1) * sizeof *list->row);
    if (!list->row) return 0;
    list->chunk = list->row + list->n;
    int64_t i = 0;
    for (int64_t row = 0; row < t->n; row++)
        for (int64_t c = 0; c < chunks_of(t, row); c++, i++) list->row[i] = row, list->chunk[i] = c;
    return 1;
}

/* The sums of every share. Returns -1 where there was no memory for it. */
int tam_measure(const tables *t) {
    chunk_list all;
    if (!list_chunks(t, &all)) return -1;
    double *parts = malloc((MEASURED * all.n + 1) * sizeof *parts);
    if (parts) {
#pragma omp parallel num_threads(t->threads) if (all.n > 1)
        {
            int64_t begin, end;
            share(all.n, &begin, &end);
            for (int64_t i = begin; i < end; i++) measure_chunk(t, all.row[i], all.chunk[i], parts + MEASURED * i);
        }
        double *whole = t->sums + SUMS * t->n_shares;
        memset(t->sums, 0, SUMS * (t->n_shares + 1) * sizeof *t->sums);
        for (int64_t i = 0; i < all.n; i++) add(t->sums + SUMS * row_of(t, SHARE, all.row[i]), parts + MEASURED * i);
        for (int64_t row = 0; row < t->n; row++)
            if (t->gradients[row]) t->sums[SUMS * row_of(t, SHARE, row) + PRESENT] = 1;
        for (int64_t k = 0; k < t->n_shares; k++) whole[GG] += t->sums[SUMS * k + GG];
    }
    free(parts);
    free(all.row);
    return parts ? 0 : -1;
}

/* Settles every segment from the sums of its shares and moves all rows. Returns |g|, or -1 where there was no
   memory. */
double tam_update(const tables *t) {
    chunk_list all;
    if (!list_chunks(t, &all)) return -1;
    double norm = sqrt(t->sums[SUMS * t->n_shares + GG]), clip = 1;
    if (t->flags & CLIP) {
        clip = t->options[MAX_NORM] / (norm + 1e-6);
        clip = clip > 1 ? 1 : clip;
    }
    double *damping = malloc((t->n_segments + 1) * sizeof *damping);
    coefficients *k = malloc((t->n + 1) * sizeof *k);
    if (damping && k) {
        for (int64_t s = 0; s < t->n_segments; s++) {
            double sums[SUMS] = {0};
            int64_t first = segment_of(t, FIRST, s), end = first + segment_of(t, COUNT, s);
            for (int64_t i = first; i < end; i++)
                for (int j = 0; j < SUMS; j++) sums[j] += t->sums[SUMS * i + j];
            damping[s] = settle(t, s, sums);
        }
        for (int64_t row = 0; row < t->n; row++) {
            count_step(t, row);
            k[row] = coefficients_of(t, row, damping[row_of(t, SEGMENT, row)], clip);
        }
#pragma omp parallel num_threads(t->threads) if (all.n > 1)
        {
            int64_t begin, end; /* what this thread has measured, last first */
            share(all.n, &begin, &end);
            for (int64_t i = end - 1; i >= begin; i--) update_chunk(t, all.row[i], all.chunk[i], &k[all.row[i]]);
        }
    } else norm = -1;
    free(damping);
    free(k);
    free(all.row);
    return norm;
}
