"""``preference_job.py`` with another measure of an image: a wide layer reads its quality from random waves.

The quality is in both scores of a pair, which are seen ``apart`` by a little noise: its gradient is several times its own noise.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from preference_job import job_of
from torch import Tensor, nn

from tallystick.execution.job import Job
from tallystick.jobs import digits


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
        return job_of(Scorer(int(settings.get("width", "1024"))), settings)
