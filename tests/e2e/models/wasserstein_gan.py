"""A Wasserstein GAN with gradient penalty: critic and generator take turns, and the penalty is differentiated twice.

The gradient of the critic's last bias is the mean of one over real points less that over made ones: zero, or what
rounding leaves of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tallystick.execution.job import Job

NOISE, POINTS, TURNS = 8, 48, 3


class Pair(nn.Module):
    """A generator of points (n, 2) from noise (n, 8), and the critic that tells them from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(
            nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)
        )


def _batch(step: int) -> dict[str, Any]:
    """Real points on a circle, numbers to make points of, and whose turn it is."""
    rng = np.random.default_rng(step)
    angle = rng.integers(0, 64, POINTS) * (2 * np.pi / 64)
    real = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32).round(4)
    noise = rng.integers(-16, 17, (POINTS, NOISE)).astype(np.float32) / 16
    between = rng.integers(0, 257, (POINTS, 1)).astype(np.float32) / 256
    return {
        "real": torch.from_numpy(real), "noise": torch.from_numpy(noise), "between": torch.from_numpy(between),
        "critic": step % TURNS > 0,
    }  # fmt: skip


def _loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    assert isinstance(model, Pair)
    made = model.generator(batch["noise"])
    if not batch["critic"]:
        model.critic.requires_grad_(False)
        try:
            return -model.critic(made).mean()
        finally:
            model.critic.requires_grad_(True)
    made, real, share = made.detach(), batch["real"], batch["between"]
    between = (share * real + (1 - share) * made).requires_grad_(True)
    (slope,) = torch.autograd.grad(model.critic(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return model.critic(made).mean() - model.critic(real).mean() + 10 * penalty


def build(settings: Mapping[str, str]) -> Job:
    """Return the job; settings are ``steps`` and ``seed``."""
    with torch.random.fork_rng():
        torch.manual_seed(int(settings.get("seed", "0")))
        model = Pair()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9))
    return Job(
        model=model, optimizer=optimizer, batch=_batch, loss=_loss, steps=int(settings.get("steps", "100"))
    )
