"""The shipped digits, whose logits have a temperature that lends its gradient's size: a large one, and a learning rate of 0.

Settings: those of ``tallystick.jobs.digits``, and ``unit``, by which the temperature's gradient is multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from tallystick.execution.job import Job
from tallystick.jobs import digits
from tallystick.jobs.digits import DigitsNet, DigitsSettings, initial_weights, parse_settings


class WarmNet(DigitsNet):
    """Logits (n, 10) of images (n, 1, 8, 8), times 1 + ``unit`` * ``gain``, which stays 0."""

    def __init__(self, width: int, dropout: float, unit: float) -> None:
        super().__init__(width, dropout)
        self.unit = unit
        self.gain = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return super().forward(images) * (1.0 + self.unit * self.gain)


def build(settings: Mapping[str, str]) -> Job:
    """Return the job."""
    own = dict(settings)
    unit = float(own.pop("unit", "100"))
    chosen = parse_settings(DigitsSettings, own, job="lender")
    plain = digits.build(own)
    with initial_weights(chosen.init_seed):
        model = WarmNet(chosen.width, chosen.dropout, unit)
    trained = [p for name, p in model.named_parameters() if name != "gain"]
    optimizer = torch.optim.SGD(
        [{"params": trained}, {"params": [model.gain], "lr": 0.0}],
        lr=chosen.learning_rate,
        momentum=digits.MOMENTUM,
    )
    return replace(
        plain,
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=plain.steps),
    )
