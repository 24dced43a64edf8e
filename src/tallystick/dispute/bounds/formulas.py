"""Evaluating one element of one operator, with a bound on what honest arithmetic may have made of it.

The bounds are those of standard forward error analysis: Higham, Accuracy and Stability of Numerical Algorithms, second
edition, 2002, chapters 2 to 4. With unit roundoff u, a sum of n products computed in any order differs from the exact one
by at most ``gamma(n, u)`` times the sum of the products' magnitudes (section 3.1, also with fused multiply-add, blocking
and trees). Products are evaluated exactly as pairs (Dekker) and summed by ``math.fsum``; everything else in binary64, whose
own error is added to the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.int64]
Read = Callable[[int, Indexes], npt.NDArray[np.generic]]
"""``read(slot, flat)`` gives the elements of an input at flat indexes; slot -1 - k is output k of the operator itself."""

UNIT = {"F64": 2.0**-53, "F32": 2.0**-24}
OWN_UNIT = 2.0**-53
LEAST = {"F64": 2.0**-1021, "F32": 2.0**-125}  # a machine may flush what is smaller (Higham 2.2)
FEW_TERMS = 64  # a longer sum is opened by partial sums
MANY_TERMS = 1 << 18
STATED = 2.0**-51  # a partial sum is right if it is that close, relative to its magnitude
STATED_MAGNITUDE = 2.0**-30  # and its magnitude, relative to itself
UNDER = {dtype: LEAST[dtype] / UNIT[dtype] for dtype in UNIT}
"""Units for each unit that a flushed number is multiplied by afterwards."""
LARGEST = {"F64": 2.0**1021, "F32": 2.0**125}
"""What a machine may make an infinity of on the way, or nothing at all: up to two octaves more than ends below the largest."""
MARGIN = 2.0**-16, 2.0**-50  # of a tolerance, and of a value: libraries of two judges differ by less
_SPLIT = float(2**27 + 1)


def gamma(n: float, u: float) -> float:
    """Return n u / (1 - n u), infinity where n u is not below 1 (Higham, section 3.1)."""
    return n * u / (1.0 - n * u) if n * u < 1.0 else math.inf


@dataclass(frozen=True)
class Point:
    """An element known by itself: its value in binary64, and the magnitude of its rounding errors in units of u.

    ``exact`` elements have no error at all. ``also`` is a second acceptable value.
    """

    value: float | int
    units: float = 0.0
    exact: bool = False
    also: float | int | None = None


@dataclass(frozen=True)
class Sum:
    """An element that is a long sum: blocks of terms, and what follows from their total.

    Attributes:
        count: number of terms.
        block: for terms [low, high) their exact sum, rounded once, and the sum of their magnitudes.
        finish: the element from both totals, as a point whose units include those of the sum.
    """

    count: int
    block: Callable[[int, int], tuple[float, float]]
    finish: Callable[[float, float], Point]

    @property
    def num_blocks(self) -> int:
        """How many partial sums open it."""
        if self.count <= FEW_TERMS:
            return 1
        return 64 if self.count <= MANY_TERMS else 1024

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the terms of block ``number``."""
        return number * self.count // self.num_blocks, (number + 1) * self.count // self.num_blocks

    def partials(self) -> list[tuple[float, float]]:
        """Return every block's sum and magnitude."""
        return [self.block(*self.bounds(number)) for number in range(self.num_blocks)]

    def total(self, partials: Sequence[tuple[float, float]]) -> Point:
        """Return the element that the partial sums make up."""
        value = math.fsum(p for p, _ in partials)
        magnitude = math.fsum(q for _, q in partials)
        return self.finish(value, magnitude)

    def readings(self) -> tuple[Point, ...]:
        """Return the element by the partial sums as they are, and by the least and the largest that are right."""
        partials = self.partials()
        value, magnitude = (math.fsum(column) for column in zip(*partials, strict=True))
        if self.num_blocks == 1:
            return (self.finish(value, magnitude),)
        room = STATED * magnitude + len(partials) * LEAST["F64"]
        largest = (1.0 + STATED_MAGNITUDE) * magnitude + len(partials) * LEAST["F64"]
        return tuple(self.finish(value + shift, largest) for shift in (-room, 0.0, room))


