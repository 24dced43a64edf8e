"""Rounding to b_r bits: the scalar reference, the tensor form and the kernel give one answer, and following is exact."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.numerics import nearest, nearest_tensors
from tallystick.numerics.log import SparseEntries
from tallystick.numerics.nearest import NearestGrid, adapt_threshold, closed_threshold
from tallystick.numerics.reference import FP32_LARGEST, LoggedElement

BITS = pytest.mark.parametrize("bits", range(26, 33))
RNG = np.random.default_rng(7)


def on_the_edge(bits: int) -> list[float]:
    """Ties, both sides of ties, powers of two and their neighbours, subnormals, both zeros, the ends of FP32."""
    eps = 2.0 ** (9 - bits)
    values: list[float] = [0.0, -0.0, 2.0**-149, 2.0**-150, 1.5 * 2.0**-149, 2.0**-126, 2.0**-200, 5e-324]
    values += [2.0 ** (-149 + 32 - bits) * k for k in (0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 3.5)]
    for exponent in (-130, -126, -1, 0, 1, 40, 126):
        one = math.ldexp(1.0, exponent)
        for k in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 0.25, 0.75, -0.25, -0.5):
            tie = one * (1.0 + k * eps)
            values += [tie, math.nextafter(tie, math.inf), math.nextafter(tie, 0.0)]
    values += [FP32_LARGEST * 0.999]
    return values + [-v for v in values]


def mixed(bits: int, n: int = 3000) -> list[float]:
    """Edges, numbers of all sizes, and many on exact ties."""
    wide = np.ldexp(RNG.standard_normal(n), RNG.integers(-160, 120, n))
    ties = np.ldexp(2.0 * RNG.integers(2**15, 2**16, n) + 1, RNG.integers(-30, 10, n)) * 2.0 ** (26 - bits)
    near = ties * (1.0 + RNG.integers(-3, 4, n) * 2.0**-52)
    return on_the_edge(bits) + wide.tolist() + ties.tolist() + near.tolist()


def bits_of(values: list[float] | np.ndarray) -> list[bytes]:
    return [struct.pack("<d", v) for v in values]


GRIDS = [(-90, -94, None), (-30, -44, None), (-20, -24, -2), (-149, -151, -2), (-36, -40, -8)]


@BITS
def test_the_three_forms_round_alike(bits: int) -> None:
    values = [*mixed(bits), math.inf, -math.inf, math.nan, FP32_LARGEST, 1e39, -1e39, 1e300]
    wanted = [nearest.round_bits(v, bits) for v in values]
    x = torch.tensor(values, dtype=torch.float64)
    fused = nearest_tensors.round_bits(x, bits)
    place = nearest_tensors._place(torch.where(torch.isfinite(x), x, 0.0), bits, -149 + 32 - bits)
    plain = nearest_tensors._value(place, place.up)
    assert bits_of(fused.numpy()) == bits_of(wanted)
    finite = [i for i, v in enumerate(wanted) if math.isfinite(v)]
    assert bits_of(plain[finite].numpy()) == bits_of([wanted[i] for i in finite])


def test_all_bits_are_the_machine_s_own_cast() -> None:
    values = np.array([*mixed(32), math.inf, -math.inf, math.nan, FP32_LARGEST, 3.4028235677973366e38, 1e300])
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = values.astype(np.float32).astype(np.float64) + 0.0
    found = np.array([nearest.round_bits(v, 32) for v in values])
    assert np.array_equal(found.view(np.int64), wanted.view(np.int64))


@BITS
def test_a_rounded_value_has_zeros_at_the_end_and_is_nearest(bits: int) -> None:
    for value in mixed(bits, 200):
        rounded = nearest.round_bits(value, bits)
        (stored,) = struct.unpack("<I", struct.pack("<f", rounded))
        assert stored % 2 ** (32 - bits) == 0
        step = 2 ** (32 - bits)
        if not 0 < stored & 0x7FFFFFFF < 0x7F000000:
            continue
        for other in (stored - step, stored + step):
            (neighbour,) = struct.unpack("<f", struct.pack("<I", other))
            near, far = abs(rounded - value), abs(neighbour - value)
            assert near <= far
            assert near != far or stored // step % 2 == 0, "a tie goes to even"


@BITS
@pytest.mark.parametrize("floor,band,margin", GRIDS)
def test_the_three_forms_record_and_follow_alike(
    bits: int, floor: int, band: int, margin: int | None
) -> None:
    grid = NearestGrid(bits, floor, band, margin)
    xs = mixed(bits)
    values, entries = nearest.record(xs, grid)
    x = torch.tensor(xs, dtype=torch.float64)
    for recorder in (nearest_tensors.record_nearest, nearest_tensors._record_tensor):
        out = torch.empty_like(x)
        found = recorder(x, grid, out=out, name="x")
        assert bits_of(out.numpy()) == bits_of(values)
        assert list(zip(found.indexes.tolist(), found.symbols.tolist(), strict=True)) == [
            (e.index, e.side) for e in entries
        ]
    assert entries, "nothing was near: the test would show nothing"

    ys = [v * (1.0 + s * 2.0**-51) for v, s in zip(xs, RNG.integers(-3, 4, len(xs)), strict=True)]
    forged = [
        *entries,
        *(LoggedElement(i, 1) for i in range(0, len(xs), 97) if i not in {e.index for e in entries}),
    ]
    forged.sort(key=lambda e: e.index)
    wanted = nearest.follow(ys, forged, grid)
    log = SparseEntries(
        len(xs), 1, np.array([e.index for e in forged]), np.array([e.side for e in forged], dtype=np.int64)
    )
    y = torch.tensor(ys, dtype=torch.float64)
    for follower in (nearest_tensors.follow_nearest, nearest_tensors._follow_tensor):
        out = torch.empty_like(y)
        seen = follower(y, grid, log, out=out, name="y")
        assert bits_of(out.numpy()) == bits_of(wanted.values)
        assert (seen.violations, seen.corrections, seen.near, seen.tied) == (
            len(wanted.violations), wanted.corrections, wanted.near, wanted.tied,
        )  # fmt: skip
        assert seen.violation == (wanted.violations[0] if wanted.violations else -1)
        assert seen.chance == pytest.approx(wanted.chance)
    assert wanted.violations


def test_an_empty_tensor_has_no_entries() -> None:
    grid = NearestGrid(32, -36, -40)
    nothing = torch.empty(0, dtype=torch.float64)
    for recorder in (nearest_tensors.record_nearest, nearest_tensors._record_tensor):
        assert len(recorder(nothing, grid, out=nothing.clone(), name="x")) == 0
    for follower in (nearest_tensors.follow_nearest, nearest_tensors._follow_tensor):
        assert follower(nothing, grid, SparseEntries.none(0, 1), out=nothing.clone(), name="x").near == 0
    assert nearest.record([], grid) == ([], [])
    assert nearest_tensors.round_bits(nothing, 30).numel() == 0


@pytest.mark.parametrize(
    "bad", [math.inf, -math.inf, math.nan, 1e39, -(2.0**128), FP32_LARGEST * (1 + 2.0**-24)]
)
def test_what_is_not_finite_stops_the_party_by_name(bad: float) -> None:
    grid = NearestGrid(32, -36, -40)
    x = torch.tensor([1.0, 2.0, bad, 4.0], dtype=torch.float64)
    none = SparseEntries.none(4, 1)
    for act in (
        lambda: nearest_tensors.record_nearest(x, grid, out=torch.empty_like(x), name="conv"),
        lambda: nearest_tensors._record_tensor(x, grid, out=torch.empty_like(x), name="conv"),
        lambda: nearest_tensors.follow_nearest(x, grid, none, out=torch.empty_like(x), name="conv"),
        lambda: nearest_tensors._follow_tensor(x, grid, none, out=torch.empty_like(x), name="conv"),
    ):
        with pytest.raises(Nondeterminism, match="conv: element 2 is not finite or does not fit"):
            act()
    with pytest.raises(InvalidInput, match="element 2"):
        nearest.record(x.tolist(), grid)


@pytest.mark.parametrize(
    "arguments,reason",
    [((25, -36, -40), "b_r 25"), ((33, -36, -40), "b_r 33"), ((32, -36, -37), "a quarter of the floor"),
     ((32, -36, -40, -1), "above a quarter")],
)  # fmt: skip
def test_a_grid_on_which_following_is_not_exact_is_refused(arguments: tuple[int, ...], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        NearestGrid(*arguments)


@given(
    st.integers(26, 32),
    st.sampled_from([None, -2, -3, -9]),
    st.lists(st.tuples(st.floats(-(2.0**40), 2.0**40), st.floats(-1.0, 1.0)), min_size=1, max_size=30),
)
def test_following_is_exact_below_the_band_wherever_the_values_lie(
    bits: int, margin: int | None, pairs: list[tuple[float, float]]
) -> None:
    """Completeness and soundness: |x - y| below eps/2 - tau at the smaller of the two quanta gives x's values back."""
    grid = NearestGrid(bits, -30, -34, margin)
    xs, ys = [], []
    for x, moved in pairs:
        quantum = max(2.0**-30, 2.0 ** (math.frexp(x)[1] - 1 - (bits - 9)) if x else 0.0)
        delta = 2.0**-34 if margin is None else max(2.0**-34, quantum * 2.0**margin / 2)
        xs.append(x)
        ys.append(x + moved * delta * 0.999)
    values, entries = nearest.record(xs, grid)
    found = nearest.follow(ys, entries, grid)
    assert found.values == values
    assert found.violations == []


