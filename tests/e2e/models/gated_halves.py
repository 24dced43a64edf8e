"""One half of a layer's output gates the other, which torch computes number by number, since its rows have gaps between them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job


class Gated(nn.Module):
    """Scores (n, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.inner(x).chunk(2, -1)
        return self.outer(values * F.softplus(gates) + F.elu(gates))


def build(settings: Mapping[str, str]) -> Job:
    """Return the job; no settings."""
    del settings
    model = Gated()
    return Job(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        batch=lambda step: (torch.randn(8, 16), torch.randint(0, 4, (8,))),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        steps=20,
    )
