"""What a measurement of noise found: deviations of every site, thresholds of activations, and the grids that follow."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np

from tallystick.execution.rounding.grids import (
    scale_exponents,
)
from tallystick.execution.session.sites import Site
from tallystick.numerics.grid_table import GridTable

LEAST_TENSOR = 512
"""Elements of the smallest gradient of which it is not asked which of its elements are nothing but noise."""
MOSTLY = 4.0
"""Times its deviation that an element is at most that is nothing but noise in a repetition."""


@dataclass
class SiteNoise:
    """What calibration measured at one site: deviation over scale, and the scale.

    Attributes:
        relative: largest ``|x - y| / 2**s`` over all elements and repeats.
        scales: exponent ``s`` of each block.
        rms: of the whole tensor.
        largest: largest ``|x - y|``.
        elements: of the site.
        block_rms, block_largest: rms and largest deviation of each block of a gradient.
        block_mean: mean deviation of each block, of a scalar site of the whole; the largest of the repetitions.
        exact: rms of a gradient as float64 computes the step; None where it was not asked.
        dims: of a gradient.
        cancels: whether a buffer has values of either sign: what it adds up may be much larger.
        noisy: which elements of a gradient of fewer than ``LEAST_TENSOR`` are nothing but noise, bool[elements]; empty of others.
    """

    relative: float
    scales: np.ndarray
    rms: float
    largest: float
    elements: int = 0
    block_rms: np.ndarray | None = None
    block_largest: np.ndarray | None = None
    block_mean: np.ndarray = field(default_factory=lambda: np.zeros(1))
    exact: float | None = None
    dims: int = 0
    cancels: bool = False
    noisy: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))


@dataclass(frozen=True)
class Threshold:
    """The paper's tau of one activation site, in quanta: an element farther than that from its rounded value is logged.

    Attributes:
        name, layer: of the site, and the class of its module.
        gradient: whether it is the gradient of an input.
        observed: the largest tau that logs every straddle seen, 0.5 if none was, None if 0.25 does not.
        closed: the largest that the measured divergence allows; never more than ``observed`` if the sample held it.
        mean: divergence of an element on average, in quanta: the share of elements that straddle.
        straddles: how many were seen.
    """

    name: str
    layer: str
    gradient: bool
    observed: float | None
    closed: float
    mean: float
    straddles: int


@dataclass
class Calibration:
    """The noise of every site, and the grids that follow from it; with policy leaf the thresholds they amount to.

    ``states`` is the mean deviation of what the optimizer writes, relative to the larger of old and new value;
    ``flips`` is how many decisions of one step are expected to fall otherwise elsewhere, ``corrections`` the share of an
    activation site's elements. ``steady`` says that repetitions with as many flips as there really are moved the gradient
    alike: then none of those flips is most of its noise. ``weighed`` is what an honest log's moves are expected to come to in the
    optimizer, over the gradient, where ``noise.weighing`` says so, ``weights`` the same of each gradient. ``usual`` are the
    grids that the trainer's repetitions alone give an auditor, where it did these.
    """

    noise: dict[Site, SiteNoise] = field(default_factory=dict[Site, SiteNoise])
    table: GridTable = field(default_factory=GridTable)
    thresholds: list[Threshold] = field(default_factory=list[Threshold])
    states: dict[Site, float] = field(default_factory=dict[Site, float])
    flips: float = 0.0
    corrections: dict[Site, float] = field(default_factory=dict[Site, float])
    steady: bool = True
    weighed: float = 0.0
    weights: dict[Site, float] = field(default_factory=dict[Site, float])
    usual: GridTable | None = None

    def without(self, places: Collection[tuple[int, int]]) -> Calibration:
        """Return the same without the noise and the grids of ``places``: as if they had never been measured."""
        noise = {place: noise for place, noise in self.noise.items() if place not in places}
        table = GridTable({at: grid for at, grid in self.table.sites.items() if at not in places})
        return replace(self, noise=noise, table=table)


def exponent_above(value: float) -> int:
    """Return the smallest ``e`` with ``value <= 2**e``; a very small number for zero."""
    return -1000 if value <= 0.0 else int(scale_exponents(np.array([value]))[0])
