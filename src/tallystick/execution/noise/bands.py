"""Bands chosen from measured noise.

The band of a site is the largest deviation seen, times the policy's safety factor, rounded up to a power of two and never below
the policy's smallest. A gradient that is nothing but noise gets a floor that sends it to zero on both sides (numerics: trap 2).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tallystick.errors import Nondeterminism
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.noise.buffers import lifted_grid
from tallystick.execution.noise.deviations import Deviations
from tallystick.execution.noise.measured import Calibration, SiteNoise, Threshold, exponent_above
from tallystick.execution.noise.probes import ActivationNoise, ProbingContext
from tallystick.execution.noise.safety import decision_band, safety_for, within_room
from tallystick.execution.rounding.grids import (
    NOISE_BAND,
    ROW_SPREAD,
    SHORTEST_ROW,
    SMALL_BITS,
    STILL,
    UNSEEN,
    activation_grid,
    activation_rule,
    expected_form,
    is_noise_only,
    kept_scales,
    loudest_band,
    may_be_lifted,
    row_scales_of,
    settled_scales,
    site_grid,
    unseen_grid,
)
from tallystick.execution.session.session import Session
from tallystick.execution.session.sites import Site
from tallystick.numerics.budget import chosen_floor, coarsest_quantum
from tallystick.numerics.grid_table import GridTable, SiteGrid, SiteKey
from tallystick.numerics.log import MOST_RESIDUE_BITS, Kind
from tallystick.numerics.nearest import adapt_threshold, closed_threshold
from tallystick.numerics.policy import PER_KIND, SMALL_FINER, SMALL_SITE, Policy, hearing_safety

FEWEST = 8  # elements of a gradient below which one repetition says next to nothing of its noise
MOSTLY = 0.25  # of its scale, the noise of a buffer from which on it is nothing else
OF_LOSSES = (
    "; it is nearly nothing beside its terms: give them .float() and add a constant, which moves no gradient"
)
OF_LOUD = "; a batch of more samples has less of it, and policy fp64"
MORE_HERE = 2  # octaves that noise may be louder for an auditor than for the trainer, who refuses the run from there on
STATE_SAFETY = (
    2  # factor, as a power of two, over the optimizer's measured noise: few operations, no long sums
)


def choose_grids(
    session: Session,
    seen: Deviations,
    decisions: dict[int, float],
    *,
    earlier: GridTable | None = None,
    measure_states: bool = False,
    for_audit: bool = False,
) -> Calibration:
    """Return the grids that follow from the deviations ``seen`` and, by ordinal, those of decisions' inputs.

    ``earlier`` are the grids of the measurement before; None for the session's own.

    The optimizer's noise is measured where the session has no grids of state sites yet, or if ``measure_states``. A measurement
    ``for_audit`` refuses no buffer and no loss, and of decisions and the optimizer nothing that is up to ``MORE_HERE`` octaves
    louder than the policy has it.

    Raises:
        Nondeterminism: a site is too noisy for the policy; by name.
    """
    policy, known = session.policy, session.table if earlier is None else earlier
    more = MORE_HERE if for_audit else 0
    grids = dict(session.table.sites)
    noise = dict(seen.noise)
    loudest = max((n.largest for (kind, _), n in noise.items() if kind == Kind.GRADIENT), default=0.0)
    for place, measured in seen.noise.items():
        if not session.step and place[0] == Kind.GRADIENT:
            put_in_one_block(policy, measured)
        if policy.row_scales and place[0] == Kind.GRADIENT:
            choose_rows(policy, measured, session.table.sites.get(place))
        # Its float64 reference may be a last bit of that: no noise that a float32 machine has.
        is_zero = measured.rms == 0.0 and exponent_above(measured.largest) < exponent_above(loudest)
        if place[0] == Kind.GRADIENT and is_zero and loudest > 0.0:
            grids[place] = zero_grid(policy, measured, known.sites.get(place), loudest)
        else:
            grids[place] = _grid_for(session, place, measured, known.sites.get(place), for_audit=for_audit)
    grids |= finer_grids(policy, seen.noise, grids)
    grids |= _defaults(session, grids)
    states: dict[Site, float] = {}
    if not session.arithmetic.is_portable and (
        measure_states or not any(kind == Kind.STATE for kind, _ in session.table.sites)
    ):
        for position, (typical, largest, mean) in enumerate(_state_noise(session, seen.first)):
            place = (Kind.STATE, position)
            states[place] = mean
            lowest, highest = policy.state_band
            if exponent_above(typical) + STATE_SAFETY > highest + more:
                raise Nondeterminism(
                    f"{session.site_name(place)}: the optimizer's noise is {typical:.2g} of the value, "
                    f"{policy.allows} 2**{highest - STATE_SAFETY}; is it an elementwise optimizer?"
                )
            band = min(highest, max(lowest, exponent_above(largest) + STATE_SAFETY))
            grids[place] = SiteGrid(24, band, -149)
    _measure_decisions(policy, decisions, grids, noise, more)
    return Calibration(noise, GridTable(grids), states=states)


def _measure_decisions(
    policy: Policy,
    decisions: dict[int, float],
    grids: dict[SiteKey | tuple[Kind, int], SiteGrid],
    noise: dict[Site, SiteNoise],
    more: int,
) -> None:
    """Put the bands and the noise of decisions into ``grids`` and ``noise``.

    Raises:
        Nondeterminism: the input of one is too noisy for the policy, by ``more`` octaves than those.
    """
    lowest, highest = policy.decision_band
    for ordinal, relative in decisions.items():
        band = decision_band(policy, relative)
        place = (Kind.DECISION, ordinal)
        if highest < band <= highest + more:
            band = highest
        if band > highest:
            why = (
                f"moves by {relative:.2g} of its rms under last-bit noise, {policy.allows} "
                f"2**{highest if policy.residue_bits else highest - 1}"
                if math.isfinite(relative)
                else "is all zeros, and something else under last-bit noise: is a constant normalised before it, or a value "
                "compared with one that is the same (a policy with its own reference)?"
            )
            raise Nondeterminism(f"decision {ordinal}: its input {why}")
        grids.pop(place, None)
        if band > lowest:
            grids[place] = SiteGrid(0, band, 0)
        noise[place] = SiteNoise(relative, np.zeros(0, dtype=np.int64), 0.0, 0.0)


def with_still(
    policy: Policy, table: GridTable, decisions: Collection[int], still: frozenset[int]
) -> GridTable:
    """Return ``table`` with what was seen of elements that lie exactly on a switching point, for decisions just measured."""
    grids = dict(table.sites)
    for ordinal in still.union(decisions):
        place = (Kind.DECISION, ordinal)
        grid = grids.get(place)
        if ordinal in still:
            grids[place] = SiteGrid(0, policy.decision_band[0] if grid is None else grid.band, STILL)
        elif grid is not None and grid.floor == STILL:
            grids[place] = SiteGrid(0, grid.band, 0)
    return GridTable(grids)


def put_in_one_block(policy: Policy, measured: SiteNoise) -> None:
    """Give one scale to a gradient whose rows are uneven in a run's first step, where all there is of it is rounding errors.

    How these lie on rows is another thing on each machine, and a trainer that may choose chooses what is trained later: with
    a scale for each row what is in small ones is heard.
    """
    blocks = measured.scales.size
    if blocks == 1 or measured.largest < measured.rms or measured.block_rms is None:
        return
    if policy.row_scales and measured.elements // blocks >= SHORTEST_ROW:
        return  # it has them whatever lies on its rows
    measured.scales = settled_scales(None, np.array([measured.rms]), policy.row_scales)
    measured.relative = math.ldexp(measured.largest, -int(measured.scales[0]))
    measured.block_rms, measured.block_largest = np.array([measured.rms]), np.array([measured.largest])
    measured.block_mean = np.array([measured.block_mean.mean()])


def choose_rows(policy: Policy, measured: SiteNoise, previous: SiteGrid | None) -> None:
    """Let the scales of small rows lie below the whole matrix's where the noise does: where that costs no wider band.

    Where rows differ much, as those of an embedding do, it may cost an octave: it buys up to ``ROW_DIP`` for most rows.
    """
    rms, largest = measured.block_rms, measured.block_largest
    if rms is None or largest is None or not rms.any():
        return
    kept = kept_scales(None, previous, policy, rms.size)
    found: dict[bool, tuple[np.ndarray, float]] = {}
    for dips in (False, True):
        scales = row_scales_of(rms, dips)
        scales = scales if kept is None else np.maximum(scales, kept)
        found[dips] = scales, float(np.max(largest * np.exp2(-scales.astype(np.float64))))
    uneven = float(rms.max()) > ROW_SPREAD * float(np.median(rms))
    follows = exponent_above(found[True][1]) <= exponent_above(found[False][1]) + uneven
    measured.scales, measured.relative = found[follows]


def _grid_for(
    session: Session, place: Site, measured: SiteNoise, previous: SiteGrid | None, *, for_audit: bool
) -> SiteGrid:
    """Return a site's grid; of a loss that is too loud for its policy an auditor takes the widest: nothing moves by it."""
    policy = session.policy
    if place[0] == Kind.GRADIENT and measured.rms == 0.0 and measured.largest == 0.0:
        return previous or unseen_grid(policy, Kind.GRADIENT, measured.scales)
    is_zero = place[0] == Kind.BUFFER and measured.rms == 0.0 and measured.largest > 0.0
    grid = None if is_zero else grid_for(policy, place[0], measured, previous)
    if _is_lucky(policy, measured, grid, previous):
        assert previous is not None
        return previous
    if grid is None and place[0] == Kind.BUFFER and (for_audit or _is_noise(policy, measured, previous)):
        return lifted_grid(policy, measured)
    if grid is None:
        form = expected_form(policy, place[0])
        assert form is not None
        if for_audit and place[0] == Kind.LOSS:
            return site_grid(policy, Kind.LOSS, form[2][1], measured.scales)
        highest = form[2][1] - safety_for(policy, measured)
        of_buffers = OF_LOUD if policy.compute == "float32" else ""
        remedy = OF_LOSSES if place[0] == Kind.LOSS else of_buffers
        raise Nondeterminism(
            f"{session.site_name(place)}: its noise is 2**{exponent_above(measured.relative)} of its scale, "
            f"{policy.allows} 2**{highest}{remedy}"
        )
    return grid


