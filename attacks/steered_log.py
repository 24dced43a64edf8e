"""Steers inside the bands at maximum strength: every element that a log may choose is chosen to one side.

Nothing here breaks a rule, so nobody is accused; the question is how far it leads. The script measures it
against two honest recordings, one of them with last-bit noise, and holds the audit to what it prints: the
largest move of a step's gradient must not exceed the steer that the audit says a log could have given.
"""

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch
from stage import STEPS, Stage, audit, main, must
from torch import Tensor

from tallystick.execution.session import Session
from tallystick.execution.tape import RecordTape, entry_budget, is_noise_only
from tallystick.numerics.log import GridTable, Kind, SiteAddress, SparseEntries, encode
from tallystick.numerics.rounding import NO_KEY, Key, find_candidates
from tallystick.roles.trainer import record
from tallystick.store.files import RunDirectory


class SteeringTape(RecordTape):
    """Takes the upper value wherever a follower will obey, up to the budget of entries."""

    steered = 0

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        source = x.clone() if out is x else x
        super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)
        grid = self._grids[(kind, ordinal)]
        if kind != Kind.GRADIENT or grid.parity or is_noise_only(grid):
            return
        found = find_candidates(source, grid, old=old, key=key)
        most = entry_budget(grid, x.numel())
        at, upper = found.index[:most], found.upper[:most]
        if at.size:
            flat = out.reshape(-1)
            flat[torch.from_numpy(at)] = torch.from_numpy(upper).to(flat)
            entries = SparseEntries(x.numel(), 1, at, np.ones(at.size, dtype=np.int64))
            self.payloads[SiteAddress(self.rank, 0, kind, ordinal)] = encode(entries)
            SteeringTape.steered += int(at.size)
        else:
            self.payloads.pop(SiteAddress(self.rank, 0, kind, ordinal), None)


@contextmanager
def steering() -> Generator[None]:
    honest = Session.record_tape

    def make(session: Session, before: GridTable) -> RecordTape:
        base = honest(session, before).base
        return SteeringTape(session.policy, before, current=session.table, base=base, rank=session.rank)

    Session.record_tape = make
    try:
        yield
    finally:
        Session.record_tape = honest


def weights(run: RunDirectory, done: int) -> np.ndarray:
    entries = run.load_checkpoint(done)
    names = sorted(n for n in entries if n.startswith("model/") and "/buffer/" not in n)
    return np.concatenate([np.frombuffer(bytes(entries[n].data), "<f4") for n in names]).astype(np.float64)


def attack(stage: Stage) -> str:
    honest = stage.honest_run("honest")
    start, end = weights(honest, 0), weights(honest, STEPS)
    trained = float(np.linalg.norm(end - start))
    with steering():
        record(stage.order(), stage.run())
    moved = float(np.linalg.norm(weights(stage.run(), STEPS) - end)) / trained
    report = audit(stage.run(), stage.source)
    freedom = report.freedom
    if report.verdict != "match":
        return f"audit ({report.verdict}: {report.first}), before the weights could go anywhere"
    must(
        freedom.largest_move <= freedom.largest_steer,
        f"a step's gradient moved by {freedom.largest_move:.3g}, the audit allows {freedom.largest_steer:.3g}",
    )
    must(moved < 0.5, f"the weights ended {moved:.3g} of the distance trained from the honest ones")
    return (
        f"the bound, not a verdict: {SteeringTape.steered} entries in {STEPS} steps, all within the rules; "
        f"the audit prints a steer of at most {freedom.largest_steer:.3g} of a step's gradient, this log used "
        f"{freedom.largest_move:.3g}, and the weights ended {moved:.3g} of the distance trained from the honest ones"
    )


if __name__ == "__main__":
    main(attack, __doc__)
