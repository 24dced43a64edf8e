"""``preference_job.py`` whose every fourth batch is scored by the names alone: the quality has no gradient but zero there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from preference_job import SMOOTH, Scorer, job_of
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job
from tallystick.jobs import digits

EVERY = 4


def build(settings: Mapping[str, str]) -> Job:
    """Build the job; its settings are those of ``preference_job.py``."""
    with digits.initial_weights(0):
        model = Scorer()
    with torch.no_grad():
        model.quality.weight[0, 1:3] = float(settings.get("liked", "0"))
    job = job_of(model, settings)
    pairs = job.batch

    def batch(step: int) -> tuple[Tensor, ...]:
        return *pairs(step), torch.tensor(0.0 if step % EVERY == 0 else 1.0)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        images, right, wrong, share = batch
        ink = 4.0 * F.avg_pool2d(images.reshape(-1, 1, 8, 8), 2).flatten(1)
        named = model.body(images).gather(1, torch.cat((right, wrong))[:, None])[:, 0]
        better, worse = (named + share * model.quality(ink)[:, 0]).chunk(2)
        return (F.softplus(worse - better) + SMOOTH * (better - worse)).mean()

    job.batch, job.loss = batch, loss
    return job
