"""Distributions of noise in bounded memory, and what a band costs: pure arithmetic on numpy arrays.

Magnitudes are counted in bins of an eighth of a power of two, read off their binary64 bit patterns, so
a tensor of any size costs one pass and ten kilobytes. Quantiles are the upper edges of bins: at most 12.5 %
above the true ones, never below. The largest value is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tallystick.numerics.grid_table import SiteGrid

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

LOWEST, HIGHEST = (
    -160,
    64,
)  # powers of two at which the bins begin and end; what lies outside goes into the last ones
PARTS = 8  # bins of a power of two
SHIFT = 49  # of a binary64 pattern: the exponent and its PARTS remain
BINS = (HIGHEST - LOWEST) * PARTS
DEEPEST, SHALLOWEST = (
    -40,
    24,
)  # binary exponents of values, relative to their block's scale, that are told apart
QUANTILES = (("median", 0.5), ("p99", 0.99), ("p99.99", 0.9999))


@dataclass
class Distribution:
    """Counts of magnitudes.

    Attributes:
        zeros: how many were exactly zero.
        bins: int64[BINS]; bin ``i`` begins at ``edge(i)``.
        largest: the largest magnitude; infinite if one was not a number.
    """

    zeros: int = 0
    bins: Counts = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))
    largest: float = 0.0

    @property
    def count(self) -> int:
        """How many magnitudes were counted."""
        return self.zeros + int(self.bins.sum())

    def add(self, magnitudes: Floats) -> None:
        """Count ``magnitudes``: none negative, any shape."""
        flat = np.ascontiguousarray(magnitudes, dtype=np.float64).reshape(-1)
        if not flat.size:
            return
        flat = np.where(np.isnan(flat), np.inf, flat)
        self.largest = max(self.largest, float(flat.max()))
        present = flat[flat > 0.0]
        self.zeros += flat.size - present.size
        at = (present.view(np.int64) >> SHIFT) - ((1023 + LOWEST) * PARTS)
        self.bins += np.bincount(np.clip(at, 0, BINS - 1), minlength=BINS)

    def merge(self, other: Distribution) -> None:
        """Count in what ``other`` counted."""
        self.zeros += other.zeros
        self.bins += other.bins
        self.largest = max(self.largest, other.largest)

    def quantile(self, share: float) -> float:
        """Return a number that at least ``share`` of the magnitudes do not exceed: an edge of a bin, or the largest."""
        wanted = math.ceil(share * self.count)
        if wanted <= self.zeros:
            return 0.0
        at = int(np.searchsorted(np.cumsum(self.bins), wanted - self.zeros))
        return min(edge(at + 1), self.largest)

    def above(self, power: int) -> float:
        """Return the share of magnitudes of at least ``2**power``."""
        first = min(max(0, (power - LOWEST) * PARTS), BINS)
        return float(self.bins[first:].sum()) / max(self.count, 1)

    def fields(self) -> dict[str, float]:
        """Return median, p99, p99.99 and max."""
        return {name: self.quantile(share) for name, share in QUANTILES} | {"max": self.largest}


def edge(index: int) -> float:
    """Return where bin ``index`` begins."""
    power, part = divmod(index, PARTS)
    return math.ldexp(1.0 + part / PARTS, LOWEST + power)


def relative_exponents(x: Floats, scales: Counts) -> Counts:
    """Return how many elements of ``x`` have each binary exponent above their block's scale, int64.

    Entry ``i`` counts exponent ``DEEPEST + i``; zeros and what lies outside count as the nearest.
    ``scales`` holds the scale exponent of each of its equal leading blocks.
    """
    _, exponent = np.frexp(x.reshape(scales.size, -1))
    own = np.where(x.reshape(scales.size, -1) == 0.0, DEEPEST, exponent - 1 - scales[:, None])
    at = np.clip(own, DEEPEST, SHALLOWEST) - DEEPEST
    return np.bincount(at.reshape(-1), minlength=SHALLOWEST - DEEPEST + 1)


def ambiguous_share(exponents: Counts, grid: SiteGrid, *, widened: int = 0) -> float:
    """Return the share of elements expected within ``2**widened`` bands of a boundary of ``grid``.

    ``exponents`` as from ``relative_exponents``. Positions between two boundaries count as evenly spread.
    """
    total = int(exponents.sum())
    if not total:
        return 0.0
    own = np.arange(DEEPEST, SHALLOWEST + 1)
    quantum = (
        np.maximum(own - (grid.precision - 1), grid.floor)
        if grid.precision
        else np.full(own.size, grid.floor)
    )
    share = np.minimum(np.exp2(np.minimum(grid.band + 1.0 + widened - quantum, 0.0)), 1.0)
    return float((exponents * share).sum() / total)


def relative_share(precision: int, band: int, *, widened: int = 0) -> float:
    """Return the same for a site whose band is relative to its values: their significands as likely as by Benford's law.

    With quantum ``2**(e - precision + 1)`` and band ``2**band * |x|`` the share is ``2**(band + precision) * m``, the
    significand ``m`` in [1, 2) being 1 / ln 2 on average.
    """
    return min(1.0, math.ldexp(1.0 / math.log(2.0), band + precision + widened))


def entry_bits(share: float, width: int = 1) -> float:
    """Return the bits that the log spends on an element which is logged with probability ``share``: position and symbol.

    The entropy of the position; the Rice code of spec/rounding-log.md is within a few percent of it.
    """
    if share <= 0.0:
        return 0.0
    if share >= 1.0:
        return float(width)
    rest = 1.0 - share
    return -share * math.log2(share) - rest * math.log2(rest) + share * width
