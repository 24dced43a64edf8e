"""One gradient's moves: how far a log takes one tensor's gradient from the follower's own, in a step and over a run.

Limits relative to the whole gradient are lent: whoever adds a parameter with a large gradient moves all others the farther
(docs/adr/0026). So each tensor's gradient is held against its own size as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tallystick.numerics.budget import STEP_TAIL, TAIL, most_square

STEP_SLACK = 4.0  # the noise of a single step may be that many times what the last calibration saw on average
RUN_SLACK = 2.0  # that of all steps together
FLIP = 2.0**-8
"""How far one sixteen-bit result that is rounded otherwise carries a gradient that hangs on it, relative (docs/adr/0026)."""
OWN_FLIPS = 2.0
"""How many times as many flips as may carry all of the gradient may carry one tensor's: small ones cancel more."""
OWN_WEIGHED = 2.0**-8  # share of one gradient that its moves may be at least, as the optimizer weighs them
WEIGHED_AT_ONCE = 16.0  # steps' worth of what moves may come to in the optimizer that a run may have at once
WEIGHED_FADE = 2.0**-8
"""How much of what moves come to is forgotten with every step, so that what was left in early ones is not there later."""
WALKERS = 16  # elements that share a gradient's noise, at least
AT_ONCE, A_STEP = 2.0, 2.0**-7
"""How many steps' worth of flips a run may have at one tensor, and how many more for each step."""


@dataclass(frozen=True)
class GradientMoves:
    """One gradient in one step, rounded on an absolute grid: sums of squares over its elements.

    Attributes:
        energy: of the follower's own values, before rounding.
        shifted: of the log's moves; of all values, if it was silenced and the follower hears it.
        quanta: of the quanta.
        unsure: of the noise, see ``Yardstick.unsure``.
        by_square: of the roundings that an honest log is expected to move, how many have each squared quantum, by its exponent
            of two.
        weighed, weighable: what the moves come to in the optimizer, and what they may, see ``noise.weighing``.
    """

    energy: float = 0.0
    shifted: float = 0.0
    quanta: float = 0.0
    unsure: float = 0.0
    by_square: Mapping[int, float] = field(default_factory=dict[int, float])
    weighed: float = 0.0
    weighable: float = 0.0

    @property
    def size(self) -> float:
        """What moves are relative to."""
        return self.energy + self.quanta

    @property
    def expected(self) -> float:
        """What an honest log's squared moves are expected to come to."""
        return sum(count * math.ldexp(1.0, square) for square, count in self.by_square.items())

    def rare(self, flips: float) -> float:
        """Return what so many ``flips`` of sixteen-bit results, and noise as loud as any seen, may move it at most."""
        carried = (OWN_FLIPS * flips * FLIP) ** 2 * self.energy + self.unsure
        return carried_squares(carried, self.quanta)

    def budget(self, flips: float) -> float:
        """Return the most that an honest log's moves add up to in this step."""
        return self.rare(flips) + most_square(self.by_square, STEP_TAIL, slack=STEP_SLACK)


@dataclass
class WeighedMoves:
    """Squares of moves as the optimizer weighs them, over a run; what is long ago fades.

    Attributes:
        moved: of the log's moves.
        allowed: what they may be.
        largest: of the step in which that is most.
    """

    moved: float = 0.0
    allowed: float = 0.0
    largest: float = 0.0

    def add(self, moved: float, allowed: float) -> None:
        """Count one step in."""
        kept = 1.0 - WEIGHED_FADE
        self.moved = kept * self.moved + moved
        self.allowed = kept * self.allowed + allowed
        self.largest = max(kept * self.largest, allowed)

    @property
    def budget(self) -> float:
        """The most that an honest log's moves come to."""
        return self.allowed + WEIGHED_AT_ONCE * self.largest


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
class Walk:
    """How far moves of a gradient went one way, where they come one by one.

    Attributes:
        at, together: the elements moved so far, int64[k] in order, and the sum of each one's moves, float64[k].
        beyond: what the squares of these sums come to beyond the sum of the squares; on average nothing for independent moves.
        largest: the largest square.
        expected: what the squares are expected to come to, of what the auditor measured.
    """

    at: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    together: np.ndarray = field(default_factory=lambda: np.zeros(0))
    beyond: float = 0.0
    largest: float = 0.0
    expected: float = 0.0

    def add(self, at: Tensor, moves: Tensor) -> None:
        """Count one step's moves of the elements ``at``, in order and each at most once."""
        moved, by = at.numpy(), moves.double().numpy()
        known, sums = self.at, self.together
        self.at = np.union1d(known, moved)
        self.together = np.zeros(self.at.size)
        self.together[np.searchsorted(self.at, known)] = sums
        places = np.searchsorted(self.at, moved)
        self.beyond += 2.0 * float(self.together[places] @ by)  # (s + m)^2 - s^2 - m^2
        self.together[places] += by
        self.largest = max(self.largest, float(np.square(by).max(initial=0.0)))

    @property
    def share(self) -> float:
        """``beyond``, over what it reaches with a probability of ``TAIL`` where ``WALKERS`` elements share the noise.

        The sum of so many squared walks is that of squares of normal numbers (Laurent and Massart 2000, lemma 1); and one
        element is moved now and then.
        """
        bits = -math.log(TAIL)
        most = self.expected * 2.0 * (math.sqrt(bits / WALKERS) + bits / WALKERS) + 2.0 * bits * self.largest
        return max(self.beyond, 0.0) / most if most > 0.0 else 0.0


@dataclass
class GradientAccount:
    """One gradient's moves over a run, each step's over its own size: its energy, and its quanta where these are larger.

    Attributes:
        shifted: squared moves.
        allowed: what an honest log's are expected to come to, and flips in every step.
        largest: the largest step's worth of flips.
        weighed: what they come to in the optimizer.
    """

    shifted: float = 0.0
    allowed: float = 0.0
    largest: float = 0.0
    weighed: WeighedMoves = field(default_factory=WeighedMoves)

    def add(self, moves: GradientMoves, flips: float) -> None:
        """Count one step with so many ``flips`` in."""
        self.weighed.add(moves.weighed, moves.weighable)
        size = moves.size
        if size == 0.0:
            return
        rare = moves.rare(flips) / size
        self.shifted += moves.shifted / size
        self.allowed += RUN_SLACK * moves.expected / size + A_STEP * rare
        self.largest = max(self.largest, rare)

    @property
    def budget(self) -> float:
        """The most that an honest log's moves come to."""
        return self.allowed + AT_ONCE * self.largest


def carried_squares(carried: float, quanta: float) -> float:
    """Return the most that squared moves add up to where single results carry the elements ``carried`` far, squared and added up.

    Roundings move independently of each other, and those together that one sixteen-bit result carries: a boundary lies
    between two values ``d`` apart with probability ``d / q`` and then moves ``q * q``, so they add up to ``|d| |q|`` at most,
    and to ``|d| |d|`` more where ``d`` is more than one quantum.
    """
    return carried + math.sqrt(carried * quanta)
