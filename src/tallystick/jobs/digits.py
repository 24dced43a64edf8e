"""A convolutional network on scikit-learn's handwritten digits: ReLU, max-pool and batch norm, in seconds.

Two 3x3 convolutions with batch norm and ReLU, one 2x2 max-pool, dropout and two linear layers; SGD with
momentum 0.9 and weight decay on a cosine schedule. 48,202 parameters at the default width. The data are the
1797 images of 8x8 pixels that come with scikit-learn: every fifth one is held out, the other 1438 are visited
once an epoch in an order drawn from Philox.

Settings, all optional:
    steps=300            optimizer steps, and the length of the schedule
    batch=32             images a step
    width=24             channels of the first convolution; the second has twice as many
    dropout=0.25         between the pool and the linear layers
    learning_rate=0.05   at the start
    weight_decay=0.0005
    init_seed=0          torch's seed for the initial weights
    data_seed=0          Philox's seed for the order of the images

Needs the extra ``tallystick[jobs]``. ``parse_settings``, ``initial_weights`` and ``scoring`` serve the other
shipped jobs too.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tallystick.errors import InvalidInput
from tallystick.execution.job import Job
from tallystick.numerics.random import permutation, stream_key

if TYPE_CHECKING:
    import numpy.typing as npt

SIDE = 8  # pixels, scikit-learn's user guide, "Optical recognition of handwritten digits dataset"
BRIGHTEST = 16  # pixels are whole numbers from 0 to this
CLASSES = 10
HELD_OUT_EVERY = 5
MOMENTUM = 0.9
ORDER = "tallystick.jobs.digits/order"

MOST_STEPS = 10**7
LARGEST_SEED = 2**63 - 1  # torch seeds its generator with an int64

S = TypeVar("S")
Number = TypeVar("Number", int, float)
Reader = Callable[[str], Any]


def whole(default: int, low: int, high: int) -> int:
    """Return the field of a setting that is a whole number from ``low`` to ``high``, in decimal digits."""

    def read(text: str) -> int | None:
        if not re.fullmatch(r"[0-9]{1,19}", text, re.ASCII):
            return None
        return _within(int(text), low, high)

    return field(default=default, metadata={"rule": f"a whole number from {low} to {high}", "read": read})


def real(default: float, low: float, high: float) -> float:
    """Return the field of a setting that is a number from ``low`` to ``high``, such as 0.05 or 5e-4."""

    def read(text: str) -> float | None:
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?(e-?[0-9]+)?", text, re.ASCII):
            return None
        return _within(float(text), low, high)

    return field(default=default, metadata={"rule": f"a number from {low:g} to {high:g}", "read": read})


def choice(*allowed: str) -> str:
    """Return the field of a setting that is one of some words; the first is the default."""

    def read(text: str) -> str | None:
        return text if text in allowed else None

    return field(default=allowed[0], metadata={"rule": f"one of {', '.join(allowed)}", "read": read})


def parse_settings(kind: type[S], given: Mapping[str, str], *, job: str) -> S:
    """Return the dataclass ``kind`` with the settings given; the others keep their defaults.

    Args:
        kind: a dataclass whose fields come from ``whole``, ``real`` and ``choice``.
        given: values by name, as text.
        job: the job's name, for the message.

    Raises:
        InvalidInput: a name that ``kind`` does not have, or a value its field does not allow.
    """
    known: dict[str, Mapping[str, Any]] = {f.name: f.metadata for f in fields(kind)}  # pyright: ignore[reportArgumentType]
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in known:
            raise InvalidInput(f"job {job}: unknown setting {name}={text!r}; known are {', '.join(known)}")
        read: Reader = known[name]["read"]
        values[name] = read(text)
        if values[name] is None:
            raise InvalidInput(f"job {job}: setting {name} must be {known[name]['rule']}, got {text!r}")
    return kind(**values)


@contextmanager
def initial_weights(seed: int) -> Generator[None]:
    """Inside, torch draws on the CPU from ``seed``; the caller's generators are as before afterwards."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # torch.manual_seed would reseed the accelerators' generators too, which the fork does not put back.
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def scoring(model: nn.Module) -> Generator[Callable[[Tensor], Tensor]]:
    """Inside, ``model`` is in eval mode and keeps no gradients; its mode is put back afterwards.

    Yields a function that moves a tensor to the model's device and, if floating, to its dtype.
    """
    like = next(model.parameters())
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield lambda x: x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)
    finally:
        model.train(was_training)


@dataclass(frozen=True)
class DigitsSettings:
    """The settings of this job; the module's docstring says what they are."""

    steps: int = whole(300, 1, MOST_STEPS)
    batch: int = whole(32, 2, 4096)  # batch norm needs two
    width: int = whole(24, 1, 1024)
    dropout: float = real(0.25, 0.0, 0.9)
    learning_rate: float = real(0.05, 0.0, 10.0)
    weight_decay: float = real(5e-4, 0.0, 1.0)
    init_seed: int = whole(0, 0, LARGEST_SEED)
    data_seed: int = whole(0, 0, LARGEST_SEED)


