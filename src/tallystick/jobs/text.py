"""A character-level GPT on English text that comes with CPython: attention, dropout and AdamW in a minute.

Pre-norm transformer with GELU, learned positions, dropout, an output head tied to the token embedding,
and separate query, key and value projections: the key's bias has a gradient that is zero in theory
and noise in practice. AdamW without weight decay on biases and norms, linear warm-up and cosine, gradient
clipping, two micro-batches a step. 1,012,096 parameters at the default size.

The text is the language reference as ``pydoc`` shows it (``pydoc_data.topics``, some 465,000 characters); it
changes with the version of Python, and the data set's digest with it. Its last tenth is held out.

Settings, all optional:
    steps=400              optimizer steps, and the length of the schedule
    batch=16               blocks a step, over all micro-batches
    accumulation=2         micro-batches a step; divides batch
    block=64               characters a block
    width=128              of the residual stream; the feed-forward layers are four times as wide
    layers=5
    heads=4                divides width
    dropout=0.1            of the embedding, the attention weights and each residual branch
    learning_rate=0.003    at the end of the warm-up
    weight_decay=0.1       of matrices; vectors have none
    warmup_percent=10      of the steps
    init_seed=0            torch's seed for the initial weights
    data_seed=0            Philox's seed for the choice of blocks
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention

from tallystick.errors import InvalidInput
from tallystick.execution.job import Job
from tallystick.jobs.digits import (
    LARGEST_SEED,
    MOST_STEPS,
    initial_weights,
    parse_settings,
    real,
    scoring,
    whole,
)
from tallystick.numerics.random import randint, stream_key

if TYPE_CHECKING:
    import numpy.typing as npt

VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))  # a character's position is its token
OTHER = "?"
HELD_OUT_TENTHS = 1
SCORED_BLOCKS = 64
CLIP_NORM = 1.0
BETAS = (0.9, 0.95)
INITIAL_DEVIATION = (
    0.02  # Radford et al., "Language models are unsupervised multitask learners", 2019, and its code
)
LOWEST_RATE = 0.1  # of the peak, at the end of the schedule
BLOCKS = "tallystick.jobs.text/blocks"


@dataclass(frozen=True)
class TextSettings:
    """The settings of this job; the module's docstring says what they are."""

    steps: int = whole(400, 1, MOST_STEPS)
    batch: int = whole(16, 1, 4096)
    accumulation: int = whole(2, 1, 4096)
    block: int = whole(64, 1, 4096)
    width: int = whole(128, 1, 4096)
    layers: int = whole(5, 1, 128)
    heads: int = whole(4, 1, 128)
    dropout: float = real(0.1, 0.0, 0.9)
    learning_rate: float = real(3e-3, 0.0, 1.0)
    weight_decay: float = real(0.1, 0.0, 1.0)
    warmup_percent: int = whole(10, 0, 100)
    init_seed: int = whole(0, 0, LARGEST_SEED)
    data_seed: int = whole(0, 0, LARGEST_SEED)


def check_divides(job: str, **settings: int) -> None:
    """Accept two settings of which the first divides the second.

    Raises:
        InvalidInput: it does not.
    """
    (part, by), (total, size) = settings.items()
    if size % by:
        raise InvalidInput(
            f"job {job}: setting {part} must divide {total}, got {part}={by} and {total}={size}"
        )


@dataclass(frozen=True)
class Corpus:
    """The text, one ASCII byte a character: newline and the printable characters."""

    text: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the whole text, hexadecimal."""
        return hashlib.sha256(self.text).hexdigest()

    def split(self) -> tuple[bytes, bytes]:
        """Return what is trained on and what is held out: the last tenth."""
        cut = len(self.text) * (10 - HELD_OUT_TENTHS) // 10
        return self.text[:cut], self.text[cut:]


@functools.cache
def read_corpus() -> Corpus:
    """Return CPython's help topics in the order of their names, read once per process.

    Characters outside ``VOCABULARY`` become question marks.

    Raises:
        InvalidInput: this Python was installed without ``pydoc_data``.

    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise InvalidInput(
            "job text: the text is in pydoc_data.topics, which this Python does not have"
        ) from error
    allowed = frozenset(VOCABULARY)
    joined = "".join(topics[name] for name in sorted(topics))
    return Corpus("".join(c if c in allowed else OTHER for c in joined).encode("ascii"))


def tokens_of(text: bytes) -> npt.NDArray[np.int64]:
    """Return the positions in ``VOCABULARY`` of the characters of ``text``."""
    table = np.zeros(128, dtype=np.int64)
    table[list(VOCABULARY.encode("ascii"))] = np.arange(len(VOCABULARY))
    return table[np.frombuffer(text, dtype=np.uint8)]


