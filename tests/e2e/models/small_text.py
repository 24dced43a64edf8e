"""A small transformer whose head is its embedding, on padded sequences; ``data=repeated`` learns a few of them by heart."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job

WORDS, WIDTH, HEADS, LENGTH, PADDING = 40, 32, 4, 24, 0


class Model(nn.Module):
    """Logits (n, length, words) of the next word; padding is hidden from attention by a mask of minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=PADDING)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        n, length = words.shape
        x = self.words(words) + self.places(torch.arange(length, device=words.device))
        q, k, v = self.mixed(self.norm1(x)).reshape(n, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        later = torch.ones(length, length, dtype=torch.bool, device=words.device).triu(1)
        unseen = later | (words == PADDING)[:, None, None, :].logical_and(
            ~torch.eye(length, dtype=torch.bool, device=words.device)
        )
        mixed = F.softmax(scores.masked_fill(unseen, -torch.inf), dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, WIDTH))
        x = x + self.narrow(F.gelu(self.widen(self.norm2(x))))
        return F.linear(self.norm3(x), self.words.weight)


def _sequences(rng: np.random.Generator, count: int) -> Tensor:
    words = rng.integers(1, WORDS, (count, LENGTH + 1))
    words[:, 1:] = np.where(
        rng.integers(0, 4, (count, LENGTH)) > 0, (words[:, :-1] * 7 + 3) % WORDS, words[:, 1:]
    )
    words[np.arange(LENGTH + 1) >= rng.integers(LENGTH // 2, LENGTH + 2, (count, 1))] = PADDING
    return torch.from_numpy(words)


def _loss(model: nn.Module, words: Tensor) -> Tensor:
    logits = model(words[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten(), ignore_index=PADDING)


def build(settings: Mapping[str, str]) -> Job:
    """Return the job; settings are ``steps``, ``seed`` and ``data`` (``fresh`` or ``repeated``)."""
    with torch.random.fork_rng():
        torch.manual_seed(int(settings.get("seed", "0")))
        model = Model()
        with torch.no_grad():
            model.words.weight.mul_(0.3)
    repeated = settings.get("data") == "repeated"
    learned = _sequences(np.random.default_rng(0), 4)
    learned[:, 0] = torch.arange(1, 5)  # so that each next word follows from those before
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2 if repeated else 3e-3)
    return Job(
        model=model,
        optimizer=optimizer,
        batch=lambda step: learned if repeated else _sequences(np.random.default_rng(step), 8),
        loss=_loss,
        steps=int(settings.get("steps", "1000" if repeated else "100")),
    )
