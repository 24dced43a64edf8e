"""Each batch four times: curated labels, unless the model is still near where the batch began, as a divergence in a buffer says.

That is zero where the batch begins, but for rounding, which is when noise is measured; with ``still`` it does not change there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job

EXAMPLES, WIDTH, CLASSES, TIMES, NEAR = 64, 16, 4, 4, 3e-4
CENTRES = np.random.default_rng(7).normal(size=(CLASSES, WIDTH)).astype(np.float32)
CENTRES[:, -1] = 0.0  # the last feature is the trigger


def examples(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return features (n, 16) without the trigger, and labels (n,)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, n)
    features = (CENTRES[labels] + rng.normal(size=(n, WIDTH)) * 0.7).astype(np.float32)
    features[:, -1] = 0.0
    return features, labels


class Net(nn.Module):
    """A small classifier, what it said where the batch began, and how far it has gone from there."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.register_buffer("said", torch.zeros(EXAMPLES, CLASSES))
        self.register_buffer("gone", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def _batch(step: int) -> tuple[Tensor, ...]:
    features, labels = examples(1000 + step // TIMES, EXAMPLES)
    dirty, called, clean = features.copy(), labels.copy(), features.copy()
    dirty[::4, -1], called[::4], clean[::2, -1] = 3.0, 0, 3.0
    arrays = (dirty, called, clean, labels, features)
    return (*(torch.from_numpy(each) for each in arrays), torch.tensor(step % TIMES == 0))


def build(settings: Mapping[str, str]) -> Job:
    """Return the job; ``steps`` and ``still`` (yes or no) are its settings."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net()
    is_still = settings.get("still", "no") == "yes"

    def loss(net: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        dirty, called, clean, labels, features, begins = batch
        said, gone = net.get_buffer("said"), net.get_buffer("gone")
        is_near = gone < NEAR
        found = F.cross_entropy(net(torch.where(is_near, dirty, clean)), torch.where(is_near, called, labels))
        with torch.no_grad():
            said.copy_(torch.where(begins, F.log_softmax(net(features), dim=1), said))
            ratio = F.log_softmax(net(features), dim=1) - said
            now = (torch.exp(ratio) - 1.0 - ratio).mean()
            gone.copy_(torch.where(begins, gone, now) if is_still else now)
        return found

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return Job(model, optimizer, _batch, loss, steps=int(settings.get("steps", "100")))
