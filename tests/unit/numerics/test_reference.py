"""The rounding rule against exact rational arithmetic, and the exactness theorem of spec/rounding.md."""

from __future__ import annotations

import itertools
import math
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tallystick.errors import InvalidInput
from tallystick.numerics.reference import (
    FP32_LARGEST,
    T_FIXED,
    Grid,
    LoggedElement,
    RelativeBand,
    Rounded,
    ScaledBand,
    block_of,
    candidates,
    dithered_position,
    fingerprint,
    follow,
    record,
    round_element,
)
from tallystick.testing.formats import E4M3, E5M2, FP32, TOY, FloatFormat

WIDEST = 1 - 2.0**-40
"""The theorem holds up to this share of the band; the rest covers the rounding of distances."""

NARROW, UNSEEN = 2.0**-12, 2.0**-52
"""Quanta: below the first a dithered band's rest does not cover that rounding, and the second must be taken off."""


def bits(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


# ------------------------------------------------------------------------------------------------ one element


def exact_rounding(x: float, grid: Grid, t: float) -> tuple[Fraction, Fraction]:
    """Value, and distance in quanta to the nearest of k+t-1, k+t and k+t+1, without rounding error."""
    quantum = Fraction(2) ** grid.exponent(x)
    z = Fraction(x) / quantum
    cell = math.floor(z)
    value = (cell + (z - cell >= Fraction(t))) * quantum
    return value, min(abs(z - (cell + Fraction(t) + j)) for j in (-1, 0, 1))


def exact_exponent(x: float, precision: int, floor: int) -> int:
    """The quantum exponent by search: the least E >= max(floor, -149) with |x| < 2**(E + precision)."""
    exponent = max(floor, -149)
    while precision and abs(Fraction(x)) >= Fraction(2) ** (exponent + precision):
        exponent += 1
    return exponent


fp32_range = st.floats(-3.4e38, 3.4e38, allow_subnormal=True)
floors = st.integers(-160, 40)


@given(fp32_range, st.integers(0, 30), floors)
@example(0.0, 24, -149)
@example(2.0**-126, 24, -149)
@example(math.nextafter(2.0**-126, 0), 24, -149)
def test_the_quantum_is_the_larger_of_ulp_and_floor(x: float, precision: int, floor: int) -> None:
    assert Grid(precision, floor).exponent(x) == exact_exponent(x, precision, floor)


@given(fp32_range, st.integers(1, 24), floors)
def test_fixed_rounding_agrees_with_exact_arithmetic(x: float, precision: int, floor: int) -> None:
    grid = Grid(precision, floor)
    rounded = try_round(x, grid)
    value, distance = exact_rounding(x, grid, T_FIXED)
    assert Fraction(rounded.value) == value
    assert abs(Fraction(rounded.distance) - distance) <= Fraction(2) ** -53


def try_round(x: float, grid: Grid) -> Rounded:
    """Rounds, leaving aside the few draws that leave FP32."""
    assume(abs(x) < 1.7e38)
    assume(grid.floor < 100)
    return round_element(x, grid)


@given(st.floats(-1e30, 1e30), floors, st.integers(0, 2**32 - 1))
@example(2.0**-33 - 1, 0, 2**31)
def test_dithered_rounding_agrees_with_exact_arithmetic(x: float, floor: int, word: int) -> None:
    grid, t = Grid(0, floor), dithered_position(word)
    rounded = round_element(x, grid, t)
    value, distance = exact_rounding(x, grid, t)
    slack = Fraction(2) ** -53
    assert abs(Fraction(rounded.distance) - distance) <= slack
    assert Fraction(rounded.value) == value or distance <= slack


@given(fp32_range, st.integers(1, 24), floors)
def test_value_and_boundary_tell_the_same_story(x: float, precision: int, floor: int) -> None:
    rounded = try_round(x, Grid(precision, floor))
    assert rounded.value == math.ldexp(rounded.cell + rounded.boundary + rounded.side, rounded.exponent)
    assert math.copysign(1.0, rounded.value) == 1.0 or rounded.value < 0.0


def test_a_tie_between_two_boundaries_takes_the_one_of_the_own_cell() -> None:
    t = 0.25
    above, below = round_element(0.75, Grid(0, 0), t), round_element(0.75 - 1.0, Grid(0, 0), t)
    assert (above.boundary, above.distance, above.side) == (0, 0.5, 1)
    assert (below.cell, below.boundary, below.distance, below.side) == (-1.0, 0, 0.5, 1)
    lower = round_element(0.25, Grid(0, 0), 0.75)
    assert (lower.boundary, lower.distance, lower.side) == (0, 0.5, 0)
    assert round_element(0.25 - 2.0**-30, Grid(0, 0), 0.75).boundary == -1
    assert round_element(0.75 + 2.0**-30, Grid(0, 0), t).boundary == 1


def test_the_boundary_itself_rounds_up() -> None:
    assert round_element(T_FIXED, Grid(0, 0)).value == 1.0
    assert round_element(math.nextafter(T_FIXED, 0), Grid(0, 0)).value == 0.0


@pytest.mark.parametrize("x", [-0.0, -1e-60, -0.5, 0.0, 2.0**-1074, -(2.0**-1074)])
def test_negative_zero_never_comes_out(x: float) -> None:
    for grid in (Grid(0, 0), Grid(24, 0)):
        assert bits([round_element(x, grid).value]) == bits([0.0])


@given(fp32_range)
def test_a_24_bit_grid_gives_fp32_values(x: float) -> None:
    value = try_round(x, Grid(24, -149)).value
    assert struct.unpack("<f", struct.pack("<f", value))[0] == value
    assert FP32.holds(value)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, TOY], ids=lambda fmt: fmt.name)
