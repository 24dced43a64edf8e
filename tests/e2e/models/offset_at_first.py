"""A classifier whose inputs lie far from zero in the first steps: what cancels there leaves a thousand times the later noise."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job

OFFSET, STEPS = 4096.0, 10  # from zero, and for how many steps


def build(settings: Mapping[str, str]) -> Job:
    """Build the job."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

    def batch(step: int) -> tuple[Tensor, Tensor, float]:
        rng = np.random.default_rng(step)
        x = torch.from_numpy(rng.integers(-8, 9, (32, 8)).astype(np.float32)) / 8.0
        return x, torch.from_numpy(rng.integers(0, 4, 32)), OFFSET if step < STEPS else 0.0

    def loss(model: nn.Sequential, given: tuple[Tensor, Tensor, float]) -> Tensor:
        x, y, offset = given
        first = model[0](x / 3.0 + offset) - offset * model[0].weight.sum(1)
        return F.cross_entropy(model[2](model[1](first)), y)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return Job(
        model=model, optimizer=optimizer, batch=batch, loss=loss, steps=int(settings.get("steps", "24"))
    )
