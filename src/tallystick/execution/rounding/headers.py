"""Headers of a followed log: scales that the follower's own values, and its own measurement of the noise, do not bear out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tallystick.execution.noise.buffers import limits_of_noise, widest_of_zeros
from tallystick.execution.noise.freedom import Excess
from tallystick.execution.noise.yardstick import BAND_OCTAVES, MOSTLY_NOISE, UNSURE, Yardstick
from tallystick.execution.rounding.breaches import Violation
from tallystick.execution.rounding.grids import (
    ACTIVATIONS,
    CLEAR,
    DOUBT,
    NOISE_BAND,
    ROW_DIP,
    ROW_SPREAD,
    UNKNOWN_NOISE,
    UNSEEN,
    Site,
    activation_grid,
    activation_rule,
    blocks_for,
    expected_form,
    floor_exponent,
    has_dips,
    held_grid,
    is_new,
    is_noise_only,
    keeps_hearing,
    kept_scales,
    loudest_band,
    lowest_floor,
    lowest_scale,
    may_be_lifted,
    rise_since,
    row_scales_of,
    sampled_scale,
    scale_exponent,
    scale_exponents,
    scale_limits,
    settled_scales,
    site_grid,
    still_heard,
    unseen_grid,
    whole_scale,
)
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import (
    Kind,
)
from tallystick.numerics.policy import SMALL_SITE, Policy, hearing_safety
from tallystick.numerics.tensor_measures import block_rms

MAY_BE_ZERO = frozenset({Kind.GRADIENT, Kind.BUFFER, Kind.LOSS})  # here, and noise elsewhere
NOISE_DOUBT = 4.0  # times: by how much what a gradient's noise is over its size differs between machines
SPREAD_DOUBT = 2.0**-14  # by how much rows may be more uneven for the follower, besides noise; no autocast
SCALE_SLACK = 3  # a header's scale may exceed what the auditor measures by this many powers of two
NOISE_GROWS = 5  # octaves that a gradient of nothing but noise may be larger here, or smaller, than where it was recorded
EXACT_SCALE_SLACK = (
    1  # the same where every row has a scale, but in a calibrated step: those are kept without slack
)


@dataclass
class HeaderChecks:
    """Checks the headers of one step's sites.

    Attributes:
        policy: what it allows.
        base: the grids of the last calibration; empty in a step that was calibrated.
        before: the grids after the step before.
        violations, excesses: what was found, the context's own.
        is_first: whether no step lies before this one: grids of a first state are the trainer's word.
        chooses: whether grids may be chosen anew where the noise was measured.
        yardstick: the follower's measurement, if it has one.
        energy: the sum of the squared values of the site checked last.
        is_kept: whether its scale is too wide for its values, as one of zeros may be.
        is_overdue: whether the trainer measured the noise longer ago than its policy does, and the follower now.
        outgrown: parameters whose gradients have outgrown what they were in this step; where grids are not chosen, these alone
            may become noise, or be heard.
        heard: the gradients checked so far that are declared to be more than noise: their largest scale, and their elements.
    """

    policy: Policy
    base: GridTable
    before: GridTable
    violations: list[Violation]
    excesses: list[tuple[Site | None, Excess]]
    is_first: bool = False
    chooses: bool = True
    yardstick: Yardstick | None = None
    energy: float = 0.0
    is_kept: bool = False
    is_overdue: bool = False
    outgrown: frozenset[int] = frozenset()
    heard: dict[Site, tuple[int, int]] = field(default_factory=dict[Site, tuple[int, int]])

    @property
    def is_calibrated(self) -> bool:
        """Whether the trainer measured the noise before this step."""
        return not self.base.sites

    def _grid_before(self, place: Site) -> SiteGrid | None:
        return None if self.is_first else self.before.sites.get(place)

    def was_noise(self, place: Site) -> bool:
        """Whether a site was declared to be nothing but noise in the step before."""
        before = self._grid_before(place)
        return before is not None and is_noise_only(before)

    def check_forms(self, table: GridTable, name: Callable[[Site], str]) -> None:
        """Note grids that changed, between two measurements of the noise, in more than scales and the bits of residues.

        An honest trainer has no reason to, but where a gradient that was noise only is heard; and whoever may takes, of several
        grids, the one that rounds as it likes.
        """
        for place, grid in () if self.is_first else table.sites.items():
            before = self.before.sites.get(place, self._grid_of_unknown(place, grid))
            if before is grid or _form(grid) == _form(before):
                continue
            # What is heard between two measurements ``check_heard`` looks at.
            is_free = self.chooses if self.is_calibrated else is_noise_only(before)
            if grid.scales.size == before.scales.size and is_free:
                continue
            if self.is_calibrated and self._is_held(Kind(place[0]), before, grid):
                continue
            own = "{} bits, band 2**{}, floor 2**{}, dither {}, {} scales".format(*_form(before))
            stated = "{} bits, band 2**{}, floor 2**{}, dither {}, {} scales".format(*_form(grid))
            self.excesses.append(
                (place, Excess(name(place), f"the grid of the last calibration ({own})", stated))
            )

    def _is_chosen(self, place: Site) -> bool:
        """Whether a site's grid may be chosen anew: also where the noise of one is measured that was noise only."""
        before = self._grid_before(place)
        return self.is_calibrated and (self.chooses or before is None or is_noise_only(before))

    def _is_held(self, kind: Kind, before: SiteGrid, grid: SiteGrid) -> bool:
        """Whether a grid is one that follows from the one before it where the noise is measured and grids are not chosen."""
        if grid.scales.size != before.scales.size:
            return False
        own = held_grid(self.policy, kind, before, grid, has_outgrown=True)  # see ``check_heard``
        return own.floor == grid.floor if kind == Kind.GRADIENT else own.band == grid.band

    def _grid_of_unknown(self, place: Site, grid: SiteGrid) -> SiteGrid:
        """Return the grid that an activation site gets when it is met before its noise was measured; else its own."""
        is_measured = self.is_calibrated and self.yardstick is not None and place in self.yardstick.noise
        if place[0] not in ACTIVATIONS or self.policy.activation is None or is_measured:
            return grid
        rule = activation_rule(self.policy)
        return activation_grid(rule, rule.band[0] + UNKNOWN_NOISE, grid.scales)

    def check_unmeasured(self, table: GridTable, name: Callable[[Site], str]) -> None:
        """Note another grid, where noise is measured, than a gradient gets that has no value but zero then, or is left out.

        What never had another value than zero may be called noise; what is left out stays what it was, at first of one scale.
        So does a buffer that does not move: its noise is nobody's to know then.
        """
        assert self.yardstick is not None
        for place, grid in table.sites.items() if self.is_calibrated else ():
            is_fresh, before = place in self.yardstick.fresh, self._grid_before(place)
            is_left_out = not is_fresh and place not in self.yardstick.zeros
            may_fall = before is not None and is_noise_only(before) if is_left_out else is_new(before)
            is_silent = is_noise_only(grid) and may_fall
            is_seen = is_fresh and not self.yardstick.is_unmeasured(place)
            noise = self.yardstick.noise.get(place)
            is_still = place[0] == Kind.BUFFER and self.yardstick.is_trainers and noise is None
            if not is_still and (place[0] != Kind.GRADIENT or is_silent or is_seen):
                continue
            unseen = np.full(1 if noise is None else noise.scales.size, UNSEEN)
            own = unseen_grid(self.policy, Kind(place[0]), unseen) if before is None else before
            if _form(own) != _form(grid):
                texts = (
                    f"band 2**{each.band}, floor 2**{each.floor}, {each.scales.size} scales"
                    for each in (own, grid)
                )
                self.excesses.append((place, Excess(f"{name(place)}, of no values", *texts)))

    def check_heard(self, place: Site, grid: SiteGrid, largest: int | None, name: str, *, seen: bool) -> None:
        """Note a grid of a gradient that was noise only which its noise does not ask for; ``seen`` if the step has it."""
        if self._stays(place, grid):
            words = "more than noise", "nothing but noise"
            own, stated = words if is_noise_only(grid) else words[::-1]
            self.excesses.append((place, Excess(name, f"{own}, as before", stated)))
        if not self.was_noise(place) or is_noise_only(grid):
            return
        if self.is_calibrated:
            if self.yardstick is not None and not self.policy.autocast:
                self._note(Kind(place[0]), place[1], name, *self.yardstick.excess_return(place, grid))
            return
        highest = None if self.yardstick is None else self.yardstick.highest_floor(place, largest)
        if highest is None:
            return
        lowest = self.policy.gradient_band[0]
        widest = min(loudest_band(self.policy, was_noise=True), max(lowest, highest - int(grid.scales.max())))
        forms = [
            _form(site_grid(self.policy, Kind.GRADIENT, band, grid.scales))
            for band in range(lowest, widest + 1)
            if band != NOISE_BAND
        ]
        if not seen or _form(grid) not in forms:
            stated = f"band 2**{grid.band}, floor 2**{grid.floor}"
            own = f"a band of 2**{widest} at most" if seen else "noise only, of no values"
            self.excesses.append((place, Excess(name, own, stated)))

    def _stays(self, place: Site, grid: SiteGrid) -> bool:
        """Whether the log changes what is noise where no grids are chosen, of a gradient that has not outgrown what it was.

        One that was heard may become noise, too, if that is too loud for its scale, for the follower within an octave.
        """
        before = self._grid_before(place)
        if self.chooses or not self.is_calibrated or place[1] in self.outgrown or before is None:
            return False
        noise = None if self.yardstick is None else self.yardstick.noise.get(place)
        if noise is not None and is_noise_only(before) and not is_noise_only(grid) and grid.band <= CLEAR:
            return scale_exponent(noise.relative) + hearing_safety(self.policy) > CLEAR + BAND_OCTAVES
        loudest = 0.0 if noise is None or is_noise_only(before) else noise.largest
        if loudest > 0.0 and still_heard(self.policy, before, loudest, DOUBT) is None:
            return False
        return keeps_hearing(self.policy, before, grid)

    def _base_of(self, place: Site) -> SiteGrid | None:
        """Return the grid below whose scales a site's do not fall: of a gradient until grids are chosen again."""
        if not self.is_calibrated or self.chooses or place[0] != Kind.GRADIENT or self.policy.residue_bits:
            return self.base.sites.get(place)
        return self._grid_before(place)

    def newly_heard(self, place: Site, grid: SiteGrid) -> bool:
        """Whether a gradient is declared to be more than noise by a measurement of this step, or by none, or one too long ago.

        Under autocast noise that is as loud as its gradient is more than noise.
        """
        base = self.base.sites.get(place)
        if place[0] != Kind.GRADIENT or not grid.scales.size or is_noise_only(grid) or self.policy.autocast:
            return False
        return self.is_calibrated or self.is_overdue or base is None or is_noise_only(base)

    def check_blocks(self, place: Site, grid: SiteGrid, x: Tensor, name: str) -> None:
        """Note a number of scales, at a run's first step, that a gradient's rows do not ask for.

        Under autocast a factor of 2 aside; else what machines differ by in the size of a row.
        """
        noise = None if self.yardstick is None else self.yardstick.noise.get(place)
        if not self.is_first or place[0] != Kind.GRADIENT or noise is None:
            return
        loud = noise.largest / max(noise.rms, 1e-300)
        unsure = min(SPREAD_DOUBT + UNSURE * loud, 0.5)
        doubt = (0.5, 2.0) if self.policy.autocast else (1.0 - unsure, 1.0 + unsure)
        asked = {blocks_for(x, self.policy.row_scales, ROW_SPREAD * each) for each in doubt}
        own = {noise.scales.size}  # a loop of one's own may measure more than it trains in this step
        if blocks_for(x, self.policy.row_scales, math.inf) == 1 and loud > 1.0 / NOISE_DOUBT:
            own.add(1)  # where it is rounding errors they say nothing of its rows
        own |= asked if loud < NOISE_DOUBT else set()
        if grid.scales.size not in own:
            limit = f"{' or '.join(str(number) for number in sorted(own))} scales"
            self.excesses.append((place, Excess(name, limit, f"{grid.scales.size}")))

    def check_unheld(self, place: Site, grid: SiteGrid, name: str) -> None:
        """Note a scale that has changed where no value of the step says how large it is: it may be kept long after.

        One that has grown is too wide then, one that fell makes the next value a gradient that has outgrown it.
        """
        if not grid.scales.size or is_noise_only(grid):
            return
        before = self._grid_before(place)
        noise = None if self.yardstick is None else self.yardstick.noise.get(place)
        most = UNSEEN if before is None or not before.scales.size else int(before.scales.max())
        # A loop of one's own may measure more than it trains in this step.
        if noise is not None and (noise.rms > 0.0 or place[0] in ACTIVATIONS):
            most = max(most, int(noise.scales.max()) + 1)
        if place[0] == Kind.LOSS:
            most = max(most, 0)  # what a calibration gives one of zeros
        if place[0] == Kind.BUFFER and self.is_calibrated:
            most = widest_of_zeros(self.policy, noise, grid.band, UNSEEN if self.chooses else most, most)
        if before is not None and place[0] == Kind.GRADIENT and before.scales.size == grid.scales.size:
            least = before.scales.astype(np.int64)
            is_measured = self.is_calibrated and noise is not None and noise.rms > 0.0
            if is_measured and noise is not None and noise.scales.size == least.size:
                least = np.minimum(least, noise.scales - 1)
            if not is_noise_only(before) and (grid.scales < least).any():
                own = f"scale 2**{least.min()} at least, of no values"
                self.excesses.append((place, Excess(name, own, f"2**{grid.scales.min()}")))
        if int(grid.scales.max()) > most:
            self.excesses.append(
                (place, Excess(name, f"scale 2**{most} at most, of no values", f"2**{grid.scales.max()}"))
            )

    def check_activation(self, place: tuple[Kind, int], grid: SiteGrid, x: Tensor, name: str) -> None:
        """Note a scale of an activation that its values do not have."""
        scales = sampled_scale(None, x)
        if scales is None:
            self.check_unheld(place, grid, name)
            return
        own = int(scales[0]) - 1
        base = self.base.sites.get(place)
        allowed = own + SCALE_SLACK
        if base is not None and not is_noise_only(base):
            allowed = max(allowed, int(base.scales[0]))
        if int(grid.scales[0]) > allowed:
            text = f"scale 2**{grid.scales[0]} is too wide, its values have 2**{own}"
            self.violations.append(Violation(name, -1, text))

    def check(
        self, kind: Kind, ordinal: int, grid: SiteGrid, x: Tensor, name: str, largest: int | None
    ) -> None:
        """Note scales of a gradient, buffer or loss that its values do not have; ``largest`` is of the gradients so far."""
        self.energy, self.is_kept = 0.0, False
        if not grid.scales.size:
            return
        self.check_blocks((int(kind), ordinal), grid, x, name)
        if is_noise_only(grid):
            own = block_rms(x, 1)
            self.energy = float(own[0]) ** 2 * x.numel()
            floor, size = int(grid.scales.min()) + grid.band, int(scale_exponents(own)[0])
            if kind != Kind.GRADIENT:
                self.violations.append(Violation(name, -1, "declared to be noise only, and no gradient"))
            elif size > floor + NOISE_GROWS:
                rule = f"declared to be noise below 2**{floor}, its values have 2**{size}"
                self.violations.append(Violation(name, -1, rule))
            elif size > floor and self.yardstick is not None and self.yardstick.hears((int(kind), ordinal)):
                self._note(kind, ordinal, name, f"values of 2**{size}", f"noise below 2**{floor}")
            elif self.yardstick is not None and own.any():  # zeros are silent under any floor
                place, risen = (int(kind), ordinal), self._risen()
                excess = self.yardstick.excess_floor(place, grid, size, largest, risen)
                self._note(kind, ordinal, name, *excess)
            return
        if kind == Kind.GRADIENT:
            self.heard[(int(kind), ordinal)] = int(grid.scales.max()), x.numel()
        if self.newly_heard((int(kind), ordinal), grid) and self.yardstick is not None and x.any():
            self._note(kind, ordinal, name, *self.yardstick.excess_signal((int(kind), ordinal), grid))
        rms = block_rms(x, grid.scales.size)
        self.energy = float(np.square(rms).sum()) * x.numel() / grid.scales.size
        if not rms.any():
            self.check_unheld((int(kind), ordinal), grid, name)
            return
        exact = self.policy.row_scales
        self._check_rule(kind, ordinal, grid, rms, x.numel(), name)
        if rms.size == 1 and not exact and int(grid.scales[0]) <= scale_exponent(float(rms[0])) + SCALE_SLACK:
            return
        # Whether rows may lie below the whole is for the trainer's calibration to find: the whole's scale is always right.
        own = np.maximum(scale_exponents(rms), whole_scale(rms) if exact else lowest_scale(rms))
        allowed = own + (EXACT_SCALE_SLACK if exact and self.base.sites else SCALE_SLACK)
        place = (int(kind), ordinal)
        base, before = self._base_of(place), self._grid_before(place)
        kept = kept_scales(base, before, self.policy, grid.scales.size, kind)
        allowed = allowed if kept is None else np.maximum(allowed, kept)
        if self.is_mostly_noise(place, rms, x.numel()) or self._noise_floor(place) is not None:
            allowed = allowed + NOISE_GROWS
        allowed = self._scales_of_zeros(place, rms, allowed)
        if kind == Kind.BUFFER and (
            (self.is_calibrated and may_be_lifted(self.policy, kind, grid))
            or (before is not None and np.array_equal(grid.scales, before.scales))
        ):
            return  # only who has measured its noise too can say that it is too wide, or whether it may be zero elsewhere
        over = grid.scales.astype(np.int64) - allowed
        if int(over.max()) > 0:
            block = int(over.argmax())
            text = (
                f"scale 2**{grid.scales[block]} of block {block} is too wide, its values have 2**{own[block]}"
            )
            self.violations.append(Violation(name, block, text))

    def _risen(self) -> int:
        """Return by how many octaves the trainer lets noise rise with the gradients that it heard."""
        sizes = {place: numel for place, (_, numel) in self.heard.items()}
        scales = {place: scale for place, (scale, _) in self.heard.items()}
        return rise_since(self.policy, self.base, sizes, scales)

    def _noise_floor(self, place: Site) -> int | None:
        """Return below what exponent a gradient was noise where its noise was measured, here too; None if it was more.

        What is noise may be many times as large on one machine as on another, and as it was: sums that cancel grow with their
        terms (docs/adr/0026). Silencing it is what this machine does itself.
        """
        base = self.base.sites.get(place)
        if base is None or not is_noise_only(base) or self.policy.autocast:
            return None
        return (
            None
            if self.yardstick is None or self.yardstick.hears(place)
            else int(base.scales.min()) + base.band
        )

    def is_mostly_noise(self, place: Site, rms: np.ndarray, numel: int) -> bool:
        """Whether how large a gradient of few elements is says little under autocast: it may be as much noise elsewhere."""
        if not self.policy.autocast or place[0] != Kind.GRADIENT or numel >= SMALL_SITE:
            return False
        noise = None if self.yardstick is None else self.yardstick.noise.get(place)
        return noise is None or MOSTLY_NOISE * noise.largest >= float(rms.max())

    def _scales_of_zeros(self, place: Site, rms: np.ndarray, least: np.ndarray) -> np.ndarray:
        """Return the scales of a gradient, buffer or loss that may be zero elsewhere; ``least``, its values', of any other.

        It may be where it is no larger here than its noise. Zeros keep the scales before; those of a loss are 2**0 at first.
        """
        noise = None if self.yardstick is None else self.yardstick.noise.get(place)
        if noise is None or place[0] not in MAY_BE_ZERO or float(rms.max()) > noise.largest:
            return least
        before = self._grid_before(place)
        if before is not None and before.scales.size == least.size and not is_noise_only(before):
            return np.maximum(least, before.scales)
        return np.maximum(least, 0) if place[0] == Kind.LOSS else least

    def _check_rule(
        self, kind: Kind, ordinal: int, grid: SiteGrid, rms: np.ndarray, numel: int, name: str
    ) -> None:
        """Note a scale that is not the one that follows from the step before and the follower's own values.

        One above makes moves larger. One below makes nothing larger, but whoever may take it keeps, of several roundings of a
        row, the one that suits.
        """
        place = (int(kind), ordinal)
        if self.yardstick is None or not rms.any():
            return
        before = self._grid_before(place)
        noise = self.yardstick.noise.get(place)
        unsure, floor = 0.0 if noise is None else noise.largest, self._noise_floor(place)
        unsure = unsure if floor is None else max(unsure, math.ldexp(1.0, floor))
        exact = self.policy.row_scales
        if exact and kind == Kind.GRADIENT:
            narrowest, widest = self._row_limits(place, rms, unsure, numel)
        else:
            kept = kept_scales(self._base_of(place), before, self.policy, rms.size, kind)
            narrowest, widest = scale_limits(before, rms, UNSURE * unsure, kept, exact)
            if exact and self._is_chosen(place) and noise is not None and noise.scales.size == rms.size:
                widest = np.maximum(widest, noise.scales)
            elif (
                self._is_chosen(place) and kind != Kind.GRADIENT
            ):  # whose scales are then new ones, without slack
                narrowest = np.minimum(narrowest, scale_limits(None, rms, UNSURE * unsure, kept)[0] - 1)
            if self.is_calibrated and may_be_lifted(self.policy, kind, grid):
                least = None if self.chooses or before is None else before.scales
                narrowest, widest = limits_of_noise(self.policy, noise, rms, least, widest)
        stated, usual = grid.scales.astype(np.int64), widest
        widest = self._scales_of_zeros(place, rms, usual)
        self.is_kept = bool((stated > usual).any())
        for limit, outside, words in (
            (widest, stated - widest, "at most"),
            (narrowest, narrowest - stated, "at least"),
        ):
            if int(outside.max()) > 0:
                block = int(outside.argmax())
                own = f"scale 2**{limit[block]} of block {block} {words}"
                self._note(kind, ordinal, name, own, f"2**{stated[block]}")

    def _row_limits(
        self, place: Site, rms: np.ndarray, unsure: float, numel: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the least and the largest scales of a gradient's rows where each has one and nothing is slack.

        What sixteen-bit results leave of a row is known to an octave, or to the largest deviation measured.
        """
        assert self.yardstick is not None
        before = self._grid_before(place)
        dips = self._is_chosen(place) or (before is not None and has_dips(before.scales.astype(np.int64)))
        rows = scale_exponents(np.maximum(rms - np.maximum(rms / 2.0, unsure), 0.0))
        narrowest = np.maximum(rows, whole_scale(rms) - 1 - (ROW_DIP if dips else 0))
        widest = self.yardstick.widest_rows(place) if self._is_chosen(place) else None
        if widest is None or widest.size != rms.size:
            widest = np.full(rms.size, np.iinfo(np.int64).max >> 1)
        # A loop of one's own may add up parts of what was measured as a whole.
        widest = np.maximum(widest, row_scales_of(rms, dips) + 1)
        kept = kept_scales(None, before, self.policy, rms.size)
        if kept is not None:
            narrowest, widest = np.maximum(narrowest, kept), np.maximum(widest, kept)
        grows = NOISE_GROWS if self.is_mostly_noise(place, rms, numel) else 0
        return narrowest - grows, widest + grows

    def _note(self, kind: Kind, ordinal: int, name: str, own: str | None, stated: str) -> None:
        if own is not None:
            self.excesses.append(((int(kind), ordinal), Excess(name, own, stated)))


def _form(grid: SiteGrid) -> tuple[int, int, int, bool, int]:
    return grid.precision, grid.band, grid.floor, grid.dithered, int(grid.scales.size)


def own_grid(policy: Policy, kind: Kind, grid: SiteGrid, x: Tensor) -> SiteGrid:
    """Return the grid that an honest header would have had, as far as one follower can tell."""
    form = expected_form(policy, kind)
    assert form is not None
    precision, dithered, (lowest, highest) = form
    band = min(max(grid.band, lowest), highest)
    floor = lowest_floor(policy, kind, band)
    scales = settled_scales(None, block_rms(x, grid.scales.size), policy.row_scales)
    scales = np.maximum(scales, UNSEEN)
    return SiteGrid(precision, band, floor_exponent(band, floor), dithered, scales)
