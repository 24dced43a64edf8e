"""Nodes of a graph take the largest of their neighbours' features: ``scatter_reduce`` with ``amax``, which only chooses."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job


class Model(nn.Module):
    """Scores (nodes, 4) of features (nodes, 8) and edges (2, m)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = F.relu(self.inner(x))
        at = edges[0][:, None].expand(-1, 16)
        return self.outer(torch.zeros_like(h).scatter_reduce(0, at, h[edges[1]], "amax"))


def build(settings: Mapping[str, str]) -> Job:
    """Return the job; no settings."""
    del settings
    model = Model()
    return Job(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        batch=lambda step: (torch.randn(20, 8), torch.randint(0, 20, (2, 60)), torch.randint(0, 4, (20,))),
        loss=lambda model, batch: F.cross_entropy(model(batch[0], batch[1]), batch[2]),
        steps=20,
    )
