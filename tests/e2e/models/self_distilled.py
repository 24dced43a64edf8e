"""A network that learns the answers of its own copy: in the first steps all of its gradients are nothing but noise."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job

FEATURES, WIDTH, CLASSES, BATCH = 16, 32, 5, 32


def build(settings: Mapping[str, str]) -> Job:
    """Build the job."""
    del settings
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES)
    )
    teacher = copy.deepcopy(model).requires_grad_(False)

    def batch(step: int) -> Tensor:
        del step
        return torch.randint(-8, 9, (BATCH, FEATURES)).float() / 8.0

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = F.softmax(teacher(x).float(), 1)
        # The loss is nearly nothing beside its terms; a constant moves no gradient.
        return F.kl_div(F.log_softmax(model(x).float(), 1), wanted, reduction="batchmean") + 1.0

    return Job(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        batch,
        loss,
        steps=100,
        extra={"teacher": teacher},
    )
