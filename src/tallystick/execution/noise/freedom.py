"""Residual freedom: what a log may still choose, and what one did (docs/adr/0026).

The auditor measures the noise from the same committed state on its own hardware (``noise.yardstick``). From that follows
how many roundings and decisions an honest log takes from the follower's own, and so how far a dishonest one could steer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tallystick.execution.noise.buffers import BufferStep, LedBuffer
from tallystick.execution.noise.gradients import (
    FLIP,
    STEP_SLACK,
    Drift,
    GradientAccount,
    GradientMoves,
    Walk,
    WeighedMoves,
    carried_squares,
)
from tallystick.execution.rounding.grids import (
    Site,
)
from tallystick.numerics.budget import STEP_TAIL, TAIL, most_moves, most_square
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.log import Kind

FLIPS, STEADY_FLIPS = 12.0, 2.0  # of those in one step, and where no single one is most of the noise
DRIFT = 3.0
"""How many times as far as independent moves ever go, squared, those of a gradient may have gone (docs/adr/0031)."""
WALK = 0.25
"""The share of what the auditor's own noise reaches that moves which come one by one may have gone together (docs/adr/0026)."""
WENT_TOGETHER = "squared way that all moves here went together, over that of independent ones"
WEIGHED, MOST_WEIGHED = 2.0**-10, 2.0**-5
"""Shares of the gradient that moves may be at least and at most, both squared and as the optimizer weighs them."""
FILLED, FILLED_A_STEP = 4.0, 2.0**-3
"""How many budgets of size steps with so many flips may use together, and how many more for each such step: flips that carry
all of a gradient are rare (docs/adr/0031)."""
WEIGHED_OF_LATE = "squared moves of late, as the optimizer weighs them"
CLUSTER, LARGEST_CLUSTER = (
    64,
    16,
)  # roundings that one moves: so many, or where it may be most of the noise 1 in so many


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