@pytest.mark.parametrize("bits", [26, 29, 32])
def test_without_the_log_the_same_pairs_differ(bits: int) -> None:
    """The control of the test above, at ties: with the log equal, without it not."""
    grid = NearestGrid(bits, -60, -64, -2)
    eps = 2.0 ** (9 - bits)
    xs = [1.0 + (k + 0.5) * eps + eps / 64 for k in range(20)]
    ys = [1.0 + (k + 0.5) * eps - eps / 64 for k in range(20)]
    values, entries = nearest.record(xs, grid)
    assert nearest.follow(ys, [], grid).values != values
    found = nearest.follow(ys, entries, grid)
    assert (found.values, found.corrections) == (values, 20)


def test_an_own_value_beyond_the_band_is_not_moved_and_beyond_two_bands_is_a_violation() -> None:
    """The two-sided test: with the recorder's test alone each of these entries would be obeyed."""
    grid = NearestGrid(32, -60, -64, -4)
    eps = 2.0**-23
    boundary = 1.0 + 0.5 * eps
    for away, obeyed, violation in (
        (0.99, True, False),
        (1.01, False, False),
        (1.99, False, False),
        (2.0, False, True),
    ):
        y = boundary - away * eps / 16
        found = nearest.follow([y], [LoggedElement(0, 1)], grid)
        assert (found.values[0] == 1.0 + eps, found.violations == [0]) == (obeyed, violation), away


def test_the_paper_s_conditions_alone_are_not_sufficient() -> None:
    """Printed are d < eps and d < 2 tau, with tau = eps/4: a divergence of 0.45 eps passes both and is not followed."""
    grid = NearestGrid(32, -60, -64, -2)
    eps = 2.0**-23
    x, y = 1.0 + 0.5 * eps + 0.35 * eps, 1.0 + 0.5 * eps - 0.10 * eps
    assert abs(x - y) < eps and abs(x - y) < 2 * (eps / 4)
    values, entries = nearest.record([x], grid)
    assert nearest.follow([y], entries, grid).values != values


def test_a_threshold_is_the_largest_that_logs_every_straddle() -> None:
    straddles = [0.49, 0.31, 0.44]
    tau = adapt_threshold(straddles)
    assert tau is not None
    assert tau < 0.31 <= tau + 1e-9
    assert adapt_threshold([]) == pytest.approx(0.5)
    assert adapt_threshold([0.2]) is None, "the lowest threshold fails too"
    assert closed_threshold(0.2) < tau, "divergence 0.2 is more than the 0.19 these straddles show"
