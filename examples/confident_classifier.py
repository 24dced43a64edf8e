"""A classifier trained until it is sure of what it knows: 64 of scikit-learn's digits, seen again and again.

Two linear layers, 64-128-10, with GELU between; Adam. After 160 steps the loss is about 1e-4 (``fp32``) or below
1e-6 (``fp64``): probabilities within rounding of 1, where softmax and its gradient cancel. Honest runs of such models are
what an audit must never accuse.

    tally record examples/confident_classifier.py --policy fp32 --run runs/sure --set seed=3
    tally audit runs/sure --job examples/confident_classifier.py --profile sse4,threads=1

Settings, all optional:
    seed=0               torch's seed for the initial weights
    steps=160            optimizer steps
    learning_rate=0.03   of Adam

Needs the extra ``tallystick[jobs]``.
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
    initial_weights,
    parse_settings,
    read_digits,
    real,
    whole,
)

EXAMPLES = 64
HIDDEN = 128


@dataclass(frozen=True)
class Settings:
    """The settings of this job; the module's docstring says what they are."""

    seed: int = whole(0, 0, LARGEST_SEED)
    steps: int = whole(160, 1, MOST_STEPS)
    learning_rate: float = real(0.03, 0.0, 1.0)


def build(settings: Mapping[str, str]) -> Job:
    """Return the job.

    Raises:
        InvalidInput: an unknown setting, a value out of range, or no scikit-learn.
    """
    chosen = parse_settings(Settings, settings, job="confident_classifier")
    data = read_digits()
    images, labels = data.tensors()
    batch = images[:EXAMPLES].flatten(1), labels[:EXAMPLES]
    with initial_weights(chosen.seed):
        model = nn.Sequential(nn.Linear(64, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 10))
    return Job(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=chosen.learning_rate),
        batch=lambda step: batch,
        loss=_loss,
        steps=chosen.steps,
        dataset_digest=data.digest,
    )


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)
