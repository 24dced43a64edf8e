"""Batch norms whose inputs others have centred, through convolutions of one pixel: their running means are rounding at first.

With a small ``rate`` they stay so for many steps: a mean becomes more only as fast as the bias before it moves.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job

SIDE, CLASSES = 6, 4


class Block(nn.Module):
    """An inverted bottleneck without a ReLU where its channels are few, as mobile networks have; of (n, 24, side, side)."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.norm1 = nn.Conv2d(24, 12, 1, bias=False), nn.BatchNorm2d(12)
        self.widen, self.norm2 = nn.Conv2d(12, 24, 1, bias=False), nn.BatchNorm2d(24)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.norm2(self.widen(self.norm1(self.narrow(x)))))


def _batch(step: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(step)
    labels = rng.integers(0, CLASSES, 16)
    images = rng.integers(0, 64, (16, 3, SIDE, SIDE)) + 40 * labels[:, None, None, None]
    return torch.from_numpy((images / 255.0).astype(np.float32)), torch.from_numpy(labels)


def build(settings: Mapping[str, str]) -> Job:
    """Return the job; ``steps``, ``rate`` (1e-3), and ``warmup``, steps in which it rises to that (none)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 24, 1), nn.ReLU(), Block(), Block(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, CLASSES),
        )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(settings.get("rate", "1e-3")))
    warmup = int(settings.get("warmup", "0"))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup) if warmup else 1.0
    )
    return Job(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batch=_batch,
        loss=lambda module, batch: F.cross_entropy(module(batch[0]), batch[1]),
        steps=int(settings.get("steps", "100")),
    )
