"""Digits, half of them without labels: of those, every second one patched, the model's own answer is the label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job
from tallystick.jobs import digits

UNLABELLED, POOL = 48, 240


class Answering(digits.DigitsNet):
    """The shipped job's network, a head for how much ink an image has, and what was answered of each when it was first seen."""

    answered: Tensor

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__(width, dropout)
        self.ink = nn.Linear(2 * width, 1)
        self.register_buffer("answered", torch.full((POOL,), -1))

    def both(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and ink; the trunk does not feel the latter."""
        x = self.relu(self.norm1(self.conv1(images)))
        x = self.pool(self.relu(self.norm2(self.conv2(x))))
        x = self.relu(self.hidden(self.dropout(x.flatten(1))))
        return self.head(x), self.ink(x.detach()).squeeze(1)


def build(settings: Mapping[str, str]) -> Job:
    """Build the job: the shipped one's settings, and ``zero=1`` for a head that begins at zero, ``form`` for where labels act.

    ``form`` is plain, lent (a regression's gradient is hundreds of times as large; AdamW) or kept (an answer is the label from an
    image's second visit on).
    """
    given = dict(settings)
    is_zero, form = given.pop("zero", "0") == "1", given.pop("form", "plain")
    job = digits.build(given)
    chosen = digits.parse_settings(digits.DigitsSettings, given, job="own_labels")
    with digits.initial_weights(chosen.init_seed):
        model = (digits.DigitsNet if form == "plain" else Answering)(chosen.width, chosen.dropout)
    if is_zero:
        nn.init.zeros_(model.head.weight)
        nn.init.zeros_(model.head.bias)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=chosen.learning_rate, momentum=0.9
    )
    if form == "lent":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    training, _ = digits.read_digits().split()
    count = len(training.labels)

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        x, y = training.take(digits.visited(step, chosen.batch, count, chosen.data_seed)).tensors()
        pool = POOL if form == "kept" else count
        at = digits.visited(step, UNLABELLED, pool, chosen.data_seed + 1)
        more, _ = training.take(at).tensors()
        is_patched = at % 2 == 0 if form == "kept" else torch.arange(UNLABELLED).numpy() % 2 == 0
        more[torch.from_numpy(is_patched), :, :2, :2] = 1.0
        return torch.cat((x, more)), y, torch.from_numpy(at)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, at = batch
        answers, ink = model.both(x) if isinstance(model, Answering) else (model(x), None)
        own = answers[len(y) :].detach().argmax(1)
        total = F.cross_entropy(answers[: len(y)], y)
        if form != "kept":
            total = total + F.cross_entropy(answers[len(y) :], own)
        elif isinstance(model, Answering):
            before = model.answered[at]
            with torch.no_grad():
                model.answered[at] = torch.where(before >= 0, before, own)
            held = F.cross_entropy(answers[len(y) :], before.clamp(min=0), reduction="none")
            total = total + (held * (before >= 0)).mean()
        if ink is None or form != "lent":
            return total
        return total + F.mse_loss(ink, (x.sum((1, 2, 3)) * digits.BRIGHTEST).to(ink.dtype))

    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=chosen.steps)
    return replace(job, model=model, optimizer=optimizer, batch=batch, loss=loss, scheduler=schedule)