def _is_noise(policy: Policy, measured: SiteNoise, previous: SiteGrid | None) -> bool:
    """Whether a buffer that is too loud for the policy is as loud because its values cancel, and not because what it averages is.

    What was nothing else, or was near it, when it was measured last may be more by now.
    """
    was_near = previous is not None and may_be_lifted(policy, Kind.BUFFER, previous)
    return measured.rms == 0.0 or was_near or measured.cancels or measured.relative >= MOSTLY


def _is_lucky(policy: Policy, measured: SiteNoise, grid: SiteGrid | None, previous: SiteGrid | None) -> bool:
    """Whether a gradient of very few elements, known to be noise, only seems to be more: it is no larger than noise was.

    A sum that cancels may move by nothing but its own last bit in one repetition. The floor lies the safety factor above what
    noise was, or an octave above values that were too small beside theirs.
    """
    if policy.residue_bits or previous is None or not is_noise_only(previous) or measured.elements >= FEWEST:
        return False
    floor = int(previous.scales.min()) + previous.band
    is_small = exponent_above(measured.rms) <= floor - policy.safety + 1
    return is_small and grid is not None and not is_noise_only(grid)


def zero_grid(policy: Policy, measured: SiteNoise, previous: SiteGrid | None, loudest: float) -> SiteGrid:
    """Return the grid of a gradient that was exactly zero and did not move: noise only, up to the step's ``loudest`` noise.

    Sums that cancel to zero here leave their last bits elsewhere, and nothing but the rest of the step says how large those
    are. A gradient that had values before keeps its grid.
    """
    if previous is not None and not is_noise_only(previous) and int(previous.scales.max()) > UNSEEN:
        return previous
    floor = exponent_above(loudest) + policy.safety
    return site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.full(measured.scales.size, floor - NOISE_BAND))


