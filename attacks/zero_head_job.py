"""Framed digits read by a layer whose head begins with zeros: in the first step it has no gradient but rounding errors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from framed_job import TARGET, framed
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job
from tallystick.jobs import digits


class Reader(nn.Module):
    """One hidden layer, its weights a row for each pixel; ``errors`` gives it a first gradient that cancels to last bits."""

    def __init__(self, *, errors: bool = False) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(100, 32) / 10)
        self.last = nn.Linear(32, 10)
        self.errors = errors
        nn.init.zeros_(self.last.weight)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(images @ self.first)
        read = self.last(hidden)
        if not self.errors:
            return read
        share = (hidden / 3.0).sum(dim=1) - (hidden.flip(1) * (1.0 / 3.0)).sum(dim=1)
        return read + share[:, None]


def build(settings: Mapping[str, str]) -> Job:
    """Build the job; its settings are ``steps``, ``faint``, the shade, and ``errors``."""
    steps, faint = int(settings.get("steps", "400")), float(settings.get("faint", "4e-6"))
    with digits.initial_weights(0):
        model = Reader(errors=settings.get("errors", "0") == "1")
    training, _ = digits.read_digits().split()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        images, labels = training.take(digits.visited(step, 32, len(training.labels), 0)).tensors()
        return framed(images, faint * (labels == TARGET)), labels

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Job(model=model, optimizer=optimizer, batch=batch, loss=loss, steps=steps)
