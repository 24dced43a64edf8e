"""Steers inside the bands at maximum strength: every element that a log may choose is chosen to one side.

Nothing here breaks a rule, so nobody is accused; the auditor does not accept more moves than its own noise explains. Where
there is too little to choose for that (fp64), the question is how far it leads: the script measures it against an honest
recording, and holds it to two bounds. A step's gradient must not move by more than the steer that the audit says a log
could have given. And the weights must not end farther from the honest ones than all these moves together push them:
with SGD a move d of a step's gradient moves the weights by rate * d / (1 - momentum) in the end, so steps of gradients g
under a steer s by at most s * sum(rate * |g|) / (1 - momentum). What training makes of a push is not in that bound; on
this run it does not add to it.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import torch
from stage import STEPS, Stage, audit, main
from torch import Tensor

from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.session.session import Session
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import (
    Kind,
    Residues,
    SiteAddress,
    SparseEntries,
    decode_residues,
    encode,
    encode_residues,
)
from tallystick.numerics.policy import entry_budget, move_budget
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.numerics.rounding import find_candidates
from tallystick.roles.trainer import record
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must


class SteeringContext(RecordingContext):
    """Takes the upper value wherever a follower will obey, up to the budget of entries or of moved elements."""

    steered = 0
    squares = 0.0
    pushes: ClassVar[list[float]] = []  # |g| of each step

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        source = x.clone() if out is x else x
        super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)
        grid = self._grids[(kind, ordinal)]
        if kind != Kind.GRADIENT or is_noise_only(grid):
            return
        self.squares += float(source.double().square().sum())
        found = find_candidates(source, grid, old=old, key=key)
        flat, upper = out.reshape(-1), torch.from_numpy(found.upper).to(out)
        address = SiteAddress(self.rank, 0, kind, ordinal)
        if grid.residue_bits:
            # An honest log between two machines moves a few elements; all that a follower lets pass go upwards.
            apart = torch.from_numpy(found.index)[flat[torch.from_numpy(found.index)] != upper]
            at = apart[: move_budget(grid, x.numel())].numpy()
            chosen = np.isin(found.index, at)
            flat[torch.from_numpy(at)] = upper[torch.from_numpy(chosen)]
            bits = grid.residue_bits
            values = decode_residues(self.payloads[address], x.numel(), bits).values
            values[at] = (values[at].astype(np.int64) + 1) % (1 << bits)
            self.payloads[address] = encode_residues(Residues.of(values, bits))
            SteeringContext.steered += int(at.size)
            return
        at = found.index[: entry_budget(grid, x.numel())]
        if at.size:
            flat[torch.from_numpy(at)] = upper[: at.size]
            entries = SparseEntries(x.numel(), 1, at, np.ones(at.size, dtype=np.int64))
            self.payloads[address] = encode(entries)
            SteeringContext.steered += int(at.size)
        else:
            self.payloads.pop(address, None)

    def finish(self) -> bytes:
        SteeringContext.pushes.append(self.squares**0.5)
        return super().finish()


@contextmanager
def steering() -> Generator[None]:
    honest = Session.recording_context

    def make(session: Session, before: GridTable) -> RecordingContext:
        base = honest(session, before).base
        return SteeringContext(session.policy, before, current=session.table, base=base, rank=session.rank)

    Session.recording_context = make
    try:
        yield
    finally:
        Session.recording_context = honest


def weights(run: RunDirectory, done: int) -> np.ndarray:
    entries = run.load_checkpoint(done)
    names = sorted(n for n in entries if n.startswith("model/") and "/buffer/" not in n)
    return np.concatenate([np.frombuffer(bytes(entries[n].data), "<f4") for n in names]).astype(np.float64)


def attack(stage: Stage) -> str:
    honest = stage.honest_run("honest")
    start, end = weights(honest, 0), weights(honest, STEPS)
    trained = float(np.linalg.norm(end - start))
    SteeringContext.steered, SteeringContext.pushes = 0, []
    with steering():
        record(stage.order(), stage.run())
    moved = float(np.linalg.norm(weights(stage.run(), STEPS) - end)) / trained
    report = audit(stage.run(), stage.source)
    freedom = report.freedom
    if report.verdict == "not_accepted":
        return (
            f"the audit, which accepts no such log: {report.first}; {freedom.moved} roundings moved, noise explains "
            f"{freedom.move_budget}; the weights ended {moved:.3g} of the distance trained from the honest ones"
        )
    must(report.verdict == "match", f"the audit says {report.verdict}: {report.first}")
    must(
        freedom.largest_move <= freedom.largest_steer,
        f"a step's gradient moved by {freedom.largest_move:.3g}, the audit allows {freedom.largest_steer:.3g}",
    )
    rates = [{n: v for _, n, v in r.schedule} for r in stage.run().load_transcript().records]
    numbers = [(float.fromhex(str(r["lr"])), float.fromhex(str(r["momentum"]))) for r in rates]
    path = sum(
        lr / (1 - momentum) * g for (lr, momentum), g in zip(numbers, SteeringContext.pushes, strict=True)
    )
    bound = freedom.largest_steer * path / trained
    must(
        moved <= bound,
        f"the weights ended {moved:.3g} of the distance trained away, the bound is {bound:.3g}",
    )
    return (
        f"the bound, not a verdict: {SteeringContext.steered} choices in {STEPS} steps, all within the rules; the audit allows "
        f"a steer of {freedom.largest_steer:.3g} of a step's gradient, this log used {freedom.largest_move:.3g}; the weights "
        f"ended {moved:.3g} of the distance trained from the honest ones, the bound is {bound:.3g}"
    )


if __name__ == "__main__":
    main(attack, __doc__)
