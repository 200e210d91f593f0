"""The former home of `tam.Warmup`."""

# Pickles of version 0.1.0 refer to the class by this name.
from tam.switching.warmup import Warmup as Warmup