def grid_for(
    policy: Policy, kind: Kind, measured: SiteNoise, previous: SiteGrid | None = None
) -> SiteGrid | None:
    """Return the grid that ``policy`` gives a gradient, buffer or loss site of this noise; None if it is too loud.

    A gradient that is too loud is noise only: what little signal it has is not worth its noise. Of few elements residues have
    all the bits there are, and a finer quantum where they are quiet: a bias before a batch norm, whose next deviation may be
    twenty times those seen, is followed whatever it is. ``previous`` is the site's grid so far.
    """
    form = expected_form(policy, kind)
    assert form is not None
    _, _, (lowest, highest) = form
    noise = exponent_above(measured.relative)
    band = max(lowest, noise + safety_for(policy, measured))
    is_few = policy.residue_bits > 0 and kind == Kind.GRADIENT and measured.elements < SMALL_SITE
    finer = SMALL_FINER if is_few and band <= highest else 0
    if kind == Kind.GRADIENT:
        highest = loudest_band(policy, was_noise=previous is not None and is_noise_only(previous))
    if policy.residue_bits:
        band = within_room(band, noise, highest, previous, measured.elements)
        band += band == NOISE_BAND  # which means something else; residues have a bit more instead
    if kind == Kind.GRADIENT and not policy.residue_bits and noise + hearing_safety(policy) <= highest:
        band = min(band, highest)  # whatever safety was chosen over the policy's own
    if band <= highest and not (kind == Kind.GRADIENT and measured.rms == 0.0):
        grid = site_grid(policy, kind, band, measured.scales)
        bits = grid.residue_bits + finer + SMALL_BITS if finer else MOST_RESIDUE_BITS
        return replace(grid, floor=grid.floor - finer, residue_bits=bits) if is_few else grid
    if kind != Kind.GRADIENT:
        return None
    allowance = exponent_above(measured.largest) + policy.safety
    floor = max(
        allowance, exponent_above(measured.rms) + 1
    )  # an octave, lest it is as large as its floor elsewhere
    return site_grid(
        policy, kind, NOISE_BAND, np.full(measured.scales.size, floor - NOISE_BAND, dtype=np.int64)
    )


