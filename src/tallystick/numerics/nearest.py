"""Rounding to the nearest value of ``b_r`` bits, in plain scalar Python: the executable form of spec/rounding.md 9.

This is the rule of the 2024 paper's sites (Srivastava, Arora, Boneh 2024, sections 5.1 and 5.2): FP64 to those FP32
values whose last ``32 - b_r`` mantissa bits are zero, ties to even. Integer arithmetic on the bits alone, so nothing a
compiler does to floating-point code can change it, and the time does not depend on ``b_r``.

    round_bits: x -> the nearest value                       the paper's rnd
    record:     x -> value, and (index, side) of each element closer than delta to a boundary
    follow:     y -> value, taking the recorded side         the paper's rev, with a test on both sides

**When following is exact.** With quantum eps and threshold tau, an element is logged when its distance to the rounded
value exceeds tau, which is to say when its distance to the nearest boundary is below the band eps/2 - tau. Let d bound
the divergence |x - y|.

* Completeness, d < eps/2 - tau: if x and y lie on two sides of a boundary, x is less than the band from it, hence
  logged, and so is y, hence obeyed.
* Soundness, d < 2 * tau: if x and y lie in one cell near its two ends, the boundaries beside them are eps apart and
  each is nearer than the band, so d would be more than eps - 2 * (eps/2 - tau) = 2 * tau. The test is two-sided: the
  follower obeys only where its own distance is below the band, too. With the recorder's test alone it would take
  d < tau.

tau >= eps/4 makes the first condition the stronger one, and no other tau is allowed. The paper asks for d < eps and
d < 2 * tau, which is not enough.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tallystick.errors import InvalidInput
from tallystick.numerics.reference import FP32_LARGEST, LoggedElement

FEWEST_BITS, MOST_BITS = 26, 32
FP32_FLOOR = -149  # exponent of the smallest positive FP32 value
TIED = 6  # an own value within 2**6 of its last places of a boundary lies there because of what it is, not by chance


@dataclass(frozen=True, slots=True)
class NearestGrid:
    """Quanta and band of one site.

    Attributes:
        bits: ``b_r``, 26 to 32.
        floor: exponent below which no quantum falls.
        band: exponent of the band where ``margin`` does not widen it; at most ``floor - 2``.
        margin: with a fixed threshold, log2 of 1/2 - tau in quanta, at most -2; None for the band alone.
    """

    bits: int
    floor: int
    band: int
    margin: int | None = None

    def __post_init__(self) -> None:
        _check_bits(self.bits)
        if self.band > self.floor - 2:
            raise InvalidInput(f"grid: band 2**{self.band} is above a quarter of the floor 2**{self.floor}")
        if self.margin is not None and self.margin > -2:
            raise InvalidInput(f"grid: margin 2**{self.margin} of a quantum is above a quarter")

    @property
    def lowest(self) -> int:
        """The exponent of the smallest quantum: the floor, or the spacing of FP32's subnormals."""
        return max(self.floor, FP32_FLOOR + MOST_BITS - self.bits)

    def delta_exponent(self, quantum: int) -> int:
        """Exponent of the band at an element whose quantum is ``2**quantum``."""
        return self.band if self.margin is None else max(self.band, quantum + self.margin)


@dataclass(frozen=True, slots=True)
class _Place:
    """|x| = (cell + rest / 2**shift) quanta, and one unit of ``rest`` is 2**unit."""

    cell: int
    rest: int
    half: int
    quantum: int
    unit: int

    @property
    def up(self) -> int:
        """1 where the magnitude rounds up: beyond the half, or on it with an odd cell."""
        return int(self.rest > self.half or (self.rest == self.half and self.cell & 1 == 1))

    def is_within(self, exponent: int) -> bool:
        """Whether the boundary is nearer than 2**exponent."""
        return abs(self.rest - self.half) < 2 ** max(exponent - self.unit, 0)


@dataclass(frozen=True, slots=True)
class FollowedActivation:
    """What following a site gave.

    Attributes:
        values: the recorder's.
        violations: indexes of entries that no honest log has: twice the band or farther from a boundary.
        corrections: how many elements took another value than their own rounding.
        near: how many lay within the band, where a log is obeyed.
        tied: how many lay within ``2**TIED`` of their own last places of a boundary.
        chance: how many entries an honest log has on average, from the follower's own quanta.
    """

    values: list[float]
    violations: list[int]
    corrections: int
    near: int
    tied: int
    chance: float


