"""The context that follows a step's log, and notes every entry and header that honest arithmetic could not have written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tallystick.errors import InvalidInput
from tallystick.execution.dispatch.decisions import EQUAL
from tallystick.execution.noise.buffers import BufferStep
from tallystick.execution.noise.freedom import (
    LARGEST_SQUARED,
    Excess,
    SiteMoves,
    StepFreedom,
    largest_squares,
    longest_square,
)
from tallystick.execution.noise.gradients import GradientMoves
from tallystick.execution.noise.weighing import Weight
from tallystick.execution.noise.yardstick import Yardstick
from tallystick.execution.rounding.breaches import (
    Violation,
    find_excess_of_entries,
    find_policy_breaches,
    unmoved,
)
from tallystick.execution.rounding.grids import (
    FEWEST_ROWS,
    Site,
    activation_rule,
    decision_exponent,
    is_hardly_heard,
    is_noise_only,
    most_blocks,
    nearest_grid,
)
from tallystick.execution.rounding.headers import HeaderChecks, own_grid
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import (
    Frame,
    Kind,
    SiteAddress,
    SparseEntries,
    decode,
    decode_decision,
    decode_residues,
)
from tallystick.numerics.nearest import TIED
from tallystick.numerics.nearest_tensors import find_reaches, follow_nearest
from tallystick.numerics.policy import ActivationRule, Policy, move_budget
from tallystick.numerics.rounded_sites import NO_KEY, Followed, Key
from tallystick.numerics.rounding import round_followed, round_followed_residues, round_recorded_residues
from tallystick.numerics.tensor_measures import block_rms

DOUBLE = 53  # bits of a float64 significand
CANCELLED, MOST_CANCELLED = 2.0, 2.0**-49
"""Times the largest noise measured at a site, and at most over its scale: so far from a boundary lies what lies on it where the
terms of its sum are larger than itself (docs/adr/0005)."""


@dataclass
class FollowingContext:
    """Reads one step's frame. A frame whose bytes are malformed raises; one that lies is followed and noted.

    ``sites`` are those that may have a grid (decisions and activations aside); None leaves that unchecked.
    ``yardstick`` is the follower's own measurement of the noise, if it has one: what exceeds it is no violation, and noted
    in ``excesses`` with its place. ``weigh`` says what moves of a gradient come to in the optimizer: it is given the number of
    the parameter, its gradient as rounded, the elements moved and how far. ``own`` is told of each gradient as rounded where the
    follower's own rounding would have given other values, which, and whether the gradient is hardly more than its noise.
    ``is_first``, ``chooses`` and ``outgrown`` are as ``HeaderChecks`` has them. ``ties`` are the elements, by micro-batch and
    decision, that lie exactly on a switching point here and that the log turned. ``own_gradients`` are those that the follower's
    own decisions make, unrounded, where the log's make others; ``widths`` how many elements each decision met so far has, and
    ``read`` what a program read of a step that was run again from its operators.
    """

    policy: Policy
    table: GridTable
    frame: Frame
    base: GridTable = field(default_factory=GridTable)
    rank: int = 0
    violations: list[Violation] = field(default_factory=list[Violation])
    freedom: StepFreedom = field(default_factory=StepFreedom)
    sites: frozenset[Site] | None = None
    yardstick: Yardstick | None = None
    excesses: list[tuple[Site | None, Excess]] = field(default_factory=list[tuple[Site | None, Excess]])
    site_name: Callable[[Site], str] = str
    weigh: Callable[[int, Tensor, Tensor, Tensor], Weight] | None = None
    own: Callable[[int, Tensor, Tensor, Tensor, bool, bool], None] | None = None
    own_gradients: Mapping[Site, Tensor] = field(default_factory=dict[Site, Tensor])
    is_first: bool = False
    chooses: bool = True
    outgrown: frozenset[int] = frozenset()
    ties: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])
    widths: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    read: list[Tensor] = field(default_factory=list[Tensor])
    _has_sides: bool = False
    _micro_batch: int = 0
    _ordinal: int = -1

    def __post_init__(self) -> None:
        self._seen: set[Site] = set()
        self._unread = {address for address, _ in self.frame.sites}
        self._headers = HeaderChecks(
            self.policy, self.base, self.table, self.violations, self.excesses, is_first=self.is_first, chooses=self.chooses
        )  # fmt: skip
        update = self._payload(SiteAddress(self.rank, 0, Kind.GRID, 0))
        if update is not None:
            self.table = self.table.apply(update)
        self._headers.check_forms(self.table, self.site_name)
        self.violations += find_policy_breaches(self.policy, self.table, self.sites)
        self._largest: int | None = None
        self._payload(SiteAddress(self.rank, 0, Kind.CALIBRATION, 0))
        if self.yardstick is not None:
            self.hold_against(self.yardstick)

    @property
    def is_calibrated(self) -> bool:
        """Whether the trainer measured the noise before this step."""
        return not self.base.sites

    def hold_against(self, yardstick: Yardstick) -> None:
        """Hold the step's bands, and from now on what it rounds, against this measurement."""
        self.yardstick = self._headers.yardstick = yardstick
        self.freedom.carried = yardstick.flips_allowed
        self.freedom.weighable = yardstick.weighable
        self.freedom.count_far(yardstick.reach)
        self._headers.check_unmeasured(self.table, self.site_name)
        for place in yardstick.noise:
            grid, was_noise = self.table.sites.get(place), self._headers.was_noise(place)
            ratio, limit, stated = yardstick.compare_band(place, grid, was_noise=was_noise)
            if math.isfinite(ratio):
                self.freedom.ratio = max(self.freedom.ratio, ratio)
            if limit is not None:
                self.excesses.append((place, Excess(self.site_name(place), limit, stated)))

    def changes_hearing(self, place: Site) -> bool:
        """Whether the log makes noise of a gradient that was more than that in the step before, or hears what was noise."""
        now = self.table.sites.get(place)
        return now is not None and self._headers.was_noise(place) != is_noise_only(now)

    def hold_overdue(self) -> None:
        """Hold all gradients called more than noise against the yardstick: it is of this step, the trainer's older."""
        self._headers.is_overdue = True

    def newly_heard(self, place: Site) -> bool:
        """Whether the log hears a gradient that the trainer's last measurement did not, and neither measured in this step."""
        grid = self.table.sites.get((Kind(place[0]), place[1]))
        is_measured = self.is_calibrated or self._headers.is_overdue
        return grid is not None and not is_measured and self._headers.newly_heard(place, grid)

    def _payload(self, address: SiteAddress) -> bytes | None:
        self._unread.discard(address)
        return self.frame.find(address)

    def start_micro_batch(self, micro_batch: int) -> None:
        """Number the decisions of the next micro-batch from 0."""
        self._micro_batch = micro_batch
        self._ordinal = -1

    def pending(self, x: Tensor) -> bool:
        """Go to the next site; whether the log has entries for it."""
        self._ordinal, self._has_sides = self._ordinal + 1, False
        self._address = SiteAddress(self.rank, self._micro_batch, Kind.DECISION, self._ordinal)
        self._decision = self._payload(self._address)
        self.widths[self._micro_batch, self._ordinal] = x.numel()
        return self._decision is not None

    def band(self, rms: float, widest: float = math.inf) -> float:
        """Return what the site's band may be at most; nothing is searched for when following."""
        self._rms = rms
        self._limit = (
            decision_exponent(self.policy, self.table.sites.get((Kind.DECISION, self._ordinal)), rms) + 1
        )
        return 0.0

    def omits_exact(self) -> bool:
        """Nothing is searched for when following; this decision is between the sides of a point."""
        self._has_sides = True
        return False

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Return the logged branches within reach; the others are noted and not obeyed."""
        assert self._decision is not None
        exponent, entries = decode_decision(self._decision, numel, width)
        site = f"decision {self._ordinal} of micro-batch {self._micro_batch}"
        if exponent > self._limit:
            rule = f"band 2**{exponent} is above the policy's 2**{self._limit} for this input"
            self.violations.append(Violation(site, -1, rule))
            return None
        at = torch.from_numpy(entries.indexes).to(near.device)
        symbol = torch.from_numpy(entries.symbols).to(near.device)
        away = distance(torch.stack((at, symbol), dim=1)).double()  # the band of zeros is none in float32
        reach = math.ldexp(2.0, exponent)
        good = away < reach
        if not bool(good.all()):
            first = int((~good).nonzero()[0].item())
            rule = f"{float(away[first]):.3g} from the switching point, twice the band is {reach:.3g}"
            self.violations.append(Violation(site, int(at[first]), rule))
        at, symbol, away = at[good], symbol[good], away[good]
        mine = symbols(at)
        moved = mine != symbol
        self.freedom.decisions_near += int(at.numel())
        self.freedom.decisions_moved += int(moved.sum())
        self.freedom.turned += [(self._ordinal, self._rms, away[moved])] if bool(moved.any()) else []
        if self.yardstick is not None:
            self.freedom.count_far(self.yardstick.reach)
        if self._has_sides and bool((tied := moved & (mine == EQUAL)).any()):
            self.ties[(self._micro_batch, self._ordinal)] = at[tied]
        return at, symbol

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        """Round, following the log."""
        grid = self.table.sites.get((kind, ordinal))
        if grid is None:
            raise InvalidInput(f"log: no grid is given for {name}")
        if not grid.scales.size and old is None:
            raise InvalidInput(
                f"log: {name} has no scales, and no old value that its band could be relative to"
            )
        if grid.scales.size > 1 and (kind != Kind.GRADIENT or grid.scales.size != most_blocks(x)):
            raise InvalidInput(
                f"log: {name} has {grid.scales.size} blocks, its shape is {list(x.shape)}; a gradient has one, or one a row of "
                f"a matrix of {FEWEST_ROWS} rows or more"
            )
        noted, place = len(self.violations), (int(kind), ordinal)
        self._seen.add(place)
        self._check_scales(kind, ordinal, grid, x, name)
        payload = self._payload(SiteAddress(self.rank, 0, kind, ordinal))
        if len(self.violations) > noted:
            # Obeyed, such a header would lead to the trainer's own state, and there would be nothing to dispute.
            grid, payload = own_grid(self.policy, kind, grid, x), None
        own = self.yardstick.own_buffer_grid(place, grid, x) if self.yardstick else None
        mine, bent = x if own is None else x.clone(), self.own_gradients.get(place)
        silenced, plain = (x if bent is None else bent).clone() if self._silences(place, grid) else None, None
        if grid.residue_bits:
            found, near, steer = self._round_residues(place, grid, payload, x, out, key, name)
        else:
            entries = SparseEntries.none(x.numel(), 1) if payload is None else decode(payload, x.numel(), 1)
            if not self._is_within_budget(grid, entries, x, key, name):
                entries = SparseEntries.none(x.numel(), 1)
            held = self._held(place, grid, x, out, len(entries))
            found = round_followed(x, grid, entries, out=out, old=old, key=key, name=name)
            near, steer = found.near, found.steer
            if is_noise_only(grid):
                found, near, steer = self._silenced(found, out, payload, name), 0, 0.0
            if held is not None and found.moved:
                plain = unmoved(held, grid, key, name)
                self._note_moves(place, out, plain)
            if found.violations:
                rule = f"{found.violations} of {len(entries)} entries lie farther than twice the band from a boundary"
                self.violations.append(Violation(name, found.violation, rule))
        if own is not None:
            self.freedom.buffers[place] = BufferStep.of(mine, out, grid, own, key, name)
        site = SiteMoves(0.0, found.moved, near, longest_square(grid), steer)
        self._count((kind, ordinal), grid, x.numel(), site)
        if kind == Kind.GRADIENT:
            if bent is not None and not grid.residue_bits:
                plain = out if is_noise_only(grid) else unmoved(bent, grid, key, name)
            self._note_own(place, grid, out, silenced, plain)
            weight = Weight()
            if grid.residue_bits and self.weigh is not None:
                nothing = 0, torch.empty(0, dtype=torch.int64), torch.empty(0)
                _, at, moves = self.freedom.moves.get(place, nothing)
                weight = self.weigh(ordinal, out, at, moves)
            self._count_gradient(place, grid, x.numel(), found.shifted, weight)

    def _held(self, place: Site, grid: SiteGrid, x: Tensor, out: Tensor, entries: int) -> Tensor | None:
        """Return a gradient's values, for the case that ``entries`` of the log move some; None where no moves are counted."""
        is_counted = place[0] == Kind.GRADIENT and grid.scales.size > 0
        if self.yardstick is None or not is_counted or not entries:
            return None
        return x.clone() if x.data_ptr() == out.data_ptr() else x

    def _silenced(self, found: Followed, out: Tensor, payload: bytes | None, name: str) -> Followed:
        """Make ``out`` zero, whatever the floor left of a gradient that is nothing but noise; none of it is in a log."""
        out.zero_()
        if payload is not None:
            self.violations.append(Violation(name, -1, "has entries, and is declared to be noise only"))
        return replace(found, violations=0, energy=0.0, moved=0, shifted=0.0)

    def _silences(self, place: Site, grid: SiteGrid) -> bool:
        """Whether the log calls a gradient nothing but noise, or zero, which the follower hears."""
        if self.own is None or self.yardstick is None or place[0] != Kind.GRADIENT:
            return False
        return (is_noise_only(grid) or self._headers.is_kept) and self.yardstick.would_hear(place)

    def _note_own(
        self, place: Site, grid: SiteGrid, out: Tensor, silenced: Tensor | None, plain: Tensor | None
    ) -> None:
        """Tell where its own rounding and decisions would have given a gradient other values: ``plain``; None for the same."""
        if self.own is None or self.yardstick is None:
            return
        flat, hardly_heard, is_all = out.detach().reshape(-1), True, True
        if silenced is not None:
            at = silenced.reshape(-1).nonzero().reshape(-1)
            own = silenced.reshape(-1)[at]
        elif not is_noise_only(grid) and not self.yardstick.would_hear(place):
            at = flat.nonzero().reshape(-1)
            own = torch.zeros_like(flat[at])
        else:
            plain = flat if plain is None else plain.reshape(-1)
            at = (
                (plain != flat).nonzero().reshape(-1)
                if plain is not flat
                else torch.empty(0, dtype=torch.int64, device=flat.device)
            )
            own, hardly_heard, is_all = plain[at], is_hardly_heard(grid), False
        self.own(place[1], out, at, own, hardly_heard, is_all)

    def _note_moves(self, place: Site, out: Tensor, own: Tensor) -> None:
        """Note which elements the log moved, and by how much."""
        moves = (out - own).reshape(-1).float().cpu()
        at = moves.nonzero().reshape(-1)
        self.freedom.moves[place] = out.numel(), at, moves[at]

    def _count_gradient(
        self, place: Site, grid: SiteGrid, numel: int, shifted: float, weight: Weight
    ) -> None:
        """Count how large a gradient is and how far it was moved, squared, in its own unit and as the optimizer weighs it."""
        self.freedom.weighed += weight.moved
        self.freedom.trained += weight.whole
        freedom, energy, quanta = self.freedom, self._headers.energy, 0.0
        if is_noise_only(grid):
            freedom.silenced += numel
            if self.yardstick is not None and self.yardstick.hears_clearly(place):
                shifted = energy  # as far as the gradient goes, it was moved
        elif grid.scales.size:
            self._largest = max(int(grid.scales.max()), -1000 if self._largest is None else self._largest)
            quanta = 0.0 if grid.precision or not numel else largest_squares(grid, numel, numel)
        freedom.energy += energy
        freedom.shifted += shifted
        if grid.precision:
            if self.yardstick is not None and grid.scales.size and not is_noise_only(grid):
                # Below the floor's quantum its values have none that is wider.
                square = 2 * min(int(grid.scales.max()) + grid.floor, LARGEST_SQUARED)
                own = {square: freedom.sites[place].expected}
                freedom.gradients[place] = GradientMoves(
                    energy, shifted, math.ldexp(float(numel), square), by_square=own
                )
            return
        freedom.squared += shifted
        freedom.quanta += quanta
        if self.yardstick is not None:
            unsure, expected = self.yardstick.unsure(place, energy), freedom.sites[place].by_square
            weighable = self.yardstick.weighable_at(place) * weight.whole
            if self.yardstick.is_mostly_noise(place, math.sqrt(energy / max(numel, 1)), numel):
                weighable = weight.moved  # how large it is here says nothing of how large it is elsewhere
            freedom.gradients[place] = GradientMoves(
                energy, shifted, quanta, unsure, expected, weight.moved, weighable
            )

    def _count(self, place: Site, grid: SiteGrid, numel: int, found: SiteMoves) -> None:
        self.freedom.elements += numel
        expected, by_square, cluster = 0.0, dict[int, float](), 1
        if self.yardstick is not None:
            expected = self.yardstick.expected(place, grid, numel)
            by_square, cluster = self.yardstick.by_square(place, grid, numel), self.yardstick.cluster(numel)
        if place not in self.freedom.sites:
            self.freedom.sites[place] = replace(
                found, expected=expected, by_square=by_square, cluster=cluster
            )
            return
        total = self.freedom.sites[place]  # an activation of another micro-batch
        total.expected += expected
        total.moved += found.moved
        total.near += found.near

    def _round_residues(
        self, place: Site, grid: SiteGrid, payload: bytes | None, x: Tensor, out: Tensor, key: Key, name: str
    ) -> tuple[Followed, int, float]:
        """Round by residues; return what that showed, and how many elements a log could choose with what steer."""
        if x.numel() == 0:
            if payload is not None:
                raise InvalidInput(f"log: {name} has no elements, and {len(payload)} bytes of residues")
            return Followed(-1, 0, 0, 0.0, 0.0), 0, 0.0
        if payload is None:
            raise InvalidInput(f"log: {name} is to be rounded by residues, and the log has none")
        audited = self.yardstick is not None and place[0] == Kind.GRADIENT
        mine = x.clone() if audited and x.data_ptr() == out.data_ptr() else x
        found = round_followed_residues(
            x, grid, decode_residues(payload, x.numel(), grid.residue_bits), out=out, key=key, name=name
        )
        if audited and found.moved:
            own = torch.empty_like(out)
            round_recorded_residues(mine, grid, out=own, key=key, name=name)
            self._note_moves(place, out, own)
        if found.violations:
            rule = (
                f"{found.violations} of {x.numel()} residues need a boundary that is a band away or farther"
            )
            self.violations.append(Violation(name, found.violation, rule))
        budget = move_budget(grid, x.numel())
        if self._headers.is_mostly_noise(place, block_rms(x, 1), x.numel()):
            budget = x.numel()  # a bias before a batch norm: all of it may fall otherwise
        if self.yardstick is not None and not self.yardstick.steady:
            budget = x.numel()  # one result may carry all of it: what that comes to is held to, not how many
        if found.moved > budget:
            self.excesses.append(
                (None, Excess(f"residues of {name}", f"{budget} moved at most", f"{found.moved}"))
            )
        chosen = min(found.near, budget)
        return found, chosen, min(found.steer, largest_squares(grid, x.numel(), chosen))

    def activation(self, kind: Kind, ordinal: int, x: Tensor, *, name: str) -> Tensor:
        """Round, following the log."""
        rule, place = activation_rule(self.policy), (kind, ordinal)
        grid = self.table.sites.get(place)
        if grid is None or grid.scales.size != 1:
            raise InvalidInput(f"log: no grid with one scale is given for {name}")
        if is_noise_only(grid):
            return x
        if place not in self._seen:
            self._seen.add(place)
            self._check_activation_scale(place, grid, x, name)
        payload = self._payload(SiteAddress(self.rank, self._micro_batch, kind, ordinal))
        entries = SparseEntries.none(x.numel(), 1) if payload is None else decode(payload, x.numel(), 1)
        out = torch.empty_like(x)
        found = follow_nearest(x, nearest_grid(rule, grid), entries, out=out, name=name)
        if found.violations:
            words = "entries lie twice the band or farther from a boundary"
            text = f"{found.violations} of {len(entries)} {words}"
            self.violations.append(Violation(name, found.violation, text))
        budget = found.budget
        if len(entries) > budget and _distinct(x, entries, rule, grid) > budget:
            text = f"{len(entries)} entries exceed the budget of {budget}"
            self.violations.append(Violation(name, -1, text))
        tied = self._moved_on_boundaries(place, x, entries, rule, grid) if found.corrections else 0
        self._count(place, grid, x.numel(), SiteMoves(0.0, found.corrections - tied, found.near))
        return out

    def _moved_on_boundaries(
        self, place: Site, x: Tensor, entries: SparseEntries, rule: ActivationRule, grid: SiteGrid
    ) -> int:
        """Return how many of the elements that the log moves lie on a boundary: noise alone takes these to either side.

        Sums of short numbers, as of a first layer over pixels, lie there for what they are, however much their terms cancel.
        The terms' noise stays: it is last places of the site's scale, not of the element.
        """
        nearest = nearest_grid(rule, grid)
        values = x.reshape(-1)[torch.from_numpy(entries.indexes).to(x.device)]
        reaches = find_reaches(values, nearest)
        turned = torch.from_numpy(entries.symbols).to(x.device) != reaches.side
        distance = torch.ldexp(reaches.distance, reaches.quantum)
        margin = -math.inf if nearest.margin is None else nearest.margin
        band = torch.clamp(reaches.quantum + margin, min=nearest.band)  # farther ones are not obeyed
        last = torch.ldexp(torch.ones_like(values), torch.frexp(values).exponent - DOUBLE)
        reach = torch.where(values != 0.0, last * 2.0**TIED, 0.0).clamp(min=self._reach_of_terms(place, grid))
        return int((turned & (distance < torch.exp2(band.double())) & (distance < reach)).sum())

    def _reach_of_terms(self, place: Site, grid: SiteGrid) -> float:
        """Return how far from a boundary noise leaves a sum that lies on it, by the follower's own measurement; 0 without one."""
        noise = None if self.yardstick is None else self.yardstick.noise.get(place)
        if noise is None:
            return 0.0
        return math.ldexp(min(CANCELLED * noise.relative, MOST_CANCELLED), int(grid.scales[0]))

    def _check_scales(self, kind: Kind, ordinal: int, grid: SiteGrid, x: Tensor, name: str) -> None:
        self._headers.check(kind, ordinal, grid, x, name, self._largest)

    def _check_activation_scale(self, place: tuple[Kind, int], grid: SiteGrid, x: Tensor, name: str) -> None:
        self._headers.check_activation(place, grid, x, name)

    def _is_within_budget(
        self, grid: SiteGrid, entries: SparseEntries, x: Tensor, key: Key, name: str
    ) -> bool:
        excess = find_excess_of_entries(x, grid, entries, key, name)
        self.violations += [] if excess is None else [excess]
        return excess is None

    def settle_noise(self) -> None:
        """Nothing to do: the log states every scale."""

    def finish(self) -> None:
        """Close the step: sites that the log names and the step does not have are violations."""
        self._headers.outgrown = self.outgrown
        for address in sorted(self._unread):
            self.violations += [Violation(str(address), -1, "the log has a site that the step does not have")]
        for place, grid in self.table.sites.items():
            seen, name = place in self._seen, self.site_name(place)
            if place[0] == Kind.GRADIENT:
                self._headers.check_heard(place, grid, self._largest, name, seen=seen)
            if not seen and (self.is_first or grid is not self._headers.before.sites.get(place)):
                self._headers.check_unheld(place, grid, name)
        if self.yardstick is not None:
            self.freedom.flips = self.yardstick.flips()
            self.freedom.cluster = self.yardstick.cluster(self.freedom.elements)


def _distinct(x: Tensor, entries: SparseEntries, rule: ActivationRule, grid: SiteGrid) -> int:
    """Return how many boundaries the entries speak of: equal patches of an image give equal values, all near or none."""
    values = x.reshape(-1)[torch.from_numpy(entries.indexes).to(x.device)]
    return int(find_reaches(values, nearest_grid(rule, grid)).boundary.unique().numel())
