"""A job whose data can only be memorised: random vectors with random labels, each visited in one segment alone.

What a network learns of such data it learns of each record by itself, so a record that was trained on is told from one
that was not. Real data with much in common hide that (``tallystick.fleet.provenance.memorisation``).

Settings, all optional: steps=24, batch=64, segment=4 (steps that share their records), width=256, optimizer=adamw (or sgd),
learning_rate=0.02, init_seed=0, data_seed=0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tallystick.execution.job import Job
from tallystick.jobs.digits import (
    LARGEST_SEED,
    MOST_STEPS,
    choice,
    initial_weights,
    parse_settings,
    real,
    whole,
)
from tallystick.numerics.random import normal, randint, stream_key

INPUTS, LABELS = 32, 16
VECTORS, ANSWERS = "tallystick.testing.noise_job/vectors", "tallystick.testing.noise_job/labels"
UNSEEN = 512


@dataclass(frozen=True)
class NoiseSettings:
    """The settings of this job; the module's docstring says what they are."""

    steps: int = whole(24, 1, MOST_STEPS)
    batch: int = whole(64, 1, 4096)
    segment: int = whole(4, 1, MOST_STEPS)
    width: int = whole(256, 1, 4096)
    optimizer: str = choice("adamw", "sgd")
    learning_rate: float = real(0.02, 0.0, 1.0)
    init_seed: int = whole(0, 0, LARGEST_SEED)
    data_seed: int = whole(0, 0, LARGEST_SEED)


def noise(count: int, seed: int, part: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` records that follow from seed and part: vectors (count, 32) and labels (count,)."""
    vectors = normal(stream_key(seed, VECTORS, part, 0, 0, 0), 0, count * INPUTS)
    labels = randint(stream_key(seed, ANSWERS, part, 0, 0, 0), 0, count, 0, LABELS)
    return torch.from_numpy(vectors.astype("f4")).reshape(count, INPUTS), torch.from_numpy(labels)


def build(settings: Mapping[str, str]) -> Job:
    """Return the job: every segment visits its own records in each of its steps.

    Raises:
        InvalidInput: an unknown setting, or a value out of range.
    """
    chosen = parse_settings(NoiseSettings, settings, job="noise")
    with initial_weights(chosen.init_seed):
        model = nn.Sequential(nn.Linear(INPUTS, chosen.width), nn.ReLU(), nn.Linear(chosen.width, LABELS))
    optimizer: torch.optim.Optimizer
    if chosen.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=chosen.learning_rate)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.learning_rate, weight_decay=0.0)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return noise(chosen.batch, chosen.data_seed, 1 + step // chosen.segment)

    return Job(
        model=model,
        optimizer=optimizer,
        batch=batch,
        loss=_loss,
        steps=chosen.steps,
        held_out=lambda: noise(UNSEEN, chosen.data_seed, 0),
    )


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    vectors, labels = batch
    return cross_entropy(model(vectors), labels)
