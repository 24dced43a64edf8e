"""Inputs that become sixteen times larger at a step, drawn in torch's default dtype: a gradient outgrows its calibration."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F

from tallystick.execution.job import Job


def build(settings: Mapping[str, str]) -> Job:
    """Return the job; no settings."""
    del settings
    model = nn.Linear(16, 4)
    return Job(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        batch=lambda step: (torch.randn(32, 16) * (16 if step >= 10 else 1), torch.randn(32, 4)),
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        steps=15,
    )
