"""Distributions in bins, and what a band costs: both compared with brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.log import SparseEntries, encode
from tallystick.numerics.noise import (
    DEEPEST,
    PARTS,
    QUANTILES,
    Distribution,
    ambiguous_share,
    entry_bits,
    relative_exponents,
    relative_share,
)
from tallystick.numerics.rounding import round_recorded

MAGNITUDES = st.lists(st.one_of(st.just(0.0), st.floats(1e-40, 1e15)), min_size=1, max_size=200)


def of(values: object) -> Distribution:
    found = Distribution()
    found.add(np.asarray(values, dtype=np.float64))
    return found


@given(MAGNITUDES)
def test_a_quantile_is_never_below_the_true_one_and_at_most_an_eighth_above(values: list[float]) -> None:
    found, ordered = of(values), np.sort(values)
    assert found.count == len(values)
    assert found.largest == ordered[-1]
    for _, share in QUANTILES:
        true = ordered[math.ceil(share * len(values)) - 1]
        assert true <= found.quantile(share) <= true * (1 + 1 / PARTS)


@given(MAGNITUDES, MAGNITUDES)
def test_merged_distributions_equal_one_of_all_values(a: list[float], b: list[float]) -> None:
    merged, whole = of(a), of([*a, *b])
    merged.merge(of(b))
    assert merged.fields() == whole.fields()
    assert np.array_equal(merged.bins, whole.bins)


def test_the_share_above_a_power_of_two_is_exact_and_what_is_no_number_counts_as_infinite() -> None:
    found = of([0.0, 0.25, 0.49, 0.5, 1.0, math.inf])
    assert [found.above(power) for power in (-3, -1, 0, 1)] == [5 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert of([math.nan]).largest == math.inf
    assert Distribution().quantile(0.99) == 0.0


def test_exponents_are_counted_relative_to_each_blocks_scale() -> None:
    counts = relative_exponents(np.array([[1.0, 2.0, 0.0], [4.0, 0.5, 1e-30]]), np.array([1, 2]))
    found = {DEEPEST + int(at): int(counts[at]) for at in np.flatnonzero(counts)}
    assert found == {-1: 1, 0: 2, -3: 1, DEEPEST: 2}


@pytest.mark.parametrize(
    "grid",
    [
        SiteGrid(0, -12, -5, True, [0]),
        SiteGrid(0, -10, -5, True, [0]),
        SiteGrid(24, -30, -21, False, [0]),
        SiteGrid(14, -20, -16, False, [0]),
    ],
    ids=str,
)
def test_the_expected_share_is_what_rounding_logs(grid: SiteGrid) -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    counted = len(round_recorded(x, grid, out=torch.empty_like(x), key=(5, 7))) / x.numel()
    share = ambiguous_share(relative_exponents(x.numpy()[None, :], np.array([0])), grid)
    assert counted * x.numel() > 300, "too few to say anything"
    assert share == pytest.approx(counted, rel=0.15)
    assert ambiguous_share(
        relative_exponents(x.numpy()[None, :], np.array([0])), grid, widened=1
    ) == pytest.approx(2 * share, rel=0.01)


def test_the_share_of_a_relative_band_is_what_rounding_logs() -> None:
    x = torch.exp(3 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(4), dtype=torch.float64))
    grid = SiteGrid(24, -36, -149)
    counted = len(round_recorded(x, grid, out=torch.empty_like(x), old=x)) / x.numel()
    assert relative_share(24, -36) == pytest.approx(counted, rel=0.1)
    assert relative_share(24, 0) == 1.0


@pytest.mark.parametrize("share", [1e-4, 1e-3, 1e-2, 0.1])
def test_the_expected_bits_are_those_of_the_code(share: float) -> None:
    n = 1 << 20
    drawn = np.random.default_rng(1)
    at = np.flatnonzero(drawn.random(n) < share)
    data = encode(SparseEntries(n, 1, at, drawn.integers(0, 2, at.size)))
    assert entry_bits(share) == pytest.approx(8 * len(data) / n, rel=0.08)
    assert (entry_bits(0.0), entry_bits(1.0, 2)) == (0.0, 2.0)
