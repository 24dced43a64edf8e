"""The auditor's yardstick: what a log may move, by the auditor's own measurement of the noise (docs/adr/0026).

A trainer declares its bands. What they are worth is not theirs to say: the auditor measures the same noise from the same
committed state on its own hardware, and from that follows which bands are plausible, how many roundings and decisions
an honest log takes from the follower's own, and so how far a dishonest one could steer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tallystick.execution.rounding.grids import (
    ACTIVATIONS,
    Site,
    is_noise_only,
    largest_scale,
    row_scales_of,
    scale_exponent,
)
from tallystick.numerics.budget import STEP_TAIL, TAIL, most_moves, most_square
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import Kind
from tallystick.numerics.noise import entry_bits
from tallystick.numerics.policy import SPARSEST, Policy

if TYPE_CHECKING:
    from tallystick.execution.noise.calibration import Calibration, SiteNoise

BAND_OCTAVES = 2  # K = 4: how far a declared band may lie above the auditor's own (docs/adr/0026)
KERNEL_OCTAVES = 2  # more, K = 16, of fp32 gradients: kernels that add up in another order (docs/adr/0026)
REACH = (
    4.0  # times its own largest deviation: a decision that lies farther from its switching point is counted
)
FEW_ELEMENTS = 256  # below which the mean deviation of a site says little
FEW = 9  # bits: below 2**(FEW - 1) elements the largest deviation seen says less, and an octave more is allowed for every two
STEP_SLACK = 4.0  # the noise of a single step may be that many times what the last calibration saw on average
DEAREST = 3.0  # times the log that finer grids may cost, where the noise leaves no steer as small as wanted
FLIP = 2.0**-8
"""How far one sixteen-bit result that is rounded otherwise carries a gradient that hangs on it, relative (docs/adr/0026)."""
FLIPS, STEADY_FLIPS = 12.0, 2.0  # of those in one step, and where no single one is most of the noise
DRIFT = 3.0
"""How many times as far as independent moves ever go, squared, those of a gradient may have gone (docs/adr/0031)."""
FILLED, FILLED_A_STEP = 4.0, 2.0**-6
"""How many budgets of size steps with so many flips may use together, and how many more for each such step: flips that carry
all of a gradient are rare (docs/adr/0031)."""
CLUSTER, LARGEST_CLUSTER = (
    64,
    16,
)  # roundings that one moves: so many, or where it may be most of the noise 1 in so many
UNMEASURED = (
    4  # octaves below a band that its mean deviation is taken to be where the auditor could measure none
)


@dataclass(frozen=True)
class Excess:
    """A limit that a log exceeds: no proof of a lie, and no ground to accept it.

    Attributes:
        site: what the log does it to.
        own: what the auditor's measurement allows.
        stated: what the log does.
    """

    site: str
    own: str
    stated: str


@dataclass
class SiteMoves:
    """One site of one step, or of a run.

    Attributes:
        expected: roundings that the log of an honest trainer moves, on average, by the auditor's own mean deviation.
        moved: roundings that this log moved.
        near: those that it could have.
        square: the largest squared quantum.
        squares: sum of the squared quanta of those near, where that is known to be less than ``near * square``.
        by_square: of those expected, how many have each squared quantum, by its exponent of two; of absolute grids alone.
        cluster: how many are moved together, see ``Yardstick.cluster``.
    """

    expected: float = 0.0
    moved: int = 0
    near: int = 0
    square: float = 0.0
    squares: float = math.inf
    by_square: Mapping[int, float] = field(default_factory=dict[int, float])
    cluster: int = 1


class Yardstick:
    """What one calibration on the auditor's own hardware makes plausible, until the next.

    What of gradients and buffers that one does not see, of a layer that its step leaves out, the one ``before`` still says.
    What single results carried then, they may again: ``steady`` is whether none of them was most of the noise in either.
    """

    def __init__(self, policy: Policy, measured: Calibration, before: Yardstick | None = None) -> None:
        self.policy, self.measured = (
            policy,
            measured if before is None else _completed(measured, before.measured),
        )
        self.noise: dict[Site, SiteNoise] = {**self.measured.noise}
        self._pooled = self._pooled_mean()
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
            if place[0] == Kind.GRADIENT and noise.scales.size and own is not None and not is_noise_only(own):
                relative = noise.block_mean * np.exp2(-noise.scales.astype(np.float64))
                total += float(relative.mean()) * noise.elements
                elements += noise.elements
        return total / elements if elements else 0.0

    def expected(self, place: Site, grid: SiteGrid, numel: int) -> float:
        """Return how many of a site's ``numel`` roundings two honest machines are expected to differ in."""
        if is_noise_only(grid) or not numel:
            return 0.0
        if place[0] in ACTIVATIONS:
            return numel * self._shares.get(place, 2.0**-UNMEASURED)
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
        if place[0] == Kind.GRADIENT and numel < FEW_ELEMENTS:
            relative = np.maximum(relative, self._pooled)
        elif numel < FEW_ELEMENTS:
            relative = np.maximum(relative, noise.relative)
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
        quanta, place_of = np.unique(scales + grid.floor, return_inverse=True)
        sums = np.bincount(place_of, weights=moves)
        return {2 * int(quantum): float(mean) for quantum, mean in zip(quanta, sums, strict=True)}

    @property
    def flips_allowed(self) -> float:
        """How many sixteen-bit results that carry the gradient as far as one can may fall otherwise in one step."""
        if not self.policy.autocast:
            return 0.0
        return STEADY_FLIPS if self.steady else FLIPS

    def cluster(self, numel: int) -> int:
        """Return how many of ``numel`` roundings one sixteen-bit result that falls otherwise moves together, at most."""
        if not self.policy.autocast:
            return 1
        largest = CLUSTER if self.steady else max(CLUSTER, numel // LARGEST_CLUSTER)
        return min(largest, max(1, numel))

    def lacks(self, places: Iterable[Site]) -> bool:
        """Whether the noise of one of these has never been measured, so that only the trainer's word says what it is."""
        return any(place not in self.noise for place in places)

    def hears(self, place: Site) -> bool:
        """Whether a gradient is more than noise by the auditor's own measurement."""
        own = self.measured.table.sites.get((Kind(place[0]), place[1]))
        return own is not None and not is_noise_only(own)

    def reach(self, place: Site) -> float:
        """Return how far from a switching point, over the input's rms, noise may turn a decision; a tie is turned by any.

        Under autocast so many lie within reach, and each could be turned at will, that all but ties are counted.
        """
        if self.policy.autocast:
            return 0.0
        noise = self.noise.get(place)
        return math.inf if noise is None else REACH * noise.relative

    def flips(self) -> float:
        """Return how many decisions of a step two honest machines are expected to differ in."""
        return self.measured.flips

    def compare_band(self, place: Site, grid: SiteGrid | None) -> tuple[float, str | None, str]:
        """Return how many times wider a declared band is than the auditor's own, and what is allowed and declared if too wide.

        A band that is narrower moves nothing: machines that cannot follow it find that out, and accuse nobody of it.
        """
        noise = self.noise.get(place)
        finest = SiteGrid(0, self.policy.decision_band[0], 0) if place[0] == Kind.DECISION else None
        own, grid = self.measured.table.sites.get(place, finest), finest if grid is None else grid
        if noise is None or own is None or grid is None:
            return 0.0, None, ""
        allowed = octaves_allowed(noise.elements or 1 << FEW)
        if place[0] == Kind.GRADIENT and self.policy.compute == "float32":
            allowed += KERNEL_OCTAVES
        if is_noise_only(grid):
            return self._compare_silenced(own, noise, allowed)
        if is_noise_only(own):
            return 1.0, None, ""  # declared to be more than noise: where it is not, moves are counted
        finest = max(own.floor, self.policy.gradient_floor)
        if place[0] == Kind.GRADIENT and grid.residue_bits and (grid.floor <= finest or not self.steady):
            # Its band is the policy's, and the size of all that is chosen is held to; of buffers and losses it is not. Where
            # single results are most of the noise, one measurement sees them and the next does not.
            return 2.0 ** (grid.floor - own.floor), None, ""
        apart = grid.band - own.band
        if place[0] == Kind.DECISION and self.policy.autocast:
            # One measurement sees the flip that moves them and the next does not; those beyond the reach of noise are counted.
            return 2.0**apart, None, ""
        if apart <= allowed:
            return 2.0**apart, None, ""
        limit = f"a band of 2**{own.band} of its scale, 2**{allowed} times more at most"
        return 2.0**apart, limit, f"2**{grid.band}"

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
        self, own: SiteGrid, noise: SiteNoise, allowed: int
    ) -> tuple[float, str | None, str]:
        """Compare a gradient that is declared to be nothing but noise; how high its floor is, is checked against its values."""
        # Near the limit one machine may find a band too wide for the policy that fits on the other.
        needed = scale_exponent(noise.relative) + self.policy.safety  # with residues the band says less
        if is_noise_only(own) or noise.rms == 0.0 or needed + allowed >= self.policy.gradient_band[1]:
            return 1.0, None, ""
        limit = f"a gradient of rms {noise.rms:.3g} with noise of {noise.largest:.3g}"
        return math.inf, limit, "nothing but noise, and silenced"

    def excess_floor(self, place: Site, grid: SiteGrid, largest: int | None) -> tuple[str | None, str]:
        """Return the highest floor allowed of a gradient that is noise only, None if it is lower, and the declared one.

        ``largest`` is the scale exponent of the step's largest gradient, with which such floors rise and fall.
        """
        floor, noise = int(grid.scales.max()) + grid.band, self.noise.get(place)
        if noise is None:
            return None, ""
        before, now = largest_scale(self.measured.table), largest
        risen = 0 if before is None or now is None else max(0, now - before)
        spare = (
            octaves_allowed(noise.elements)
            - self.policy.gradient_band[1]
            + (3 if self.policy.autocast else 1)
        )
        mine = self.measured.table.sites.get(
            place
        )  # of a gradient that is zero here it says how loud the others are
        zero = -1000 if mine is None or not is_noise_only(mine) else int(mine.scales.max()) + mine.band
        own = max(scale_exponent(noise.largest) + self.policy.safety, zero) + risen + spare
        return (None, "") if floor <= own else (f"noise of 2**{own} at most", f"noise below 2**{floor}")


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
    return replace(measured, noise={**measured.noise, **kept}, table=table)


