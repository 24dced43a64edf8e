"""Tapes: the one place where recording, following and measuring differ.

A step asks its tape to round a site or to take a decision, and does not know which of the three
it is talking to. ``RecordTape`` writes the step's log frame; ``FollowTape`` reads one and
notes every entry that honest arithmetic could not have written; ``ProbeTape`` and ``EchoTape`` measure noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.execution.capture import DecisionTape
from tallystick.numerics.log import (
    Frame,
    GridTable,
    Kind,
    SiteAddress,
    SiteGrid,
    SparseEntries,
    decode,
    decode_decision,
    decode_parities,
    encode,
    encode_decision,
    encode_frame,
    encode_parities,
)
from tallystick.numerics.nearest import NearestGrid
from tallystick.numerics.nearest_tensors import FollowedNearest, find_reaches, follow_nearest, record_nearest
from tallystick.numerics.policy import SPARSEST, ActivationRule, Policy, entry_budget, move_budget
from tallystick.numerics.rounding import (
    NO_KEY,
    Followed,
    Key,
    block_rms,
    round_followed,
    round_followed_parity,
    round_recorded,
    round_recorded_parity,
    sampled_rms,
)

ROW_RANGE = 16  # a row's scale exponent lies at most this far below the tensor's largest
ROW_SPREAD = 8.0  # rows are uneven if the largest is this many times the median row
ROW_DIP = 4  # octaves that a row's scale may lie below the whole matrix's, where its noise does too
SCALE_SLACK = 3  # a header's scale may exceed what the auditor measures by this many powers of two
EXACT_SCALE_SLACK = (
    1  # the same where every row has a scale, but in a calibrated step: those are kept without slack
)
MOST_LIFT = 2  # octaves by which a calibration may lift the scales of a gradient that its noise nearly hides
NOISE_BAND = -1  # band exponent that marks a noise-only gradient; no policy allows it otherwise
UNSEEN = -900  # scale exponent of a site that has had no value but zero: it takes the first one's
NOTHING = torch.empty(0, dtype=torch.int64)
ACTIVATIONS = frozenset({Kind.ACTIVATION, Kind.ACTIVATION_GRADIENT})
UNKNOWN_NOISE = 6  # octaves between the smallest band and that of an activation whose noise is not known yet
Site = tuple[int, int]  # kind and ordinal


class Tape(DecisionTape, Protocol):
    """A tape of one step."""

    def start_micro_batch(self, micro_batch: int) -> None:
        """Number the decisions of the next micro-batch from 0."""
        ...

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        """Round site ``(kind, ordinal)`` from ``x`` into ``out``."""
        ...

    def activation(self, kind: Kind, ordinal: int, x: Tensor, *, name: str) -> Tensor:
        """Return ``x`` (contiguous, float64) rounded as site ``(kind, ordinal)`` of this micro-batch.

        A new tensor, or ``x`` itself where the site is passed through.
        """
        ...


def scale_exponents(rms: np.ndarray) -> np.ndarray:
    """Return the smallest ``s`` with ``rms <= 2**s`` for each block, int64; for a zero block the lowest exponent."""
    if rms.size == 1:
        only, power = math.frexp(rms.item())
        return np.full(rms.shape, (power - (only == 0.5)) if only > 0.0 else -1000, dtype=np.int64)
    mantissa, exponent = np.frexp(rms)
    ceiling = np.where(mantissa == 0.5, exponent - 1, exponent)
    return np.where(rms > 0.0, ceiling, -1000).astype(np.int64)


def _scale_exponent(rms: float) -> int:
    """Return what ``scale_exponents`` does for one finite number."""
    mantissa, exponent = math.frexp(rms)
    return (exponent - 1 if mantissa == 0.5 else exponent) if rms > 0.0 else -1000


def is_noise_only(grid: SiteGrid) -> bool:
    """Whether calibration found this site to be cancellation noise: its grid, never dithered, sends all of it to zero."""
    return grid.scales.size > 0 and grid.band == NOISE_BAND


def largest_scale(table: GridTable) -> int | None:
    """Return the largest gradient scale exponent in ``table``, noise-only tensors left out."""
    scales = [
        int(grid.scales.max())
        for (kind, _), grid in table.sites.items()
        if kind == Kind.GRADIENT and grid.scales.size and not is_noise_only(grid)
    ]
    return max(scales, default=None)


def lowest_scale(rms: np.ndarray) -> int:
    """Return what no row's scale exponent lies below, of rows of these sizes: 2**16 below the largest row's."""
    return int(scale_exponents(rms).max()) - ROW_RANGE


def whole_scale(rms: np.ndarray) -> int:
    """Return the scale exponent of all blocks together, from that of each."""
    return int(scale_exponents(np.sqrt(np.mean(np.square(rms), keepdims=True)))[0])


def has_dips(scales: np.ndarray) -> bool:
    """Whether rows of these scale exponents may lie below the whole matrix's: calibration found noise to follow the row.

    Rows that may not are at least the whole's, W; then the root of the mean square of their scales is 2**(W + 2) at most.
    """
    if scales.size < 2:
        return False
    largest = int(scales.max())
    return whole_scale(np.exp2(scales.astype(np.float64) - largest)) + largest - int(scales.min()) >= 3


def row_scales_of(rms: np.ndarray, dips: bool) -> np.ndarray:
    """Return each row's scale exponent without slack: at least the whole matrix's, or with ``dips`` ``ROW_DIP`` below it."""
    return np.maximum(scale_exponents(rms), whole_scale(rms) - (ROW_DIP if dips else 0))


def settled_scales(previous: np.ndarray | None, rms: np.ndarray, row_scales: bool = False) -> np.ndarray:
    """Return each block's scale exponent: the previous one while it is at most two octaves too wide, else one too wide.

    The slack keeps the header short: a scale is written only when the block's size has really moved. With ``row_scales``
    there is none: a slack of two octaves there would be as much noise that the band does not know of, or a quantum four
    times too coarse, and one small number a row is little beside a bit for each element.
    """
    if row_scales:
        return row_scales_of(rms, previous is not None and has_dips(previous))
    if rms.size == 1:
        return np.array([_settled(None if previous is None else int(previous[0]), float(rms[0]))])
    wanted = scale_exponents(rms)
    wanted = np.maximum(wanted, lowest_scale(rms))
    if previous is None:
        return wanted + 1
    keep = (wanted <= previous) & (previous <= wanted + 2)
    return np.where(keep, previous, wanted + 1)


def _settled(previous: int | None, rms: float) -> int:
    """Return what ``settled_scales`` does for a single block."""
    wanted = _scale_exponent(rms)
    return previous if previous is not None and wanted <= previous <= wanted + 2 else wanted + 1


def kept_scales(
    base: SiteGrid | None, before: SiteGrid | None, policy: Policy, blocks: int
) -> np.ndarray | None:
    """Return what the scale of none of a site's ``blocks`` falls below in this step; None if there is no such limit.

    Args:
        base: its grid after the last calibration.
        before: its grid after the step before.
        policy: with a scale for every row the limit is an octave below the lowest scale of the step before. Noise follows
            a gradient up and down, but not into the dip of a single step.
        blocks: of the site now.
    """
    grid = before if policy.row_scales else base
    if grid is None or grid.scales.size != blocks or is_noise_only(grid):
        return None
    return np.full(blocks, int(grid.scales.min()) - 1) if policy.row_scales else grid.scales


def sampled_scale(previous: SiteGrid | None, x: Tensor) -> np.ndarray | None:
    """Return the scale of an activation site from an even sample of its elements, as ``settled_scales``; None for zeros.

    A header states what was used, so a sample will do; both sides take the same one.
    """
    flat = x.reshape(-1)
    rms = sampled_rms(flat, sample_stride(flat))
    if not rms.any():
        rms = block_rms(flat, 1)
    if not np.isfinite(rms).all() or not rms.any():
        return None
    before = None if previous is None or is_noise_only(previous) else previous.scales.astype(np.int64)
    return settled_scales(before, rms)


def activation_grid(rule: ActivationRule, band: int, scales: np.ndarray) -> SiteGrid:
    """Return the header of an activation site; with the band ``NOISE_BAND`` it is passed through."""
    return SiteGrid(rule.precision, band, floor_exponent(band, rule.floor), False, scales)


def nearest_grid(rule: ActivationRule, grid: SiteGrid) -> NearestGrid:
    """Return the quanta and the band that a site's header stands for."""
    scale = int(grid.scales[0])
    return NearestGrid(grid.precision + 8, scale + grid.floor, scale + grid.band, rule.margin)


