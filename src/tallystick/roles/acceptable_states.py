"""The states after one step that honest arithmetic can give, and how a claimed one is held against them.

A state is acceptable if every element is a value that honest arithmetic within the declared bands can give: where the
judge's own gradient or state lies within the band of a rounding boundary, both neighbours will do. (This holds element
by element, so the optimizer must be elementwise; every optimizer that ``policy`` accepts today is.) Where the
optimizer's arithmetic is portable the state has no bands: for each choice of the gradient one state is acceptable.

Whose log it is chose already where that has an entry: its own state has to lie on the side which the log names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tallystick.commit.state import Entry
from tallystick.execution.snapshot import copied_state, load_state
from tallystick.execution.step import run_step, under_log
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.log import Kind, SiteAddress, decode
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.numerics.rounding import Candidates, find_candidates
from tallystick.roles.audit_report import Deviation
from tallystick.roles.comparison import compare_states
from tallystick.roles.replay import Replay
from tallystick.roles.unlisted import UnlistedContext, is_blocked

State = Mapping[str, Entry]
Choices = Mapping[tuple[int, int], Candidates]


def _has_form_of(entry: Entry | None, other: Entry | None) -> bool:
    return (
        entry is not None and other is not None and (entry.dtype, entry.shape) == (other.dtype, other.shape)
    )


class AcceptableStates:
    """The states after one step that honest arithmetic within the bands can give; the session stands before it."""

    def __init__(self, replay: Replay, frame: bytes) -> None:
        before = copied_state(replay.session)
        self.step = replay.session.step
        session = replay.session
        context = session.following_context(frame, form=_TwoWayContext)
        with under_log():
            self.outcome = run_step(session, replay.job, context)
        context.finish()
        session.settle(context)
        self.violations = context.violations
        self.entries = copied_state(session)
        self.values = context.candidates
        self.unlogged = context.unlogged
        self.leaves_open = context.leaves_open
        self.flipped: dict[tuple[int, int], Candidates] = {}
        self.flipped_unlogged = self.flipped
        if any(kind == Kind.GRADIENT and c.index.size for (kind, _), c in context.candidates.items()):
            load_state(session, before)
            other = session.following_context(frame, form=_TwoWayContext, flip=True)
            with under_log():
                run_step(session, replay.job, other)
            self.flipped, self.flipped_unlogged = other.candidates, other.unlogged
            self.other_entries = copied_state(session)
        else:
            self.other_entries = self.entries
        self.names = ["parameter", *session.trained.keys]
        self.parameters = [name for name, _ in session.parameters]
        self.buffers: dict[str, list[tuple[int, int]]] = {}
        for site in session.sites:
            if site.kind in (Kind.BUFFER, Kind.STATE):
                self.buffers.setdefault(site.name, []).append((int(site.kind), site.ordinal))

    def find_fault(self, state: State, *, has_logged: bool = False) -> Deviation | None:
        """Return the first difference between ``state`` and what is acceptable, or None; ``has_logged`` of the log's writer."""
        _, differences = compare_states(self.step, self.entries, state)
        if not differences:
            return None
        trained = {f"model/{name}": position for position, name in enumerate(self.parameters)}
        trained |= {
            f"optimizer/{name}/{key}": position
            for position, name in enumerate(self.parameters)
            for key in self.names[1:]
        }
        for difference in differences:
            position = trained.get(difference.subject)
            if not _has_form_of(state.get(difference.subject), self.entries.get(difference.subject)):
                return difference
            if position is None:
                if not self._buffer_is_acceptable(difference.subject, state, has_logged):
                    return difference
            elif self._find_bad_element(position, state, has_logged) is not None:
                return difference
        return None

    def _choices(self, has_logged: bool) -> tuple[Choices, Choices]:
        """Return what may be either of two values, for each of the two gradients."""
        if has_logged:
            return self.unlogged, self.flipped_unlogged
        return self.values, self.flipped

    def _buffer_is_acceptable(self, subject: str, state: State, has_logged: bool) -> bool:
        theirs, (values, flipped) = _floats(state[subject]), self._choices(has_logged)
        found = np.zeros(theirs.shape, dtype=bool)
        for place in self.buffers.get(subject, []):
            # An average follows the weights, so it too has a value for each of the two gradients.
            for entries, choices in ((self.entries, values), (self.other_entries, flipped)):
                own = _floats(entries[subject])
                if own.shape != theirs.shape:
                    return False
                found |= _matches(own, theirs, choices.get(place))
        return bool(found.all())

    def _find_bad_element(self, position: int, state: State, has_logged: bool) -> int | None:
        """Return the first element of a parameter, together with its optimizer state, that neither gradient choice explains."""
        plain: np.ndarray | None = None
        other: np.ndarray | None = None
        values, others = self._choices(has_logged)
        for offset, key in enumerate(self.names):
            name = self.parameters[position]
            subject = f"model/{name}" if key == "parameter" else f"optimizer/{name}/{key}"
            if subject not in self.entries:
                continue
            own, flipped = _floats(self.entries[subject]), _floats(self.other_entries[subject])
            if subject not in state or len(state[subject].data) != len(self.entries[subject].data):
                return 0
            theirs = _floats(state[subject])
            place = (int(Kind.STATE), position * len(self.names) + offset)
            first = _matches(own, theirs, values.get(place))
            second = _matches(flipped, theirs, others.get(place))
            if plain is not None and own.size != plain.size:
                if not (first | second).all():
                    return 0  # a number of the whole tensor or of a row, which no element's gradient chooses
                continue
            plain = first if plain is None else plain & first
            other = second if other is None else other & second
        if plain is None or other is None:
            return None
        gradient = values.get((int(Kind.GRADIENT), position))
        may_flip = np.zeros(plain.shape, dtype=bool)
        if gradient is not None and gradient.index.size:
            may_flip[gradient.index] = True
        bad = np.flatnonzero(~(plain | (other & may_flip)))
        return int(bad[0]) if bad.size else None


