"""An encoder with T5's relative positions: distances go through a logarithm into whole-numbered buckets.

With ``model=transformers`` it is transformers' own T5 encoder, at a tiny size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job

WORDS, WIDTH, HEADS, LENGTH, BUCKETS, FARTHEST = 24, 32, 4, 48, 16, 32


def buckets(length: int) -> Tensor:
    """Return T5's bucket of each pair of positions, int64 (length, length): near ones exact, far ones by logarithm."""
    at = torch.arange(length)
    away = at[None, :] - at[:, None]
    half = BUCKETS // 2
    bucket = (away > 0).long() * half
    away = away.abs()
    exact = half // 2
    far = torch.log(away.float() / exact) / math.log(FARTHEST / exact) * (half - exact)
    far = torch.min(exact + far.to(torch.long), torch.full_like(away, half - 1))
    return bucket + torch.where(away < exact, away, far)


class Attention(nn.Module):
    """Self-attention of (n, length, width) with a bias learned for each bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.bias = nn.Embedding(BUCKETS, HEADS)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = self.mixed(x).reshape(n, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) + self.bias(buckets(length).to(x.device)).permute(2, 0, 1)
        mixed = F.softmax(scores, dim=-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(n, length, WIDTH))


class Encoder(nn.Module):
    """Logits (n, length, words) of the words that were masked."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.attention = Attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        return self.head(self.norm(x + self.attention(x)))


def _transformers_encoder() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=HEADS, dropout_rate=0.1,
        relative_attention_num_buckets=BUCKETS, relative_attention_max_distance=FARTHEST,
    )  # fmt: skip

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = T5EncoderModel(config)
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, words: Tensor) -> Tensor:
            return self.head(self.encoder(input_ids=words).last_hidden_state)

    return Model()


def _batch(step: int) -> tuple[Tensor, Tensor]:
    """Words that repeat after a period, every fifth of them hidden behind word 0."""
    rng = np.random.default_rng(step)
    period = rng.integers(3, 9, (8, 1))
    words = 1 + (np.arange(LENGTH) % period * rng.integers(1, 5, (8, 1))) % (WORDS - 1)
    shown = np.where(rng.integers(0, 5, words.shape) == 0, 0, words)
    return torch.from_numpy(shown), torch.from_numpy(words)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    shown, words = batch
    return F.cross_entropy(model(shown).flatten(0, 1), words.flatten())


def build(settings: Mapping[str, str]) -> Job:
    """Return the job; settings are ``steps`` and ``model`` (``own`` or ``transformers``)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _transformers_encoder() if settings.get("model") == "transformers" else Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return Job(
        model=model, optimizer=optimizer, batch=_batch, loss=_loss, steps=int(settings.get("steps", "100"))
    )
