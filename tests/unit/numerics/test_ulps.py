"""Distances in units in the last place."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.numerics.ulps import BINS, NOT_A_NUMBER, UNORDERED, histogram, ulp_distances


def distance(a: float, b: float, kind: str = "<f4") -> int:
    return int(ulp_distances(np.array([a], dtype=kind), np.array([b], dtype=kind))[0])


@pytest.mark.parametrize("kind", ["<f2", "<f4", "<f8"])
def test_neighbours_are_one_apart_and_zeros_of_both_signs_none(kind: str) -> None:
    one = np.array([1.0], dtype=kind)
    assert int(ulp_distances(one, np.nextafter(one, np.array([2.0], dtype=kind)))[0]) == 1
    assert distance(0.0, -0.0, kind) == 0
    tiny = float(np.nextafter(np.array([0.0], dtype=kind), np.array([1.0], dtype=kind))[0])
    assert distance(tiny, -tiny, kind) == 2
    assert distance(math.inf, float(np.finfo(kind).max), kind) == 1


def test_what_is_no_number_has_no_distance() -> None:
    assert distance(math.nan, 1.0) == int(NOT_A_NUMBER)
    assert distance(1.0, math.nan) == int(NOT_A_NUMBER)
    counts = histogram([ulp_distances(np.array([math.nan, 1.0]), np.array([1.0, 1.0]))])
    assert (counts.unordered, counts.counts[0], counts.differing) == (1, 1, 1)


def test_arrays_of_two_formats_are_refused() -> None:
    with pytest.raises(TypeError, match="one floating format"):
        ulp_distances(np.zeros(1, dtype="<f4"), np.zeros(1, dtype="<f8"))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_doubles_far_apart_do_not_overflow(a: int, b: int) -> None:
    x, y = (struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (a, b))
    if math.isnan(x) or math.isnan(y):
        return

    def rank(bits: int) -> int:
        return -(bits & (2**63 - 1)) if bits >> 63 else bits

    assert distance(x, y, "<f8") == abs(rank(a) - rank(b))


@given(st.lists(st.integers(0, 2**64 - 2), min_size=1, max_size=20))
def test_a_distance_falls_into_its_power_of_two(values: list[int]) -> None:
    found = histogram([np.array(values, dtype=np.uint64)])

    assert len(found.counts) == BINS
    for k in range(UNORDERED):
        assert found.counts[k] == sum(value.bit_length() == k for value in values)
    assert found.differing == sum(value > 0 for value in values)


def test_quantiles_are_tops_of_bins() -> None:
    found = histogram([np.array([1, 1, 1, 5], dtype=np.uint64)])

    assert (found.quantile(0.5), found.quantile(1.0)) == (1, 7)
    assert found.bins() == [(1, 1, 3), (2, 3, 0), (4, 7, 1)]
    assert histogram([np.zeros(3, dtype=np.uint64)]).quantile(0.5) == 0
