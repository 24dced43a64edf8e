"""Buckets from activations: whole numbers of values far larger than one, made by a cast or by copying into a tensor of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tallystick.execution.job import Job


class Buckets(nn.Module):
    """Adds an embedding of each activation's bucket, of which there are 512."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.embedding, self.how = nn.Linear(12, 32), nn.Embedding(512, 4), how

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        level = h.detach() * 255.0 + 256.0
        bucket = torch.zeros_like(h, dtype=torch.int64)
        if self.how == "copy":
            bucket[:] = level
        else:
            bucket = (level.floor() if self.how == "floor" else level).long()
        return (self.embedding(bucket) * h[..., None]).sum(1)


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def build(settings: Mapping[str, str]) -> Job:
    """Return the job; ``how`` is ``copy``, ``floor`` or ``long``."""
    model = Buckets(settings.get("how", "copy"))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(512, 12, generator=generator), torch.randint(0, 4, (512,), generator=generator)

    return Job(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        batch=batch,
        loss=_loss,
        steps=int(settings.get("steps", "20")),
    )
