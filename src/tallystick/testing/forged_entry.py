"""A cheat: one entry of the rounding log is forged."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tallystick.errors import InvalidInput
from tallystick.execution.job import JobSource
from tallystick.execution.noise.yardstick import Yardstick
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.session.session import Session
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import (
    Frame,
    Kind,
    Residues,
    SiteAddress,
    SparseEntries,
    decode,
    decode_residues,
    encode,
    encode_residues,
)
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.numerics.rounding import round_recorded
from tallystick.roles.judge import Defence
from tallystick.roles.replay import Replay, open_replay
from tallystick.roles.trainer import Order, record
from tallystick.run.documents import Specification
from tallystick.store.files import RunDirectory

FEW = 64  # elements that a budget of moves does not tell from honest ones


@dataclass
class _ForgingContext(RecordingContext):
    """Moves one element far from any boundary by a quantum, and logs it as if it had been ambiguous.

    Where a site is logged by residues, which are within reach of every element, moves all of them as far as these say.
    """

    forging: bool = False
    forged: Kind = Kind.GRADIENT

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        exact = x.clone() if self.forging and kind == self.forged else x
        super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)
        if not self.forging or kind != self.forged:
            return
        grid = self._grids[(kind, ordinal)]
        flat = out.reshape(-1)
        address = SiteAddress(self.rank, 0, kind, ordinal)
        payload = self.payloads.get(address)
        if grid.residue_bits:
            if payload is not None and x.numel() > FEW:
                self.forging = False
                scales = torch.from_numpy(grid.scales.astype(np.int64)).to(flat.device)
                far = max(1, (1 << grid.residue_bits - 1) - 1)  # quanta
                flat += far * torch.exp2((scales + grid.floor).double()).repeat_interleave(
                    x.numel() // scales.numel()
                ).to(flat)
                bits = grid.residue_bits
                ahead = (decode_residues(payload, x.numel(), bits).values.astype(np.int64) + far) % (
                    1 << bits
                )
                self.payloads[address] = encode_residues(Residues.of(ahead, bits))
            return
        # Of the elements whose nearest boundary lies above, so that the log leads where the forger goes.
        weight = flat.abs()
        if grid.precision == 0:
            each = torch.from_numpy(grid.scales.astype(np.int64)).to(flat.device) + grid.floor
            half = torch.exp2(each.double() - 1).repeat_interleave(x.numel() // each.numel())
            beyond = (exact.reshape(-1).double() + half).to(exact.dtype).reshape(exact.shape)
            round_recorded(beyond, grid, out=beyond, old=old, key=key, name=name)
            weight = torch.where(beyond.reshape(-1).to(flat.dtype) != flat, weight, 0.0)
        far = int(weight.argmax())
        if weight[far] == 0:
            return
        honest = SparseEntries.none(x.numel(), 1) if payload is None else decode(payload, x.numel(), 1)
        if far in honest.indexes:
            return
        self.forging = False
        block = far // (x.numel() // grid.scales.size)
        floor = int(grid.scales[block]) + grid.floor
        exponent = (
            floor
            if grid.precision == 0
            else max(int(np.frexp(abs(float(flat[far])))[1]) - grid.precision, floor)
        )
        flat[far] += 2.0**exponent
        indexes = np.append(honest.indexes, far)
        order = np.argsort(indexes)
        symbols = np.append(honest.symbols, 1)[order]
        self.payloads[address] = encode(SparseEntries(x.numel(), 1, indexes[order], symbols))

    def activation(self, kind: Kind, ordinal: int, x: Tensor, *, name: str) -> Tensor:
        out = super().activation(kind, ordinal, x, name=name)
        if not self.forging or kind != self.forged or out is x:
            return out
        flat = out.reshape(-1)
        far = int(flat.abs().argmax())
        address = SiteAddress(self.rank, self._micro_batch, kind, ordinal)
        payload = self.payloads.get(address)
        honest = SparseEntries.none(x.numel(), 1) if payload is None else decode(payload, x.numel(), 1)
        if flat[far] == 0 or far in honest.indexes:
            return out
        self.forging = False
        grid = self._grids[(kind, ordinal)]
        lowest = int(grid.scales[0]) + grid.floor
        flat[far] += 2.0 ** max(int(np.frexp(abs(float(flat[far])))[1]) - grid.precision, lowest)
        indexes = np.append(honest.indexes, far)
        order = np.argsort(indexes)
        symbols = np.append(honest.symbols, 1)[order]
        self.payloads[address] = encode(SparseEntries(x.numel(), 1, indexes[order], symbols))
        return out


@dataclass(frozen=True)
class ForgedEntry:
    """Writes a log entry for an element far from any boundary, to steer a weight.

    ``kind`` is that of its site: a gradient, or with policy ``leaf`` an activation or the gradient of one.
    """

    at: int
    kind: Kind = Kind.GRADIENT
    liar: ClassVar[str] = "trainer"

    def run(self, order: Order, out: RunDirectory) -> int:
        """Record honestly but for one forged entry at ``at``."""
        with _replaced_context(self.at, self.kind):
            record(order, out)
        return self.at

    def defence(self, source: JobSource) -> Defence:
        """Return the job that forges again when it repeats the step."""

        def defend(specification: Specification) -> Replay:
            replay = open_honest(specification, source)
            session: Any = replay.session
            follow = session.following_context

            def context(frame: bytes | Frame, yardstick: Yardstick | None = None, **more: Any) -> Any:
                if session.step != self.at:
                    return follow(frame, yardstick, **more)
                base = session.recording_context(session.table).base
                return _ForgingContext(
                    session.policy, session.table, current=session.table, base=base, rank=session.rank,
                    forging=True, forged=self.kind,
                )  # fmt: skip

            session.following_context = context
            return replay

        return defend


@contextmanager
def _replaced_context(at: int, kind: Kind) -> Generator[None]:
    honest = Session.recording_context

    def make(session: Session, before: GridTable) -> RecordingContext:
        base = honest(session, before).base
        return _ForgingContext(
            session.policy,
            before,
            current=session.table,
            base=base,
            rank=session.rank,
            forging=session.step == at,
            forged=kind,
        )

    Session.recording_context = make  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Session.recording_context = honest


def open_honest(specification: Specification, source: JobSource) -> Replay:
    """Return the job itself, ready to be repeated.

    Raises:
        InvalidInput: it cannot be.
    """
    replay = open_replay(specification, source)
    if not isinstance(replay, Replay):
        raise InvalidInput(f"the job cannot be repeated: {replay}")
    return replay
