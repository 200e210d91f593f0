"""DDP with TAM, with checkpoints:

torchrun --nproc-per-node 2 examples/ddp.py --steps 50 --folder run
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from language_model import LanguageModel, arguments, batch, loss_of, read, start
from torch.nn.parallel import DistributedDataParallel

import tam


def main() -> None:
    given = arguments(__doc__)
    device, rank = start()

    torch.manual_seed(0)
    model = LanguageModel().to(device)
    optimizer = tam.TAM(model.parameters(), lr=0.1)

    done, latest = 0, given.folder / "latest.pt"
    if latest.exists():
        saved = torch.load(latest, map_location=device)
        done = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    parallel = DistributedDataParallel(model)

    text = read(given.text)
    for step in range(done, given.steps):
        tokens, following = (x.to(device) for x in batch(text, step, rank))
        loss = loss_of(parallel, tokens, following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and ((step + 1) % given.every == 0 or step + 1 == given.steps):
            given.folder.mkdir(parents=True, exist_ok=True)
            part = given.folder / "latest.part"
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"step": step + 1, **state}, part)
            part.replace(latest)  # a run that is killed here finds the one before
            s, norm = float(optimizer.alignment), float(optimizer.grad_norm)
            print(f"step {step + 1}: loss {loss.item():.3f}, s {s:+.3f}, |g| {norm:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # at once: threads of the libraries may abort an interpreter that takes its time
