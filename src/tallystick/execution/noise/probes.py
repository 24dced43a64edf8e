"""Rounding contexts that measure noise: one keeps a plain step's decisions, one repeats them and sees how far inputs moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tallystick.errors import Nondeterminism
from tallystick.execution.dispatch.boundaries import MASK
from tallystick.execution.dispatch.decisions import EQUAL
from tallystick.execution.rounding.grids import (
    UNSEEN,
    Site,
    activation_grid,
    nearest_grid,
    sampled,
    sampled_scale,
)
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind, SparseEntries
from tallystick.numerics.nearest import NearestGrid
from tallystick.numerics.nearest_tensors import find_reaches, follow_nearest, record_nearest
from tallystick.numerics.policy import ActivationRule
from tallystick.numerics.rounded_sites import NO_KEY, Key

NOTHING = torch.empty(0, dtype=torch.int64)
SIDES = 2  # bits of a symbol that is one of below, equal, above
PROVISIONAL = -34  # band exponent of activations while their noise is measured


@dataclass
class ProbingContext:
    """Sees one plain step and remembers inputs of decisions, with their branches in a wide band."""

    wide: int = -6  # the branch is fixed for everything within rms * 2**wide of a switching point
    only_near: bool = False  # whether the noise of inputs beside a switching point is measured, not of all

    samples: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])
    sizes: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    rms: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    widest: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    branches: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(
        default_factory=dict[tuple[int, int], tuple[Tensor, Tensor]]
    )
    near: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])
    forms: dict[tuple[int, int], tuple[int, int]] = field(
        default_factory=dict[tuple[int, int], tuple[int, int]]
    )
    exact: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])
    density: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    rule: ActivationRule | None = None
    table: GridTable = field(default_factory=GridTable)
    scales: dict[Site, np.ndarray] = field(default_factory=dict[Site, np.ndarray])
    activations: dict[tuple[int, Kind, int], ProbedActivation] = field(
        default_factory=dict[tuple[int, Kind, int], "ProbedActivation"]
    )
    _micro_batch: int = 0
    _ordinal: int = -1
    _input: Tensor = NOTHING
    _has_sides: bool = False

    def start_micro_batch(self, micro_batch: int) -> None:
        """Number the decisions of the next micro-batch from 0."""
        self._micro_batch = micro_batch
        self._ordinal = -1

    def pending(self, x: Tensor) -> bool:
        """Keep an even sample of the next site's input."""
        self._ordinal += 1
        self._has_sides = False
        place = (self._micro_batch, self._ordinal)
        self.samples[place], self.sizes[place] = sampled(x), x.numel()
        self._input = x
        return True

    def band(self, rms: float, widest: float = math.inf) -> float:
        """Return the wide band."""
        place = (self._micro_batch, self._ordinal)
        self.rms[place], self.widest[place] = rms, widest
        return self._reach(place)

    def _reach(self, place: tuple[int, int]) -> float:
        return min(math.ldexp(self.rms[place], self.wide), self.widest[place])

    def verify_apart(self, ordinal: int, relative: float, safety: float) -> None:
        """Return if the noise of a decision's input is small beside the distance between its switching points.

        Raises:
            Nondeterminism: ``safety`` times ``relative``, over the input's rms, is more than a quarter of that distance.
        """
        for (_, number), widest in self.widest.items():
            rms = self.rms[(_, number)]
            if number == ordinal and safety * relative * rms > widest:
                raise Nondeterminism(
                    f"decision {ordinal}: its input of rms {rms:.3g} moves by {relative * rms:.2g} under last-bit noise; "
                    f"{safety:g} times that must be a quarter of the distance between its switching points at most, "
                    f"{widest:.2g}: scale it down before it is rounded to whole numbers, or use a more precise policy"
                )

    def omits_exact(self) -> bool:
        """Take note that this decision is between the sides of a switching point; all of them are remembered."""
        self._has_sides = True
        return False

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> None:  # fmt: skip
        """Remember the branches, the site's elements and symbol bits, and the inputs beside a switching point of their own."""
        place = (self._micro_batch, self._ordinal)
        self.forms[place] = (numel, width)
        own = symbols(near)
        self.branches[place] = (near, own)
        if self._has_sides and (self.rms[place] == 0.0 or bool((own == EQUAL).any())):
            self.exact[place] = near[
                own == EQUAL
            ]  # none is near where all are zeros, which is exact all the same
        # What lies exactly on a point does so for what it is; of the others those may cross that lie nearer than they move.
        beside = int((own != EQUAL).sum()) if width == SIDES else near.numel()
        reach = self._reach(place)
        self.density[place] = beside / reach if reach > 0.0 else 0.0
        if self.only_near and width == SIDES and numel == self._input.numel():
            self.near[place] = self._input[near].detach().to(torch.float64)
        self._input = NOTHING

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        """Leave the site as it is."""
        if out is not x:
            out.copy_(x)

    def activation(self, kind: Kind, ordinal: int, x: Tensor, *, name: str) -> Tensor:
        """Round on a provisional grid, and remember a sample and the ambiguous elements with where they lay."""
        assert self.rule is not None
        place = (kind, ordinal)
        if place not in self.scales:
            scales = sampled_scale(self.table.sites.get(place), x)
            self.scales[place] = np.full(1, UNSEEN) if scales is None else scales
        grid = nearest_grid(self.rule, activation_grid(self.rule, PROVISIONAL, self.scales[place]))
        grid = NearestGrid(grid.bits, grid.floor, grid.band)
        out = torch.empty_like(x)
        entries = record_nearest(x, grid, out=out, name=name)
        flat = x.reshape(-1)
        at = torch.from_numpy(entries.indexes).to(x.device)
        self.activations[(self._micro_batch, kind, ordinal)] = ProbedActivation(
            grid, sampled(flat), entries, flat[at]
        )
        return out


