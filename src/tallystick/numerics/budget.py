"""How many roundings an honest log takes from its follower, at most, and how coarse they may be (docs/adr/0026): pure arithmetic.

A boundary lies between two values ``d`` apart with probability ``d`` over the quantum, so a log moves about the sum of
those over all elements, one independent of the other where grids are dithered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.policy import SMALL_FINER, SMALL_SITE, SPARSEST, Policy

SLACK = 4.0
"""How many times the follower's own mean deviation the two machines may differ by: measured 1 to 2.2 (docs/adr/0026)."""

TAIL = 1e-9
"""Probability with which an honest log exceeds one budget, were ``SLACK`` all used up."""

STEP_TAIL = 1e-6
"""The same for a single step: of budgets of single steps there are many, and each move more in one is a larger steer."""

STEER_MOVES = 9
"""Octaves that a move's square lies below 2^``gradient_steer`` of all squares, sizes taken by their scales: some moves of it, and
scales up to two octaves wide."""


def coarsest_quantum(policy: Policy, gradients: Iterable[tuple[int, np.ndarray]]) -> int | None:
    """Return the exponent of the coarsest quantum that ``gradient_steer`` leaves a step; None if the policy has none.

    It follows from sizes alone, in whole numbers: whoever chooses quanta chooses the rate of what is smaller, where an optimizer
    divides by the root of squares.

    Args:
        policy: whose aim it is.
        gradients: how many elements each has, and the scale exponents of its blocks, int[blocks].
    """
    sizes = [(elements // scales.size, int(scale)) for elements, scales in gradients for scale in scales]
    if policy.gradient_steer is None or not sizes:
        return None
    least = min(scale for _, scale in sizes)
    squares = sum(elements << 2 * (scale - least) for elements, scale in sizes)
    return (squares.bit_length() - 1 + 2 * least + policy.gradient_steer - STEER_MOVES) // 2


def chosen_floor(policy: Policy, grid: SiteGrid, coarsest: int | None, elements: int) -> int:
    """Return the floor of a gradient of so many elements that is logged by entries, where grids are chosen.

    It follows from its band and scales alone, and from the ``coarsest_quantum`` of the step if there is one.
    """
    floor, sparsest = policy.finest_floor(grid.band), grid.band + SPARSEST
    if coarsest is not None:
        finer = SMALL_FINER if elements < SMALL_SITE else 0
        floor = min(floor, coarsest - int(grid.scales.max())) - finer
    return max(floor, sparsest)


def most_moves(expected: float, slack: float = SLACK, *, cluster: int = 1, tail: float = TAIL) -> int:
    """Return the largest number that is no surprise where ``slack`` times ``expected`` events are the mean.

    Chernoff's bound of a Poisson variable: more have a probability of ``tail`` at most. Events come ``cluster`` at a time:
    one sixteen-bit result that is rounded otherwise moves the gradients of all that it reaches.
    """
    events = _most_events(slack * expected / cluster, tail)
    return cluster * (events if cluster == 1 else max(1, events))


def most_square(expected: Mapping[int, float], tail: float, *, slack: float = 1.0) -> float:
    """Return what the sum of squared moves exceeds with a probability of ``tail`` at most.

    Chernoff's bound of a compound Poisson variable: ``exp(sum of l * (exp(t * w) - 1) - t * x)`` bounds the probability of ``x``
    or more, whatever ``t``; the best one is searched.

    Args:
        expected: events on average, by the exponent of two of the square that each adds.
        tail: the probability.
        slack: how many times more events are allowed on average.
    """
    exponents = np.array([e for e, mean in expected.items() if mean > 0.0], dtype=np.float64)
    if not exponents.size:
        return 0.0
    means = np.array([mean for mean in expected.values() if mean > 0.0]) * slack
    heaviest = float(exponents.max())
    weights = np.exp2(exponents - heaviest)  # over the heaviest
    bits = -math.log(tail)

    def bound(t: float) -> float:
        return float((means * np.expm1(t * weights)).sum() + bits) / t

    # bound(t) has one minimum, below where a single heaviest event outweighs the tail: ternary search over log t.
    low, high = math.log(1e-9), math.log(300.0)
    for _ in range(80):
        third = (high - low) / 3.0
        if bound(math.exp(low + third)) < bound(math.exp(high - third)):
            high -= third
        else:
            low += third
    return bound(math.exp(low)) * math.ldexp(1.0, int(heaviest))


def _most_events(mean: float, tail: float) -> int:
    if not mean > 0.0:
        return 0
    if not math.isfinite(mean):
        return 1 << 62
    low, high = math.floor(mean), math.ceil(mean + 8.0 * math.sqrt(mean)) + 24
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _is_rare(middle, mean, tail) else (middle, high)
    return high - 1


def _is_rare(count: int, mean: float, tail: float) -> bool:
    """Whether a Poisson variable of this mean reaches ``count`` with a probability of ``tail`` at most."""
    return count > mean and count - mean - count * math.log(count / mean) <= math.log(tail)
