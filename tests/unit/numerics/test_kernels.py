"""One rule in four forms, bit for bit: scalar reference, fused CPU kernels, tensor operations, Triton kernels.

The last two are what other devices run. Here the tensor operations run on CPU tensors, in chunks of a few elements,
and so do the Triton kernels, interpreted, in small tiles; without triton their share is skipped by name.
"""

# pyright: reportPrivateUsage=false
# The tensor path is called directly: from outside it is reached on other devices only.

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import runpy
import shutil
import struct
import subprocess
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.numerics import (
    random,
    reference,
    rounded_sites,
    rounding,
    rounding_tensors,
    rounding_triton,
    tensor_measures,
)
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.kernels import grid_rounding, measures, native, random_words
from tallystick.numerics.kernels.grid_rounding import GriddedSite
from tallystick.numerics.log import SparseEntries
from tallystick.numerics.reference import FP32_LARGEST, T_FIXED, LoggedElement, RelativeBand, ScaledBand

VECTORS = Path(__file__).parents[3] / "vectors" / "rounding"
CHUNK = 7
KEY = (1, 2)
PATHS = {
    "kernel": (rounding.round_recorded, rounding.round_followed),
    "tensor": (rounding_tensors.record_tensor, rounding_tensors.follow_tensor),
}
TRITON = (
    importlib.import_module("tallystick.numerics.kernels.triton_launch")
    if importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
    else None
)
needs_triton = pytest.mark.skipif(
    TRITON is None,
    reason="triton is not installed, or TRITON_INTERPRET is not 1: its kernels are not interpreted",
)
if TRITON is not None:
    PATHS["triton"] = (rounding_triton.record_triton, rounding_triton.follow_triton)
FORMS = {  # dtypes of the values, of the old ones, of the result
    "float32": (torch.float32, torch.float32, torch.float32),
    "float64": (torch.float64, torch.float64, torch.float64),
    "state": (torch.float64, torch.float32, torch.float32),
}