def activation_rule(policy: Policy) -> ActivationRule:
    """Return how the policy rounds activations.

    Raises:
        InvalidInput: it does not.
    """
    if policy.activation is None:
        raise InvalidInput(f"policy {policy.name} rounds no activations")
    return policy.activation


@dataclass
class RecordTape:
    """Writes one step's frame.

    ``table`` holds the grids before the step, ``current`` those calibrated since, if any; after
    ``finish``, ``table`` holds the grids after the step. No scale falls below that of ``base``, the grids of the last
    calibration: where a batch happens to give a small gradient, the noise does not get smaller with it.
    """

    policy: Policy
    table: GridTable
    current: GridTable | None = None
    base: GridTable = field(default_factory=GridTable)
    rank: int = 0
    payloads: dict[SiteAddress, bytes] = field(default_factory=dict[SiteAddress, bytes])
    _micro_batch: int = 0
    _ordinal: int = -1
    _band_exponent: int = 0

    def __post_init__(self) -> None:
        self._before = self.table
        if self.current is not None:
            self.table = self.current
        self._grids = dict(self.table.sites)
        self._largest: int | None = None
        self._rounded: list[Site] = []
        self._settled: set[Site] = set()

    def start_micro_batch(self, micro_batch: int) -> None:
        """Number the decisions of the next micro-batch from 0."""
        self._micro_batch = micro_batch
        self._ordinal = -1

    def pending(self, x: Tensor) -> bool:
        """Go to the next site; every site may have something to log."""
        self._ordinal += 1
        return True

    def band(self, rms: float) -> float:
        """Return the site's band: its calibrated exponent over the input's scale."""
        self._band_exponent = decision_exponent(
            self.policy, self._grids.get((Kind.DECISION, self._ordinal)), rms
        )
        return math.ldexp(1.0, self._band_exponent)

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> None:  # fmt: skip
        """Log the branches taken at the ambiguous elements."""
        if near.numel() == 0:
            return
        entries = SparseEntries(numel, width, near.cpu().numpy(), symbols(near).cpu().numpy())
        address = SiteAddress(self.rank, self._micro_batch, Kind.DECISION, self._ordinal)
        self.payloads[address] = encode_decision(self._band_exponent, entries)

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        """Round, logging the ambiguous elements; the site's scales follow its size."""
        grid = self._grids[(kind, ordinal)]
        if is_noise_only(grid):
            grid = self._grids[(kind, ordinal)] = self._with_signal(grid, x)
        elif grid.scales.size:
            rms = block_rms(x, grid.scales.size)
            scales = (
                settled_scales(grid.scales.astype(np.int64), rms, self.policy.row_scales)
                if rms.any()
                else grid.scales
            )
            place = (kind, ordinal)
            base, before = self.base.sites.get(place), self._before.sites.get(place)
            kept = kept_scales(base, before, self.policy, grid.scales.size)
            scales = scales if kept is None else np.maximum(scales, kept)
            if (
                self.policy.row_scales and not self.base.sites
            ):  # a step that was calibrated, for these very values
                scales = np.maximum(scales, grid.scales)
            if (scales != grid.scales).any():
                grid = grid.with_scales(scales)
                self._grids[(kind, ordinal)] = grid
            if kind == Kind.GRADIENT:
                self._rounded.append((kind, ordinal))
        address = SiteAddress(self.rank, 0, kind, ordinal)
        if grid.parity:
            if x.numel():
                parities = round_recorded_parity(x, grid, out=out, key=key, name=name)
                self.payloads[address] = encode_parities(parities)
            return
        entries = round_recorded(x, grid, out=out, old=old, key=key, name=name)
        if len(entries):
            self.payloads[address] = encode(entries)

    def activation(self, kind: Kind, ordinal: int, x: Tensor, *, name: str) -> Tensor:
        """Round, logging the ambiguous elements; the scale is that of the step's first micro-batch."""
        rule, place = activation_rule(self.policy), (kind, ordinal)
        if place not in self._settled:
            self._settled.add(place)
            self._grids[place] = self._activation_grid(rule, place, x)
        grid = self._grids[place]
        if is_noise_only(grid):
            return x
        out = torch.empty_like(x)
        entries = record_nearest(x, nearest_grid(rule, grid), out=out, name=name)
        if len(entries):
            self.payloads[SiteAddress(self.rank, self._micro_batch, kind, ordinal)] = encode(entries)
        return out

    def _activation_grid(self, rule: ActivationRule, place: tuple[Kind, int], x: Tensor) -> SiteGrid:
        grid = self._grids.get(place)
        scales = sampled_scale(grid, x)
        if grid is None:
            return activation_grid(
                rule, rule.band[0] + UNKNOWN_NOISE, np.full(1, UNSEEN) if scales is None else scales
            )
        if scales is None or is_noise_only(grid):
            return grid
        base = self.base.sites.get(place)
        if base is not None and not is_noise_only(base):
            scales = np.maximum(scales, base.scales)
        return grid if np.array_equal(scales, grid.scales) else grid.with_scales(scales)

    def _with_signal(self, grid: SiteGrid, x: Tensor) -> SiteGrid:
        """Return the grid of a gradient that was noise only: another one where its values have outgrown that noise.

        What was measured stays its absolute noise; from it and the new scale follows the band, as far as the policy goes.
        """
        size, noise = int(scale_exponents(block_rms(x, 1))[0]), int(grid.scales.min()) + grid.band
        if size < noise:
            return grid
        form = expected_form(self.policy, Kind.GRADIENT)
        assert form is not None
        _, _, (lowest, highest) = form
        scales = settled_scales(None, block_rms(x, grid.scales.size), self.policy.row_scales)
        band = max(lowest, noise - int(scales.max()))
        if band > highest:
            if self._largest is not None and size + 1 <= self._largest + self.policy.noise_limit:
                return grid.with_scales(np.full(grid.scales.size, size + 1 - NOISE_BAND))
            band = highest
        return site_grid(self.policy, Kind.GRADIENT, band, scales)

    def settle_noise(self) -> None:
        """Move the scales of noise-only gradients with the largest gradient scale; call after the others are rounded.

        Only gradients that this step has count, here and for a follower: of the others nobody can check the scale.
        """
        if not self._rounded:
            return
        before = max(int(self.table.sites[place].scales.max()) for place in self._rounded)
        self._largest = max(int(self._grids[place].scales.max()) for place in self._rounded)
        if before in (self._largest, UNSEEN):
            return
        for key, grid in self._grids.items():
            if key[0] == Kind.GRADIENT and is_noise_only(grid):
                moved = grid.scales.astype(np.int64) + (self._largest - before)
                self._grids[key] = grid.with_scales(moved)

    def finish(self) -> bytes:
        """Return the step's encoded frame; ``table`` is then the table after the step."""
        self.table = GridTable(self._grids)
        if self.table != self._before:
            self.payloads[SiteAddress(self.rank, 0, Kind.GRID, 0)] = self._before.diff(self.table)
        return encode_frame(Frame.of(self.payloads))


