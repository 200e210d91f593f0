"""Recording what an optimizer does: what there is to record, how it is measured, kept and written."""

from tam.recorder.recorder import Recorder

__all__ = ["Recorder"]