@dataclass(frozen=True)
class ProbedActivation:
    """One activation site as the probe saw it: grid, an even sample, the logged elements and their values."""

    grid: NearestGrid
    sample: Tensor
    entries: SparseEntries
    values: Tensor


@dataclass
class ActivationNoise:
    """What the repetitions showed at one activation site.

    Attributes:
        relative: largest ``|x - y|`` of the sample over the scale.
        quanta: the same in quanta of the element's own exponent.
        total: sum of the sample's divergences in quanta, ``seen`` of them.
        straddles: the larger distances to the rounded value, in quanta, of elements that went to two sides.
        reach: largest distance of a straddling value to its boundary, over the scale.
    """

    relative: float = 0.0
    quanta: float = 0.0
    total: float = 0.0
    seen: int = 0
    straddles: list[float] = field(default_factory=list[float])
    reach: float = 0.0


@dataclass
class EchoingContext:
    """Repeats the branches of a ``ProbingContext`` and measures how far the inputs of decisions moved.

    ``samples``, if given, receives an even sample of each input. ``noise`` is the largest deviation of an input over its
    rms, by ordinal. ``flips`` is how many elements of all decisions are expected to change sides by such deviations,
    ``crossed`` how many did: more where values lie exactly on a point, or two candidates are equal. ``left`` are the
    decisions where something lay exactly on a switching point and moved.
    """

    probe: ProbingContext
    noise: dict[int, float] = field(default_factory=dict[int, float])
    flips: float = 0.0
    crossed: int = 0
    left: set[int] = field(default_factory=set[int])
    activations: dict[Site, ActivationNoise] = field(default_factory=dict[Site, ActivationNoise])
    samples: dict[tuple[int, int], Tensor] | None = None
    _micro_batch: int = 0
    _ordinal: int = -1

    def start_micro_batch(self, micro_batch: int) -> None:
        """Number the decisions of the next micro-batch from 0."""
        self._micro_batch = micro_batch
        self._ordinal = -1

    def pending(self, x: Tensor) -> bool:
        """Compare the next site's input with the probe's.

        Raises:
            Nondeterminism: it has another number of elements.
        """
        self._ordinal += 1
        place = (self._micro_batch, self._ordinal)
        if self.probe.sizes.get(place):  # of what is empty there is nothing to compare
            self._verify_same(place, "elements of its input", x.numel(), self.probe.sizes[place])
        before = self.probe.samples.get(place)
        rms = self.probe.rms.get(place, 0.0)
        now = sampled(x)
        if self.samples is not None:
            self.samples[place] = now
        if place in self.probe.near and x.numel():
            before = self.probe.near[place]
            now = x[self.probe.branches[place][0]].detach().to(torch.float64)
        if before is not None and before.numel():
            moved = _moved(before, now)
            if (largest := float(moved.max())) > 0.0:  # of an input that is all zeros it is no share
                noise = largest / rms if rms > 0.0 else math.inf
                self.noise[self._ordinal] = max(self.noise.get(self._ordinal, 0.0), noise)
                self.flips += self.probe.density.get(place, 0.0) * float(moved.mean())
            elif rms > 0.0:
                self.noise.setdefault(self._ordinal, 0.0)
        return place in self.probe.branches

    def band(self, rms: float, widest: float = math.inf) -> float:
        """Nothing is searched for."""
        return 0.0

    def omits_exact(self) -> bool:
        """Nothing is searched for."""
        return False

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the probe's branches, having counted those that are not its own, and seen which left a switching point.

        Raises:
            Nondeterminism: the site has another form.
        """
        place = (self._micro_batch, self._ordinal)
        form = numel, width
        self._verify_same(place, "elements and bits of a symbol", form, self.probe.forms.get(place, form))
        at, taken = self.probe.branches[place]
        own = symbols(at)
        self.crossed += int((own != taken).sum())
        if place in self.probe.exact and bool((own[taken == EQUAL] != EQUAL).any()):
            self.left.add(self._ordinal)
        return at, taken

    def _verify_same(self, place: tuple[int, int], what: str, now: object, before: object) -> None:
        """Return if a site is as the probe saw it: else a branch was taken that is no decision, and positions mean nothing."""
        if now != before:
            raise Nondeterminism(
                f"decision {place[1]} of micro-batch {place[0]}: {what} must be as many whenever the step is repeated, and are "
                f"{before}, and {now} under noise; do shapes or branches hang on a number that is read out of a tensor?"
            )

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        """Leave the site as it is."""
        if out is not x:
            out.copy_(x)

    def activation(self, kind: Kind, ordinal: int, x: Tensor, *, name: str) -> Tensor:
        """Follow the probe's rounding, so that one site's noise is measured and not that of all before it."""
        probe = self.probe.activations.get((self._micro_batch, kind, ordinal))
        if probe is None or probe.entries.n != x.numel():
            raise Nondeterminism(
                f"{name}: is there in one repetition of the step and not, or of another size, in the next"
            )
        noise = self.activations.setdefault((kind, ordinal), ActivationNoise())
        flat, scale = x.reshape(-1), math.ldexp(1.0, -int(self.probe.scales[(kind, ordinal)][0]))
        moved = (sampled(flat) - probe.sample).abs()
        if moved.numel():
            reaches = find_reaches(probe.sample, probe.grid)
            quanta = moved * torch.exp2(-reaches.quantum.double())
            noise.relative = max(noise.relative, float(moved.max()) * scale)
            noise.quanta = max(noise.quanta, float(quanta.max()))
            noise.total += float(quanta.clamp(max=1.0).sum())
            noise.seen += moved.numel()
        self._note_straddles(noise, probe, flat, scale)
        out = torch.empty_like(x)
        follow_nearest(x, probe.grid, probe.entries, out=out, name=name)
        return out

    def _note_straddles(
        self, noise: ActivationNoise, probe: ProbedActivation, flat: Tensor, scale: float
    ) -> None:
        at = torch.from_numpy(probe.entries.indexes).to(flat.device)
        if not at.numel():
            return
        before, now = find_reaches(probe.values, probe.grid), find_reaches(flat[at], probe.grid)
        apart = (before.side != now.side) & (before.quantum == now.quantum)
        if not bool(apart.any()):
            return
        distance = torch.maximum(before.distance, now.distance)[apart]
        noise.straddles += (0.5 - distance).tolist()
        reach = distance * torch.exp2(before.quantum[apart].double())
        noise.reach = max(noise.reach, float(reach.max()) * scale)


def _moved(before: Tensor, now: Tensor) -> Tensor:
    """Return how far each element moved; what is masked did not."""
    moved = (now - before).abs().nan_to_num_(0.0)
    return moved.masked_fill_((before.abs() >= MASK) & (now.abs() >= MASK), 0.0)


def still_sites(probe: ProbingContext, left: Collection[int]) -> frozenset[int]:
    """Return the decisions, by ordinal, where elements lay exactly on a switching point and none of them ``left`` it.

    Zeros of a ReLU, padding and codes are such: what they are does not hang on the last bit of anything.
    """
    return frozenset(ordinal for _, ordinal in probe.exact) - frozenset(left)
