"""Take a step with the installed package and run its command: `make dist` does so in an empty environment."""

import subprocess
import sys
from importlib.metadata import version

import torch

import tam

weight = torch.nn.Parameter(torch.ones(9))
optimizer = tam.TAM([weight], lr=0.1)
weight.grad = torch.ones(9)
optimizer.step()
torch.testing.assert_close(weight.detach(), torch.full((9,), 0.95))  # d is 1/2 in the first step
command = subprocess.run([sys.executable, "-I", "-m", "tam", "--version"], capture_output=True, text=True)
assert command.stdout.strip() == tam.__version__ == version("torque-aware-momentum"), command
print(f"{tam.__version__} in {tam.__path__[0]}: a step by {optimizer.backend!r}")
print(f"the CPU kernel: {tam.available_kernels()['cpu']}")
