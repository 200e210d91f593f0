/* <m, g>, |m|^2, |g|^2 of a chunk, and its update, for one kind of number and one instruction set.

   Compiled without contraction: FMA stands where torch's own operations round once, so that with fixed
   damping TAM is torch's SGD to the bit. */

TARGET static void JOIN(measure, KIND_NAME, ISA)(const void *m_, const void *g_, int64_t n, double scale_,
                                                 double *sums) {
    const STORED *restrict m = m_, *restrict g = g_;
    const REAL scale = (REAL)scale_;
    sums[DOT] = sums[MM] = sums[GG] = 0;
    for (int64_t i = 0; i < n; i += INNER) {
        int64_t end = i + INNER < n ? i + INNER : n;
        REAL mg = 0, mm = 0, gg = 0;
#pragma omp simd reduction(+ : mg, mm, gg)
        for (int64_t j = i; j < end; j++) {
            REAL x = GET(m[j]), y = GET(g[j]) * scale;
            mg = FMA(x, y, mg);
            mm = FMA(x, x, mm);
            gg = FMA(y, y, gg);
        }
        sums[DOT] += mg;
        sums[MM] += mm;
        sums[GG] += gg;
    }
}

TARGET static void JOIN(update, KIND_NAME, ISA)(void *p_, const void *g_, void *m_, void *v_, int64_t n,
                                                const coefficients *c) {
    STORED *restrict p = p_, *restrict m = m_, *restrict v = v_;
    const STORED *restrict g = g_;
    const REAL w = (REAL)c->weight, b = (REAL)c->keep, lr = (REAL)c->lr, factor = (REAL)c->factor;
    const REAL decay = c->decoupled ? 0 : (REAL)c->decay, shrink = c->decoupled ? (REAL)c->shrink : 1;
    const int decays = decay != 0; /* 0 times a parameter that is not finite would be nan */
    if (!c->adaptive) {
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
            REAL theta = GET(p[j]);
            REAL y = GET(g[j]) * factor;
            if (decays) y = FMA(decay, theta, y);
            REAL x = b * GET(m[j]) + w * y;
            m[j] = PUT(x);
            p[j] = PUT(FMA(-lr, x, theta));
        }
        return;
    }
    const REAL b2 = (REAL)c->beta2, r2 = (REAL)c->rest2, eps = (REAL)c->eps, correct = (REAL)c->correction;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        REAL theta = GET(p[j]);
        REAL y = GET(g[j]) * factor;
        if (decays) y = FMA(decay, theta, y);
        REAL x = b * GET(m[j]) + w * y;
        REAL u = b2 * GET(v[j]) + r2 * (y * y);
        m[j] = PUT(x);
        v[j] = PUT(u);
        p[j] = PUT(FMA(-lr, x / FMA(ROOT(u), correct, eps), theta * shrink));
    }
}

#undef KIND_NAME
#undef FMA
#undef STORED
#undef REAL
#undef GET
#undef PUT
#undef ROOT
