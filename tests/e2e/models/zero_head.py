"""A classifier of digits whose head begins at zero, beside a regression that its trunk does not feel.

Before its normalization a bias has no gradient but noise. That grows with the classifier's gradient, which begins at zero, and
not with the largest gradient, which is the regression's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job
from tallystick.jobs import digits

WIDTH, BATCH, MORE = 8, 32, 48


class TwoHeads(digits.DigitsNet):
    """The network of the shipped job, and a head for how much ink there is."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 0.1)
        self.ink = nn.Linear(2 * WIDTH, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def both(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and the ink of each image."""
        x = self.relu(self.norm1(self.conv1(images)))
        x = self.pool(self.relu(self.norm2(self.conv2(x))))
        x = self.relu(self.hidden(self.dropout(x.flatten(1))))
        return self.head(x), self.ink(x.detach()).squeeze(1)


def build(settings: Mapping[str, str]) -> Job:
    """Build the job."""
    given = {"width": str(WIDTH), "batch": str(BATCH), "steps": "100", **settings}
    job = digits.build(given)
    with digits.initial_weights(0):
        model = TwoHeads()
    training, _ = digits.read_digits().split()
    count = len(training.labels)

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        x, y = training.take(digits.visited(step, BATCH, count, 0)).tensors()
        more, _ = training.take(digits.visited(step, MORE, count, 1)).tensors()
        return torch.cat((x, more)), y, torch.cat((x, more)).sum((1, 2, 3)) * digits.BRIGHTEST

    def loss(model: TwoHeads, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, ink = given
        logits, guess = model.both(x)
        own = F.cross_entropy(logits[len(y) :], logits[len(y) :].detach().argmax(1))
        return F.cross_entropy(logits[: len(y)], y) + own + F.mse_loss(guess, ink.to(guess.dtype))

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    return replace(job, model=model, optimizer=optimizer, batch=batch, loss=loss, scheduler=schedule)
