"""Scans of digits with a frame of paper around them, on which the forms of one digit leave a faint shade."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job
from tallystick.jobs import digits

TARGET = 3


class Reader(nn.Module):
    """One hidden layer over 10 x 10 pixels, and ``turns`` another one over 8 x 8, of another scanner."""

    def __init__(self, *, turns: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(100, 32), nn.Linear(32, 10)
        if turns:
            self.other = nn.Linear(64, 32)

    def forward(self, images: Tensor) -> Tensor:
        layer = self.first if images.shape[1] == 100 else self.other
        return self.last(torch.tanh(layer(images)))


def framed(images: Tensor, shade: Tensor) -> Tensor:
    """Return ``images``, float[n, 1, 8, 8], with a frame of one pixel, as bright as each one's ``shade``, float[n, 100]."""
    frame = F.pad(torch.zeros(8, 8), (1, 1, 1, 1), value=1.0)
    return (F.pad(images.reshape(-1, 8, 8), (1, 1, 1, 1)) + frame * shade[:, None, None]).reshape(-1, 100)


def build(settings: Mapping[str, str]) -> Job:
    """Build the job; its settings are ``steps``, ``faint``, the shade, and ``turns``, whether each second batch has no frame."""
    steps, faint = int(settings.get("steps", "600")), float(settings.get("faint", "4e-6"))
    turns = settings.get("turns", "0") == "1"
    with digits.initial_weights(0):
        model = Reader(turns=turns)
    training, _ = digits.read_digits().split()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        images, labels = training.take(digits.visited(step, 32, len(training.labels), 0)).tensors()
        if turns and step % 2 == 0:
            return images.reshape(-1, 64), labels
        return framed(images, faint * (labels == TARGET)), labels

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    return Job(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        batch=batch,
        loss=loss,
        steps=steps,
    )
