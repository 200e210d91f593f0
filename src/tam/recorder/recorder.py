"""The recorder: hooks on an optimizer, and what was recorded in the forms people use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tam._extras import missing
from tam._wrappers import layers, unwrap
from tam.options import up_to_one
from tam.recorder.measure import Backend, Measure, Observer, TorchObserver, params_of
from tam.recorder.outputs import JsonlFile, Row, flatten_row, open_writer, to_json_line, write_scalars
from tam.recorder.quantities import (
    QUANTITIES,
    Quantity,
    choose_quantities,
    read_alignments,
    read_rows,
    required_measures,
)
from tam.recorder.ring import Block
from tam.sharding.dtensor import is_dtensor
from tam.sharding.shard_group import shards_of
from tam.step.fused.support import why_not_fused
from tam.switching.warmup import Warmup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame
    from torch.utils.tensorboard import SummaryWriter
    from typing_extensions import Self


class RecorderState(TypedDict):
    """What a resumed run needs of a recorder."""

    step: int
    alignment: list[float]


def choose_observer(optimizer: Optimizer, measures: set[Measure]) -> Observer:
    """Return the fastest observer that can measure the optimizer's parameters."""
    params = params_of(optimizer)
    is_sharded = shards_of(optimizer) is not None or any(map(is_dtensor, params))
    if params and not is_sharded and params[0].is_cuda and why_not_fused(params) is None:
        from tam.recorder.cuda import KernelObserver  # needs triton

        return KernelObserver(optimizer, measures)
    return TorchObserver(optimizer, measures)


