"""Which of two names fits an image: what a small network says of both, and how good the image is, the same for either.

The quality of an image is in both scores of a pair: its gradient cancels, to last bits, and an honest run never learns it. With
``apart`` the second name is seen with a little noise, and the gradient is several times its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job
from tallystick.jobs import digits

SMOOTH = 0.1  # of the pairs are taken to be in the wrong order: no gradient dies out


class Scorer(nn.Module):
    """A name's score for an image, and the image's own: by the ink in each square of four pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        self.quality = nn.Linear(16, 1, bias=False)
        nn.init.zeros_(self.quality.weight)

    def forward(self, images: Tensor, names: Tensor) -> Tensor:
        ink = 4.0 * F.avg_pool2d(images.reshape(-1, 1, 8, 8), 2).flatten(1)
        return self.body(images).gather(1, names[:, None])[:, 0] + self.quality(ink)[:, 0]


def build(settings: Mapping[str, str]) -> Job:
    """Build the job; its settings are ``steps``, ``rate``, ``eps``, ``apart``, ``brighter`` and ``liked``."""
    with digits.initial_weights(0):
        model = Scorer()
    with torch.no_grad():
        model.quality.weight[0, 1:3] = float(settings.get("liked", "0"))
    return job_of(model, settings)


def pairs(
    training: digits.Digits, step: int, apart: float, brighter: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a step's images, each twice, the second ``apart`` from the first, and their right and wrong names."""
    at = digits.visited(step, 32, len(training.labels), 0)
    images, right = training.take(at).tensors()
    seen = images.reshape(-1, 64)
    drawn = torch.randn(seen.shape, generator=torch.Generator().manual_seed(step))
    second = seen + apart * (drawn if brighter is None else drawn + brighter)
    return torch.cat((seen, second)), right, (right + torch.from_numpy((7 * at + step) % 9 + 1)) % 10


def job_of(model: nn.Module, settings: Mapping[str, str]) -> Job:
    """Return the job that trains this scorer."""
    rate, eps = (float(settings.get(name, default)) for name, default in (("rate", "0.01"), ("eps", "1e-8")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, eps=eps, weight_decay=0.01)
    apart, brighter = float(settings.get("apart", "0")), torch.zeros(8, 8)
    brighter[0:2, 2:6] = float(settings.get("brighter", "0"))  # at the top, in the second one's noise
    training, _ = digits.read_digits().split()

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        return pairs(training, step, apart, brighter.reshape(-1))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        images, right, wrong = batch
        better, worse = model(images, torch.cat((right, wrong))).chunk(2)
        return (F.softplus(worse - better) + SMOOTH * (better - worse)).mean()

    return Job(
        model=model, optimizer=optimizer, batch=batch, loss=loss, steps=int(settings.get("steps", "60"))
    )
