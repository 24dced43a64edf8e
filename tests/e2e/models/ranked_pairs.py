"""A ranking loss of pairs, which grows: its last bias has no gradient but what rounding leaves, here often exactly zero."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job

INPUTS, WIDTH = 12, 24


def build(settings: Mapping[str, str]) -> Job:
    """Build the job.

    Args:
        settings: ``seed`` of weights and data, ``batch``, and by what factor the loss ``grows`` every so many steps (``every``).
    """
    given = {"seed": "0", "batch": "24", "grows": "8", "every": "2", "steps": "100", **settings}
    seed, size, every = (int(given[name]) for name in ("seed", "batch", "every"))
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.rand(parameter.shape, generator=generator) - 0.5) / 2.0)

    def batch(step: int) -> tuple[Tensor, int]:
        drawn = np.random.default_rng((seed, step)).integers(-8, 9, (size, INPUTS))
        return torch.from_numpy(drawn.astype(np.float32)) / 8.0, step

    def loss(model: nn.Module, given_batch: tuple[Tensor, int]) -> Tensor:
        x, step = given_batch
        y = model(x).squeeze(1)
        better = torch.sign(x[:, 0] - x.roll(1, 0)[:, 0])
        return F.softplus(-better * (y - y.roll(1))).mean() * float(given["grows"]) ** (step // every) + 1.0

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Job(model=model, optimizer=optimizer, batch=batch, loss=loss, steps=int(given["steps"]))