def decision_exponent(policy: Policy, grid: SiteGrid | None, rms: float) -> int:
    """Return the exponent of a decision's band for an input of size ``rms``."""
    relative = policy.decision_band[0] if grid is None else grid.band
    scale = _scale_exponent(rms) if math.isfinite(rms) else 0
    return max(scale + relative, -1000)


@dataclass(frozen=True)
class Violation:
    """A log entry, or a header, that honest arithmetic could not have written."""

    site: str
    element: int
    rule: str


@dataclass
class Freedom:
    """What a dishonest log could still have chosen, and what this one did.

    Attributes:
        near: elements that the log could have chosen.
        elements: rounded ones in all.
        largest_steer: relative L2 size of the largest steer of one step's gradient that they allow.
        moved: elements that the log took from the follower's own rounding.
        largest_move: relative L2 size of the largest such move of one step's gradient.
    """

    near: int = 0
    elements: int = 0
    largest_steer: float = 0.0
    moved: int = 0
    largest_move: float = 0.0

    @property
    def fraction(self) -> float:
        """Share of all rounded elements that the log could have chosen."""
        return self.near / self.elements if self.elements else 0.0

    def add(self, other: Freedom) -> None:
        """Count ``other`` in."""
        self.near += other.near
        self.elements += other.elements
        self.largest_steer = max(self.largest_steer, other.largest_steer)
        self.moved += other.moved
        self.largest_move = max(self.largest_move, other.largest_move)