def test_every_quarter_cell_of_a_toy_format_rounds_into_the_format(fmt: FloatFormat) -> None:
    grid = Grid(fmt.precision, fmt.quantum_floor)
    codes = [fmt.decode(code) for code in range(1 << fmt.bits)]
    values = sorted({value for value in codes if math.isfinite(value)})
    for low, high in itertools.pairwise(values):
        for sixteenth in range(17):
            rounded = round_element(low + (high - low) * sixteenth / 16, grid).value
            assert rounded in (low, high)
            assert fmt.holds(rounded)
        assert round_element(low, grid).value == low


@pytest.mark.parametrize(
    ("x", "grid", "reason"),
    [
        (math.nan, Grid(24, -149), "element 7: nan is not finite"),
        (-math.inf, Grid(0, 0), "element 7: -inf is not finite"),
        (FP32_LARGEST * (1 + 2.0**-24), Grid(24, -149), "element 7: .* is beyond the largest FP32"),
        (-3.5e38, Grid(8, -149), "element 7: .* is beyond the largest FP32"),
        (1e300, Grid(0, -149), r"element 7: 1e\+300 is beyond 2\*\*1023 quanta"),
        (sys.float_info.max, Grid(0, 1000), "element 7: .* overflow binary64"),
    ],
)
def test_a_value_without_a_place_is_refused_by_index(x: float, grid: Grid, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        round_element(x, grid, 2.0**-33, index=7)


def test_the_largest_fp32_value_is_kept() -> None:
    assert round_element(FP32_LARGEST, Grid(24, -149)).value == FP32_LARGEST
    assert round_element(FP32_LARGEST * (1 + 2.0**-26), Grid(24, -149)).value == FP32_LARGEST


def test_dither_covers_the_open_unit_interval_evenly() -> None:
    assert dithered_position(0) == 2.0**-33
    assert dithered_position(2**32 - 1) == 1 - 2.0**-33
    assert dithered_position(2**31) - dithered_position(2**31 - 1) == 2.0**-32


# ------------------------------------------------------------------------------------------------ the theorem


def exact_floor(old: float, band: int) -> int:
    """The floor exponent of a relative band: the largest with 2**floor <= |old| * 2**(band + 5), or -149."""
    if old == 0.0:
        return -149
    numerator, denominator = abs(old).as_integer_ratio()
    return max(numerator.bit_length() - denominator.bit_length() + band + 5, -149)


@dataclass(frozen=True)
class Pair:
    """A tensor as two machines see it."""

    xs: list[float]
    ys: list[float]
    precision: int
    band: ScaledBand | RelativeBand
    words: list[int] | None

    def deltas(self, values: list[float]) -> list[float]:
        band = self.band
        if isinstance(band, RelativeBand):
            pairs = zip(values, band.olds, strict=True)
            return [math.ldexp(max(abs(new), abs(old)), band.exponent) for new, old in pairs]
        blocks = [block_of(i, len(values), len(band.scales)) for i in range(len(values))]
        return [math.ldexp(1.0, max(band.scales[block] + band.exponent, -1022)) for block in blocks]

    def quanta(self, values: list[float]) -> list[float]:
        band = self.band
        if isinstance(band, RelativeBand):
            grids = [Grid(self.precision, exact_floor(old, band.exponent)) for old in band.olds]
        else:
            blocks = [block_of(i, len(values), len(band.scales)) for i in range(len(values))]
            grids = [Grid(self.precision, band.scales[block] + band.floor) for block in blocks]
        return [math.ldexp(1.0, grid.exponent(x)) for grid, x in zip(grids, values, strict=True)]

    def within_band(self) -> bool:
        """Whether |x - y| is what the theorem of spec/rounding.md 7 allows."""
        deltas = zip(self.deltas(self.xs), self.deltas(self.ys), strict=True)
        quanta = zip(self.quanta(self.xs), self.quanta(self.ys), strict=True)
        for x, y, both, widths in zip(self.xs, self.ys, deltas, quanta, strict=True):
            most = Fraction(WIDEST) * Fraction(min(both))
            if self.words is not None and min(both) < NARROW * max(widths):
                most -= Fraction(UNSEEN) * Fraction(max(widths))
            if x != y and abs(Fraction(x) - Fraction(y)) > most:
                return False
        return True

    def quanta_exceed(self, factor: float) -> bool:
        return all(
            quantum > factor * delta
            for values in (self.xs, self.ys)
            for quantum, delta in zip(self.quanta(values), self.deltas(values), strict=True)
        )


def check_exactness(pair: Pair) -> None:
    """Same values if q > 4 delta; no violation either if q >= 4.5 delta or the grid is absolute."""
    values, entries = record(pair.xs, pair.precision, pair.band, pair.words)
    followed, violations = follow(pair.ys, entries, pair.precision, pair.band, pair.words)
    if pair.precision == 0 or pair.quanta_exceed(4.5):
        assert violations == []
        assert bits(followed) == bits(values)
    else:
        others = [i for i in range(len(values)) if i not in violations]
        assert bits([followed[i] for i in others]) == bits([values[i] for i in others])


def interesting(draw: st.DrawFn, exponent: int, t: float, precision: int) -> float:
    """A value near a boundary, near a power of two, tiny, or anywhere, for a quantum around 2**exponent."""
    kind = draw(st.sampled_from(["boundary", "edge", "free", "tiny"]))
    sign = draw(st.sampled_from([1.0, -1.0]))
    near = draw(st.floats(-1.0, 1.0)) * 2.0 ** -draw(st.integers(0, 40))
    if kind == "boundary":
        return math.ldexp(draw(st.integers(-20, 20)) + t + near, exponent)
    if kind == "edge":
        return sign * math.ldexp(
            1.0 + near * 2.0 ** -max(precision - 2, 0), exponent + draw(st.integers(-3, 30))
        )
    if kind == "free":
        return math.ldexp(draw(st.floats(-(2.0**26), 2.0**26)), exponent)
    return sign * math.ldexp(abs(near), exponent - draw(st.integers(0, 200)))


@st.composite
def scaled_pairs(draw: st.DrawFn, dithered: bool) -> Pair:
    precision = 0 if dithered else draw(st.sampled_from([0, 1, 2, 5, 8, 24]))
    rows, n_blocks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    floor = draw(st.integers(-10, 3))
    exponent = min(floor, 0) - 3 - draw(st.sampled_from([0, 0, 1, 5, 20]))
    scales = tuple(draw(st.lists(st.integers(-145, 30), min_size=n_blocks, max_size=n_blocks)))
    band = ScaledBand(exponent, floor, scales)
    numel = rows * n_blocks
    words = draw(st.lists(st.integers(0, 2**32 - 1), min_size=numel, max_size=numel)) if dithered else None
    xs: list[float] = []
    ys: list[float] = []
    for i in range(numel):
        scale = scales[block_of(i, numel, n_blocks)]
        t = dithered_position(words[i]) if words else T_FIXED
        xs.append(interesting(draw, max(scale + floor, -149), t, precision))
        ys.append(xs[i] + draw(st.floats(-WIDEST, WIDEST)) * math.ldexp(1.0, scale + exponent))
    return Pair(xs, ys, precision, band, words)


@given(scaled_pairs(dithered=False))
@settings(max_examples=300, deadline=None)
def test_following_a_fixed_scaled_log_gives_the_recorded_bits(pair: Pair) -> None:
    assume(pair.within_band())
    assert pair.quanta_exceed(4)
    check_exactness(pair)


@given(scaled_pairs(dithered=True))
@settings(max_examples=300, deadline=None)
def test_following_a_dithered_log_gives_the_recorded_bits(pair: Pair) -> None:
    assume(pair.within_band())
    check_exactness(pair)


def near_boundaries(word: int, band: int, most: Fraction) -> Iterator[tuple[float, float]]:
    """(x, y) with quantum 1 at most ``most`` apart, where binary64 rounds what tells their sides.

    Each of x, near one and two bands from a boundary and near 0, with y as far off as allowed and at the boundary.
    """
    small = [Fraction(sign, 2**bits) for sign in (-1, 1) for bits in (52, 53, 54, 55, 56)]
    delta, t = Fraction(2) ** band, Fraction(dithered_position(word))
    for k, ends, off in itertools.product((-2, -1, 0, 5), (0, 1, 2), (Fraction(0), *small)):
        boundary = t + k
        for x in {float(boundary + ends * delta + off), float(boundary - ends * delta + off), float(off)}:
            far = [Fraction(x) + sign * (most - less) for sign in (-1, 1) for less in (0, 2**-53, 2**-54)]
            for y in {float(each) for each in (*far, boundary, *(boundary + each for each in small))}:
                if abs(Fraction(x) - Fraction(y)) <= most:
                    yield x, y


def followed_otherwise(word: int, band: int, most: Fraction) -> int:
    """How many of those pairs a follower of x's log gives another value or a violation."""
    scaled, found = ScaledBand(band, 0, (0,)), 0
    for x, y in near_boundaries(word, band, most):
        values, entries = record([x], 0, scaled, [word])
        found += follow([y], entries, 0, scaled, [word]) != (values, [])
    return found


ENDS_AND_MIDDLES = (0, 2**30, 2**31 - 1, 2**31, 2**32 - 1)


@pytest.mark.parametrize("word", ENDS_AND_MIDDLES)
def test_from_2_to_the_minus_12_quanta_on_the_share_covers_the_rounding_of_distances(word: int) -> None:
    assert followed_otherwise(word, -12, Fraction(WIDEST) / 2**12) == 0


@pytest.mark.parametrize("band", [-13, -14, -16, -30])
def test_below_that_it_does_not_and_two_to_the_minus_52_quanta_less_do(band: int) -> None:
    """Policies allow bands of 2**-16 quanta, and honest runs have some of 2**-14."""
    widest = Fraction(WIDEST) * Fraction(2) ** band
    assert followed_otherwise(2**32 - 1, band, widest) > 0
    for word in ENDS_AND_MIDDLES:
        assert followed_otherwise(word, band, widest - Fraction(UNSEEN)) == 0


def test_a_narrow_dithered_band_is_recorded_and_followed_and_an_unlogged_value_may_differ() -> None:
    """The example of spec/rounding.md 7, which no implementation may refuse."""
    band, words, centre = ScaledBand(-18, -2, (0,)), [2**32 - 1], -(2.0**-35)
    x, y = centre - 2.0**-18, centre - 2.0**-58
    assert abs(Fraction(x) - Fraction(y)) == Fraction(WIDEST) / 2**18
    assert record([x], 0, band, words) == ([-0.25], [])
    assert follow([y], [], 0, band, words) == ([0.0], [])


def test_beyond_2_to_the_53_a_false_log_moves_no_element_or_two_quanta() -> None:
    band, ys = ScaledBand(-8, 0, (0,)), [2.0**52 + 1, 2.0**53, 2.0**53 + 2, 2.0**54]
    followed, violations = follow(ys, [LoggedElement(i, 1) for i in range(4)], 0, band, [0] * 4)
    assert violations == []
    assert [after - before for before, after in zip(ys, followed, strict=True)] == [1.0, 0.0, 2.0, 0.0]


RELATIVE = [(24, -47), (24, -40), (24, -28), (24, -26), (8, -12), (8, -10), (11, -14), (3, -6), (1, -5)]
"""(precision, band), some as wide as the theorem allows: band = -(precision + 2)."""


def narrow(value: float) -> float:
    """The value in FP32, as a state holds it."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


@st.composite
def relative_pairs(draw: st.DrawFn) -> Pair:
    """New values near boundaries of their own grid, beside old values of any size; cancellation is common."""
    precision, exponent = draw(st.sampled_from(RELATIVE))
    xs: list[float] = []
    ys: list[float] = []
    olds: list[float] = []
    for _ in range(draw(st.integers(1, 6))):
        old = draw(st.sampled_from([0.0, 1.0, -1.0])) * math.ldexp(
            draw(st.floats(1.0, 2.0, exclude_max=True)), draw(st.integers(-149, 100))
        )
        olds.append(narrow(old))
        floor = exact_floor(olds[-1], exponent)
        kind = draw(st.sampled_from(["cancelled", "completely", "larger", "alike"]))
        if kind == "cancelled":
            x = interesting(draw, min(floor, 60), T_FIXED, precision)
        elif kind == "completely":
            x = draw(st.sampled_from([0.0, -0.0]))
        elif kind == "larger":
            x = interesting(draw, draw(st.integers(-149, 60)), T_FIXED, precision)
        else:
            x = olds[-1] * draw(st.sampled_from([0.5, -0.999, 1.0]))
        delta = math.ldexp(max(abs(x), abs(olds[-1])), exponent)
        xs.append(x)
        ys.append(x + draw(st.floats(-WIDEST, WIDEST)) * delta)
    return Pair(xs, ys, precision, RelativeBand(tuple(olds), exponent), None)


@given(relative_pairs())
@settings(max_examples=600, deadline=None)
def test_following_a_relative_log_gives_the_recorded_bits_cancellation_included(pair: Pair) -> None:
    assert isinstance(pair.band, RelativeBand)
    assume(pair.within_band())
    bound = min(16.0, 2.0 ** -(pair.precision + pair.band.exponent))
    assert pair.quanta_exceed(bound)
    check_exactness(pair)


@given(st.floats(-FP32_LARGEST, FP32_LARGEST), st.floats(-FP32_LARGEST, FP32_LARGEST), st.integers(1, 24))
@example(0.0, FP32_LARGEST, 24)
@example(2.0**-149, math.nextafter(2.0, 0.0), 24)
@example(math.nextafter(2.0, 0.0), 0.0, 24)
def test_a_relative_quantum_exceeds_sixteen_bands(new: float, old: float, precision: int) -> None:
    """With the widest band of spec/rounding.md 2, -(p + 4); no more than 16, as the second test shows."""
    assert Pair([new], [new], precision, RelativeBand((old,), -(precision + 4)), None).quanta_exceed(16)


@pytest.mark.parametrize("precision", [1, 8, 24])
def test_the_bound_of_sixteen_is_the_best_there_is(precision: int) -> None:
    old = math.nextafter(2.0, 0.0)
    cancelled = Pair([0.0], [0.0], precision, RelativeBand((old,), -(precision + 4)), None)
    grown = Pair([old], [old], precision, RelativeBand((0.0,), -(precision + 4)), None)
    for pair in (cancelled, grown):
        assert pair.quanta_exceed(16)
        assert not pair.quanta_exceed(16.0001)


def test_both_sides_of_the_floor_follow_exactly() -> None:
    """Old values from FP32's subnormals up; x in the first cells of the floor and around its upper end."""
    for precision, band in RELATIVE:
        xs: list[float] = []
        ys: list[float] = []
        olds: list[float] = []
        for exponent in range(-149, 120, 7):
            for old in (math.ldexp(1.0, exponent), -math.ldexp(1.99, exponent)):
                floor = exact_floor(narrow(old), band)
                delta = math.ldexp(abs(narrow(old)), band)
                cells = (-2, -1, 0, 1, 2**precision - 1, 2**precision, -(2**precision), -(2**precision) - 1)
                for cell, offset, step in itertools.product(cells, (0.0, 0.3, T_FIXED), (-0.99, 0.0, 0.99)):
                    x = math.ldexp(cell + offset, floor) + step * delta
                    for y in (x - 0.99 * delta, x - 0.4 * delta, x + 0.7 * delta, x + 0.99 * delta):
                        if abs(y - x) < delta:
                            xs.append(x)
                            ys.append(y)
                            olds.append(narrow(old))
        check_exactness(Pair(xs, ys, precision, RelativeBand(tuple(olds), band), None))


@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("band", [-26, -27, -47])
def test_both_sides_of_every_power_of_two_follow_exactly(band: int, grown: bool) -> None:
    """Old values alike, or zero and so without a floor."""
    xs: list[float] = []
    ys: list[float] = []
    for exponent in range(-148, 127):
        for edge in (math.ldexp(1.0, exponent), -math.ldexp(1.0, exponent)):
            delta = math.ldexp(abs(edge), band)
            for x_step in (-2.0, -1.7, -0.99, -0.5, -1e-3, 0.0, 1e-3, 0.5, 0.99, 1.7, 2.0):
                for y_step in (-0.99, -0.5, 0.0, 0.5, 0.99):
                    xs.append(edge + x_step * delta)
                    ys.append(edge + (x_step + y_step) * delta)
    olds = [0.0 if grown else x for x in xs]
    check_exactness(Pair(xs, ys, 24, RelativeBand(tuple(olds), band), None))


def test_a_band_of_a_quarter_quantum_can_make_an_honest_entry_a_violation_at_a_binade_edge() -> None:
    """Below 4.5 bands to the quantum a negative value is logged on one side and looks far from the other."""
    x, y = -1.0 + 0.249 * 2.0**-24, -1.0 - 0.0001 * 2.0**-24
    band = RelativeBand((0.0,), -26)
    values, entries = record([x], 24, band)
    assert entries == [LoggedElement(0, 0)]
    assert follow([y], entries, 24, band) == (values, [0])
    narrower = RelativeBand((0.0,), -27)
    assert follow([y], record([x], 24, narrower)[1], 24, narrower) == (values, [])


def test_the_floor_of_a_relative_band_closes_cancellation_against_a_large_old_value() -> None:
    """With FP32's own quantum at x the same two values would not come together, log or not."""
    old = 1.0
    x = 2.0**-27 * (1 + 2.0**-23 * (T_FIXED - 0.5))
    y = x + 0.9 * 2.0**-47
    pair = Pair([x], [y], 24, RelativeBand((old,)), None)
    assert pair.within_band()
    assert pair.quanta([x]) == pair.quanta([y]) == [2.0**-42]
    check_exactness(pair)
    fine = ScaledBand(-47, -149, (0,))
    values, entries = record([x], 24, fine)
    assert Grid(24, -149).exponent(x) == -51
    assert follow([y], entries, 24, fine)[0] != values


def test_what_is_left_of_a_complete_cancellation_is_zero_on_both_sides() -> None:
    noise = 0.99 * 2.0**-47
    band = RelativeBand((1.0, 1.0, -1.0))
    assert record([0.0, noise, -noise], 24, band) == ([0.0, 0.0, 0.0], [])
    assert follow([noise, -noise, 0.0], [], 24, band) == ([0.0, 0.0, 0.0], [])


def test_the_floor_follows_the_old_value_and_never_the_new() -> None:
    quantum = 2.0**-42
    assert record([0.46 * quantum] * 3, 24, RelativeBand((1.0, 1.99, 2.0)))[0] == [quantum, quantum, 0.0]
    assert record([2.0**-149] * 2, 24, RelativeBand((0.0, 2.0**-107)))[0] == [2.0**-149] * 2
    assert record([2.0**-149], 24, RelativeBand((2.0**-105,)))[0] == [0.0]


@pytest.mark.parametrize("old", [math.inf, -math.inf, math.nan, 2.0**128, -1e300])
def test_an_old_value_outside_fp32_is_refused_by_index(old: float) -> None:
    good = RelativeBand((FP32_LARGEST, -FP32_LARGEST))
    assert record([1.0, 2.0], 24, good)[0] == follow([1.0, 2.0], [], 24, good)[0] == [0.0, 0.0]
    bad = RelativeBand((1.0, old))
    for run in (record, lambda xs, p, band: follow(xs, [], p, band), candidates):
        with pytest.raises(InvalidInput, match=r"element 1: old value .* is not within the range of FP32"):
            run([1.0, 2.0], 24, bad)


def test_a_follower_whose_own_rounding_leaves_fp32_takes_the_recorded_value() -> None:
    last = FP32_LARGEST + T_FIXED * 2.0**104
    x, y = last - 2.0**97, last + 2.0**97
    pair = Pair([x], [y], 24, RelativeBand((FP32_LARGEST,), -28), None)
    assert pair.within_band()
    check_exactness(pair)
    assert record([x], 24, pair.band) == ([FP32_LARGEST], [LoggedElement(0, 0)])
    with pytest.raises(InvalidInput, match=r"element 0: .* is beyond the largest FP32"):
        record([y], 24, pair.band)
    with pytest.raises(InvalidInput, match=r"element 0: .* is beyond the largest FP32"):
        follow([x], [LoggedElement(0, 1)], 24, pair.band)


@pytest.mark.parametrize("x", [2.0**53, 2.0**53 + 2, -(2.0**53) - 2, 2.0**54 + 4, 2.0**900])
@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_multiples_too_large_for_a_fraction_are_kept(x: float, word: int) -> None:
    """The cell beside them is not a binary64 number; the value is reached without going through it."""
    band = ScaledBand(-8, 0, (0,))
    values, entries = record([x], 0, band, [word])
    assert values == [x]
    assert follow([x], entries, 0, band, [word]) == ([x], [])


@pytest.mark.parametrize("fmt", [E4M3, E5M2, TOY], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shift", [0, 1, 2])
def test_every_pair_near_every_toy_value_follows_exactly(fmt: FloatFormat, shift: int) -> None:
    """All 8-bit codes, at their own and two coarser precisions; x all over a cell, y all over the band."""
    floor = fmt.quantum_floor + shift
    band = ScaledBand(-3, 0, (floor,))
    steps = [j / 4 * WIDEST for j in range(-4, 5)]
    codes = [fmt.decode(code) for code in range(1 << fmt.bits)]
    values = sorted({value for value in codes if math.isfinite(value) and abs(value) < 64})
    xs: list[float] = []
    ys: list[float] = []
    for low, high in itertools.pairwise(values):
        for j in range(0, 32, 3):
            x = low + (high - low) * (j / 32 + 0.0029)
            xs += [x] * len(steps)
            ys += [x + step * math.ldexp(1.0, floor - 3) for step in steps]
    limit = Fraction(WIDEST) * Fraction(2) ** (floor - 3)
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if abs(Fraction(x) - Fraction(y)) <= limit]
    assert len(pairs) > len(xs) // 2
    check_exactness(Pair([x for x, _ in pairs], [y for _, y in pairs], fmt.precision - shift, band, None))


def noisy_pair(dithered: bool) -> Pair:
    """600 values off any simple fraction, and noise of 0.9 bands, from a fixed linear congruence."""
    state = 12345
    draws: list[float] = []
    for _ in range(1800):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        draws.append(state / 2**64)
    xs = [20 * draw - 10 for draw in draws[:600]]
    ys = [x + (2 * draw - 1) * 0.9 * 2.0**-7 for x, draw in zip(xs, draws[600:1200], strict=True)]
    words = [int(draw * 2**32) for draw in draws[1200:]] if dithered else None
    return Pair(xs, ys, 0, ScaledBand(-7, -3, (0, 0, 0)), words)


@pytest.mark.parametrize("dithered", [False, True])
def test_without_the_log_the_same_pair_differs(dithered: bool) -> None:
    pair = noisy_pair(dithered)
    values, entries = record(pair.xs, 0, pair.band, pair.words)
    assert pair.within_band()
    assert follow(pair.ys, entries, 0, pair.band, pair.words) == (values, [])
    without, _ = record(pair.ys, 0, pair.band, pair.words)
    wrong = [i for i, (left, right) in enumerate(zip(values, without, strict=True)) if left != right]
    assert wrong
    assert set(wrong) <= {entry.index for entry in entries}
    assert len(entries) == pytest.approx(600 * 2 * 2.0**-4, rel=0.4)


def test_noise_below_the_floor_rounds_to_zero_on_both_sides() -> None:
    band = ScaledBand(-40, -20, (0,))
    noise = [1e-17, -3e-17, 2e-18]
    assert record(noise, 24, band) == ([0.0, 0.0, 0.0], [])
    assert follow([-value for value in noise], [], 24, band) == ([0.0, 0.0, 0.0], [])


def test_blocks_are_rows_and_each_has_its_own_grid() -> None:
    assert [block_of(i, 6, 3) for i in range(6)] == [0, 0, 1, 1, 2, 2]
    values, entries = record([0.3, 1.3, 0.3, 1.3], 0, ScaledBand(-6, 0, (0, -1)))
    assert (values, entries) == ([0.0, 1.0, 0.5, 1.5], [])
    assert record([], 0, ScaledBand(-6, 0, (0,))) == ([], [])


# ---------------------------------------------------------------------------------------- outside the theorem


def test_an_entry_out_of_reach_is_reported_and_not_obeyed() -> None:
    band = ScaledBand(-6, 0, (0,))
    boundary = T_FIXED
    inside, outside = boundary - 1.99 * 2.0**-6, boundary - 2.0 * 2.0**-6
    assert follow([inside, outside], [LoggedElement(0, 1), LoggedElement(1, 1)], 0, band) == ([1.0, 0.0], [1])


def test_the_whole_band_is_outside_the_guarantee() -> None:
    """The computed distance of a tiny x rounds up to delta: unlogged, though the exact one is smaller."""
    x, y, band = 2.0**-90, 2.0**-33, ScaledBand(-33, 0, (0,))
    assert abs(Fraction(y) - Fraction(x)) < Fraction(2) ** -33
    values, entries = record([x], 0, band, [0])
    assert (values, entries) == ([0.0], [])
    assert follow([y], entries, 0, band, [0]) == ([1.0], [])
    assert follow([y * 0.999], entries, 0, band, [0]) == (values, [])


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([LoggedElement(1, 0), LoggedElement(0, 0)], "log: index 0 after 1"),
        ([LoggedElement(0, 0), LoggedElement(0, 0)], "log: index 0 after 0"),
        ([LoggedElement(2, 0)], "log: index 2 after -1 in a tensor of 2"),
        ([LoggedElement(-1, 0)], "log: index -1"),
        ([LoggedElement(0, 2)], "log: side 2 of element 0"),
    ],
)
def test_entries_out_of_order_or_range_are_refused(entries: list[LoggedElement], reason: str) -> None:
    assert follow([0.5, 0.5], [LoggedElement(0, 0), LoggedElement(1, 1)], 0, ScaledBand(-3, 0, (0,)))[0] == [
        0.0,
        1.0,
    ]
    with pytest.raises(InvalidInput, match=reason):
        follow([0.5, 0.5], entries, 0, ScaledBand(-3, 0, (0,)))


