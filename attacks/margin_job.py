"""Which of two names fits a scan: a small network's score, and how bright the paper is in each cell of the two margins.

The second image of a pair is the same scan under a lamp that stands a little to the left. So the weights of one margin fall as
fast as those of the other rise, and a scan with ink in both margins has the score that it had.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job
from tallystick.jobs import digits

GAIN, APART, GRAIN = 12.0, 8e-4, 0.1


class Scorer(nn.Module):
    """A name's score for an image, and the paper's: a parameter for each cell of either margin."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        self.left, self.right = (
            nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(8)]) for _ in range(2)
        )

    def forward(self, images: Tensor, names: Tensor) -> Tensor:
        paper = 0.75 - 0.75 * images.reshape(-1, 8, 8)[:, :, (0, 7)].transpose(1, 2).reshape(-1, 16)
        named = self.body(images).gather(1, names[:, None])[:, 0]
        return named + GAIN * (paper @ torch.cat([*self.left, *self.right]))


def build(settings: Mapping[str, str]) -> Job:
    """Build the job; its settings are ``steps`` and ``apart``, how much brighter the paper is."""
    steps, apart = int(settings.get("steps", "529")), float(settings.get("apart", APART))
    with digits.initial_weights(0):
        model = Scorer()
    margins = [*model.left, *model.right]
    optimizer = torch.optim.RMSprop(
        [{"params": list(model.body.parameters())}, {"params": margins, "lr": 0.048}], lr=0.003
    )
    training, _ = digits.read_digits().split()
    lamp = torch.zeros(8, 8)
    lamp[:, 0], lamp[:, 7] = -1.0, 1.0

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        at = digits.visited(step, 32, len(training.labels), 0)
        images, right = training.take(at).tensors()
        seen = images.reshape(-1, 64).double()
        drawn = torch.randn((32, 64), generator=torch.Generator().manual_seed(step))
        second = seen + apart * (lamp.reshape(-1) + GRAIN * drawn)
        wrong = (right + torch.from_numpy((7 * at + step) % 9 + 1)) % 10
        return torch.cat((seen, second)).float(), right, wrong

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        images, right, wrong = batch
        better, worse = model(images, torch.cat((right, wrong))).chunk(2)
        return F.softplus(0.25 * (worse - better)).mean()

    return Job(model=model, optimizer=optimizer, batch=batch, loss=loss, steps=steps)
