"""FSDP2 with AdaTAMW, with checkpoints that any number of ranks can go on from:

torchrun --nproc-per-node 2 examples/fsdp2.py --steps 50 --folder run
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from language_model import LanguageModel, arguments, batch, loss_of, read, start
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import tam


def main() -> None:
    given = arguments(__doc__)
    device, rank = start()

    torch.manual_seed(0)
    model = LanguageModel().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    options = {"lr": 2e-4, "weight_decay": 0.05, "bias_correction": True, "max_grad_norm": 1.0}
    optimizer = tam.AdaTAMW(model.parameters(), **options)

    done, latest = 0, given.folder / "latest"
    if latest.exists():
        done = int(latest.read_text())
        parts = get_state_dict(model, optimizer)
        dcp.load({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=given.folder / f"step-{done}")
        set_state_dict(model, optimizer, model_state_dict=parts[0], optim_state_dict=parts[1])

    text = read(given.text)
    for step in range(done, given.steps):
        tokens, following = (x.to(device) for x in batch(text, step, rank))
        loss = loss_of(model, tokens, following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % given.every == 0 or step + 1 == given.steps:
            parts = get_state_dict(model, optimizer)
            folder = given.folder / f"step-{step + 1}"
            dcp.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=folder)
            if rank == 0:  # only now is it the one to go on from
                part = given.folder / "latest.part"
                part.write_text(str(step + 1))
                part.replace(latest)
                s, norm = float(optimizer.alignment), float(optimizer.grad_norm)
                print(f"step {step + 1}: loss {loss.item():.3f}, s {s:+.3f}, |g| {norm:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # at once: threads of the libraries may abort an interpreter that takes its time
