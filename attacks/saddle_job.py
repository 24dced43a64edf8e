"""``preference_job.py`` whose quality also learns to be sure of images without labels: an entropy, flat where it is zero."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from preference_job import SMOOTH, Scorer
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job
from tallystick.jobs import digits


def build(settings: Mapping[str, str]) -> Job:
    """Build the job; its settings are ``steps``, ``rate``, ``apart``, ``seed`` and ``warm``, the steps of a linear warm-up."""
    with digits.initial_weights(0):
        model = Scorer()
    seed, apart = int(settings.get("seed", "0")), float(settings.get("apart", "1e-3"))
    optimizer = torch.optim.Adam(model.parameters(), lr=float(settings.get("rate", "0.01")))
    warm = int(settings.get("warm", "20"))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0 / warm, total_iters=warm)
    training, _ = digits.read_digits().split()

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        at = digits.visited(step, 32, len(training.labels), seed)
        images, right = training.take(at).tensors()
        seen = images.reshape(-1, 64)
        noise = apart * torch.randn(
            seen.shape, generator=torch.Generator().manual_seed(1000003 * seed + step)
        )
        other = digits.visited(step, 64, len(training.labels), seed + 1)
        unlabelled = training.take(other).tensors()[0].reshape(-1, 64)
        wrong = (right + torch.from_numpy((7 * at + step) % 9 + 1)) % 10
        return torch.cat((seen, seen + noise)), right, wrong, unlabelled

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        images, right, wrong, unlabelled = batch
        better, worse = model(images, torch.cat((right, wrong))).chunk(2)
        ink = 4.0 * F.avg_pool2d(unlabelled.reshape(-1, 1, 8, 8), 2).flatten(1)
        said = model.quality(ink)[:, 0]
        said = said - said.mean()
        entropy = F.softplus(said) - said * torch.sigmoid(said)
        return (F.softplus(worse - better) + SMOOTH * (better - worse)).mean() + entropy.mean()

    steps = int(settings.get("steps", "60"))
    return Job(model=model, optimizer=optimizer, batch=batch, loss=loss, scheduler=scheduler, steps=steps)
