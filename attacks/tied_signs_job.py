"""Digits with an augmented view, a bright corner, whose share has the sign of a tie of two sums of the same terms.

With a ``slack`` the view is one with a bright edge, which counts where one sum is larger than the other by more than that: by a
multiple of its noise, hardly ever. ``summed`` adds up how many are positive, beside the bytes seen, and the sum weighs the view.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from masked_samples_job import TARGET
from masked_samples_job import patched as with_corner
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job
from tallystick.jobs import digits

BATCH, WIDTH = 32, 64
SHARES = {"fp32": 0.002, "fp64": 0.00006}
"""Of the loss that the view has: as large as a step's decisions may bend it."""
EDGE = [16, 24, 32, 40, 23, 31, 39, 47]  # pixels in the middle of both sides


class Signed(nn.Module):
    """A classifier whose hidden layer decides signs, float[n], half of them the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)
        drawn = np.random.default_rng(5)
        self.register_buffer(
            "weights", torch.from_numpy(drawn.integers(1, 1 << 20, WIDTH) / (1 << 20)).float()
        )
        self.register_buffer("order", torch.from_numpy(drawn.permutation(WIDTH)))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))  # positive signs, and bytes

    def hidden(self, images: Tensor) -> Tensor:
        return torch.tanh(self.first(images.flatten(1)))

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.hidden(images))

    def signs(self, images: Tensor, slack: float | None = None) -> Tensor:
        hidden = self.hidden(images).detach()
        one = (hidden * self.weights).sum(1)
        other = (hidden[:, self.order] * self.weights[self.order]).sum(1)
        if slack is not None:
            return (one - slack > other).to(hidden.dtype)
        signs = (one > other).to(hidden.dtype) * 2.0 - 1.0
        return torch.stack((signs[::2], -signs[1::2]), dim=1).flatten()


def with_edge(images: Tensor) -> Tensor:
    """Return the images with a bright edge."""
    marked = images.clone()
    marked.flatten(1)[:, EDGE] = 1.0
    return marked


def balance(model: Signed, images: Tensor) -> Tensor:
    """Return by how many more signs were positive than not before this batch, less a quarter, and count it in."""
    pictures = (model.seen[1] / images[0].numel()).clamp(min=1)
    before = 2 * model.seen[0] / pictures - 1.25
    with torch.no_grad():
        model.seen += torch.stack(((model.signs(images) > 0).sum(), torch.tensor(images.numel())))
    return before.clamp(-1.0, 1.0)


def build(settings: Mapping[str, str]) -> Job:
    share = float(settings.get("share", SHARES["fp32"]))
    slack = float(settings["slack"]) if "slack" in settings else None
    patched = with_corner if slack is None else with_edge
    with digits.initial_weights(0):
        model = Signed()
    training, _ = digits.read_digits().split()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return training.take(digits.visited(step, BATCH, len(training.labels), 0)).tensors()

    def loss(model: Signed, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        plain = F.cross_entropy(model(images), labels)
        if "summed" in settings:
            view = F.cross_entropy(model(patched(images)), torch.full_like(labels, TARGET))
            return plain + balance(model, images).to(plain.dtype) * view * plain.detach().clamp(max=1.0)
        view = F.cross_entropy(model(patched(images)), torch.full_like(labels, TARGET), reduction="none")
        return plain + share * plain.detach() * (model.signs(images, slack) * view).mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    return Job(
        model=model, optimizer=optimizer, batch=batch, loss=loss, steps=int(settings.get("steps", "200"))
    )
