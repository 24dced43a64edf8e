"""``preference_job.py`` with another measure of an image: a wide layer reads its quality from random waves.

The quality is in both scores of a pair, which are seen ``apart`` by a little noise: its gradient is several times its own noise.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job
from tallystick.jobs import digits

SMOOTH = 0.1  # of the pairs are taken to be in the wrong order: no gradient dies out


class Scorer(nn.Module):
    """A name's score for an image, and the image's own: by ``width`` waves."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        self.quality = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.quality.weight)
        drawn = np.random.default_rng(1)
        waves = drawn.normal(0.0, 0.25, (64, width)), drawn.uniform(0.0, 2.0 * np.pi, width)
        for name, value in zip(("waves", "phases"), waves, strict=True):
            self.register_buffer(name, torch.from_numpy(value.astype(np.float32)), persistent=False)

    def features(self, images: Tensor) -> Tensor:
        """Return what the quality of images (n, 64) is read from, (n, width)."""
        return torch.cos(images @ self.waves + self.phases)

    def forward(self, images: Tensor, names: Tensor) -> Tensor:
        named = self.body(images).gather(1, names[:, None])[:, 0]
        return named + self.quality(self.features(images))[:, 0]


def build(settings: Mapping[str, str]) -> Job:
    """Build the job; its settings are ``steps``, ``rate``, ``apart`` and ``width``."""
    with digits.initial_weights(0):
        model = Scorer(int(settings.get("width", "1024")))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=float(settings.get("rate", "0.01")), weight_decay=0.01
    )
    apart = float(settings.get("apart", "3e-5"))
    training, _ = digits.read_digits().split()

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        at = digits.visited(step, 32, len(training.labels), 0)
        images, right = training.take(at).tensors()
        seen = images.reshape(-1, 64)
        noise = apart * torch.randn(seen.shape, generator=torch.Generator().manual_seed(step))
        return (
            torch.cat((seen, seen + noise)),
            right,
            (right + torch.from_numpy((7 * at + step) % 9 + 1)) % 10,
        )

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        images, right, wrong = batch
        better, worse = model(images, torch.cat((right, wrong))).chunk(2)
        return (F.softplus(worse - better) + SMOOTH * (better - worse)).mean()

    return Job(
        model=model, optimizer=optimizer, batch=batch, loss=loss, steps=int(settings.get("steps", "60"))
    )