@dataclass(frozen=True)
class Digits:
    """The images (n, 8, 8), uint8 from 0 to 16, and their labels (n,), uint8; neither can be written to."""

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.uint8]

    @property
    def digest(self) -> str:
        """SHA-256 of all images followed by all labels, hexadecimal."""
        return hashlib.sha256(self.images.tobytes() + self.labels.tobytes()).hexdigest()

    def split(self) -> tuple[Digits, Digits]:
        """Return what is trained on and what is held out: every fifth image."""
        held_out = np.arange(len(self.labels)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        return self.take(~held_out), self.take(held_out)

    def take(self, at: npt.NDArray[Any]) -> Digits:
        """Return a copy of the images and labels at the given indexes or mask."""
        return Digits(_frozen(self.images[at]), _frozen(self.labels[at]))

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return new tensors: images (n, 1, 8, 8), float32 from 0 to 1, exact; labels (n,), int64."""
        pixels = torch.from_numpy(self.images.astype(np.float32)) / BRIGHTEST
        return pixels.unsqueeze(1), torch.from_numpy(self.labels.astype(np.int64))


@functools.cache
def read_digits() -> Digits:
    """Return the 1797 digits that come with scikit-learn, read once per process.

    Raises:
        InvalidInput: scikit-learn is not installed, or its images are not the whole numbers expected.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InvalidInput(
            "job digits: scikit-learn is not installed; install the extra tallystick[jobs]"
        ) from error
    bundle: Any = load_digits()
    images: npt.NDArray[np.float64] = bundle.images
    labels: npt.NDArray[np.int64] = bundle.target
    pixels = images.astype(np.uint8)
    if (
        images.shape[1:] != (SIDE, SIDE)
        or not np.array_equal(pixels, images)
        or int(pixels.max()) > BRIGHTEST
    ):
        raise InvalidInput(
            f"job digits: images must be {SIDE}x{SIDE} whole numbers from 0 to {BRIGHTEST}, "
            f"scikit-learn gave shape {images.shape} up to {images.max()}"
        )
    return Digits(_frozen(pixels), _frozen(labels.astype(np.uint8)))


class DigitsNet(nn.Module):
    """Logits (n, 10) of images (n, 1, 8, 8).

    ReLU stands before the max-pool, so that equal neighbours in a window are exact zeros: no decision needed.
    """

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(2 * width)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(2 * width * (SIDE // 2) ** 2, 2 * width)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        x = self.relu(self.norm1(self.conv1(images)))
        x = self.pool(self.relu(self.norm2(self.conv2(x))))
        x = self.dropout(x.flatten(1))
        return self.head(self.relu(self.hidden(x)))


def visited(step: int, batch: int, size: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the ``batch`` indexes that step visits of a set of ``size``: each index once per epoch.

    Epoch ``e`` is a permutation keyed by ``seed`` and ``e``; epochs follow each other without a gap, so a
    step may end one and begin the next.

    Raises:
        InvalidInput: a negative step.
    """
    first = step * batch
    at = np.arange(first, first + batch)
    drawn = np.empty(batch, dtype=np.int64)
    for epoch in range(first // size, (first + batch - 1) // size + 1):
        order = permutation(stream_key(seed, ORDER, epoch, 0, 0, 0), size)
        inside = at // size == epoch
        drawn[inside] = order[at[inside] % size]
    return drawn


def build(settings: Mapping[str, str]) -> Job:
    """Return the job.

    Raises:
        InvalidInput: an unknown setting, a value out of range, or no scikit-learn.
    """
    chosen = parse_settings(DigitsSettings, settings, job="digits")
    data = read_digits()
    training, held_out = data.split()
    with initial_weights(chosen.init_seed):
        model = DigitsNet(chosen.width, chosen.dropout)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=chosen.learning_rate, momentum=MOMENTUM, weight_decay=chosen.weight_decay
    )

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return training.take(visited(step, chosen.batch, len(training.labels), chosen.data_seed)).tensors()

    return Job(
        model=model,
        optimizer=optimizer,
        batch=batch,
        loss=_loss,
        steps=chosen.steps,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=chosen.steps),
        dataset_digest=data.digest,
        evaluate=functools.partial(_evaluate, held_out),
    )


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def _evaluate(held_out: Digits, model: nn.Module) -> dict[str, float]:
    with scoring(model) as placed:
        images, labels = map(placed, held_out.tensors())
        logits = model(images)
        right = (logits.argmax(dim=1) == labels).sum().item()
        loss = cross_entropy(logits, labels).item()
    return {"held_out_loss": loss, "held_out_accuracy": right / len(labels)}


def _within(value: Number, low: float, high: float) -> Number | None:
    return value if math.isfinite(value) and low <= value <= high else None


def _frozen(array: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    array.setflags(write=False)
    return array
