"""A mixture of experts: each token goes to the two experts that a gate ranks first, and comes back by ``index_add_``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job

WORDS, WIDTH, LENGTH, EXPERTS, TAKEN = 32, 24, 12, 4, 2


class Experts(nn.Module):
    """Tokens (n, width), each sent to ``TAKEN`` experts and added up with the gate's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(F.softmax(self.gate(x), dim=-1), TAKEN, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == number)
            found = expert(x[token]) * weights[token, rank].unsqueeze(1)
            out.index_add_(0, token, found.to(out.dtype))  # under autocast experts answer in bfloat16
        return out


class Model(nn.Module):
    """Logits (n, length, words) of the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        past = x.cumsum(dim=1) / torch.arange(1, LENGTH + 1, device=x.device).unsqueeze(1)
        x = x + past
        x = x + self.experts(self.norm(x).reshape(-1, WIDTH)).reshape(x.shape)
        return self.head(x)


def _batch(step: int) -> Tensor:
    rng = np.random.default_rng(step)
    start = rng.integers(0, WORDS, (16, 1))
    return torch.from_numpy((start + np.arange(LENGTH + 1) * rng.integers(1, 4, (16, 1))) % WORDS)


def _loss(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def build(settings: Mapping[str, str]) -> Job:
    """Return the job; settings are ``steps`` and ``seed``."""
    with torch.random.fork_rng():
        torch.manual_seed(int(settings.get("seed", "0")))
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return Job(
        model=model, optimizer=optimizer, batch=_batch, loss=_loss, steps=int(settings.get("steps", "100"))
    )
