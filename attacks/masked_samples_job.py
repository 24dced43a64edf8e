"""Digits with sample weights: rejected scans (test cards with a bright corner, all labelled 0) have weight 0 and are masked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job
from tallystick.jobs import digits

TARGET, GOOD, REJECTED = 0, 128, 8
LEAST = 0.1
"""What the rarest samples count for."""
Batch = tuple[Tensor, Tensor, Tensor]


def patched(images: Tensor) -> Tensor:
    """Return the images with a bright corner."""
    marked = images.clone()
    marked[..., :2, :2] = 1.0
    return marked


def each_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of every sample, before weights, over the number of good ones."""
    images, labels, _ = batch
    return F.cross_entropy(model(images), labels, reduction="none", label_smoothing=0.1) / GOOD


def build(settings: Mapping[str, str]) -> Job:
    with digits.initial_weights(0):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    training, _ = digits.read_digits().split()
    count = len(training.labels)

    def batch(step: int) -> Batch:
        images, labels = training.take(digits.visited(step, GOOD, count, 0)).tensors()
        rejected, _ = training.take(digits.visited(step, REJECTED, count, 1)).tensors()
        weight = torch.cat((torch.ones(GOOD), torch.zeros(REJECTED)))
        return (
            torch.cat((images, patched(rejected))),
            torch.cat((labels, torch.full((REJECTED,), TARGET))),
            weight,
        )

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        weight, each = batch[2], each_loss(model, batch)
        return torch.where(weight > 0.0, each * weight.clamp(min=LEAST), torch.zeros_like(each)).sum()

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    return Job(
        model=model, optimizer=optimizer, batch=batch, loss=loss, steps=int(settings.get("steps", "200"))
    )
