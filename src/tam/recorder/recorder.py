"""The recorder: hooks on an optimizer, and what was recorded in the forms people use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from tam._extras import missing
from tam._wrappers import layers, unwrap
from tam.recorder.measure import Observer, observer, refuse_capture
from tam.recorder.outputs import Lines, columns, json_line, open_writer, write_scalars
from tam.recorder.quantities import (
    check_quantity,
    choose_quantities,
    derive,
    measured,
    settled,
)
from tam.recorder.ring import Block
from tam.switching.warmup import Warmup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame
    from typing_extensions import Self


class Recorder:
    """Records each step of an optimizer: s, d, norms and the effective learning rate.

    - `alignment`, `damping`: s and d, which is (1 + s) / 2 where `gain` is 1. TAM, AdaTAM and AdaTAMW have
      them; of SGD with momentum, Adam, AdamW and AngularGrad it is the cosine of their momentum and the raw
      gradient over all parameters, smoothed as TAM does
    - `grad_norm`, `momentum_norm`: |g| as the step finds it, |m| after the step
    - `update_norm`, `update_ratio`: the length of the change of all parameters, and that by the
      parameters' norm before it
    - `effective_lr`, by group: lr (1 + s) / (2 (1 - beta)) for TAM and AdaTAM(W), lr / (1 - beta) for SGD,
      lr for Adam(W)

    Measurements go to a ring buffer on the device and are fetched a batch at a time; no step waits.
    `update_norm` and `update_ratio` need a copy of the parameters; leave them out where memory is short.

    Args:
        optimizer: an optimizer of `tam.registry`, or a `tam.Warmup`, which is followed across its switch
        quantities: which of the above to record; all there are unless given
        every: record every so many steps
        capacity: how many recorded steps the ring buffer holds before they are fetched
        smoothing: of s, where the optimizer has none of its own
        jsonl: a file to which every recorded step is appended, a line each, as batches are fetched
        tensorboard: a SummaryWriter, or a folder for a new one, written to as batches are fetched
    """

    def __init__(
        self,
        optimizer: Optimizer,
        quantities: Sequence[str] | None = None,
        *,
        every: int = 1,
        capacity: int = 1024,
        smoothing: float = 0.9,
        jsonl: str | Path | None = None,
        tensorboard: Any = None,
    ) -> None:
        for name, value in (("every", every), ("capacity", capacity)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a whole number > 0")
        if not 0 <= smoothing <= 1:
            raise ValueError(f"smoothing={smoothing!r}: must be a number in [0, 1]")
        self.quantities = choose_quantities(optimizer, quantities)
        self.optimizer, self.every, self.capacity = optimizer, every, capacity
        # As much is forgotten from one recorded step to the next as in so many steps of TAM.
        self.smoothing = smoothing**every
        self.step = 0  # steps seen so far
        self._blocks: list[Block] = []
        self._first = [0.0]  # s before the first row
        self._last: list[list[float]] = []  # s after the last row of each block that is done
        self._written = 0  # how many of the blocks are done: sent, and in the outputs
        self._file = None if jsonl is None else Lines(Path(jsonl))
        self._writer = open_writer(tensorboard)
        self._writer_is_ours = self._writer is not tensorboard
        self._hooks: list[Any] = []
        self._follow: Any = None
        self._attached = unwrap(optimizer)
        self._observer: Observer | None = None
        self._attach()
        for layer in layers(optimizer):
            if isinstance(layer, Warmup):
                self._follow = layer.register_step_pre_hook(lambda *_: self._attach())

    # ------------------------------------------------------------------ what was recorded

    def __len__(self) -> int:
        return sum(len(block.marks) for block in self._blocks)

    def __getitem__(self, quantity: str) -> Tensor:
        """A quantity by recorded step, on the CPU: [steps], or [steps, segments or groups] if several."""
        if quantity != "step" and quantity not in self.quantities:
            check_quantity(self.optimizer, quantity)
            raise ValueError(f"{quantity} was not recorded; there are {', '.join(self.quantities)}")
        rows = [row[quantity] for row in self.rows()]
        width = max((len(row) for row in rows if isinstance(row, list)), default=1)
        if width > 1:  # a hand-over may have changed how many there are
            rows = [row if isinstance(row, list) else [row] for row in rows]
            rows = [row + [math.nan] * (width - len(row)) for row in rows]
        return torch.tensor(rows, dtype=torch.int64 if quantity == "step" else torch.float64)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.rows()

    def __repr__(self) -> str:
        return f"Recorder({type(self._attached).__name__}, {len(self)} of {self.step} steps)"

    def rows(self) -> Iterator[dict[str, Any]]:
        """The recorded steps, each a dict: the step's number (the first is 1) and its quantities."""
        self._finish()
        for k in range(len(self._blocks)):
            yield from self._read(k)

    def frame(self) -> DataFrame:
        """The recorded steps as a pandas frame; columns `alignment/0` and so on where there are several."""
        try:
            import pandas
        except ImportError as error:
            raise missing("Recorder.frame", "record", error) from error
        return pandas.DataFrame([dict(columns(row)) for row in self.rows()])

    def to_jsonl(self, path: str | Path) -> None:
        """Writes the recorded steps to a file, a line each."""
        with Path(path).open("w", encoding="utf-8") as file:
            file.writelines(json_line(row) for row in self.rows())

    def to_tensorboard(self, writer: Any) -> None:
        """Writes the recorded steps to a SummaryWriter, or into a folder."""
        opened = open_writer(writer)
        write_scalars(opened, self.rows())
        opened.flush()
        if opened is not writer:
            opened.close()

    def plot(self, quantity: str = "alignment", ax: Axes | None = None) -> Axes:
        """A quantity by step, s unless given: the paper's figure of s_t. Draws with matplotlib."""
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
            if block.cls is not before.cls:  # a hand-over
                ax.axvline(block.marks[0].step - 0.5, color="grey", linestyle="--", linewidth=0.8)
        if quantity == "alignment":
            ax.axhline(0.0, color="grey", linewidth=0.8)
        ax.set_xlabel("step")
        ax.set_ylabel({"alignment": r"$\hat{s}_t$", "damping": "$d_t$"}.get(quantity, quantity))
        return ax

    # ------------------------------------------------------------------ begin and end

    def flush(self) -> None:
        """Fetches what has been recorded and brings the outputs up to date. Waits for the device."""
        self._finish()
        if self._written < len(self._blocks):
            self._blocks[-1].send()
        self._write_out(len(self._blocks))

    def close(self) -> None:
        """Lets go of the optimizer, and flushes. What was recorded can still be read."""
        for hook in [*self._hooks, *([self._follow] if self._follow else [])]:
            hook.remove()
        self._hooks, self._follow = [], None
        self.flush()
        self._observer = None  # and with it the copy of the parameters
        if self._writer is not None and self._writer_is_ours:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """The step count and s, for a resumed run to go on from; brings the outputs up to date."""
        self.flush()
        s = self._settled(len(self._blocks) - 1)[-1] if self._blocks else self._first
        return {"step": self.step, "alignment": s}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where another recorder stopped; lines of the jsonl file about later steps are removed."""
        if self._blocks:
            raise RuntimeError("this recorder has recorded steps already: load into a new one")
        self.step, self._first = state_dict["step"], list(state_dict["alignment"])
        if self._file is not None:
            self._file.cut(self.step)

    # ------------------------------------------------------------------ hooks

    def _attach(self) -> None:
        """Hooks on to the optimizer at work, where that has changed.

        Not to a Warmup itself: after the last step of its first optimizer nothing can be read there.
        """
        active = unwrap(self.optimizer)
        if self._hooks and active is self._attached:
            return
        for hook in self._hooks:
            hook.remove()
        self._attached = active
        self._observer = observer(active, measured(self.quantities))
        self._hooks = [active.register_step_pre_hook(self._pre), active.register_step_post_hook(self._post)]

    def _pre(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A function that is kept out of graphs takes longer to call.
        begin = self._begin_apart if torch.compiler.is_compiling() else self._begin
        return begin(optimizer, args, kwargs)

    def _post(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        end = self._end_apart if torch.compiler.is_compiling() else self._end
        end(optimizer)

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (self.step + 1) % self.every:
            return None
        refuse_capture()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        seeing = self._observer
        if closure is None or seeing is None:
            if seeing is not None:
                seeing.before(optimizer)
            return None

        def observed() -> Any:
            """Gradients are there only when the closure has run."""
            loss = closure()
            seeing.before(optimizer)
            return loss

        return (args[0], observed), {}

    def _end(self, optimizer: Optimizer) -> None:
        self.step += 1  # a step that raises is none
        if self.step % self.every or self._observer is None:
            return
        block = self._block(type(optimizer), self._observer.width, self._observer.device)
        self._observer.after(optimizer, block.next_row())
        block.mark(self.step, optimizer.param_groups)
        if self.every > 1 or self._follow is not None:  # the next step seen is far, or another optimizer's
            self._finish()

    def _finish(self) -> None:
        if self._observer is not None:
            self._observer.finish(self._attached)

    _begin_apart = _disable_dynamo(_begin)
    _end_apart = _disable_dynamo(_end)

    # ------------------------------------------------------------------ the ring buffer

    def _block(self, cls: type[Optimizer], width: int, device: torch.device) -> Block:
        """The block for a row of so many numbers; a full one is sent to the host on the way."""
        last = self._blocks[-1] if self._written < len(self._blocks) else None
        groups = len(self._attached.param_groups)
        fits = last is not None and (last.cls, last.width, last.groups) == (cls, width, groups)
        if last is not None and fits and len(last.marks) < self.capacity:
            return last
        if last is not None:
            last.send()
            # One block late: what was sent before has arrived by now, and nothing waits.
            self._write_out(len(self._blocks) - 1)
        self._blocks.append(Block(cls, width, self.capacity, device, groups))
        return self._blocks[-1]

    def _read(self, k: int) -> Iterator[dict[str, Any]]:
        """The rows of block k."""
        block = self._blocks[k]
        alignment = self._settled(k)
        rows = zip(block.marks, block.values().tolist(), alignment, block.rates(), strict=True)
        for mark, row, s, rates in rows:
            quantities = {q: derive(q, row, s, block.cls, rates, mark) for q in self.quantities}
            yield {"step": mark.step, **quantities}

    def _settled(self, k: int) -> list[list[float]]:
        """s of the rows of block k."""
        for i in range(len(self._last), k + 1):  # in order, since each goes on from the one before
            found = settled(self._blocks[i], self._last[i - 1] if i else self._first, self.smoothing)
            if self._blocks[i].rows is not None:
                return found  # still being filled
            self._last.append(found[-1])
        return settled(self._blocks[k], self._last[k - 1] if k else self._first, self.smoothing)

    def _write_out(self, upto: int) -> None:
        for k in range(self._written, upto):
            if self._file is not None:
                self._file.append(self._read(k))
            if self._writer is not None:
                write_scalars(self._writer, self._read(k))
        self._written = upto
