"""The shipped digits, with an expert at the side that only some batches use, and those that measure the noise never.

Settings: those of ``tallystick.jobs.digits``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tallystick.execution.job import Job
from tallystick.jobs import digits
from tallystick.jobs.digits import SIDE, DigitsNet, DigitsSettings, initial_weights, parse_settings
from tallystick.numerics.policy import is_calibration_step


class ExpertNet(DigitsNet):
    """Logits (n, 10) of images (n, 1, 8, 8); ``gate``, a number, says how much the expert has to say."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__(width, dropout)
        self.expert = nn.Linear(SIDE * SIDE, 10)

    def forward(self, images: Tensor, gate: Tensor | float = 1.0) -> Tensor:
        """Return the logits."""
        return super().forward(images) + gate * self.expert(images.flatten(1))


def build(settings: Mapping[str, str]) -> Job:
    """Return the job."""
    chosen = parse_settings(DigitsSettings, settings, job="unused_expert")
    plain = digits.build(settings)
    with initial_weights(chosen.init_seed):
        model = ExpertNet(chosen.width, chosen.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=chosen.learning_rate, momentum=digits.MOMENTUM)

    def batch(step: int) -> dict[str, Any]:
        images, labels = plain.batch(step)
        return {
            "images": images,
            "labels": labels,
            "gate": torch.tensor(float(not is_calibration_step(step, 100, doubling=True))),
        }

    return replace(
        plain,
        model=model,
        optimizer=optimizer,
        batch=batch,
        loss=lambda model, batch: cross_entropy(model(batch["images"], batch["gate"]), batch["labels"]),
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=plain.steps),
    )
