"""`cls` and `way` for the modules that name their CLASSES: every optimizer with every backend it has.

`way` is the options that choose the backend. `torch_way` leaves out the fused one, for what its kernels leave
to torch's operations.
"""

from __future__ import annotations

import pytest

from tests.helpers import PAIRS, WAYS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    classes = getattr(metafunc.module, "CLASSES", None)
    if classes is None or "cls" not in metafunc.fixturenames:
        return
    for name, without in (("way", ""), ("torch_way", "fused")):
        if name in metafunc.fixturenames:
            pairs = [(cls, way) for cls, way in PAIRS if cls in classes and way != without]
            ids = [f"{cls.__name__}-{way}" for cls, way in pairs]
            metafunc.parametrize(f"cls, {name}", [(cls, WAYS[way]) for cls, way in pairs], ids=ids)
            return
    metafunc.parametrize("cls", classes, ids=[cls.__name__ for cls in classes])
