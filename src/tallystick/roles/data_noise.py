"""Data that differ by floating noise: a batch whose digest is another one here, though nobody took other data.

A record holds a batch's digest, not its numbers, so how far the two lie apart shows in what they led to. The digest alone
accuses nobody where noise can reach the batch and the step's loss and state are the same all the same. Where these differ
too, the steps are repeated with every floating number of the data shaken by more than processors differ by: noise explains
a state that lies no farther away than a few times what that did, and less than what training did.

Whole numbers that come of floating ones (a teacher's choice, a pixel rounded to a byte) are other ones elsewhere where these
lie near a boundary. Which do is found by building the job anew with noise on every operator. All other whole numbers are not
shaken: other labels or tokens are other data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, JobFailed
from tallystick.execution.dispatch.jitter import Jitter, JitterMode
from tallystick.execution.job import Batch, Job, JobSource
from tallystick.execution.step import map_tensors
from tallystick.numerics.random import stream_key, words

SHAKEN = 2.0**-13
"""Of a tensor's largest element: eight times what sines, exponentials and interpolations differ by elsewhere.

Less would often move no rounding at all, and then noise that moves one would be a lie.
"""
MOST_TIMES = 2.0  # what shaking does to a state, this often, may noise have done
MOST_SHARE = 2.0**-4  # of the way that training carried the state, at most
REBUILT = 4  # jobs built with noise: what noise reaches differs in one of them, but for one time in 16
REBUILT_UNITS = 2.0**10  # last places by which each of their operators is off: as far as what is ``SHAKEN``
JOBS_ERRORS = (
    ArithmeticError, AssertionError, InvalidInput, JobFailed, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What a job's own code may raise where its numbers are not what it takes them to be; nothing is then known of noise."""
REMEDY = (
    "read its numbers from a file, or let numpy draw and round them: what a script draws by torch.randn, sines and "
    "interpolation have other last bits on other processors; what it computes for a batch right before the model is part of "
    "a step that run.open_step() begins there"
)
DATA_NOISE_REASON = (
    f"the {{}}'s data differ from the judge's by no more than floating noise explains; {REMEDY}"
)
FLOATS = {"F32": "<f4", "F64": "<f8"}
State = Mapping[str, Entry]


def has_floats(batch: Batch) -> bool:
    """Whether a batch holds a tensor of floating numbers, whose last bits another processor may give otherwise."""
    return any(x.is_floating_point() and x.numel() > 0 for x in _tensors(batch))


@dataclass
class NoisyData:
    """The data of a job that is built and asked for its batches with noise on every operator.

    Attributes:
        source, settings, seed: which job.
    """

    source: JobSource
    settings: Mapping[str, str]
    seed: int
    _batches: list[Callable[[int], Batch]] = field(default_factory=list[Callable[[int], Batch]])

    def batches(self, step: int) -> list[Batch]:
        """Return the batches of a step that noise led to; fewer than ``REBUILT`` where the job refuses such numbers."""
        found: list[Batch] = []
        for number in range(REBUILT):
            mode = JitterMode(Jitter(number + 1, REBUILT_UNITS))
            try:
                with mode:
                    if number >= len(self._batches):
                        self._batches.append(self.source.build(self.settings, self.seed).batch)
                    found.append(self._batches[number](step))
            except JOBS_ERRORS:
                break
        return found


