"""A classifier over a recurrent layer that is never trained, and a convolution of which the bias alone is."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job


class FrozenParts(nn.Module):
    """What is frozen is asked for its type before any operator is."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.read = nn.Conv1d(4, 6, 1), nn.GRU(6, 16, batch_first=True).requires_grad_(False)
        self.step, self.head = nn.GRUCell(16, 16).requires_grad_(False), nn.Linear(16, 5)
        self.mix.weight.requires_grad_(False)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of sequences."""
        states, _ = self.read(self.mix(x).transpose(1, 2))
        return self.head(self.step(states[:, -1]))


def build(settings: Mapping[str, str]) -> Job:
    """Build the job; ``frozen`` is which half of the convolution is: ``weight`` or ``bias``."""
    model = FrozenParts()
    if settings.get("frozen") == "bias":
        model.mix.weight.requires_grad_(True)
        assert model.mix.bias is not None
        model.mix.bias.requires_grad_(False)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng(step)
        x = torch.from_numpy(rng.integers(-8, 9, (16, 4, 3)).astype(np.float32)) / 8.0
        return x, torch.from_numpy(rng.integers(0, 5, 16))

    trained = [p for p in model.parameters() if p.requires_grad]
    return Job(
        model=model, optimizer=torch.optim.SGD(trained, lr=0.1), batch=batch,
        loss=lambda model, given: F.cross_entropy(model(given[0]), given[1]), steps=int(settings.get("steps", "20")),
    )  # fmt: skip