@dataclass(frozen=True)
class Site:
    """A tensor on a grid, as recorder (xs) and follower (ys) see it; `extra` entries join the log's."""

    grid: SiteGrid
    xs: list[float]
    ys: list[float]
    olds: list[float] | None = None
    form: str = "float64"
    extra: tuple[LoggedElement, ...] = ()

    @property
    def band(self) -> ScaledBand | RelativeBand:
        if self.olds is not None:
            return RelativeBand(tuple(self.olds), self.grid.band)
        return ScaledBand(self.grid.band, self.grid.floor, tuple(self.grid.scales.tolist()))

    @property
    def words(self) -> list[int] | None:
        return random.words(KEY, 0, len(self.xs)).tolist() if self.grid.dithered else None

    def old(self) -> torch.Tensor | None:
        return None if self.olds is None else torch.tensor(self.olds, dtype=FORMS[self.form][1])

    def places(self, values: list[float]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """(values, out, old), with the result apart, over the values and over the old ones."""
        source, _, target = FORMS[self.form]
        given = [(torch.tensor(values, dtype=source), self.old()) for _ in range(3)]
        places = [(given[0][0], torch.full((len(values),), 7.0, dtype=target), given[0][1])]
        if source == target:
            places.append((given[1][0], given[1][0], given[1][1]))
        old = given[2][1]
        if old is not None and old.dtype == target:
            places.append((given[2][0], old, old))
        return places


def sparse(entries: list[LoggedElement], n: int) -> SparseEntries:
    indexes, sides = [entry.index for entry in entries], [entry.side for entry in entries]
    return SparseEntries(n, 1, np.array(indexes, dtype=np.int64), np.array(sides, dtype=np.int64))


def has_bits(out: torch.Tensor, values: list[float]) -> bool:
    """Whether `out` is `values` in its own format, signs of zeros included."""
    return out.numpy().tobytes() == torch.tensor(values, dtype=torch.float64).to(out.dtype).numpy().tobytes()


def refused_element(error: Exception) -> int:
    found = re.search(r"element (\d+)", str(error))
    assert found is not None
    return int(found.group(1))


# ----------------------------------------------------------------------------------------- the one test body


def check(site: Site, chunk: int = CHUNK, without: str = "") -> None:
    """Asserts that all forms, but one if named, record, follow, refuse and list candidates alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding_tensors, "CHUNK", chunk)
        patch.delitem(PATHS, without, raising=False)
        set_tile(patch, len(site.xs))
        entries = check_recorded(site)
        if entries is not None:
            own = {entry.index: entry for entry in entries}
            merged = own | {entry.index: entry for entry in site.extra}
            check_followed(site, [merged[i] for i in sorted(merged)])
        check_candidates(site)


def places_of(
    path: str, site: Site, values: list[float]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """All of a site's places; for interpreted kernels, which are slow, one of them, another for each length of a log."""
    places = site.places(values)
    return places if path != "triton" else [places[len(site.extra) % len(places)]]


def set_tile(patch: pytest.MonkeyPatch, n: int) -> None:
    """Tiles of Triton such that `n` elements fill at least one and part of another, two to a piece."""
    if TRITON is not None:
        tile = max(16, 1 << max(n - 1, 1).bit_length() - 1)
        patch.setattr(TRITON, "TILE", tile)
        patch.setattr(TRITON, "PIECE", 2 * tile)


def check_recorded(site: Site) -> list[LoggedElement] | None:
    """The log, or None where every form refuses the site, naming the same element."""
    entries = None
    values: list[float] = []
    refused = -1
    try:
        values, entries = reference.record(site.xs, site.grid.precision, site.band, site.words)
    except InvalidInput as error:
        refused = refused_element(error)
    for path, (record, _) in PATHS.items():
        for x, out, old in places_of(path, site, site.xs):
            if entries is None:
                with pytest.raises(Nondeterminism, match=f"^weight: element {refused} is not finite or does"):
                    record(x, site.grid, out=out, old=old, key=KEY, name="weight")
                continue
            found = record(x, site.grid, out=out, old=old, key=KEY, name="weight")
            assert has_bits(out, values)
            assert found == sparse(entries, len(values))
    return entries


def check_followed(site: Site, entries: list[LoggedElement]) -> None:
    n = len(site.ys)
    values: list[float] = []
    violations: list[int] = []
    refused = -1
    try:
        values, violations = reference.follow(site.ys, entries, site.grid.precision, site.band, site.words)
    except InvalidInput as error:
        refused = refused_element(error)
    for path, (_, follow) in PATHS.items():
        for y, out, old in places_of(path, site, site.ys):
            if refused >= 0:
                with pytest.raises(Nondeterminism, match=f"^weight: element {refused} is not finite or does"):
                    follow(y, site.grid, sparse(entries, n), out=out, old=old, key=KEY, name="weight")
                continue
            found = follow(y, site.grid, sparse(entries, n), out=out, old=old, key=KEY, name="weight")
            assert has_bits(out, values)
            assert found.violations == len(violations)
            assert found.violation == (violations[0] if violations else -1)
            assert found.near == len(within_reach(site))
            assert found.energy == pytest.approx(sum(value * value for value in values), rel=1e-12)
            steer = sum(quantum_of(site, i) ** 2 for i in within_reach(site))
            assert found.steer == pytest.approx(steer, rel=1e-12)


def within_reach(site: Site) -> list[int]:
    """Elements of ys closer than two bands to a boundary: those whose entry would not be a violation."""
    words = site.words
    reached: list[int] = []
    for i, y in enumerate(site.ys):
        band, word = alone(site, i), None if words is None else [words[i]]
        for side in (0, 1):  # one of the two may lie beyond FP32
            try:
                if not reference.follow([y], [LoggedElement(0, side)], site.grid.precision, band, word)[1]:
                    reached.append(i)
                break
            except InvalidInput:
                assert side == 0
    return reached


def alone(site: Site, i: int) -> ScaledBand | RelativeBand:
    """The band of element i as a tensor of its own."""
    if isinstance(site.band, RelativeBand):
        return RelativeBand((site.band.olds[i],), site.band.exponent)
    block = reference.block_of(i, len(site.xs), len(site.band.scales))
    return ScaledBand(site.band.exponent, site.band.floor, (site.band.scales[block],))


def quantum_of(site: Site, i: int) -> float:
    return math.ldexp(1.0, reference.Grid(site.grid.precision, floor_of(site, i)).exponent(site.ys[i]))


def floor_of(site: Site, i: int) -> int:
    """The floor exponent at element i, not below -149, worked out apart from the code under test."""
    if site.olds is None:
        block = reference.block_of(i, len(site.xs), site.grid.scales.size)
        return max(int(site.grid.scales[block]) + site.grid.floor, -149)
    if site.olds[i] == 0.0:
        return -149
    numerator, denominator = abs(site.olds[i]).as_integer_ratio()
    return max(numerator.bit_length() - denominator.bit_length() + site.grid.band + 5, -149)


def delta_of(site: Site, i: int, new: float) -> float:
    if site.olds is None:
        block = reference.block_of(i, len(site.xs), site.grid.scales.size)
        return math.ldexp(1.0, max(int(site.grid.scales[block]) + site.grid.band, -1022))
    return math.ldexp(max(abs(new), abs(site.olds[i])), site.grid.band)


def check_candidates(site: Site) -> None:
    try:
        expected = reference.candidates(site.ys, site.grid.precision, site.band, site.words)
    except InvalidInput:
        return
    y = torch.tensor(site.ys, dtype=FORMS[site.form][0])
    found = rounding.find_candidates(y, site.grid, old=site.old(), key=KEY)
    assert found.index.tolist() == [i for i, _, _ in expected]
    assert found.lower.tobytes() == np.array([lower for _, lower, _ in expected]).tobytes()
    assert found.upper.tobytes() == np.array([upper for _, _, upper in expected]).tobytes()


# --------------------------------------------------------------------------------------------- hard elements

ROWS = (-3, 0, -140, 20, -3)
ALL_ROWS = "one block for each element"
RULES: dict[str, tuple[SiteGrid, bool]] = {  # grid, relative
    "absolute": (SiteGrid(0, -16, -5, False, [-3]), False),
    "absolute-rows": (SiteGrid(0, -16, -5, False, ROWS), False),
    "absolute-wide": (SiteGrid(0, -2, 0, False, [0]), False),
    "absolute-deep": (SiteGrid(0, -20, -5, False, [-1100]), False),
    "absolute-high": (SiteGrid(0, -8, -5, False, [400]), False),
    "dithered": (SiteGrid(0, -16, -5, True, [-3]), False),
    "dithered-rows": (SiteGrid(0, -16, -5, True, ROWS), False),
    "dithered-wide": (SiteGrid(0, -2, 0, True, [0, 3]), False),
    "dithered-deep": (SiteGrid(0, -20, -5, True, [-1100, 0]), False),
    "12-bits": (SiteGrid(12, -20, -16, False, [0]), False),
    "12-bits-rows": (SiteGrid(12, -20, -16, False, ROWS), False),
    "12-bits-high": (SiteGrid(12, -20, -16, False, [80]), False),
    "24-bits": (SiteGrid(24, -44, -22, False, [0]), False),
    "24-bits-rows": (SiteGrid(24, -44, -22, False, ROWS), False),
    "24-bits-fp32": (SiteGrid(24, -30, -149, False, [0]), False),
    "relative": (SiteGrid(24, -47, -149), True),
    "relative-wide": (SiteGrid(24, -28, -149), True),
    "relative-narrow": (SiteGrid(24, -1100, -149), True),
    "relative-12-bits": (SiteGrid(12, -16, -149), True),
    "relative-absolute": (SiteGrid(0, -20, -149), True),
    "relative-dithered": (SiteGrid(0, -20, -149, True), True),
}
OLDS = (
    0.0,
    1.0,
    -1.5,
    2.0**-149,
    -1.99 * 2.0**-107,
    2.0**100,
    2.0**-126,
    -0.0,
    math.nextafter(2.0, 0),
    3e-39,
)
EXPONENTS = (-149, -148, -127, -126, -125, -24, -22, -21, -1, 0, 1, 23, 24, 25, 100, 126)
SHIFTS = (0.0, 0.9, -0.9, 0.3, -1.6, -0.999, 1.0, 2.5)
"""By how many bands y differs from x: inside, at the end and beyond."""


def fp32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def fixed_values() -> list[float]:
    """Powers of two and their neighbours in FP32 and binary64, subnormals, zeros, huge values; both signs."""
    powers = [math.ldexp(1.0, exponent) for exponent in EXPONENTS]
    neighbours = [math.nextafter(power, to) for power in powers for to in (0.0, math.inf)]
    neighbours += [power * (1 + ulps) for power in powers[3:] for ulps in (-(2.0**-24), 2.0**-23)]
    tiny = [2.0**-149, 3 * 2.0**-149, 2.0**-126 - 2.0**-149, 0.4 * 2.0**-149, 5e-324, 1e-300]
    positive = [*powers, *neighbours, *tiny, 1e38, 1.5 * 2.0**127, 0.1, 1 / 3, 0.5, 2.5]
    return [0.0, -0.0, *positive, *(-value for value in positive)]


def boundary_values(floor: int, precision: int, t: float, delta: float) -> list[float]:
    """On, beside, and a band and two bands away from boundaries of the floor and of the binades above it."""
    cells = [(k, floor) for k in (0, 1, -1, -2, 5, 1000)]
    if precision:
        low, high = 2 ** (precision - 1), 2**precision - 1
        cells += [(k, floor + 3) for k in (low, high, -low - 1, -high)]
    near: list[float] = []
    for k, exponent in cells:
        at = math.ldexp(k + t, exponent)
        near += [at, math.nextafter(at, -math.inf), math.nextafter(at, math.inf)]
        near += [at - delta, at + delta, at + math.nextafter(delta, 0.0), at - 2.0 * delta, at + 1.9 * delta]
    return near


def hard_site(rule: str, form: str) -> Site:
    """Every fixed value and every boundary value of its own place; rows of an odd length."""
    grid, relative = RULES[rule]
    blocks = max(grid.scales.size, 1)
    fixed = fixed_values()
    n = len(fixed) + 90
    n = (n // blocks | 1) * blocks
    olds = [fp32(OLDS[i % len(OLDS)]) for i in range(n)] if relative else None
    empty = Site(grid, [0.0] * n, [0.0] * n, olds, form)
    words = empty.words
    xs = list(fixed)
    for i in range(len(fixed), n):
        t = T_FIXED if words is None else reference.dithered_position(words[i])
        choices = boundary_values(floor_of(empty, i), grid.precision, t, delta_of(empty, i, 0.0))
        xs.append(choices[i * 7 % len(choices)])
    ys = [x + SHIFTS[i * 3 % 8] * delta_of(empty, i, x) for i, x in enumerate(xs)]
    if form == "float32":
        xs, ys = [within_fp32(x) for x in xs], [within_fp32(y) for y in ys]
    extra = tuple(LoggedElement(i, i // 5 % 2) for i in range(2, n, 5))
    return Site(grid, xs, ys, olds, form, extra)


def within_fp32(value: float) -> float:
    return fp32(max(min(value, 2.0**126), -(2.0**126)))


def pairs_of_rule_and_form() -> list[tuple[str, str]]:
    """A state is FP32 values, so its form needs a grid of at most 24 bits."""
    return [
        (rule, form)
        for rule, form in itertools.product(RULES, FORMS)
        if form != "state" or RULES[rule][0].precision
    ]


@pytest.mark.parametrize(("rule", "form"), pairs_of_rule_and_form())
def test_kernels_and_tensor_operations_equal_the_reference(rule: str, form: str) -> None:
    check(hard_site(rule, form))


def test_the_hard_sites_log_and_violate_a_lot_and_are_not_refused() -> None:
    """A control of the test before: of some 200 elements, entries and violations under nearly every rule."""
    logged: dict[str, int] = {}
    violated: dict[str, int] = {}
    for rule, (grid, _) in RULES.items():
        site = hard_site(rule, "float64")
        logged[rule] = len(reference.record(site.xs, grid.precision, site.band, site.words)[1])
        violated[rule] = len(reference.follow(site.ys, site.extra, grid.precision, site.band, site.words)[1])
    assert all(count >= 5 for count in logged.values()), logged
    assert sum(logged.values()) > 600, logged
    assert {rule for rule, count in violated.items() if count < 5} == {"absolute-wide", "dithered-wide"}


# ---------------------------------------------------------------------------------------------- random sites

BINADES = st.integers(-149, 60)


@st.composite
def a_value(draw: st.DrawFn, floor: int, precision: int, t: float, delta: float) -> float:
    """Near a boundary, a power of two, a multiple, or anything finite."""
    kind = draw(st.sampled_from(["boundary", "power", "multiple", "any"]))
    if kind == "boundary":
        return draw(st.sampled_from(boundary_values(floor, precision, t, delta)))
    if kind == "power":
        step = draw(st.sampled_from([0.0, delta, -delta, 2.0**-24, -(2.0**-24)]))
        return draw(st.sampled_from([1.0, -1.0])) * math.ldexp(1.0, draw(BINADES)) * (1.0 + step)
    if kind == "multiple":
        return math.ldexp(draw(st.integers(-64, 64)) * 0.25, floor)
    return draw(st.floats(-1e38, 1e38))


@st.composite
def sites(draw: st.DrawFn) -> Site:
    relative, dithered = draw(st.booleans()), draw(st.booleans())
    precision = 0 if dithered else draw(st.sampled_from([0, 1, 2, 12, 24]))
    form = draw(st.sampled_from(sorted(FORMS) if precision else ["float32", "float64"]))
    rows, blocks = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    band = -draw(st.integers(1, 50))
    if relative:
        n, grid = rows, SiteGrid(precision, band, -149, dithered)
        sizes = st.one_of(st.just(0.0), st.builds(math.ldexp, st.floats(-2.0, 2.0), BINADES))
        olds = [fp32(old) for old in draw(st.lists(sizes, min_size=n, max_size=n))]
    else:
        n, olds = rows * blocks, None
        scales = draw(st.lists(st.integers(-170, 30), min_size=blocks, max_size=blocks))
        grid = SiteGrid(precision, band, draw(st.integers(-30, 4)), dithered, scales)
    empty = Site(grid, [0.0] * n, [0.0] * n, olds, form)
    words = empty.words
    xs: list[float] = []
    ys: list[float] = []
    for i in range(n):
        t = T_FIXED if words is None else reference.dithered_position(words[i])
        x = draw(a_value(floor_of(empty, i), precision, t, delta_of(empty, i, 0.0)))
        y = x + draw(st.sampled_from(SHIFTS)) * delta_of(empty, i, x)
        xs.append(within_fp32(x) if form == "float32" else x)
        ys.append(within_fp32(y) if form == "float32" else y)
    extra = tuple(LoggedElement(i, draw(st.integers(0, 1))) for i in range(n) if draw(st.booleans()))
    return Site(grid, xs, ys, olds, form, extra)


@given(sites(), st.sampled_from([1, 2, 3, 5, 100]))
@settings(max_examples=200, deadline=None)
def test_random_sites_come_out_alike(site: Site, chunk: int) -> None:
    check(site, chunk, without="triton")


@needs_triton
@given(sites())
@settings(max_examples=20, deadline=None)
def test_random_sites_come_out_alike_on_the_device(site: Site) -> None:
    check(site, without="tensor")


# ---------------------------------------------------------------------------------------- runs without a near element

LONG: dict[str, tuple[SiteGrid, str, bool]] = {  # grid, form, whether short loops are to decide most of it
    "fp32 gradient": (SiteGrid(0, -18, -5, True, [-9]), "float32", True),
    "fp32 rows": (SiteGrid(0, -18, -5, True, [-9, -3, 4, -9, 0]), "float32", True),
    "fp32 fixed": (SiteGrid(0, -18, -5, False, [-9]), "float32", True),
    "fp32, many near": (SiteGrid(0, -10, -5, True, [-9]), "float32", False),
    "fp32 deep": (SiteGrid(0, -18, -5, True, [-140]), "float32", False),
    "fp32 into fp64": (SiteGrid(0, -18, -5, True, [2]), "wide", True),
    "fp64 gradient": (SiteGrid(24, -44, -21, False, [-9]), "float64", True),
    "fp64 rows": (SiteGrid(24, -44, -21, False, [-9, 60, -120, 3, 3]), "float64", True),
    "fp64 whole": (SiteGrid(0, -24, -5, False, [3]), "float64", True),
    "fp64 dithered": (SiteGrid(0, -24, -5, True, [3]), "float64", True),
    "fp64 into fp32": (SiteGrid(24, -44, -21, False, [-9]), "narrow", True),
    "fp32 bits": (SiteGrid(24, -44, -21, False, [-9]), "float32", True),
    "30 bits": (SiteGrid(30, -50, -27, False, [-9]), "float64", True),
    "40 bits": (SiteGrid(40, -60, -37, False, [-9]), "float64", False),
    "state": (SiteGrid(24, -47, -149), "state", True),
    "state in fp64": (SiteGrid(24, -47, -149), "float64", True),
    "state into fp64": (SiteGrid(24, -47, -149), "state out", True),
    "wide state": (SiteGrid(24, -28, -149), "float64", False),
}
LONG_FORMS = {
    **FORMS,
    "wide": (torch.float32, torch.float32, torch.float64),
    "narrow": (torch.float64, torch.float64, torch.float32),
    "state out": (torch.float64, torch.float32, torch.float64),
}


def long_values(
    grid: SiteGrid, form: str, odd: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Values and old values of 4,000 elements a block: most of a size, some tiny, huge, zero or beside a boundary."""
    source, before, _ = LONG_FORMS[form]
    random_numbers = np.random.Generator(np.random.PCG64(len(form) + grid.band % 97))
    scales = grid.scales if grid.scales.size else np.zeros(1, dtype=np.int32)
    n = 4001 * scales.size  # an odd length: runs end anywhere
    size = np.repeat(2.0 ** scales.astype(np.float64), 4001)
    x = random_numbers.normal(size=n) * size
    kind = random_numbers.random(n)
    quantum = size * 2.0 ** max(grid.floor, -30)
    beside = (np.floor(x / quantum) + T_FIXED) * quantum + random_numbers.normal(size=n) * quantum * 2.0**-18
    x = np.where(kind < odd, beside, x)
    x = np.where((odd <= kind) & (kind < 2 * odd), x * 2.0 ** random_numbers.integers(-60, 20, n), x)
    x[kind > 1.0 - odd] = 0.0
    old = torch.from_numpy(x * (1.0 + 1e-4 * random_numbers.normal(size=n))).to(torch.float32).to(before)
    values = torch.from_numpy(x).to(source)
    noise = (
        2.0**grid.band * (np.abs(x) if not grid.scales.size else size) * random_numbers.uniform(-0.9, 0.9, n)
    )
    others = (values.double() + torch.from_numpy(noise)).to(source)
    return values, others, None if grid.scales.size else old


def quick_share(x: torch.Tensor, old: torch.Tensor | None, out: torch.Tensor, grid: SiteGrid) -> float:
    site = GriddedSite(x.numpy(), None if old is None else old.numpy(), out.numpy(), grid, KEY)
    return native.library().tally_quick(site.address, 0, x.numel(), 1) / x.numel()


@pytest.mark.parametrize("odd", [0.0, 0.0005, 0.02])
@pytest.mark.parametrize("name", LONG)
def test_runs_decided_quickly_are_what_the_rule_gives(
    monkeypatch: pytest.MonkeyPatch, name: str, odd: float
) -> None:
    """Against the tensor operations, which have no such runs; most elements do lie in them, as the count shows."""
    grid, form, quick = LONG[name]
    monkeypatch.setattr(rounded_sites, "DENSEST", 2)
    x, y, old = long_values(grid, form, odd)
    outs = [torch.full(x.shape, 7.0, dtype=LONG_FORMS[form][2]) for _ in range(4)]
    log = rounding.round_recorded(x, grid, out=outs[0], old=old, key=KEY)
    expected = rounding_tensors.record_tensor(x, grid, out=outs[1], old=old, key=KEY, name="x")
    assert outs[0].numpy().tobytes() == outs[1].numpy().tobytes()
    assert log == expected
    found = rounding.round_followed(y, grid, log, out=outs[2], old=old, key=KEY)
    wanted = rounding_tensors.follow_tensor(y, grid, log, out=outs[3], old=old, key=KEY, name="y")
    assert outs[2].numpy().tobytes() == outs[3].numpy().tobytes()
    assert (found.violation, found.violations, found.near, found.moved, found.shifted) == (
        wanted.violation, wanted.violations, wanted.near, wanted.moved, wanted.shifted,
    )  # fmt: skip
    assert found.energy == pytest.approx(wanted.energy, rel=1e-12)
    assert found.steer == pytest.approx(wanted.steer, rel=1e-12)
    share = quick_share(x, old, outs[0], grid)
    if odd < 0.001:
        assert share > 0.5 if quick else share < 0.5
    over = x.clone()
    if over.dtype == outs[0].dtype:  # the result over the values
        assert rounding.round_recorded(over, grid, out=over, old=old, key=KEY) == log
        assert over.numpy().tobytes() == outs[0].numpy().tobytes()


@pytest.mark.slow  # compiles the kernels once for each instruction set
@pytest.mark.skipif(
    shutil.which("gcc") is None or platform.machine() != "x86_64", reason="needs gcc on x86-64"
)
@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_every_instruction_set_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, march: str
) -> None:
    flags = Path("/proc/cpuinfo").read_text()
    if {"x86-64-v3": "avx2", "x86-64-v4": "avx512dq"}.get(march, "sse2") not in flags:
        pytest.skip(f"this processor does not run {march}")
    script = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "compile_kernels.py"))
    sources = [str(script["ROOM"] / source) for source in script["SOURCES"]]
    library = tmp_path / "libkernels.so"
    command = [
        "gcc",
        *script["FLAGS"].split(),
        "-DFAST=",
        f"-march={march}",
        "-o",
        str(library),
        *sources,
        "-lm",
    ]
    subprocess.run(command, check=True)
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    monkeypatch.setattr(native, "LIBRARY", library.name)
    native.library.cache_clear()
    try:
        for name in LONG:
            test_runs_decided_quickly_are_what_the_rule_gives(monkeypatch, name, 0.0005)
    finally:
        native.library.cache_clear()


@pytest.mark.parametrize("form", [0, 1, 2, 3])
def test_every_form_of_the_cipher_writes_the_same_words(form: int) -> None:
    """Plain, and on x86 with vectors of 2, 4 and 8 counters; any number of them, across 2**32."""
    for first in (0, 5, 2**32 - 9, 2**34 - 3):
        for blocks in (1, 2, 3, 7, 8, 9, 31, 32, 33, 40):
            words = np.empty(4 * blocks + 36, dtype=np.uint32)
            if not native.library().tally_words_in_form(form, words.ctypes.data, first, blocks, *KEY):
                assert form, "the plain form is always there"
                pytest.skip("this processor has no such form")
            assert words[: 4 * blocks].tolist() == random.words(KEY, 4 * first, 4 * blocks).tolist()


@pytest.mark.parametrize("dithered", [False, True])
@pytest.mark.parametrize(("n", "blocks"), [(3333, 1), (3333, 3), (5125, 5), (4096, 2), (1025, 1), (3075, 0)])
def test_runs_of_words_longer_than_a_kernel_draws_at_a_time_change_nothing(
    n: int, blocks: int, dithered: bool
) -> None:
    """Rows of 1025 and 1111 elements start inside a block of four words and end past a run of 1024."""
    generator = np.random.Generator(np.random.PCG64(n + blocks))
    xs = generator.normal(size=n)
    ys = xs + generator.uniform(-0.9, 0.9, size=n) * 2.0**-12
    grid = SiteGrid(0, -12, -5, dithered, [0] * blocks)
    olds = None if blocks else [1.0] * n
    check(Site(grid, xs.tolist(), ys.tolist(), olds), chunk=1000)


def test_the_distance_to_the_boundary_beyond_rounds_in_the_order_written() -> None:
    """(low + 1) - high, not 1 - (high - low): values whose distance is a band of a quarter, give or take an ulp."""
    words = random.words(KEY, 0, 300)
    xs: list[float] = []
    for i, word in enumerate(words.tolist()):
        t = reference.dithered_position(word)
        below = t - 0.75 - (i % 9) * 2.0**-55  # r < t: the boundary at t - 1 is nearer where t > 3/4
        above = t + 0.75 + (i % 9 - 4) * 2.0**-53  # r >= t: the one at t + 1, where t < 1/4
        xs.append(below if t > 0.76 else above if t < 0.24 else 0.0)
    site = Site(SiteGrid(0, -2, 0, True, [0]), xs, xs)
    check(site)
    logged = {entry.index for entry in reference.record(xs, 0, site.band, site.words)[1]}
    other = {
        i for i, x in enumerate(xs) if x and 1.0 - abs(x - reference.dithered_position(int(words[i]))) < 0.25
    }
    assert len(logged & other) > 10
    assert logged ^ other, "the two orders never differ here"


def test_blocks_of_one_scale_are_one_block() -> None:
    x = torch.from_numpy(np.random.Generator(np.random.PCG64(3)).normal(size=4 * 1031))
    one, four, each = (torch.empty_like(x) for _ in range(3))
    logs = [
        rounding.round_recorded(x, SiteGrid(0, -12, -5, True, [1] * blocks), out=out, key=KEY)
        for blocks, out in ((1, one), (4, four), (x.numel(), each))
    ]
    assert torch.equal(one, four)
    assert torch.equal(one, each)
    assert logs[0] == logs[1] == logs[2]
    assert len(logs[0]) > 20


def test_a_tensor_of_any_shape_is_taken_in_row_order() -> None:
    x = torch.from_numpy(np.random.Generator(np.random.PCG64(4)).normal(size=(6, 5, 7)))
    grid = SiteGrid(0, -8, -3, True, [0, 1, 0, 2, 0, 0])
    flat, shaped = torch.empty(x.numel(), dtype=torch.float64), torch.empty_like(x)
    for record, _ in PATHS.values():
        log = record(x, grid, out=shaped, old=None, key=KEY, name="w")
        assert log == record(x.reshape(-1), grid, out=flat, old=None, key=KEY, name="w")
        assert torch.equal(shaped.reshape(-1), flat)


WORDS_OF_NO_STREAM = (
    "dither-ends",
    "far-dithered-multiples",
    "huge-dithered-multiples",
    "narrow-dithered-band",
    "narrower-dithered-band",
)


@pytest.mark.parametrize("band", [-11, -13, -16, -30])
def test_all_forms_round_the_distances_of_narrow_dithered_bands_alike(band: int) -> None:
    """Where z is just below 0 and the boundary beside it, r = z + 1 is rounded (spec/rounding.md 7)."""
    delta, xs, ys = 2.0**band, list[float](), list[float]()
    for at, word in enumerate(random.words(KEY, 0, 64).tolist()):
        below = reference.dithered_position(word) - 1.0  # exact: the boundary of the cell below 0
        xs.append(below + (-delta + 2.0**-54, -delta, delta - 2.0**-54, 2.0**-54 - 2.0**-55)[at % 4])
        ys.append(below + (-(2.0**-54), -(2.0**-56), 2.0**-53, -(2.0**-53))[at % 4])
    check(Site(SiteGrid(0, band, 0, True, [0]), xs, ys))
    check(Site(SiteGrid(0, band, 0, True, [0]), ys, xs))


@pytest.mark.parametrize("folder", sorted(VECTORS.iterdir()), ids=lambda folder: folder.name)
def test_kernels_and_tensor_operations_give_the_vectors(folder: Path) -> None:
    """Those whose dither, if any, is a stream; the expected values were not made by the package."""
    case: dict[str, Any] = json.loads((folder / "input.json").read_text(encoding="utf-8"))
    if case["operation"] != "record-and-follow":
        assert folder.name.endswith("_fail") or case["operation"] == "residues"  # those: test_residues.py
        return
    n, band = len(case["xs"]), case["band"]
    words = case["words"]
    if words is not None and words != random.words(KEY, 0, n).tolist():
        assert folder.name in WORDS_OF_NO_STREAM
        return
    grid = SiteGrid(
        case["precision"],
        band["exponent"],
        band.get("floor", -149),
        words is not None,
        band.get("scales", ()),
    )
    olds = floats(band["olds"]) if "olds" in band else None
    site = Site(grid, floats(case["xs"]), floats(case["ys"]), olds)
    for record, follow in PATHS.values():
        x, out, old = site.places(site.xs)[0]
        logged = sparse([LoggedElement(*each) for each in case["entries"]], n)
        assert record(x, grid, out=out, old=old, key=KEY, name="w") == logged
        assert has_bits(out, floats(case["values"]))
        used = sparse([LoggedElement(*each) for each in case["used"]], n)
        y, out, old = site.places(site.ys)[0]
        found = follow(y, grid, used, out=out, old=old, key=KEY, name="w")
        assert has_bits(out, floats(case["followed"]))
        first = case["violations"][0] if case["violations"] else -1
        assert (found.violation, found.violations) == (first, len(case["violations"]))


def floats(values: list[str]) -> list[float]:
    return [float.fromhex(value) for value in values]


# ---------------------------------------------------------------------------------------- refused, and empty

FP32_GRID = SiteGrid(24, -30, -149, False, [0])
STATE_GRID = SiteGrid(24, -47, -149)
REFUSED: dict[str, tuple[SiteGrid, float, float | None]] = {  # grid, value, old
    "nan": (FP32_GRID, math.nan, None),
    "infinity": (FP32_GRID, math.inf, None),
    "minus infinity": (SiteGrid(0, -8, 0, False, [0]), -math.inf, None),
    "dithered nan": (SiteGrid(0, -8, 0, True, [0]), math.nan, None),
    "one bit infinity": (SiteGrid(1, -8, -4, False, [0]), math.inf, None),
    "beyond fp32": (FP32_GRID, -3.5e38, None),
    "rounds beyond fp32": (FP32_GRID, FP32_LARGEST * (1 + 2.0**-24), None),
    "rounds beyond fp32 at 12 bits": (SiteGrid(12, -30, -149, False, [0]), FP32_LARGEST, None),
    "beyond 2**1023 quanta": (SiteGrid(0, -8, -149, False, [0]), 1e300, None),
    "one bit at the end of binary64": (SiteGrid(1, -8, 0, False, [0]), 1.5 * 2.0**1023, None),
    "relative nan": (STATE_GRID, math.nan, 1.0),
    "relative infinity": (STATE_GRID, math.inf, 0.0),
    "old nan": (STATE_GRID, 1.0, math.nan),
    "old infinity": (STATE_GRID, 1.0, -math.inf),
    "old beyond fp32": (STATE_GRID, 1.0, 2.0**128),
    "old infinity under a wide band": (SiteGrid(12, -3, -149), 1.0, math.inf),
    "old infinity, absolute": (SiteGrid(0, -20, -149, True), 1.0, math.inf),
}


@pytest.mark.parametrize("at", [0, 9, 20])
@pytest.mark.parametrize("name", REFUSED)
def test_an_element_without_a_place_is_refused_by_index_and_its_neighbours_are_not(
    name: str, at: int
) -> None:
    grid, value, old = REFUSED[name]
    good, olds = [0.5, -1.0, 0.0] * 7, None if old is None else [1.0, -0.25, 0.0] * 7
    accepted = Site(grid, good, good, olds)
    check(accepted)
    assert len(reference.record(good, grid.precision, accepted.band, accepted.words)[0]) == 21
    bad = [*good[:at], value, *good[at + 1 :]]
    worse = None if olds is None or old is None else [*olds[:at], old, *olds[at + 1 :]]
    with pytest.raises(InvalidInput, match=f"element {at}: "):
        reference.record(bad, grid.precision, Site(grid, bad, bad, worse).band, accepted.words)
    check(Site(grid, bad, bad, worse))
    check(Site(grid, good, bad, worse or olds))


def test_of_two_elements_without_a_place_the_first_is_named() -> None:
    check(Site(FP32_GRID, [1.0, 2.0, math.nan, math.inf] * 5, [1.0] * 9 + [math.inf] + [math.nan] * 10))
    check(Site(STATE_GRID, [1.0, math.nan], [1.0, 1.0], [math.inf, 1.0]))
    check(Site(STATE_GRID, [math.nan, 1.0], [1.0, 1.0], [1.0, math.inf]))


@pytest.mark.parametrize("path", PATHS)
def test_a_multiple_that_the_format_of_the_result_cannot_hold_is_refused(path: str) -> None:
    """An absolute grid has no largest value of its own; what is kept as FP32 must be one."""
    record, follow = PATHS[path]
    grid = SiteGrid(0, -8, 110, False, [0])
    x = torch.tensor([0.0, FP32_LARGEST, FP32_LARGEST])
    wide, narrow, none = torch.empty(3, dtype=torch.float64), torch.empty(3), SparseEntries.none(3, 1)
    assert record(x, grid, out=wide, old=None, key=KEY, name="w") == none
    assert wide.tolist() == reference.record(x.tolist(), 0, ScaledBand(-8, 110, (0,)))[0]
    assert wide.tolist() == [0.0, 2.0**128, 2.0**128]
    with pytest.raises(Nondeterminism, match=r"^w: element 1 is not finite or does not fit float32"):
        record(x, grid, out=narrow, old=None, key=KEY, name="w")
    with pytest.raises(Nondeterminism, match=r"^w: element 1 is not finite or does not fit float32"):
        follow(x, grid, none, out=narrow, old=None, key=KEY, name="w")


@pytest.mark.parametrize("path", PATHS)
def test_a_site_of_ambiguous_elements_only_is_refused(path: str) -> None:
    record, _ = PATHS[path]
    grid = SiteGrid(0, -6, 0, False, [0])
    limit = 256 + 400 // rounded_sites.DENSEST + 8 * math.isqrt(400 // rounded_sites.DENSEST)
    ambiguous = T_FIXED + 2.0**-40 * torch.arange(400, dtype=torch.float64)  # of equal ones each counts once
    x = ambiguous.clone()
    x[limit:] = 0.0
    assert len(record(x, grid, out=torch.empty_like(x), old=None, key=KEY, name="w")) == limit
    x[limit] = ambiguous[limit]
    with pytest.raises(
        Nondeterminism, match=f"^w: {limit + 1} of 400 elements are ambiguous, more than one in 8"
    ):
        record(x, grid, out=torch.empty_like(x), old=None, key=KEY, name="w")


@pytest.mark.parametrize("scales", [(), (0,), (0, 1, 2)])
@pytest.mark.parametrize("form", FORMS)
def test_an_empty_tensor_is_rounded_to_an_empty_tensor(scales: tuple[int, ...], form: str) -> None:
    site = Site(SiteGrid(24, -30, -20, False, scales), [], [], None if scales else [], form)
    check(site)
    x = torch.empty(0, dtype=FORMS[form][0])
    for blocks in (1, 3):
        assert tensor_measures.block_rms(x, blocks).tolist() == [0.0] * blocks
        for differences in (tensor_measures.block_differences, tensor_measures.block_differences_tensor):
            assert [found.tolist() for found in differences(x, x, blocks)] == [[0.0] * blocks] * 2
    assert tensor_measures.fingerprint(x, 3) == tensor_measures.fingerprint_tensor(x, 3 << 40) == 0


def test_a_follower_counts_the_entries_out_of_reach_and_names_the_first() -> None:
    """In two chunks; the same entries within reach are obeyed."""
    n, step = 20, 2.0**-6
    grid = SiteGrid(0, -6, 0, False, [0])
    entries = [LoggedElement(i, 1) for i in (3, 5, 8, 17)]
    inside, outside = T_FIXED - 1.99 * step, T_FIXED - 2.0 * step
    for far, first in (([5, 17], 5), ([17], 17), ([3, 5, 8, 17], 3), ([], -1)):
        ys = [outside if i in far else inside for i in range(n)]
        check(Site(grid, [0.0] * n, ys, extra=tuple(entries)))
        y = torch.tensor(ys, dtype=torch.float64)
        found = rounding.round_followed(y, grid, sparse(entries, n), out=y)
        assert (found.violation, found.violations) == (first, len(far))
        assert y.tolist() == [float(i in (3, 5, 8, 17) and i not in far) for i in range(n)]


# ----------------------------------------------------------------------------------------- words of a stream

STARTS = (0, 1, 2, 3, 4, 1021, 2**34 - 5, 2**34 - 1, 2**34, 2**34 + 3, 2**40 + 1, 2**62 + 2)
"""From 2**34 on the cipher's counter is beyond 32 bits."""


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 16, 1031])
@pytest.mark.parametrize("key", [(0, 0), (1, 2), (0xFFFFFFFF, 0xFFFFFFFE)])
def test_the_words_of_a_stream_are_the_same_from_all_three(key: random.Key, start: int, count: int) -> None:
    expected = random.words(key, start, count)
    fused = np.zeros(count, dtype=np.uint32)
    random_words.philox_words(*key, start, fused)
    assert np.array_equal(fused, expected)
    first = start // 4
    blocks = -(-(start + count) // 4) - first
    words = rounding_tensors.philox_words(key, first, blocks, torch.device("cpu"))
    assert words.numel() == 4 * blocks
    assert np.array_equal(words[start % 4 :][:count].numpy(), expected)


@given(
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), st.integers(0, 2**62), st.integers(0, 70)
)
@settings(max_examples=100, deadline=None)
def test_any_part_of_any_stream_gives_the_same_boundaries(key: random.Key, start: int, count: int) -> None:
    words = random.words(key, start, count)
    fused = np.zeros(count, dtype=np.uint32)
    random_words.philox_words(*key, start, fused)
    assert np.array_equal(fused, words)
    positions = rounding_tensors.dither_boundaries(key, start, count, torch.device("cpu"))
    assert positions.tolist() == [reference.dithered_position(int(word)) for word in words]


def test_a_block_of_the_kernel_is_the_published_cipher() -> None:
    block = 0x05A308D3_243F6A88
    found = np.zeros(4, dtype=np.uint32)
    random_words.philox_words(0xA4093822, 0x299F31D0, 4 * block, found)
    low, high = block & 0xFFFFFFFF, block >> 32
    assert tuple(map(int, found)) == random.philox4x32((low, high, 0, 0), (0xA4093822, 0x299F31D0))


# ----------------------------------------------------------------------------------------------- fingerprint


def plain_fingerprint(values: list[float], ordinal: int) -> int:
    """The sum of the kernel's docstring, on the tensor alone."""
    total = 0
    for i, value in enumerate(values):
        (encoded,) = struct.unpack("<I", struct.pack("<f", value))
        total += (encoded + 1) * (((ordinal * 2**40 + i) * 0x9E3779B97F4A7C15 % 2**64) | 1)
    return total % 2**64


def as_reference(values: list[float], ordinal: int) -> int:
    """The reference's fingerprint of a state whose first `ordinal` tensors are empty."""
    return reference.fingerprint({**{f"{i:05}": [] for i in range(ordinal)}, "last": values})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ordinal", [0, 1, 5, 1000])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 100])
def test_fingerprints_are_the_sum_of_the_specification(
    dtype: torch.dtype, ordinal: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_measures, "CHUNK", CHUNK)
    generator = np.random.Generator(np.random.PCG64(count))
    x = torch.from_numpy(generator.normal(size=count)).to(torch.float32).to(dtype)
    x[: count // 2 : 3] = -0.0
    x[1 : count // 2 : 3] = math.inf
    x[2 : count // 2 : 3] = -(2.0**-14)
    values = x.double().tolist()
    expected = plain_fingerprint(values, ordinal)
    assert tensor_measures.fingerprint(x, ordinal) == expected
    assert tensor_measures.fingerprint_tensor(x.to(torch.float32), ordinal << 40) == expected
    assert as_reference(values, ordinal) == expected


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=30), st.integers(0, 50), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_fingerprints_of_any_tensor_agree(values: list[float], ordinal: int, chunk: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    expected = plain_fingerprint(values, ordinal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_measures, "CHUNK", chunk)
        assert tensor_measures.fingerprint_tensor(x, ordinal << 40) == expected
    assert tensor_measures.fingerprint(x, ordinal) == as_reference(values, ordinal) == expected
    assert tensor_measures.fingerprint(x.double().reshape(1, -1), ordinal) == expected


@pytest.mark.parametrize("chunk", [4, 1 << 17])
def test_the_fingerprint_of_a_state_is_the_sum_of_its_tensors(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(native, "CHUNK", chunk)
    state = [
        torch.tensor([1.5, -2.0]), torch.tensor([]), torch.tensor(3.0), torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor([0.25, 7.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.bfloat16), torch.arange(11.0),
    ]  # fmt: skip
    expected = sum(plain_fingerprint(x.reshape(-1).tolist(), i) for i, x in enumerate(state)) % 2**64
    assert tensor_measures.fingerprint_all(state) == expected
    assert tensor_measures.fingerprint_all(state[::-1]) != expected
    assert tensor_measures.fingerprint_all([]) == 0


def test_the_fingerprint_of_a_transposed_tensor_is_that_of_its_rows() -> None:
    x = torch.arange(6.0).reshape(2, 3).t()
    assert tensor_measures.fingerprint(x, 1) == plain_fingerprint([0.0, 3.0, 1.0, 4.0, 2.0, 5.0], 1)


# --------------------------------------------------------------------------------------- sizes and distances


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("blocks", "rows"), [(1, 1), (1, 1000), (7, 13), (30, 1)])
def test_the_rms_of_a_block_is_that_of_its_elements(dtype: torch.dtype, blocks: int, rows: int) -> None:
    generator = np.random.Generator(np.random.PCG64(rows))
    scaled = generator.normal(size=(blocks, rows)) * 2.0 ** generator.integers(-60, 60, size=(blocks, 1))
    x = torch.from_numpy(scaled).to(dtype)
    expected = [math.sqrt(sum(Fraction(value) ** 2 for value in row) / rows) for row in x.double().tolist()]
    assert tensor_measures.block_rms(x, blocks).tolist() == pytest.approx(expected, rel=1e-13)
    assert tensor_measures.block_rms_tensor(x, blocks).tolist() == pytest.approx(expected, rel=1e-13)


def test_the_rms_is_summed_in_binary64_and_shows_what_is_not_finite() -> None:
    x = torch.tensor([1e30, 1e30, 0.0, 0.0, math.inf, 1.0, math.nan, 1.0])
    for found in (tensor_measures.block_rms(x, 4), tensor_measures.block_rms_tensor(x, 4)):
        assert found.dtype == np.float64
        assert found[:3].tolist() == [pytest.approx(float(x[0])), 0.0, math.inf]
        assert math.isnan(found[3])


@pytest.mark.parametrize("n", [1, 7, 255, 65536, 65537, 300001])
def test_the_rms_of_a_sample_is_that_of_its_copy(n: int) -> None:
    x = torch.from_numpy(np.random.Generator(np.random.PCG64(n)).normal(size=n))
    given = [x.float(), torch.zeros(0), x, x[::2]]
    copies = [each[:: tensor_measures.sample_stride(each)].contiguous() for each in given]
    assert max(copy.numel() for copy in copies) <= tensor_measures.SAMPLES
    expected = [float(tensor_measures.block_rms(copy, 1)[0]) if copy.numel() else 0.0 for copy in copies]
    assert tensor_measures.sampled_rms(given).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("blocks", "rows"), [(1, 1), (1, 1000), (7, 13), (30, 1)])
def test_the_largest_difference_of_a_block_is_exact_and_the_mean_is_one(
    dtype: torch.dtype, blocks: int, rows: int
) -> None:
    generator = np.random.Generator(np.random.PCG64(rows))
    x, y = (torch.from_numpy(generator.normal(size=(blocks, rows))).to(dtype) for _ in range(2))
    pairs = zip(x.double().tolist(), y.double().tolist(), strict=True)
    each = [[abs(a - b) for a, b in zip(left, right, strict=True)] for left, right in pairs]
    for differences in (tensor_measures.block_differences, tensor_measures.block_differences_tensor):
        largest, mean = differences(x, y, blocks)
        assert largest.tolist() == [max(block) for block in each]
        assert mean == pytest.approx([math.fsum(block) / rows for block in each], rel=1e-12)


def test_a_difference_that_is_no_number_is_infinite_in_its_own_block_only() -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([1.0, 2.0, nan, 1.0, inf, 1.0, inf, 1.0, -3.0, 0.0])
    y = torch.tensor([1.0, 2.5, 1.0, 9.0, inf, 1.0, 0.0, 1.0, -3.0, nan])
    expected = [0.5, inf, inf, inf, inf]
    for differences in (tensor_measures.block_differences, tensor_measures.block_differences_tensor):
        largest, mean = differences(x, y, 5)
        assert largest.tolist() == expected
        assert mean.tolist() == [0.25, inf, inf, inf, inf]


@pytest.mark.parametrize("threshold", [0, 1, 2**31, 2**32 - 1, 2**32])
@pytest.mark.parametrize("start", [0, 3, 2**34 - 1])
def test_an_element_is_kept_if_its_word_is_below_the_threshold(start: int, threshold: int) -> None:
    words = random.words(KEY, start, 1000)
    kept = np.zeros(1000, dtype=np.bool_)
    random_words.keep(*KEY, start, threshold, kept)
    assert kept.tolist() == [int(word) < threshold for word in words]
    numbers = np.full(1000, np.nan, dtype=np.float32)
    random_words.keep(*KEY, start, threshold, numbers)
    assert numbers.tolist() == kept.tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("point", [0.0, 0.75])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_near_a_point_is_found(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, point: float, threads: int
) -> None:
    monkeypatch.setattr(native, "CHUNK", 384)
    x = np.random.default_rng(1).standard_normal(3000).astype(dtype)
    x[[0, 700, 2999]] = point, math.nan, math.inf
    for band in (0.0, 2.0**-6, 0.5):
        found = measures.near(x, point, band, threads=threads)
        assert found.tolist() == [i for i in range(x.size) if abs(x[i] - dtype(point)) < band]
    assert measures.near(x[:0], point, 1.0).size == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_relu_is_torchs_and_finds_what_is_near_zero(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, threads: int
) -> None:
    monkeypatch.setattr(native, "CHUNK", 384)
    x = np.random.default_rng(1).standard_normal(3000).astype(dtype)
    x[[0, 1, 300, 700, 800, 2999]] = 0.0, -0.0, -math.inf, math.nan, 1e-45, math.inf
    for band in (0.0, 2.0**-6, 0.5):
        out = np.full_like(x, 7.0)
        found = measures.relu(x, out, band, threads=threads)
        assert found.tolist() == measures.near(x, 0.0, band).tolist()
        assert np.array_equal(out, torch.relu(torch.from_numpy(x)).numpy(), equal_nan=True)
    with pytest.raises(ValueError, match="3000 elements of float"):
        measures.relu(x, np.zeros(2999, dtype), 1.0)


def test_arrays_with_gaps_are_refused() -> None:
    x, out = np.arange(8.0)[::2], np.zeros(1)
    with pytest.raises(ValueError, match="not contiguous"):
        measures.near(x, 0.0, 1.0)
    with pytest.raises(ValueError, match="not contiguous"):
        measures.block_square_sums(x, 4, out)
    with pytest.raises(ValueError, match="not contiguous"):
        measures.fingerprint(x, 0)


# --------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [100, 1000, 5000])
def test_results_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch, threads: int, rows: int) -> None:
    monkeypatch.setattr(native, "CHUNK", 384)  # of which the whole is no multiple
    generator = np.random.default_rng(rows)
    x, y = generator.standard_normal((2, 5000))
    y = x + (y - 0.5) * 2.0**-20
    scales = np.zeros(5000 // rows, dtype=np.int32)
    fine, coarsest = SiteGrid(0, -16, -12, True, scales), SiteGrid(0, -13, -12, True, scales, residue_bits=1)
    results: list[list[Any]] = []
    for count in (1, threads):
        out, followed, stats = np.empty_like(x), np.empty_like(x), np.zeros(6)
        index, side, bad = grid_rounding.record(GriddedSite(x, None, out, fine, KEY), threads=count)
        assert (bad, index.size > 10) == (-1, True)
        site = GriddedSite(y, None, followed, fine, KEY)
        grid_rounding.follow(site, index, side, stats, threads=count)
        assert np.array_equal(out, followed)
        plain = np.empty_like(x)
        sums, gaps, totals = (np.zeros(scales.size) for _ in range(3))
        grid_rounding.record(GriddedSite(y, None, plain, fine, KEY), threads=count)
        assert not np.array_equal(out, plain)  # the log was needed
        packed, moves = np.zeros((1, 625), dtype=np.uint8), np.zeros(7)
        coarse, crossed = np.empty_like(x), np.empty_like(x)
        site = GriddedSite(x, None, coarse, coarsest, KEY, band=-12)
        assert grid_rounding.record_residues(site, packed, threads=count) == -1
        site = GriddedSite(y, None, crossed, coarsest, KEY)
        grid_rounding.follow_residues(site, packed, moves, threads=count)
        assert np.array_equal(coarse, crossed)
        assert moves[4] > 5
        measures.block_square_sums(x, rows, sums, threads=count)
        measures.block_differences(x, y, rows, gaps, totals, threads=count)
        words, kept = np.zeros(5000, dtype=np.uint32), np.zeros(5000, dtype=np.bool_)
        random_words.philox_words(*KEY, 5, words, threads=count)
        random_words.keep(*KEY, 5, 2**31, kept, threads=count)
        results.append(
            [
                index, side, out, stats, packed, coarse, moves, sums, gaps, totals, words, kept,
                measures.fingerprint(x, 7, threads=count),
            ]
        )  # fmt: skip
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("chunk", [1, 54, 55, 56, 62, 63, 64, 65, 118, 119, 120, 127, 128, 4096])
@pytest.mark.parametrize("chunks", [0, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("more", [0, 1, 37])
def test_leaf_hashes_are_those_of_the_standard_library(chunk: int, chunks: int, more: int) -> None:
    data = memoryview(np.random.default_rng(chunk).bytes(chunk * chunks + more))

    found = measures.leaf_hashes(data, chunk)

    if found is None:
        cpu = Path("/proc/cpuinfo")
        assert not cpu.exists() or " sha_ni " not in cpu.read_text(), "the processor has SHA instructions"
        pytest.skip("this processor has no SHA instructions")
    starts = range(0, data.nbytes, chunk)
    assert found == [hashlib.sha256(b"\0" + data[at : at + chunk]).digest() for at in starts]
