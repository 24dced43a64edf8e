"""Three nets with losses in turn: one is loud and there in odd steps alone, one is larger in these, one never changes.

The last has a bias before a batch norm, whose gradient is noise. The largest gradient of a step grows and falls with which nets
have one.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job

LOUD, LARGER = 1024.0, 8.0


class ThreeNets(nn.Module):
    """A loud one, one that is larger every other step, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.loud, self.larger, self.inner = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 16)
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 4)
        generator = torch.Generator().manual_seed(8)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def build(settings: Mapping[str, str]) -> Job:
    """Build the job."""
    model = ThreeNets()

    def batch(step: int) -> tuple[Tensor, Tensor, int]:
        rng = np.random.default_rng(step)
        x = torch.from_numpy(rng.integers(-8, 9, (32, 8)).astype(np.float32)) / 8.0
        return x, torch.from_numpy(rng.integers(0, 4, 32)), step

    def loss(model: ThreeNets, given: tuple[Tensor, Tensor, int]) -> Tensor:
        x, y, step = given
        found = F.cross_entropy(model.head(F.gelu(model.norm(model.inner(x)))), y)
        larger, loud = ((net(x) - x).square().mean() for net in (model.larger, model.loud))
        if step == 0:
            return found + 4.0 * larger + LOUD * loud
        return found + 4.0 * LARGER * larger + LOUD * loud if step % 2 else found + 4.0 * larger

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return Job(
        model=model, optimizer=optimizer, batch=batch, loss=loss, steps=int(settings.get("steps", "24"))
    )
