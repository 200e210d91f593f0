"""The fused step: one kernel call over tables of addresses, in C on the CPU and in Triton on CUDA."""