def with_activations(
    session: Session, chosen: Calibration, probe: ProbingContext, seen: dict[tuple[int, int], ActivationNoise]
) -> Calibration:
    """Add the bands of activations and of their gradients, for each layer or the widest of each kind of layer.

    The band is the larger of what the measured divergence asks for and what the straddles do (they are counted over
    all elements, the divergence over a sample), times the safety factor.
    """
    rule = activation_rule(session.policy)
    assert session.leaves is not None
    layers, names = session.leaves.layers, session.leaves.names
    bands: dict[tuple[int, int], int] = {}
    widest: dict[tuple[int, str], int] = {}
    for place, noise in seen.items():
        relative = max(noise.relative, noise.reach)
        bands[place] = max(rule.band[0], exponent_above(relative) + session.policy.safety)
        chosen.noise[(Kind(place[0]), place[1])] = SiteNoise(relative, probe.scales[place], 0.0, 0.0)
        if bands[place] <= rule.band[1]:
            kind = (place[0], layers[place])
            widest[kind] = max(bands[place], widest.get(kind, bands[place]))
        mean = noise.total / max(noise.seen, 1)
        chosen.thresholds.append(
            Threshold(
                names[place], layers[place], place[0] == Kind.ACTIVATION_GRADIENT,
                adapt_threshold(noise.straddles), closed_threshold(noise.quanta), mean, len(noise.straddles),
            )
        )  # fmt: skip
    grids = dict(chosen.table.sites)
    for place, own in bands.items():
        band = own
        if band > rule.band[1]:
            band = NOISE_BAND
        elif rule.tau == PER_KIND:
            band = widest[(place[0], layers[place])]
        grids[place] = activation_grid(rule, band, probe.scales[place])
    corrections = {place: noise.total / max(noise.seen, 1) for place, noise in seen.items()}
    return replace(chosen, table=GridTable(grids), corrections=corrections)


def _defaults(session: Session, grids: dict[tuple[int, int], SiteGrid]) -> dict[tuple[int, int], SiteGrid]:
    """Grids of sites that had no value in this step: unused parameters, buffers that did not move."""
    found: dict[tuple[int, int], SiteGrid] = {}
    for site in session.sites:
        place = (site.kind, site.ordinal)
        if place in grids:
            continue
        found[place] = unseen_grid(
            session.policy, site.kind, np.full(0 if site.kind == Kind.STATE else 1, UNSEEN)
        )
    return found


def _state_noise(session: Session, gradients: list[Tensor | None]) -> list[tuple[float, float, float]]:
    """Return, per state site, the optimizer's deviation relative to the larger of old and new value.

    The first number holds for 99 elements in a hundred: where momentum cancels over a tiny weight the largest,
    the second number, says little about the others. The third is the mean.
    """
    old, new = (
        session.trained.replica_step(1, None, gradients),
        session.trained.replica_step(2, None, gradients),
    )
    jittered = session.trained.replica_step(2, Jitter(17), gradients)
    found: list[tuple[float, float, float]] = []
    for position in range(len(session.parameters)):
        for key in ("parameter", *session.trained.keys):
            x, y, was = new[position].get(key), jittered[position].get(key), old[position].get(key)
            if (
                not isinstance(x, Tensor)
                or not isinstance(y, Tensor)
                or not isinstance(was, Tensor)
                or not x.numel()
            ):
                found.append((0.0, 0.0, 0.0))
                continue
            size = torch.maximum(x.abs(), was.abs()).double()
            ratio = torch.where(size > 0.0, (x.double() - y.double()).abs() / size, 0.0).reshape(-1)
            ratio = ratio.nan_to_num_(nan=math.inf)
            typical = float(ratio.sort().values[(ratio.numel() * 99 - 1) // 100])
            found.append((typical, float(ratio.max()), float(ratio.mean())))
    return found


def finer_grids(
    policy: Policy, noise: Mapping[Site, SiteNoise], grids: Mapping[SiteKey, SiteGrid]
) -> dict[tuple[Kind, int], SiteGrid]:
    """Return the gradients' ``grids`` that ``gradient_steer`` wants finer, as far as their bands allow.

    Small tensors with large gradients, and rows of rare tokens, are worth more than all others together.
    """
    measured = [
        (Kind(place[0]), place[1]) for place in noise if place[0] == Kind.GRADIENT and noise[place].rms > 0.0
    ]
    heard = {at: grids[at] for at in measured if not is_noise_only(grids[at])}
    coarsest = coarsest_quantum(policy, [(noise[at].elements, grid.scales) for at, grid in heard.items()])
    finer = {
        at: replace(grid, floor=chosen_floor(policy, grid, coarsest, noise[at].elements))
        for at, grid in heard.items()
    }
    return finer if coarsest is not None else {}
