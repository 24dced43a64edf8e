"""A classifier whose labels are its own answers, kept in buffers that each step reads and writes; its gradients grow.

A gradient that outgrows its scale has the step repeated, from where it began, to measure its noise again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job

FEATURES, CLASSES, POOL, BATCH = 16, 5, 64, 16


class Answering(nn.Module):
    """Layers, and what they answered of each example when they last saw it: in whole numbers, and in a tensor made anew."""

    bank: Tensor
    means: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, CLASSES))
        self.register_buffer("bank", torch.full((POOL,), -1))
        self.register_buffer("means", torch.zeros(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.layers(x)


def build(settings: Mapping[str, str]) -> Job:
    """Build the job."""
    del settings
    model = Answering()
    pool = torch.randint(-8, 9, (POOL, FEATURES)).float() / 8.0

    def batch(step: int) -> tuple[Tensor, Tensor]:
        at = torch.randint(0, POOL, (BATCH,))
        return pool[at] * 2.0 ** min(max(0, step - 2), 6), at

    def loss(model: Answering, given: tuple[Tensor, Tensor]) -> Tensor:
        x, at = given
        answers = model(x).float()
        before = model.bank[at]
        with torch.no_grad():
            model.bank[at] = answers.argmax(1)
            model.means = 0.75 * model.means + 0.25 * F.softmax(answers, 1).mean(0)
        held = F.cross_entropy(answers, before.clamp(min=0), reduction="none")
        return held.mean() + (answers.mean(0) - model.means).square().mean() + 1.0

    return Job(model, torch.optim.SGD(model.parameters(), lr=1e-3), batch, loss, steps=100)
