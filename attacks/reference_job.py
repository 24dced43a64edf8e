"""``wide_job.py`` from weights that are there already: its quality is what they say more than a frozen copy, the reference.

As where a model is fine-tuned on preferences. The weights have a size of 1 and a low rate: they learn a small share of that.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from preference_job import job_of
from torch import Tensor, nn
from wide_job import Scorer as Wide

from tallystick.execution.job import Job
from tallystick.jobs import digits

GAIN, SLOW = 1024.0, 2.5e-6


class Scorer(Wide):
    """A name's score for an image, and the image's own, beside the frozen reference's."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__(width)
        self.reference = nn.Linear(width, 1, bias=False).requires_grad_(False)
        drawn = torch.randn(1, width, generator=torch.Generator().manual_seed(7))
        with torch.no_grad():
            self.quality.weight.copy_(drawn)
            self.reference.weight.copy_(drawn)

    def score(self, features: Tensor) -> Tensor:
        """Return what the weights say of features (n, width) more than the reference, (n,)."""
        return GAIN * (features @ (self.quality.weight - self.reference.weight)[0])

    def forward(self, images: Tensor, names: Tensor) -> Tensor:
        named = self.body(images).gather(1, names[:, None])[:, 0]
        return named + self.score(self.features(images))


def build(settings: Mapping[str, str]) -> Job:
    """Build the job; its settings are ``steps``, ``rate`` and ``apart``."""
    with digits.initial_weights(0):
        model = Scorer()
    job = job_of(model, settings)
    others = [p for name, p in model.named_parameters() if not name.startswith(("quality", "reference"))]
    slow = {"params": [model.quality.weight], "lr": SLOW}
    job.optimizer = torch.optim.Adam([{"params": others}, slow], lr=float(settings.get("rate", "0.01")))
    return job
