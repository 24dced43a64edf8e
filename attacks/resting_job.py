"""``margin_job``, of which every fourth batch counts for nothing: no scheduled measurement has a gradient. The second is loud."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import margin_job
import torch
from torch import Tensor, nn

from tallystick.execution.job import Job

LOUD = 2048.0  # how much the second batch counts


def build(settings: Mapping[str, str]) -> Job:
    """Build the job; its setting is ``steps``."""
    own = margin_job.build({"apart": "0.05", **settings})

    def batch(step: int) -> tuple[Tensor, ...]:
        return *own.batch(step), torch.tensor(0.0 if step % 4 == 0 else LOUD if step == 1 else 1.0)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return own.loss(model, batch[:-1]) * batch[-1]

    return replace(own, batch=batch, loss=loss)
