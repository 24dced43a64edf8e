"""The judge of a log: an auditor objects to the trainer's log of a step before and after which both have the same states.

Such a log lies and moves nothing, so no game over states leads to it. The judge repeats the step from the agreed state under
the trainer's committed frame, as for a disputed state, and keeps three zones apart, each as wide as noise within the bands
can make it (spec/dispute.md 10):

- a rule is broken by the judge's own values, and its own measured noise cannot be the cause: the trainer loses;
- no rule is broken, and at the site that the auditor named nothing comes near to it, every limit being half of what it
  is: an honest auditor, whose values lie within a band of the judge's, cannot have seen what it says: the auditor loses;
- what lies in between blames nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tallystick.commit.state import Entry
from tallystick.dispute.terms import Ruling
from tallystick.dispute.verdict import LogObjection
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism
from tallystick.evidence.verification import quoted
from tallystick.execution.rounding.grids import activation_rule, is_noise_only, nearest_grid
from tallystick.execution.snapshot import load_state
from tallystick.execution.step import run_step, under_log
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.log import Kind, SiteAddress, SparseEntries, decode, decode_decision, decode_residues
from tallystick.numerics.nearest_tensors import follow_nearest
from tallystick.numerics.policy import move_budget
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.numerics.rounding import round_followed, round_followed_residues
from tallystick.roles.comparison import find_noisy_sites, is_excused, violations_of
from tallystick.roles.data_noise import REMEDY
from tallystick.roles.replay import Replay, adopting
from tallystick.roles.unlisted import UnlistedContext, is_blocked
from tallystick.run.transcript import Transcript

State = Mapping[str, Entry]


SERVED_NOW = (
    "the auditor had no log that it could follow, and what the trainer hands over now is the committed one and can be followed: "
    "audit again with that"
)
UNLISTED = (
    "the log leaves open on which side of a boundary an element lies: the auditor's may lie on the other"
)


@dataclass(frozen=True)
class LogRuling:
    """What the judge says of an objection to a log; ``outcome`` is ``fault`` or ``cannot_reproduce``."""

    ruling: Ruling
    outcome: str


def rule_on_log(
    frame_of: Callable[[int], bytes],
    transcript: Transcript,
    replay: Replay,
    objection: LogObjection,
    state: State | None,
) -> LogRuling:
    """Return who is at fault where the auditor objects to the log of a step; ``state`` is the one agreed on before it.

    ``frame_of`` gives the trainer's log of a step.

    The caller has made sure that both parties agree on the states before and after, and that the objection is about this run.
    """
    step = objection.step
    if state is None:
        return _nobody(f"step {step}: neither side can open the state both agree on")
    record = transcript.record(step)
    load_state(replay.session, state)
    try:
        frame = frame_of(step)
        context = _doubting(replay, frame)
        with adopting(replay.session, record), under_log():
            outcome = run_step(replay.session, replay.job, context)
        context.finish()
    except (InvalidInput, Mismatch) as problem:
        return LogRuling(Ruling("trainer", f"step {step}: the log cannot be followed: {problem}"), "fault")
    except Nondeterminism as problem:
        if not replay.ends_without(record, frame_of(step), lambda: load_state(replay.session, state)):
            return _nobody(f"step {step}: the judge cannot repeat the job's own step either: {problem}")
        why = str(problem).removeprefix(f"step {step}: ")
        return LogRuling(Ruling("trainer", f"step {step}: {why}"), "fault")
    breach = next((each for each in context.violations if each.is_of_policy), None)
    if breach is not None:
        return LogRuling(
            Ruling("trainer", f"step {step}: the log breaks a rule at {breach.site}: {breach.rule}"), "fault"
        )
    if outcome.batch != record.batch and replay.may_be_noise(step):
        return _nobody(
            f"step {step}: the data are not the judge's to the bit, so nor is what the log says of them; {REMEDY}"
        )
    found = violations_of(step, context.violations)
    if found:
        noisy = find_noisy_sites(replay, transcript, step, step, {step: frame}, state)
        held = next((deviation for deviation in found if not is_excused(deviation, noisy)), None)
        if held is None:
            return _nobody(
                f"step {step}: the judge's own noise can explain what it sees in the log: {noisy[0]}"
            )
        where = f"{held.subject}{'' if held.element is None else f', element {held.element}'}"
        reason = f"step {step}: the log breaks a rule at {where}: {held.own}"
        return LogRuling(Ruling("trainer", reason), "fault")
    if objection.site in {doubt.removeprefix(f"step {step}: ") for doubt in context.doubts | context.edges}:
        return _nobody(f"step {step}: {objection.site} lies too near a rule's limit to tell who is right")
    if objection.site == "log":
        return _nobody(f"step {step}: {SERVED_NOW}")
    if context.leaves_open:
        return _nobody(f"step {step}: {UNLISTED}")
    reason = f"step {step}: the auditor objects to {quoted(objection.site)}, and nothing there comes near to breaking a rule"
    return LogRuling(Ruling("auditor", reason), "fault")


def _nobody(reason: str) -> LogRuling:
    return LogRuling(Ruling("none", reason), "cannot_reproduce")


def _doubting(replay: Replay, frame: bytes) -> DoubtingContext:
    """Return the context that follows ``frame`` in the session's next step, as every follower's does, and notes doubts."""
    return replay.session.following_context(frame, form=DoubtingContext)


@dataclass
class DoubtingContext(UnlistedContext):
    """Follows a frame and notes, besides what breaks a rule, the sites where something breaks half of its limit.

    Attributes:
        doubts: their names, as violations name them.
    """

    doubts: set[str] = field(default_factory=set[str])

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        """Round as the log says, after asking for half of the reach."""
        grid = self.table.sites.get((kind, ordinal))
        payload = self.frame.find(SiteAddress(self.rank, 0, kind, ordinal))
        if grid is not None and payload is not None and x.numel() and is_blocked(grid, x, old):
            near = self._is_near(grid, payload, x, torch.empty_like(out), old, key, name)
            self.doubts |= {name} if near else set()
        super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)

    def _is_near(
        self, grid: SiteGrid, payload: bytes, x: Tensor, out: Tensor, old: Tensor | None, key: Key, name: str
    ) -> bool:
        try:
            bits = grid.residue_bits
            half = SiteGrid(
                grid.precision, grid.band - 1, grid.floor, grid.dithered, grid.scales, residue_bits=bits
            )
            if bits:
                residues = decode_residues(payload, x.numel(), bits)
                found = round_followed_residues(x, half, residues, out=out, key=key, name=name)
                return bool(found.violations) or 2 * found.moved > move_budget(grid, x.numel())
            entries = decode(payload, x.numel(), 1)
            return bool(round_followed(x, half, entries, out=out, old=old, key=key, name=name).violations)
        except InvalidInput:
            return True  # what half of the reach cannot be asked of is told by the whole one alone

    def _check_scales(self, kind: Kind, ordinal: int, grid: SiteGrid, x: Tensor, name: str) -> None:
        """Note a header that breaks a rule where all scales are an octave off."""
        try:
            octaves = [grid.with_scales(grid.scales.astype("int64") + octave) for octave in (-1, 1)]
            is_near = self._breaks(kind, ordinal, name, [(each, x) for each in octaves if grid.scales.size])
        except InvalidInput:
            is_near = True
        self.doubts |= {name} if is_near else set()
        super()._check_scales(kind, ordinal, grid, x, name)

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Take the logged branches, after asking for half of the reach."""
        if self._decision is None:
            return super().decide(numel, width, near, symbols, distance)
        exponent, entries = decode_decision(self._decision, numel, width)
        at = torch.from_numpy(entries.indexes).to(near.device)
        symbol = torch.from_numpy(entries.symbols).to(near.device)
        away = distance(torch.stack((at, symbol), dim=1))
        if not bool((away < math.ldexp(1.0, exponent)).all()):
            self.doubts.add(f"decision {self._ordinal} of micro-batch {self._micro_batch}")
        return super().decide(numel, width, near, symbols, distance)

    def activation(self, kind: Kind, ordinal: int, x: Tensor, *, name: str) -> Tensor:
        """Round as the log says, after asking for half of the reach."""
        grid = self.table.sites.get((kind, ordinal))
        payload = self.frame.find(SiteAddress(self.rank, self._micro_batch, kind, ordinal))
        if grid is not None and payload is not None and grid.scales.size == 1 and not is_noise_only(grid):
            whole = nearest_grid(activation_rule(self.policy), grid)
            half = replace(
                whole, band=whole.band - 1, margin=None if whole.margin is None else whole.margin - 1
            )
            entries: SparseEntries = decode(payload, x.numel(), 1)
            found = follow_nearest(x, half, entries, out=torch.empty_like(x), name=name)
            if found.violations or len(entries) > found.budget:
                self.doubts.add(name)
        return super().activation(kind, ordinal, x, name=name)

    def _check_activation_scale(self, place: tuple[Kind, int], grid: SiteGrid, x: Tensor, name: str) -> None:
        super()._check_activation_scale(place, grid, x, name)
        noted = len(self.violations)
        super()._check_activation_scale(place, grid.with_scales(grid.scales.astype("int64") + 1), x, name)
        if len(self.violations) > noted:
            self.doubts.add(name)
            del self.violations[noted:]
