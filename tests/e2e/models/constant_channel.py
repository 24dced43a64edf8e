"""Two batch norms in a row over images of which one channel is constant: that channel is nothing but noise in both."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job

CHANNELS, SIDE, CLASSES = 6, 6, 4


class Model(nn.Module):
    """Class logits of images (n, channels, side, side); each channel is scaled by itself, so a constant one stays so."""

    def __init__(self) -> None:
        super().__init__()
        self.scale1 = nn.Conv2d(CHANNELS, CHANNELS, 1, groups=CHANNELS)
        self.norm1 = nn.BatchNorm2d(CHANNELS)
        self.scale2 = nn.Conv2d(CHANNELS, CHANNELS, 1, groups=CHANNELS)
        self.norm2 = nn.BatchNorm2d(CHANNELS)
        self.mix = nn.Conv2d(CHANNELS, 16, 3, padding=1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.scale1(images)))
        x = F.relu(self.norm2(self.scale2(x)))
        return self.head(F.relu(self.mix(x)).mean(dim=(2, 3)))


def _batch(step: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(step)
    labels = rng.integers(0, CLASSES, 32)
    images = rng.integers(0, 256, (32, CHANNELS, SIDE, SIDE)) * (1 + labels[:, None, None, None])
    images[:, 2] = 77  # a plane that says nothing
    return torch.from_numpy((images / 255.0).astype(np.float32)), torch.from_numpy(labels)


def build(settings: Mapping[str, str]) -> Job:
    """Return the job; ``steps`` is its only setting."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model()
    return Job(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        batch=_batch,
        loss=lambda module, batch: F.cross_entropy(module(batch[0]), batch[1]),
        steps=int(settings.get("steps", "100")),
    )