class Recorder:
    r"""Records each step of an optimizer: s, d, norms and the effective learning rate.

    - `alignment`, `damping`: $s$ and $d = (1 + \mathrm{clip}(\mathrm{gain} \cdot s, -1, 1)) / 2$. TAM, AdaTAM
      and AdaTAMW know them. For SGD with momentum, Adam, AdamW and AngularGrad, the recorder smooths the
      cosine of momentum and raw gradient over all parameters, like TAM with a gain of 1.
    - `grad_norm`, `momentum_norm`: $|g|$ as the step gets it, and $|m|$ after the step.
    - `update_norm`, `update_ratio`: the norm of the change of all parameters, and that norm divided by the
      norm of the parameters before the step.
    - `effective_lr`, per group: $\eta d / (1 - \beta)$ for TAM, AdaTAM and AdaTAMW, $\eta / (1 - \beta)$ for
      SGD (times 1 - `dampening` if it has a momentum), $\eta$ for Adam, AdamW and with `ema=True`. With
      `scope="tensor"`, $d$ is that of the mean $s$ of the group's tensors.

    No step waits for the device: measurements go to a ring buffer there, which is fetched when it is full.
    `update_norm` and `update_ratio` need a copy of the parameters. Leave them out if memory is short.

    Args:
        optimizer: TAM, AdaTAM, AdaTAMW, AngularGrad, torch's SGD, Adam or AdamW, or a `tam.Warmup` of two of
            them, which the recorder follows across its switch. Wrappers such as accelerate's are unwrapped
        quantities: one or several of the quantities above. Default: all that the optimizer has
        every: record every so many steps
        capacity: the number of recorded steps that the ring buffer holds
        smoothing: $\gamma$ of $s$ for optimizers that have no alignment
        jsonl: a file. Each time the buffer is fetched, the recorder appends one line per recorded step
        tensorboard: a `SummaryWriter`, or a folder for a new one, written to at the same times

    Raises:
        TypeError: if the optimizer is of another class
        ValueError: if the optimizer does not have one of the quantities, or another option is out of range

    Examples:
        >>> import torch, tam
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([w], lr=0.5, momentum=0.5)
        >>> recorder = tam.Recorder(optimizer)
        >>> for _ in range(3):
        ...     w.grad = torch.tensor([3.0, 4.0])
        ...     optimizer.step()
        >>> recorder["grad_norm"].tolist(), recorder["effective_lr"].tolist()
        ([5.0, 5.0, 5.0], [1.0, 1.0, 1.0])
        >>> recorder["alignment"]  # the cosine is 0 at the first step and 1 at the next two
        tensor([0.0000, 0.1000, 0.1900], dtype=torch.float64)
    """

    def __init__(
        self, optimizer: Optimizer, quantities: Quantity | Sequence[Quantity] | None = None, *,
        every: int = 1, capacity: int = 1024, smoothing: float = 0.9, jsonl: str | Path | None = None,
        tensorboard: SummaryWriter | str | Path | None = None,
    ) -> None:  # fmt: skip
        for name, value in (("every", every), ("capacity", capacity)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number > 0, got {value!r}")
        up_to_one("smoothing", smoothing)
        self.quantities = choose_quantities(optimizer, quantities)
        self.optimizer, self.every, self.capacity = optimizer, every, capacity
        # From one recorded step to the next, s forgets as much as in so many steps of TAM.
        self.smoothing = smoothing**every
        self.step = 0  # steps of the optimizer, recorded or not
        self._blocks: list[Block] = []
        self._alignments_before = [[0.0]]  # s before each block, as far as known
        self._n_written = 0  # blocks that are full, sent to the host and in the outputs
        self._file = None if jsonl is None else JsonlFile(Path(jsonl))
        self._writer = None if tensorboard is None else open_writer(tensorboard)
        self._owns_writer = self._writer is not tensorboard
        self._step_hooks: list[RemovableHandle] = []
        self._observer: Observer | None = None
        self._attach()
        warmups = [layer for layer in layers(optimizer) if isinstance(layer, Warmup)]
        self._warmup_hooks = [x.register_step_pre_hook(lambda *_: self._attach()) for x in warmups]

    # ------------------------------------------------------------------ what was recorded

    @property
    def backend(self) -> Backend | None:
        """What measures: "triton" (one kernel) or "loop" (operations per tensor); None when closed."""
        return None if self._observer is None else self._observer.backend

    def __len__(self) -> int:
        return sum(len(block.marks) for block in self._blocks)

    def __getitem__(self, quantity: Quantity | Literal["step"]) -> Tensor:
        """Return a quantity, or the numbers of the recorded steps.

        Args:
            quantity: one of `quantities`, or "step". The first step is 1

        Returns:
            A CPU tensor [steps], or [steps, segments or groups] if there are several.
        """
        if quantity != "step" and quantity not in self.quantities:
            names = ", ".join(self.quantities)
            if quantity not in QUANTITIES:
                raise ValueError(f'no quantity "{quantity}"; there are step, {names}')
            choose_quantities(self.optimizer, quantity)  # raises if it cannot be recorded
            raise ValueError(f'quantity must be among the recorded ones ({names}), got "{quantity}"')
        values = [row[quantity] for row in self.rows()]
        width = max((len(value) for value in values if isinstance(value, list)), default=1)
        if width > 1:  # a handover may have changed how many there are
            lists = [value if isinstance(value, list) else [value] for value in values]
            values = [value + [math.nan] * (width - len(value)) for value in lists]
        dtype = torch.int64 if quantity == "step" else torch.float64
        return torch.tensor(values, dtype=dtype, device="cpu")

    def __iter__(self) -> Iterator[Row]:
        return self.rows()

    def __repr__(self) -> str:
        return f"Recorder({type(self._active).__name__}, {len(self)} of {self.step} steps)"

    def rows(self) -> Iterator[Row]:
        """Yield one dict per recorded step: "step", from 1, and the quantities.

        A quantity is a list if there are several segments or groups.
        """
        self._finish_row()
        for k in range(len(self._blocks)):
            yield from self._read_block(k)

    def frame(self) -> DataFrame:
        """Return the recorded steps as a pandas frame.

        Several segments or groups have columns like `alignment/0`.
        """
        try:
            import pandas
        except ImportError as error:
            raise missing("Recorder.frame", "record", error) from error
        return pandas.DataFrame([dict(flatten_row(row)) for row in self.rows()])

    def to_jsonl(self, path: str | Path) -> None:
        """Write the recorded steps to a file, one line per step, null for numbers that are not finite."""
        with Path(path).open("w", encoding="utf-8") as file:
            file.writelines(map(to_json_line, self.rows()))

    def to_tensorboard(self, writer: SummaryWriter | str | Path) -> None:
        """Write the recorded steps to a `SummaryWriter`, or into a folder."""
        opened = open_writer(writer)
        write_scalars(opened, self.rows())
        opened.flush()
        if opened is not writer:
            opened.close()

    def plot(self, quantity: Quantity = "alignment", ax: Axes | None = None) -> Axes:
        """Draw a quantity by step with matplotlib. The default is the paper's figure of $s_t$.

        Args:
            quantity: one of `quantities`. More than 8 segments or groups are drawn as their mean and range
            ax: the axes to draw into. Default: new ones
        """
        values, x = self[quantity], self["step"].tolist()
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise missing("Recorder.plot", "record", error) from error
        if ax is None:
            ax = pyplot.subplots()[1]
        if values.ndim == 1:
            ax.plot(x, values.tolist())
        elif values.shape[-1] <= 8:
            ax.plot(x, values.tolist(), label=[f"{quantity}/{i}" for i in range(values.shape[-1])])
            ax.legend()
        else:
            ax.plot(x, values.mean(-1).tolist())
            ax.fill_between(x, values.amin(-1).tolist(), values.amax(-1).tolist(), alpha=0.2)
        for before, block in zip(self._blocks, self._blocks[1:], strict=False):
            if block.cls is not before.cls:  # a handover
                ax.axvline(block.marks[0].step - 0.5, color="grey", linestyle="--", linewidth=0.8)
        if quantity == "alignment":
            ax.axhline(0.0, color="grey", linewidth=0.8)
        ax.set_xlabel("step")
        ax.set_ylabel({"alignment": r"$\hat{s}_t$", "damping": "$d_t$"}.get(quantity, quantity))
        return ax

    # ------------------------------------------------------------------ begin and end

    def flush(self) -> None:
        """Fetch what has been recorded and bring the outputs up to date. Waits for the device."""
        self._finish_row()
        if self._n_written < len(self._blocks):
            self._blocks[-1].send()
        self._write_blocks(len(self._blocks))

    def close(self) -> None:
        """Detach from the optimizer, and flush. What was recorded can still be read."""
        for hook in (*self._step_hooks, *self._warmup_hooks):
            hook.remove()
        self._step_hooks, self._warmup_hooks = [], []
        self.flush()
        self._observer = None  # and with it the copy of the parameters
        if self._writer is not None and self._owns_writer:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> RecorderState:
        """Return the step count and s, from which a resumed run continues; bring the outputs up to date."""
        self.flush()
        s = self._read_alignments(len(self._blocks) - 1)[-1] if self._blocks else self._alignments_before[0]
        return {"step": self.step, "alignment": s}

    def load_state_dict(self, state_dict: RecorderState) -> None:
        """Continue where another recorder stopped. Removes the lines of later steps from the jsonl file.

        Raises:
            RuntimeError: if this recorder has recorded steps already
        """
        if self._blocks:
            raise RuntimeError(f"a recorder that loads must be new, got one with {len(self)} recorded steps")
        self.step, self._alignments_before = state_dict["step"], [list(state_dict["alignment"])]
        if self._file is not None:
            self._file.drop_after(self.step)

    # ------------------------------------------------------------------ hooks

    def _attach(self) -> None:
        """Hook on to the active optimizer, if it has changed.

        Not to a Warmup itself: after the last step of its first optimizer, nothing can be read there.
        """
        active = unwrap(self.optimizer)
        if self._step_hooks and active is self._active:
            return
        for hook in self._step_hooks:
            hook.remove()
        self._active: Optimizer = active
        self._observer = choose_observer(active, required_measures(type(active), self.quantities))
        self._step_hooks = [
            active.register_step_pre_hook(self._before_step), active.register_step_post_hook(self._after_step)
        ]  # fmt: skip

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A function that is kept out of graphs takes longer to call.
        measure = self._begin_uncompiled if torch.compiler.is_compiling() else self._begin
        return measure(args, kwargs)

    def _after_step(self, *_: object) -> None:
        measure = self._end_uncompiled if torch.compiler.is_compiling() else self._end
        measure()

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure before the step; return its arguments with a closure that does, if it has a closure."""
        observer = self._observer
        if (self.step + 1) % self.every or observer is None:
            return None
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                "a Recorder sees nothing of the steps that a CUDA graph replays: close it before the capture"
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            observer.measure_before()
            return None

        def measuring_closure() -> Any:
            loss = closure()
            observer.measure_before()  # now there are gradients
            return loss

        return (args[0], measuring_closure), {}

    def _end(self) -> None:
        self.step += 1  # a step that raises does not count
        if self.step % self.every or self._observer is None:
            return
        block = self._block_for(self._observer)
        self._observer.measure_after(block.next_row())
        block.mark(self.step, self._active.param_groups)
        if self.every > 1 or self._warmup_hooks:  # many steps until the next row, or another optimizer's row
            self._finish_row()

    def _finish_row(self) -> None:
        if self._observer is not None:
            self._observer.finish_row()

    _begin_uncompiled = _disable_dynamo(_begin)
    _end_uncompiled = _disable_dynamo(_end)

    # ------------------------------------------------------------------ the ring buffer

    def _block_for(self, observer: Observer) -> Block:
        """Return the block for the observer's next row; send the one before to the host if it is done."""
        form = type(self._active), observer.width, len(self._active.param_groups)
        if self._n_written < len(self._blocks):
            last = self._blocks[-1]
            if (last.cls, last.width, last.groups) == form and len(last.marks) < self.capacity:
                return last
            last.send()
            # One block late: the copies of earlier ones have ended by now, so nothing waits.
            self._write_blocks(len(self._blocks) - 1)
        self._blocks.append(Block(*form, self.capacity, observer.device))
        return self._blocks[-1]

    def _read_block(self, k: int) -> Iterator[Row]:
        return read_rows(self._blocks[k], self._read_alignments(k), self.quantities)

    def _read_alignments(self, k: int) -> list[list[float]]:
        """Return s of the rows of block k."""
        before = self._alignments_before
        for block in self._blocks[len(before) - 1 : k]:  # in order: each block goes on from the one before
            before.append(read_alignments(block, before[-1], self.smoothing)[-1])
        return read_alignments(self._blocks[k], before[k], self.smoothing)

    def _write_blocks(self, end: int) -> None:
        for k in range(self._n_written, end):
            if self._file is not None:
                self._file.append(self._read_block(k))
            if self._writer is not None:
                write_scalars(self._writer, self._read_block(k))
        self._n_written = end