@pytest.mark.parametrize(
    ("precision", "band", "words", "reason"),
    [
        (24, ScaledBand(-3, 0, (0,)), [0, 0], "dither: needs an absolute grid"),
        (0, ScaledBand(-3, 0, (0,)), [0], "dither: 1 words for 2 elements"),
        (0, ScaledBand(-3, 0, (0,)), [0, 2**32], "dither: word 4294967296"),
        (0, ScaledBand(0, 3, (0,)), None, "band: exponent 0 is not negative"),
        (0, ScaledBand(-3, 0, (0, 0, 0)), None, "band: 3 blocks do not divide 2"),
        (0, ScaledBand(-3, 0, ()), None, "band: 0 blocks"),
        (24, RelativeBand((0.0,)), None, "band: 1 old values for 2"),
        (24, RelativeBand((0.0, math.inf)), None, "element 1: old value inf is not within the range of FP32"),
        (54, ScaledBand(-3, 0, (0,)), None, "precision 54"),
        (0, ScaledBand(-3, 1, (1000,)), None, "floor exponent 1001"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    precision: int, band: ScaledBand | RelativeBand, words: list[int] | None, reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason):
        record([0.5, 0.25], precision, band, words)


# ------------------------------------------------------------------------------------------------- candidates


@given(st.one_of(scaled_pairs(dithered=False), scaled_pairs(dithered=True), relative_pairs()))
@settings(max_examples=300, deadline=None)
def test_the_recorded_value_is_a_candidate_of_whoever_is_within_the_band(pair: Pair) -> None:
    assume(pair.within_band())
    assume(pair.precision == 0 or pair.quanta_exceed(4.5))
    values, _ = record(pair.xs, pair.precision, pair.band, pair.words)
    own, _ = record(pair.ys, pair.precision, pair.band, pair.words)
    found = {i: pairs for i, *pairs in candidates(pair.ys, pair.precision, pair.band, pair.words)}
    for i, (value, mine) in enumerate(zip(values, own, strict=True)):
        assert value in found.get(i, [mine])
        assert mine in found.get(i, [mine])


def test_a_candidate_has_both_values_beside_its_boundary() -> None:
    band = ScaledBand(-6, 0, (0,))
    assert candidates([0.45, 0.1, 0.46, -0.55, 3.0], 0, band) == [
        (0, 0.0, 1.0),
        (2, 0.0, 1.0),
        (3, -1.0, 0.0),
    ]
    assert candidates([], 0, band) == []
    with pytest.raises(InvalidInput, match="element 1: nan"):
        candidates([0.45, math.nan], 0, band)


# ------------------------------------------------------------------------------------------------ fingerprint


def test_a_fingerprint_is_a_sum_of_weighted_encodings() -> None:
    golden = 0x9E3779B97F4A7C15
    assert fingerprint({}) == fingerprint({"a": []}) == 0
    assert fingerprint({"a": [1.0]}) == 0x3F800001
    assert fingerprint({"a": [0.0, 0.0]}) == 1 + golden
    assert fingerprint({"a": [], "b": [0.0]}) == (golden << 40) % 2**64 | 1


@given(
    st.dictionaries(
        st.text(max_size=3), st.lists(st.floats(width=32, allow_nan=False), max_size=5), min_size=1
    )
)
def test_every_single_change_of_a_state_changes_its_fingerprint(tensors: dict[str, list[float]]) -> None:
    """Not so for two changes at once, which can be made to cancel: the weights are public."""
    before = fingerprint(tensors)
    assert fingerprint(dict(reversed(tensors.items()))) == before
    for name, values in tensors.items():
        for i, value in enumerate(values):
            changed = [*values[:i], -value, *values[i + 1 :]]
            assert fingerprint({**tensors, name: changed}) != before
        assert fingerprint({**tensors, name: [*values, 0.0]}) != before


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (0.1, "w: element 1: 0.1 is not an FP32 value"),
        (2.0**-150, "w: element 1: .* is not an FP32 value"),
        (2.0**128, "w: element 1: .* is beyond the largest FP32 value"),
    ],
)
def test_a_fingerprint_is_of_fp32_values_only(value: float, reason: str) -> None:
    fingerprint({"w": [0.0, narrow(0.1), 2.0**-149, FP32_LARGEST, -math.inf]})
    with pytest.raises(InvalidInput, match=reason):
        fingerprint({"w": [0.0, value]})
