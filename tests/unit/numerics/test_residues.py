"""The residue code: one rule in three forms, bit for bit, exact below its reach and honest about what lies beyond."""

# pyright: reportPrivateUsage=false
# The tensor path is called directly: from outside it is reached on other devices only.

from __future__ import annotations

import json
import math
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.numerics import random, reference, rounded_sites, rounding, rounding_tensors
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.log import Residues
from tallystick.numerics.reference import T_FIXED, ScaledBand

VECTORS = Path(__file__).parents[3] / "vectors" / "rounding"
KEY = (1, 2)
PATHS = {
    "kernel": (rounding.round_recorded_residues, rounding.round_followed_residues),
    "tensor": (rounding_tensors.record_residues_tensor, rounding_tensors.follow_residues_tensor),
}
DTYPES = [torch.float32, torch.float64]


def words_of(grid: SiteGrid, n: int) -> list[int] | None:
    return random.words(KEY, 0, n).tolist() if grid.dithered else None


def band_of(grid: SiteGrid) -> ScaledBand:
    return ScaledBand(grid.band, grid.floor, tuple(grid.scales.tolist()))


def bits_of(out: torch.Tensor) -> bytes:
    return out.numpy().tobytes()


def check(
    grid: SiteGrid, xs: list[float], ys: list[float], dtype: torch.dtype = torch.float64,
    stated: list[int] | None = None,
) -> tuple[list[float], list[float]]:  # fmt: skip
    """All three forms on the same values; ``stated`` parities instead of the recorded ones. Returns both results."""
    n, words, band = len(xs), words_of(grid, len(xs)), band_of(grid)
    x, y = torch.tensor(xs, dtype=dtype), torch.tensor(ys, dtype=dtype)
    bits = grid.residue_bits
    values, residues = reference.record_residues(x.double().tolist(), band, words, bits)
    used = residues if stated is None else stated
    followed, moved, violations = reference.follow_residues(y.double().tolist(), used, band, words, bits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding_tensors, "CHUNK", 7)
        for record, follow in PATHS.values():
            out = torch.full((n,), 7.0, dtype=torch.float64)
            assert record(x, grid, out=out, key=KEY, name="w") == Residues.of(residues, bits)
            assert bits_of(out) == np.array(values).tobytes()
            found = follow(y, grid, Residues.of(used, bits), out=out, key=KEY, name="w")
            assert bits_of(out) == np.array(followed).tobytes()
            assert (found.violations, found.moved) == (len(violations), len(moved))
            assert found.violation == (violations[0] if violations else -1)
            quanta = [Fraction(2) ** max(s + grid.floor, -149) for s in grid.scales.tolist()]
            each = [quanta[i * len(quanta) // n] ** 2 for i in range(n)]
            assert found.shifted == pytest.approx(
                float(sum(each[i] * steps**2 for i, steps in moved)), rel=1e-12
            )
            longest = 4 ** (bits - 1)
            assert found.largest == float(max(quanta) ** 2 * longest)
            if bits == 1:
                near = [i for i, _, _ in reference.candidates(y.double().tolist(), 0, band, words)]
                assert found.steer == pytest.approx(float(sum(each[i] for i in near)), rel=1e-12)
                assert found.near == len(near)
            else:
                assert (found.near, found.violations) == (n, 0)
                assert 0.0 <= found.steer <= float(sum(each)) * longest * (1.0 + 1e-12)
            assert found.energy == pytest.approx(math.fsum(v * v for v in followed), rel=1e-12, abs=1e-300)
    return values, followed


HALF = SiteGrid(0, -1, 0, False, [0], residue_bits=1)  # quantum 1, band half of it
QUARTER = SiteGrid(0, -2, 0, False, [0], residue_bits=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_goes_to_the_cell_of_the_stated_parity_that_is_nearest(dtype: torch.dtype) -> None:
    """The boundary is at 0.4529: 0.44 and 0.46 are on its two sides, -0.54 and -0.56 on those of -0.5471."""
    xs = [0.44, 0.46, 0.3, 0.46, -0.54, -0.56, 7.2, 0.0]
    ys = [0.46, 0.44, 0.72, 0.04, -0.56, -0.54, 7.6, -0.49]
    values, followed = check(HALF, xs, ys, dtype)
    assert values == [0.0, 1.0, 0.0, 1.0, 0.0, -1.0, 7.0, 0.0]
    assert followed == values
    alone, _ = reference.record_residues(ys, band_of(HALF))
    assert alone == [1.0, 0.0, 1.0, 0.0, -1.0, 0.0, 8.0, 0.0], "the log is needed in seven places of eight"


def test_a_tie_of_two_boundaries_goes_across_the_own_one() -> None:
    """Half a quantum from both boundaries of its cell: the own one, at k + t, is no farther than the band only below it."""
    step = 2.0**-20
    middle = T_FIXED + 0.5
    wide = SiteGrid(0, -1, 0, False, [0], residue_bits=1)
    # 0.95286: above its boundary at t, own and upper boundary half a quantum away: nearest is the own one, and the
    # distance is not below the band, so whatever is stated out there is a violation; a step to either side it is obeyed.
    for y, up, obeyed in ((middle, 1.0, 1.0), (middle - step, 1.0, 0.0), (middle + step, 1.0, 2.0)):
        values, followed = check(wide, [y], [y], stated=[0])
        assert (values, followed) == ([up], [obeyed])
        found = reference.follow_residues([y], [0], band_of(wide))
        assert found[2] == ([0] if obeyed == up else [])
    place = reference._place(middle, reference.Grid(0, 0), T_FIXED, 0)
    assert (place.boundary, place.distance, place.side) == (0, 0.5, 1)


def test_out_of_reach_a_parity_is_not_obeyed_and_counted() -> None:
    """With a band of a quarter quantum only values closer than that to a boundary may be moved."""
    inside, outside = T_FIXED - 0.2499, T_FIXED - 0.25
    _, followed = check(QUARTER, [0.0] * 4, [inside, outside, inside, 0.1], stated=[1, 1, 0, 1])
    assert followed == [1.0, 0.0, 0.0, 0.0]
    assert reference.follow_residues([inside, outside, inside, 0.1], [1, 1, 0, 1], band_of(QUARTER))[1:] == (
        [(0, 1)],
        [1, 3],
    )


def test_beyond_half_a_quantum_the_follower_is_two_quanta_off_and_cannot_know() -> None:
    """What the code does not prove: no violation, another value."""
    x, y = 0.44, 0.44 + 1.02
    values, followed = check(HALF, [x], [y])
    assert (values, followed) == ([0.0], [2.0])
    assert reference.follow_residues([y], [0], band_of(HALF))[2] == []
    values, followed = check(HALF, [0.0], [0.49])
    assert values == followed == [0.0]


@pytest.mark.parametrize("floor", [-149, -140, -30, 0, 60, 127])
@pytest.mark.parametrize("dithered", [False, True])
def test_powers_of_two_and_their_neighbours(floor: int, dithered: bool) -> None:
    grid = SiteGrid(0, -2, -1, dithered, [floor + 1], residue_bits=1)
    quantum = 2.0 ** max(floor, -149)
    points = [sign * quantum * 2.0**e for e in range(-3, 12) for sign in (1.0, -1.0)]
    xs = [p for point in points for p in (point, math.nextafter(point, 0.0), math.nextafter(point, math.inf))]
    n = len(xs)
    ys = [x + quantum * 0.24 * (-1.0) ** i for i, x in enumerate(xs)]
    values, followed = check(grid, xs, ys)
    assert followed == values
    assert all(math.copysign(1.0, v) == 1.0 for v in values if v == 0.0)
    assert all(abs(v - x) <= quantum for v, x in zip(values, xs, strict=True))
    assert n == 90


@pytest.mark.parametrize(("grid", "near"), [
    (SiteGrid(0, -4, -3, True, [-9], residue_bits=1), 0.5),
    (SiteGrid(0, -4, -3, False, [-9, 4, -30], residue_bits=1), 0.5),
    (SiteGrid(0, -6, -3, True, [-9, 4, -30], residue_bits=1), 0.125),
])  # fmt: skip
@pytest.mark.parametrize("forged", [0, 3, 900])
def test_long_runs_of_binary32_follow_alike(grid: SiteGrid, near: float, forged: int) -> None:
    """Where no element is close to a tie or to the band's end whole runs are decided at once; the forged ones are not."""
    generator = np.random.Generator(np.random.PCG64(7))
    rows = 4001
    size = np.repeat(2.0 ** grid.scales.astype(np.float64), rows)
    xs = generator.normal(size=size.size) * size
    x = torch.from_numpy(xs).float()
    y = torch.from_numpy(xs + generator.uniform(-0.9, 0.9, size.size) * size * 2.0**grid.band).float()
    results: list[tuple[bytes, Residues, bytes, rounded_sites.Followed]] = []
    for record, follow in PATHS.values():
        out = torch.full_like(x, 7.0)
        stated = record(x, grid, out=out, key=KEY, name="w")
        recorded = bits_of(out)
        bits = stated.values.copy()
        bits[: forged * 4 : 4] ^= 1
        found = follow(y, grid, Residues.of(bits), out=out, key=KEY, name="w")
        assert forged or bits_of(out) == recorded
        results.append((recorded, stated, bits_of(out), found))
    fused, plain = results
    assert fused[:3] == plain[:3]
    a, b = fused[3], plain[3]
    assert (a.near, a.moved, a.violation, a.violations) == (b.near, b.moved, b.violation, b.violations)
    assert (a.steer, a.shifted, a.largest) == (b.steer, b.shifted, b.largest)
    assert a.energy == pytest.approx(b.energy, rel=1e-12)
    assert a.moved > 100
    assert (a.violations > 0) == (forged > 0 and near < 0.5)


def test_rows_have_quanta_of_their_own() -> None:
    grid = SiteGrid(0, -3, -2, True, [0, -10, 5], residue_bits=1)
    generator = np.random.Generator(np.random.PCG64(3))
    scales = np.repeat([1.0, 2.0**-10, 32.0], 40)
    xs = generator.normal(size=120) * scales
    ys = xs + generator.uniform(-0.99, 0.99, size=120) * scales / 8
    values, followed = check(grid, xs.tolist(), ys.tolist())
    assert followed == values
    assert reference.record_residues(ys.tolist(), band_of(grid), words_of(grid, 120))[0] != values


def test_multiples_beyond_every_integer_type_keep_their_parity() -> None:
    grid = SiteGrid(0, -1100, -149, False, [0], residue_bits=1)
    xs = [1.0, -3.5, 1e-3, 2.0**53, 2.0**53 - 1, -(2.0**53) + 1, 2.0**60]
    values, followed = check(grid, xs, xs)
    assert values == followed == xs
    whole = SiteGrid(0, -1, 0, False, [0], residue_bits=1)
    _, parities = reference.record_residues(xs[3:], band_of(whole))
    assert parities == [0, 1, 1, 0]
    check(whole, xs[3:], xs[3:])


REFUSED = {"nan": math.nan, "infinity": math.inf, "minus infinity": -math.inf, "beyond 2**1023 quanta": 1e300}


@pytest.mark.parametrize("at", [0, 9, 20])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("path", PATHS)
def test_an_element_without_a_place_is_refused_by_index(name: str, at: int, path: str) -> None:
    grid = SiteGrid(0, -140, -139, True, [-10], residue_bits=1)
    good = [0.5, -1.0, 0.0] * 7
    check(grid, good, good)
    bad = [*good[:at], REFUSED[name], *good[at + 1 :]]
    record, follow = PATHS[path]
    x, out = torch.tensor(bad, dtype=torch.float64), torch.empty(21, dtype=torch.float64)
    with pytest.raises(Nondeterminism, match=f"^w: element {at} is not finite"):
        record(x, grid, out=out, key=KEY, name="w")
    with pytest.raises(Nondeterminism, match=f"^w: element {at} is not finite"):
        follow(x, grid, Residues.of([0] * 21), out=out, key=KEY, name="w")
    with pytest.raises(InvalidInput, match=f"element {at}: "):
        reference.record_residues(bad, band_of(grid), words_of(grid, 21))
    with pytest.raises(InvalidInput, match=f"element {at}: "):
        reference.follow_residues(bad, [0] * 21, band_of(grid), words_of(grid, 21))


def test_the_reference_refuses_what_does_not_fit_together() -> None:
    with pytest.raises(InvalidInput, match="band exponent -1 is above -1 octaves over the floor's -1"):
        reference.record_residues([0.0], ScaledBand(-1, -1, (0,)))
    with pytest.raises(InvalidInput, match="1 residues of 1 bits for 2 elements"):
        reference.follow_residues([0.0, 1.0], [0], ScaledBand(-1, 0, (0,)))
    with pytest.raises(InvalidInput, match="2 residues of 1 bits for 2 elements"):
        reference.follow_residues([0.0, 1.0], [0, 2], ScaledBand(-1, 0, (0,)))


@st.composite
def sites(draw: st.DrawFn) -> tuple[SiteGrid, list[float], list[float]]:
    """A grid, values, and values within (1 - 2**-40) of its band."""
    blocks = draw(st.integers(1, 4))
    rows = draw(st.integers(1, 12))
    above = draw(st.integers(1, 4))
    band = draw(st.integers(-12, -1))
    scales = draw(st.lists(st.integers(-90, 60), min_size=blocks, max_size=blocks))
    grid = SiteGrid(0, band, band + above, draw(st.booleans()), scales, residue_bits=1)
    deltas = np.repeat(2.0 ** (np.array(scales, dtype=np.float64) + band), rows)
    n = blocks * rows
    sizes = np.array(draw(st.lists(st.floats(-60.0, 60.0), min_size=n, max_size=n)))
    noise = np.array(draw(st.lists(st.floats(-1.0, 1.0), min_size=n, max_size=n)))
    xs = sizes * deltas
    return grid, xs.tolist(), (xs + noise * deltas * (1.0 - 2.0**-30)).tolist()


@given(sites())
@settings(max_examples=200, deadline=None)
def test_any_two_machines_within_the_band_agree(site: tuple[SiteGrid, list[float], list[float]]) -> None:
    grid, xs, ys = site
    values, followed = check(grid, xs, ys)
    assert followed == values
    parities = reference.record_residues(xs, band_of(grid), words_of(grid, len(xs)))[1]
    assert reference.follow_residues(ys, parities, band_of(grid), words_of(grid, len(xs)))[2] == []


@given(sites(), st.randoms())
@settings(max_examples=100, deadline=None)
def test_any_parities_move_an_element_by_one_quantum_at_most(
    site: tuple[SiteGrid, list[float], list[float]], chance: object
) -> None:
    """The freedom: whatever the log says, only elements within the band of a boundary move, and only across it."""
    grid, xs, ys = site
    words, band = words_of(grid, len(xs)), band_of(grid)
    stated = [chance.getrandbits(1) for _ in xs]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType, reportUnknownMemberType]
    check(grid, xs, ys, stated=stated)  # pyright: ignore[reportUnknownArgumentType]
    own, _ = reference.record_residues(ys, band, words)
    followed, moved, _ = reference.follow_residues(ys, stated, band, words)  # pyright: ignore[reportUnknownArgumentType]
    pairs = {i: (low, high) for i, low, high in reference.candidates(ys, 0, band, words)}
    for i, (value, plain) in enumerate(zip(followed, own, strict=True)):
        assert (value == plain) == (i not in dict(moved))
        if i in dict(moved):
            assert set(pairs[i]) == {value, plain}


def test_where_the_sparse_code_becomes_the_smaller_one() -> None:
    """At eight bands to the quantum the parities are smaller, at sixteen the entries: ``SPARSEST``, measured."""
    from tallystick.numerics.log import encode, encode_residues
    from tallystick.numerics.policy import SPARSEST

    n = 1 << 16
    x = torch.from_numpy(np.random.Generator(np.random.PCG64(5)).normal(size=n)).float()
    sizes = {}
    for octaves in (SPARSEST - 1, SPARSEST):
        grid = SiteGrid(0, -octaves - 1, -1, True, [0])
        out = torch.empty(n, dtype=torch.float64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rounded_sites, "DENSEST", 2)
            sizes[octaves] = len(encode(rounding.round_recorded(x, grid, out=out, key=KEY)))
    parity = SiteGrid(0, -2, -1, True, [0], residue_bits=1)
    plain = len(encode_residues(rounding.round_recorded_residues(x, parity, out=torch.empty(n), key=KEY)))
    assert plain == n // 8
    assert sizes[SPARSEST] < 0.7 * plain < plain < sizes[SPARSEST - 1] < 1.1 * plain


def test_a_shaped_tensor_and_a_result_in_place() -> None:
    grid = SiteGrid(0, -3, -2, True, [0, 1], residue_bits=1)
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    flat = torch.empty(30, dtype=torch.float64)
    expected = rounding.round_recorded_residues(x.reshape(-1), grid, out=flat, key=KEY)
    for record, _ in PATHS.values():
        shaped = x.clone()
        assert record(shaped, grid, out=shaped, key=KEY, name="w") == expected
        assert torch.equal(shaped.reshape(-1).double(), flat)


def test_a_sparse_follower_counts_what_its_entries_moved() -> None:
    """Of both forms: an entry that states the own side moves nothing."""
    from tallystick.numerics.log import SparseEntries

    grid = SiteGrid(0, -6, 0, False, [0])
    y = torch.tensor([0.45, 0.46, 0.45, 0.1] * 4, dtype=torch.float64)
    entries = SparseEntries(16, 1, np.arange(16), np.array([1, 0, 0, 1] * 4))
    for follow in (rounding.round_followed, rounding_tensors.follow_tensor):
        found = follow(y, grid, entries, out=torch.empty_like(y), old=None, key=KEY, name="w")
        assert (found.moved, found.shifted, found.violations) == (8, 8.0, 4)


@pytest.mark.parametrize(
    "folder",
    [
        f
        for f in (*sorted(VECTORS.glob("parity-*")), *sorted(VECTORS.glob("residues-*")))
        if not f.name.endswith("_fail")
    ],
    ids=lambda folder: folder.name,
)
def test_kernels_and_tensor_operations_give_the_vectors(folder: Path) -> None:
    case = json.loads((folder / "input.json").read_text(encoding="utf-8"))
    band, n = case["band"], len(case["xs"])
    assert case["words"] in (None, random.words(KEY, 0, n).tolist())
    dithered = case["words"] is not None
    grid = SiteGrid(
        0, band["exponent"], band["floor"], dithered, band["scales"], residue_bits=case.get("bits", 1)
    )
    xs, ys = ([float.fromhex(value) for value in case[name]] for name in ("xs", "ys"))
    values, _ = check(grid, xs, xs)
    assert [value.hex() for value in values] == case["values"]
    _, followed = check(grid, xs, ys, stated=case["used"])
    assert [value.hex() for value in followed] == case["followed"]


@pytest.mark.parametrize("n", [1, 7, 8, 9, 64, 1000])
def test_parities_are_packed_from_the_lowest_bit(n: int) -> None:
    bits = np.random.Generator(np.random.PCG64(n)).integers(0, 2, size=n)
    parities = Residues.of(bits)
    assert parities.values.tolist() == bits.tolist()
    assert [int(parities.planes[0][i >> 3]) >> (i & 7) & 1 for i in range(n)] == bits.tolist()


def test_parities_of_another_length_or_with_padding_are_refused() -> None:
    from tallystick.numerics.log import decode_residues, encode_residues

    data = encode_residues(Residues.of([1, 0, 1, 1, 0, 0, 0, 0, 1, 1]))
    assert data == bytes([0b00001101, 0b00000011])
    assert decode_residues(data, 10, 1).values.tolist() == [1, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    for wrong, n, reason in (
        (data[:1], 10, "10 elements of 1 bits need 2 bytes, got 1"),
        (data + b"\0", 10, "10 elements of 1 bits need 2 bytes, got 3"),
        (b"", 10, "10 elements of 1 bits need 2 bytes, got 0"),
        (data, 9, "padding bits of byte 1 of a plane are not zero"),
        (b"", 0, "n 0 is outside [1, 2**48]"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(reason)):
            decode_residues(wrong, n, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 3, 7, 8])
def test_more_bits_reach_farther(bits: int, dtype: torch.dtype) -> None:
    """Up to 2**(bits - 1) - 1/2 quanta apart all agree; half a quantum farther they do not, and no violation says so."""
    grid = SiteGrid(0, -3, -2, False, [0], residue_bits=bits)
    quantum, reach = 0.25, 2.0 ** (bits - 1) - 0.5
    xs = [0.1, 0.2, -0.7, 0.0, 5.0, -5.1]
    for way in (1.0, -1.0):
        near = [x + way * quantum * (reach - 0.01) for x in xs]
        values, followed = check(grid, xs, near, dtype)
        assert followed == values
        far = [x + way * quantum * (reach + 1.0) for x in xs]
        values, followed = check(grid, xs, far, dtype)
        assert all(abs(a - b) == quantum * 2**bits for a, b in zip(values, followed, strict=True))
    halved = reference.record_residues(near, band_of(grid), None, bits)[0]
    assert halved != values, "the log is needed"


@pytest.mark.parametrize("bits", [2, 3])
def test_a_multiple_as_far_on_both_sides_is_taken_across_the_nearest_boundary(bits: int) -> None:
    grid = SiteGrid(0, -1, 0, False, [0], residue_bits=bits)
    half = 1 << bits - 1
    for y, to in ((T_FIXED + 0.1, 1.0 - half), (T_FIXED + 0.9, 1.0 + half), (T_FIXED + 0.5, 1.0 - half)):
        own = reference.record_residues([y], band_of(grid), None, bits)
        assert own[0] == [1.0]
        _, followed = check(grid, [y], [y], stated=[(1 + half) % (1 << bits)])
        assert followed == [to]


@st.composite
def wide_sites(draw: st.DrawFn) -> tuple[SiteGrid, list[float], list[float]]:
    """A grid with residues of several bits, values, and values within their reach."""
    bits = draw(st.integers(2, 7))
    blocks, rows = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    floor = draw(st.integers(-6, 0))
    scales = draw(st.lists(st.integers(-90, 60), min_size=blocks, max_size=blocks))
    grid = SiteGrid(0, min(floor + bits - 2, -1), floor, draw(st.booleans()), scales, residue_bits=bits)
    quanta = np.repeat(2.0 ** (np.array(scales, dtype=np.float64) + floor), rows)
    n = blocks * rows
    sizes = np.array(draw(st.lists(st.floats(-60.0, 60.0), min_size=n, max_size=n)))
    noise = np.array(draw(st.lists(st.floats(-1.0, 1.0), min_size=n, max_size=n)))
    reach = (2.0 ** (bits - 1) - 0.5) * (1.0 - 2.0**-30)
    return grid, (sizes * quanta).tolist(), ((sizes + noise * reach) * quanta).tolist()


@given(wide_sites())
@settings(max_examples=200, deadline=None)
def test_any_two_machines_within_the_reach_of_several_bits_agree(
    site: tuple[SiteGrid, list[float], list[float]],
) -> None:
    grid, xs, ys = site
    values, followed = check(grid, xs, ys)
    assert followed == values


@pytest.mark.parametrize("bits", [1, 2, 3, 7, 8])
def test_long_runs_of_binary32_follow_alike_with_any_bits(bits: int) -> None:
    """The fused loops and the tensor operations, where most runs are decided at once and some are not."""
    grid = SiteGrid(0, -4 + min(bits, 3) - 1, -3, True, [-9, 2, -30], residue_bits=bits)
    generator = np.random.Generator(np.random.PCG64(11))
    rows = 4003
    size = np.repeat(2.0 ** grid.scales.astype(np.float64), rows)
    xs = generator.normal(size=size.size) * size
    reach = (2.0 ** (bits - 1) - 0.5) * 2.0**-3 * 0.98
    x = torch.from_numpy(xs).float()
    y = torch.from_numpy(xs + generator.uniform(-1.0, 1.0, size.size) * size * reach).float()
    results: list[tuple[bytes, Residues, bytes, int, float]] = []
    for record, follow in PATHS.values():
        out = torch.full_like(x, 7.0)
        stated = record(x, grid, out=out, key=KEY, name="w")
        recorded = bits_of(out)
        found = follow(y, grid, stated, out=out, key=KEY, name="w")
        assert bits_of(out) == recorded
        results.append((recorded, stated, bits_of(out), found.moved, found.shifted))
    assert results[0] == results[1]
    assert results[0][3] > 1000


def test_residues_of_other_bits_or_elements_than_the_sites_are_refused() -> None:
    grid = SiteGrid(0, -3, -2, False, [0], residue_bits=2)
    y = torch.zeros(4)
    for stated in (Residues.of([0] * 4, 1), Residues.of([0] * 5, 2)):
        with pytest.raises(InvalidInput, match=f"residues of {stated.bits} bits for {stated.n} elements"):
            rounding.round_followed_residues(y, grid, stated, out=y, name="w")


@pytest.mark.parametrize("bits", [2, 5, 7, 8])
@pytest.mark.parametrize("n", [1, 8, 13])
def test_residues_are_planes_of_packed_bits(bits: int, n: int) -> None:
    from tallystick.numerics.log import decode_residues, encode_residues

    values = np.random.Generator(np.random.PCG64(n)).integers(0, 1 << bits, size=n)
    data = encode_residues(Residues.of(values, bits))
    plane = (n + 7) // 8
    assert len(data) == bits * plane
    for i, value in enumerate(values.tolist()):
        read = [data[j * plane + (i >> 3)] >> (i & 7) & 1 for j in range(bits)]
        assert sum(bit << j for j, bit in enumerate(read)) == value
    assert decode_residues(data, n, bits) == Residues.of(values, bits)
    assert decode_residues(data, n, bits).values.tolist() == values.tolist()
    with pytest.raises(InvalidInput, match=f"{n} elements of {bits} bits need {len(data)} bytes"):
        decode_residues(data + b"\0", n, bits)