def _floats(entry: Entry) -> np.ndarray:
    return (
        np.frombuffer(entry.data, dtype="<f4")
        if entry.dtype == "F32"
        else np.frombuffer(entry.data, dtype=np.uint8)
    )


def _matches(own: np.ndarray, theirs: np.ndarray, candidates: Candidates | None) -> np.ndarray:
    bits = "<u4" if own.dtype.itemsize == 4 else "u1"
    same = own.view(bits) == theirs.view(bits)
    if candidates is not None and candidates.index.size:
        at = candidates.index
        value = theirs[at].astype(np.float64)
        same[at] |= (value == candidates.lower) | (value == candidates.upper)
    return same


def _unlogged(found: Candidates, grid: SiteGrid, payload: bytes | None, n: int) -> Candidates:
    """Return the candidates of which a site's ``payload`` in a log does not say which way they went; residues say it of all."""
    if payload is None:
        return found
    named = found.index if grid.residue_bits else decode(payload, n, 1).indexes
    keep = ~np.isin(found.index, named)
    return Candidates(found.index[keep], found.lower[keep], found.upper[keep])


@dataclass
class _TwoWayContext(UnlistedContext):
    """Follows a frame and notes, for every site but activations, which elements could have gone the other way.

    ``unlogged`` are those on which the frame says nothing. With ``flip`` each such gradient element does go the other way.
    """

    flip: bool = False
    candidates: dict[tuple[int, int], Candidates] = field(default_factory=dict[tuple[int, int], Candidates])
    unlogged: dict[tuple[int, int], Candidates] = field(default_factory=dict[tuple[int, int], Candidates])

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        """Round as the log says, after noting both values of every element near a boundary."""
        grid = self.table.sites.get((kind, ordinal))
        found: Candidates | None = None
        if grid is not None and is_blocked(grid, x, old):
            found = find_candidates(x, grid, old=old, key=key)
            payload = self.frame.find(SiteAddress(self.rank, 0, kind, ordinal))
            self.candidates[(int(kind), ordinal)] = found
            self.unlogged[(int(kind), ordinal)] = _unlogged(found, grid, payload, x.numel())
        super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)
        if self.flip and kind == Kind.GRADIENT and found is not None and found.index.size:
            flat = out.reshape(-1)
            at = torch.from_numpy(found.index).to(flat.device)
            lower, upper = torch.from_numpy(found.lower).to(flat), torch.from_numpy(found.upper).to(flat)
            flat[at] = torch.where(flat[at] == lower, upper, lower)
