"""The optimizers: options, state and checkpoints; what a step computes is in `tam.step`."""

from tam.optimizers.adatam import AdaTAM, AdaTAMW
from tam.optimizers.angulargrad import AngularGrad
from tam.optimizers.tam import TAM

__all__ = ["TAM", "AdaTAM", "AdaTAMW", "AngularGrad"]