@dataclass
class StepFreedom:
    """What the log of one step could have chosen, and what it did.

    Attributes:
        sites: by place.
        elements: rounded ones in all.
        energy: sum of squares of the follower's own gradient, before rounding.
        shifted: sum of the squared quanta by which the log moved it, and of what it silenced.
        squared: of both, what is of grids that are absolute.
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
        gradients: moves of each, on absolute grids.
        moves: of gradients how many elements there are, which the log moved, and by how much.
        buffers: of few elements whose bands are wider than the auditor's own by two octaves or more.
        weighed, trained: squares of moves, and of the gradient, as the optimizer weighs them, see ``noise.weighing``.
        weighable: how much the former may be of the latter, see ``Yardstick.weighable``.
        turned: decisions moved of which no measurement has said yet how far noise reaches: the site's ordinal, its input's rms,
            and how far from their switching points they lie.
    """

    turned: list[tuple[int, float, Tensor]] = field(default_factory=list[tuple[int, float, Tensor]])
    cluster: int = 1
    weighed: float = 0.0
    trained: float = 0.0
    weighable: float = WEIGHED
    quanta: float = 0.0
    carried: float = 0.0
    gradients: dict[Site, GradientMoves] = field(default_factory=dict[Site, GradientMoves])
    moves: dict[Site, tuple[int, Tensor, Tensor]] = field(
        default_factory=dict[Site, "tuple[int, Tensor, Tensor]"]
    )
    buffers: dict[Site, BufferStep] = field(default_factory=dict[Site, BufferStep])
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

    def count_far(self, reach: Callable[[Site], float]) -> None:
        """Count of the ``turned`` decisions those that lie farther than noise reaches: ``reach`` of a site, over its rms."""
        for ordinal, rms, away in self.turned:
            self.decisions_far += int((away > reach((Kind.DECISION, ordinal)) * rms).sum())
        self.turned.clear()

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
        """The most that the squared quanta of an honest log's moves of the gradient add up to in one step."""
        expected = Counter[int]()
        for (kind, _), site in self.sites.items():
            if kind == Kind.GRADIENT and site.near:
                if not math.isfinite(site.square):
                    return math.inf
                expected.update(site.by_square)
        rare = carried_squares((self.carried * FLIP) ** 2 * self.energy, self.quanta)
        return rare + most_square(expected, STEP_TAIL, slack=STEP_SLACK)

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
        choices: how many times the log chose whether a gradient is nothing but noise, or its trainer when to measure: what was
            done more often.
        path: how far all moves together carry the weights, in their own unit, at most; under ``bf16``.
        distance: how far training carried them.
        led: how far the log's choices led one tensor at most, see ``noise.own_path``; under the other policies.
        cluster: how many roundings move together, in the step where they are most.
        filled: shares of their budgets of size that steps used in which more than ``STEADY_FLIPS`` are allowed, summed.
        filling: how many these steps are.
        accounts: moves of each gradient on absolute grids.
        drifts, walks: how far moves went together, by gradient: of one that single results may carry, and of any other.
        weighed: squares of moves, as the optimizer weighs them, see ``noise.weighing``.
        buffers: where rounding led those whose bands are wider than the auditor's own.
        fullest_gradient: the largest share of any limit on one gradient that the log used.
        weighed_share: the largest share of its budget that the log used at any time.
    """

    cluster: int = 1
    weighed: WeighedMoves = field(default_factory=WeighedMoves)
    fullest_gradient: float = 0.0
    weighed_share: float = 0.0
    filled: float = 0.0
    filling: int = 0
    accounts: dict[Site, GradientAccount] = field(default_factory=dict[Site, GradientAccount])
    drifts: dict[Site, Drift] = field(default_factory=dict[Site, Drift])
    walks: dict[Site, Walk] = field(default_factory=dict[Site, Walk])
    buffers: dict[Site, LedBuffer] = field(default_factory=dict[Site, LedBuffer])
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
    choices: int = 0
    path: float = 0.0
    distance: float = 0.0
    led: float = 0.0
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
        """How far the log's choices led the weights, relative to the distance trained; under ``bf16`` at most."""
        if self.path == 0.0:
            return self.led
        return self.path / self.distance if self.distance > 0.0 else math.inf

    def fields(self) -> dict[str, float | int | None]:
        """Return the numbers as ``--json`` prints them; null for what has no bound."""
        numbers: dict[str, float | int] = {
            name: getattr(self, name)
            for name in (
                "fraction", "elements", "near", "moved", "expected_moves", "move_budget", "decisions_moved",
                "decisions_far", "expected_decisions", "decision_budget", "largest_move", "largest_steer", "fullest_step",
                "fullest_gradient", "path_steer", "silenced_parameters", "weighed_share", "widest_band_ratio", "choices",
            )
        }  # fmt: skip
        return {name: value if math.isfinite(value) else None for name, value in numbers.items()}

    def add(self, step: StepFreedom) -> list[tuple[Site | None, Excess]]:
        """Count a step in, and return the budgets that are exceeded with it: of the step, and of all so far.

        The place is None for what all sites do together.
        """
        self._count(step)
        return [
            *_excess_in_number(None, step.moved, _step_budget(step), "roundings moved in this step"),
            *self._add_sizes(step),
            *self._add_gradients(step),
            *self._add_drifts(step),
            *self._add_walks(step),
            *self._add_weights(step),
            *self._add_buffers(step),
            *_excess_in_number(
                None, step.decisions_far, step.decision_budget, "decisions moved in this step"
            ),
            *self._add_sites(step),
            *_excess_in_number(None, self.moved, self.move_budget, "roundings moved so far"),
            *_excess_in_number(None, self.decisions_far, self.decision_budget, "decisions moved so far"),
        ]

    def leave_out_steps(self) -> None:
        """Forget where buffers were: the next step does not follow the one that was added last."""
        for led in self.buffers.values():
            led.last = None

    def _count(self, step: StepFreedom) -> None:
        """Add up what is a plain sum or maximum."""
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

    def _add_sizes(self, step: StepFreedom) -> Iterator[tuple[Site | None, Excess]]:
        """Count how far the log moved the gradient."""
        allowed = step.square_budget
        if step.squared > 0.0:
            share = step.squared / allowed if allowed > 0.0 else math.inf
            self.fullest_step = max(self.fullest_step, share)
            self.filled += share if step.carried > STEADY_FLIPS else 0.0
        if step.squared > allowed:
            energy = step.energy  # of a step whose gradient is zero nothing is a share
            bound, stated = (
                math.sqrt(x / energy) if energy > 0.0 else math.inf for x in (allowed, step.squared)
            )
            yield None, Excess("move of this step's gradient", f"{bound:.3g} of it at most", f"{stated:.3g}")
        self.filling += step.carried > STEADY_FLIPS
        most = FILLED + FILLED_A_STEP * self.filling
        if self.filled > most:
            yield (
                None,
                Excess("steps' budgets of size used so far", f"{most:.3g} at most", f"{self.filled:.3g}"),
            )

    def _add_gradients(self, step: StepFreedom) -> Iterator[tuple[Site | None, Excess]]:
        """Count how far the log moved each gradient, where single results may carry it."""
        for place, moves in step.gradients.items() if step.carried > 0.0 else ():
            account = self.accounts.setdefault(place, GradientAccount())
            account.add(moves, step.carried)
            allowed, weighed = moves.budget(step.carried), account.weighed
            self.fullest_gradient = max(
                self.fullest_gradient,
                _share(moves.shifted, allowed),
                _share(account.shifted, account.budget),
                _share(weighed.moved, weighed.budget),
            )
            if moves.shifted > allowed:
                most, stated = (math.sqrt(x / (moves.energy or math.inf)) for x in (allowed, moves.shifted))
                yield place, Excess("move of this gradient", f"{most:.3g} of it at most", f"{stated:.3g}")
            if account.shifted > account.budget:
                what = "squared moves of this gradient so far, over its squares"
                yield place, Excess(what, f"{account.budget:.3g} at most", f"{account.shifted:.3g}")
            if weighed.moved > weighed.budget:
                yield place, Excess(WEIGHED_OF_LATE, f"{weighed.budget:.3g} at most", f"{weighed.moved:.3g}")

    def _add_drifts(self, step: StepFreedom) -> Iterator[tuple[Site | None, Excess]]:
        """Count where moves went, where single results may carry many: against how many there were."""
        for place, (numel, at, moves) in step.moves.items() if step.carried > 0.0 else ():
            drift = self.drifts.setdefault(place, Drift.of(numel))
            drift.add(at, moves / math.sqrt(step.gradients[place].size))
            if not (share := drift.share) <= DRIFT:
                yield place, Excess(WENT_TOGETHER, f"{DRIFT:.3g} at most", f"{share:.3g}")

    def _add_walks(self, step: StepFreedom) -> Iterator[tuple[Site | None, Excess]]:
        """Count where moves went that come one by one: against how many the auditor's own noise makes."""
        for place, gradient in step.gradients.items() if step.carried == 0.0 else ():
            if gradient.size > 0.0:
                self.walks.setdefault(place, Walk()).expected += gradient.expected / gradient.size
        for place, (_, at, moves) in step.moves.items() if step.carried == 0.0 else ():
            walk = self.walks.setdefault(place, Walk())
            walk.add(at, moves / math.sqrt(step.gradients[place].size))
            share = walk.share
            self.fullest_gradient = max(self.fullest_gradient, share / WALK)
            if not share <= WALK:
                yield place, Excess(WENT_TOGETHER, f"{WALK:.3g} at most", f"{share:.3g}")

    def _add_weights(self, step: StepFreedom) -> Iterator[tuple[Site | None, Excess]]:
        """Count what moves come to in the optimizer."""
        self.weighed.add(step.weighed, step.weighable * step.trained)
        budget = self.weighed.budget
        self.weighed_share = max(self.weighed_share, _share(self.weighed.moved, budget))
        if self.weighed.moved > budget:
            yield None, Excess(WEIGHED_OF_LATE, f"{budget:.3g} at most", f"{self.weighed.moved:.3g}")

    def _add_buffers(self, step: StepFreedom) -> Iterator[tuple[Site | None, Excess]]:
        """Count where rounding on bands wider than the auditor's own led buffers."""
        for place in self.buffers.keys() - step.buffers.keys():
            self.buffers[place].last = None
        for place, found in step.buffers.items():
            led = self.buffers.setdefault(place, LedBuffer.of(found))
            led.add(found)
            if (share := led.share) > 1.0:
                what = "way that rounding on a wide band led this buffer, over what may come of it"
                yield place, Excess(what, "1 at most", f"{share:.3g}")

    def _add_sites(self, step: StepFreedom) -> Iterator[tuple[Site | None, Excess]]:
        """Count the moves of each site."""
        for place, site in step.sites.items():
            total = self.sites.setdefault(place, SiteMoves())
            total.expected += site.expected
            total.moved += site.moved
            total.cluster = max(total.cluster, site.cluster)
            if site.moved:
                most = math.inf if step.cluster > 1 else step.budget(site.expected)
                yield from _excess_in_number(place, site.moved, most, "roundings moved here in this step")
                most = most_moves(total.expected, cluster=total.cluster)
                yield from _excess_in_number(place, total.moved, most, "roundings moved here so far")


