"""What a step asks of its rounding context, and the context that records.

Rounding contexts are the one place where recording, following and measuring differ: a step asks its context to round a site or
to take a decision, and does not know which of the three it is talking to. ``RecordingContext`` writes the step's log frame;
``FollowingContext`` (``following``) reads one and notes every entry that honest arithmetic could not have written;
``ProbingContext`` and ``EchoingContext`` (``noise.probes``) measure noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tallystick.execution.dispatch.decisions import DecisionContext
from tallystick.execution.rounding.grids import (
    AFTER_BACKWARD,
    NOISE_BAND,
    OUTGROWN,
    STILL,
    UNKNOWN_NOISE,
    UNSEEN,
    Site,
    activation_grid,
    activation_rule,
    decision_exponent,
    is_noise_only,
    is_quantum_noise,
    kept_scales,
    loudest_band,
    may_be_lifted,
    nearest_grid,
    rise_since,
    row_scales_of,
    sampled_scale,
    scale_exponents,
    settled_scales,
    site_grid,
    with_residue_bits,
)
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import (
    CALIBRATED,
    Frame,
    Kind,
    SiteAddress,
    SparseEntries,
    encode,
    encode_decision,
    encode_frame,
    encode_residues,
)
from tallystick.numerics.nearest_tensors import record_nearest
from tallystick.numerics.policy import ActivationRule, Policy
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.numerics.rounding import round_recorded, round_recorded_residues
from tallystick.numerics.tensor_measures import block_rms

NEVER = 1 << 20  # an exponent that no size has


class RoundingContext(DecisionContext, Protocol):
    """A context of one step."""

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


@dataclass
class RecordingContext:
    """Writes one step's frame.

    ``table`` holds the grids before the step, ``current`` those calibrated since, if any; after
    ``finish``, ``table`` holds the grids after the step. No scale falls below that of ``base``, the grids of the last
    calibration: where a batch happens to give a small gradient, the noise does not get smaller with it. ``extra`` says that
    the noise was measured before this step although that was not due, ``is_first`` that no step was before. ``chooses`` says
    whether grids are chosen anew where the noise is measured.
    """

    policy: Policy
    table: GridTable
    current: GridTable | None = None
    base: GridTable = field(default_factory=GridTable)
    rank: int = 0
    extra: bool = False
    is_first: bool = False
    chooses: bool = True
    payloads: dict[SiteAddress, bytes] = field(default_factory=dict[SiteAddress, bytes])
    _micro_batch: int = 0
    _ordinal: int = -1
    _band_exponent: int = 0
    _is_in_part: bool = False

    def __post_init__(self) -> None:
        self._before = self.table
        self._start()

    def _start(self) -> None:
        if self.current is not None:
            self.table = self.current
        self._grids = dict(self.table.sites)
        self._rounded: dict[Site, int] = {}
        self._settled: set[Site] = set()

    @property
    def is_calibrated(self) -> bool:
        """Whether the noise was measured before this step."""
        return not self.base.sites

    def restart(self, measured: GridTable, *, is_due: bool = False) -> None:
        """Forget what was logged, and log the step again from its beginning on grids just measured for it.

        ``is_due`` is whether they were to be measured in this step; the first grids of all are those before it too.
        """
        self.payloads.clear()
        if self.is_first:
            self._before = measured
        self.table, self.current, self.base, self.extra = self._before, measured, GridTable(), not is_due
        self._start()

    def regrid(self, measured: GridTable) -> None:
        """Round gradients, and what follows from them, on grids just measured; what was rounded before stays on its own."""
        later = {place: grid for place, grid in measured.sites.items() if place[0] in AFTER_BACKWARD}
        self._grids |= later
        self.table, self.base, self.extra = GridTable({**self.table.sites, **later}), GridTable(), True
        self._is_in_part = True

    def start_micro_batch(self, micro_batch: int) -> None:
        """Number the decisions of the next micro-batch from 0."""
        self._micro_batch = micro_batch
        self._ordinal = -1

    def pending(self, x: Tensor) -> bool:
        """Go to the next site; every site may have something to log."""
        self._ordinal += 1
        return True

    def band(self, rms: float, widest: float = math.inf) -> float:
        """Return the site's band: its calibrated exponent over the input's scale, ``widest`` at most."""
        self._band_exponent = decision_exponent(
            self.policy, self._grids.get((Kind.DECISION, self._ordinal)), rms
        )
        return min(math.ldexp(1.0, self._band_exponent), widest)

    def omits_exact(self) -> bool:
        """Whether calibration saw nothing move that lay exactly on a switching point; of a site it has not seen, log all."""
        grid = self._grids.get((Kind.DECISION, self._ordinal))
        return grid is not None and grid.floor == STILL

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Log the branches taken at the ambiguous elements; they are the caller's own, so there is nothing to obey."""
        if near.numel() == 0:
            return None
        entries = SparseEntries(numel, width, near.cpu().numpy(), symbols(near).cpu().numpy())
        address = SiteAddress(self.rank, self._micro_batch, Kind.DECISION, self._ordinal)
        self.payloads[address] = encode_decision(self._band_exponent, entries)
        return None

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        """Round, logging the ambiguous elements; the site's scales follow its size."""
        grid = self._grids[(kind, ordinal)]
        if is_noise_only(grid):
            grid = self._with_signal(ordinal, grid, x)
            grid = self._grids[(kind, ordinal)] = self._with_reach(ordinal, grid, x)
        elif grid.scales.size:
            rms = block_rms(x, grid.scales.size)
            place = (kind, ordinal)
            base, before = (
                self.base.sites.get(place),
                None if self.is_first else self._before.sites.get(place),
            )
            scales = self._scales(kind, grid, before, rms) if rms.any() else grid.scales
            if self.is_calibrated and not self.chooses and kind == Kind.GRADIENT and not grid.residue_bits:
                base = before  # until grids are chosen again no scale falls: a band follows the noise over it
            kept = kept_scales(base, before, self.policy, grid.scales.size, kind)
            scales = scales if kept is None else np.maximum(scales, kept)
            if (scales != grid.scales).any():
                grid = self._grids[place] = grid.with_scales(scales)
            if kind == Kind.GRADIENT and grid.residue_bits:
                grid = self._grids[place] = self._with_reach(ordinal, grid, x)
            if kind == Kind.GRADIENT:
                self._rounded[(kind, ordinal)] = x.numel()
        address = SiteAddress(self.rank, 0, kind, ordinal)
        if grid.residue_bits:
            if x.numel():
                residues = round_recorded_residues(x, grid, out=out, key=key, name=name)
                self.payloads[address] = encode_residues(residues)
            return
        entries = round_recorded(x, grid, out=out, old=old, key=key, name=name)
        if is_noise_only(grid):
            out.zero_()  # also of few values among many zeros, which are larger than what all are
        elif len(entries):
            self.payloads[address] = encode(entries)

    def _scales(self, kind: Kind, grid: SiteGrid, before: SiteGrid | None, rms: np.ndarray) -> np.ndarray:
        """Return the scales that follow from a site's own values, its ``grid``, and the one ``before`` this step.

        In a step for which grids were chosen, a gradient's settle from those before, and no others are larger than those would
        be: the measured ones belong to one pass over the step's batch, and a loop of one's own may take it in parts, clip it, or
        weigh it otherwise. Under autocast the measured ones of small rows stay, as far as they belong to such values.
        """
        rows, measured = self.policy.row_scales, grid.scales.astype(np.int64)
        if self.is_calibrated and may_be_lifted(self.policy, kind, grid):
            return np.maximum(measured, scale_exponents(rms))
        was_heard = before is not None and not is_noise_only(before)
        chosen = self.is_calibrated and (self.chooses or not was_heard)
        if rows and chosen and (kind in AFTER_BACKWARD or not self._is_in_part):
            return np.maximum(
                settled_scales(measured, rms, rows), np.minimum(measured, row_scales_of(rms, dips=False) + 1)
            )
        if rows or not chosen:
            return settled_scales(measured, rms, rows)
        known = was_heard and before is not None and before.scales.size == rms.size
        last = before.scales.astype(np.int64) if known and before is not None else None
        settled = settled_scales(last, rms)
        return settled if kind == Kind.GRADIENT else np.minimum(settled, settled_scales(measured, rms))

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

    def _with_reach(self, ordinal: int, grid: SiteGrid, x: Tensor) -> SiteGrid:
        """Return a gradient's grid with the bits that its residues need in this step; the last calibration says how few."""
        if not grid.residue_bits or not x.numel():
            return grid
        base = self.base.sites.get((Kind.GRADIENT, ordinal))
        measured = grid.residue_bits if self.is_calibrated else 0 if base is None else base.residue_bits
        return with_residue_bits(grid, x, max(measured, self.policy.residue_bits))

    def _with_signal(self, ordinal: int, grid: SiteGrid, x: Tensor) -> SiteGrid:
        """Return the grid of a gradient that was noise only: another one where its values have outgrown that noise.

        What was measured stays its absolute noise, risen with the step's largest gradient at most; from it and the new scale
        follows the band, as far as the policy goes. Its grid's floor may lie higher, above values that were too large to be
        silent under that and too small to be heard.
        """
        size, base = int(scale_exponents(block_rms(x, 1))[0]), self.base.sites.get((Kind.GRADIENT, ordinal))
        noise = int(grid.scales.min()) + grid.band
        if base is not None and is_noise_only(base):
            measured = int(base.scales.min()) + base.band
            if size < min(noise, measured):
                return grid
            noise = min(noise, measured + self._risen())
        if size < noise:
            return grid
        lowest, highest = self.policy.gradient_band[0], loudest_band(self.policy, was_noise=True)
        scales = settled_scales(None, block_rms(x, grid.scales.size), self.policy.row_scales)
        band = max(lowest, noise - int(scales.max()))
        band += band == NOISE_BAND  # which means something else
        if band > highest:
            return grid.with_scales(np.full(grid.scales.size, size + 1 - NOISE_BAND))
        return site_grid(self.policy, Kind.GRADIENT, band, scales)

    def _risen(self) -> int:
        """Return by how many octaves noise may have risen with the step's largest gradient since it was measured."""
        scales = {place: int(self._grids[place].scales.max()) for place in self._rounded}
        return rise_since(self.policy, self.base, self._rounded, scales)

    def _moved(self) -> int:
        """Return by how many octaves the step's largest gradient differs from what the grids chosen for it say."""
        old = max((int(self.table.sites[place].scales.max()) for place in self._rounded), default=UNSEEN)
        return (
            0 if old == UNSEEN else max(int(self._grids[place].scales.max()) for place in self._rounded) - old
        )

    def settle_noise(self) -> None:
        """Move the scales of noise-only gradients with the largest gradient scale; call after the others are rounded.

        Only gradients that this step has count, here and for a follower: of the others nobody can check the scale. Noise
        measured in this very step is what it is; where grids are held, their scales are older.
        """
        if self.is_calibrated:
            rise, measured = self._moved() if self.chooses else 0, self.table
        else:
            rise, measured = self._risen(), self.base
        for key, grid in self._grids.items():
            base = measured.sites.get(key)
            if key[0] == Kind.GRADIENT and is_noise_only(grid) and base is not None and is_noise_only(base):
                scales = base.scales.astype(np.int64) + rise
                if not np.array_equal(scales, grid.scales):
                    self._grids[key] = grid.with_scales(scales)

    def finish(self) -> bytes:
        """Return the step's encoded frame; ``table`` is then the table after the step."""
        self.table = GridTable(self._grids)
        if self.extra:
            self.payloads[SiteAddress(self.rank, 0, Kind.CALIBRATION, 0)] = CALIBRATED
        if self.table != self._before:
            self.payloads[SiteAddress(self.rank, 0, Kind.GRID, 0)] = self._before.diff(self.table)
        return encode_frame(Frame.of(self.payloads))


def outgrown_from(policy: Policy, base: SiteGrid | None, numel: int) -> int:
    """Return from which scale exponent on a gradient of ``numel`` elements is so large that its last calibration says nothing.

    Args:
        policy: the run's.
        base: its grid then. One that was noise only has outgrown it at its floor: it may be a signal, or noise that grew with
            what cancels in it. One of few elements that is mostly noise is as large as that happens to be, and never has.
        numel: its elements.
    """
    if base is None:
        return NEVER
    if is_noise_only(base):
        return int(base.scales.min()) + base.band
    return NEVER if is_quantum_noise(policy, base, numel) else int(base.scales.max()) + OUTGROWN + 1


def reaches(rms: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return which of these sizes are finite and have the scale exponent of their limit or a higher one."""
    finite = np.isfinite(rms)
    return finite & (scale_exponents(np.where(finite, rms, 0.0)) >= limits)
