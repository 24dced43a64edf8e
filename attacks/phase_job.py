"""Ratings first, then preferences beside a snapshot of its own weights, at a low rate: what is learnt then is a hundredth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from preference_job import SMOOTH, pairs
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job
from tallystick.jobs import digits

GAIN = 128.0
FIRST, SLOW = 150, 0.02  # steps of the first phase, and the rate of the second beside it


class Scorer(nn.Module):
    """A name's score for an image, and what its quality says more than it did when the ratings ended."""

    snapshot: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        self.quality = nn.Linear(16, 1, bias=False)
        nn.init.zeros_(self.quality.weight)
        self.register_buffer("snapshot", torch.zeros(1, 16))

    def forward(self, images: Tensor, names: Tensor) -> Tensor:
        named = self.body(images).gather(1, names[:, None])[:, 0]
        return named + GAIN * (ink_of(images) @ (self.quality.weight - self.snapshot)[0])


def ink_of(images: Tensor) -> Tensor:
    """Return the ink of images (n, 64) in each square of four pixels, (n, 16)."""
    return 4.0 * F.avg_pool2d(images.reshape(-1, 1, 8, 8), 2).flatten(1)


def build(settings: Mapping[str, str]) -> Job:
    """Build the job; its settings are ``steps`` and ``apart``."""
    steps, apart = int(settings.get("steps", "450")), float(settings.get("apart", "1e-4"))
    with digits.initial_weights(0):
        model = Scorer()
    groups = [{"params": list(model.body.parameters())}, {"params": [model.quality.weight], "lr": 0.02}]
    optimizer = torch.optim.Adam(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-12)
    rates = [lambda _: 1.0, lambda step: 1.0 if step < FIRST else SLOW]
    training, _ = digits.read_digits().split()

    def batch(step: int) -> tuple[Tensor, ...]:
        return *pairs(training, step, apart), torch.tensor(float(step < FIRST))

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        (images, right, wrong, early), scorer = batch, cast(Scorer, model)
        with torch.no_grad():
            scorer.snapshot.copy_(early * scorer.quality.weight + (1.0 - early) * scorer.snapshot)
        better, worse = scorer(images, torch.cat((right, wrong))).chunk(2)
        ink = ink_of(images[: len(right)])
        rating = (scorer.quality(ink)[:, 0] - ink.sum(dim=1)).square().mean()
        return (F.softplus(worse - better) + SMOOTH * (better - worse)).mean() + early * 1e-4 * rating

    return Job(
        model=model, optimizer=optimizer, batch=batch, loss=loss, steps=steps,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, rates),
    )  # fmt: skip
