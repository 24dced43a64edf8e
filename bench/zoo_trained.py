"""A model of any package with the loss that it is trained by, and made-up images, for the models beside those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_batches import Batch, randn
from zoo_models import Build

CLASSES, IMAGES = 5, 4
Loss = Callable[..., Tensor]


class Trained(torch.nn.Module):
    """Gives what has a ``loss``, as models of transformers do."""

    def __init__(self, model: torch.nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, **data: Any) -> SimpleNamespace:
        return SimpleNamespace(loss=self.loss(self.model, **data))


def builder(
    make: Callable[[], torch.nn.Module], loss: Loss, batch: Callable[[torch.Generator], Batch]
) -> Build:
    """What builds a model, its weights drawn from seed 0, and its batches, those of a step drawn from the step's number."""

    def build() -> tuple[torch.nn.Module, Callable[[int], Batch]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Trained(make(), loss)
        model.train()
        return model, lambda step: batch(torch.Generator().manual_seed(step))

    return build


def classified(model: torch.nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of a classifier, and of the classifiers beside it where it has such."""
    given = model(pixels)
    outputs = (given,) if isinstance(given, Tensor) else given
    return torch.stack([F.cross_entropy(each, labels) for each in outputs if each is not None]).sum()


def labelled(*shape: int) -> Callable[[torch.Generator], Batch]:
    """Images of a shape, or films, with a class each."""

    def batch(generator: torch.Generator) -> Batch:
        pixels = randn(generator, IMAGES, *shape)
        return {"pixels": pixels, "labels": torch.randint(0, CLASSES, (IMAGES,), generator=generator)}

    return batch
