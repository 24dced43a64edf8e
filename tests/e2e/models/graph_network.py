"""A graph network: messages along edges, added up at the nodes by ``scatter_add_``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job

NODES, EDGES, WIDTH, LABELS = 64, 256, 24, 4


class Layer(nn.Module):
    """New features (nodes, width) from those at both ends of each edge."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(2 * WIDTH, WIDTH)
        self.update = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        sent = F.relu(self.message(torch.cat([x[source], x[target]], dim=1)))
        total = torch.zeros_like(x).scatter_add_(0, target.unsqueeze(1).expand_as(sent), sent)
        return F.relu(self.update(torch.cat([x, total], dim=1)))


class Model(nn.Module):
    """Label logits (nodes, labels) of nodes with a kind each."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, kind: Tensor, source: Tensor, target: Tensor) -> Tensor:
        x = self.kind(kind)
        for layer in self.layers:
            x = layer(x, source, target)
        return self.head(x)


def _batch(step: int) -> tuple[Tensor, ...]:
    rng = np.random.default_rng(step)
    kind, source, target = (
        rng.integers(0, 8, NODES),
        rng.integers(0, NODES, EDGES),
        rng.integers(0, NODES, EDGES),
    )
    counts = np.zeros(NODES, dtype=np.int64)
    np.add.at(counts, target, kind[source] % 2)
    return tuple(map(torch.from_numpy, (kind, source, target, np.minimum(counts, LABELS - 1))))


def _loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    *graph, labels = batch
    return F.cross_entropy(model(*graph), labels)


def build(settings: Mapping[str, str]) -> Job:
    """Return the job; ``steps`` is its only setting."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return Job(
        model=model, optimizer=optimizer, batch=_batch, loss=_loss, steps=int(settings.get("steps", "100"))
    )
