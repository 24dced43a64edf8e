"""What all forms of rounding share: what following shows, which results are refused, how many entries are accepted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from tallystick.errors import Nondeterminism
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.reference import LARGEST_EXPONENT, SMALLEST_EXPONENT

DENSEST = 8  # a site with more than one ambiguous element in eight has a useless grid, and is refused
FINER = 4  # octaves that a grid becomes coarser at once, as far as points of the finer one are known as such
Key = tuple[int, int]
NO_KEY: Key = (0, 0)


@dataclass(frozen=True)
class Followed:
    """What following one site showed.

    Attributes:
        violation: flat index of the first logged element out of reach of its boundary, or -1.
        violations: how many logged elements were out of reach.
        near: elements within twice the band of a boundary (residues of one bit: the band; of more: all): where a
            dishonest log could choose.
        steer: sum of the squared quanta of those elements.
        energy: sum of the squared values that came out.
        moved: elements that the log took from their own rounding.
        shifted: sum of the squared quanta of those.
        largest: the square of the longest move there; of a site with residues only.
    """

    violation: int
    violations: int
    near: int
    steer: float
    energy: float
    moved: int = 0
    shifted: float = 0.0
    largest: float = 0.0


def followed_residues(grid: SiteGrid, numel: int, found: Followed) -> Followed:
    """Return what was found, where residues have several bits with all elements in reach of moves as long as they allow."""
    if grid.residue_bits == 1:
        return found
    longest = 4.0 ** (grid.residue_bits - 1)
    return replace(found, near=numel, steer=longest * found.steer, largest=longest * found.largest)


def not_finite(name: str, element: int) -> Nondeterminism:
    """Return what is raised for an element that cannot be rounded."""
    return Nondeterminism(
        f"{name}: element {element} is not finite or does not fit float32; it cannot be rounded"
    )


def entry_room(numel: int) -> int:
    """Return how many entries are accepted: one in eight, and eight standard deviations of so many and 256 more."""
    return 256 + numel // DENSEST + 8 * isqrt(numel // DENSEST)


def may_rest(grid: SiteGrid) -> bool:
    """Whether what a step leaves as it is may all lie near boundaries of a grid that became coarser: of none that is dithered."""
    return grid.scales.size > 0 and not grid.dithered


def is_dense(x: Any, grid: SiteGrid, index: npt.NDArray[np.int64], most: int) -> bool:
    """Whether more than ``most`` of the elements ``index``, int64[k], of a tensor ``x`` are near a boundary by chance.

    What a step leaves as it is, as most of a queue, lies on points of its grid: half of these are all as far from a boundary of
    one that became an octave coarser, within its band or not. And equal values, as of variances that are next to nothing beside
    what is left of their first one, are near or are not all together: each counts once.
    """
    if index.size <= most or not may_rest(grid):
        return index.size > most
    values: npt.NDArray[np.float64] = x.detach().reshape(-1).cpu().numpy()[index].astype(np.float64)
    scales = grid.scales.astype(np.int64)[index // (x.numel() // grid.scales.size)]
    exponents = np.maximum(scales + grid.floor, SMALLEST_EXPONENT)
    if grid.precision:
        exponents = np.maximum(np.frexp(values)[1] - grid.precision, exponents)
    points = np.ldexp(values, FINER - np.minimum(exponents, LARGEST_EXPONENT))
    return int(np.unique(values[points != np.floor(points)]).size) > most


def too_dense(name: str, count: int, numel: int) -> Nondeterminism:
    """Return what is raised for a site of more entries than are accepted."""
    return Nondeterminism(
        f"{name}: {count} of {numel} elements are ambiguous, more than one in {DENSEST}: "
        "the band is too wide for the grid"
    )
