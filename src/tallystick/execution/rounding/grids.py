"""Which grid a site of a step gets: scales from what its elements measure, bands and floors from the policy.

Trainer and follower form grids with the same functions. A header states what was used, so nothing here has to agree to the
last bit between machines; what the two may differ by is the follower's to check.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tallystick.errors import InvalidInput
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import MOST_RESIDUE_BITS, Kind
from tallystick.numerics.nearest import NearestGrid
from tallystick.numerics.policy import (
    SMALL_FINER,
    SMALL_SITE,
    SPARSEST,
    ActivationRule,
    Policy,
    hearing_safety,
)
from tallystick.numerics.tensor_measures import block_rms, sample_stride, sampled_rms

ROW_RANGE = 16  # a row's scale exponent lies at most this far below the tensor's largest
ROW_SPREAD = 8.0  # rows are uneven if the largest is this many times the median row
ROW_DIP = 4  # octaves that a row's scale may lie below the whole matrix's, where its noise does too
LOUDER = 4  # octaves above a policy's widest band that the noise of a gradient may ask of residues
DOUBT = 1  # octaves by which a gradient for which a trainer measured anew, or its noise, may be smaller for the follower
CLEAR = -10  # band exponent up to which a gradient that was noise only is heard at any measurement
LOUD = -6  # the band from which on a gradient is hardly more than its noise (docs/adr/0026, 29 and 30)
NOISE_BAND = -1  # band exponent that marks a noise-only gradient; no policy allows it otherwise
STILL = 1  # floor of a decision's grid: what lies exactly on a switching point there was seen never to move; else 0
OUTGROWN = 2  # octaves above the scale at the last calibration, itself at most two too wide, from which on one is due
RISES = (
    OUTGROWN + 1
)  # octaves by which noise that was measured rises with the largest gradient until the next, at most
UNSEEN = -900  # scale exponent of a site that has had no value but zero: it takes the first one's
UNSEEN_SAFETY = 6  # octaves between the smallest band and that of a gradient whose noise is not known yet
UNKNOWN_NOISE = 6  # octaves between the smallest band and that of an activation whose noise is not known yet
Site = tuple[int, int]  # kind and ordinal
AFTER_BACKWARD = frozenset(
    {Kind.GRADIENT, Kind.STATE, Kind.BUFFER}
)  # none is rounded before the optimizer steps
ACTIVATIONS = frozenset({Kind.ACTIVATION, Kind.ACTIVATION_GRADIENT})
REACHED = 3  # bits of residues less than octaves between a gradient's largest element and its quantum
SMALL_BITS = 1  # of residues of few elements, beyond those that a finer quantum takes
SHORTEST_ROW = 16  # where every row has a scale: a scale costs a few bits, the row at least so many
FEWEST_ROWS = 64  # of a matrix that may have a scale for each


def scale_exponents(rms: np.ndarray) -> np.ndarray:
    """Return the smallest ``s`` with ``rms <= 2**s`` for each block, int64; for a zero block the lowest exponent."""
    if rms.size == 1:
        only, power = math.frexp(rms.item())
        return np.full(rms.shape, (power - (only == 0.5)) if only > 0.0 else -1000, dtype=np.int64)
    mantissa, exponent = np.frexp(rms)
    ceiling = np.where(mantissa == 0.5, exponent - 1, exponent)
    return np.where(rms > 0.0, ceiling, -1000).astype(np.int64)


def scale_exponent(rms: float) -> int:
    """Return what ``scale_exponents`` does for one finite number."""
    mantissa, exponent = math.frexp(rms)
    return (exponent - 1 if mantissa == 0.5 else exponent) if rms > 0.0 else -1000


def is_hardly_heard(grid: SiteGrid) -> bool:
    """Whether a gradient that is logged by entries is more than its noise, and hardly more."""
    return not grid.residue_bits and not is_noise_only(grid) and grid.band >= LOUD


def is_noise_only(grid: SiteGrid) -> bool:
    """Whether calibration found this site to be cancellation noise: its grid, never dithered, sends all of it to zero."""
    return grid.scales.size > 0 and grid.band == NOISE_BAND


def may_be_lifted(policy: Policy, kind: int, grid: SiteGrid) -> bool:
    """Whether a buffer's scale may be that of its noise, and not of its values (docs/adr/0050): its band is the widest."""
    return kind == Kind.BUFFER and grid.scales.size > 0 and grid.band == policy.buffer_band[1]