@dataclass
class FollowTape:
    """Reads one step's frame. A frame whose bytes are malformed raises; one that lies is followed and noted.

    ``sites`` are those that may have a grid (decisions and activations aside); None leaves that unchecked.
    ``corrections`` counts the elements of activations that took the log's side instead of their own.
    """

    policy: Policy
    table: GridTable
    frame: Frame
    base: GridTable = field(default_factory=GridTable)
    rank: int = 0
    violations: list[Violation] = field(default_factory=list[Violation])
    freedom: Freedom = field(default_factory=Freedom)
    sites: frozenset[Site] | None = None
    corrections: int = 0
    _micro_batch: int = 0
    _ordinal: int = -1

    def __post_init__(self) -> None:
        self._seen: set[Site] = set()
        self._unread = {address for address, _ in self.frame.sites}
        self._before = self.table
        update = self._payload(SiteAddress(self.rank, 0, Kind.GRID, 0))
        if update is not None:
            self.table = self.table.apply(update)
        self.violations += find_policy_breaches(self.policy, self.table, self.sites)
        self._largest: int | None = None
        self._steer = 0.0
        self._energy = 0.0
        self._shifted = 0.0

    def _payload(self, address: SiteAddress) -> bytes | None:
        self._unread.discard(address)
        return self.frame.find(address)

    def start_micro_batch(self, micro_batch: int) -> None:
        """Number the decisions of the next micro-batch from 0."""
        self._micro_batch = micro_batch
        self._ordinal = -1

    def pending(self, x: Tensor) -> bool:
        """Go to the next site; whether the log has entries for it."""
        self._ordinal += 1
        self._address = SiteAddress(self.rank, self._micro_batch, Kind.DECISION, self._ordinal)
        self._decision = self._payload(self._address)
        return self._decision is not None

    def band(self, rms: float) -> float:
        """Return what the site's band may be at most; nothing is searched for when following."""
        self._limit = (
            decision_exponent(self.policy, self.table.sites.get((Kind.DECISION, self._ordinal)), rms) + 1
        )
        return 0.0

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Return the logged branches within reach; the others are noted and not obeyed."""
        assert self._decision is not None
        exponent, entries = decode_decision(self._decision, numel, width)
        site = f"decision {self._ordinal} of micro-batch {self._micro_batch}"
        if exponent > self._limit:
            self.violations.append(
                Violation(
                    site, -1, f"band 2**{exponent} is above the policy's 2**{self._limit} for this input"
                )
            )
            return None
        at = torch.from_numpy(entries.indexes).to(near.device)
        symbol = torch.from_numpy(entries.symbols).to(near.device)
        away = distance(torch.stack((at, symbol), dim=1))
        reach = math.ldexp(2.0, exponent)
        good = away < reach
        if not bool(good.all()):
            first = int((~good).nonzero()[0].item())
            self.violations.append(
                Violation(
                    site,
                    int(at[first]),
                    f"{float(away[first]):.3g} from the switching point, twice the band is {reach:.3g}",
                )
            )
        self.freedom.near += int(at.numel())
        return at[good], symbol[good]

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
        if grid.scales.size and x.numel() % grid.scales.size:
            raise InvalidInput(
                f"log: {name} has {x.numel()} elements, not a multiple of its {grid.scales.size} blocks"
            )
        noted = len(self.violations)
        self._check_scales(kind, ordinal, grid, x, name)
        payload = self._payload(SiteAddress(self.rank, 0, kind, ordinal))
        if len(self.violations) > noted:
            # Obeyed, such a header would lead to the trainer's own state, and there would be nothing to dispute.
            grid, payload = self._own_grid(kind, grid, x), None
        if grid.parity:
            found, near, steer = self._round_parity(grid, payload, x, out, key, name)
        else:
            entries = SparseEntries.none(x.numel(), 1) if payload is None else decode(payload, x.numel(), 1)
            if not self._check_budget(grid, entries, name):
                entries = SparseEntries.none(x.numel(), 1)
            found = round_followed(x, grid, entries, out=out, old=old, key=key, name=name)
            near, steer = found.near, found.steer
            if found.violations:
                rule = f"{found.violations} of {len(entries)} entries lie farther than twice the band from a boundary"
                self.violations.append(Violation(name, found.violation, rule))
        self.freedom.near += near
        self.freedom.elements += x.numel()
        self.freedom.moved += found.moved
        if kind == Kind.GRADIENT and grid.scales.size and not is_noise_only(grid):
            self._largest = max(int(grid.scales.max()), -1000 if self._largest is None else self._largest)
        if kind == Kind.GRADIENT:
            self._steer += steer
            self._energy += found.energy
            self._shifted += found.shifted

    def _round_parity(
        self, grid: SiteGrid, payload: bytes | None, x: Tensor, out: Tensor, key: Key, name: str
    ) -> tuple[Followed, int, float]:
        """Round by parities; return what that showed, and how many elements a log could choose with what steer."""
        if x.numel() == 0:
            if payload is not None:
                raise InvalidInput(f"log: {name} has no elements, and {len(payload)} bytes of parities")
            return Followed(-1, 0, 0, 0.0, 0.0), 0, 0.0
        if payload is None:
            raise InvalidInput(f"log: {name} is to be rounded by parities, and the log has none")
        found = round_followed_parity(
            x, grid, decode_parities(payload, x.numel()), out=out, key=key, name=name
        )
        if found.violations:
            rule = (
                f"{found.violations} of {x.numel()} parities need a boundary that is a band away or farther"
            )
            self.violations.append(Violation(name, found.violation, rule))
        budget = move_budget(grid, x.numel())
        if found.moved > budget:
            rule = f"its parities move {found.moved} elements, the budget is {budget}"
            self.violations.append(Violation(name, -1, rule))
        chosen = min(found.near, budget)
        return found, chosen, min(found.steer, _largest_squares(grid, x.numel(), chosen))

    def activation(self, kind: Kind, ordinal: int, x: Tensor, *, name: str) -> Tensor:
        """Round, following the log."""
        rule, place = activation_rule(self.policy), (kind, ordinal)
        grid = self.table.sites.get(place)
        if grid is None:
            raise InvalidInput(f"log: no grid is given for {name}")
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
            text = (
                f"{found.violations} of {len(entries)} entries lie twice the band or farther from a boundary"
            )
            self.violations.append(Violation(name, found.violation, text))
        budget = activation_budget(found)
        if len(entries) > budget and _distinct(x, entries, rule, grid) > budget:
            text = f"{len(entries)} entries exceed the budget of {budget}"
            self.violations.append(Violation(name, -1, text))
        self.freedom.near += found.near
        self.freedom.elements += x.numel()
        self.corrections += found.corrections
        return out

    def _check_activation_scale(self, place: tuple[Kind, int], grid: SiteGrid, x: Tensor, name: str) -> None:
        scales = sampled_scale(None, x)
        if scales is None:
            return  # an all-zero tensor keeps the scale it had
        own = int(scales[0]) - 1
        base = self.base.sites.get(place)
        allowed = own + SCALE_SLACK
        if base is not None and not is_noise_only(base):
            allowed = max(allowed, int(base.scales[0]))
        if int(grid.scales[0]) > allowed:
            text = f"scale 2**{grid.scales[0]} is too wide, its values have 2**{own}"
            self.violations.append(Violation(name, -1, text))

    def _check_scales(self, kind: Kind, ordinal: int, grid: SiteGrid, x: Tensor, name: str) -> None:
        if not grid.scales.size:
            return
        if is_noise_only(grid):
            allowed = -1000 if self._largest is None else self._largest + self.policy.noise_limit
            if kind != Kind.GRADIENT or int(grid.scales.max()) + grid.band > allowed:
                self.violations.append(
                    Violation(
                        name,
                        -1,
                        f"noise floor 2**{int(grid.scales.max()) + grid.band} is above the policy's 2**{allowed}",
                    )
                )
            size = int(scale_exponents(block_rms(x, 1))[0])
            if size > int(grid.scales.min()) + grid.band:
                self.violations.append(
                    Violation(
                        name,
                        -1,
                        f"declared to be noise below 2**{int(grid.scales.min()) + grid.band}, its values have 2**{size}",
                    )
                )
            return
        rms = block_rms(x, grid.scales.size)
        exact = self.policy.row_scales
        if (
            rms.size == 1
            and not exact
            and int(grid.scales[0]) <= _scale_exponent(float(rms[0])) + SCALE_SLACK
        ):
            return
        # Whether rows may lie below the whole is for the trainer's calibration to find: the whole's scale is always right.
        own = np.maximum(scale_exponents(rms), whole_scale(rms) if exact else lowest_scale(rms))
        allowed = own + (EXACT_SCALE_SLACK if exact and self.base.sites else SCALE_SLACK)
        place = (int(kind), ordinal)
        base, before = self.base.sites.get(place), self._before.sites.get(place)
        kept = kept_scales(base, before, self.policy, grid.scales.size)
        allowed = allowed if kept is None else np.maximum(allowed, kept)
        over = grid.scales.astype(np.int64) - allowed
        # An all-zero tensor keeps the scale it had.
        if int(own.max()) > -1000 and int(over.max()) > 0:
            block = int(over.argmax())
            self.violations.append(
                Violation(
                    name,
                    block,
                    f"scale 2**{grid.scales[block]} of block {block} is too wide, its values have 2**{own[block]}",
                )
            )

    def _own_grid(self, kind: Kind, grid: SiteGrid, x: Tensor) -> SiteGrid:
        """Return the grid that an honest header would have had, as far as one follower can tell."""
        form = expected_form(self.policy, kind)
        assert form is not None
        precision, dithered, (lowest, highest) = form
        band = min(max(grid.band, lowest), highest)
        floor = lowest_floor(self.policy, kind, band)
        scales = settled_scales(None, block_rms(x, grid.scales.size), self.policy.row_scales)
        scales = np.maximum(scales, UNSEEN)
        return SiteGrid(precision, band, floor_exponent(band, floor), dithered, scales)

    def _check_budget(self, grid: SiteGrid, entries: SparseEntries, name: str) -> bool:
        budget = entry_budget(grid, entries.n)
        if len(entries) > budget:
            self.violations.append(
                Violation(name, -1, f"{len(entries)} entries exceed the budget of {budget}")
            )
            return False
        return True

    def settle_noise(self) -> None:
        """Nothing to do: the log states every scale."""

    def finish(self) -> None:
        """Close the step: sites that the log names and the step does not have are violations."""
        for address in sorted(self._unread):
            self.violations.append(
                Violation(str(address), -1, "the log has a site that the step does not have")
            )
        if self._energy > 0.0:
            self.freedom.largest_steer = math.sqrt(self._steer / self._energy)
            self.freedom.largest_move = math.sqrt(self._shifted / self._energy)


def activation_budget(found: FollowedNearest) -> int:
    """Return how many boundaries the entries of an activation may speak of (spec/policies.md 4, rule 8)."""
    return int(found.chance + 8.0 * math.sqrt(found.chance)) + 16 + found.tied


def _distinct(x: Tensor, entries: SparseEntries, rule: ActivationRule, grid: SiteGrid) -> int:
    """Return how many boundaries the entries speak of: equal patches of an image give equal values, all near or none."""
    values = x.reshape(-1)[torch.from_numpy(entries.indexes).to(x.device)]
    return int(find_reaches(values, nearest_grid(rule, grid)).boundary.unique().numel())


def _largest_squares(grid: SiteGrid, numel: int, count: int) -> float:
    """Return the sum of the ``count`` largest squared quanta of a site."""
    squares = np.sort(np.exp2(2.0 * (grid.scales.astype(np.float64) + grid.floor)))[::-1]
    each = numel // squares.size
    whole = min(count // each, squares.size)
    rest = squares[whole] * (count - whole * each) if whole < squares.size else 0.0
    return float(squares[:whole].sum() * each + rest)


def find_policy_breaches(
    policy: Policy, table: GridTable, sites: frozenset[Site] | None = None
) -> list[Violation]:
    """Return the grids of ``table`` that the policy does not allow, or that belong to none of ``sites``."""
    breaches: list[Violation] = []
    for key, grid in table.sites.items():
        # The number of decisions and activations shows in the step alone.
        counted = key[0] == Kind.DECISION or (key[0] in ACTIVATIONS and policy.activation is not None)
        stray = sites is not None and not counted and key not in sites
        rule = "the run has no such site" if stray else _breach(policy, Kind(key[0]), grid)
        if rule:
            breaches.append(Violation(f"{Kind(key[0]).name.lower()} site {key[1]}", -1, rule))
    return breaches


def _breach(policy: Policy, kind: Kind, grid: SiteGrid) -> str | None:
    expected = expected_form(policy, kind)
    if expected is None:
        return f"policy {policy.name} has no such sites"
    precision, dithered, (lowest, highest) = expected
    if kind == Kind.DECISION:
        return (
            None
            if lowest <= grid.band <= highest
            else f"band 2**{grid.band} outside 2**{lowest}..2**{highest}"
        )
    dithered = dithered and not is_noise_only(grid)
    if (grid.precision, grid.dithered) != (precision, dithered):
        return f"precision {grid.precision}, dither {grid.dithered}; the policy has {precision}, {dithered}"
    parity = is_parity_coded(policy, kind, grid.band)
    if grid.parity != parity:
        return f"parity code {grid.parity}, the policy has {parity} for band 2**{grid.band}"
    if kind in ACTIVATIONS and grid.scales.size != 1:
        return f"{grid.scales.size} scales, an activation has one"
    if (grid.scales.size == 0) != (kind == Kind.STATE):
        return "a state site has a relative band, every other site has scales"
    if not is_noise_only(grid) and not lowest <= grid.band <= highest:
        return f"band 2**{grid.band} outside 2**{lowest}..2**{highest}"
    wanted = floor_exponent(grid.band, lowest_floor(policy, kind, grid.band), parity)
    if grid.floor != wanted:
        return f"floor 2**{grid.floor}, the policy has 2**{wanted} for band 2**{grid.band}"
    return None


def expected_form(policy: Policy, kind: Kind) -> tuple[int, bool, tuple[int, int]] | None:
    """Return precision, dither and allowed band exponents of a kind of site; None if the policy has none."""
    if kind == Kind.GRADIENT:
        return policy.gradient_precision, policy.dithered, policy.gradient_band
    if kind == Kind.STATE:
        return 24, False, policy.state_band
    if kind == Kind.BUFFER:
        return policy.buffer_precision, policy.dithered_buffers, policy.buffer_band
    if kind == Kind.LOSS:
        return policy.loss_precision, False, policy.loss_band or policy.buffer_band
    if kind == Kind.DECISION:
        return 0, False, policy.decision_band
    rule = policy.activation
    if kind in ACTIVATIONS and rule is not None:
        return rule.precision, False, rule.band
    return None


def lowest_floor(policy: Policy, kind: Kind, band: int) -> int | None:
    """Return the least floor of a kind of site with that band; None where the band alone sets it."""
    if kind == Kind.GRADIENT:
        return policy.finest_floor(band)
    if kind == Kind.STATE:
        return -149
    rule = policy.activation
    return rule.floor if kind in ACTIVATIONS and rule is not None else None


def floor_exponent(band: int, lowest: int | None, parity: bool = False) -> int:
    """Return the floor that goes with a band: sixteen bands (parities: two), or the policy's own if that is larger."""
    if lowest == -149:
        return -149
    least = band + (1 if parity else SPARSEST)
    return least if lowest is None else max(lowest, least)


