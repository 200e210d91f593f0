"""Batches of images on the device: their order, random crops and flips, normalization."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

CROP_FRACTION = 8  # random crops pad images by this fraction of their height: 4 pixels for 32 x 32


class BatchDraws:
    """The order and augmentation of the images of one pass, in tensors that a CUDA graph can read."""

    def __init__(self, count: int, batch: int, size: int, device: torch.device, augment: bool = True) -> None:
        self.batch, self.augment = batch, augment
        self.padding = size // CROP_FRACTION
        self.order = torch.zeros(count, dtype=torch.int64, device=device)
        self.shifts = torch.full((count, 2), self.padding, dtype=torch.int64, device=device)
        self.flips = torch.zeros(count, dtype=torch.bool, device=device)
        self.position = torch.zeros((), dtype=torch.int64, device=device)  # of the batch's first image
        self._offsets = torch.arange(batch, device=device)

    def draw(self, indices: Tensor, seed: int) -> None:
        """Draw a new pass through these images and go to its first batch."""
        count, generator = len(indices), torch.Generator().manual_seed(seed)
        self.order.copy_(indices[torch.randperm(count, generator=generator)])
        if self.augment:
            self.shifts.copy_(torch.randint(0, 2 * self.padding + 1, (count, 2), generator=generator))
            self.flips.copy_(torch.rand(count, generator=generator) < 0.5)
        self.position.zero_()

    def next_batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the indices, shifts and flips of the batch, and go to the next one."""
        rows = self.position + self._offsets
        self.position += self.batch
        return self.order[rows], self.shifts[rows], self.flips[rows]


def augment(images: Tensor, shifts: Tensor, flips: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalize images, pad them, crop them at their shifts and flip some of them."""
    count, channels, height, width = images.shape
    x = pad(normalize(images, mean, std), (height // CROP_FRACTION,) * 4)
    rows = shifts[:, :1] + torch.arange(height, device=x.device)
    columns = shifts[:, 1:] + torch.arange(width, device=x.device)
    columns = torch.where(flips[:, None], columns.flip(1), columns)
    image = torch.arange(count, device=x.device)[:, None, None, None]
    channel = torch.arange(channels, device=x.device)[None, :, None, None]
    return x[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return images of bytes with zero mean and unit variance per channel."""
    return (images.to(mean.dtype) / 255 - mean) / std


def per_channel(values: Sequence[float], device: torch.device) -> Tensor:
    """Return the mean or standard deviation of channels in the shape that `normalize` takes."""
    return torch.tensor(values, device=device)[:, None, None]
