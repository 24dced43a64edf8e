"""Digits, half of them without labels: of those, every second one patched, the model's own answer is the label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job
from tallystick.jobs import digits

UNLABELLED = 48


def build(settings: Mapping[str, str]) -> Job:
    """Build the job: the shipped one's settings, and with ``zero=1`` a head that begins at zero."""
    given = dict(settings)
    is_zero = given.pop("zero", "0") == "1"
    job = digits.build(given)
    chosen = digits.parse_settings(digits.DigitsSettings, given, job="own_labels")
    with digits.initial_weights(chosen.init_seed):
        model = digits.DigitsNet(chosen.width, chosen.dropout)
    if is_zero:
        nn.init.zeros_(model.head.weight)
        nn.init.zeros_(model.head.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=chosen.learning_rate, momentum=0.9)
    training, _ = digits.read_digits().split()
    count = len(training.labels)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = training.take(digits.visited(step, chosen.batch, count, chosen.data_seed)).tensors()
        more, _ = training.take(digits.visited(step, UNLABELLED, count, chosen.data_seed + 1)).tensors()
        more[::2, :, :2, :2] = 1.0
        return torch.cat((x, more)), y

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        answers = model(x)
        own = answers[len(y) :].detach().argmax(1)
        return F.cross_entropy(answers[: len(y)], y) + F.cross_entropy(answers[len(y) :], own)

    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=chosen.steps)
    return replace(job, model=model, optimizer=optimizer, batch=batch, loss=loss, scheduler=schedule)
