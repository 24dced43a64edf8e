"""``preference_job.py`` of many authors: how good an image is, its author's row of a table says; a batch has one author.

Every second batch is of the most active one. The table is hashed rows, or a linear layer of one-hot authors, ``shape=column``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from preference_job import SMOOTH, pairs
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job
from tallystick.jobs import digits

BUSY, DIM = 1, 16
BUCKETS = 8192


class Scorer(nn.Module):
    """A name's score for an image, and what the author's row says of the ink in each square of four pixels."""

    def __init__(self, shape: str = "row") -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        is_column = shape == "column"
        self.taste = nn.Linear(BUCKETS, DIM, bias=False) if is_column else nn.Embedding(BUCKETS, DIM)
        nn.init.zeros_(self.taste.weight)

    def forward(self, images: Tensor, names: Tensor, authors: Tensor) -> Tensor:
        if isinstance(self.taste, nn.Linear):
            authors = F.one_hot(authors, BUCKETS).to(self.taste.weight.dtype)
        ink = 4.0 * F.avg_pool2d(images.reshape(-1, 1, 8, 8), 2).flatten(1)
        named = self.body(images).gather(1, names[:, None])[:, 0]
        return named + (self.taste(authors) * ink).sum(dim=1)


def author_of(step: int) -> int:
    """Return who is the author of a step's batch."""
    return BUSY if step % 2 == 0 else 2 + (7919 * step + 13) % (BUCKETS - 2)


def build(settings: Mapping[str, str]) -> Job:
    """Build the job; its settings are ``steps``, ``apart`` and ``shape``."""
    steps, apart = int(settings.get("steps", "400")), float(settings.get("apart", "1e-4"))
    with digits.initial_weights(0):
        model = Scorer(settings.get("shape", "row"))
    training, _ = digits.read_digits().split()

    def batch(step: int) -> tuple[Tensor, ...]:
        return *pairs(training, step, apart), torch.full((64,), author_of(step))

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        images, right, wrong, authors = batch
        better, worse = model(images, torch.cat((right, wrong)), authors).chunk(2)
        return (F.softplus(worse - better) + SMOOTH * (better - worse)).mean()

    return Job(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        batch=batch,
        loss=loss,
        steps=steps,
    )