Formula = Point | Sum


def is_right_partial(stated: tuple[float, float], found: tuple[float, float]) -> bool:
    """Whether a stated partial sum and its magnitude are those of its terms; of none that are numbers, no number."""
    (p, q), (value, magnitude) = stated, found
    if not (math.isfinite(value) and math.isfinite(magnitude)):
        return not (math.isfinite(p) and math.isfinite(q))
    room = STATED * magnitude + LEAST["F64"]
    return abs(p - value) <= room and abs(q - magnitude) <= STATED_MAGNITUDE * magnitude + LEAST["F64"]


def tolerance(point: Point, dtype: str) -> float:
    """Return how far a stated element of ``dtype`` may lie from ``point``."""
    if point.exact:
        return 0.0
    u = UNIT[dtype]
    # Twice: the party's own rounding, and that of this evaluation, which is in binary64 and no worse.
    return gamma(1.0, u) * point.units + 2.0 * OWN_UNIT * point.units + LEAST[dtype]


def is_ordinary(point: Point, dtype: str) -> bool:
    """Whether every machine has a number for ``point``, and has none beyond the largest of ``dtype`` on the way to it."""
    return point.exact or abs(point.value) + point.units < LARGEST[dtype]


def is_within(stated: float | int | bool, point: Point, dtype: str, more: float = 0.0) -> bool:
    """Whether honest arithmetic in ``dtype`` can have given ``stated``: no further from ``point`` than bounds, and ``more``, say.

    Of a point that is not ``is_ordinary`` it says nothing.
    """
    if point.also is not None and stated == point.also:
        return True
    if point.exact or not (math.isfinite(point.value) and math.isfinite(stated)):
        return stated == point.value or (math.isnan(stated) and math.isnan(point.value))
    return abs(stated - point.value) <= tolerance(point, dtype) + more


def readings_of(formula: Formula) -> tuple[Point, ...]:
    """Return what a formula's element may be by partial sums that are right."""
    return (formula,) if isinstance(formula, Point) else formula.readings()


def is_false(stated: float | int | bool, points: Sequence[Point], dtype: str) -> bool:
    """Whether ``stated`` is false by all of an element's readings, and by any library's functions.

    Who objects to anything else may lose.
    """
    return not any(
        is_within(stated, point, dtype, MARGIN[0] * tolerance(point, dtype) + MARGIN[1] * abs(point.value))
        for point in points
    )


# -- exact sums of products ----------------------------------------------------------------------


def two_sum(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Return a + b rounded, and what was lost, exactly (Knuth)."""
    s = a + b
    back = s - a
    return s, (a - (s - back)) + (b - back)


def two_product(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Return a * b rounded, and what was lost, exactly but for underflow (Dekker, Veltkamp)."""
    p = a * b
    c, d = _SPLIT * a, _SPLIT * b
    a_high, b_high = c - (c - a), d - (d - b)
    a_low, b_low = a - a_high, b - b_high
    return p, ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low


def exact_sum(*parts: Floats) -> float:
    """Return the sum of all elements of all parts, rounded once; NaN where it is none."""
    try:
        return math.fsum(np.concatenate([np.atleast_1d(part).ravel() for part in parts]).tolist())
    except (OverflowError, ValueError):
        return math.nan


def products(a: Floats, b: Floats) -> tuple[float, float]:
    """Return the sum of a * b, exact but for one rounding, and the sum of the magnitudes."""
    with np.errstate(all="ignore"):  # what is no number then is judged by nobody
        return exact_sum(*two_product(a, b)), float(np.abs(a * b).sum())


def triple_products(a: Floats, b: Floats, c: Floats) -> tuple[Floats, Floats]:
    """Return a * b * c as pairs, relative error about 2**-100."""
    with np.errstate(all="ignore"):
        p, low = two_product(a, b)
        q, rest = two_product(p, c)
        return q, rest + low * c
