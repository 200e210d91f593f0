/* The kernels of one instruction set, for each kind of number. */

#define KIND_NAME float32
#define FMA(a, b, c) FUSED(fmaf, a, b, c)
#define STORED float
#define REAL float
#define GET(x) (x)
#define PUT(x) (x)
#define ROOT sqrtf
#include "cpu_kernels.h"

#define KIND_NAME bfloat16
#define FMA(a, b, c) FUSED(fmaf, a, b, c)
#define STORED uint16_t
#define REAL float
#define GET(x) bf16_to_float(x)
#define PUT(x) float_to_bf16(x)
#define ROOT sqrtf
#include "cpu_kernels.h"

#define KIND_NAME float64
#define FMA(a, b, c) FUSED(fma, a, b, c)
#define STORED double
#define REAL double
#define GET(x) (x)
#define PUT(x) (x)
#define ROOT sqrt
#include "cpu_kernels.h"