def _share(used: float, budget: float) -> float:
    return 0.0 if used == 0.0 else used / budget if budget > 0.0 else math.inf


def _step_budget(step: StepFreedom) -> float:
    """Return how many moves of one step are none too many; where they come in clusters their number says little."""
    return math.inf if step.cluster > 1 else step.budget(step.expected)


def _excess_in_number(
    place: Site | None, moved: int, budget: float, what: str
) -> Iterator[tuple[Site | None, Excess]]:
    if moved > budget:
        yield place, Excess(what, f"{budget} at most", f"{moved}")


def longest_square(grid: SiteGrid) -> float:
    """Return the square of the longest move on an absolute grid, infinity for one relative to its values."""
    return quantum_square(grid) * 4.0 ** max(0, grid.residue_bits - 1)


LARGEST_SQUARED = 480
"""An exponent of what has a square in float64, and of many of them a sum; a hostile header's may be larger."""


def quantum_square(grid: SiteGrid) -> float:
    """Return the largest squared quantum of an absolute grid; infinity for one relative to its values."""
    if grid.precision or not grid.scales.size:
        return math.inf
    exponent = int(grid.scales.max()) + grid.floor
    return math.ldexp(1.0, 2 * exponent) if exponent <= LARGEST_SQUARED else math.inf


def largest_squares(grid: SiteGrid, numel: int, count: int) -> float:
    """Return the sum of the ``count`` largest squared quanta of a site."""
    exponents = np.minimum(grid.scales.astype(np.float64) + grid.floor, LARGEST_SQUARED)
    squares = np.sort(np.exp2(2.0 * exponents))[::-1]
    each = numel // squares.size
    whole = min(count // each, squares.size)
    rest = squares[whole] * (count - whole * each) if whole < squares.size else 0.0
    return float(squares[:whole].sum() * each + rest)