def octaves_allowed(elements: int) -> int:
    """Return by how many powers of two a band may differ from the auditor's own at a site of so many elements."""
    return BAND_OCTAVES + -(-max(0, FEW - max(elements, 1).bit_length()) // 2)


@dataclass
class Drift:
    """How far the moves of a gradient's elements went together, and how far each went.

    Whoever steers pushes an element the same way again and again; noise does not know where it went before.

    Attributes:
        together: sum of the moves of all steps, each over its step's gradient, float32[n].
        alone: sum of their squares, float32[n].
    """

    together: Tensor
    alone: Tensor

    @classmethod
    def of(cls, numel: int) -> Drift:
        """Return that of nothing moved yet."""
        return cls(torch.zeros(numel), torch.zeros(numel))

    def add(self, at: Tensor, moves: Tensor) -> None:
        """Count one step's moves of the elements ``at``, each at most once."""
        self.together[at] += moves
        self.alone[at] += moves.square()

    @property
    def share(self) -> float:
        """The squared length of the sum, over what independent moves of either sign reach with a probability of ``TAIL``.

        Each element is a random walk, its squared way is sub-exponential: ``P(s * s > 2 * x * a) <= 2 * exp(-x)``.
        """
        total = float(self.alone.sum(dtype=torch.float64))
        if total == 0.0:
            return 0.0
        bits = -math.log(TAIL)
        spread = (
            2.0 * math.sqrt(2.0 * bits) * float(torch.linalg.vector_norm(self.alone, dtype=torch.float64))
        )
        most = total + spread + 4.0 * bits * float(self.alone.max())
        return float(torch.linalg.vector_norm(self.together, dtype=torch.float64)) ** 2 / most


@dataclass
class StepFreedom:
    """What the log of one step could have chosen, and what it did.

    Attributes:
        sites: by place.
        elements: rounded ones in all.
        energy: sum of squares of the follower's own gradient, before rounding.
        shifted: sum of the squared quanta by which the log moved it, and of what it silenced.
        squared: the former alone, as far as grids are absolute.
        decisions_moved: branches taken from the follower's own.
        decisions_far: of those the ones farther from their switching point than its own noise reaches.
        flips: how many an honest log moves, on average, ties aside.
        bent: relative L2 size of what the decisions moved make of the gradient.
        silenced: elements of gradients declared to be noise only.
        ratio: the widest band beside the auditor's own.
        path: how far the moves carry the weights, in their own unit, at most.
        cluster: how many roundings move together, see ``Yardstick.cluster``.
        quanta: sum of the squared quanta of all elements of gradients on absolute grids.
        carried: how many times ``FLIP`` of the gradient single results may carry it, see ``Yardstick.flips_allowed``.
        moves: of gradients logged by residues how many elements there are, which the log moved, and by how much.
    """

    cluster: int = 1
    quanta: float = 0.0
    carried: float = 0.0
    moves: dict[Site, tuple[int, Tensor, Tensor]] = field(
        default_factory=dict[Site, "tuple[int, Tensor, Tensor]"]
    )
    sites: dict[Site, SiteMoves] = field(default_factory=dict[Site, SiteMoves])
    elements: int = 0
    energy: float = 0.0
    shifted: float = 0.0
    squared: float = 0.0
    decisions_near: int = 0
    decisions_moved: int = 0
    decisions_far: int = 0
    flips: float = 0.0
    bent: float = 0.0
    silenced: int = 0
    ratio: float = 0.0
    path: float = 0.0

    @property
    def moved(self) -> int:
        """Roundings that the log moved."""
        return sum(site.moved for site in self.sites.values())

    @property
    def expected(self) -> float:
        """Roundings that an honest log moves, on average."""
        return sum(site.expected for site in self.sites.values())

    def budget(self, expected: float) -> int:
        """Return how many of so many expected moves are none too many in one step."""
        return most_moves(expected, STEP_SLACK, cluster=self.cluster, tail=self._tail)

    @property
    def decision_budget(self) -> int:
        """Return how many decisions beyond the reach of noise are none too many in one step."""
        return most_moves(self.flips, STEP_SLACK, cluster=min(self.cluster, CLUSTER), tail=self._tail)

    @property
    def square_budget(self) -> float:
        """The most that the squared quanta of an honest log's moves of the gradient add up to in one step.

        Roundings move independently of each other, and those together that one sixteen-bit result carries: a boundary lies
        between two values ``d`` apart with probability ``d / q`` and then moves ``q * q``, so they add up to ``|d| |q|`` at most,
        and to ``|d| |d|`` more where ``d`` is more than one quantum.
        """
        expected = Counter[int]()
        for (kind, _), site in self.sites.items():
            if kind == Kind.GRADIENT and site.near:
                if not math.isfinite(site.square):
                    return math.inf
                expected.update(site.by_square)
        carried = (self.carried * FLIP) ** 2 * self.energy
        together = carried + math.sqrt(carried * self.quanta)
        return together + most_square(expected, STEP_TAIL, slack=STEP_SLACK)

    @property
    def _tail(self) -> float:
        return STEP_TAIL if self.cluster == 1 else TAIL

    @property
    def largest_move(self) -> float:
        """Relative L2 size of what the log did to the gradient, decisions included."""
        return self.bent + (math.sqrt(self.shifted / self.energy) if self.energy > 0.0 else 0.0)

    @property
    def largest_steer(self) -> float:
        """Relative L2 size of the largest steer that stays within the budget; decisions count with what they did."""
        if self.energy <= 0.0:
            return 0.0
        left, squares = self.budget(self.expected), 0.0
        gradients = [site for (kind, _), site in self.sites.items() if kind == Kind.GRADIENT]
        for site in sorted(gradients, key=lambda site: site.square, reverse=True):
            count = min(
                site.near, left, most_moves(site.expected, STEP_SLACK, cluster=site.cluster, tail=self._tail)
            )
            squares += min(site.squares, count * site.square) if count else 0.0
            left -= count
        return self.bent + math.sqrt(min(squares, self.square_budget) / self.energy)


@dataclass
class Freedom:
    """What a dishonest log could still have chosen over the steps repeated, and what this one did.

    Attributes:
        near: elements that the log could have chosen.
        elements: rounded ones in all.
        moved: elements that the log took from the follower's own rounding.
        expected_moves: how many an honest log takes, on average, by the auditor's own measurement.
        decisions_moved: branches that the log took from the follower's own.
        decisions_far, expected_decisions: of those the ones that noise does not reach, and how many it turns on average.
        largest_steer: relative L2 size of the largest steer of one step's gradient that the budget of moves allows.
        largest_move: relative L2 size of the largest such move, decisions included, of one step's gradient.
        fullest_step: the largest share of its budget of size that one step used, squared moves over squared moves allowed.
        silenced_parameters: parameters whose gradient was declared to be noise only, in the step where they are most.
        widest_band_ratio: the widest declared band, beside the auditor's own measurement of the same.
        path: how far all moves together carry the weights, in their own unit, at most.
        distance: how far training carried them.
        cluster: how many roundings move together, in the step where they are most.
        filled: shares of their budgets of size that steps used in which more than ``STEADY_FLIPS`` are allowed, summed.
        filling: how many these steps are.
        drifts: how far moves went together, by gradient that is logged by residues.
    """

    cluster: int = 1
    filled: float = 0.0
    filling: int = 0
    drifts: dict[Site, Drift] = field(default_factory=dict[Site, Drift])
    near: int = 0
    elements: int = 0
    moved: int = 0
    expected_moves: float = 0.0
    decisions_moved: int = 0
    decisions_far: int = 0
    expected_decisions: float = 0.0
    largest_steer: float = 0.0
    largest_move: float = 0.0
    fullest_step: float = 0.0
    silenced_parameters: int = 0
    widest_band_ratio: float = 0.0
    path: float = 0.0
    distance: float = 0.0
    sites: dict[Site, SiteMoves] = field(default_factory=dict[Site, SiteMoves])

    @property
    def fraction(self) -> float:
        """Share of all rounded elements that the log could have chosen."""
        return self.near / self.elements if self.elements else 0.0

    @property
    def move_budget(self) -> int:
        """The most that an honest log moves over these steps."""
        return most_moves(self.expected_moves, cluster=self.cluster)

    @property
    def decision_budget(self) -> int:
        """The most branches beyond the reach of noise that an honest log takes from its follower over these steps."""
        return most_moves(self.expected_decisions, cluster=min(self.cluster, CLUSTER))

    @property
    def path_steer(self) -> float:
        """How far all moves together carry the weights at most, relative to the distance trained."""
        if self.path == 0.0:
            return 0.0
        return self.path / self.distance if self.distance > 0.0 else math.inf

    def fields(self) -> dict[str, float | int | None]:
        """Return the numbers as ``--json`` prints them; null for what has no bound."""
        numbers: dict[str, float | int] = {
            name: getattr(self, name)
            for name in (
                "fraction", "elements", "near", "moved", "expected_moves", "move_budget", "decisions_moved",
                "decisions_far", "expected_decisions", "decision_budget", "largest_move", "largest_steer", "fullest_step",
                "path_steer", "silenced_parameters", "widest_band_ratio",
            )
        }  # fmt: skip
        return {name: value if math.isfinite(value) else None for name, value in numbers.items()}

    def add(self, step: StepFreedom) -> list[tuple[Site | None, Excess]]:
        """Count a step in, and return the budgets that are exceeded with it: of the step, and of all so far.

        The place is None for what all sites do together.
        """
        self.cluster = max(self.cluster, step.cluster)
        self.elements += step.elements
        self.near += sum(site.near for site in step.sites.values())
        self.moved += step.moved
        self.expected_moves += step.expected
        self.decisions_moved += step.decisions_moved
        self.decisions_far += step.decisions_far
        self.expected_decisions += step.flips
        self.largest_steer = max(self.largest_steer, step.largest_steer)
        self.largest_move = max(self.largest_move, step.largest_move)
        self.silenced_parameters = max(self.silenced_parameters, step.silenced)
        self.widest_band_ratio = max(self.widest_band_ratio, step.ratio)
        self.path += step.path
        found: list[tuple[Site | None, Excess]] = []

        def check(place: Site | None, moved: int, budget: int, what: str) -> None:
            if moved > budget:
                found.append((place, Excess(what, f"{budget} at most", f"{moved}")))

        # Where moves come in clusters a step's number says little; what they carry the gradient says it.
        single = step.cluster == 1
        if single:
            check(None, step.moved, step.budget(step.expected), "roundings moved in this step")
        allowed = step.square_budget
        if step.squared > 0.0:
            share = step.squared / allowed if allowed > 0.0 else math.inf
            self.fullest_step = max(self.fullest_step, share)
            self.filled += share if step.carried > STEADY_FLIPS else 0.0
        if step.squared > allowed:
            bound, stated = (math.sqrt(x / step.energy) for x in (allowed, step.squared))
            found.append(
                (None, Excess("move of this step's gradient", f"{bound:.3g} of it at most", f"{stated:.3g}"))
            )
        self.filling += step.carried > STEADY_FLIPS
        most = FILLED + FILLED_A_STEP * self.filling
        if self.filled > most:
            found.append(
                (
                    None,
                    Excess("steps' budgets of size used so far", f"{most:.3g} at most", f"{self.filled:.3g}"),
                )
            )
        for place, (numel, at, moves) in step.moves.items() if step.energy > 0.0 else ():
            drift = self.drifts.setdefault(place, Drift.of(numel))
            drift.add(at, moves / math.sqrt(step.energy))
            if (share := drift.share) > DRIFT:
                what = "squared way that all moves here went together, over that of independent ones"
                found.append((place, Excess(what, f"{DRIFT:.3g} at most", f"{share:.3g}")))
        check(None, step.decisions_far, step.decision_budget, "decisions moved in this step")
        for place, site in step.sites.items():
            total = self.sites.setdefault(place, SiteMoves())
            total.expected += site.expected
            total.moved += site.moved
            total.cluster = max(total.cluster, site.cluster)
            if site.moved:
                if single:
                    check(place, site.moved, step.budget(site.expected), "roundings moved here in this step")
                check(
                    place,
                    total.moved,
                    most_moves(total.expected, cluster=total.cluster),
                    "roundings moved here so far",
                )
        check(None, self.moved, self.move_budget, "roundings moved so far")
        check(None, self.decisions_far, self.decision_budget, "decisions moved so far")
        return found


def longest_square(grid: SiteGrid) -> float:
    """Return the square of the longest move on an absolute grid, infinity for one relative to its values."""
    return quantum_square(grid) * 4.0 ** max(0, grid.residue_bits - 1)


def quantum_square(grid: SiteGrid) -> float:
    """Return the largest squared quantum of an absolute grid; infinity for one relative to its values."""
    if grid.precision or not grid.scales.size:
        return math.inf
    return 4.0 ** float(int(grid.scales.max()) + grid.floor)


def finer_grids(policy: Policy, measured: Calibration) -> dict[tuple[Kind, int], SiteGrid]:
    """Return the gradients' grids that ``gradient_steer`` wants finer: an octave at a time, where one costs the log least.

    What a site lets a log steer in one step is its budget of moves times its squared quantum: small tensors with large
    gradients, and rows of rare tokens, are worth more than all others together.
    """
    if policy.gradient_steer is None:
        return {}
    yardstick = Yardstick(policy, measured)
    gradients = {
        (Kind.GRADIENT, n): noise
        for (kind, n), noise in measured.noise.items()
        if kind == Kind.GRADIENT and noise.rms > 0.0
    }
    energy = sum(noise.elements * noise.rms**2 for noise in gradients.values())
    grids = {place: measured.table.sites[place] for place in gradients}
    grids = {
        place: grid for place, grid in grids.items() if not is_noise_only(grid) and not grid.residue_bits
    }

    def steer(place: tuple[Kind, int], grid: SiteGrid) -> float:
        numel = gradients[place].elements
        moves = most_moves(yardstick.expected(place, grid, numel), STEP_SLACK, tail=STEP_TAIL)
        return min(moves, numel * _near(grid)) * quantum_square(grid) / energy

    def bits(place: tuple[Kind, int], grid: SiteGrid) -> float:
        return gradients[place].elements * entry_bits(_near(grid))

    def gain(place: tuple[Kind, int]) -> float:
        """What an octave buys for each bit that it adds to the log."""
        grid, finer = grids[place], _an_octave_finer(grids[place])
        if finer.floor < grid.band + SPARSEST:
            return 0.0
        return (steers[place] - steer(place, finer)) / (bits(place, finer) - bits(place, grid))

    steers = {place: steer(place, grid) for place, grid in grids.items()}
    gains = {place: gain(place) for place in grids}
    spare = (DEAREST - 1.0) * sum(bits(place, grid) for place, grid in grids.items())
    finer: dict[tuple[Kind, int], SiteGrid] = {}
    while grids and sum(steers.values()) > 2.0**policy.gradient_steer:
        best = max(gains, key=lambda place: gains[place])
        spare -= bits(best, _an_octave_finer(grids[best])) - bits(best, grids[best])
        if gains[best] <= 0.0 or spare < 0.0:
            break
        finer[best] = grids[best] = _an_octave_finer(grids[best])
        steers[best] = steer(best, grids[best])
        gains[best] = gain(best)
    return finer


def _near(grid: SiteGrid) -> float:
    return min(1.0, math.ldexp(1.0, grid.band + 1 - grid.floor))


def _an_octave_finer(grid: SiteGrid) -> SiteGrid:
    return replace(grid, floor=grid.floor - 1)