def round_bits(x: float, bits: int) -> float:
    """The nearest FP32 value of x whose last ``32 - bits`` mantissa bits are zero; ties to even.

    Subnormal values keep the spacing 2**(-149 + 32 - bits). -0.0 becomes +0.0; infinities and NaN come back as they
    are, and what rounds beyond the largest such value becomes an infinity.
    """
    _check_bits(bits)
    if not math.isfinite(x):
        return x
    place = _place(x, bits, FP32_FLOOR + MOST_BITS - bits)
    value = _value(x, place, place.up)
    return math.copysign(math.inf, x) if abs(value) > FP32_LARGEST else value


def record(xs: Sequence[float], grid: NearestGrid) -> tuple[list[float], list[LoggedElement]]:
    """The rounded values of a tensor in flat order, and its log: elements closer than the band to a boundary.

    Raises InvalidInput, naming the element, for a value that is not finite or rounds beyond FP32.
    """
    values: list[float] = []
    entries: list[LoggedElement] = []
    for i, x in enumerate(xs):
        place = _placed(x, grid, i)
        values.append(_checked(_value(x, place, place.up), i))
        if place.is_within(grid.delta_exponent(place.quantum)):
            entries.append(LoggedElement(i, place.up if x > 0.0 else 1 - place.up))
    return values, entries


def follow(ys: Sequence[float], entries: Sequence[LoggedElement], grid: NearestGrid) -> FollowedActivation:
    """The recorder's values from this machine's ``ys`` and the log.

    Raises InvalidInput, naming the element, for a value that is not finite or rounds beyond FP32.
    """
    sides = {entry.index: entry.side for entry in entries}
    found = FollowedActivation([], [], 0, 0, 0, 0.0)
    corrections = near = tied = 0
    chance = 0.0
    for i, y in enumerate(ys):
        place = _placed(y, grid, i)
        band = grid.delta_exponent(place.quantum)
        within = place.is_within(band)
        up = place.up
        if i in sides and within:
            up = sides[i] if y > 0.0 else 1 - sides[i]
        elif i in sides and not place.is_within(band + 1):
            found.violations.append(i)
        found.values.append(_checked(_value(y, place, up), i))
        corrections += up != place.up
        near += within
        tied += place.is_within(place.unit + TIED)
        chance += math.ldexp(1.0, band + 1 - place.quantum)
    return FollowedActivation(found.values, found.violations, corrections, near, tied, chance)


def adapt_threshold(
    straddles: Iterable[float], *, lowest: float = 0.25, highest: float = 0.5, rounds: int = 32
) -> float | None:
    """The largest tau, in quanta, that still logs every observed straddle; None if ``lowest`` does not.

    ``straddles`` holds, for elements that two machines rounded to two sides, both distances to the rounded value in
    quanta of the element's own binary exponent. The paper's Algorithm 3 with its faults mended: it returns the last
    value that succeeded, and takes the exponent of the element, not of the distance.

    A sample minimum promises nothing about the next sample: see ``closed_threshold``.
    """
    smallest = min(straddles, default=highest)
    if smallest <= lowest:
        return None
    good, bad = lowest, highest
    for _ in range(rounds):
        middle = 0.5 * (good + bad)
        if smallest > middle:
            good = middle
        else:
            bad = middle
    return good


def closed_threshold(divergence: float) -> float:
    """The largest tau, in quanta, that logs every straddle of machines no farther apart than ``divergence`` quanta."""
    return 0.5 - divergence


def _placed(x: float, grid: NearestGrid, index: int) -> _Place:
    if not math.isfinite(x):
        raise InvalidInput(f"element {index}: {x} is not finite and has no place on a grid")
    return _place(x, grid.bits, grid.lowest)


def _place(x: float, bits: int, lowest: int) -> _Place:
    (stored,) = struct.unpack("<Q", struct.pack("<d", abs(x)))
    field, significand = stored >> 52, stored & ((1 << 52) - 1)
    if field:
        significand |= 1 << 52
    unit = max(field, 1) - 1075
    # the significand has bits - 8 bits, the leading one at unit + 52
    quantum = max(unit + 52 - (bits - 9), lowest)
    shift = quantum - unit
    return _Place(significand >> shift, significand & ((1 << shift) - 1), 1 << (shift - 1), quantum, unit)


def _value(x: float, place: _Place, up: int) -> float:
    magnitude = math.ldexp(place.cell + up, place.quantum)
    return (-magnitude if x < 0.0 else magnitude) + 0.0


def _checked(value: float, index: int) -> float:
    if abs(value) > FP32_LARGEST:
        raise InvalidInput(f"element {index}: {value!r} is beyond the largest FP32 value {FP32_LARGEST!r}")
    return value


def _check_bits(bits: int) -> None:
    if not FEWEST_BITS <= bits <= MOST_BITS:
        raise InvalidInput(f"rounding: b_r {bits} is outside [{FEWEST_BITS}, {MOST_BITS}]")
