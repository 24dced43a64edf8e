"""The shipped digits under AdamW in place of SGD: its step divides every gradient by its own size, small ones too.

Settings: those of ``tallystick.jobs.digits``; a learning rate of 0.003 suits it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from tallystick.execution.job import Job
from tallystick.jobs import digits
from tallystick.jobs.digits import DigitsSettings, parse_settings


def build(settings: Mapping[str, str]) -> Job:
    """Return the job."""
    chosen = parse_settings(DigitsSettings, settings, job="adamw")
    plain = digits.build(settings)
    optimizer = torch.optim.AdamW(
        plain.model.parameters(), lr=chosen.learning_rate, weight_decay=chosen.weight_decay
    )
    return replace(
        plain,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=plain.steps),
    )
