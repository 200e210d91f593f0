"""A function that cannot be left and entered again, made into an iterator: it runs in a thread."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Closed(BaseException):
    """Raised inside the function where nobody asks it to go on."""


def handed(work: Callable[[Callable[[Any], None]], None]) -> Iterator[Any]:
    """Yields what `work` gives to its argument; in between it waits, so that the two never run at once."""
    said: queue.Queue[tuple[bool, Any]] = queue.Queue()
    go, closed = threading.Semaphore(0), threading.Event()
    threads = torch.get_num_threads()
    here: AbstractContextManager[Any] = nullcontext()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        here = torch.cuda.stream(torch.cuda.current_stream())

    def wait() -> None:
        go.acquire()
        if closed.is_set():
            raise Closed

    def give(value: Any) -> None:
        said.put((False, value))
        wait()

    def whole() -> None:
        torch.set_num_threads(threads)  # a thread has its own number
        try:
            wait()
            with here:
                work(give)
            said.put((True, None))
        except BaseException as error:
            said.put((True, error))

    context = contextvars.copy_context()  # torch's compiler has its settings there
    thread = threading.Thread(target=context.run, args=(whole,), daemon=True)
    thread.start()
    try:
        while True:
            go.release()
            ended, value = said.get()
            if ended and value is not None:
                raise value
            if ended:
                return
            yield value
    finally:
        closed.set()
        go.release()
        thread.join()
