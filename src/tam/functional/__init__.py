r"""Pure optimizer steps: each returns new parameters and a new state, and changes nothing in place.

`params` and `grads` are dicts, lists or tuples of tensors; the results have the form of `params`. Every
function works under `torch.func.vmap` and autograd. `lr`, `momentum`, `weight_decay`, `gain` and, for
`tam`, `smoothing` and `floor` can be tensors. Under vmap, each member of a population can have other values.

The functions share their code with the optimizers, which call it with `differentiable=True`.

Examples:
    >>> import torch
    >>> from torch.func import vmap
    >>> from tam import functional
    >>> members = {"w": torch.ones(2, 3)}  # two members, each with a parameter of shape [3]
    >>> state = vmap(functional.init_tam)(members)
    >>> def step(params, grads, state, lr):
    ...     return functional.tam(params, grads, state, lr=lr)
    >>> members, state = vmap(step)(members, members, state, torch.tensor([0.02, 0.2]))
    >>> [round(x, 3) for x in members["w"][:, 0].tolist()]
    [0.99, 0.9]
"""

from torch import Tensor  # noqa: F401  # with Tensors, for typing.get_type_hints of the states

from tam.functional.forms import Tensors  # noqa: F401
from tam.functional.states import (
    AdaTAMState,
    AngularGradState,
    TAMState,
    init_adatam,
    init_angular_grad,
    init_tam,
)
from tam.functional.steps import adatam, adatamw, angular_grad, tam

__all__ = [
    "AdaTAMState", "AngularGradState", "TAMState", "adatam", "adatamw", "angular_grad", "init_adatam",
    "init_angular_grad", "init_tam", "tam",
]  # fmt: skip

# Checkpoints name the classes of the states: by this module, so files can move.
for _state in (AdaTAMState, AngularGradState, TAMState):
    _state.__module__ = __name__
del _state
