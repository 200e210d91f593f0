"""Builds the CPU kernel where there is a C compiler; the rest is in pyproject.toml."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FUSED = "src/tam/step/fused"
COLUMNS = ["src/tam/sharding/sums.py", f"{FUSED}/columns.py"]  # the second imports the first


def c_header():
    """Return columns.h. The package itself cannot be imported here, since that needs torch."""
    for path in COLUMNS:
        name = ".".join(Path(path).with_suffix("").parts[1:])
        spec = spec_from_file_location(name, path)
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.c_header()


class BuildKernel(build_ext):
    """Builds the kernel with its header, which is not kept next to the sources: there it could be stale."""

    def build_extension(self, ext):
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "columns.h").write_text(c_header())
        ext.include_dirs.append(str(folder))
        super().build_extension(ext)


class BuildWheel(bdist_wheel):
    """Builds a wheel for any platform if there is no compiler for the kernel."""

    def run_command(self, command):
        super().run_command(command)
        if command == "build":
            outputs = self.get_finalized_command("build_ext").get_outputs()
            if not any(Path(output).exists() for output in outputs):
                self.distribution.ext_modules = None
                self.root_is_pure = True


setup(
    cmdclass={"bdist_wheel": BuildWheel, "build_ext": BuildKernel},
    ext_modules=[
        Extension(
            "tam.step.fused._cpu",
            [f"{FUSED}/cpu.c"],
            depends=[f"{FUSED}/cpu_dtypes.h", f"{FUSED}/cpu_kernels.h", *COLUMNS],
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
    ],
)
