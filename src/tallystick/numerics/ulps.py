"""How far apart two floating numbers of one format are, in units in the last place; numpy only.

The distance is the number of representable values from one to the other: neighbours are 1 apart, +0 and -0 are 0
apart, and the smallest subnormals of both signs are 2 apart. It says how wrong the last bits are; near zero it says
little about size, which is why a reader is shown relative sizes beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
BINS = 66  # 0, then [2**k, 2**(k+1)) for k = 0 to 63, and what is no number
UNORDERED = BINS - 1
NOT_A_NUMBER = np.uint64(0xFFFF_FFFF_FFFF_FFFF)  # the distance where there is none


@dataclass(frozen=True)
class Histogram:
    """Counts of distances: bin 0 holds equal numbers, bin ``k + 1`` distances from 2**k to below 2**(k + 1).

    The last bin holds pairs of which one at least is no number.
    """

    counts: tuple[int, ...]

    @property
    def differing(self) -> int:
        """How many pairs are not equal."""
        return sum(self.counts[1:])

    def bins(self) -> list[tuple[int, int, int]]:
        """Return (lowest, highest, count) of every bin of unequal numbers from the first to the last that is not empty."""
        used = [k for k in range(1, UNORDERED) if self.counts[k]]
        if not used:
            return []
        return [(1 << (k - 1), (1 << k) - 1, self.counts[k]) for k in range(used[0], used[-1] + 1)]

    @property
    def unordered(self) -> int:
        """How many pairs have a NaN."""
        return self.counts[UNORDERED]

    def quantile(self, share: float) -> int:
        """Return a distance that at least ``share`` of the unequal pairs do not exceed: the top of a bin; 0 if all are equal."""
        wanted, seen = share * self.differing, 0
        for _, highest, count in self.bins():
            seen += count
            if seen >= wanted:
                return highest
        return 0 if not self.differing else (1 << 64) - 1


def ulp_distances(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> Words:
    """Return the distances of two arrays of one floating format (2, 4 or 8 bytes); the largest uint64 where one is NaN."""
    if a.dtype != b.dtype or a.dtype.kind != "f":
        raise TypeError(f"two arrays of one floating format are needed, got {a.dtype} and {b.dtype}")
    x, y = _ranks(a), _ranks(b)
    distance = np.where(x > y, x - y, y - x)
    distance[np.isnan(a) | np.isnan(b)] = NOT_A_NUMBER
    return distance


def _ranks(x: npt.NDArray[np.generic]) -> Words:
    """Place in the order of all numbers of the format, zero at 2**63."""
    width = x.dtype.itemsize
    bits = np.ascontiguousarray(x).view(f"<u{width}").astype(np.uint64)
    sign = np.uint64(1 << (8 * width - 1))
    magnitude = bits & (sign - np.uint64(1))
    middle = np.uint64(1 << 63)
    return np.where(bits & sign != 0, middle - magnitude, middle + magnitude)


def histogram(distances: Sequence[Words]) -> Histogram:
    """Return how often which power of two occurs."""
    counts = np.zeros(BINS, dtype=np.int64)
    for part in distances:
        nan = part == NOT_A_NUMBER
        counts[UNORDERED] += int(nan.sum())
        real = part[~nan]
        # frexp of a float64 rounds 2**53 - 1 and above up: the high and low halves are exact.
        high, low = (
            (real >> np.uint64(32)).astype(np.float64),
            (real & np.uint64(0xFFFFFFFF)).astype(np.float64),
        )
        exponent = np.where(high > 0, np.frexp(high)[1] + 32, np.frexp(low)[1])
        counts[:UNORDERED] += np.bincount(np.minimum(exponent, UNORDERED - 1), minlength=UNORDERED)
    return Histogram(tuple(int(count) for count in counts))