def drawn_blocks(
    tokens: npt.NDArray[np.int64], step: int, batch: int, length: int, *, seed: int, purpose: str
) -> Tensor:
    """Return the ``batch`` blocks of a step, (batch, length), int64; every place is as likely as any other.

    Raises:
        InvalidInput: a negative step, or a block longer than the text.

    """
    starts = randint(stream_key(seed, purpose, step, 0, 0, 0), 0, batch, 0, len(tokens) - length + 1)
    return _blocks_at(tokens, starts, length)


def spread_blocks(tokens: npt.NDArray[np.int64], length: int) -> Tensor:
    """Return ``SCORED_BLOCKS`` blocks (n, length), int64, from evenly spaced places of ``tokens``."""
    starts = np.arange(SCORED_BLOCKS) * (len(tokens) - length) // (SCORED_BLOCKS - 1)
    return _blocks_at(tokens, starts, length)


class Attention(nn.Module):
    """Causal self-attention over (n, length, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixed values, projected; same shape as ``x``."""
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a feed-forward network, each on a normalised copy and added to the residual stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.feed_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this layer, (n, length, width)."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.contract(self.gelu(self.expand(self.feed_norm(x)))))


class TextNet(nn.Module):
    """Logits (n, length, 96) of the next character, from tokens (n, length) with length up to ``block``."""

    def __init__(self, block: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(len(VOCABULARY), width)
        self.position = nn.Embedding(block, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                ends_branch = name.endswith(("attention.output.weight", "contract.weight"))
                deviation = INITIAL_DEVIATION / math.sqrt(2 * layers) if ends_branch else INITIAL_DEVIATION
                nn.init.normal_(parameter, std=deviation)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(places))
        for layer in self.layers:
            x = layer(x)
        return linear(self.norm(x), self.token.weight)


def adamw(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW with two groups: matrices, which decay, and vectors, which do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS)


def warmup_cosine(step: int, steps: int, warmup: int) -> float:
    """Return the factor of the peak rate at ``step``: up to 1 at ``warmup``, down to a tenth at ``steps``."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return LOWEST_RATE + (1.0 - LOWEST_RATE) * 0.5 * (1.0 + math.cos(math.pi * progress))


def warmup_cosine_schedule(
    optimizer: torch.optim.Optimizer, steps: int, warmup_percent: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the scheduler that multiplies every group's rate by ``warmup_cosine``."""
    factor = functools.partial(warmup_cosine, steps=steps, warmup=steps * warmup_percent // 100)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def build(settings: Mapping[str, str]) -> Job:
    """Return the job.

    Raises:
        InvalidInput: an unknown setting, a value out of range, or a Python without the text.

    """
    chosen = parse_settings(TextSettings, settings, job="text")
    check_divides("text", accumulation=chosen.accumulation, batch=chosen.batch)
    check_divides("text", heads=chosen.heads, width=chosen.width)
    corpus = read_corpus()
    training, held_out = map(tokens_of, corpus.split())
    with initial_weights(chosen.init_seed):
        model = TextNet(chosen.block, chosen.width, chosen.layers, chosen.heads, chosen.dropout)
    optimizer = adamw(model, chosen.learning_rate, chosen.weight_decay)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return _shifted(
            drawn_blocks(
                training, step, chosen.batch, chosen.block + 1, seed=chosen.data_seed, purpose=BLOCKS
            )
        )

    return Job(
        model=model,
        optimizer=optimizer,
        batch=batch,
        loss=_loss,
        steps=chosen.steps,
        scheduler=warmup_cosine_schedule(optimizer, chosen.steps, chosen.warmup_percent),
        accumulation=chosen.accumulation,
        clip_norm=CLIP_NORM,
        dataset_digest=corpus.digest,
        evaluate=functools.partial(_evaluate, spread_blocks(held_out, chosen.block + 1)),
    )


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross entropy, nats a character."""
    tokens, following = batch
    return cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def _evaluate(blocks: Tensor, model: nn.Module) -> dict[str, float]:
    with scoring(model) as placed:
        tokens, following = _shifted(placed(blocks))
        logits = model(tokens)
        loss = cross_entropy(logits.flatten(0, 1), following.flatten()).item()
        right = (logits.argmax(dim=-1) == following).sum().item()
    return {"held_out_loss": loss, "held_out_accuracy": right / following.numel()}


def _shifted(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()


def _blocks_at(tokens: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], length: int) -> Tensor:
    return torch.from_numpy(tokens[starts[:, None] + np.arange(length)])
