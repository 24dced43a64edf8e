"""Data that differ by floating noise: a batch whose digest is another one here, though nobody took other data.

A record holds a batch's digest, not its numbers, so how far the two lie apart shows in what they led to. The digest alone
accuses nobody where the batch holds floating numbers and the step's loss and state are the same all the same. Where these
differ too, the steps are repeated with every floating number of the data shaken by more than processors differ by: noise
explains a state that lies no farther away than a few times what that did, and far less than what training did.
Whole numbers are not shaken: other labels or tokens are other data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from tallystick.commit.state import Entry
from tallystick.execution.job import Batch, Job
from tallystick.execution.step import map_tensors
from tallystick.numerics.random import stream_key, words

SHAKEN = (
    2.0**-16
)  # of a tensor's largest element: what sines, exponentials and interpolations differ by elsewhere
MOST_TIMES = 8.0  # what shaking does to a state, this often, may noise have done
MOST_SHARE = 2.0**-4  # of the way that training carried the state, at most
REMEDY = "commit the batch's bytes (read its numbers from a file), or use integers"
FLOATS = {"F32": "<f4", "F64": "<f8"}
State = Mapping[str, Entry]


def has_floats(batch: Batch) -> bool:
    """Whether a batch holds a tensor of floating numbers, whose last bits another processor may give otherwise."""
    found: list[bool] = []

    def note(_: str, x: Tensor) -> Tensor:
        found.append(x.is_floating_point() and x.numel() > 0)
        return x

    map_tensors(batch, note, "batch")
    return any(found)


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
def shaking(job: Job) -> Generator[None]:
    """Inside, the job's data are shaken."""
    own: Callable[[int], Batch] = job.batch
    job.batch = lambda step: shaken(own(step), step)
    try:
        yield
    finally:
        job.batch = own


def is_explained(before: State, own: State, moved: State, stated: State) -> bool:
    """Whether noise in the data explains that a state is ``stated`` and not ``own``, where shaken data lead to ``moved``.

    ``before`` is the state from which all three set out. What is no floating tensor must be equal, and so must be where a
    tensor is not finite.
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
        apart["way"] += _square_distance(theirs, mine)
        if name in moved and name in before:
            apart["shaking"] += _square_distance(moved[name], mine)
            apart["training"] += _square_distance(mine, before[name])
    way, shaking_did, training = (math.sqrt(value) for value in apart.values())
    return way <= MOST_TIMES * shaking_did and way <= MOST_SHARE * training


def _square_distance(one: Entry, other: Entry) -> float:
    """Return the sum of squared differences; infinite where the two are not finite in the same places."""
    a, b = (np.frombuffer(entry.data, dtype=FLOATS[entry.dtype]).astype(np.float64) for entry in (one, other))
    if a.shape != b.shape:
        return math.inf
    away = (a != b) & ~(np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        total = float(np.square(a[away] - b[away]).sum())
    return total if math.isfinite(total) else math.inf
