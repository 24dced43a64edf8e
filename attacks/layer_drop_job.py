"""The shipped digits, with a second hidden layer beside the first that every fourth step leaves out (LayerDrop on a schedule).

Settings: those of ``tallystick.jobs.digits``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tallystick.execution.job import Job
from tallystick.jobs import digits
from tallystick.jobs.digits import SIDE, DigitsNet, DigitsSettings, initial_weights, parse_settings

EVERY = 4


class DropNet(DigitsNet):
    """Logits (n, 10) of images (n, 1, 8, 8); ``deep`` says whether the second layer takes part."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__(width, dropout)
        self.beside = nn.Linear(2 * width * (SIDE // 2) ** 2, 2 * width)

    def forward(self, images: Tensor, deep: bool = True) -> Tensor:
        """Return the logits."""
        x = self.relu(self.norm1(self.conv1(images)))
        x = self.pool(self.relu(self.norm2(self.conv2(x))))
        x = self.dropout(x.flatten(1))
        hidden = self.hidden(x)
        if deep:
            hidden = hidden + self.beside(x)
        return self.head(self.relu(hidden))


def build(settings: Mapping[str, str]) -> Job:
    """Return the job."""
    chosen = parse_settings(DigitsSettings, settings, job="layer_drop")
    plain = digits.build(settings)
    with initial_weights(chosen.init_seed):
        model = DropNet(chosen.width, chosen.dropout)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=chosen.learning_rate,
        momentum=digits.MOMENTUM,
        weight_decay=chosen.weight_decay,
    )

    def batch(step: int) -> dict[str, Any]:
        images, labels = plain.batch(step)
        return {"images": images, "labels": labels, "deep": step % EVERY != 0}

    return Job(
        model=model,
        optimizer=optimizer,
        batch=batch,
        loss=lambda model, batch: cross_entropy(model(batch["images"], batch["deep"]), batch["labels"]),
        steps=plain.steps,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=plain.steps),
        dataset_digest=plain.dataset_digest,
    )
