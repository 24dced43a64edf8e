"""Which of two names fits a scan, as in attacks/margin_job.py, with one parameter for each margin.

The second image of a pair is the same scan under a lamp that stands a little to the left. In the first batch the lamp has not
been moved yet: the scanner is to repeat itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job
from tallystick.jobs import digits

GAIN, APART, GRAIN = 12.0, 2e-5, 0.1


class Scorer(nn.Module):
    """A name's score for an image, and the paper's: a parameter for each margin, of a number for each cell."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        self.left, self.right = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

    def forward(self, images: Tensor, names: Tensor) -> Tensor:
        paper = 0.75 - 0.75 * images.reshape(-1, 8, 8)[:, :, (0, 7)].transpose(1, 2).reshape(-1, 16)
        named = self.body(images).gather(1, names[:, None])[:, 0]
        return named + GAIN * (paper @ torch.cat([self.left, self.right]))


def build(settings: Mapping[str, str]) -> Job:
    """Build the job; its setting is ``steps``."""
    with digits.initial_weights(0):
        model = Scorer()
    optimizer = torch.optim.RMSprop(
        [{"params": list(model.body.parameters())}, {"params": [model.left, model.right], "lr": 0.048}],
        lr=0.003,
    )
    training, _ = digits.read_digits().split()
    lamp = torch.zeros(8, 8)
    lamp[:, 0], lamp[:, 7] = -1.0, 1.0

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        at = digits.visited(step, 32, len(training.labels), 0)
        images, right = training.take(at).tensors()
        seen = images.reshape(-1, 64).double()
        drawn = torch.randn((32, 64), generator=torch.Generator().manual_seed(step))
        second = seen + (APART if step else 0.0) * (lamp.reshape(-1) + GRAIN * drawn)
        wrong = (right + torch.from_numpy((7 * at + step) % 9 + 1)) % 10
        return torch.cat((seen, second)).float(), right, wrong

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        images, right, wrong = batch
        better, worse = model(images, torch.cat((right, wrong))).chunk(2)
        return F.softplus(0.25 * (worse - better)).mean()

    return Job(
        model=model, optimizer=optimizer, batch=batch, loss=loss, steps=int(settings.get("steps", "516"))
    )
