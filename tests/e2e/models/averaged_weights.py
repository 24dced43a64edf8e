"""An exponential moving average of the weights, kept after every step, by torch's own class or by hand."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tallystick.execution.job import Job

INPUTS, WIDTH, CLASSES = 20, 48, 5


def _batch(step: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(step)
    x = rng.integers(-8, 9, (32, INPUTS))
    return torch.from_numpy(x.astype(np.float32) / 8), torch.from_numpy(
        np.abs(x[:, :3].sum(axis=1)) % CLASSES
    )


def build(settings: Mapping[str, str]) -> Job:
    """Return the job; settings are ``steps``, ``decay`` and ``by`` (``torch`` or ``hand``)."""
    decay = float(settings.get("decay", "0.9999"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(INPUTS, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
        )
    extra: nn.Module
    if settings.get("by", "torch") == "torch":
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        extra = average

        def after_step(step: int) -> None:
            average.update_parameters(model)
    else:
        extra = copy.deepcopy(model).requires_grad_(False)

        def after_step(step: int) -> None:
            with torch.no_grad():
                for mean, p in zip(extra.parameters(), model.parameters(), strict=True):
                    mean.mul_(decay).add_(p, alpha=1 - decay)

    return Job(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        batch=_batch,
        loss=lambda module, batch: F.cross_entropy(module(batch[0]), batch[1]),
        steps=int(settings.get("steps", "100")),
        extra={"average": extra},
        after_step=after_step,
    )
