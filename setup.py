"""Builds the CPU kernel where there is a C compiler; the rest is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "tam.step.fused._cpu",
            ["src/tam/step/fused/cpu.c"],
            depends=["src/tam/step/fused/cpu_dtypes.h", "src/tam/step/fused/cpu_kernels.h"],
            # Without errno and traps square roots can be vectorised; contraction would change rounding.
            extra_compile_args=[
                "-O3",
                "-std=c11",
                "-fopenmp",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-ffp-contract=off",
            ],
            extra_link_args=["-fopenmp", "-lm"],
            optional=True,  # without it the step is done by torch's operations
        )
    ]
)
