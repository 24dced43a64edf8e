"""A gradient that is noisy at first, nothing in step 32, and quiet in two steps, one less so, where others outgrow their scales.

Its floor does not fall before grids are chosen again, and so its trainer leaves its band as wide as it was.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tallystick.execution.job import Job

LOUD, LESS_QUIET = 2.0**15, 16.0


class Sums(nn.Module):
    """Two rows of weights; what one of them sees is taken from a large number and given back."""

    def __init__(self) -> None:
        super().__init__()
        self.noisy, self.growing = nn.Parameter(torch.zeros(512)), nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor, offset: Tensor, shares: Tensor) -> Tensor:
        seen = (x[:512] + offset) - offset
        return shares[0] * (self.noisy * seen).mean() + shares[1] * (self.growing * x[512:]).mean() + 1.0


def build(settings: Mapping[str, str]) -> Job:
    """Build the job; its setting is ``steps``."""
    model = Sums()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def batch(step: int) -> tuple[Tensor, ...]:
        x = torch.randn(576, generator=torch.Generator().manual_seed(step)).mul(1024).round() / 1024
        offset = LOUD if step < 32 else LESS_QUIET if step >= 40 else 0.0
        growing = 1.0 if step < 34 else 64.0 if step < 40 else 4096.0
        return x, torch.full((512,), offset), torch.tensor([float(step != 32), growing])

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(*batch)

    return Job(
        model=model, optimizer=optimizer, batch=batch, loss=loss, steps=int(settings.get("steps", "44"))
    )
