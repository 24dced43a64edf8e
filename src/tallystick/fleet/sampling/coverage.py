"""Does a log hold as many snapshots as its chip's hours of use call for? One-sided Poisson tests, and exact intervals.

A chip in use for a days takes a Poisson number of snapshots of mean f a. Suppressed ones show as a deficit: the
probability of so few or fewer under that mean is the log's p-value (spec/simulation.md section 3). Pure; without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tallystick.errors import InvalidInput

LARGEST_MEAN = 1e9
SPREAD = 40.0  # standard deviations beyond which a Poisson number is never found in binary64

Floats = npt.NDArray[np.float64]
_Rising = Callable[[float], float]


def poisson_table(mean: float) -> tuple[int, Floats]:
    """The distribution function of a Poisson number: P(N <= first + i) at [i], up to where it rounds to 1.

    Below ``first`` it is less than 1e-300. Relative error about 1e-12 for means up to 1e6.
    """
    if not (0.0 <= mean <= LARGEST_MEAN):
        raise InvalidInput(f"Poisson mean {mean}: must lie in [0, {LARGEST_MEAN:g}]")
    if mean == 0.0:
        return 0, np.ones(1)
    width = SPREAD * math.sqrt(mean) + 60.0
    first, last = max(0, math.floor(mean - width)), math.ceil(mean + width)
    counts = np.arange(first, last + 1, dtype=np.float64)
    start = first * math.log(mean) - mean - math.lgamma(first + 1.0)
    steps = np.log(mean / counts[1:])
    logs = start + np.concatenate([[0.0], np.cumsum(steps)])
    return first, np.minimum(np.cumsum(np.exp(logs)), 1.0)


def deficit_p_value(count: int, mean: float) -> float:
    """P(N <= count) for a Poisson N of ``mean``: how likely an honest log is to hold so few snapshots."""
    if count < 0:
        raise InvalidInput(f"snapshots {count}: must not be negative")
    first, table = poisson_table(mean)
    return 0.0 if count < first else float(table[min(count - first, table.size - 1)])


def largest_deficit(mean: float, false_alarm: float) -> int:
    """The most snapshots that still count as a deficit: P(N <= c) <= ``false_alarm``; -1 if not even none does."""
    if not 0.0 < false_alarm < 1.0:
        raise InvalidInput(f"false alarm rate {false_alarm}: must lie between 0 and 1")
    first, table = poisson_table(mean)
    return first + int(np.searchsorted(table, false_alarm, side="right")) - 1


def binomial_interval(hits: int, trials: int, confidence: float) -> tuple[float, float]:
    """The Clopper-Pearson interval: covers the true probability with at least ``confidence``, whatever it is.

    Source: Clopper and Pearson, Biometrika 26, 1934. Found by bisection on the binomial sum.
    """
    if not 0 <= hits <= trials or trials == 0:
        raise InvalidInput(f"{hits} of {trials} trials: there must be trials, and hits among them")
    if not 0.0 < confidence < 1.0:
        raise InvalidInput(f"confidence {confidence}: must lie between 0 and 1")
    tail = (1.0 - confidence) / 2.0
    low = 0.0 if hits == 0 else _solve(lambda p: _at_least(hits, trials, p), tail)
    high = 1.0 if hits == trials else 1.0 - _solve(lambda p: _at_least(trials - hits, trials, p), tail)
    return low, high


def _solve(rising: _Rising, value: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return 0.5 * (low + high)


def at_most(hits: int, trials: int, probability: float) -> float:
    """P(X <= hits) for a binomial X."""
    return 1.0 if hits >= trials else _at_least(trials - hits, trials, 1.0 - probability)


def _at_least(hits: int, trials: int, probability: float) -> float:
    """P(X >= hits) for a binomial X; grows with the probability."""
    if probability <= 0.0 or probability >= 1.0:
        return float(probability >= 1.0)
    counts = np.arange(hits, trials, dtype=np.float64)
    odds = math.log(probability) - math.log1p(-probability)
    start = (
        math.lgamma(trials + 1.0)
        - math.lgamma(hits + 1.0)
        - math.lgamma(trials - hits + 1.0)
        + hits * math.log(probability)
        + (trials - hits) * math.log1p(-probability)
    )
    steps = np.log((trials - counts) / (counts + 1.0)) + odds
    return float(np.exp(start + np.concatenate([[0.0], np.cumsum(steps)])).sum())