def is_parity_coded(policy: Policy, kind: Kind, band: int) -> bool:
    """Whether a site with that band is logged by parities: where the policy has them and they are the smaller code."""
    if not policy.parity or band == NOISE_BAND:
        return False
    if kind == Kind.GRADIENT:
        return policy.gradient_floor < band + SPARSEST
    return kind in (Kind.BUFFER, Kind.LOSS)


def site_grid(policy: Policy, kind: Kind, band: int, scales: np.ndarray) -> SiteGrid:
    """Return the grid that the policy prescribes for a site whose noise needs that band.

    Parities are exact up to half a quantum and cost the same whatever the band, so that is then the band.
    """
    form = expected_form(policy, kind)
    assert form is not None
    precision, dithered, _ = form
    parity = is_parity_coded(policy, kind, band)
    floor = floor_exponent(band, lowest_floor(policy, kind, band), parity)
    band = floor - 1 if parity else band
    return SiteGrid(precision, band, floor, dithered and band != NOISE_BAND, scales, parity=parity)


@dataclass
class ProbeTape:
    """Sees one plain step and remembers inputs of decisions, with their branches in a wide band."""

    wide: int = -6  # the branch is fixed for everything within rms * 2**wide of a switching point
    only_near: bool = False  # whether the noise of inputs beside a switching point is measured, not of all
    SAMPLES: ClassVar[int] = 1 << 16

    samples: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])
    rms: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    branches: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(
        default_factory=dict[tuple[int, int], tuple[Tensor, Tensor]]
    )
    near: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])
    forms: dict[tuple[int, int], tuple[int, int]] = field(
        default_factory=dict[tuple[int, int], tuple[int, int]]
    )
    rule: ActivationRule | None = None
    table: GridTable = field(default_factory=GridTable)
    scales: dict[Site, np.ndarray] = field(default_factory=dict[Site, np.ndarray])
    activations: dict[tuple[int, Kind, int], ProbedActivation] = field(
        default_factory=dict[tuple[int, Kind, int], "ProbedActivation"]
    )
    _micro_batch: int = 0
    _ordinal: int = -1
    _input: Tensor = NOTHING

    def start_micro_batch(self, micro_batch: int) -> None:
        """Number the decisions of the next micro-batch from 0."""
        self._micro_batch = micro_batch
        self._ordinal = -1

    def pending(self, x: Tensor) -> bool:
        """Keep an even sample of the next site's input."""
        self._ordinal += 1
        self.samples[(self._micro_batch, self._ordinal)] = sampled(x)
        self._input = x
        return True

    def band(self, rms: float) -> float:
        """Return the wide band."""
        self.rms[(self._micro_batch, self._ordinal)] = rms
        return math.ldexp(rms, self.wide)

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> None:  # fmt: skip
        """Remember the branches, the site's elements and symbol bits, and the inputs beside a switching point of their own."""
        place = (self._micro_batch, self._ordinal)
        self.forms[place] = (numel, width)
        self.branches[place] = (near, symbols(near))
        if self.only_near and width == 2 and numel == self._input.numel():
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