@dataclass
class Shaking:
    """What was shaken of the whole numbers of data.

    Attributes:
        moved, of: those that are others, and all in the tensors that hold such.
    """

    moved: int = 0
    of: int = 0

    @property
    def most_share(self) -> float:
        """Of the way of training, how far noise may have led: of labels a share f turns the noise of a gradient by sqrt(2 f)."""
        return max(MOST_SHARE, 2.0 * math.sqrt(self.moved / self.of) if self.of else 0.0)

    def whole(self, batch: Batch, others: Sequence[Batch]) -> Batch:
        """Return ``batch`` with every whole number that is another one in ``others`` as it is there, and count these."""
        tensors = [_tensors(other) for other in others]
        at = 0

        def move(_: str, x: Tensor) -> Tensor:
            nonlocal at
            number, at = at, at + 1
            if x.is_floating_point():
                return x
            found = x
            for there in (each[number] for each in tensors if number < len(each)):
                if there.shape == x.shape and there.dtype == x.dtype:
                    found = torch.where(there != x, there, found)
            moved = int((found != x).sum())
            self.moved += moved
            self.of += x.numel() if moved else 0
            return found

        return map_tensors(batch, move, "batch")


def _tensors(batch: Batch) -> list[Tensor]:
    found: list[Tensor] = []

    def note(_: str, x: Tensor) -> Tensor:
        found.append(x)
        return x

    map_tensors(batch, note, "batch")
    return found


def is_reached(batch: Batch, step: int, noisy: NoisyData | None) -> bool:
    """Whether noise may have reached a batch: it holds floating numbers, or whole ones that come of them."""
    if has_floats(batch) or noisy is None:
        return has_floats(batch)
    tried = Shaking()
    tried.whole(batch, noisy.batches(step))
    return tried.moved > 0


def shaken(batch: Batch, step: int) -> Batch:
    """Return ``batch`` with every finite floating number moved by ``SHAKEN`` of its tensor's largest, up or down by chance."""

    def shake(where: str, x: Tensor) -> Tensor:
        if not x.is_floating_point() or not x.numel():
            return x
        size = float(torch.where(x.isfinite(), x, 0.0).abs().max()) * SHAKEN
        drawn = words(stream_key(0, "shaken data", step, 0, 0, sum(where.encode())), 0, x.numel())
        way = torch.from_numpy((drawn >> 31).astype(np.float32) * 2 - 1).reshape(x.shape)
        return x + way.to(x) * size

    return map_tensors(batch, shake, "batch")


@contextmanager
def shaking(job: Job, noisy: NoisyData | None = None) -> Generator[Shaking]:
    """Inside, the job's data are shaken, with ``noisy`` also the whole numbers that noise reaches."""
    own: Callable[[int], Batch] = job.batch
    done = Shaking()

    def batch(step: int) -> Batch:
        found = own(step)
        if noisy is not None:
            found = done.whole(found, noisy.batches(step))
        return shaken(found, step)

    job.batch = batch
    try:
        yield done
    finally:
        job.batch = own


def is_explained(
    before: State, own: State, moved: State, stated: State, most_share: float = MOST_SHARE
) -> bool:
    """Whether noise in the data explains that a state is ``stated`` and not ``own``, where shaken data lead to ``moved``.

    ``before`` is the state from which all three set out; ``most_share`` of the way from there it may be at most. What is no
    floating tensor must be equal, and so must be where a tensor is not finite.
    """
    apart = {"way": 0.0, "shaking": 0.0, "training": 0.0}
    if own.keys() != stated.keys():
        return False
    for name, mine in own.items():
        theirs = stated[name]
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            return False
        if mine.dtype not in FLOATS:
            if bytes(mine.data) != bytes(theirs.data):
                return False
            continue
        apart["way"] += square_distance(theirs, mine)
        if name in moved and name in before:
            apart["shaking"] += square_distance(moved[name], mine)
            apart["training"] += square_distance(mine, before[name])
    way, shaking_did, training = (math.sqrt(value) for value in apart.values())
    return way <= MOST_TIMES * shaking_did and way <= most_share * training


def square_distance(one: Entry, other: Entry) -> float:
    """Return the sum of squared differences; infinite where the two are not finite in the same places, or of another form."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return math.inf
    a, b = (np.frombuffer(entry.data, dtype=FLOATS[entry.dtype]).astype(np.float64) for entry in (one, other))
    away = (a != b) & ~(np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        total = float(np.square(a[away] - b[away]).sum())
    return total if math.isfinite(total) else math.inf
