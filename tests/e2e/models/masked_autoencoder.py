"""A masked autoencoder: hidden patches are replaced by one learned token, ``x[mask] = token``, and predicted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job

PATCHES, PIXELS, WIDTH = 16, 9, 32


class Model(nn.Module):
    """Predicted pixels (n, patches, pixels) of images of that shape, of which a mask (n, patches) hides some patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(PIXELS, WIDTH)
        self.token = nn.Parameter(torch.zeros(WIDTH))
        self.place = nn.Parameter(0.02 * torch.randn(PATCHES, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True)
        self.pixels = nn.Linear(WIDTH, PIXELS)

    def forward(self, images: Tensor, hidden: Tensor) -> Tensor:
        x = self.patch(images)
        x[hidden] = self.token.to(x.dtype)
        return self.pixels(self.block(x + self.place))


def _batch(step: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(step)
    slope = rng.integers(-3, 4, (16, 2))
    patch, pixel = np.divmod(np.arange(PATCHES * PIXELS), PIXELS)
    images = (slope[:, :1] * patch + slope[:, 1:] * pixel).reshape(16, PATCHES, PIXELS) % 8
    hidden = rng.integers(0, 4, (16, PATCHES)) > 0
    return torch.from_numpy(images.astype(np.float32) / 8), torch.from_numpy(hidden)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, hidden = batch
    return F.mse_loss(model(images, hidden)[hidden], images[hidden])


def build(settings: Mapping[str, str]) -> Job:
    """Return the job; ``steps`` is its only setting."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Job(
        model=model, optimizer=optimizer, batch=_batch, loss=_loss, steps=int(settings.get("steps", "100"))
    )