def is_new(before: SiteGrid | None) -> bool:
    """Whether a gradient that was on the grid ``before``, and is heard, is so anew: it was noise, or had no value but zero."""
    return (
        before is None
        or is_noise_only(before)
        or (before.scales.size > 0 and int(before.scales.max()) <= UNSEEN)
    )


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
    wanted = scale_exponent(rms)
    return previous if previous is not None and wanted <= previous <= wanted + 2 else wanted + 1


def scale_limits(
    previous: SiteGrid | None,
    rms: np.ndarray,
    unsure: float,
    kept: np.ndarray | None,
    row_scales: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the largest scales that ``settled_scales`` gives where each block's rms is known up to ``unsure``."""
    before = None if previous is None or is_noise_only(previous) else previous.scales.astype(np.int64)
    if before is not None and before.size != rms.size:
        before = None
    slack = np.maximum(rms * 2.0**-7, unsure)
    both = [settled_scales(before, np.maximum(rms + way * slack, 0.0), row_scales) for way in (-1.0, 1.0)]
    limits = np.minimum(*both), np.maximum(*both)
    return limits if kept is None else (np.maximum(limits[0], kept), np.maximum(limits[1], kept))


def most_blocks(x: Tensor) -> int:
    """Return how many blocks with a scale each a gradient may have: one for each row of a matrix of so many, else one.

    Whoever chooses scales chooses grids: with few elements for each, those that round a gradient where they want it.
    """
    return x.shape[0] if x.dim() > 1 and x.shape[0] >= FEWEST_ROWS else 1


def blocks_for(gradient: Tensor, every_row: bool, spread: float = ROW_SPREAD) -> int:
    """Return how many blocks with a scale each a gradient gets when its noise is measured for the first time.

    One for each row of a large matrix with ``every_row``, else where the largest is more than ``spread`` times the median one.
    """
    if most_blocks(gradient) == 1:
        return 1
    if every_row and gradient[0].numel() >= SHORTEST_ROW:
        return gradient.shape[0]
    rows = block_rms(gradient, gradient.shape[0])
    return gradient.shape[0] if rows.max() > spread * float(np.median(rows)) else 1


def kept_scales(
    base: SiteGrid | None, before: SiteGrid | None, policy: Policy, blocks: int, kind: int = Kind.GRADIENT
) -> np.ndarray | None:
    """Return what the scale of none of a site's ``blocks`` falls below in this step; None if there is no such limit.

    Args:
        base: its grid after the last calibration.
        before: its grid after the step before.
        policy: with a scale for every row the limit is an octave below the lowest scale of the step before. Noise follows
            a gradient up and down, but not into the dip of a single step.
        blocks: of the site now.
        kind: of the site; a buffer's noise, where that is all it is, does not fall with it.
    """
    is_lifted = base is not None and may_be_lifted(policy, kind, base)
    falls = policy.row_scales and not is_lifted
    grid = before if falls else base
    if grid is None or grid.scales.size != blocks or is_noise_only(grid):
        return None
    return np.full(blocks, int(grid.scales.min()) - 1) if falls else grid.scales


def sampled_scale(previous: SiteGrid | None, x: Tensor) -> np.ndarray | None:
    """Return an activation site's scale from an even sample, as ``settled_scales``; None for zeros. Both sides take that one."""
    flat = x.reshape(-1)
    rms = sampled_rms([flat])
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


def decision_exponent(policy: Policy, grid: SiteGrid | None, rms: float) -> int:
    """Return the exponent of a decision's band for an input of size ``rms``."""
    relative = policy.decision_band[0] if grid is None else grid.band
    scale = scale_exponent(rms) if math.isfinite(rms) else 0
    return max(scale + relative, -1000)


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


def floor_exponent(band: int, lowest: int | None, residue_bits: int = 0) -> int:
    """Return the floor that goes with a band: sixteen bands (less with residues), or the policy's own if that is larger."""
    if lowest == -149:
        return -149
    least = band + (2 - residue_bits if residue_bits else SPARSEST)
    return least if lowest is None else max(lowest, least)


def residue_bits_of(policy: Policy, kind: Kind, band: int) -> int:
    """Return the fewest bits of each element's residue that the policy has at a site with that band; 0 for none."""
    if not policy.residue_bits or band == NOISE_BAND:
        return 0
    if kind == Kind.GRADIENT:
        return max(policy.residue_bits, max(band, policy.gradient_band[1]) - policy.gradient_floor + 2)
    return 1 if kind in (Kind.BUFFER, Kind.LOSS) else 0


def with_residue_bits(grid: SiteGrid, x: Tensor, least: int) -> SiteGrid:
    """Return a gradient's grid with as many bits as its largest element needs, and ``least`` at least.

    A result of sixteen bits that falls otherwise moves an element in proportion to its size, by some hundredths at most. So
    residues reach a sixteenth of the largest (docs/adr/0031).
    """
    low, high = torch.aminmax(x.detach().reshape(grid.scales.size, -1), dim=1)
    largest = torch.maximum(-low, high).double().cpu().numpy()
    ratio = float((largest * np.exp2(-grid.scales.astype(np.float64))).max())
    bits = bits_for(grid, scale_exponent(ratio) if math.isfinite(ratio) else grid.floor, least)
    return grid if grid.residue_bits == bits else replace(grid, residue_bits=bits)


def bits_for(grid: SiteGrid, largest: int, least: int) -> int:
    """Return the bits of residues where the largest element lies below ``2**largest`` times its scale."""
    return min(MOST_RESIDUE_BITS, max(least, largest - grid.floor - REACHED, grid.band - grid.floor + 2))


def loudest_band(policy: Policy, *, was_noise: bool) -> int:
    """Return the largest band exponent that the noise of a gradient may ask for; one louder is nothing but noise.

    One that was nothing but noise when it was last measured is heard again where it is clearly more: what stays near either
    limit is heard or silent, not both in turns (docs/adr/0026, point 30).
    """
    highest = policy.gradient_band[1]
    if policy.residue_bits:
        return highest + LOUDER
    return min(LOUD, highest) if was_noise else highest


def reach_of(grid: SiteGrid) -> float:
    """Return the band of a site, over its scale: with residues of several bits a quarter of how far they reach."""
    if grid.residue_bits < 2:
        return math.ldexp(1.0, grid.band)
    return math.ldexp((1 << grid.residue_bits - 1) - 0.5, grid.floor - 2)


def site_grid(policy: Policy, kind: Kind, band: int, scales: np.ndarray) -> SiteGrid:
    """Return the grid that the policy prescribes for a site whose noise needs that band.

    Residues cost the same whatever the band, so theirs is the widest that they are for.
    """
    form = expected_form(policy, kind)
    assert form is not None
    precision, dithered, _ = form
    bits = residue_bits_of(policy, kind, band)
    floor = floor_exponent(band, lowest_floor(policy, kind, band), bits)
    if bits:
        band = policy.gradient_band[1] if kind == Kind.GRADIENT else floor + bits - 2
    return SiteGrid(precision, band, floor, dithered and band != NOISE_BAND, scales, residue_bits=bits)


def held_grids(
    policy: Policy,
    before: GridTable,
    measured: GridTable,
    outgrown: frozenset[int] = frozenset(),
    base: GridTable | None = None,
    largest: Mapping[int, float] | None = None,
) -> GridTable:
    """Return the grids of a step whose noise was just measured, where none are to be chosen, from those ``before`` it.

    What is rounded stays on its quanta, coarser where new noise asks for it. Only bands follow the noise. A gradient stays
    what it was, heard or nothing but noise, but if it is one of those that have ``outgrown`` that, or if its noise, of that
    ``largest`` deviation, is too loud for its scale; noise by the floor of ``base``, which was measured: the one before may have
    risen with the largest gradient.
    """
    grids: dict[tuple[int, int], SiteGrid] = {}
    for at, grid in measured.sites.items():
        old = before.sites.get(at)
        grids[at] = held_grid(policy, Kind(at[0]), old, grid, has_outgrown=at[1] in outgrown)
        first = None if base is None else base.sites.get(at)
        if (
            grids[at] is old
            and old is not None
            and at[0] == Kind.GRADIENT
            and keeps_hearing(policy, old, grid)
        ):
            if is_noise_only(old):
                grids[at] = first if first is not None and is_noise_only(first) else old
            else:
                grids[at] = still_heard(policy, old, (largest or {}).get(at[1], 0.0)) or grid
    return GridTable(grids)


def still_heard(policy: Policy, before: SiteGrid, largest: float, doubt: int = 0) -> SiteGrid | None:
    """Return the grid of a gradient that stays heard, its noise having that ``largest`` deviation; None where it is too loud.

    Where grids are not chosen it keeps its scales, and the band follows its noise over these: a batch whose gradient happens to
    be small has no more of it. ``doubt`` is by how many octaves another machine's may be larger.
    """
    if is_noise_only(before) or not before.scales.size:
        return None
    noise = scale_exponent(largest) + doubt + hearing_safety(policy) if largest > 0.0 else UNSEEN
    band = max(before.band, noise - int(before.scales.max()))
    if band > policy.gradient_band[1]:
        return None
    wider = replace(before, band=band)
    return replace(wider, floor=held_floor(before, wider))


def keeps_hearing(policy: Policy, before: SiteGrid, grid: SiteGrid, clear: int = CLEAR) -> bool:
    """Whether a gradient stays heard or silent, as its grid ``before``, though ``grid`` was measured where none are chosen.

    Not one that no step had before, nor one that is a signal beyond doubt, of a band of ``clear`` at most: a layer that had no
    gradient when grids were chosen. And not with residues, which hear noise as well.
    """
    is_known = before.scales.size > 0 and int(before.scales.max()) > UNSEEN
    if not is_known or policy.residue_bits or is_noise_only(before) == is_noise_only(grid):
        return False
    return is_noise_only(grid) or grid.band > clear


def held_grid(
    policy: Policy, kind: Kind, before: SiteGrid | None, grid: SiteGrid, *, has_outgrown: bool = False
) -> SiteGrid:
    """Return one site's: ``grid`` is the one measured.

    That is taken of a decision, of a gradient that is noise only, but for one that has not outgrown being heard, and where there
    was none. Any other site's quantum follows its band, and only becomes coarser; an activation that is passed through stays so.
    """
    if before is None or kind == Kind.DECISION or before.scales.size != grid.scales.size:
        return grid
    if kind != Kind.GRADIENT:
        if may_be_lifted(policy, kind, grid):  # over another scale the same noise asks for another band
            rise = int(grid.scales[0]) - int(before.scales[0])
            if rise > 0:
                return grid
            grid = site_grid(policy, kind, max(grid.band + rise, policy.buffer_band[0]), before.scales)
        return before if grid.band <= before.band else grid.with_scales(before.scales)
    if keeps_hearing(policy, before, grid) and not has_outgrown:
        return before
    if is_noise_only(grid) or is_new(before):
        return grid
    if is_loud(policy, before, grid.band):
        return before
    return replace(grid.with_scales(before.scales), floor=held_floor(before, grid))


def is_loud(policy: Policy, before: SiteGrid, band: int) -> bool:
    """Whether a gradient's grid, that ``before``, is coarser than the policy has it for this band: its floor follows its noise.

    It could not fall with the band without being chosen, so the band stays too.
    """
    coarsest = site_grid(policy, Kind.GRADIENT, band, before.scales).floor
    return not before.residue_bits and before.floor > coarsest


def held_floor(before: SiteGrid, grid: SiteGrid) -> int:
    """Return the floor of a gradient whose floor was that ``before``, on a grid of this band where none are chosen.

    With residues the band says nothing of the noise, and one of few elements has either of two floors.
    """
    forced = grid.floor if grid.residue_bits else grid.band + SPARSEST
    return max(before.floor, forced)


def unseen_grid(policy: Policy, kind: Kind, scales: np.ndarray) -> SiteGrid:
    """Return the grid of a site whose noise is not known yet; a gradient's band is on the safe side."""
    form = expected_form(policy, kind)
    assert form is not None
    _, _, (lowest, highest) = form
    band = min(highest, lowest + UNSEEN_SAFETY) if kind == Kind.GRADIENT else lowest
    return site_grid(policy, kind, band, scales)


def is_quantum_noise(policy: Policy, base: SiteGrid, numel: int) -> bool:
    """Whether a gradient of few elements is as large as its noise happens to be, as its quantum says."""
    is_loud = base.floor > policy.gradient_floor - SMALL_FINER
    return base.residue_bits > 0 and numel < SMALL_SITE and is_loud


def rise_since(policy: Policy, base: GridTable, heard: Mapping[Site, int], scales: Mapping[Site, int]) -> int:
    """Return by how many octaves the largest of the gradients ``heard``, now of these ``scales``, has grown since ``base``.

    Of those count that were more than noise when the noise was measured, and are not mostly noise: one that grows far is measured
    again, so noise rises by ``RISES`` octaves at most. ``heard`` has their numbers of elements.
    """
    known = {place: base.sites[Kind(place[0]), place[1]] for place in heard if place in base.sites}
    counts = [
        place
        for place, grid in known.items()
        if not is_noise_only(grid) and not is_quantum_noise(policy, grid, heard[place])
    ]
    if not counts:
        return 0
    old = max(int(known[place].scales.max()) for place in counts)
    return max(0, min(max(scales[place] for place in counts) - old, RISES)) if old > UNSEEN else 0


def sampled(x: Tensor) -> Tensor:
    """Return at most ``SAMPLES`` evenly spaced elements of a flat tensor, float64."""
    return (
        x[:: sample_stride(x)].detach().to(torch.float64, copy=True)
    )  # an operator in place would change a view