PROVISIONAL = -34  # band exponent of activations while their noise is measured


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


def sample_stride(x: Tensor) -> int:
    """Return the distance between the elements that ``sampled`` takes."""
    return -(-x.numel() // ProbeTape.SAMPLES) or 1


def sampled(x: Tensor) -> Tensor:
    """Return at most ``ProbeTape.SAMPLES`` evenly spaced elements of a flat tensor, float64."""
    return (
        x[:: sample_stride(x)].detach().to(torch.float64, copy=True)
    )  # an operator in place would change a view


@dataclass
class EchoTape:
    """Repeats the branches of a ``ProbeTape`` and measures how far the inputs of decisions moved.

    ``samples``, if given, receives an even sample of each input.
    """

    probe: ProbeTape
    noise: dict[int, float] = field(default_factory=dict[int, float])
    activations: dict[Site, ActivationNoise] = field(default_factory=dict[Site, ActivationNoise])
    samples: dict[tuple[int, int], Tensor] | None = None
    _micro_batch: int = 0
    _ordinal: int = -1

    def start_micro_batch(self, micro_batch: int) -> None:
        """Number the decisions of the next micro-batch from 0."""
        self._micro_batch = micro_batch
        self._ordinal = -1

    def pending(self, x: Tensor) -> bool:
        """Compare the next site's input with the probe's."""
        self._ordinal += 1
        place = (self._micro_batch, self._ordinal)
        before = self.probe.samples.get(place)
        rms = self.probe.rms.get(place, 0.0)
        now = sampled(x)
        if self.samples is not None:
            self.samples[place] = now
        if place in self.probe.near and x.numel():
            before = self.probe.near[place]
            now = x[self.probe.branches[place][0]].detach().to(torch.float64)
        if before is not None and rms > 0.0 and before.numel():
            same = now.shape == before.shape  # else a branch was taken that is no decision
            moved = float((now - before).abs().nan_to_num_(0.0).max()) / rms if same else math.inf
            self.noise[self._ordinal] = max(self.noise.get(self._ordinal, 0.0), moved)
        return place in self.probe.branches

    def band(self, rms: float) -> float:
        """Nothing is searched for."""
        return 0.0

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the probe's branches."""
        return self.probe.branches[(self._micro_batch, self._ordinal)]

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
