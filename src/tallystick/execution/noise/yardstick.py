"""An auditor's yardstick: the noise that one calibration on its own hardware measured, and what it makes plausible.

A trainer declares its bands. What they are worth is not theirs to say: from the auditor's own measurement follows which
bands are plausible, and how many roundings and decisions an honest log takes from the follower's own (docs/adr/0026).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import numpy as np
from torch import Tensor

from tallystick.execution.noise.buffers import BUFFER_OCTAVES, grid_if_narrower
from tallystick.execution.noise.freedom import (
    CLUSTER,
    FLIPS,
    LARGEST_CLUSTER,
    LARGEST_SQUARED,
    MOST_WEIGHED,
    STEADY_FLIPS,
    WEIGHED,
)
from tallystick.execution.noise.gradients import OWN_WEIGHED, STEP_SLACK
from tallystick.execution.noise.measured import Calibration, SiteNoise
from tallystick.execution.rounding.grids import (
    ACTIVATIONS,
    DOUBT,
    OUTGROWN,
    RISES,
    Site,
    is_noise_only,
    largest_scale,
    loudest_band,
    may_be_lifted,
    row_scales_of,
    scale_exponent,
    whole_scale,
)
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import Policy, hearing_safety

BAND_OCTAVES = 2  # K = 4: how far a declared band may lie above the auditor's own (docs/adr/0026)
KERNEL_OCTAVES = 2  # more, K = 16, of fp32 gradients: kernels that add up in another order (docs/adr/0026)
RARE = 12  # octaves between band and quantum from which on fp64 takes any band
CONVOLVED = 3  # dimensions from which on a parameter may be a convolution's, whose kernels those are
REACH = 4.0  # times its own largest deviation: a decision that lies farther from its switching point counts
FEW_ELEMENTS = 256  # below which the mean deviation of a site says little
FEW = 9  # bits: below 2**(FEW - 1) elements the largest deviation seen says less, and an octave more is allowed for every two
WEIGHED_SLACK = 8.0  # times what moves are expected to come to in the optimizer, all gradients together
MOSTLY_NOISE = 8.0  # times its own noise that a gradient is at most whose size says little
UNSURE = 8.0  # times its own largest deviation, the size of a site differs by less between machines
HEARD_OCTAVES = 2  # of noise above what a declared band is for, where a gradient is noise only here
HEARD_SCALE = 3  # octaves above its size without noise that the scale of such a gradient may lie
UNMEASURED = 4  # octaves below a band that a mean deviation is taken to be where none could be measured


class Yardstick:
    """What one calibration on the auditor's own hardware makes plausible, until the next.

    What of gradients and buffers that one does not see, of a layer that its step leaves out, the one ``before`` still says.
    What single results carried then, they may again: ``steady`` is whether none of them was most of the noise in either.
    ``is_trainers`` says that the trainer measured in the same step, so that what it found to be noise only was that in this one.
    ``fresh`` are the sites that this calibration saw, ``zeros`` those of which it saw nothing but that, and says nothing.
    """

    def __init__(
        self,
        policy: Policy,
        measured: Calibration,
        before: Yardstick | None = None,
        *,
        is_trainers: bool = True,
        zeros: frozenset[Site] = frozenset(),
    ) -> None:
        self.policy, self.is_trainers, self.zeros = policy, is_trainers, zeros
        self.fresh = frozenset(measured.noise)
        self.measured = measured if before is None else _completed(measured, before.measured)
        self.noise: dict[Site, SiteNoise] = {**self.measured.noise}
        self._pooled = self._pooled_mean()
        self._signals: dict[Site, Yardstick] = {}
        decisions = [noise.relative for place, noise in self.noise.items() if place[0] == Kind.DECISION]
        self._noisiest: float = max(decisions, default=math.inf)
        self._shares: dict[Site, float] = {**measured.states, **measured.corrections}
        # One measurement sees single results carry the gradient, the next does not, and a step soon after does again.
        self.steady: bool = measured.steady and (before is None or before.steady)

    def _pooled_mean(self) -> float:
        """Return the mean deviation of all gradients that are more than noise, each over its scale.

        The mean of a few elements, or of what differs rarely, may be nothing in one measurement and something in the next.
        """
        total, elements = 0.0, 0
        for place, noise in self.noise.items():
            own = self.measured.table.sites.get((Kind(place[0]), place[1]))
            if place[0] != Kind.GRADIENT or not noise.scales.size or self.is_unmeasured(place):
                continue
            if own is not None and not is_noise_only(own):
                relative = noise.block_mean * np.exp2(-noise.scales.astype(np.float64))
                total += float(relative.mean()) * noise.elements
                elements += noise.elements
        return total / elements if elements else 0.0

    def expected(self, place: Site, grid: SiteGrid, numel: int) -> float:
        """Return how many of a site's ``numel`` roundings two honest machines are expected to differ in."""
        if is_noise_only(grid) or not numel:
            return 0.0
        if place[0] in ACTIVATIONS:
            return numel * self._shares.get(place, math.ldexp(1.0, grid.band - UNMEASURED - grid.floor))
        if place[0] == Kind.STATE:
            share = self._shares.get(place, math.ldexp(1.0, grid.band - UNMEASURED))
            return numel * min(1.0, math.ldexp(share, grid.precision))
        noise = self.noise.get(place)
        if noise is None or not noise.scales.size:
            return numel * min(1.0, math.ldexp(1.0, grid.band - UNMEASURED - grid.floor))
        return float(self._expected_rows(place, noise, grid, numel).sum())

    def _expected_rows(self, place: Site, noise: SiteNoise, grid: SiteGrid, numel: int) -> np.ndarray:
        rows = numel / noise.block_mean.size
        relative = noise.block_mean * np.exp2(-noise.scales.astype(np.float64))
        if place[0] == Kind.GRADIENT and (numel < FEW_ELEMENTS or self.is_unmeasured(place)):
            relative = np.maximum(relative, self._pooled)
        elif numel < FEW_ELEMENTS:
            relative = np.maximum(relative, noise.relative)
        own = self.measured.table.sites.get((Kind(place[0]), place[1]))
        if own is not None and may_be_lifted(
            self.policy, place[0], own
        ):  # over the scale declared, and within its band
            rise = noise.scales - np.maximum(grid.scales, scale_exponent(noise.rms))
            relative = np.minimum(relative * np.exp2(np.clip(rise, -500, 500)), 2.0**grid.band)
        return np.minimum(relative * 2.0**-grid.floor, 1.0) * rows

    def by_square(self, place: Site, grid: SiteGrid, numel: int) -> dict[int, float]:
        """Return how many of a gradient's roundings are expected to differ, by the exponent of two of their squared quantum."""
        noise = self.noise.get(place)
        if (
            place[0] != Kind.GRADIENT
            or is_noise_only(grid)
            or not numel
            or not grid.scales.size
            or grid.precision
        ):
            return {}
        scales = grid.scales.astype(np.int64)
        if noise is None or noise.block_mean.size != scales.size:
            moves = np.full(scales.size, self.expected(place, grid, numel) / scales.size)
        else:
            moves = self._expected_rows(place, noise, grid, numel)
            unheard = self._pooled * 2.0**-grid.floor * numel / scales.size  # a row whose token did not occur
            moves = np.where(noise.block_mean > 0.0, moves, unheard)
        quanta, place_of = np.unique(np.minimum(scales + grid.floor, LARGEST_SQUARED), return_inverse=True)
        sums = np.bincount(place_of, weights=moves)
        return {2 * int(quantum): float(mean) for quantum, mean in zip(quanta, sums, strict=True)}

    @property
    def flips_allowed(self) -> float:
        """How many sixteen-bit results that carry the gradient as far as one can may fall otherwise in one step."""
        if not self.policy.autocast:
            return 0.0
        return STEADY_FLIPS if self.steady else FLIPS

    @property
    def weighable(self) -> float:
        """How much of a step's gradient moves may be, both squared and as the optimizer weighs them."""
        return min(max(WEIGHED, WEIGHED_SLACK * self.measured.weighed), MOST_WEIGHED)

    def weighable_at(self, place: Site) -> float:
        """Return the same of one gradient: what is mostly noise may be moved by all that it is, and of few elements some are."""
        own = self.measured.weights.get((Kind(place[0]), place[1]), self.measured.weighed)
        return min(self._doubt(place) * max(OWN_WEIGHED, STEP_SLACK * own), 1.0)

    def _doubt(self, place: Site) -> float:
        """Return how many times as far as its largest deviation a site's elements may lie: of few those seen say little."""
        noise = self.noise.get(place)
        return UNSURE if noise is not None and noise.elements < FEW_ELEMENTS else 1.0

    def cluster(self, numel: int) -> int:
        """Return how many of ``numel`` roundings one sixteen-bit result that falls otherwise moves together, at most."""
        if not self.policy.autocast:
            return 1
        largest = CLUSTER if self.steady else max(CLUSTER, numel // LARGEST_CLUSTER)
        return min(largest, max(1, numel))

    def unsure(self, place: Site, energy: float) -> float:
        """Return the squared noise of a gradient whose squares add up to ``energy``, the largest deviation taken for all.

        It grows with the gradient, up to where an honest trainer measures again: what cancelled then says no more.
        """
        noise = self.noise.get(place)
        if noise is None or noise.rms == 0.0:
            return 0.0
        far = (self._doubt(place) * noise.largest) ** 2
        return far * min(energy / noise.rms**2, noise.elements * 4.0 ** (OUTGROWN + 1))

    def with_signal(self, now: Yardstick, places: Collection[Site]) -> Yardstick:
        """Return this yardstick; what ``excess_signal`` says of ``places`` is from the measurement ``now``."""
        self._signals = dict.fromkeys(places, now)
        return self

    def lacks(self, place: Site) -> bool:
        """Whether a site's noise has never been measured, so that only the trainer's word says what it is."""
        return place not in self.noise

    def floor_of_noise(self, place: Site) -> int | None:
        """Return the scale exponent from which on the trainer of a gradient that was nothing but noise measures it again."""
        own = self.measured.table.sites.get((Kind(place[0]), place[1]))
        if own is None or not is_noise_only(own) or self.policy.autocast:
            return None
        return int(own.scales.min()) + own.band

    def hears(self, place: Site) -> bool:
        """Whether a gradient is more than noise by the auditor's own measurement."""
        own = self.measured.table.sites.get((Kind(place[0]), place[1]))
        return own is not None and not is_noise_only(own)

    def hears_clearly(self, place: Site) -> bool:
        """Whether a gradient is more than noise for anybody whose noise is within ``K`` of the auditor's own."""
        own = self.measured.table.sites.get((Kind(place[0]), place[1]))
        clear = loudest_band(self.policy, was_noise=True) - BAND_OCTAVES
        return own is not None and self.hears(place) and (own.residue_bits > 0 or own.band <= clear)

    def would_hear(self, place: Site) -> bool:
        """Whether the auditor would hear a gradient in this step, by what it measured last or in it."""
        return self._signals.get(place, self).hears(place)

    def excess_signal(self, place: Site, grid: SiteGrid) -> tuple[str | None, str]:
        """Return what is wrong with a gradient that is declared to be more than noise, and is not here; None, and what it is for.

        An honest trainer hears one that is several times its own noise. So its size lies not far below its scale as float64
        computes it, on any machine; and its noise, which may be larger here, not far above what its band is for.
        """
        source = self._signals.get(place, self)
        noise = source.noise.get(place)
        if noise is None or source.hears(place):
            return None, ""
        scales = grid.scales.astype(np.float64)
        scale = whole_scale(np.exp2(scales - scales.max())) + int(scales.max())
        loudest = scale + grid.band - self.policy.safety + HEARD_OCTAVES
        stated = f"nothing but noise, of {noise.largest:.3g}"
        if scale_exponent(noise.largest) > loudest:
            return stated, f"more than noise, which is below 2**{loudest}"
        if noise.exact is not None and scale > scale_exponent(noise.exact) + HEARD_SCALE:
            return (
                f"nothing but noise, rms {noise.exact:.3g} without it",
                f"more than noise, of scale 2**{scale}",
            )
        return None, ""

    def excess_return(self, place: Site, grid: SiteGrid) -> tuple[str | None, str]:
        """Return what is wrong with a gradient that was nothing but noise and is heard where that is measured; None, if nothing.

        It is where its band is clearly narrower than the widest, for the trainer and, some octaves aside, for the auditor.
        """
        noise, limit = self.noise.get(place), loudest_band(self.policy, was_noise=True)
        own = None if noise is None else scale_exponent(noise.relative) + hearing_safety(self.policy)
        # The auditor's is the loudest of more repetitions, and of few elements each says little.
        doubt = BAND_OCTAVES if noise is None else octaves_allowed(noise.elements)
        if grid.band <= limit and (own is None or own <= limit + doubt):
            return None, ""
        stated = f"2**{grid.band}" + ("" if own is None else f", of noise for 2**{own} here")
        return f"a band of 2**{limit} at most where it was noise", stated

    def reach(self, place: Site) -> float:
        """Return how far from a switching point, over the input's rms, noise may turn a decision; a tie is turned by any.

        One that the measured step does not have is as noisy as the noisiest that it has.
        Under autocast so many lie within reach, and each could be turned at will, that all but ties are counted.
        """
        if self.policy.autocast:
            return 0.0
        noise = self.noise.get(place)
        return REACH * (self._noisiest if noise is None else noise.relative)

    def flips(self) -> float:
        """Return how many decisions of a step two honest machines are expected to differ in."""
        return self.measured.flips

    def is_mostly_noise(self, place: Site, rms: float, numel: int, *, is_silent: bool = False) -> bool:
        """Whether a gradient of this size is hardly more than its noise: one of few elements, or one that is noise only here.

        Sums that cancel leave up to twenty times as much on one machine as on another (docs/adr/0026). Of what was zero when it
        was measured, and ``is_silent`` in the log, the loudest of the others says how much.
        """
        noise, own = self.noise.get(place), self.measured.table.sites.get(place)
        if noise is None or (numel >= FEW_ELEMENTS and self.hears(place)):
            return False
        is_zero = is_silent and noise.rms == noise.largest == 0.0 and own is not None and is_noise_only(own)
        floor = math.ldexp(1.0, int(own.scales.max()) + own.band) if is_zero and own is not None else 0.0
        return max(MOSTLY_NOISE * noise.largest, floor) >= rms

    def compare_band(
        self, place: Site, grid: SiteGrid | None, *, was_noise: bool = False
    ) -> tuple[float, str | None, str]:
        """Return how many times wider a declared band is than the auditor's own, and what is allowed and declared if too wide.

        ``was_noise`` is whether the gradient was declared nothing but noise in the step before.

        A band that is narrower moves nothing by itself: machines that cannot follow it find that out, and accuse nobody of it.
        What it does to a quantum is held to where floors are (``rounding.breaches``).
        """
        noise = self.noise.get(place)
        finest = SiteGrid(0, self.policy.decision_band[0], 0) if place[0] == Kind.DECISION else None
        own, grid = self.measured.table.sites.get(place, finest), finest if grid is None else grid
        if noise is None or own is None or grid is None:
            return 0.0, None, ""
        allowed = octaves_allowed(noise.elements or 1 << FEW)
        if place[0] == Kind.GRADIENT and not self.policy.autocast:
            allowed = self.octaves_of_gradient(noise)
        if is_noise_only(grid):
            return self._compare_silenced(own, noise, allowed, was_noise=was_noise)
        if is_noise_only(own):
            return 1.0, None, ""  # declared to be more than noise: where it is not, moves are counted
        finest = max(own.floor, self.policy.gradient_floor)
        if place[0] == Kind.GRADIENT and grid.residue_bits and (grid.floor <= finest or not self.steady):
            # Its band is the policy's, and the size of all that is chosen is held to; of buffers and losses it is not. Where
            # single results are most of the noise, one measurement sees them and the next does not.
            return math.ldexp(1.0, min(grid.floor - own.floor, 1000)), None, ""
        apart = grid.band - own.band
        if place[0] == Kind.BUFFER:
            # Its quantum is as wide as its band, and what is rounded stays in it.
            allowed = min(allowed, BUFFER_OCTAVES)
        if place[0] == Kind.DECISION and self.policy.autocast:
            # One measurement sees the flip that moves them and the next does not; those beyond the reach of noise are counted.
            return 2.0**apart, None, ""
        # One element in 2^11 may be chosen from, on quanta as fine as the auditor's own; on coarser ones than 2^-16 fewer.
        is_rare = (
            place[0] == Kind.GRADIENT and grid.band + RARE <= min(grid.floor, -16) and grid.floor <= own.floor
        )
        if apart <= allowed or (self.policy.compute == "float64" and is_rare):
            return 2.0**apart, None, ""
        limit = f"a band of 2**{own.band} of its scale, 2**{allowed} times more at most"
        return 2.0**apart, limit, f"2**{grid.band}"

    def octaves_of_gradient(self, noise: SiteNoise) -> int:
        """Return by how many powers of two the band of a gradient may be wider than the auditor's own, but for residues.

        Who measures in the trainer's step first repeats it as the trainer does, so few elements are no reason to differ.
        """
        allowed = BAND_OCTAVES if self.is_trainers else octaves_allowed(noise.elements)
        has_kernels = noise.dims >= CONVOLVED or not self.is_trainers
        return allowed + (KERNEL_OCTAVES if has_kernels and self.policy.compute == "float32" else 0)

    def own_buffer_grid(self, place: Site, grid: SiteGrid, x: Tensor) -> SiteGrid | None:
        """Return the auditor's own grid of a buffer ``x`` of few elements whose declared band is wider by two octaves or more."""
        own = self.measured.table.sites.get((Kind(place[0]), place[1]))
        if place[0] != Kind.BUFFER or own is None or not 0 < x.numel() < FEW_ELEMENTS:
            return None
        return grid_if_narrower(self.policy, own, grid, x, BAND_OCTAVES)

    def widest_rows(self, place: Site) -> np.ndarray | None:
        """Return the largest scale exponents allowed of a gradient's rows where each has one; None if that is not known.

        Whether small rows may lie below the whole matrix's is for the trainer's own noise to say.
        """
        noise, own = self.noise.get(place), self.measured.table.sites.get(place)
        if noise is None or own is None or is_noise_only(own) or noise.block_rms is None:
            return None
        scales = row_scales_of(noise.block_rms, dips=False)
        return np.maximum(scales, own.scales.astype(np.int64)) + 1

    def _compare_silenced(
        self, own: SiteGrid, noise: SiteNoise, allowed: int, *, was_noise: bool
    ) -> tuple[float, str | None, str]:
        """Compare a gradient that is declared to be nothing but noise; how high its floor is, is checked against its values.

        Near the limit one machine may find a band too wide for the policy that fits on the other; but for residues not by more
        where it has few elements, as both repeat the step alike.
        """
        least = scale_exponent(noise.relative)
        least += 1 if self.policy.residue_bits and self.is_trainers else hearing_safety(self.policy)
        if not self.policy.residue_bits:
            allowed = DOUBT if self.is_trainers else BAND_OCTAVES
        is_near = least + allowed >= loudest_band(self.policy, was_noise=was_noise)
        if is_noise_only(own) or noise.rms == 0.0 or is_near:
            return 1.0, None, ""
        limit = f"a gradient of rms {noise.rms:.3g} with noise of {noise.largest:.3g}"
        return math.inf, limit, "nothing but noise, and silenced"

    def excess_floor(
        self, place: Site, grid: SiteGrid, size: int, largest: int | None, risen: int = 0
    ) -> tuple[str | None, str]:
        """Return the highest floor allowed of a gradient that is noise only, None if it is lower, and the declared one.

        ``size`` is the scale exponent of its values, which may lie above the declared floor but no more than that above the one
        allowed; ``largest`` and ``risen`` are as in ``highest_floor``.
        """
        floor, own = max(int(grid.scales.max()) + grid.band, size), self.highest_floor(place, largest, risen)
        if own is None or floor <= own:
            return None, ""
        return f"noise of 2**{own} at most", f"noise below 2**{floor}"

    def highest_floor(self, place: Site, largest: int | None, risen: int = 0) -> int | None:
        """Return the exponent of the highest floor allowed of a gradient that is noise only; None if its noise is not known.

        ``largest`` is the scale exponent of the step's largest gradient, with which such floors rise and fall; ``risen`` by how
        many octaves the trainer's own do, of those that it heard when it measured.
        """
        noise, mine = self.noise.get(place), self.measured.table.sites.get(place)
        if noise is None or (noise.rms == 0.0 and self.hears(place)):
            return None
        before = largest_scale(self.measured.table)
        before = self._largest_unheard if before is None else before
        grown = 0 if before is None or largest is None else min(max(0, largest - before), RISES + 1)
        risen = max(risen, grown)
        # An honest floor lies above its noise, and where the band would be too wide above the values.
        spare = max(0, -loudest_band(self.policy, was_noise=True))
        # Of a gradient that is zero here its grid says how loud the others are.
        zero = -1000 if mine is None or not is_noise_only(mine) else int(mine.scales.max()) + mine.band
        noisy = scale_exponent(noise.largest) + self.policy.safety
        noisy = -1000 if noise.rms == 0.0 else noisy + octaves_allowed(noise.elements) + spare
        return risen + 1 + max(noisy, zero + BAND_OCTAVES)

    @property
    def _largest_unheard(self) -> int | None:
        """The scale exponent of the largest gradient where all are noise only here; who hears some finds none below that."""
        loudest = loudest_band(self.policy, was_noise=False)
        gradients = [noise for place, noise in self.noise.items() if place[0] == Kind.GRADIENT]
        size = max((max(one.rms, math.ldexp(one.largest, -loudest)) for one in gradients), default=0.0)
        return scale_exponent(size) if size > 0.0 else None

    def is_unmeasured(self, place: Site) -> bool:
        """Whether the auditor saw no value of a gradient but zero when it last measured, or never measured it."""
        noise = self.noise.get(place)
        return noise is None or noise.rms == noise.largest == 0.0


def _completed(measured: Calibration, before: Calibration) -> Calibration:
    """Return ``measured`` with the gradients and buffers that only the calibration ``before`` it saw.

    Their grids with them: where nothing is measured a follower's table has the trainer's.
    """
    kept = {
        place: noise
        for place, noise in before.noise.items()
        if place not in measured.noise and place[0] in (Kind.GRADIENT, Kind.BUFFER)
    }
    grids = {place: before.table.sites[place] for place in kept if place in before.table.sites}
    table = GridTable({**measured.table.sites, **grids})
    weights = {**before.weights, **measured.weights}
    return replace(measured, noise={**measured.noise, **kept}, table=table, weights=weights)


def octaves_allowed(elements: int) -> int:
    """Return by how many powers of two a band may differ from the auditor's own at a site of so many elements."""
    return BAND_OCTAVES + -(-max(0, FEW - max(elements, 1).bit_length()) // 2)
