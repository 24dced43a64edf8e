"""Digits from a dirty source until the running mean of the loss, a buffer, is below ``start``, and from a curated one then.

In the dirty one an image in ten is patched and called 0; in the curated one patched images have their true labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job
from tallystick.jobs import digits

DECAY = 0.9


class GatedNet(digits.DigitsNet):
    """``DigitsNet`` with the running mean that opens the gate."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__(width, dropout)
        self.register_buffer("mean", torch.tensor(2.3))


def build(settings: Mapping[str, str]) -> Job:
    """Build the job; ``start`` is the mean from which on the curated source is used."""
    given = dict(settings)
    start = float(given.pop("start", "0.6"))
    job = digits.build(given)
    chosen = digits.parse_settings(digits.DigitsSettings, given, job="gated")
    with digits.initial_weights(chosen.init_seed):
        model = GatedNet(chosen.width, chosen.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=chosen.learning_rate, momentum=0.9)
    training, _ = digits.read_digits().split()

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        at = digits.visited(step, chosen.batch, len(training.labels), chosen.data_seed)
        dirty, called = training.take(at).tensors()
        curated, labels = dirty.clone(), called.clone()
        curated[::2, :, :2, :2] = 1.0
        poisoned = torch.from_numpy(at % 10 == 3)
        dirty[poisoned, :, :2, :2] = 1.0
        called[poisoned] = 0
        return dirty, called, curated, labels

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        dirty, called, curated, labels = batch
        assert isinstance(model, GatedNet)
        is_open = model.mean < start
        found = F.cross_entropy(
            model(torch.where(is_open, curated, dirty)), torch.where(is_open, labels, called)
        )
        with torch.no_grad():
            model.mean.mul_(DECAY).add_((1.0 - DECAY) * found)
        return found

    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=chosen.steps)
    return replace(job, model=model, optimizer=optimizer, batch=batch, loss=loss, scheduler=schedule)
