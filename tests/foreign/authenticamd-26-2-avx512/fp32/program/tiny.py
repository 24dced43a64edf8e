"""The job of the runs in this folder: a little of everything whose sums processors add up differently, 1,900 parameters.

Convolution, batch norm, pooling, attention, layer norm, GELU, dropout and cross entropy; Adam. Batches are whole numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job

SIDE, CLASSES, WIDTH, EXAMPLES = 8, 4, 16, 32


class Model(nn.Module):
    """Logits (n, classes) of images (n, 1, side, side)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.scaled = nn.BatchNorm2d(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.widened, self.narrowed = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.said = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        seen = F.max_pool2d(F.relu(self.scaled(self.seen(images))), 2)
        places = seen.flatten(2).transpose(1, 2)
        q, k, v = self.mixed(places).chunk(3, dim=-1)
        places = places + F.softmax(q @ k.transpose(1, 2) / WIDTH**0.5, dim=-1) @ v
        places = places + self.narrowed(
            F.dropout(F.gelu(self.widened(self.norm(places))), 0.1, self.training)
        )
        return self.said(places.mean(1))


def _batch(step: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(step)
    labels = rng.integers(0, CLASSES, EXAMPLES)
    images = rng.integers(0, 128, (EXAMPLES, 1, SIDE, SIDE))
    for image, label in zip(images, labels, strict=True):
        image[0, 2 * label : 2 * label + 2] += 64
    return torch.from_numpy(images).to(torch.float32) / 256, torch.from_numpy(labels)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def build(settings: Mapping[str, str]) -> Job:
    """Return the job; it has no settings."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model()
    return Job(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        batch=_batch,
        loss=_loss,
        steps=24,
    )
