"""Which tensors the fused kernels can read, and which kernels this installation has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from tam._warnings import warn_user
from tam.sharding.dtensor import local_tensor
from tam.step.fused import cpu

_CUDA_DTYPES = ("float32", "bfloat16", "float16")

# From this many numbers on, a step without the CPU kernel is worth a warning: the kernel saves 1.1 to 4.8 ms
# of each step (float32, 2 to 100 tensors, TAM and AdaTAMW; one thread of an AMD EPYC, torch 2.13). For a
# tenth of them it saves 0.2 to 2.8 ms. It was at least 2.8 times as fast at every size up to 30 million.
LONG_LIST = 1_000_000
_has_warned = False

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def available_kernels() -> dict[str, str]:
    """Return the fused kernel for each kind of device, or why there is none.

    Returns:
        For "cpu" and "cuda", the name of the kernel, or the reason why there is none.

    Examples:
        >>> import tam
        >>> sorted(tam.available_kernels())
        ['cpu', 'cuda']
    """
    on_cpu = cpu.why_missing() or f"C, {cpu.INSTRUCTION_SETS[cpu.instruction_set()]}"
    on_cuda = "triton" if torch.cuda.is_available() else "no CUDA device"
    return {"cpu": on_cpu, "cuda": missing_kernel(torch.device("cuda")) or on_cuda}


def missing_kernel(device: torch.device) -> str | None:
    """Return why there is no fused kernel for the device; None if there is one."""
    if device.type == "cpu":
        return cpu.why_missing()
    if device.type != "cuda":
        return f"there is no fused kernel for {device.type} devices"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    if device.index is not None and torch.cuda.get_device_capability(device) < (7, 0):
        return "triton needs a GPU of compute capability 7.0 or more"
    return None


def why_not_fused(params: Sequence[Tensor]) -> str | None:
    """Return why these parameters cannot take the fused step; None if they can."""
    if not params:
        return "there are no parameters"
    # First: it is the same at every step.
    return missing_kernel(local_tensor(params[0]).device) or _why_unsuitable(params)


def warn_if_slow(params: Sequence[Tensor]) -> None:
    """Warn, once per process, if these are many and nothing but the missing CPU kernel slows their step."""
    global _has_warned
    missing = cpu.why_missing()
    if _has_warned or missing is None or not all(p.is_cpu for p in params):
        return
    size = sum(local_tensor(p).numel() for p in params)
    if size < LONG_LIST or _why_unsuitable(params) is not None:
        return
    _has_warned = True
    warn_user(
        f"this step moves {size:,} numbers with plain torch operations, which take about 3 times as long as "
        f"the CPU kernel, or more ({missing}). To get the kernel, install gcc, or clang with OpenMP, and run "
        "`pip install --force-reinstall --no-deps .` in a checkout. fused=False uses torch operations "
        "without this warning"
    )


def _why_unsuitable(params: Sequence[Tensor]) -> str | None:
    """Return why the kernels cannot take these parameters; None if they can."""
    device = local_tensor(params[0]).device
    supported = cpu.DTYPES if device.type == "cpu" else _CUDA_DTYPES
    for p in map(local_tensor, params):
        if p.device != device:
            devices = sorted({str(local_tensor(q).device) for q in params})
            return f"the parameters are on several devices: {', '.join(devices)}"
        if type(p) not in (Tensor, Parameter):
            return f"a parameter is a {type(p).__name__}, not a plain tensor"
        if dtype_name(p) not in supported:
            pairs = [_name(dtype) for dtype, real in _REAL.items() if _name(real) in supported]
            return (
                f"a parameter is {p.dtype}; on {device.type} the kernel takes "
                f"{', '.join([*supported, *pairs])}; leave fused=None to use torch operations"
            )
        if not is_plain(p):
            return f"a parameter of shape {tuple(p.shape)} is lazily conjugated or negated, or not aligned"
        if not is_dense(p):
            return f"a parameter of shape {tuple(p.shape)} and strides {p.stride()} has gaps in memory"
    return None


def dtype_name(p: Tensor) -> str:
    """Return the dtype a kernel computes with: complex numbers are pairs of reals."""
    return _name(_REAL.get(p.dtype, p.dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def numel_as_real(p: Tensor) -> int:
    """Return the number of elements, where a complex number counts as two."""
    return p.numel() * (2 if p.is_complex() else 1)


def is_dense(p: Tensor) -> bool:
    """Return True if the elements fill one stretch of memory, in any order."""
    if p.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def same_layout(x: Tensor, p: Tensor) -> bool:
    """Return True if two tensors have the same layout; a dimension of size 1 may have any stride."""
    if x.shape != p.shape:
        return False
    return x.stride() == p.stride() or all(
        a == b or n <= 1 for a, b, n in zip(x.stride(), p.stride(), p.shape, strict=True)
    )


def can_walk_together(x: Tensor, p: Tensor) -> bool:
    """Return True if a kernel can walk through both tensors element by element."""
    return x.dtype == p.dtype and x.device == p.device and same_layout(x, p)


def is_plain(x: Tensor) -> bool:
    """Return True if a kernel can read the tensor's memory as it is: aligned, nothing lazy."""
    size = x.element_size() // 2 if x.is_complex() else x.element_size()
    return x.data_ptr() % size == 0 and not x.is_conj() and not x.is_neg()


def extent_of(x: Tensor) -> int:
    """Return how many elements of its storage a tensor reaches over."""
    steps = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return 1 + steps if x.numel() else 0


def is_within_storage(x: Tensor, extent: int | None = None) -> bool:
    """Return True if the tensor lies within its storage, which somebody may have resized."""
    reach = extent_of(x) if extent is None else extent
    return x.untyped_storage().nbytes() >= (x.storage_offset() + reach) * x.element_size()


def check_memory(x: Tensor, what: str) -> None:
    """Raise if the tensor does not lie within its storage."""
    if x.numel() and not is_within_storage(x):
        raise RuntimeError(f"{what} of shape {tuple(x.shape)} does not fit into its storage: was it resized?")


def match_layout(p: Tensor, state: dict[str, Tensor], keys: tuple[str, ...]) -> None:
    """Give a parameter's state the layout of the parameter: a kernel walks through them side by side.

    They differ after a load of a checkpoint made with other strides, and after the parameter was moved.
    """
    for key in keys:
        x = state[key]
        if key == "step":  # counted where the parameter is
            if x.numel() != 1:
                raise RuntimeError(f"a step count must be one number, got a tensor of shape {tuple(x.shape)}")
            state[key] = x.to(p.device, torch.float32)
            continue
        if x.shape != p.shape:
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} has a {key} of shape {tuple(x.shape)}: parameters "
                "that change their shape need a new optimizer"
            )
        shard = local_tensor(x)
        if x.device != p.device or not can_walk_together(shard, local_tensor(p)) or not is_plain(shard):
            state[key] = torch.empty_like(p, memory_format=torch.preserve_format).copy_(x)


def can_join(p: Tensor, state: dict[str, Tensor], keys: tuple[str, ...], device: torch.device) -> bool:
    """Return True if a device's kernels can take a parameter that has state and no gradient now."""
    if local_tensor(p).device != device:
        return False
    tensors = [local_tensor(p), *(local_tensor(state[key]) for key in keys)]
    have_shape = all(state[key].shape == p.shape for key in keys if key != "step")
    return have_shape and why_not_fused([p]) is None and all(map(is_within_storage, tensors))
